//! The events in the table of metrics.

use std::fs;
use std::io::{Read as _, Write as _};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Stdio};
use std::time::Duration;

use blobd_client::protocol::request::PinParams;
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::http;
use blobd_tests::model::ModelFile;
use blobd_tests::reader::Reader;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{blob_path, du, flip_byte};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::wait::eventually;
use rustix::process::{Pid, Signal, kill_process};

use super::samples::Samples;
use crate::pull::registry_with;

/// Nothing is read in the background; connections are given up soon.
const CONFIG: &str = "[scrub]\nrate_bytes_per_second = 0\n[transfer]\nstall_timeout_seconds = 1\n\
                      [serve]\nlisten = \"127.0.0.1:0\"\n";
/// A lower store, beside the store.
const LOWER: &str = "lower";
/// Longer than any test may take.
const LONG_PAUSE: Duration = Duration::from_secs(3600);
/// Few files, so that a user has soon as many connections as it may.
const OPEN_FILES: &str = "ulimit -n 256 && exec env \"$@\"";

/// A model that is larger than what is read of a file first.
fn remote_model(seed: u64) -> ModelFile {
    ModelFile::dense_of(seed, 4, 512)
}

/// A daemon, what clients hold of it, and the registries that it has used.
pub(super) struct Fixture {
    daemon: TestDaemon,
    config: PathBuf,
    /// The registry of the model that is pulled first, and repaired.
    registry: FakeRegistry,
    others: Vec<FakeRegistry>,
    readers: Vec<Reader>,
    pull: Option<Child>,
    plans: Vec<Child>,
}

impl Fixture {
    pub(super) fn new() -> Self {
        let folder = tmpfs_directory();
        let config = folder.path().join("config.toml");
        let lower = folder.path().join(LOWER);
        Blobd::at_root(&lower).line("ls").succeeds();
        fs::write(&config, format!("lower = [{lower:?}]\n{CONFIG}")).unwrap();
        let variable = format!("BLOBD_CONFIG={}", config.display());
        let daemon = TestDaemon::start_under(&["sh", "-c", OPEN_FILES, "sh", &variable], folder);
        let registry = registry_with(&remote_model(50));
        let (others, readers, plans) = (Vec::new(), Vec::new(), Vec::new());
        Self { daemon, config, registry, others, readers, pull: None, plans }
    }

    pub(super) fn samples(&self) -> Samples {
        Samples::read(&self.daemon.socket())
    }

    /// The sizes by kind add up to what the disk has.
    pub(super) fn check_disk_bytes(&self) {
        let sum = || self.samples().sum("blobd_disk_bytes");
        eventually("the sizes are those on disk", || sum() == du(self.daemon.root()) as f64);
    }

    fn line(&self, line: &str) {
        self.daemon.command().line(line).succeeds();
    }

    fn import(&self, name: &str, model: &ModelFile) {
        let path = model.write_to(self.daemon.scratch(), &format!("{name}.gguf"));
        self.daemon.command().run(["import", "--name", name, path.to_str().unwrap()]).succeeds();
    }

    /// Pulls a model from a registry of its own, which has this fault once.
    fn pull_with(&mut self, model: &ModelFile, path: &str, fault: Fault) {
        let registry = registry_with(model);
        registry.add_fault(path, 1, fault);
        self.daemon.command().run(["pull", &registry.name("library/tiny:latest")]).succeeds();
        self.others.push(registry);
    }

    /// A digest of a tensor of the model that was pulled first.
    fn pulled_tensor(&self) -> String {
        let name = self.registry.name("library/tiny:latest");
        let shown = self.daemon.command().run(["show", "--json", &name]).succeeds().json();
        shown["tensors"][0]["digest"].as_str().unwrap().to_owned()
    }
}

pub(super) fn list(fixture: &mut Fixture) {
    fixture.line("ls");
}

pub(super) fn remove_absent(fixture: &mut Fixture) {
    fixture.daemon.command().line("rm absent").exits_with(3);
}

pub(super) fn import(fixture: &mut Fixture) {
    fixture.import("first", &ModelFile::dense(1));
}

