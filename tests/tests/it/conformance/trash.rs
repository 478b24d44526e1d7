//! The trash: `rm --keep`, `undelete`, and expiry.

use std::fs;
use std::path::PathBuf;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::upkeep::GcReason;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{check_blobs, check_empty, names};
use blobd_tests::verbs::Verbs;
use blobd_tests::wait::eventually;

use super::import;

const HOUR: u64 = 3600;

fn listed(verbs: &impl Verbs) -> Vec<String> {
    verbs.list().unwrap().models.into_iter().map(|model| model.name).collect()
}

fn trashed(verbs: &impl Verbs) -> Vec<String> {
    verbs.trash().unwrap().models.into_iter().map(|model| model.name).collect()
}

/// The only record in the trash.
fn record(verbs: &impl Verbs) -> PathBuf {
    let folder = verbs.root().join("trash");
    let [name] = names(&folder).try_into().expect("one record");
    folder.join(name)
}

pub(super) fn model_in_the_trash_frees_nothing_and_survives_collections(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let before = check_blobs(verbs.root());
    let removed = verbs.move_to_trash(&["m"], HOUR).unwrap();
    assert_eq!((removed.removed, removed.freed_bytes), (vec!["m:latest".to_owned()], 0));
    assert!(removed.trashed_until.is_some());
    assert_eq!(listed(verbs), [""; 0]);
    assert_eq!(verbs.export("m").unwrap_err().code, ErrorCode::NotFound);
    let collected = verbs.gc(false).unwrap();
    assert_eq!((collected.freed_bytes, collected.deleted), (0, Vec::new()));
    assert_eq!(check_blobs(verbs.root()), before);
}

pub(super) fn model_restored_from_the_trash_is_exported_bit_for_bit(verbs: &impl Verbs) {
    let model = ModelFile::separate_experts(1, 12);
    let imported = import(verbs, &model, "Me/M:8B");
    verbs.move_to_trash(&["me/m:8b"], HOUR).unwrap();
    verbs.gc(false).unwrap();
    let back = verbs.undelete("ME/m:8b").unwrap();
    assert_eq!((back.name.as_str(), back.digest), ("Me/M:8B", imported.digest));
    assert!(verbs.export("me/m:8b").unwrap() == model.bytes());
    let [listed] = verbs.list().unwrap().models.try_into().expect("one model");
    assert_eq!(listed.origin.as_deref(), Some("import model.gguf"));
    assert_eq!(trashed(verbs), [""; 0]);
    assert_eq!(verbs.gc(false).unwrap().deleted, []);
    verbs.remove(&["me/m:8b"]).unwrap();
    check_empty(verbs.root());
}

pub(super) fn undelete_does_not_replace_another_model(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    verbs.move_to_trash(&["m"], HOUR).unwrap();
    import(verbs, &ModelFile::dense(2), "m");
    let error = verbs.undelete("m").unwrap_err();
    assert_eq!(error.code, ErrorCode::Busy);
    assert!(error.message.contains("m:latest"), "{error}");
    assert!(verbs.export("m").unwrap() == ModelFile::dense(2).bytes());
    assert_eq!(trashed(verbs), ["m:latest"]);
    verbs.tag("m", "new").unwrap();
    verbs.remove(&["m"]).unwrap();
    verbs.undelete("m").unwrap();
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
    assert!(verbs.export("new").unwrap() == ModelFile::dense(2).bytes());
}

pub(super) fn undelete_succeeds_if_the_name_has_the_same_model(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    verbs.move_to_trash(&["m"], HOUR).unwrap();
    let imported = import(verbs, &ModelFile::dense(1), "m");
    assert_eq!(imported.new_bytes, 0, "the trash still has every byte");
    assert_eq!(verbs.undelete("m").unwrap().digest, imported.digest);
    assert_eq!((listed(verbs), trashed(verbs)), (vec!["m:latest".to_owned()], Vec::new()));
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
}

