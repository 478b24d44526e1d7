//! The scrubber on a store in this process.

use std::fs;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use tempfile::TempDir;

use super::*;
use crate::testing::{add_blobs, new_store, overwrite_blob};

const FAST: ScrubPolicy =
    ScrubPolicy { bytes_per_second: u64::MAX, period: Duration::from_secs(86400), max_pressure_percent: 100 };

/// A store of small blobs, and their digests in the order of a pass.
fn store_of(count: u8) -> (TempDir, Arc<Store>, Vec<Digest>) {
    let (folder, store) = new_store();
    let mut digests = add_blobs(&store, (0..count).map(|byte| [byte; 5000]));
    digests.sort();
    (folder, store, digests)
}

fn damage(folder: &TempDir, digest: Digest) {
    overwrite_blob(folder, digest, b"damaged");
}

fn eventually(what: &str, condition: impl Fn() -> bool) {
    let start = Instant::now();
    while !condition() {
        assert!(start.elapsed() < Duration::from_secs(60), "not within a minute: {what}");
        thread::sleep(Duration::from_millis(2));
    }
}

#[test]
fn pass_finds_damaged_blobs_and_ends() {
    let (folder, store, digests) = store_of(20);
    damage(&folder, digests[3]);
    damage(&folder, digests[17]);
    let scrubber = Scrubber::start(Arc::clone(&store), FAST, || false, |_, _| ()).unwrap();
    eventually("the pass ends", || Cursor::load(&store).ended.is_some());
    drop(scrubber);
    let cursor = Cursor::load(&store);
    assert_eq!((cursor.blobs, cursor.last), (20, None));
    assert!(cursor.bytes >= 18 * 5000);
    assert_eq!(store.content.damaged(), [digests[3], digests[17]].into());
}

#[test]
fn scrubber_that_is_dropped_has_ended_and_uses_the_store_no_more() {
    let (_folder, store, _digests) = store_of(2);
    let scrubber = Scrubber::start(Arc::clone(&store), FAST, || false, |_, _| ()).unwrap();
    assert_eq!(Arc::strong_count(&store), 2);
    drop(scrubber);
    assert_eq!(Arc::strong_count(&store), 1);
}

#[test]
fn restart_continues_after_the_last_blob() {
    let (folder, store, digests) = store_of(20);
    damage(&folder, digests[3]);
    damage(&folder, digests[17]);
    let mut cursor = Cursor::default();
    cursor.begin(unix_seconds());
    cursor.advance(digests[9]);
    cursor.save(&store).unwrap();
    let _scrubber = Scrubber::start(Arc::clone(&store), FAST, || false, |_, _| ()).unwrap();
    eventually("the pass ends", || Cursor::load(&store).ended.is_some());
    assert_eq!(store.content.damaged(), [digests[17]].into());
    assert_eq!(Cursor::load(&store).blobs, 11);
}

#[test]
fn stopped_pass_saves_its_progress() {
    let (_folder, store, digests) = store_of(20);
    let slow = ScrubPolicy { bytes_per_second: 100_000, ..FAST };
    let scrubber = Scrubber::start(Arc::clone(&store), slow, || false, |_, _| ()).unwrap();
    thread::sleep(Duration::from_millis(200));
    let stopping = Instant::now();
    drop(scrubber);
    assert!(stopping.elapsed() < Duration::from_secs(10));
    let cursor = Cursor::load(&store);
    let done = usize::try_from(cursor.blobs).unwrap();
    assert!(done < 20 && cursor.ended.is_none(), "{cursor:?}");
    assert_eq!(cursor.last, done.checked_sub(1).map(|last| digests[last]));
}

#[test]
fn nothing_is_read_while_the_daemon_is_busy() {
    let (folder, store, digests) = store_of(3);
    damage(&folder, digests[0]);
    let busy = Arc::new(AtomicBool::new(true));
    let is_busy = Arc::clone(&busy);
    let asked = Arc::new(AtomicBool::new(false));
    let was_asked = Arc::clone(&asked);
    let is_busy = move || {
        was_asked.store(true, Ordering::Relaxed);
        is_busy.load(Ordering::Relaxed)
    };
    let scrubber = Scrubber::start(Arc::clone(&store), FAST, is_busy, |_, _| ());
    eventually("the scrubber asks", || asked.load(Ordering::Relaxed));
    assert!(store.content.damaged().is_empty());
    busy.store(false, Ordering::Relaxed);
    eventually("the damage is found", || store.content.damaged() == [digests[0]].into());
    drop(scrubber);
}

#[test]
fn rate_of_zero_starts_no_scrubber() {
    let (_folder, store, _) = store_of(1);
    let off = ScrubPolicy { bytes_per_second: 0, ..FAST };
    let scrubber = Scrubber::start(Arc::clone(&store), off, || false, |_, _| ()).unwrap();
    assert!(scrubber.thread.is_none());
    drop(scrubber);
    assert!(!store.path(layout::SCRUB_FILE).exists());
}

#[test]
fn blobs_that_disappear_are_skipped() {
    let (_folder, store, digests) = store_of(10);
    let store_of_gate = Arc::clone(&store);
    let last = digests[9];
    // Called before the first byte is read, but after the blobs are listed.
    let is_busy = move || {
        let _ = fs::remove_file(store_of_gate.path(layout::blob(last)));
        false
    };
    let scrubber = Scrubber::start(Arc::clone(&store), FAST, is_busy, |_, _| ());
    eventually("the pass ends", || Cursor::load(&store).ended.is_some());
    drop(scrubber);
    assert!(store.content.damaged().is_empty());
}

#[test]
fn blob_that_always_fails_is_skipped_after_some_tries() {
    let shortage = || Err(StoreError::errno("read", "/b")(rustix::io::Errno::NOMEM));
    let (one, other) = (Digest::of(b"1"), Digest::of(b"2"));
    let mut retries = RetryLimit::default();
    assert!(retries.accept(one, shortage()).is_err());
    assert!(retries.accept(other, shortage()).is_err());
    assert!(retries.accept(one, shortage()).is_err());
    assert!(retries.accept(one, shortage()).is_err());
    assert!(matches!(retries.accept(one, shortage()), Ok(Verdict::Unreadable { .. })));
    assert!(retries.accept(one, shortage()).is_err(), "of the next pass");
    assert!(retries.accept(one, Ok(Verdict::Good)).is_ok());
}

#[test]
fn position_is_saved_after_many_bytes_or_some_time() {
    let mut unsaved = UnsavedProgress::none();
    assert!(!unsaved.add(UnsavedProgress::MAX_BYTES - 1));
    assert!(unsaved.add(1));
    assert!(!unsaved.add(1), "counted from the start again");
    let since = Instant::now().checked_sub(UnsavedProgress::MAX_AGE).unwrap();
    assert!(UnsavedProgress { bytes: 0, since }.add(0));
}

#[test]
fn damaged_and_unread_blobs_are_counted() {
    let mut found = Found::default();
    let reason = || "a test".to_owned();
    for verdict in [
        Verdict::Good,
        Verdict::Gone,
        Verdict::Writable { mode: 0o644 },
        Verdict::Unreadable { reason: reason() },
        Verdict::Unreadable { reason: reason() },
        Verdict::Unreliable { reason: reason() },
    ] {
        found.add(Digest::of(b"x"), &verdict);
    }
    assert_eq!((found.damaged, found.unread), (1, 2));
}
