//! The verdict on one blob, in this store or in a lower one.

use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::sync::Arc;

use rustix::io::Errno;

use super::*;
use crate::StoreOptions;
use crate::testing::{new_store_with, overwrite_blob, store_with};

fn check(store: &Store, digest: Digest) -> Verdict {
    DiskReader::default().check(store, digest, &mut |_| Step::Go).unwrap()
}

#[test]
fn good_blob_stays() {
    let (_folder, store, digest) = store_with(b"weights");
    assert_eq!(check(&store, digest), Verdict::Good);
    assert!(store.content.damaged().is_empty());
}

#[test]
fn blob_with_wrong_bytes_or_length_is_moved_to_quarantine() {
    for (bytes, what) in [(&b"veights"[..], "its 7 bytes"), (b"weigh", "its 5 bytes"), (b"", "its 0 bytes")] {
        let (folder, store, digest) = store_with(b"weights");
        overwrite_blob(&folder, digest, bytes);
        let Verdict::Bad { reason, quarantined } = check(&store, digest) else { panic!("{what}") };
        assert!(reason.starts_with(what), "{reason}");
        assert_eq!(quarantined, Ok(()));
        assert_eq!(store.content.damaged(), [digest].into());
        assert_eq!(check(&store, digest), Verdict::Gone);
    }
}

#[test]
fn blob_that_reads_wrong_and_then_right_stays() {
    let (folder, store, digest) = store_with(b"weights");
    overwrite_blob(&folder, digest, b"veights");
    let mut calls = 0;
    let mut gate = |_| {
        calls += 1;
        // After the first read.
        if calls == 3 {
            overwrite_blob(&folder, digest, b"weights");
        }
        Step::Go
    };
    let verdict = DiskReader::default().check(&store, digest, &mut gate).unwrap();
    assert!(matches!(verdict, Verdict::Unreliable { .. }), "{verdict:?}");
    assert!(store.content.damaged().is_empty());
}

#[test]
fn blob_that_is_not_a_file_is_moved_to_quarantine() {
    let (_folder, store, digest) = store_with(b"weights");
    let path = store.path(blobd_store_format::layout::blob(digest));
    fs::remove_file(&path).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
    assert!(matches!(check(&store, digest), Verdict::Bad { .. }));
    assert!(fs::symlink_metadata(&path).is_err());
}

#[test]
fn writable_blob_of_the_right_bytes_stays() {
    let (_folder, store, digest) = store_with(b"weights");
    let path = store.path(blobd_store_format::layout::blob(digest));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
    assert_eq!(check(&store, digest), Verdict::Writable { mode: 0o644 });
    assert!(path.exists());
}

#[test]
fn blob_that_is_collected_while_it_is_read_is_gone() {
    let (_folder, store, digest) = store_with(b"weights");
    let path = store.path(blobd_store_format::layout::blob(digest));
    let mut gate = |_| {
        let _ = fs::remove_file(&path);
        Step::Wait
    };
    assert_eq!(DiskReader::default().check(&store, digest, &mut gate).unwrap(), Verdict::Gone);
}

#[test]
fn unreadable_blob_is_a_verdict_and_not_an_error() {
    let digest = Digest::of(b"x");
    let of = |errno: Errno| classify_error("read", digest, errno.into());
    assert!(matches!(of(Errno::REMOTEIO), Ok(Reading::Wrong(_))));
    assert!(matches!(of(Errno::ACCESS), Ok(Reading::Unreadable(_))));
    assert!(of(Errno::MFILE).is_err());
    let on_status = |errno: Errno| verdict_on_status_error(digest, StoreError::errno("inspect", "/b")(errno));
    assert!(matches!(on_status(Errno::IO), Ok(Verdict::Bad { quarantined: Err(_), .. })));
    assert!(matches!(on_status(Errno::PERM), Ok(Verdict::Unreadable { .. })));
    assert!(on_status(Errno::NOMEM).is_err());
}