pub(super) fn undelete_restores_the_model_removed_last(verbs: &impl Verbs) {
    // More than two, and not in the order of their digests, so that only the order of removal is right every
    // time. One name differs in case.
    let spellings = ["m", "M", "m", "M", "m"];
    for (seed, name) in (1..).zip(spellings) {
        import(verbs, &ModelFile::dense(seed), name);
        verbs.move_to_trash(&[name], HOUR).unwrap();
    }
    assert_eq!(verbs.trash().unwrap().models.len(), spellings.len());
    for seed in (1..=spellings.len() as u64).rev() {
        verbs.undelete("m").unwrap();
        assert!(verbs.export("m").unwrap() == ModelFile::dense(seed).bytes(), "model {seed}");
        verbs.remove(&["m"]).unwrap();
    }
    assert_eq!(verbs.undelete("m").unwrap_err().code, ErrorCode::NotFound);
    // The session of the last export ends a moment after its client.
    eventually("all is freed", || verbs.usage().unwrap().physical_bytes == 0);
    check_empty(verbs.root());
}

pub(super) fn digest_chooses_among_models_in_the_trash(verbs: &impl Verbs) {
    let first = import(verbs, &ModelFile::dense(1), "m").digest;
    verbs.move_to_trash(&["m"], HOUR).unwrap();
    import(verbs, &ModelFile::dense(2), "m");
    verbs.move_to_trash(&["m"], HOUR).unwrap();
    assert_eq!(verbs.undelete(&format!("m@{first}")).unwrap().digest, first);
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
}

pub(super) fn expired_model_is_deleted_by_the_next_collection(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "gone");
    import(verbs, &ModelFile::dense(2), "kept");
    verbs.move_to_trash(&["gone"], 0).unwrap();
    verbs.move_to_trash(&["kept"], HOUR).unwrap();
    let planned = verbs.gc(true).unwrap();
    let expired = planned.deleted.iter().filter(|item| item.reason == GcReason::ExpiredTrash).count();
    assert_eq!(expired, 1, "{planned:?}");
    assert!(planned.deleted.len() > 1, "its blobs too: {planned:?}");
    let before = verbs.usage().unwrap().physical_bytes;
    let done = verbs.gc(false).unwrap();
    assert_eq!((done.deleted, done.freed_bytes), (planned.deleted, planned.freed_bytes));
    assert_eq!(trashed(verbs), ["kept:latest"]);
    let freed = before - verbs.usage().unwrap().physical_bytes;
    assert!(freed > 0 && freed <= done.freed_bytes, "the record takes space, too");
    assert_eq!(verbs.undelete("gone").unwrap_err().code, ErrorCode::NotFound);
    verbs.undelete("kept").unwrap();
    assert!(verbs.export("kept").unwrap() == ModelFile::dense(2).bytes());
}

pub(super) fn trash_is_listed_with_its_expiry(verbs: &impl Verbs) {
    let imported = import(verbs, &ModelFile::dense(1), "m");
    let size = verbs.list().unwrap().models[0].size;
    let until = verbs.move_to_trash(&["m"], 7 * 24 * HOUR).unwrap().trashed_until.unwrap();
    let [model] = verbs.trash().unwrap().models.try_into().expect("one model");
    assert_eq!((model.name.as_str(), model.digest, model.size), ("m:latest", imported.digest, size));
    assert_eq!(model.expires, until);
    assert!(model.removed < model.expires && model.expires.ends_with('Z'), "{model:?}");
}

pub(super) fn bytes_in_the_trash_are_reported_separately(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "base");
    import(verbs, &ModelFile::dense(1).with_changed("output.weight"), "sibling");
    let before = verbs.usage().unwrap();
    let unique = before.models.iter().find(|model| model.name == "sibling:latest").unwrap().unique_bytes;
    assert_eq!(before.trash_bytes, 0);
    verbs.move_to_trash(&["sibling"], HOUR).unwrap();
    let usage = verbs.usage().unwrap();
    assert!(usage.trash_bytes > 0, "{usage:?}");
    assert!((unique..=unique + 8192).contains(&usage.trash_bytes), "{unique} of {usage:?}");
    assert_eq!((usage.reclaimable_bytes, usage.models.len()), (0, 1));
    verbs.undelete("sibling").unwrap();
    assert_eq!(verbs.usage().unwrap().trash_bytes, 0);
}

