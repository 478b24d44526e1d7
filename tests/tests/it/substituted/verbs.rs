//! Runs every verb and checks how long it takes.

use std::fs::{self, File};
use std::path::Path;
use std::process::{Child, Stdio};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant};

use blobd_client::Client;
use blobd_client::protocol::request::{
    GcParams, ImportParams, PinParams, PullParams, TagParams, UndeleteParams, VerifyParams,
};
use blobd_store_format::reference::Reference;
use blobd_tests::command::{self, Blobd};
use rustix::process::{Pid, Signal, kill_process};

use super::template::{Template, name_of};
use super::user::User;

/// The time limit of a verb on such a small store.
const LIMIT: Duration = Duration::from_secs(2);

/// The time after which a hanging verb is killed.
const TIMEOUT: Duration = Duration::from_secs(20);

/// Verbs that open the store themselves. None of them removes what a model needs.
pub(super) fn run_embedded(user: User, blobd: &Blobd) -> Vec<String> {
    let mut slow = Vec::new();
    for line in ["ls", "gc"] {
        let mut command = user.blobd(blobd);
        let start = Instant::now();
        let run = command::run(command.args(line.split_whitespace()));
        note(&mut slow, line, start);
        check_told(line, run.code, &run.stderr);
    }
    slow
}

/// Runs a daemon, if it starts, and sends all requests to it.
pub(super) fn run_through_daemon(
    template: &Template,
    user: User,
    blobd: &Blobd,
    folder: &Path,
) -> Vec<String> {
    let mut slow = Vec::new();
    let (socket, log) = (folder.join("s"), folder.join("log"));
    let mut serve = user.blobd(blobd);
    serve.args(["serve", "--socket"]).arg(&socket).stderr(File::create(&log).unwrap()).stdout(Stdio::null());
    let start = Instant::now();
    let mut daemon = serve.spawn().unwrap();
    let client = wait_for(&mut daemon, &socket, start);
    note(&mut slow, "serve", start);
    let Some(client) = client else {
        let code = daemon.wait().unwrap().code().unwrap_or(-1);
        check_told("serve", code, &fs::read_to_string(&log).unwrap());
        return slow;
    };
    let (further, pullable) = (Template::further(folder), template.pullable());
    let (sender, finished) = mpsc::channel();
    // On its own thread: a verb that hangs ends with the daemon.
    let verbs = thread::spawn(move || ask_everything(&client, &further, &pullable, &sender));
    let start = Instant::now();
    while let Ok((verb, start)) = finished.recv_timeout(TIMEOUT.saturating_sub(start.elapsed())) {
        note(&mut slow, verb, start);
    }
    if !verbs.is_finished() && start.elapsed() >= TIMEOUT {
        slow.push("a verb that was still running".to_owned());
    }
    let start = Instant::now();
    let status = end(&mut daemon);
    note(&mut slow, "SIGTERM", start);
    assert!(status, "SIGTERM: {}", fs::read_to_string(&log).unwrap());
    verbs.join().unwrap();
    slow
}

/// Asserts that a failed command prints an error, and that no command panics.
fn check_told(line: &str, code: i32, stderr: &str) {
    assert!((0..=7).contains(&code), "{line}: exit code {code}: {stderr}");
    assert!(code == 0 || !stderr.trim().is_empty(), "{line}: exit code {code} without an error message");
    assert!(!stderr.contains("panicked"), "{line}: {stderr}");
}

fn note(slow: &mut Vec<String>, verb: &str, start: Instant) {
    let taken = start.elapsed();
    if taken > LIMIT {
        slow.push(format!("{verb}: {taken:?}"));
    }
}

/// Returns a client as soon as the daemon responds; `None` if it ends instead.
fn wait_for(daemon: &mut Child, socket: &Path, start: Instant) -> Option<Client> {
    while start.elapsed() < TIMEOUT {
        if let Ok(client) = Client::connect(socket)
            && client.version().is_ok()
        {
            return Some(client);
        }
        if daemon.try_wait().unwrap().is_some() {
            return None;
        }
        thread::sleep(Duration::from_millis(2));
    }
    daemon.kill().unwrap();
    None
}

/// Stops the daemon with SIGTERM. Returns false if it had to be killed.
fn end(daemon: &mut Child) -> bool {
    kill_process(Pid::from_child(daemon), Signal::TERM).unwrap();
    let start = Instant::now();
    while start.elapsed() < TIMEOUT {
        if daemon.try_wait().unwrap().is_some() {
            return true;
        }
        thread::sleep(Duration::from_millis(2));
    }
    daemon.kill().unwrap();
    daemon.wait().unwrap();
    false
}

fn name(model: &str) -> Reference {
    name_of(model).parse().unwrap()
}

/// Every verb must end; it need not succeed.
fn ask_everything(
    client: &Client,
    further: &Path,
    pullable: &str,
    finished: &mpsc::Sender<(&'static str, Instant)>,
) {
    let ask = |verb: &'static str, ask: &mut dyn FnMut()| {
        let start = Instant::now();
        ask();
        // The channel is closed once a verb has taken too long.
        let _ = finished.send((verb, start));
    };
    ask("ls", &mut || drop(client.models()));
    for model in ["a", "b"] {
        ask("show", &mut || drop(client.model(&name(model))));
        ask("open", &mut || drop(client.open(&name(model)).map(|model| model.map_all().map(drop))));
    }
    ask("df", &mut || drop(client.disk_usage()));
    ask("ps", &mut || drop(client.sessions()));
    ask("trash", &mut || drop(client.trash()));
    ask("doctor", &mut || drop(client.doctor()));
    ask("eviction", &mut || drop(client.eviction_plan(Some(1 << 20))));
    ask("verify", &mut || drop(client.verify(&VerifyParams::default(), |_| ())));
    ask("verify --repair", &mut || {
        drop(client.verify(&VerifyParams { repair: true, ..VerifyParams::default() }, |_| ()));
    });
    let params = ImportParams { name: Some(name("n")), ..ImportParams::new("n.gguf") };
    ask("import", &mut || drop(client.import(&params, File::open(further).unwrap(), |_, _| ())));
    ask("tag", &mut || {
        drop(client.tag(&TagParams { source: name("a"), target: name("a2"), force: false, origin: None }));
    });
    for pinned in [true, false] {
        ask("pin", &mut || drop(client.pin(&PinParams { reference: name("a"), pinned })));
    }
    ask("undelete", &mut || {
        drop(client.undelete(&UndeleteParams { reference: name("absent"), name: None, force: false }));
    });
    let params = PullParams::of(pullable.parse().unwrap());
    ask("pull", &mut || drop(client.pull(&params, |_| ())));
    ask("gc --dry-run", &mut || drop(client.gc(&GcParams { dry_run: true, ..GcParams::default() })));
    ask("gc", &mut || drop(client.gc(&GcParams { dry_run: false, ..GcParams::default() })));
    ask("reindex", &mut || drop(client.reindex()));
}
