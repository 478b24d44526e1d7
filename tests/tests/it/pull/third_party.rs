//! Pulls from an independent registry, the CNCF's `distribution`, which Debian packages as `docker-registry`.
//! Skipped if it is not installed. The tests push models as its specification describes, and with skopeo if
//! that is installed.

use std::fs::{self, File};
use std::io::{self, Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::{Path, PathBuf};
use std::process::{Child, Command};

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::run;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::programs::is_unavailable;
use blobd_tests::store_dir::{check_blobs, check_empty};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::{DEADLINE, eventually_some};
use serde_json::{Value as Json, json};
use tempfile::TempDir;

use super::{CONFIG, LICENSE, MODEL, TEMPLATE};

const PROGRAM: &str = "docker-registry";
const USER: &str = "me";
pub(crate) const PASSWORD: &str = "a good password";
/// `me:a good password` in Base64.
const AUTHORIZATION: &str = "Basic bWU6YSBnb29kIHBhc3N3b3Jk";
/// The same as `htpasswd -B` writes it, with the minimum cost.
const HTPASSWD: &str = "me:$2y$04$abcdefghijklmnopqrstuuVCZTFhDi5NuemONALFTadaLO4m9MPr2\n";

/// Who may read and write.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Anonymous,
    Password,
}

/// The registry with a store of its own, killed when it is dropped.
pub(crate) struct ThirdPartyRegistry {
    child: Child,
    pub(crate) address: SocketAddr,
    access: Access,
    folder: TempDir,
}

/// A manifest's media type, its configuration's, and the layers.
type Form<'f> = (&'f str, &'f str, [(&'f str, &'f [u8]); 3]);

/// A manifest as Ollama writes it.
fn in_ollamas_form(weights: &[u8]) -> Form<'_> {
    (
        "application/vnd.docker.distribution.manifest.v2+json",
        "application/vnd.docker.container.image.v1+json",
        [(MODEL, weights), (TEMPLATE, b"{{ .Prompt }}"), (LICENSE, b"free")],
    )
}

/// A manifest as Docker Model Runner writes it.
fn in_model_runners_form(weights: &[u8]) -> Form<'_> {
    (
        "application/vnd.oci.image.manifest.v1+json",
        "application/vnd.docker.ai.model.config.v0.1+json",
        [
            ("application/vnd.docker.ai.gguf.v3", weights),
            ("application/vnd.docker.ai.chat.template.jinja", b"{{ messages }}"),
            ("application/vnd.docker.ai.license", b"free"),
        ],
    )
}

impl ThirdPartyRegistry {
    /// None where the program is not installed.
    pub(crate) fn start(access: Access) -> Option<Self> {
        let folder = tmpfs_directory();
        let path = |name: &str| folder.path().join(name);
        let mut config = json!({
            "version": "0.1",
            "storage": {
                "filesystem": { "rootdirectory": path("storage") },
                "redirect": { "disable": true },
            },
            "http": { "addr": "127.0.0.1:0", "secret": "none", "relativeurls": true },
        });
        if access == Access::Password {
            fs::write(path("htpasswd"), HTPASSWD).unwrap();
            config["auth"] = json!({ "htpasswd": { "realm": "tests", "path": path("htpasswd") } });
        }
        // JSON is YAML.
        fs::write(path("config.yml"), config.to_string()).unwrap();
        let log = File::create(path("log")).unwrap();
        let mut command = Command::new(PROGRAM);
        command.arg("serve").arg(path("config.yml")).stdout(log.try_clone().unwrap()).stderr(log);
        let child = match command.spawn() {
            Ok(child) => child,
            Err(error) if is_unavailable(&error) => {
                skipped(format_args!("{PROGRAM} cannot be run: {error}"));
                return None;
            }
            Err(error) => panic!("{PROGRAM}: {error}"),
        };
        // From here on, the process is killed when this value is dropped.
        let unbound = SocketAddr::from(([127, 0, 0, 1], 0));
        let mut registry = Self { child, address: unbound, access, folder };
        registry.address = eventually_some("the registry listens", || {
            let ended = registry.child.try_wait().unwrap();
            assert!(ended.is_none(), "the registry has ended: {}", registry.log());
            let log = registry.log();
            let (_, rest) = log.split_once("listening on ")?;
            rest.split_once('"')?.0.parse().ok()
        });
        Some(registry)
    }

    fn log(&self) -> String {
        fs::read_to_string(self.folder.path().join("log")).unwrap()
    }

