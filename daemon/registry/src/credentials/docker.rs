//! What `docker login` has left: `config.json`, and the helper programs that it names.

use std::collections::BTreeMap;
use std::io::{Read as _, Write as _};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use serde::Deserialize;

use super::host::DOCKER_HUB;
use super::{Credential, CredentialError, RegistryHost, Secret};

/// Where Docker keeps the credentials of a host.
#[derive(Debug)]
pub(super) enum Kept {
    /// Nowhere.
    Nowhere,
    /// In the file.
    Here(Credential),
    /// With the program `docker-credential-NAME`.
    WithHelper(String),
}

/// Looks a host up in Docker's configuration. A file that is not there keeps nothing.
pub(super) fn look_up(path: &Path, host: &RegistryHost) -> Result<Kept, CredentialError> {
    let Some(text) = super::read_if_there(path)? else { return Ok(Kept::Nowhere) };
    let malformed = |what| CredentialError::Malformed { path: path.to_owned(), what };
    let config: Config = serde_json::from_slice(&text).map_err(|error| malformed(super::place(&error)))?;
    let entry = config.auths.into_iter().find(|(name, _)| is_name_of(name, host)).map(|(_, entry)| entry);
    let entry = entry.unwrap_or_default();
    if let Some(credential) = entry.credential().map_err(|what| malformed(format!("{host}: {what}")))? {
        return Ok(Kept::Here(credential));
    }
    let helper = config.cred_helpers.into_iter().find(|(name, _)| is_name_of(name, host));
    let helper = helper.map(|(_, helper)| helper).or(config.creds_store);
    match helper.filter(|helper| !helper.is_empty()) {
        None => Ok(Kept::Nowhere),
        Some(helper) if is_program_suffix(&helper) => Ok(Kept::WithHelper(helper)),
        Some(_) => Err(malformed("credential helper: letters, digits, '.', '_' and '-' expected".to_owned())),
    }
}

/// Asks the program `docker-credential-NAME`. One that knows nothing fails, as all failures do.
pub(super) fn ask_helper(name: &str, host: &RegistryHost) -> Result<Option<Credential>, CredentialError> {
    ask_program(Path::new(&format!("docker-credential-{name}")), name, host)
}

fn ask_program(
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
    let output = converse(&mut child, server_name(host).as_bytes());
    // Whatever it still does, nobody waits for it.
    let _ = child.kill();
    let status = child.wait().map_err(|error| failed(&error.to_string()))?;
    let output = output.ok_or_else(|| failed("no answer in 20 s"))?;
    match serde_json::from_slice::<Response>(&output) {
        Ok(answer) if answer.username == "<token>" => Err(failed(IDENTITY_TOKEN)),
        Ok(answer) => {
            Ok(Some(Credential::Password { user: answer.username, password: Secret::new(answer.secret) }))
        }
        // The protocol's way to say that there are none.
        Err(_) if output.starts_with(b"credentials not found") => Ok(None),
        Err(_) => Err(failed(&format!("no credentials in its answer ({status})"))),
    }
}

/// Writes the question and reads the answer, which must be there in time.
fn converse(child: &mut Child, question: &[u8]) -> Option<Vec<u8>> {
    // A program that does not read answers all the same, or not at all.
    let _ = child.stdin.take()?.write_all(question);
    let stdout = child.stdout.take()?;
    let (sender, receiver) = mpsc::channel();
    std::thread::spawn(move || {
        let mut answer = Vec::new();
        if stdout.take(MAX_ANSWER_BYTES).read_to_end(&mut answer).is_ok() {
            let _ = sender.send(answer);
        }
    });
    receiver.recv_timeout(HELPER_PATIENCE).ok()
}

/// A helper may ask the user to unlock a key ring; a pull does not wait longer than this.
const HELPER_PATIENCE: Duration = Duration::from_secs(20);
/// Answers have a user name and a token of some KiB.
const MAX_ANSWER_BYTES: u64 = 64 << 10;
/// Docker Hub's entry has a name of its own.
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
    /// What the entry holds; with a helper it is there and empty.
    fn credential(self) -> Result<Option<Credential>, &'static str> {
        let filled = |text: Option<String>| text.filter(|text| !text.is_empty());
        if filled(self.identity_token).is_some() {
            return Err(IDENTITY_TOKEN);
        }
        let (user, password) = match (filled(self.auth), filled(self.username), filled(self.password)) {
            (Some(auth), _, _) => {
                let plain = STANDARD.decode(auth.trim()).ok().and_then(|plain| String::from_utf8(plain).ok());
                let plain = plain.ok_or("auth is no base64 of a text")?;
                let (user, password) = plain.split_once(':').ok_or("auth has no user and password")?;
                (user.to_owned(), password.trim_end_matches('\0').to_owned())
            }
            (None, Some(user), Some(password)) => (user, password),
            _ => return Ok(None),
        };
        Ok(Some(Credential::Password { user, password: Secret::new(password) }))
    }
}