pub(super) fn removal_reports_that_the_trash_keeps_the_blobs(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    verbs.tag("m", "n").unwrap();
    verbs.move_to_trash(&["m"], HOUR).unwrap();
    let removed = verbs.remove(&["n"]).unwrap();
    assert_eq!(removed.freed_bytes, 0);
    let [kept] = removed.kept.try_into().expect("one keeper");
    assert_eq!(kept.by, ["m:latest in the trash"]);
    verbs.undelete("m").unwrap();
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
}

pub(super) fn unknown_name_is_not_in_the_trash(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let error = verbs.undelete("m").unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(error.to_string().contains("blobd ls --trash"), "{error}");
    assert_eq!(verbs.move_to_trash(&["nobody"], HOUR).unwrap_err().code, ErrorCode::NotFound);
    assert_eq!((listed(verbs), trashed(verbs)), (vec!["m:latest".to_owned()], Vec::new()));
}

pub(super) fn damaged_record_in_the_trash_stops_collection(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    import(verbs, &ModelFile::dense(2), "other");
    verbs.move_to_trash(&["m"], HOUR).unwrap();
    let before = check_blobs(verbs.root());
    let path = record(verbs);
    let whole = fs::read(&path).unwrap();
    for place in [0, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[place] ^= 1;
        fs::write(&path, damaged).unwrap();
        for dry_run in [true, false] {
            let error = verbs.gc(dry_run).unwrap_err();
            assert_eq!(error.code, ErrorCode::Corrupt);
            assert!(error.message.contains(path.to_str().unwrap()), "{error}");
        }
        assert_eq!(verbs.trash().unwrap_err().code, ErrorCode::Corrupt);
    }
    assert_eq!(check_blobs(verbs.root()), before);
    fs::write(&path, whole).unwrap();
    verbs.undelete("m").unwrap();
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
}

/// Damage elsewhere in the trash does not prevent removals, and the client gets a success response.
pub(super) fn damaged_record_does_not_hide_a_removal(verbs: &impl Verbs) {
    for (seed, name) in [(1, "a"), (2, "b"), (3, "c")] {
        import(verbs, &ModelFile::dense(seed), name);
    }
    verbs.move_to_trash(&["a"], HOUR).unwrap();
    let path = record(verbs);
    let whole = fs::read(&path).unwrap();
    fs::write(&path, b"{}").unwrap();
    let blobs = check_blobs(verbs.root());
    let freed = verbs.remove(&["b"]).unwrap();
    assert_eq!((freed.removed, freed.freed_bytes), (vec!["b:latest".to_owned()], 0));
    assert!(freed.kept[0].by[0].contains(path.to_str().unwrap()), "{:?}", freed.kept);
    assert_eq!(verbs.move_to_trash(&["c"], HOUR).unwrap().removed, ["c:latest"]);
    assert_eq!(listed(verbs), [""; 0]);
    assert_eq!(check_blobs(verbs.root()), blobs);
    fs::write(&path, whole).unwrap();
    assert_eq!(trashed(verbs), ["a:latest", "c:latest"]);
}

pub(super) fn file_that_is_not_a_record_stops_collection(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    verbs.move_to_trash(&["m"], HOUR).unwrap();
    let before = check_blobs(verbs.root());
    let foreign = verbs.root().join("trash/notes.txt");
    fs::write(&foreign, "look at this later").unwrap();
    let error = verbs.gc(false).unwrap_err();
    assert_eq!(error.code, ErrorCode::Corrupt);
    assert!(error.message.contains("trash/notes.txt"), "{error}");
    assert_eq!(check_blobs(verbs.root()), before);
    assert!(foreign.exists());
    fs::remove_file(foreign).unwrap();
    verbs.gc(false).unwrap();
    verbs.undelete("m").unwrap();
}