/// Of tensors that are larger than a block: what is saved is rounded.
pub(super) fn import_similar(fixture: &mut Fixture) {
    let model = || ModelFile::dense_of(70, 2, 256);
    fixture.import("large", &model());
    fixture.import("similar", &model().with("general.name", "similar"));
}

pub(super) fn open(fixture: &mut Fixture) {
    fixture.readers.push(Reader::open(&fixture.daemon.socket(), "first"));
}

pub(super) fn pull(fixture: &mut Fixture) {
    fixture.registry.add_fault("/manifests/", 1, Fault::Status(503));
    let name = fixture.registry.name("library/tiny:latest");
    let downloaded = || fixture.samples().value("blobd_downloaded_bytes_total");
    let before = downloaded();
    fixture.daemon.command().run(["pull", &name]).succeeds();
    let size = remote_model(50).bytes().len() as f64;
    assert!(downloaded() - before >= size, "{before} {}, the file has {size}", downloaded());
}

pub(super) fn pull_absent(fixture: &mut Fixture) {
    fixture.daemon.command().run(["pull", &fixture.registry.name("library/absent")]).exits_with(3);
}

/// Their registry sends nothing, so each holds its permit until it gives up or its client does.
pub(super) fn plan_many_pulls(fixture: &mut Fixture) {
    let registry = registry_with(&ModelFile::dense(54));
    registry.add_fault("/manifests/", usize::MAX, Fault::StallAfter(0, LONG_PAUSE));
    let plan = |_| {
        let mut command = fixture.daemon.command().command();
        command.args(["pull", "--dry-run", &registry.name("library/tiny:latest")]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    fixture.plans = (0..4).map(plan).collect();
    fixture.others.push(registry);
}

pub(super) fn interrupt_plans(fixture: &mut Fixture) {
    for mut plan in fixture.plans.drain(..) {
        plan.kill().unwrap();
        plan.wait().unwrap();
    }
}

pub(super) fn pull_wrong_bytes(fixture: &mut Fixture) {
    let model = remote_model(51);
    let middle = model.bytes().len() as u64 / 2;
    fixture.pull_with(&model, "/cdn/", Fault::FlipInFile(middle));
}

pub(super) fn pull_from_stalling_server(fixture: &mut Fixture) {
    fixture.pull_with(&remote_model(52), "/cdn/", Fault::StallAfter(5000, LONG_PAUSE));
}

pub(super) fn begin_slow_pull(fixture: &mut Fixture) {
    let registry = registry_with(&remote_model(53));
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100, Duration::from_millis(100)));
    let mut command = fixture.daemon.command().command();
    command.args(["pull", &registry.name("library/tiny:latest")]).stdout(Stdio::null()).stderr(Stdio::null());
    fixture.pull = Some(command.spawn().unwrap());
    fixture.others.push(registry);
}

pub(super) fn interrupt_pull(fixture: &mut Fixture) {
    let mut pull = fixture.pull.take().unwrap();
    pull.kill().unwrap();
    pull.wait().unwrap();
}

/// A push that its client interrupts after it has begun to send.
pub(super) fn begin_slow_push(fixture: &mut Fixture) {
    let (registry, name) = (FakeRegistry::start().unwrap(), fixture.registry.name("library/tiny:latest"));
    let mut command = fixture.daemon.command().command();
    command.args(["push", &name, &registry.name("me/slow:1"), "--limit-rate", "1KB"]);
    fixture.pull = Some(command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap());
    fixture.others.push(registry);
}

pub(super) fn find_damage(fixture: &mut Fixture) {
    flip_byte(&blob_path(fixture.daemon.root(), &fixture.pulled_tensor()), 3);
    let name = fixture.registry.name("library/tiny:latest");
    fixture.daemon.command().run(["verify", &name]).exits_with(5);
}

pub(super) fn repair(fixture: &mut Fixture) {
    let name = fixture.registry.name("library/tiny:latest");
    fixture.daemon.command().run(["verify", "--repair", &name]).succeeds();
}