    pub(crate) fn name(&self, model: &str) -> String {
        format!("http://{}/{model}", self.address)
    }

    /// Stores a password of [`USER`] for the registry.
    pub(crate) fn log_in(&self, daemon: &TestDaemon, config: &Path, password: &str) {
        let secret = daemon.scratch().join("secret");
        fs::write(&secret, password).unwrap();
        let mut command = daemon.command().command();
        command.args(["login", &self.address.to_string(), "-u", USER, "--password-stdin", "--config"]);
        run(command.arg(config).stdin(File::open(secret).unwrap())).succeeds();
    }

    fn push(&self, repository: &str, tag: &str, (manifest_type, config_type, layers): Form<'_>) {
        let config = self.push_blob(repository, config_type, CONFIG);
        let layers = layers.map(|(media_type, bytes)| self.push_blob(repository, media_type, bytes));
        let manifest =
            json!({ "schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": layers });
        let path = format!("/v2/{repository}/manifests/{tag}");
        let (status, head) = self.send("PUT", &path, manifest_type, manifest.to_string().as_bytes()).unwrap();
        assert_eq!(status, 201, "{head}");
    }

    fn push_blob(&self, repository: &str, media_type: &str, bytes: &[u8]) -> Json {
        let (status, head) =
            self.send("POST", &format!("/v2/{repository}/blobs/uploads/"), "text/plain", b"").unwrap();
        assert_eq!(status, 202, "{head}");
        let location = head.lines().find_map(|line| line.strip_prefix("Location: ")).unwrap();
        let digest = format!("sha256:{}", sha256(bytes));
        let separator = if location.contains('?') { '&' } else { '?' };
        let path = format!("{location}{separator}digest={digest}");
        let (status, head) = self.send("PUT", &path, "application/octet-stream", bytes).unwrap();
        assert_eq!(status, 201, "{head}");
        json!({ "mediaType": media_type, "digest": digest, "size": bytes.len() })
    }

    /// Answers with the status and the head.
    fn send(&self, method: &str, path: &str, content_type: &str, body: &[u8]) -> io::Result<(u16, String)> {
        let mut stream = TcpStream::connect(self.address)?;
        stream.set_read_timeout(Some(DEADLINE))?;
        stream.set_write_timeout(Some(DEADLINE))?;
        let authorization = match self.access {
            Access::Anonymous => String::new(),
            Access::Password => format!("Authorization: {AUTHORIZATION}\r\n"),
        };
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: {}\r\nConnection: close\r\n{authorization}\
             Content-Type: {content_type}\r\nContent-Length: {}\r\n\r\n",
            self.address,
            body.len()
        );
        stream.write_all(head.as_bytes())?;
        stream.write_all(body)?;
        let mut response = String::new();
        stream.read_to_string(&mut response)?;
        let status = response.split(' ').nth(1).and_then(|status| status.parse().ok()).unwrap_or(0);
        Ok((status, response.split("\r\n\r\n").next().unwrap_or_default().replace('\r', "")))
    }
}

/// A daemon that stores credentials beside a configuration of its own, not in that of the user who runs the tests; and the
/// path of the configuration.
pub(crate) fn daemon_with_credentials() -> (TestDaemon, PathBuf) {
    let folder = tmpfs_directory();
    let config = folder.path().join("config.toml");
    fs::write(&config, "").unwrap();
    let variable = format!("BLOBD_CONFIG={}", config.display());
    (TestDaemon::start_under(&["env", &variable], folder), config)
}

impl Drop for ThirdPartyRegistry {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[test]
fn models_pulled_from_a_real_registry_are_exported_bit_for_bit() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let daemon = TestDaemon::start();
    let weights = ModelFile::dense(1).bytes();
    for (repository, form, template) in [
        ("library/tiny", in_ollamas_form(&weights), "{{ .Prompt }}"),
        ("ai/tiny", in_model_runners_form(&weights), "{{ messages }}"),
    ] {
        registry.push(repository, "latest", form);
        let name = registry.name(repository);
        daemon.command().run(["pull", &name]).succeeds();
        assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == weights, "{repository}");
        let open = daemon.client().open(&name.parse().unwrap()).unwrap();
        assert!(open.tensor("output.weight").is_some(), "{repository}");
        assert_eq!(open.text("template").unwrap().as_deref(), Some(template));
    }
    check_blobs(daemon.root());
}

