//! What happens in the table of metrics.

use std::fs;
use std::io::Read as _;
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
const CONFIG: &str = "[scrub]\nrate_bytes_per_second = 0\n[transfer]\nstall_timeout_seconds = 1\n";
/// A lower store, beside the store.
const LOWER: &str = "lower";
/// Longer than any test may take.
const FOR_EVER: Duration = Duration::from_secs(3600);
/// Few files, so that a user has soon as many connections as it may.
const OPEN_FILES: &str = "ulimit -n 256 && exec env \"$@\"";

/// A model that is larger than what is read of a file first.
fn remote_model(seed: u64) -> ModelFile {
    ModelFile::dense_of(seed, 4, 512)
}

/// A daemon, what clients hold of it, and the registries that it has used.
pub(super) struct World {
    daemon: TestDaemon,
    config: PathBuf,
    /// The registry of the model that is pulled first, and repaired.
    registry: FakeRegistry,
    others: Vec<FakeRegistry>,
    readers: Vec<Reader>,
    pull: Option<Child>,
    plans: Vec<Child>,
}

impl World {
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

pub(super) fn list(world: &mut World) {
    world.line("ls");
}

pub(super) fn remove_absent(world: &mut World) {
    world.daemon.command().line("rm absent").exits_with(3);
}

pub(super) fn import(world: &mut World) {
    world.import("first", &ModelFile::dense(1));
}

/// Of tensors that are larger than a block: what is saved is rounded.
pub(super) fn import_similar(world: &mut World) {
    let model = || ModelFile::dense_of(70, 2, 256);
    world.import("large", &model());
    world.import("similar", &model().with("general.name", "similar"));
}

pub(super) fn open(world: &mut World) {
    world.readers.push(Reader::open(&world.daemon.socket(), "first"));
}

pub(super) fn pull(world: &mut World) {
    world.registry.add_fault("/manifests/", 1, Fault::Status(503));
    let name = world.registry.name("library/tiny:latest");
    let downloaded = || world.samples().value("blobd_downloaded_bytes_total");
    let before = downloaded();
    world.daemon.command().run(["pull", &name]).succeeds();
    let size = remote_model(50).bytes().len() as f64;
    assert!(downloaded() - before >= size, "{before} {}, the file has {size}", downloaded());
}

pub(super) fn pull_absent(world: &mut World) {
    world.daemon.command().run(["pull", &world.registry.name("library/absent")]).exits_with(3);
}

/// Their registry sends nothing, so each holds its permit until it gives up or its client does.
pub(super) fn plan_many_pulls(world: &mut World) {
    let registry = registry_with(&ModelFile::dense(54));
    registry.add_fault("/manifests/", usize::MAX, Fault::StallAfter(0, FOR_EVER));
    let plan = |_| {
        let mut command = world.daemon.command().command();
        command.args(["pull", "--dry-run", &registry.name("library/tiny:latest")]);
        command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap()
    };
    world.plans = (0..4).map(plan).collect();
    world.others.push(registry);
}

pub(super) fn interrupt_plans(world: &mut World) {
    for mut plan in world.plans.drain(..) {
        plan.kill().unwrap();
        plan.wait().unwrap();
    }
}

pub(super) fn pull_wrong_bytes(world: &mut World) {
    let model = remote_model(51);
    let middle = model.bytes().len() as u64 / 2;
    world.pull_with(&model, "/cdn/", Fault::FlipInFile(middle));
}

pub(super) fn pull_from_stalling_server(world: &mut World) {
    world.pull_with(&remote_model(52), "/cdn/", Fault::StallAfter(5000, FOR_EVER));
}

pub(super) fn begin_slow_pull(world: &mut World) {
    let registry = registry_with(&remote_model(53));
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(100, Duration::from_millis(100)));
    let mut command = world.daemon.command().command();
    command.args(["pull", &registry.name("library/tiny:latest")]).stdout(Stdio::null()).stderr(Stdio::null());
    world.pull = Some(command.spawn().unwrap());
    world.others.push(registry);
}

