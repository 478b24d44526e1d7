//! `blobd web`: the command, its server, and the page in a browser.

mod page;
mod picture;

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::TcpStream;
use std::process::{Child, Command, Stdio};

use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::DEADLINE;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value as Json, json};

/// A running `blobd web`.
pub(super) struct Web {
    child: Child,
    /// Without the token.
    base: String,
    token: String,
}

impl Web {
    pub(super) fn start(blobd: &Blobd) -> Self {
        Self::start_with(blobd, &[], &[])
    }

    /// Starts it with options, through a program that execs the command at the end of its arguments.
    pub(super) fn start_with(blobd: &Blobd, wrapper: &[&str], options: &[&str]) -> Self {
        // SIGINT may be ignored in the process of the tests.
        let default = ["env", "--default-signal=INT"];
        let words: Vec<&str> = wrapper.iter().chain(&default).copied().collect();
        let mut command = Command::new(words[0]);
        command.args(&words[1..]).arg(programs::blobd()).args(["--json", "web", "--no-open"]).args(options);
        blobd.prepare(&mut command);
        let mut child = command.stdout(Stdio::piped()).spawn().unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        let document: Json = serde_json::from_str(&line).unwrap();
        let (base, token) = document["url"].as_str().unwrap().split_once('#').unwrap();
        assert!(base.starts_with("http://127.0.0.1:") && base.ends_with('/'), "{base}");
        Self { child, base: base.to_owned(), token: token.to_owned() }
    }

    fn url(&self) -> String {
        format!("{}#{}", self.base, self.token)
    }

    fn host(&self) -> &str {
        self.base.trim_start_matches("http://").trim_end_matches('/')
    }

    fn send(&self, request: &str) -> String {
        let mut stream = TcpStream::connect(self.host()).unwrap();
        stream.set_read_timeout(Some(DEADLINE)).unwrap();
        stream.write_all(request.as_bytes()).unwrap();
        let mut response = String::new();
        stream.read_to_string(&mut response).unwrap();
        response
    }

    pub(super) fn key(&self) -> String {
        let (host, token) = (self.host(), &self.token);
        let length = token.len();
        let response = self.send(&format!(
            "POST /session HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nContent-Length: {length}\r\n\r\n{token}"
        ));
        let body = response.split("\r\n\r\n").nth(1).unwrap();
        serde_json::from_str::<Json>(body).unwrap()["key"].as_str().unwrap().to_owned()
    }

    pub(super) fn ask(&self, question: &str, key: &str) -> Json {
        let host = self.host();
        let response = self.send(&format!(
            "GET /api/{question} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nX-Blobd-Key: {key}\r\n\r\n"
        ));
        serde_json::from_str(response.split("\r\n\r\n").nth(1).unwrap()).unwrap()
    }

    /// Sends an action with the headers that a browser adds for the page itself.
    pub(super) fn act(&self, action: &str, body: &Json, key: &str) -> Json {
        let (host, body) = (self.host(), body.to_string());
        let response = self.send(&format!(
            "POST /api/{action} HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\nX-Blobd-Key: {key}\r\n\
             Origin: http://{host}\r\nSec-Fetch-Site: same-origin\r\nContent-Type: application/json\r\n\
             Content-Length: {}\r\n\r\n{body}",
            body.len()
        ));
        serde_json::from_str(response.split("\r\n\r\n").nth(1).unwrap()).unwrap()
    }

    /// Ctrl-C.
    fn stop(mut self) {
        kill_process(Pid::from_child(&self.child), Signal::INT).unwrap();
        assert!(self.child.wait().unwrap().success());
    }
}

impl Drop for Web {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn import(blobd: &Blobd, model: &ModelFile, folder: &std::path::Path, name: &str) {
    let path = model.write_to(folder, &format!("{name}.gguf"));
    blobd.run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()]).succeeds();
}