#[test]
fn blob_that_may_not_be_read_stays() {
    let (_folder, store, digest) = store_with(b"weights");
    let path = store.path(blobd_store_format::layout::blob(digest));
    fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
    // Root may read everything, so only the mode differs.
    let expected = match File::open(&path) {
        Ok(_) => Verdict::Writable { mode: 0 },
        Err(error) => Verdict::Unreadable { reason: error.to_string() },
    };
    assert_eq!(check(&store, digest), expected);
    assert!(path.exists() && store.content.damaged().is_empty());
}

#[test]
fn condemned_blob_is_released_so_that_it_can_be_collected() {
    let (_folder, store, digest) = store_with(b"weights");
    let mut gate = |_| {
        let is_read = store.content.is_reading(digest);
        store.liveness.condemn([digest]);
        assert_eq!(
            crate::liveness::gc::collect_condemned(&store.liveness).unwrap().freed_bytes() > 0,
            !is_read
        );
        Step::Go
    };
    assert_eq!(DiskReader::default().check(&store, digest, &mut gate).unwrap(), Verdict::Gone);
}

#[test]
fn condemned_blob_that_stays_is_verified() {
    let (_folder, store, digest) = store_with(b"weights");
    store.liveness.condemn([digest]);
    assert_eq!(check(&store, digest), Verdict::Good);
    let verdict = DiskReader::default().check(&store, digest, &mut |_| Step::Stop).unwrap();
    assert_eq!(verdict, Verdict::Unfinished);
}

#[test]
fn reader_releases_a_blob_that_a_collection_deletes() {
    let (_folder, store, digest) = store_with(b"weights");
    let (reading, read_started) = std::sync::mpsc::channel();
    let of_reader = Arc::clone(&store);
    let reader = thread::spawn(move || {
        let mut gate = |_| {
            let _ = reading.send(());
            thread::sleep(Duration::from_millis(10));
            Step::Wait
        };
        DiskReader::default().check(&of_reader, digest, &mut gate).unwrap()
    });
    read_started.recv().unwrap();
    let done = crate::liveness::gc::collect_from(&store.liveness, [digest].into()).unwrap();
    assert!(done.freed_bytes() > 0 && done.held.is_empty(), "{done:?}");
    assert_eq!(reader.join().unwrap(), Verdict::Gone);
}

#[test]
fn reader_does_not_start_on_a_blob_that_is_being_collected() {
    let (_folder, store, digest) = store_with(b"weights");
    let barred = store.content.block_internal_reads([digest].into());
    let of_reader = Arc::clone(&store);
    let reader = thread::spawn(move || check(&of_reader, digest));
    let start = Instant::now();
    while start.elapsed() < Duration::from_millis(200) {
        assert!(!store.content.is_reading(digest));
        thread::sleep(Duration::from_millis(1));
    }
    drop(barred);
    assert_eq!(reader.join().unwrap(), Verdict::Good);
}

#[test]
fn endless_collections_do_not_prevent_a_check() {
    let (folder, store, digest) = store_with(b"weights");
    overwrite_blob(&folder, digest, b"veights");
    let mut barred = None;
    let verdict = DiskReader::default().check(&store, digest, &mut |_| {
        // Another collection begins each time the reader waits for one to end.
        barred =
            (!store.content.is_reading(digest)).then(|| store.content.block_internal_reads([digest].into()));
        Step::Go
    });
    assert!(matches!(verdict.unwrap(), Verdict::Bad { .. }));
}

#[test]
fn stopped_check_gives_no_verdict() {
    let (folder, store, digest) = store_with(b"weights");
    overwrite_blob(&folder, digest, b"veights");
    let verdict = DiskReader::default().check(&store, digest, &mut |_| Step::Stop).unwrap();
    assert_eq!(verdict, Verdict::Unfinished);
    assert!(store.content.damaged().is_empty());
}

/// A store without blobs above the one in `lower`.
fn store_above(lower: &tempfile::TempDir) -> (tempfile::TempDir, Arc<Store>) {
    let options = StoreOptions { lower: vec![lower.path().join("store")], ..StoreOptions::default() };
    new_store_with(options)
}