pub(super) fn add_unneeded_blob(fixture: &mut Fixture) {
    let content = [7; 50_000];
    let path = blob_path(fixture.daemon.root(), &Digest::of(&content).to_string());
    fs::write(path, content).unwrap();
}

pub(super) fn collect(fixture: &mut Fixture) {
    fixture.line("gc");
}

pub(super) fn trash(fixture: &mut Fixture) {
    fixture.line("rm --keep 7d similar");
}

/// Large enough for what is there, and too small for another model.
pub(super) fn set_quota(fixture: &mut Fixture) {
    let usage = fixture.daemon.client().disk_usage().unwrap();
    let quota = usage.used_bytes + 50_000;
    let space =
        format!("[space]\nquota = '{quota} B'\nmin_free = '4096 B'\nevict = \"all\"\nhigh_watermark = 100\n");
    let groups = "[quotas.groups]\n0 = { together = \"1 TiB\" }\n";
    let before = fs::read_to_string(&fixture.config).unwrap();
    fs::write(&fixture.config, before + &space + groups).unwrap();
    let pid = Pid::from_raw(fixture.daemon.pid().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    eventually("the configuration is read", || fixture.daemon.log().contains("SIGHUP: "));
}

pub(super) fn import_beyond_quota(fixture: &mut Fixture) {
    fixture.import("last", &ModelFile::dense(60));
}

pub(super) fn connect_too_often(fixture: &mut Fixture) {
    let connect = || UnixStream::connect(fixture.daemon.socket()).ok();
    let held: Vec<UnixStream> = (0..200).filter_map(|_| connect()).collect();
    held.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    // Closed at once, they would never be open at the same time for a daemon that accepts them later.
    let is_answered = |mut stream: &UnixStream| stream.read(&mut [0]).is_ok();
    eventually("a connection is refused", || held.iter().any(is_answered));
    drop(held);
    // The daemon notices a moment later that they are closed.
    eventually("connections are accepted again", || {
        http::get(&fixture.daemon.socket(), "/v1/version").status == 200
    });
}

pub(super) fn read_from_another_machine(fixture: &mut Fixture) {
    let log = fixture.daemon.log();
    let address =
        log.split("models for other machines on http://").nth(1).unwrap().split('/').next().unwrap();
    let mut stream = TcpStream::connect(address).unwrap();
    let request = format!("GET /v2/ HTTP/1.1\r\nHost: {address}\r\nConnection: close\r\n\r\n");
    stream.write_all(request.as_bytes()).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 200 "), "{answer}");
}

/// The record of a pass: the test cannot wait for one.
pub(super) fn end_scrub(fixture: &mut Fixture) {
    let record = r#"{"began":1700000000,"running":false,"blobs":9,"bytes":9,"ended":1700000009}"#;
    fs::write(fixture.daemon.root().join("scrub.json"), record).unwrap();
}

pub(super) fn lose_lower_store(fixture: &mut Fixture) {
    let lower = fixture.daemon.root().with_file_name(LOWER);
    fs::rename(&lower, lower.with_extension("away")).unwrap();
    fixture.line("ls");
}

/// A directory has the name of the next file of each class.
pub(super) fn block_audit_log(fixture: &mut Fixture) {
    let audit = fixture.daemon.root().join("audit");
    for class in ["audit", "attempts"] {
        fs::create_dir(audit.join(format!("{class}-00000002.jsonl"))).unwrap();
        fs::remove_file(audit.join(format!("{class}-00000001.jsonl"))).unwrap();
    }
    fixture.line("limit 20MB");
    fixture.line("gc");
}

/// More refused requests than are recorded.
/// The limit is for ten seconds. A busy machine exceeds it too, because a record with a long name counts as several.
pub(super) fn attempt_too_often(fixture: &mut Fixture) {
    let client = fixture.daemon.client();
    let reference: Reference = "absent".repeat(40).parse().unwrap();
    for _ in 0..1100 {
        client.pin(&PinParams { reference: reference.clone(), pinned: true }).unwrap_err();
    }
}

pub(super) fn restart(fixture: &mut Fixture) {
    fixture.readers.clear();
    fixture.daemon.stop();
    fixture.daemon.restart();
}
