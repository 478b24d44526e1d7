//! The trash with concurrent operations: a model must not be collected while it is undeleted.

use blobd_store::Store;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::{InProcess, ThroughSocket, Verbs};

fn store_with_a_model(keep_seconds: u64) -> (tempfile::TempDir, InProcess) {
    let folder = tmpfs_directory();
    let verbs = InProcess::open(&folder.path().join("store"));
    let path = ModelFile::dense(1).write_to(folder.path(), "m.gguf");
    verbs.import(&path, Some("m")).unwrap();
    verbs.move_to_trash(&["m"], keep_seconds).unwrap();
    (folder, verbs)
}

/// The number of blobs that a collection in progress would still delete.
fn unprotected(store: &Store, collection: &blobd_store::leases::Collection) -> usize {
    let blobs = store.content().blobs().unwrap();
    blobs.into_iter().filter(|blob| collection.delete_unleased(*blob, || ()).is_some()).count()
}

/// A collection may read the tags before the new one exists and the trash after the record is gone. Then only
/// the leases protect the tensors.
#[test]
fn model_undeleted_during_a_collection_keeps_every_blob() {
    for keep_seconds in [0, 3600] {
        let (_folder, verbs) = store_with_a_model(keep_seconds);
        let collection = verbs.store.liveness().leases().begin_collection();
        assert!(unprotected(&verbs.store, &collection) > 0, "nothing is pinned yet");
        verbs.undelete("m").unwrap();
        assert_eq!(unprotected(&verbs.store, &collection), 0);
    }
}

#[test]
fn undelete_refuses_a_model_with_missing_blobs() {
    let (_folder, verbs) = store_with_a_model(3600);
    let blob = verbs.store.content().blobs().unwrap()[0];
    std::fs::remove_file(verbs.root().join("blobs").join(format!("sha256-{}", blob.to_hex()))).unwrap();
    verbs.undelete("m").unwrap_err();
    assert!(verbs.list().unwrap().models.is_empty());
    assert_eq!(verbs.trash().unwrap().models.len(), 1, "its record stays in the trash");
}

/// A time beyond the range of the clock means never.
#[test]
fn model_can_be_kept_for_ever() {
    let (_folder, verbs) = store_with_a_model(u64::MAX);
    assert!(verbs.gc(false).unwrap().deleted.is_empty());
    let [model] = verbs.trash().unwrap().models.try_into().expect("one model");
    assert!(model.expires.as_str() > "2500", "{model:?}");
    verbs.undelete("m").unwrap();
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
}

/// Each collection checks whether a program has a blob open, and must not count as such a program itself.
/// Runs in a separate process: a child of another test has copies of this process's descriptors until it
/// calls exec, and would count as a program that holds the blob.
#[test]
fn concurrent_collections_do_not_count_each_other_as_programs() {
    const ROUNDS: usize = 25;
    let (folder, verbs) = (tmpfs_directory(), ThroughSocket::start());
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
