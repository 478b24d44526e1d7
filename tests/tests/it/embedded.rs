//! Several commands at a time without a daemon: the one that has the store open serves the others.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread;
use std::time::Duration;

use blobd_client::Client;
use blobd_client::protocol::error::ErrorCode;
use blobd_tests::command::Blobd;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value as Json;
use tempfile::TempDir;

use super::multi_user::can_be_others;

const MODEL: &str = "application/vnd.ollama.image.model";
const CONFIG: &[u8] = br#"{"model_format":"gguf","model_family":"llama"}"#;

/// A store that has the model `m`, without a daemon.
struct Fixture {
    folder: TempDir,
    root: PathBuf,
    blobd: Blobd,
}

impl Fixture {
    fn new() -> Self {
        Self::at("store")
    }

    fn at(name: &str) -> Self {
        let folder = tmpfs_directory();
        let root = folder.path().join(name);
        let blobd = Blobd::at_root(&root);
        let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
        blobd.run(["import".as_ref(), path.as_os_str()]).succeeds();
        Self { folder, root, blobd }
    }

    fn socket(&self) -> PathBuf {
        self.root.join("command.sock")
    }

    /// Starts a command that has the store open until [`end`].
    fn owner(&self) -> Child {
        let mut command = self.blobd.command();
        command
            .args(["exec", "--", "cat"])
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::inherit());
        let owner = command.spawn().unwrap();
        eventually("the command listens", || self.socket().exists());
        owner
    }

    /// Starts a pull with few bytes per second, and waits for its first bytes.
    fn slow_pull(&self, name: &str) -> Pull {
        let config = self.folder.path().join("slow.toml");
        fs::write(&config, "[transfer]\nlimit_rate = \"256KiB\"\n").unwrap();
        Pull::start(&self.blobd.clone().configured_by(&config), name)
    }
}

fn end(mut owner: Child) {
    drop(owner.stdin.take());
    assert!(owner.wait().unwrap().success());
}

/// A running pull that has received some bytes.
struct Pull {
    child: Child,
    lines: Box<dyn Iterator<Item = Json>>,
}

impl Pull {
    fn start(blobd: &Blobd, name: &str) -> Self {
        // Ctrl-C interrupts it, even if SIGINT is ignored in the tests' own process.
        let mut command = Command::new("env");
        blobd.prepare(&mut command);
        command.args(["--default-signal=INT".as_ref(), programs::blobd().as_os_str()]);
        let mut child = command.args(["pull", name, "--json"]).stderr(Stdio::inherit()).spawn().unwrap();
        let lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut lines = lines.map(|line| serde_json::from_str::<Json>(&line.unwrap()).unwrap());
        let has_some = |line: Json| line["completed"].as_u64().is_some_and(|completed| completed > 0);
        assert!(lines.any(has_some), "it ended before");
        Self { child, lines: Box::new(lines) }
    }

    fn signal(&self, signal: Signal) {
        kill_process(Pid::from_child(&self.child), signal).unwrap();
    }

    fn succeeds(mut self) {
        let last = self.lines.last().unwrap_or_default();
        assert!(self.child.wait().unwrap().success(), "{last}");
        assert_eq!(last["status"], "success");
    }
}

/// Models of some 15 MiB each: `library/a` and `library/b`.
fn registry() -> (FakeRegistry, [ModelFile; 2], [String; 2]) {
    let registry = FakeRegistry::start().unwrap();
    let models = [3, 4].map(|seed| ModelFile::dense_of(seed, 2, 512));
    let names = ["a", "b"].map(|name| registry.name(&format!("library/{name}:latest")));
    for (name, model) in ["a", "b"].iter().zip(&models) {
        let layers: [(&str, &[u8]); 1] = [(MODEL, &model.bytes())];
        registry.add_model(&format!("library/{name}:latest"), CONFIG, &layers).unwrap();
    }
    (registry, models, names)
}

fn exported(blobd: &Blobd, name: &str) -> Vec<u8> {
    blobd.run(["export", name, "-o", "-"]).succeeds().stdout
}

#[test]
fn every_command_works_beside_a_pull_without_a_daemon() {
    let (fixture, (_registry, models, names)) = (Fixture::new(), registry());
    let pull = fixture.slow_pull(&names[0]);
    let other = ModelFile::dense(2).write_to(fixture.folder.path(), "n.gguf");
    for line in [
        "ls",
        "show m",
        "df",
        "df -v",
        "ps",
        "doctor",
        "tag m copy",
        "pin copy",
        "unpin copy",
        "rm copy",
        "gc --dry-run",
        "verify m",
        "diff m m",
        "warm m",
        "rm --keep 1h m",
        "undelete m",
        "limit",
        "reindex",
    ] {
        fixture.blobd.line(line).succeeds();
    }
    assert!(exported(&fixture.blobd, "m") == ModelFile::dense(1).bytes());
    fixture.blobd.run(["import".as_ref(), other.as_os_str()]).succeeds();
    assert_eq!(fixture.blobd.line("ls --json").succeeds().json()["models"].as_array().unwrap().len(), 2);
    // The limit is that of the process that pulls.
    fixture.blobd.line("limit off").succeeds();
    pull.succeeds();
    assert!(exported(&fixture.blobd, &names[0]) == models[0].bytes());
    assert!(!fixture.socket().exists());
}

