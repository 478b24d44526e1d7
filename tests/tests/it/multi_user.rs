//! Two users, two daemons, two pulls of one model, an import and a collection at the same time:
//! nothing is lost, nothing is stored twice, and each gets a correct response.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{self, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{check_blobs, staged};
use blobd_tests::wait::eventually;
use serde_json::Value as Json;

const MODEL: &str = "application/vnd.ollama.image.model";
pub(super) const USERS: [u32; 2] = [65534, 12345];
const ROUNDS: usize = 6;

pub(super) fn can_be_others() -> bool {
    let program = Command::new("setpriv").arg("--version").output();
    let may = rustix::process::geteuid().is_root() && program.is_ok_and(|output| output.status.success());
    if !may {
        skipped("only root with setpriv can run commands as two users");
    }
    may
}

/// A daemon that every user may connect to, as the members of the group `blobd` may.
pub(super) fn shared_daemon() -> TestDaemon {
    opened(TestDaemon::start())
}

/// Lets every user connect to a daemon.
pub(super) fn opened(daemon: TestDaemon) -> TestDaemon {
    let open = |path: &Path, mode| fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
    open(daemon.scratch(), 0o755);
    open(&daemon.socket(), 0o666);
    daemon
}

/// A command as one of the users.
pub(super) fn run_as(uid: u32, daemon: &TestDaemon, words: &[&str]) -> Run {
    let mut command = Command::new("setpriv");
    command.arg(format!("--reuid={uid}")).arg(format!("--regid={uid}")).args(["--clear-groups", "--"]);
    command.arg(programs::blobd()).args(words);
    daemon.command().prepare(&mut command);
    command::run(&mut command)
}

/// A model that is pulled twice, and a sibling that shares most of its tensors.
fn models() -> (ModelFile, ModelFile) {
    let base = ModelFile::dense_of(1, 2, 128);
    (base.clone(), base.with_changed("output.weight"))
}

fn pull(daemon: &TestDaemon, uid: u32, name: &str) -> Json {
    let lines = run_as(uid, daemon, &["pull", name, "--json"]).succeeds().json_lines();
    lines.last().unwrap().clone()
}

fn import(daemon: &TestDaemon, uid: u32, path: &Path, name: &str) -> Json {
    let words = ["import", path.to_str().unwrap(), "--name", name, "--json"];
    run_as(uid, daemon, &words).succeeds().json()["imported"][0].clone()
}

/// Asserts that a second daemon is refused, and that the error names the first.
fn start_another(daemon: &TestDaemon) {
    let other = daemon.scratch().join("other.sock");
    let run = daemon.embedded().run(["serve", "--json", "--socket", other.to_str().unwrap()]).exits_with(4);
    let holder = format!("process {}, which serves {}", daemon.pid(), daemon.socket().display());
    assert!(run.error().message.contains(&holder), "{}", run.stderr);
    assert!(!other.exists());
}

fn physical_bytes(daemon: &TestDaemon) -> u64 {
    daemon.client().disk_usage().unwrap().physical_bytes
}

/// The physical bytes of both in a store without concurrency.
fn bytes_of_one_copy(registry: &FakeRegistry, path: &Path) -> u64 {
    let daemon = TestDaemon::start();
    daemon.command().run(["pull", &registry.name("library/m")]).succeeds();
    daemon.command().run(["import", "--name", "sibling", path.to_str().unwrap()]).succeeds();
    physical_bytes(&daemon)
}

#[test]
fn concurrent_pulls_import_collections_and_second_daemon_lose_nothing() {
    if !can_be_others() {
        return;
    }
    let (base, sibling) = models();
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("library/m:latest", b"{}", &[(MODEL, &base.bytes())]).unwrap();
    let name = registry.name("library/m");
    let daemon = shared_daemon();
    let path = sibling.write_to(daemon.scratch(), "sibling.gguf");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    let one_copy = bytes_of_one_copy(&registry, &path);
    for round in 0..ROUNDS {
        registry.add_fault("/cdn/", 2, Fault::Slow(32 << 10, Duration::from_millis(1)));
        at_once(&daemon, &name, &path);
        assert!(daemon.command().run(["export", &name, "-o", "-"]).succeeds().stdout == base.bytes());
        assert!(daemon.command().line("export sibling -o -").succeeds().stdout == sibling.bytes());
        check_blobs(daemon.root());
        assert_eq!(staged(daemon.root()), [""; 0]);
        assert_eq!(physical_bytes(&daemon), one_copy, "round {round}: one copy of each");
        daemon.command().run(["rm", &name, "sibling"]).succeeds();
        // The sessions of the exports end a moment after their clients.
        eventually("all is freed", || physical_bytes(&daemon) == 0);
    }
}

/// Runs all operations at once and checks each response.
fn at_once(daemon: &TestDaemon, name: &str, path: &Path) {
    let done = AtomicBool::new(false);
    thread::scope(|scope| {
        let collections = scope.spawn(|| {
            while !done.load(Ordering::Relaxed) {
                let report = daemon.command().line("gc --json").succeeds().json();
                assert_eq!(report["dry_run"], false);
            }
        });
        let pulls = USERS.map(|uid| scope.spawn(move || pull(daemon, uid, name)));
        let import = scope.spawn(|| import(daemon, USERS[1], path, "sibling"));
        scope.spawn(|| start_another(daemon));
        for pulled in pulls.map(|pull| pull.join().unwrap()) {
            assert_eq!(pulled["status"], "success", "{pulled}");
        }
        let imported = import.join().unwrap();
        let bytes = ["new_bytes", "reused_bytes"].map(|key| imported[key].as_u64().unwrap());
        assert!(bytes.iter().sum::<u64>() > 0 && imported["name"] == "sibling:latest", "{imported}");
        done.store(true, Ordering::Relaxed);
        collections.join().unwrap();
    });
}

/// Requests that need the right to administer are refused without any effect.
#[test]
fn users_of_a_shared_daemon_may_read_and_pull_but_not_remove_what_others_added() {
    if !can_be_others() {
        return;
    }
    let daemon = shared_daemon();
    let path = models().0.write_to(daemon.scratch(), "m.gguf");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    import(&daemon, USERS[0], &path, "m");
    let other = USERS[1].to_string();
    for words in ["rm m", "rm --keep 1h m", "rename m n", "pin m", "unpin m", "gc", "limit 1MB", "limit off"]
    {
        let words: Vec<_> = words.split(' ').chain(["--json"]).collect();
        let error = run_as(USERS[1], &daemon, &words).exits_with(7).error();
        assert!(error.message.contains(&other) && error.hint.is_some(), "{error}");
    }
    for words in ["ls", "ls --trash", "df", "ps", "doctor", "gc --plan-eviction", "show m", "limit"] {
        let words: Vec<_> = words.split(' ').chain(["--json"]).collect();
        let run = run_as(USERS[1], &daemon, &words);
        assert_eq!(run.code, 0, "{}", run.stderr);
    }
    assert_eq!(daemon.client().models().unwrap().models.len(), 1);
}
