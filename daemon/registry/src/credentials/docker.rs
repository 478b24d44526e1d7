//! Docker's credentials: `config.json` and the credential helpers that it names.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use blobd_store_format::host::DOCKER_HUB;
use serde::Deserialize;

use super::{Credential, CredentialError, Found, RegistryHost, Secret};

/// Looks up a host in Docker's configuration. Finds nothing if there is no such file.
pub(super) fn look_up(path: &Path, host: &RegistryHost) -> Result<Found, CredentialError> {
    let Some(text) = super::read_if_there(path)? else { return Ok(Found::Nothing) };
    let malformed = |what| CredentialError::Malformed { path: path.to_owned(), what };
    let config: Config =
        serde_json::from_slice(&text).map_err(|error| malformed(super::error_position(&error)))?;
    let entry = config.auths.into_iter().find(|(name, _)| is_name_of(name, host)).map(|(_, entry)| entry);
    let entry = entry.unwrap_or_default();
    if let Some(credential) = entry.credential().map_err(|what| malformed(format!("{host}: {what}")))? {
        return Ok(Found::Credential(credential, path.display().to_string()));
    }
    let helper = config.cred_helpers.into_iter().find(|(name, _)| is_name_of(name, host));
    let helper = helper.map(|(_, helper)| helper).or(config.creds_store);
    match helper.filter(|helper| !helper.is_empty()) {
        None => Ok(Found::Nothing),
        Some(helper) if is_program_suffix(&helper) => Ok(Found::Helper(helper)),
        Some(_) => Err(malformed(
            "credential helper: expected letters, digits, '.', '_' and '-', found other characters"
                .to_owned(),
        )),
    }
}

/// Runs the program `docker-credential-NAME`.
pub(super) fn run_helper(name: &str, host: &RegistryHost) -> Result<Option<Credential>, CredentialError> {
    run_program(Path::new(&format!("docker-credential-{name}")), name, host)
}

fn run_program(
    program: &Path,
    name: &str,
    host: &RegistryHost,
) -> Result<Option<Credential>, CredentialError> {
    #[derive(Deserialize)]
    #[serde(rename_all = "PascalCase")]
    struct Response {
        username: String,
        secret: String,
    }
    let failed = |reason: &str| CredentialError::Helper { name: name.to_owned(), reason: reason.to_owned() };
    let mut command = Command::new(program);
    command.arg("get").stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
    let mut child = command.spawn().map_err(|error| failed(&format!("cannot run: {error}")))?;
    let output = exchange(&mut child, server_name(host).as_bytes());
    // The program may still be running. Either its output is complete, or it has run out of time.
    let _ = child.kill();
    let status = child.wait().map_err(|error| failed(&error.to_string()))?;
    let output = output.ok_or_else(|| failed("no response in 20 s"))?;
    match serde_json::from_slice::<Response>(&output) {
        Ok(response) if response.username == "<token>" => Err(failed(IDENTITY_TOKEN)),
        Ok(response) => {
            Ok(Some(Credential::Password { user: response.username, password: Secret::new(response.secret) }))
        }
        // The helper protocol's response when it has no credentials for the host.
        Err(_) if output.starts_with(b"credentials not found") => Ok(None),
        Err(_) => Err(failed(&format!("no credentials in its response ({status})"))),
    }
}

/// Writes the request and reads the response, within a time limit.
fn exchange(child: &mut Child, request: &[u8]) -> Option<Vec<u8>> {
    // A program that does not read its input may still respond.
    let _ = child.stdin.take()?.write_all(request);
    let stdout = child.stdout.take()?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut response = Vec::new();
        if stdout.take(MAX_RESPONSE_BYTES).read_to_end(&mut response).is_ok() {
            let _ = sender.send(response);
        }
    });
    receiver.recv_timeout(HELPER_TIME_LIMIT).ok()
}

/// How long a pull waits for a helper, which may ask the user to unlock a key ring.
const HELPER_TIME_LIMIT: Duration = Duration::from_secs(20);
/// A response contains a user name and a token of a few KiB.
const MAX_RESPONSE_BYTES: u64 = 64 << 10;
/// Docker's name for the entry of Docker Hub.
const DOCKER_HUB_ENTRY: &str = "https://index.docker.io/v1/";
const IDENTITY_TOKEN: &str =
    "an identity token, which blobd cannot use; give it a user and an access token with `blobd login`";

#[derive(Deserialize)]
struct Config {
    #[serde(default)]
    auths: BTreeMap<String, Entry>,
    #[serde(default, rename = "credHelpers")]
    cred_helpers: BTreeMap<String, String>,
    #[serde(rename = "credsStore")]
    creds_store: Option<String>,
}

#[derive(Default, Deserialize)]
struct Entry {
    auth: Option<String>,
    username: Option<String>,
    password: Option<String>,
    #[serde(rename = "identitytoken")]
    identity_token: Option<String>,
}

impl Entry {
    /// The entry's credential; `None` for an empty entry, which Docker writes when a helper has the credential.
    fn credential(self) -> Result<Option<Credential>, &'static str> {
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        if filled(self.identity_token).is_some() {
            return Err(IDENTITY_TOKEN);
        }
        let (user, password) = match (filled(self.auth), filled(self.username), filled(self.password)) {
            (Some(auth), _, _) => {
                let plain = STANDARD.decode(auth.trim()).ok().and_then(|plain| String::from_utf8(plain).ok());
                let plain = plain.ok_or("auth is not base64 of a text")?;
                let (user, password) = plain.split_once(':').ok_or("auth has no user and password")?;
                (user.to_owned(), password.trim_end_matches('\0').to_owned())
            }
            (None, Some(user), Some(password)) => (user, password),
            _ => return Ok(None),
        };
        Ok(Some(Credential::Password { user, password: Secret::new(password) }))
    }
}

