//! What waits or crawls holds nothing that others need: neither other users nor other work.

use std::io::Write as _;
use std::net::{TcpListener, TcpStream};
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use blobd_tests::command::{self, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::hanging::{Hang, HangingFiles};
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::staged;
use blobd_tests::wait::eventually;
use tempfile::NamedTempFile;

use super::together::{can_be_others, shared_daemon};

const MODEL: &str = "application/vnd.ollama.image.model";
const GREEDY: u32 = 65534;
const OTHER: u32 = 12345;
/// Far more than any of this takes on a loaded machine, far less than what it would wait for.
const SOON: Duration = Duration::from_secs(30);

/// A command that runs until this is dropped.
pub(super) struct Background(Child, NamedTempFile);

impl Background {
    pub(super) fn start(daemon: &TestDaemon, uid: Option<u32>, words: &[&str]) -> Self {
        let mut command = command_of(daemon, uid, words);
        let complaints = NamedTempFile::new().unwrap();
        command.stdout(Stdio::null()).stderr(complaints.reopen().unwrap());
        Self(command.spawn().unwrap(), complaints)
    }

    fn check_is_running(&mut self) {
        let ended = self.0.try_wait().unwrap();
        assert!(ended.is_none(), "{ended:?}: {}", std::fs::read_to_string(self.1.path()).unwrap());
    }
}

impl Drop for Background {
    fn drop(&mut self) {
        // Fails only if it has ended already.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn command_of(daemon: &TestDaemon, uid: Option<u32>, words: &[&str]) -> Command {
    let mut command = match uid {
        Some(uid) => {
            let mut command = Command::new("setpriv");
            command
                .arg(format!("--reuid={uid}"))
                .arg(format!("--regid={uid}"))
                .args(["--clear-groups", "--"]);
            command.arg(programs::blobd());
            command
        }
        None => Command::new(programs::blobd()),
    };
    daemon.command().prepare(&mut command);
    command.args(words);
    command
}

fn run_as(uid: Option<u32>, daemon: &TestDaemon, words: &[&str]) -> Run {
    command::run(&mut command_of(daemon, uid, words))
}

fn runs_soon(uid: Option<u32>, daemon: &TestDaemon, words: &[&str]) {
    let started = Instant::now();
    run_as(uid, daemon, words).succeeds();
    assert!(started.elapsed() < SOON, "{words:?}: {:?}", started.elapsed());
}

/// A registry that accepts and never answers.
pub(super) struct Tarpit {
    port: u16,
    accepted: Arc<Mutex<Vec<TcpStream>>>,
}

impl Tarpit {
    pub(super) fn start() -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let port = listener.local_addr().unwrap().port();
        let accepted: Arc<Mutex<Vec<TcpStream>>> = Arc::default();
        let held = Arc::clone(&accepted);
        std::thread::spawn(move || {
            listener.incoming().flatten().for_each(|stream| held.lock().unwrap().push(stream));
        });
        Self { port, accepted }
    }

    pub(super) fn port(&self) -> u16 {
        self.port
    }

    pub(super) fn name(&self, model: &str) -> String {
        format!("http://127.0.0.1:{}/library/{model}", self.port)
    }

    pub(super) fn wait_for(&self, connections: usize) {
        eventually("it is asked", || self.accepted.lock().unwrap().len() >= connections);
    }

    /// How many who asked have gone.
    fn gone(&self) -> usize {
        let mut accepted = self.accepted.lock().unwrap();
        let is_gone = |stream: &mut TcpStream| {
            stream.set_nonblocking(true).unwrap();
            // A byte of no meaning: what has been closed says so at the second one.
            stream.write_all(b" ").is_err()
        };
        accepted.iter_mut().map(is_gone).filter(|gone| *gone).count()
    }
}

/// Models of about 3 MiB that have nothing in common: they take many minutes at a byte per second.
fn registry_with(count: u64) -> (FakeRegistry, Vec<String>) {
    let registry = FakeRegistry::start().unwrap();
    let add = |number| {
        let (name, model) = (format!("library/m{number}:latest"), ModelFile::dense_of(number, 2, 256));
        // Of several who wait for one file, such as a configuration, the highest limit would hold.
        let config = format!("{{\"number\":{number}}}");
        registry.add_model(&name, config.as_bytes(), &[(MODEL, &model.bytes())]).unwrap();
        registry.name(&name)
    };
    let names = (0..count).map(add).collect();
    (registry, names)
}

fn readable_model(daemon: &TestDaemon, seed: u64, name: &str) -> std::path::PathBuf {
    use std::os::unix::fs::PermissionsExt as _;
    let path = ModelFile::dense(seed).write_to(daemon.scratch(), name);
    std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o644)).unwrap();
    path
}

