use std::fs;
use std::sync::Arc;

use tempfile::TempDir;

use super::*;
use crate::testing::{add_blobs, begin, new_store, new_store_with};
use crate::{SpacePolicy, Store, StoreOptions};

fn store_with(blobs: &[&[u8]]) -> (TempDir, Arc<Store>) {
    let (folder, store) = new_store();
    add_blobs(&store, blobs);
    (folder, store)
}

fn range(blob: &[u8], offset: u64, length: u64) -> BlobRange {
    BlobRange { blob: Digest::of(blob), offset, length }
}

fn join(ingest: &mut Ingest, ranges: &[BlobRange]) -> Joined {
    ingest.join(ranges, &mut |_| true).unwrap()
}

fn staged_files(store: &Store) -> usize {
    let transactions = fs::read_dir(store.path("staging")).unwrap();
    transactions.map(|entry| fs::read_dir(entry.unwrap().path()).unwrap().count()).sum()
}

#[test]
fn whole_blobs_are_joined_in_the_given_order_once() {
    let (_folder, store) = store_with(&[b"aabb", b"cc"]);
    let joined = Digest::of(b"aaccbb");
    let ranges = [range(b"aabb", 0, 2), range(b"cc", 0, 2), range(b"aabb", 2, 2)];
    for new_bytes in [6, 0] {
        let mut ingest = begin(&store);
        assert_eq!(join(&mut ingest, &ranges), Joined::As(joined));
        assert_eq!(ingest.new_bytes, new_bytes);
        assert_eq!(staged_files(&store), usize::from(new_bytes > 0));
        ingest.commit_blobs().unwrap();
        assert_eq!(fs::read(store.path(layout::blob(joined))).unwrap(), b"aaccbb");
    }
    // One file has the joined blob already, as after a crash.
    let ranges = [range(b"aaccbb", 0, 2), range(b"cc", 0, 2), range(b"aaccbb", 4, 2)];
    assert_eq!(join(&mut begin(&store), &ranges), Joined::As(joined));
}

#[test]
fn bytes_that_their_digests_do_not_verify_are_not_joined() {
    let (_folder, store) = store_with(&[b"aabb", b"cc"]);
    let mut ingest = begin(&store);
    for ranges in [
        [range(b"aabb", 0, 2), range(b"cc", 0, 2)],
        [range(b"aabb", 2, 2), range(b"aabb", 0, 2)],
        [range(b"cc", 0, 2), range(b"missing", 0, 7)],
    ] {
        assert_eq!(join(&mut ingest, &ranges), Joined::Unverified);
    }
    let damaged = store.path(layout::blob(Digest::of(b"cc")));
    fs::remove_file(&damaged).unwrap();
    fs::write(&damaged, "cd").unwrap();
    let ranges = [range(b"aabb", 0, 4), range(b"cc", 0, 2)];
    assert_eq!(join(&mut ingest, &ranges), Joined::Unverified);
    assert_eq!((staged_files(&store), ingest.new_bytes), (0, 0));
}

#[test]
fn join_that_is_stopped_leaves_nothing() {
    let (_folder, store) = store_with(&[b"aa", b"bb"]);
    let ranges = [range(b"aa", 0, 2), range(b"bb", 0, 2)];
    for steps in 0..4 {
        let (mut ingest, mut left) = (begin(&store), steps);
        let mut report = |_| {
            left -= 1;
            left >= 0
        };
        assert_eq!(ingest.join(&ranges, &mut report).unwrap(), Joined::Stopped, "{steps}");
        assert_eq!((staged_files(&store), ingest.new_bytes), (0, 0));
    }
}

#[test]
fn join_without_space_leaves_the_blobs_as_they_are_unless_the_joined_one_is_stored() {
    let (a, b) = (vec![1; 40 << 10], vec![2; 40 << 10]);
    let length = a.len() as u64;
    let whole = [a.as_slice(), &b].concat();
    for (quota, is_stored) in [(3 * length, false), (5 * length, true)] {
        let space = SpacePolicy { quota_bytes: Some(quota), ..SpacePolicy::default() };
        let (_folder, store) = new_store_with(StoreOptions { space, ..StoreOptions::default() });
        add_blobs(&store, [&a, &b].into_iter().chain(is_stored.then_some(&whole)));
        let mut ingest = begin(&store);
        let joined = join(&mut ingest, &[range(&a, 0, length), range(&b, 0, length)]);
        let expected = if is_stored { Joined::As(Digest::of(&whole)) } else { Joined::NoSpace };
        assert_eq!(joined, expected, "{quota}");
        assert_eq!((staged_files(&store), ingest.new_bytes), (0, 0));
    }
}
