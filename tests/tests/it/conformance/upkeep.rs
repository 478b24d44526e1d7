//! Pins, files of dead processes, `doctor`, and the eviction plan.

use std::fs;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::upkeep::CheckStatus;
use blobd_client::protocol::upkeep::GcReason;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{allocated_bytes, check_empty, names, staged};
use blobd_tests::verbs::Verbs;

use super::import;

fn is_pinned(verbs: &impl Verbs, name: &str) -> bool {
    let models = verbs.list().unwrap().models;
    models.iter().find(|model| model.name == name).expect("the model is listed").pinned
}

pub(super) fn pinned_model_is_not_removed_until_it_is_unpinned(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    import(verbs, &ModelFile::dense(2), "other");
    let pinned = verbs.pin("M").unwrap();
    assert_eq!((pinned.name.as_str(), pinned.pinned), ("m:latest", true));
    verbs.pin("m").unwrap();
    assert!(is_pinned(verbs, "m:latest") && !is_pinned(verbs, "other:latest"));
    for removal in [verbs.remove(&["m"]), verbs.move_to_trash(&["m"], 60)] {
        let error = removal.unwrap_err();
        assert_eq!(error.code, ErrorCode::Denied);
        assert!(error.message.contains("blobd unpin m:latest"), "{error}");
    }
    assert_eq!(verbs.list().unwrap().models.len(), 2, "it is not removed");
    assert!(verbs.trash().unwrap().models.is_empty());
    assert!(!verbs.unpin("m").unwrap().pinned);
    verbs.remove(&["other", "m"]).unwrap();
    check_empty(verbs.root());
    assert_eq!(names(&verbs.root().join("pins")), [""; 0]);
}

pub(super) fn unpinning_an_unpinned_model_succeeds(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let unpinned = verbs.unpin("m").unwrap();
    assert_eq!((unpinned.name.as_str(), unpinned.pinned), ("m:latest", false));
    assert!(!is_pinned(verbs, "m:latest"));
}

pub(super) fn unknown_model_cannot_be_pinned(verbs: &impl Verbs) {
    for result in [verbs.pin("nobody"), verbs.unpin("nobody")] {
        assert_eq!(result.unwrap_err().code, ErrorCode::NotFound);
    }
    assert_eq!(names(&verbs.root().join("pins")), [""; 0]);
}

/// A daemon lists these files; a command has deleted them when it opened the store.
pub(super) fn files_of_a_dead_transaction_are_collected(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let left = verbs.root().join("staging/1-1");
    fs::create_dir(&left).unwrap();
    fs::write(left.join("0"), vec![1; 10_000]).unwrap();
    fs::write(verbs.root().join("staging/1-2"), "a record that was being written").unwrap();
    let planned = verbs.gc(true).unwrap();
    for item in &planned.deleted {
        assert_eq!((item.reason, item.digest), (GcReason::AbandonedStaging, None));
    }
    assert!(planned.deleted.len() == staged(verbs.root()).len(), "{planned:?}");
    let done = verbs.gc(false).unwrap();
    assert_eq!((done.deleted, done.freed_bytes), (planned.deleted, planned.freed_bytes));
    assert_eq!(staged(verbs.root()), [""; 0]);
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
}

pub(super) fn eviction_plan_of_a_store_without_a_quota_says_so(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let plan = verbs.eviction_plan(None).unwrap();
    assert_eq!((plan.policy.as_str(), plan.quota_bytes, plan.needed_bytes), ("never", None, 0));
    assert_eq!((plan.evicted.len(), plan.freed_bytes), (0, 0));
    let records: u64 = ["manifests", "origins", "history"]
        .map(|name| allocated_bytes(&verbs.root().join(name)))
        .iter()
        .sum();
    assert_eq!(plan.used_bytes, verbs.usage().unwrap().physical_bytes + records);
    let plan = verbs.eviction_plan(Some(1)).unwrap();
    assert_eq!((plan.needed_bytes, plan.evicted.len()), (1, 0));
    assert_eq!(plan.spared[0].reason, "cannot be pulled again");
}

pub(super) fn doctor_finds_nothing_wrong_with_a_new_store(verbs: &impl Verbs) {
    // `blobd doctor` itself creates no store.
    assert!(verbs.list().unwrap().models.is_empty());
    let report = verbs.doctor().unwrap();
    let find = |name: &str| report.checks.iter().find(|check| check.name == name).expect(name).status;
    // Other checks depend on the test machine, such as its limits or a store on tmpfs.
    for name in ["writes", "directory", "owner", "space", "metadata"] {
        assert_eq!(find(name), CheckStatus::Ok, "{name}: {report:?}");
    }
    assert!(report.checks.iter().all(|check| check.status != CheckStatus::Failure), "{report:?}");
    let with_hint = |check: &&blobd_client::protocol::upkeep::Check| check.hint.is_some();
    let hinted = report.checks.iter().filter(with_hint).count();
    assert_eq!(hinted, report.checks.iter().filter(|check| check.status != CheckStatus::Ok).count());
}

pub(super) fn doctor_names_the_file_that_stops_collections(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let manifest = verbs.root().join("manifests/registry.ollama.ai/library/m/latest");
    fs::write(&manifest, "").unwrap();
    let report = verbs.doctor().unwrap();
    let metadata = report.checks.iter().find(|check| check.name == "metadata").unwrap();
    assert_eq!(metadata.status, CheckStatus::Failure);
    assert!(metadata.detail.contains(manifest.to_str().unwrap()) && metadata.hint.is_some(), "{metadata:?}");
}
