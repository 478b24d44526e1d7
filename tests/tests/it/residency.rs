//! Residency of a model in memory, and read-ahead.

use std::fs::File;
use std::path::Path;

use blobd_client::model::OpenModel;
use blobd_client::protocol::request::{ExpertSelection, OpenParams, TensorSelection};
use blobd_client::residency::{Prefetch, Release, Residency};
use blobd_store_format::gguf::GgmlType;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::wait::eventually;
use rustix::fs::{Advice, fadvise};

/// A daemon on a disk with a model of one stack of eight experts, a mebibyte each.
pub(super) fn daemon() -> TestDaemon {
    let daemon = TestDaemon::start_on_disk();
    let mut file = ModelFile::empty();
    file.add_noise(1, "blk.0.ffn_up_exps.weight", GgmlType::I8, &[1024, 1024, 8]);
    file.add_noise(1, "output.weight", GgmlType::I8, &[1 << 20]);
    let path = file.write_to(daemon.scratch(), "m.gguf");
    daemon.command().run(["import".as_ref(), path.as_os_str()]).succeeds();
    daemon
}

fn open(daemon: &TestDaemon) -> OpenModel {
    daemon.client().open(&"m".parse().unwrap()).unwrap()
}

/// Drops the store's files from the page cache; they must not be mapped.
pub(super) fn drop_cached(root: &Path) {
    for entry in std::fs::read_dir(root.join("blobs")).unwrap() {
        let file = File::open(entry.unwrap().path()).unwrap();
        rustix::fs::fsync(&file).unwrap();
        fadvise(&file, 0, None, Advice::DontNeed).unwrap();
    }
}

fn resident(model: &OpenModel, name: &str) -> Residency {
    model.map(name).unwrap().bytes().residency().unwrap()
}

#[test]
fn one_expert_is_read_ahead_and_the_others_stay_on_the_disk() {
    let daemon = daemon();
    drop_cached(daemon.root());
    let model = open(&daemon);
    let stack = resident(&model, "blk.0.ffn_up_exps.weight");
    assert_eq!(stack, Residency { bytes: 8 << 20, resident_bytes: 0 });
    let [expert] = model.expert("blk.0.", 5).unwrap().try_into().unwrap();
    assert_eq!((expert.name(), expert.shape()), ("blk.0.ffn_up_exps.weight", &[1024, 1024][..]));
    assert_eq!(expert.bytes().len(), 1 << 20);
    let whole = Residency { bytes: 1 << 20, resident_bytes: 1 << 20 };
    // Pages that the kernel is migrating count as absent, so this is retried.
    let is_whole = || expert.bytes().residency().unwrap() == whole;
    expert.bytes().prefetch(Prefetch::Populate).unwrap();
    eventually("the expert is in memory", is_whole);
    let [first] = model.expert("blk.0.", 0).unwrap().try_into().unwrap();
    assert_eq!(first.bytes().residency().unwrap().resident_bytes, 0, "far from what was read");
    assert_eq!(resident(&model, "output.weight").resident_bytes, 0);
    first.bytes().prefetch(Prefetch::ReadAhead).unwrap();
    eventually("it is read in the background", || first.bytes().residency().unwrap().resident_bytes > 0);
    for how in [Release::Cold, Release::Unmap] {
        expert.bytes().release(how).unwrap();
        eventually(&format!("{how:?} leaves it cached"), is_whole);
    }
    assert!(model.expert("blk.0.", 8).unwrap().is_empty() && model.expert("blk.1.", 0).unwrap().is_empty());
}

#[test]
fn experts_are_opened_without_the_rest_of_the_model() {
    let daemon = TestDaemon::start();
    for (name, file) in
        [("stacked", ModelFile::stacked_experts(1, 4)), ("separate", ModelFile::separate_experts(1, 4))]
    {
        let path = file.write_to(daemon.scratch(), name);
        daemon
            .command()
            .run(["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()])
            .succeeds();
    }
    let open = |name: &str, prefix: &str, numbers: &[u64]| {
        let experts = ExpertSelection { prefix: prefix.to_owned(), numbers: numbers.to_vec() };
        let tensors = TensorSelection::Experts(experts);
        daemon.client().open_with(&OpenParams { tensors, ..OpenParams::new(name.parse().unwrap()) }).unwrap()
    };
    let (stacked, separate) = (open("stacked", "blk.0.", &[1, 3]), open("separate", "", &[1, 3]));
    assert_eq!((stacked.tensors().len(), separate.tensors().len()), (3, 6));
    for number in [1, 3] {
        let bytes = |model: &OpenModel| {
            let parts = model.expert("blk.0.", number).unwrap();
            parts.iter().map(|part| (part.shape().to_vec(), part.bytes().to_vec())).collect::<Vec<_>>()
        };
        assert_eq!(bytes(&stacked).len(), 3);
        assert!(bytes(&stacked) == bytes(&separate), "however the file spells them");
    }
    assert!(separate.expert("blk.0.", 2).unwrap().is_empty(), "not asked for");
    assert!(open("stacked", "blk.1.", &[0]).tensors().is_empty());
    assert!(open("stacked", "", &[4]).tensors().is_empty());
    assert!(open("separate", "", &[]).tensors().is_empty());
}

#[test]
fn open_model_survives_its_daemon_and_reports_the_lost_lease() {
    let mut daemon = daemon();
    let client = daemon.client();
    let model = open(&daemon);
    assert!(model.has_lease());
    daemon.kill();
    eventually("the lease is gone", || !model.has_lease());
    let before = model.map("output.weight").unwrap();
    daemon.restart();
    let again = client.open(&"m".parse().unwrap()).unwrap();
    assert!(again.has_lease() && !model.has_lease());
    assert!(before[..] == again.map("output.weight").unwrap()[..]);
}
