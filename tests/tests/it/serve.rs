//! Models for other machines: the registry of `[serve]`, and who sees what of it.

mod built_clients;
mod clients;
mod hub;
mod hub_clients;
mod hub_pull_through;
mod peers;
mod pull_through;
mod registry;
mod tls;
mod visibility;

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;

use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::DEADLINE;
use serde_json::Value as Json;
use tempfile::TempDir;

/// A daemon that serves models on a port of loopback.
struct Site {
    daemon: TestDaemon,
    address: SocketAddr,
    folder: TempDir,
}

impl Site {
    fn start() -> Self {
        Self::start_with("")
    }

    /// With these lines in the section `[serve]`, and sections after it.
    fn start_with(settings: &str) -> Self {
        let folder = tmpfs_directory();
        let config = folder.path().join("config.toml");
        fs::write(&config, section(settings)).unwrap();
        let daemon = TestDaemon::start_at(&folder.path().join("store"), Some(&config));
        let address = address_of(&daemon);
        Self { daemon, address, folder }
    }

    /// Imports a model under some names, and returns its file.
    fn add(&self, model: &ModelFile, names: &[&str]) -> Vec<u8> {
        let path = model.write_to(self.daemon.scratch(), "model.gguf");
        for name in names {
            self.daemon.command().run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
        }
        model.bytes()
    }

    fn config(&self) -> &Path {
        self.folder.path()
    }

    fn get(&self, path: &str) -> Answer {
        self.get_with(path, "")
    }

    /// With further lines in the head of the request, each with its line end.
    fn get_with(&self, path: &str, more: &str) -> Answer {
        self.ask("GET", path, more)
    }

    fn head(&self, path: &str) -> Answer {
        self.ask("HEAD", path, "")
    }

    fn post(&self, path: &str, media_type: &str, body: &str) -> Answer {
        let length = body.len();
        let more = format!("Content-Type: {media_type}\r\nContent-Length: {length}\r\n");
        ask_with(self.address, ("POST", body), path, &more)
    }

    fn ask(&self, method: &str, path: &str, more: &str) -> Answer {
        ask(self.address, method, path, more)
    }

    /// The manifest of a tag, and its digest.
    fn manifest(&self, repository: &str, tag: &str) -> (Json, String) {
        let answer = self.get(&format!("/v2/{repository}/manifests/{tag}"));
        assert_eq!(answer.status, 200, "{answer:?}");
        (answer.json(), answer.header("docker-content-digest").unwrap().to_owned())
    }
}

fn section(settings: &str) -> String {
    format!("[serve]\nlisten = \"127.0.0.1:0\"\n{settings}\n")
}

/// Where a daemon serves models.
pub(crate) fn address_of(daemon: &TestDaemon) -> SocketAddr {
    let log = daemon.log();
    let url = log.split("models for other machines on ").nth(1).unwrap_or_else(|| panic!("{log}"));
    let address = url.split("//").nth(1).and_then(|url| url.split('/').next());
    address.unwrap_or_else(|| panic!("{log}")).parse().unwrap()
}

/// Sends a request, with further lines in its head, each with its line end.
pub(crate) fn ask(address: SocketAddr, method: &str, path: &str, more: &str) -> Answer {
    ask_with(address, (method, ""), path, more)
}

fn ask_with(address: SocketAddr, (method, body): (&str, &str), path: &str, more: &str) -> Answer {
    let host = if more.starts_with("Host:") { String::new() } else { format!("Host: {address}\r\n") };
    let mut stream = TcpStream::connect(address).unwrap();
    stream.set_read_timeout(Some(DEADLINE)).unwrap();
    let request = format!("{method} {path} HTTP/1.1\r\n{host}{more}Connection: close\r\n\r\n{body}");
    stream.write_all(request.as_bytes()).unwrap();
    let mut bytes = Vec::new();
    stream.read_to_end(&mut bytes).unwrap();
    Answer::parse(&bytes)
}

#[derive(Debug)]
pub(crate) struct Answer {
    pub(crate) status: u16,
    headers: Vec<(String, String)>,
    pub(crate) body: Vec<u8>,
}

impl Answer {
    fn parse(bytes: &[u8]) -> Self {
        let end = bytes.windows(4).position(|window| window == b"\r\n\r\n").expect("a head");
        let head = std::str::from_utf8(&bytes[..end]).unwrap();
        let mut lines = head.split("\r\n");
        let status = lines.next().unwrap().split(' ').nth(1).unwrap().parse().unwrap();
        let header = |line: &str| {
            let (name, value) = line.split_once(": ").unwrap();
            (name.to_ascii_lowercase(), value.to_owned())
        };
        Self { status, headers: lines.map(header).collect(), body: bytes[end + 4..].to_vec() }
    }

    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(found, _)| found == name).map(|(_, value)| value.as_str())
    }

    pub(crate) fn json(&self) -> Json {
        serde_json::from_slice(&self.body).unwrap_or_else(|error| panic!("{error}: {self:?}"))
    }

    /// The status and the code of an error as registries send it.
    fn refusal(&self) -> (u16, String) {
        let code = &self.json()["errors"][0]["code"];
        (self.status, code.as_str().unwrap_or_else(|| panic!("{self:?}")).to_owned())
    }
}

/// The digests of the layers of a manifest.
fn layers(manifest: &Json) -> Vec<String> {
    let layers = manifest["layers"].as_array().unwrap();
    layers.iter().map(|layer| layer["digest"].as_str().unwrap().to_owned()).collect()
}
