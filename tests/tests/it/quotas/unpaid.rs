//! Data that is stored but not paid for by a name: in the trash, and of unfinished downloads. Plans and the audit log.

use std::process::Stdio;

use blobd_tests::oracle::sha256;
use blobd_tests::registry::Fault;

use super::*;

const ALWAYS: usize = usize::MAX;

/// A registry with one model, its bytes, and the path of its weights.
struct Remote {
    registry: FakeRegistry,
    bytes: Vec<u8>,
    weights: String,
}

impl Remote {
    /// Some MiB, so that records count little.
    fn new(seed: u64) -> Self {
        let bytes = ModelFile::dense_of(seed, 4, 512).bytes();
        let registry = FakeRegistry::start().unwrap();
        registry.add_model("library/m:latest", b"{}", &[(MODEL, &bytes)]).unwrap();
        let weights = format!("/cdn/sha256:{}", sha256(&bytes));
        Self { registry, bytes, weights }
    }

    fn size(&self) -> u64 {
        self.bytes.len() as u64
    }

    fn name(&self) -> String {
        self.registry.name("library/m")
    }

    /// Has a pull end in the middle of the weights.
    fn pull_part(&self, shared: &Shared, uid: u32) {
        self.registry.add_fault(&self.weights, 1, Fault::CutAfter(self.bytes.len() / 2));
        self.registry.add_fault(&self.weights, ALWAYS, Fault::Status(404));
        shared.run(uid, &["pull", &self.name()]).exits_with(1);
        self.registry.clear_faults();
        assert!(shared.own(uid).charged_bytes > 0);
    }
}

#[test]
fn model_that_only_the_trash_of_another_user_keeps_is_refused() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    let remote = Remote::new(21);
    shared.run(BOB, &["pull", &remote.name()]).succeeds();
    shared.daemon.command().run(["rm", "--keep", "7d", &remote.name()]).succeeds();
    shared.set_quotas(&hard(ANN, remote.size() / 2));
    is_over_quota(shared.run(ANN, &["pull", &remote.name(), "--json"]));
    let file = shared.daemon.scratch().join("trashed.gguf");
    fs::write(&file, &remote.bytes).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    is_over_quota(shared.run(ANN, &["import", file.to_str().unwrap(), "--name", "t", "--json"]));
    assert_eq!((shared.own(ANN).charged_bytes, shared.own(ANN).models), (0, 0));
    shared.set_quotas(&hard(ANN, remote.size() * 2));
    shared.run(ANN, &["pull", &remote.name(), "--json"]).succeeds();
    assert!(shared.own(ANN).charged_bytes >= remote.size());
    shared.all();
}

#[test]
fn unfinished_download_of_another_user_counts_before_bytes_move() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    let remote = Remote::new(22);
    remote.pull_part(&shared, BOB);
    // Enough for what is left of the file, and not for all of it.
    shared.set_quotas(&hard(ANN, remote.size() * 3 / 4));
    let served = remote.registry.bytes_served();
    is_over_quota(shared.run(ANN, &["pull", &remote.name(), "--json"]));
    let moved = remote.registry.bytes_served() - served;
    assert!(moved < remote.size() / 10, "{moved} bytes moved");
    assert_eq!(shared.own(ANN).charged_bytes, 0);
    shared.run(BOB, &["pull", &remote.name(), "--json"]).succeeds();
    shared.all();
}

#[test]
fn resumed_pull_reserves_the_rest_beside_what_it_has() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    let remote = Remote::new(23);
    remote.pull_part(&shared, ANN);
    shared.set_quotas(&hard(ANN, remote.size() * 5 / 4));
    remote.registry.add_fault(&remote.weights, ALWAYS, Fault::Slow(1000, Duration::from_millis(20)));
    let mut command = shared.command_in_group(ANN, ANN, &["pull", &remote.name()]);
    let mut pull = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().unwrap();
    let served = remote.registry.bytes_served();
    eventually("the pull is resumed", || remote.registry.bytes_served() > served + 2000);
    let file = shared.daemon.scratch().join("half.gguf");
    fs::write(&file, ModelFile::dense_of(24, 2, 512).bytes()).unwrap();
    fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
    is_over_quota(shared.run(ANN, &["import", file.to_str().unwrap(), "--name", "half", "--json"]));
    pull.kill().unwrap();
    pull.wait().unwrap();
}

#[test]
fn model_from_the_trash_is_charged_to_its_user_again() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    shared.import(ANN, 1, "x").succeeds();
    let before = shared.own(ANN).charged_bytes;
    let root = |line: &str| drop(shared.daemon.command().line(line).succeeds());
    root("rm --keep 7d x");
    shared.import(BOB, 2, "x").succeeds();
    // The record in the trash takes the place of those of the name.
    assert!(shared.own(ANN).charged_bytes > before * 4 / 5 && shared.own(ANN).models == 0);
    let of_bob = shared.own(BOB);
    assert_eq!(of_bob.models, 1);
    root("rm x");
    assert!(shared.own(BOB).charged_bytes < of_bob.charged_bytes);
    root("undelete x");
    assert_eq!((shared.own(ANN).charged_bytes, shared.own(ANN).models), (before, 1));
    assert_eq!(shared.own(BOB).models, 0);
    shared.all();
}

#[test]
fn charges_and_the_audit_log_add_up_to_the_disk_usage() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("[audit]\nenabled = true\n");
    shared.import(ANN, 1, "a").succeeds();
    shared.import(BOB, 1, "b").succeeds();
    shared.daemon.command().line("rm a").succeeds();
    let log = shared.daemon.root().join("audit").join("audit-00000001.jsonl");
    eventually("the log has records", || fs::metadata(&log).is_ok_and(|log| log.len() > 0));
    shared.all();
}

#[test]
fn dry_run_reports_what_the_quota_of_the_user_leaves() {
    if !can_be_others() {
        return;
    }
    let shared = Shared::start("");
    let remote = Remote::new(25);
    shared.set_quotas(&hard(ANN, remote.size() / 2));
    let plan = |uid| shared.run(uid, &["pull", "--dry-run", &remote.name(), "--json"]).succeeds().json();
    let of_ann = plan(ANN);
    let space = &of_ann["space"];
    assert_eq!((&space["limit"], &of_ann["enough_space"]), (&"user_quota".into(), &false.into()), "{of_ann}");
    assert_eq!(space["available_bytes"].as_u64(), Some(remote.size() / 2));
    let needed = space["needed_bytes"].as_u64().unwrap();
    assert!(needed >= remote.size());
    assert_eq!(space["missing_bytes"].as_u64(), Some(needed - remote.size() / 2));
    let text = shared.run(ANN, &["pull", "--dry-run", &remote.name()]).succeeds().text();
    assert!(text.contains("over quota: ") && text.contains("of your quota"), "{text}");
    assert_eq!(plan(BOB)["enough_space"], true);
    shared.set_quotas(&hard(ANN, remote.size() * 2));
    let fits = plan(ANN);
    assert_eq!((&fits["space"]["limit"], &fits["enough_space"]), (&"user_quota".into(), &true.into()));
    assert_eq!(fits["space"]["missing_bytes"], 0);
    shared.run(ANN, &["pull", &remote.name()]).succeeds();
}