/// How many files the daemon is fetching from the content network.
fn asked_for_content(registry: &FakeRegistry) -> usize {
    let requests = registry.requests();
    let paths: std::collections::BTreeSet<_> = requests
        .iter()
        .filter(|request| request.path.starts_with("/cdn/"))
        .map(|request| &request.path)
        .collect();
    paths.len()
}

#[test]
fn pulls_that_crawl_keep_no_other_user_and_no_import_waiting() {
    if !can_be_others() {
        return;
    }
    let daemon = shared_daemon();
    let (registry, names) = registry_with(9);
    let (other, greedy) = names.split_last().unwrap();
    let mut crawling: Vec<_> = greedy
        .iter()
        .map(|name| Background::start(&daemon, Some(GREEDY), &["pull", name, "--limit-rate", "1"]))
        .collect();
    eventually("as many as one user may have are under way", || asked_for_content(&registry) >= 4);
    let mine = readable_model(&daemon, 91, "mine.gguf");
    runs_soon(Some(GREEDY), &daemon, &["import", "--name", "mine", mine.to_str().unwrap()]);
    let theirs = readable_model(&daemon, 92, "theirs.gguf");
    runs_soon(Some(OTHER), &daemon, &["import", "--name", "theirs", theirs.to_str().unwrap()]);
    runs_soon(Some(OTHER), &daemon, &["pull", other]);
    let (root_registry, root_names) = registry_with(1);
    runs_soon(None, &daemon, &["pull", &root_names[0]]);
    drop(root_registry);
    crawling.iter_mut().for_each(Background::check_is_running);
}

/// One user's imports hang, as many as there may be, until their clients go, three times.
struct Hangs {
    daemon: TestDaemon,
    files: HangingFiles,
    theirs: std::path::PathBuf,
}

impl Hangs {
    fn prepare() -> Option<Self> {
        if !can_be_others() {
            return None;
        }
        let daemon = shared_daemon();
        let model = ModelFile::dense_of(1, 2, 128);
        let files = HangingFiles::mount(&daemon.scratch().join("hanging"), model.bytes())?;
        let theirs = readable_model(&daemon, 2, "theirs.gguf");
        Some(Self { daemon, files, theirs })
    }

    fn import(&self, uid: u32, name: &str) -> Run {
        run_as(Some(uid), &self.daemon, &["import", "--json", "--name", name, self.theirs.to_str().unwrap()])
    }

    fn check_others(&self, name: &str) {
        let started = Instant::now();
        self.import(OTHER, name).succeeds();
        assert!(started.elapsed() < SOON, "{:?}", started.elapsed());
    }

    fn run(&self, hang: Hang) {
        for round in 1..=3 {
            let clients = ["a", "b", "c"].map(|name| {
                let path = self.files.path(hang);
                let words = ["import", "--name", name, path.to_str().unwrap()];
                Background::start(&self.daemon, Some(GREEDY), &words)
            });
            eventually("as many as one user may have hang", || self.files.waiting() >= 2 * round);
            self.check_others(&format!("theirs-{round}"));
            drop(clients);
            eventually("nothing of them stays", || staged(self.daemon.root()).is_empty());
        }
        self.check_others("theirs-4");
    }
}