#[test]
fn pull_continues_when_the_command_that_serves_it_is_killed() {
    let (_registry, models, names) = registry();
    for signal in [Signal::KILL, Signal::INT, Signal::TERM] {
        let fixture = Fixture::new();
        let owner = fixture.slow_pull(&names[0]);
        let pull = fixture.slow_pull(&names[1]);
        owner.signal(signal);
        eventually("the other pull has opened the store", || {
            fixture.blobd.line("ls").succeeds();
            fixture.blobd.line("limit off").code == 0
        });
        pull.succeeds();
        assert!(exported(&fixture.blobd, &names[1]) == models[1].bytes());
        drop(owner);
        fixture.blobd.run(["pull", &names[0]]).succeeds();
        assert!(exported(&fixture.blobd, &names[0]) == models[0].bytes());
    }
}

#[test]
fn pull_continues_when_the_command_that_serves_it_ends() {
    let (fixture, (registry, models, names)) = (Fixture::new(), registry());
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100_000, Duration::from_millis(20)));
    let owner = fixture.owner();
    let pull = Pull::start(&fixture.blobd, &names[0]);
    end(owner);
    registry.clear_faults();
    pull.succeeds();
    assert!(exported(&fixture.blobd, &names[0]) == models[0].bytes());
}

#[test]
fn hundred_commands_at_once_without_a_daemon_succeed() {
    let fixture = Fixture::new();
    thread::scope(|scope| {
        let runs: Vec<_> = (0..100).map(|_| scope.spawn(|| fixture.blobd.line("ls --json"))).collect();
        for run in runs {
            let models = run.join().unwrap().succeeds().json()["models"].clone();
            assert_eq!(models[0]["name"], "m:latest");
        }
    });
    assert!(!fixture.socket().exists());
}

#[test]
fn changes_by_several_commands_at_once_without_a_daemon_are_all_made() {
    let fixture = Fixture::new();
    thread::scope(|scope| {
        for worker in 0..4 {
            let blobd = &fixture.blobd;
            scope.spawn(move || {
                for round in 0..6 {
                    let name = format!("copy-{worker}-{round}");
                    blobd.run(["tag", "m", &name]).succeeds();
                    blobd.run(["show", &name]).succeeds();
                    assert!(exported(blobd, &name) == ModelFile::dense(1).bytes());
                    blobd.run(["rm", &name]).succeeds();
                }
            });
        }
    });
    assert_eq!(fixture.blobd.line("ls --json").succeeds().json()["models"].as_array().unwrap().len(), 1);
}

#[test]
fn command_after_a_killed_one_needs_no_wait() {
    let (fixture, (_registry, _models, names)) = (Fixture::new(), registry());
    let mut killed = fixture.slow_pull(&names[0]);
    killed.signal(Signal::KILL);
    killed.child.wait().unwrap();
    assert!(fixture.socket().exists(), "left by the killed process");
    fixture.blobd.line("ls").succeeds();
    assert!(!fixture.socket().exists());
}

#[test]
fn daemon_starts_when_the_command_that_has_the_store_ends() {
    let fixture = Fixture::new();
    let owner = fixture.owner();
    let (socket, log) = (fixture.folder.path().join("d.sock"), fixture.folder.path().join("log"));
    let mut command = fixture.blobd.command();
    command.args(["serve".as_ref(), "--socket".as_ref(), socket.as_os_str()]);
    let mut daemon = command.stderr(fs::File::create(&log).unwrap()).spawn().unwrap();
    let said = format!("process {}, a blobd command (`", owner.id());
    let is_said = |line: &str| line.contains(&said) && line.ends_with("`); waiting until it ends");
    eventually("the daemon says that it waits", || fs::read_to_string(&log).unwrap().lines().any(is_said));
    fixture.blobd.line("ls").succeeds();
    end(owner);
    eventually("the daemon serves", || Client::connect(&socket).is_ok());
    daemon.kill().unwrap();
    daemon.wait().unwrap();
}

#[test]
fn store_with_a_long_path_is_shared() {
    let fixture = Fixture::at(&"long/".repeat(40));
    let owner = fixture.owner();
    fixture.blobd.line("ls").succeeds();
    end(owner);
}

#[test]
fn mount_needs_a_daemon_although_a_command_serves_the_store() {
    let fixture = Fixture::new();
    let owner = fixture.owner();
    let error = fixture.blobd.line("mount /nowhere --json").exits_with(3).error();
    assert!(error.message.contains("no daemon is running"), "{error}");
    end(owner);
}

#[test]
fn command_serves_no_other_user() {
    if !can_be_others() {
        return;
    }
    let fixture = Fixture::new();
    let owner = fixture.owner();
    let open = |path: &Path| fs::set_permissions(path, fs::Permissions::from_mode(0o777)).unwrap();
    [fixture.folder.path(), &fixture.root, &fixture.socket()].into_iter().for_each(open);
    let mut command = Command::new("setpriv");
    command.args(["--reuid=65534", "--regid=65534", "--clear-groups", "--"]).arg(programs::blobd());
    Blobd::at_socket(&fixture.socket()).prepare(&mut command);
    let run = blobd_tests::command::run(command.args(["ls", "--json"]));
    assert_eq!((run.code, run.error().code), (1, ErrorCode::Internal), "{}", run.stderr);
    assert!(run.stdout.is_empty());
    Blobd::at_socket(&fixture.socket()).line("ls").succeeds();
    end(owner);
}
