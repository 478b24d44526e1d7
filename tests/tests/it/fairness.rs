//! Slow or waiting operations hold no resource that other users or other operations need.

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

use super::multi_user::{can_be_others, shared_daemon};

const MODEL: &str = "application/vnd.ollama.image.model";
const GREEDY: u32 = 65534;
const OTHER: u32 = 12345;
/// Far more than these operations take on a busy machine, and far less than a slow operation takes.
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

fn succeeds_soon(uid: Option<u32>, daemon: &TestDaemon, words: &[&str]) {
    let started = Instant::now();
    run_as(uid, daemon, words).succeeds();
    assert!(started.elapsed() < SOON, "{words:?}: {:?}", started.elapsed());
}

/// A registry that accepts connections and never responds.
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
        eventually("the clients are connected", || self.accepted.lock().unwrap().len() >= connections);
    }

    /// The number of clients that have disconnected.
    fn disconnected(&self) -> usize {
        let mut accepted = self.accepted.lock().unwrap();
        let is_gone = |stream: &mut TcpStream| {
            stream.set_nonblocking(true).unwrap();
            // The second write to a closed connection fails.
            stream.write_all(b" ").is_err()
        };
        accepted.iter_mut().map(is_gone).filter(|gone| *gone).count()
    }
}

/// Models of about 3 MiB without common tensors. A pull takes many minutes at a byte per second.
fn registry_with(count: u64) -> (FakeRegistry, Vec<String>) {
    let registry = FakeRegistry::start().unwrap();
    let add = |number| {
        let (name, model) = (format!("library/m{number}:latest"), ModelFile::dense_of(number, 2, 256));
        // If several pulls waited for a common file, such as a configuration, the highest limit would apply.
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

/// The number of files that the daemon is fetching from the content network.
fn content_fetches(registry: &FakeRegistry) -> usize {
    let requests = registry.requests();
    let paths: std::collections::BTreeSet<_> = requests
        .iter()
        .filter(|request| request.path.starts_with("/cdn/"))
        .map(|request| &request.path)
        .collect();
    paths.len()
}

#[test]
fn slow_pulls_delay_no_other_user_and_no_import() {
    if !can_be_others() {
        return;
    }
    let daemon = shared_daemon();
    let (registry, names) = registry_with(9);
    let (other, greedy) = names.split_last().unwrap();
    let mut crawling: Vec<_> = greedy
        .iter()
        .map(|name| Background::start(&daemon, Some(GREEDY), &["pull", name, "--limit-rate", "1B"]))
        .collect();
    eventually("one user's limit of pulls is reached", || content_fetches(&registry) >= 4);
    let mine = readable_model(&daemon, 91, "mine.gguf");
    succeeds_soon(Some(GREEDY), &daemon, &["import", "--name", "mine", mine.to_str().unwrap()]);
    let theirs = readable_model(&daemon, 92, "theirs.gguf");
    succeeds_soon(Some(OTHER), &daemon, &["import", "--name", "theirs", theirs.to_str().unwrap()]);
    succeeds_soon(Some(OTHER), &daemon, &["pull", other]);
    let (root_registry, root_names) = registry_with(1);
    succeeds_soon(None, &daemon, &["pull", &root_names[0]]);
    drop(root_registry);
    crawling.iter_mut().for_each(Background::check_is_running);
}

/// Three times, one user's imports hang, as many as are permitted, until their clients disconnect.
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
            eventually("one user's limit of imports hangs", || self.files.waiting() >= 2 * round);
            self.check_others(&format!("theirs-{round}"));
            drop(clients);
            eventually("their staged files are gone", || staged(self.daemon.root()).is_empty());
        }
        self.check_others("theirs-4");
    }
}

#[test]
fn imports_that_hang_in_direct_reads_affect_only_their_user() {
    let Some(hangs) = Hangs::prepare() else { return };
    hangs.run(Hang::DirectRead);
}

/// Such a call cannot be interrupted, so the process is left hanging, and further imports of the user are
/// refused.
#[test]
fn imports_that_hang_when_inspected_are_limited_per_user_with_an_error() {
    let Some(hangs) = Hangs::prepare() else { return };
    hangs.run(Hang::Inspect);
    let error = hangs.import(GREEDY, "d").exits_with(4).error();
    assert!(error.message.contains("still wait for their files"), "{error}");
    assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("does not respond")), "{error}");
    hangs.check_others("theirs-5");
    hangs.files.unblock();
    eventually("the user can import again when the files respond", || hangs.import(GREEDY, "e").code == 0);
}

/// Such a read can be interrupted, so nothing remains.
#[test]
fn imports_that_hang_in_cached_reads_end_with_their_clients() {
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
        eventually("their staged files are gone", || staged(daemon.root()).is_empty());
    }
    let good = ModelFile::dense(2).write_to(daemon.scratch(), "good.gguf");
    succeeds_soon(None, &daemon, &["import", good.to_str().unwrap()]);
    eventually("no process is left", || children(daemon.pid()) == 0);
}

fn children(pid: u32) -> usize {
    let tasks = std::fs::read_dir(Path::new("/proc").join(pid.to_string()).join("task")).unwrap().flatten();
    let of_task =
        |task: std::fs::DirEntry| std::fs::read_to_string(task.path().join("children")).unwrap_or_default();
    tasks.map(|task| of_task(task).split_whitespace().count()).sum()
}

#[test]
fn hanging_dry_runs_delay_no_df_doctor_or_gc_and_end_with_their_clients() {
    check_hanging_requests(&["pull", "--dry-run"], 2);
}

#[test]
fn hanging_descriptions_delay_no_df_doctor_or_gc_and_end_with_their_clients() {
    check_hanging_requests(&["show"], 1);
}

/// Four commands wait for a registry that never responds; `running` of one user are in progress at a time.
fn check_hanging_requests(words: &[&str], running: usize) {
    let (daemon, tarpit) = (TestDaemon::start(), Tarpit::start());
    let command = |name: &str| -> Vec<String> {
        words.iter().map(ToString::to_string).chain([name.to_owned()]).collect()
    };
    let hanging: Vec<_> = (0..4)
        .map(|number| {
            let command = command(&tarpit.name(&format!("m{number}")));
            let command: Vec<&str> = command.iter().map(String::as_str).collect();
            Background::start(&daemon, None, &command)
        })
        .collect();
    tarpit.wait_for(running);
    for words in [&["df"][..], &["doctor"], &["gc", "--dry-run"]] {
        let started = Instant::now();
        let run = run_as(None, &daemon, words);
        assert!(run.code <= 1, "{words:?}: {}", run.stderr);
        assert!(started.elapsed() < SOON, "{words:?}: {:?}", started.elapsed());
    }
    drop(hanging);
    let (_registry, names) = registry_with(1);
    let command = command(&names[0]);
    succeeds_soon(None, &daemon, &command.iter().map(String::as_str).collect::<Vec<_>>());
    eventually("the connections are closed", || tarpit.disconnected() >= running);
}

#[test]
fn pull_that_waits_for_retry_after_ends_with_its_client() {
    let daemon = TestDaemon::start();
    let (registry, names) = registry_with(1);
    // A part arrives, so that the client obeys `Retry-After`.
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
    succeeds_soon(None, &daemon, &["pull", &names[0]]);
}