#[test]
fn blob_of_a_lower_store_is_verified_and_never_moved() {
    let (lower_folder, lower, digest) = store_with(b"weights");
    let (_folder, store) = store_above(&lower_folder);
    let path = lower.path(blobd_store_format::layout::blob(digest));
    assert_eq!(check(&store, digest), Verdict::Good);
    assert_eq!(check(&store, Digest::of(b"absent")), Verdict::Gone);
    let stopped = DiskReader::default().check(&store, digest, &mut |_| Step::Stop).unwrap();
    assert_eq!(stopped, Verdict::Unfinished);
    overwrite_blob(&lower_folder, digest, b"veights");
    let wrong = format!("its 7 bytes have the digest {}", Digest::of(b"veights"));
    let place = lower_folder.path().join("store").display().to_string();
    assert_eq!(check(&store, digest), Verdict::BadBelow { reason: wrong.clone(), store: place });
    assert_eq!(fs::read(&path).unwrap(), b"veights");
    assert!(store.content.damaged().is_empty());
    let mut calls = 0;
    let mut gate = |_| {
        calls += 1;
        // After the first read.
        if calls == 3 {
            overwrite_blob(&lower_folder, digest, b"weights");
        }
        Step::Go
    };
    let verdict = DiskReader::default().check(&store, digest, &mut gate).unwrap();
    assert_eq!(verdict, Verdict::Unreliable { reason: wrong });
    let mut gate = |_| {
        let _ = fs::remove_file(&path);
        Step::Wait
    };
    assert_eq!(DiskReader::default().check(&store, digest, &mut gate).unwrap(), Verdict::Gone);
}

#[test]
fn blob_that_may_be_in_a_lower_store_which_is_left_out_is_hidden() {
    let (lower_folder, lower, digest) = store_with(b"weights");
    let (_folder, store) = store_above(&lower_folder);
    drop(lower);
    fs::rename(lower_folder.path().join("store"), lower_folder.path().join("away")).unwrap();
    let verdict = check(&store, digest);
    assert!(matches!(&verdict, Verdict::Hidden { problem } if problem.contains("store")), "{verdict:?}");
}

#[test]
fn damage_is_what_was_read_wrong() {
    let reason = || "a test".to_owned();
    for (verdict, damage) in [
        (Verdict::Good, None),
        (Verdict::Gone, None),
        (Verdict::Hidden { problem: reason() }, None),
        (Verdict::Unfinished, None),
        (Verdict::Writable { mode: 0o644 }, None),
        (Verdict::Unreadable { reason: reason() }, None),
        (Verdict::Unreliable { reason: reason() }, Some(("a test", false))),
        (Verdict::BadBelow { reason: reason(), store: String::new() }, Some(("a test", false))),
        (Verdict::Bad { reason: reason(), quarantined: Ok(()) }, Some(("a test", true))),
        (Verdict::Bad { reason: reason(), quarantined: Err(String::new()) }, Some(("a test", false))),
    ] {
        assert_eq!(verdict.damage(), damage, "{verdict:?}");
    }
}

#[test]
fn bytes_that_were_checked_are_counted() {
    let (folder, store, digest) = store_with(b"weights");
    let checked = || store.content.events().checked_bytes;
    assert_eq!(checked(), 0);
    check(&store, digest);
    assert_eq!(checked(), 7);
    overwrite_blob(&folder, digest, b"wrong");
    check(&store, digest);
    assert_eq!((checked(), store.content.events().damaged_blobs), (7 + 2 * 5, 1), "it is read twice");
}

#[test]
fn finding_of_both_reads_is_named_once() {
    let (folder, store, digest) = store_with(b"weights");
    overwrite_blob(&folder, digest, b"veights");
    let reason = format!("its 7 bytes have the digest {}", Digest::of(b"veights"));
    assert_eq!(check(&store, digest), Verdict::Bad { reason, quarantined: Ok(()) });
}