/// Whether an entry belongs to a registry. Docker stores other secrets of Docker Hub under longer paths.
fn is_name_of(name: &str, host: &RegistryHost) -> bool {
    let plain = name.split_once("://").map_or(name, |(_scheme, rest)| rest);
    let path = plain.split_once('/').map_or("", |(_host, path)| path);
    matches!(path.trim_end_matches('/'), "" | "v1" | "v2")
        && name.parse::<RegistryHost>().is_ok_and(|named| named == *host)
}

fn server_name(host: &RegistryHost) -> &str {
    if host.as_str() == DOCKER_HUB { DOCKER_HUB_ENTRY } else { host.as_str() }
}

/// Whether the name is safe to append to a program's name.
fn is_program_suffix(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn look_up_in(json: &str, host: &str) -> Result<Found, CredentialError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, json).unwrap();
        look_up(&path, &host.parse().unwrap())
    }

    #[track_caller]
    fn assert_found(json: &str, host: &str, expected: &str) {
        let Ok(Found::Credential(Credential::Password { user, password }, _)) = look_up_in(json, host) else {
            panic!("{host} in {json}")
        };
        assert_eq!(format!("{user}:{}", password.reveal()), expected);
    }

    #[test]
    fn entries_written_by_docker_are_read() {
        let auth = STANDARD.encode("me:p:w");
        let hub = format!(r#"{{"auths":{{"https://index.docker.io/v1/":{{"auth":"{auth}"}}}},"x":1}}"#);
        assert_found(&hub, "docker.io", "me:p:w");
        assert_found(&hub, "registry-1.docker.io", "me:p:w");
        let plain = r#"{"auths":{"r.example:5000":{"username":"me","password":"x","email":"e"}}}"#;
        assert_found(plain, "r.example:5000", "me:x");
        let padded = format!(r#"{{"auths":{{"R.example":{{"auth":"{}"}}}}}}"#, STANDARD.encode("me:x\0\0"));
        assert_found(&padded, "r.example", "me:x");
        for (json, host) in [
            (hub.as_str(), "auth.docker.io"),
            (plain, "r.example"),
            ("{}", "r.example"),
            (r#"{"auths":{"r":{}}}"#, "r"),
        ] {
            assert!(matches!(look_up_in(json, host), Ok(Found::Nothing)), "{json}");
        }
        let other =
            r#"{"auths":{"https://index.docker.io/v1/access-token":{"username":"a","password":"b"}}}"#;
        assert!(matches!(look_up_in(other, "docker.io"), Ok(Found::Nothing)));
        let absent = look_up(Path::new("/nonexistent/config.json"), &"r.example".parse().unwrap());
        assert!(matches!(absent, Ok(Found::Nothing)));
    }

    #[test]
    fn helpers_are_found_and_the_hosts_own_comes_first() {
        let json = r#"{"auths":{"a.example":{}},"credsStore":"desktop","credHelpers":{"b.example":"pass"}}"#;
        for (host, name) in [("a.example", "desktop"), ("b.example", "pass"), ("docker.io", "desktop")] {
            assert!(matches!(look_up_in(json, host), Ok(Found::Helper(found)) if found == name), "{host}");
        }
    }

    #[test]
    fn malformed_configurations_are_refused_without_their_content() {
        for json in [
            "hunter2",
            r#"{"auths":["hunter2"]}"#,
            r#"{"auths":{"r.example":"hunter2"}}"#,
            r#"{"auths":{"r.example":{"auth":"hunter2!"}}}"#,
            r#"{"auths":{"r.example":{"auth":"aHVudGVyMg=="}}}"#,
            r#"{"auths":{"r.example":{"auth":"/////w=="}}}"#,
            r#"{"auths":{"r.example":{"auth":"","identitytoken":"hunter2"}}}"#,
            r#"{"credsStore":"../hunter2"}"#,
        ] {
            let error = look_up_in(json, "r.example").unwrap_err();
            assert!(error.to_string().contains("config.json"), "{error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn helper_is_run_as_docker_runs_it() {
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/src/testdata/docker-credential-fixture");
        let ask = |host: &str| run_program(Path::new(program), "fixture", &host.parse().unwrap());
        for (host, name) in [("r.example", "me"), ("docker.io", "hub")] {
            let found = ask(host).unwrap();
            assert!(
                matches!(found, Some(Credential::Password { user, password }) if user == name && password.reveal() == "hunter2")
            );
        }
        assert!(ask("unknown.example").unwrap().is_none());
        for (host, what) in [
            ("identity.example", "identity token"),
            ("odd.example", "no credentials"),
            ("silent.example", "no credentials"),
        ] {
            let error = ask(host).unwrap_err();
            assert!(error.to_string().contains(what), "{error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn absent_helper_is_named() {
        let error = run_helper("of-no-machine", &"r.example".parse().unwrap()).unwrap_err().to_string();
        assert!(error.starts_with("docker-credential-of-no-machine: cannot run: "), "{error}");
    }
}