/// Whether an entry is for a registry. Docker keeps other things of the Hub under longer paths.
fn is_name_of(name: &str, host: &RegistryHost) -> bool {
    let plain = name.split_once("://").map_or(name, |(_scheme, rest)| rest);
    let path = plain.split_once('/').map_or("", |(_host, path)| path);
    matches!(path.trim_end_matches('/'), "" | "v1" | "v2")
        && name.parse::<RegistryHost>().is_ok_and(|named| named == *host)
}

fn server_name(host: &RegistryHost) -> &str {
    if host.as_str() == DOCKER_HUB { DOCKER_HUB_ENTRY } else { host.as_str() }
}

/// Whether a helper's name can be nothing but the end of a program's name.
fn is_program_suffix(name: &str) -> bool {
    name.bytes().all(|byte| byte.is_ascii_alphanumeric() || b"._-".contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kept(json: &str, host: &str) -> Result<Kept, CredentialError> {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("config.json");
        std::fs::write(&path, json).unwrap();
        look_up(&path, &host.parse().unwrap())
    }

    #[track_caller]
    fn assert_kept(json: &str, host: &str, expected: &str) {
        let Ok(Kept::Here(Credential::Password { user, password })) = kept(json, host) else {
            panic!("{host} in {json}")
        };
        assert_eq!(format!("{user}:{}", password.reveal()), expected);
    }

    #[test]
    fn entries_as_docker_writes_them() {
        let auth = STANDARD.encode("me:p:w");
        let hub = format!(r#"{{"auths":{{"https://index.docker.io/v1/":{{"auth":"{auth}"}}}},"x":1}}"#);
        assert_kept(&hub, "docker.io", "me:p:w");
        assert_kept(&hub, "registry-1.docker.io", "me:p:w");
        let plain = r#"{"auths":{"r.example:5000":{"username":"me","password":"x","email":"e"}}}"#;
        assert_kept(plain, "r.example:5000", "me:x");
        let padded = format!(r#"{{"auths":{{"R.example":{{"auth":"{}"}}}}}}"#, STANDARD.encode("me:x\0\0"));
        assert_kept(&padded, "r.example", "me:x");
        for (json, host) in [
            (hub.as_str(), "auth.docker.io"),
            (plain, "r.example"),
            ("{}", "r.example"),
            (r#"{"auths":{"r":{}}}"#, "r"),
        ] {
            assert!(matches!(kept(json, host), Ok(Kept::Nowhere)), "{json}");
        }
        let other =
            r#"{"auths":{"https://index.docker.io/v1/access-token":{"username":"a","password":"b"}}}"#;
        assert!(matches!(kept(other, "docker.io"), Ok(Kept::Nowhere)));
        let absent = look_up(Path::new("/nonexistent/config.json"), &"r.example".parse().unwrap());
        assert!(matches!(absent, Ok(Kept::Nowhere)));
    }

    #[test]
    fn helpers_are_found_and_the_hosts_own_comes_first() {
        let json = r#"{"auths":{"a.example":{}},"credsStore":"desktop","credHelpers":{"b.example":"pass"}}"#;
        for (host, name) in [("a.example", "desktop"), ("b.example", "pass"), ("docker.io", "desktop")] {
            assert!(matches!(kept(json, host), Ok(Kept::WithHelper(found)) if found == name), "{host}");
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
            let error = kept(json, "r.example").unwrap_err();
            assert!(error.to_string().contains("config.json"), "{error}");
            assert!(!format!("{error} {error:?}").contains("hunter2"), "{error:?}");
        }
    }

    #[test]
    fn helper_is_asked_as_docker_asks_it() {
        let program = concat!(env!("CARGO_MANIFEST_DIR"), "/src/testdata/docker-credential-fixture");
        let ask = |host: &str| ask_program(Path::new(program), "fixture", &host.parse().unwrap());
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
        let error = ask_helper("of-no-machine", &"r.example".parse().unwrap()).unwrap_err().to_string();
        assert!(error.starts_with("docker-credential-of-no-machine: cannot run: "), "{error}");
    }
}