#[test]
fn requests_of_the_page_are_answered_with_and_without_a_daemon() {
    let daemon = TestDaemon::start();
    let folder = tmpfs_directory();
    for blobd in [daemon.command(), Blobd::at_root(&folder.path().join("store"))] {
        import(&blobd, &ModelFile::dense(1), folder.path(), "m");
        let web = Web::start(&blobd);
        let key = web.key();
        for question in [
            "version",
            "models",
            "df?detail=12",
            "ps",
            "ps?residency=true",
            "pulls",
            "partials",
            "trash",
            "gc",
            "eviction",
            "models/m:latest",
            "fit/m",
        ] {
            let answer = web.ask(question, &key);
            assert!(answer.is_object() && answer["error"].is_null(), "{question}: {answer}");
        }
        assert_eq!(web.ask("models", &key)["models"][0]["name"], "m:latest");
        assert_eq!(web.ask("gc", &key)["dry_run"], true);
        // Other commands work meanwhile.
        assert!(blobd.line("ls").succeeds().text().contains("m:latest"));
        web.stop();
    }
}

#[test]
fn data_is_refused_without_the_token_of_the_link() {
    let daemon = TestDaemon::start();
    let web = Web::start(&daemon.command());
    for key in ["", "0", &web.token] {
        let answer = web.ask("models", key);
        assert!(answer["refused"] == true && answer["models"].is_null(), "{answer}");
    }
    let key = web.key();
    assert!(web.ask("models", &key)["models"].is_array());
    let host = web.host().to_owned();
    for name in ["evil.example", "192.0.2.1"] {
        let response = web.send(&format!(
            "GET /api/models HTTP/1.1\r\nHost: {name}\r\nConnection: close\r\nX-Blobd-Key: {key}\r\n\r\n"
        ));
        assert!(response.starts_with("HTTP/1.1 403 "), "{response}");
    }
    let used =
        daemon.command().run(["--json", "web", "--no-open", "--port", host.rsplit(':').next().unwrap()]);
    let error = used.exits_with(4).error();
    assert!(error.message.contains("cannot listen") && error.hint.unwrap().contains("--port"));
}

#[test]
fn page_shows_that_the_daemon_does_not_respond() {
    let mut daemon = TestDaemon::start();
    let web = Web::start(&daemon.command());
    let key = web.key();
    daemon.kill();
    let answer = web.ask("df", &key);
    assert!(answer["error"]["message"].is_string(), "{answer}");
    daemon.restart();
    assert!(web.ask("df", &key)["models"].is_array());
}

#[test]
fn actions_of_the_page_are_done_with_and_without_a_daemon() {
    let daemon = TestDaemon::start();
    let folder = tmpfs_directory();
    for blobd in [daemon.command(), Blobd::at_root(&folder.path().join("store"))] {
        import(&blobd, &ModelFile::dense(1), folder.path(), "m");
        let web = Web::start(&blobd);
        let key = web.key();
        let models = || web.ask("models", &key)["models"].clone();
        let act = |action, body: Json| web.act(action, &body, &key);
        assert_eq!(act("pin", json!({ "reference": "m", "pinned": true }))["pinned"], true);
        assert_eq!(models()[0]["pinned"], true);
        let removal = json!({ "references": ["m"], "keep_seconds": 600 });
        let refused = act("remove", removal.clone());
        assert!(refused["error"]["message"].as_str().unwrap().contains("pinned"), "{refused}");
        assert_eq!(act("pin", json!({ "reference": "m", "pinned": false }))["pinned"], false);
        assert!(act("remove", removal)["trashed_until"].is_string());
        assert_eq!(models(), json!([]));
        assert_eq!(act("undelete", json!({ "reference": "m" }))["name"], "m:latest");
        assert_eq!(act("gc", json!({}))["dry_run"], false);
        assert_eq!(models()[0]["name"], "m:latest");
        web.stop();
    }
}

#[test]
fn page_that_only_shows_changes_nothing() {
    let daemon = TestDaemon::start();
    import(&daemon.command(), &ModelFile::dense(1), daemon.scratch(), "m");
    let web = Web::start_with(&daemon.command(), &[], &["--read-only"]);
    let key = web.key();
    for (action, body) in [
        ("pin", json!({ "reference": "m", "pinned": true })),
        ("remove", json!({ "references": ["m"], "keep_seconds": 600 })),
        ("gc", json!({})),
    ] {
        let refused = web.act(action, &body, &key);
        assert!(refused["error"]["message"].as_str().unwrap().contains("--read-only"), "{action}: {refused}");
    }
    let models = web.ask("models", &key)["models"].clone();
    assert!(models[0]["name"] == "m:latest" && models[0]["pinned"] == false, "{models}");
}