pub(super) fn interrupt_pull(world: &mut World) {
    let mut pull = world.pull.take().unwrap();
    pull.kill().unwrap();
    pull.wait().unwrap();
}

pub(super) fn find_damage(world: &mut World) {
    flip_byte(&blob_path(world.daemon.root(), &world.pulled_tensor()), 3);
    let name = world.registry.name("library/tiny:latest");
    world.daemon.command().run(["verify", &name]).exits_with(5);
}

pub(super) fn repair(world: &mut World) {
    let name = world.registry.name("library/tiny:latest");
    world.daemon.command().run(["verify", "--repair", &name]).succeeds();
}

pub(super) fn add_unneeded_blob(world: &mut World) {
    let content = [7; 50_000];
    let path = blob_path(world.daemon.root(), &Digest::of(&content).to_string());
    fs::write(path, content).unwrap();
}

pub(super) fn collect(world: &mut World) {
    world.line("gc");
}

pub(super) fn trash(world: &mut World) {
    world.line("rm --keep 7d similar");
}

/// Large enough for what is there, and too small for another model.
pub(super) fn set_quota(world: &mut World) {
    let usage = world.daemon.client().disk_usage().unwrap();
    let quota = usage.used_bytes + 50_000;
    let space = format!("[space]\nquota = {quota}\nmin_free = 4096\nevict = \"all\"\nhigh_watermark = 100\n");
    let groups = "[quotas.groups]\n0 = { together = \"1 TiB\" }\n";
    let before = fs::read_to_string(&world.config).unwrap();
    fs::write(&world.config, before + &space + groups).unwrap();
    let pid = Pid::from_raw(world.daemon.pid().try_into().unwrap()).unwrap();
    kill_process(pid, Signal::HUP).unwrap();
    eventually("the configuration is read", || world.daemon.log().contains("SIGHUP: "));
}

pub(super) fn import_beyond_quota(world: &mut World) {
    world.import("last", &ModelFile::dense(60));
}

pub(super) fn connect_too_often(world: &mut World) {
    let connect = || UnixStream::connect(world.daemon.socket()).ok();
    let held: Vec<UnixStream> = (0..200).filter_map(|_| connect()).collect();
    held.iter().for_each(|stream| stream.set_nonblocking(true).unwrap());
    // Closed at once, they would never be open at the same time for a daemon that accepts them later.
    let is_answered = |mut stream: &UnixStream| stream.read(&mut [0]).is_ok();
    eventually("a connection is refused", || held.iter().any(is_answered));
    drop(held);
    // The daemon notices a moment later that they are closed.
    eventually("connections are accepted again", || {
        http::get(&world.daemon.socket(), "/v1/version").status == 200
    });
}

/// The record of a pass: the test cannot wait for one.
pub(super) fn end_scrub(world: &mut World) {
    let record = r#"{"began":1700000000,"running":false,"blobs":9,"bytes":9,"ended":1700000009}"#;
    fs::write(world.daemon.root().join("scrub.json"), record).unwrap();
}

pub(super) fn lose_lower_store(world: &mut World) {
    let lower = world.daemon.root().with_file_name(LOWER);
    fs::rename(&lower, lower.with_extension("away")).unwrap();
    world.line("ls");
}

/// A directory has the name of the next file of each class.
pub(super) fn block_audit_log(world: &mut World) {
    let audit = world.daemon.root().join("audit");
    for class in ["audit", "attempts"] {
        fs::create_dir(audit.join(format!("{class}-00000002.jsonl"))).unwrap();
        fs::remove_file(audit.join(format!("{class}-00000001.jsonl"))).unwrap();
    }
    world.line("limit 20MB");
    world.line("gc");
}

/// More refused requests than are recorded.
pub(super) fn attempt_too_often(world: &mut World) {
    let client = world.daemon.client();
    let reference: Reference = "absent".parse().unwrap();
    for _ in 0..1100 {
        client.pin(&PinParams { reference: reference.clone(), pinned: true }).unwrap_err();
    }
}

pub(super) fn restart(world: &mut World) {
    world.readers.clear();
    world.daemon.stop();
    world.daemon.restart();
}