#[test]
fn imports_that_hang_past_the_cache_hang_for_their_own_user_alone() {
    let Some(hangs) = Hangs::prepare() else { return };
    hangs.run(Hang::DirectRead);
}

/// The kernel lets nobody leave such a call, so what hangs is left to itself, and no more of it is begun.
#[test]
fn imports_that_hang_when_inspected_hang_for_their_own_user_who_is_told() {
    let Some(hangs) = Hangs::prepare() else { return };
    hangs.run(Hang::Inspect);
    let error = hangs.import(GREEDY, "d").exits_with(4).error();
    assert!(error.message.contains("still wait for their files"), "{error}");
    assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("does not respond")), "{error}");
    hangs.check_others("theirs-5");
    hangs.files.let_go();
    eventually("the user's own come back when the files do", || hangs.import(GREEDY, "e").code == 0);
}

/// Such a read can be left, so nothing remains of it.
#[test]
fn imports_that_hang_in_the_cache_are_gone_with_their_clients() {
    let daemon = TestDaemon::start();
    let model = ModelFile::dense_of(1, 2, 128);
    let Some(files) = HangingFiles::mount(&daemon.scratch().join("hanging"), model.bytes()) else { return };
    for _round in 0..5 {
        let clients = ["a", "b"].map(|name| {
            let path = files.path(Hang::Read);
            Background::start(&daemon, None, &["import", "--name", name, path.to_str().unwrap()])
        });
        eventually("they hang", || staged(daemon.root()).len() == 2);
        drop(clients);
        eventually("nothing of them stays", || staged(daemon.root()).is_empty());
    }
    let good = ModelFile::dense(2).write_to(daemon.scratch(), "good.gguf");
    runs_soon(None, &daemon, &["import", good.to_str().unwrap()]);
    eventually("no process is left", || children(daemon.pid()) == 0);
}

fn children(pid: u32) -> usize {
    let tasks = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task")).unwrap().flatten();
    let of_task =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
    tasks.map(|task| of_task(task).split_whitespace().count()).sum()
}

#[test]
fn dry_runs_that_nobody_answers_keep_no_survey_waiting_and_end_with_their_clients() {
    let (daemon, tarpit) = (TestDaemon::start(), Tarpit::start());
    let plans: Vec<_> = (0..4)
        .map(|number| {
            Background::start(&daemon, None, &["pull", "--dry-run", &tarpit.name(&format!("m{number}"))])
        })
        .collect();
    tarpit.wait_for(2);
    for words in [&["df"][..], &["doctor"], &["gc", "--dry-run"]] {
        let started = Instant::now();
        let run = run_as(None, &daemon, words);
        assert!(run.code <= 1, "{words:?}: {}", run.stderr);
        assert!(started.elapsed() < SOON, "{words:?}: {:?}", started.elapsed());
    }
    drop(plans);
    let (_registry, names) = registry_with(1);
    runs_soon(None, &daemon, &["pull", "--dry-run", &names[0]]);
    eventually("the connections are closed", || tarpit.gone() >= 2);
}

#[test]
fn pull_that_was_asked_to_come_back_later_ends_with_its_client() {
    let daemon = TestDaemon::start();
    let (registry, names) = registry_with(1);
    // Some of it comes, so that the server's wish is worth waiting for.
    registry.add_fault("/cdn/", 1, Fault::CutAfter(300_000));
    registry.add_fault("/cdn/", usize::MAX, Fault::TooManyRequests(100));
    let pull = Background::start(&daemon, None, &["pull", &names[0]]);
    eventually("it has been asked to wait", || {
        registry.requests().iter().filter(|request| request.path.starts_with("/cdn/")).count() >= 2
    });
    assert!(!staged(daemon.root()).is_empty(), "it waits");
    drop(pull);
    eventually("it has ended", || staged(daemon.root()).is_empty());
    registry.clear_faults();
    runs_soon(None, &daemon, &["pull", &names[0]]);
}
