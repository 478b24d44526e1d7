//! The trash while others work: what comes back must not be collected on its way.

use blobd::store::Store;
use blobd_tests::model::ModelFile;
use blobd_tests::places::fast_folder;
use blobd_tests::verbs::{InProcess, Verbs};

fn store_with_a_model(keep_seconds: u64) -> (tempfile::TempDir, InProcess) {
    let folder = fast_folder();
    let verbs = InProcess::open(&folder.path().join("store"));
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    verbs.import(&path, Some("m")).unwrap();
    verbs.put_aside(&["m"], keep_seconds).unwrap();
    (folder, verbs)
}

/// Which blobs a collection in progress would still delete.
fn unprotected(store: &Store, collection: &blobd::store::leases::Collection) -> usize {
    let blobs = store.blobs().unwrap();
    blobs.into_iter().filter(|blob| collection.delete_unpinned(*blob, || ()).is_some()).count()
}

/// A collection that has read the tags before the new one was there and reads the trash when the
/// record is gone sees neither: only the pins save the tensors.
#[test]
fn model_that_leaves_the_trash_during_a_collection_keeps_every_blob() {
    for keep_seconds in [0, 3600] {
        let (_folder, verbs) = store_with_a_model(keep_seconds);
        let collection = verbs.store.leases().begin_collection();
        assert!(unprotected(&verbs.store, &collection) > 0, "nothing is pinned yet");
        verbs.undelete("m").unwrap();
        assert_eq!(unprotected(&verbs.store, &collection), 0);
    }
}

#[test]
fn model_whose_blobs_are_gone_does_not_come_back_with_holes() {
    let (_folder, verbs) = store_with_a_model(3600);
    let blob = verbs.store.blobs().unwrap()[0];
    std::fs::remove_file(verbs.root().join("blobs").join(format!("sha256-{}", blob.to_hex()))).unwrap();
    verbs.undelete("m").unwrap_err();
    assert!(verbs.list().unwrap().models.is_empty());
    assert_eq!(verbs.trash().unwrap().models.len(), 1, "what is left of it stays in the trash");
}

/// A time that no clock can express is as good as never.
#[test]
fn model_can_be_kept_for_ever() {
    let (_folder, verbs) = store_with_a_model(u64::MAX);
    assert!(verbs.gc(false).unwrap().deleted.is_empty());
    let [model] = verbs.trash().unwrap().models.try_into().expect("one model");
    assert!(model.expires.as_str() > "2500", "{model:?}");
    verbs.undelete("m").unwrap();
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
}

/// Each looks whether a program has a blob open, and must not be taken for one.
#[test]
fn collections_that_are_planned_at_once_do_not_see_each_other() {
    let (folder, verbs) = store_with_a_model(0);
    let path = ModelFile::dense(2).write_to(folder.path(), "other.gguf");
    verbs.import(&path, Some("other")).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..50 {
                    assert!(blobd::gc::plan(&verbs.store).unwrap().held.is_empty());
                }
            });
            scope.spawn(|| {
                for _ in 0..50 {
                    let removed = verbs.store.blobs().unwrap().into_iter().collect();
                    let collected = blobd::gc::collect_from(&verbs.store, removed).unwrap();
                    assert!(collected.held.is_empty() && collected.deletions.is_empty());
                }
            });
        }
    });
    assert!(verbs.export("other").unwrap() == ModelFile::dense(2).bytes());
}
