//! The trash while others work: what comes back must not be collected on its way.

use blobd_store::Store;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::places::fast_folder;
use blobd_tests::verbs::{InProcess, ThroughSocket, Verbs};

fn store_with_a_model(keep_seconds: u64) -> (tempfile::TempDir, InProcess) {
    let folder = fast_folder();
    let verbs = InProcess::open(&folder.path().join("store"));
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    verbs.import(&path, Some("m")).unwrap();
    verbs.put_aside(&["m"], keep_seconds).unwrap();
    (folder, verbs)
}

/// Which blobs a collection in progress would still delete.
fn unprotected(store: &Store, collection: &blobd_store::leases::Collection) -> usize {
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

/// Each looks whether a program has a blob open, and must not be taken for one. In a process of its
/// own: a child that another test starts has a copy of what is open in this one until it runs its
/// program, and counts as one that holds the blob.
#[test]
fn collections_that_are_planned_at_once_do_not_see_each_other() {
    const ROUNDS: usize = 25;
    let (folder, verbs) = (fast_folder(), ThroughSocket::start());
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    verbs.import(&path, Some("m")).unwrap();
    let orphan = verbs.root().join("blobs").join(format!("sha256-{}", sha256(b"nobody needs this")));
    std::fs::write(orphan, b"nobody needs this").unwrap();
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let verbs = &verbs;
            scope.spawn(move || {
                for _ in 0..ROUNDS {
                    let planned = verbs.gc(true).unwrap();
                    assert!(planned.kept.is_empty() && planned.deleted.len() == 1, "{planned:?}");
                }
            });
            scope.spawn(move || {
                let name = format!("copy{thread}");
                for _ in 0..ROUNDS {
                    verbs.tag("m", &name).unwrap();
                    let removed = verbs.remove(&[&name]).unwrap();
                    let by: Vec<_> = removed.kept.iter().flat_map(|kept| &kept.by).collect();
                    assert!(by.iter().all(|by| !by.contains("program")), "{removed:?}");
                    assert_eq!(removed.freed_bytes, 0, "{removed:?}");
                }
            });
        }
    });
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
}