/// Writes a model as the directory that the OCI's image layout describes.
fn write_layout(directory: &Path, (manifest_type, config_type, layers): Form<'_>) {
    let blobs = directory.join("blobs/sha256");
    fs::create_dir_all(&blobs).unwrap();
    let add = |media_type: &str, bytes: &[u8]| {
        let digest = sha256(bytes).to_string();
        fs::write(blobs.join(&digest), bytes).unwrap();
        json!({ "mediaType": media_type, "digest": format!("sha256:{digest}"), "size": bytes.len() })
    };
    let config = add(config_type, CONFIG);
    let layers = layers.map(|(media_type, bytes)| add(media_type, bytes));
    let manifest =
        json!({ "schemaVersion": 2, "mediaType": manifest_type, "config": config, "layers": layers });
    let manifest = add(manifest_type, manifest.to_string().as_bytes());
    let index = json!({ "schemaVersion": 2, "manifests": [manifest] });
    fs::write(directory.join("index.json"), index.to_string()).unwrap();
    fs::write(directory.join("oci-layout"), r#"{"imageLayoutVersion":"1.0.0"}"#).unwrap();
}

#[test]
fn model_pushed_by_skopeo_is_exported_bit_for_bit() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let (daemon, folder) = (TestDaemon::start(), tmpfs_directory());
    let weights = ModelFile::dense(1).bytes();
    write_layout(folder.path(), in_model_runners_form(&weights));
    let mut skopeo = Command::new("skopeo");
    skopeo.args(["--insecure-policy", "copy", "--quiet", "--preserve-digests", "--dest-tls-verify=false"]);
    skopeo.arg(format!("oci:{}", folder.path().display()));
    skopeo.arg(format!("docker://{}/ai/tiny:latest", registry.address));
    match skopeo.output() {
        Err(error) if is_unavailable(&error) => {
            return skipped(format_args!("skopeo cannot be run: {error}"));
        }
        output => {
            let output = output.unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        }
    }
    let name = registry.name("ai/tiny");
    daemon.command().run(["pull", &name]).succeeds();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == weights);
    check_blobs(daemon.root());
}

#[test]
fn large_file_of_a_real_registry_comes_in_ranges() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let daemon = TestDaemon::start();
    let weights = ModelFile::dense_of(1, 2, 512).bytes();
    assert!(weights.len() > 14 << 20, "{} bytes", weights.len());
    registry.push("library/large", "latest", in_ollamas_form(&weights));
    let name = registry.name("library/large");
    let lines = daemon.command().run(["pull", &name, "--json"]).succeeds().json_lines();
    let downloaded = lines.last().unwrap()["downloaded_bytes"].as_u64().unwrap();
    let size = weights.len() as u64;
    assert!((size..size + 4096).contains(&downloaded), "{downloaded} of {size}");
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == weights);
    check_blobs(daemon.root());
    // The registry's own log of its responses.
    let ranges = registry.log().lines().filter(|line| line.contains("HTTP/1.1\" 206 ")).count();
    assert!(ranges > 2, "{ranges} ranges\n{}", registry.log());
}

#[test]
fn nearest_tags_of_a_real_registry_are_suggested() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Anonymous) else { return };
    let daemon = TestDaemon::start();
    let weights = ModelFile::dense(1).bytes();
    for tag in ["8b-q4", "70b"] {
        registry.push("library/tiny", tag, in_ollamas_form(&weights));
    }
    let failure =
        |model: &str| daemon.command().run(["pull", &registry.name(model), "--json"]).exits_with(3).error();
    let message = failure("library/tiny:8b-q5").message;
    assert!(message.ends_with("the nearest names are 8b-q4, 70b"), "{message}");
    let message = failure("library/huge").message;
    assert!(message.contains("not found at"), "{message}");
    check_empty(daemon.root());
}

#[test]
fn real_registry_gets_the_password_stored_by_login() {
    let Some(registry) = ThirdPartyRegistry::start(Access::Password) else { return };
    let (daemon, config) = daemon_with_credentials();
    let weights = ModelFile::dense(1).bytes();
    registry.push("library/tiny", "latest", in_ollamas_form(&weights));
    let name = registry.name("library/tiny");
    let login = |password: &str| registry.log_in(&daemon, &config, password);
    daemon.command().run(["pull", &name]).exits_with(7);
    login("a wrong password");
    daemon.command().run(["pull", &name]).exits_with(7);
    check_empty(daemon.root());
    login(PASSWORD);
    daemon.command().run(["pull", &name]).succeeds();
    assert!(daemon.command().run(["export", &name, "-o", "-"]).stdout == weights);
    check_blobs(daemon.root());
    assert!(!daemon.log().contains(PASSWORD));
}
