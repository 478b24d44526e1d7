//! What a transaction publishes before it ends, and what it leaves.

use std::io;
use std::path::Path;

use rustix::io::Errno;

use super::*;
use crate::StoreOptions;
use crate::disk::{Disk, Root};
use crate::testing::{begin, manifest, name, new_store, new_store_with, recipe_of};

fn add(ingest: &mut Ingest, blobs: std::ops::Range<usize>) {
    for number in blobs {
        ingest.add_bytes(&number.to_le_bytes()).unwrap();
    }
}

#[test]
fn full_group_is_published_while_the_next_one_is_written() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    add(&mut ingest, 0..Group::MAX_BLOBS - 1);
    ingest.publisher.wait().unwrap();
    assert_eq!(store.content.blobs().unwrap().len(), 0);
    add(&mut ingest, Group::MAX_BLOBS - 1..Group::MAX_BLOBS + 1);
    ingest.publisher.wait().unwrap();
    assert_eq!(store.content.blobs().unwrap().len(), Group::MAX_BLOBS);
    ingest.commit_blobs().unwrap();
    assert_eq!(store.content.blobs().unwrap().len(), Group::MAX_BLOBS + 1);
}

#[test]
fn group_is_full_by_its_bytes_too() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    let mut writer = ingest.staging().stage(1);
    writer.append(b"x").unwrap();
    let blob = writer.finish().unwrap();
    let mut group = Group { blobs: Vec::new(), bytes: Group::MAX_BYTES - 2 };
    group.add(blob);
    assert!(!group.is_full());
    group.bytes += 1;
    assert!(group.is_full());
    assert_eq!((group.take().len(), group.bytes, group.is_full()), (1, 0, false));
    add(&mut ingest, 0..1);
}

#[test]
fn blob_that_two_transactions_stage_at_once_is_new_for_one_of_them() {
    let (_folder, store) = new_store();
    let mut transactions = [begin(&store), begin(&store)];
    for ingest in &mut transactions {
        ingest.add_bytes(b"same").unwrap();
        ingest.add_recipe(recipe_of(&[b"same"]));
    }
    let mut names = ["a", "b"].into_iter();
    let sums = transactions.map(|ingest| {
        let name = name(names.next().unwrap());
        let committed = ingest.commit(&name, &manifest(&[b"same"]), None).unwrap();
        (committed.new_bytes, committed.new_blob_count, committed.reused_bytes)
    });
    assert_eq!(sums, [(4, 1, 0), (0, 0, 4)]);
}

/// A disk on which no blob gets its name.
#[derive(Debug)]
struct Unpublished;

impl Disk for Unpublished {
    fn publish(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        if to.starts_with(layout::BLOBS) {
            return Err(Errno::IO.into());
        }
        crate::disk::KernelDisk.publish(root, from, to)
    }
}

#[test]
fn failure_in_the_background_is_that_of_the_transaction() {
    let disk = Arc::new(Unpublished);
    let (_folder, store) = new_store_with(StoreOptions { disk, ..StoreOptions::default() });
    let mut ingest = begin(&store);
    add(&mut ingest, 0..Group::MAX_BLOBS);
    let failed = ingest.commit_blobs();
    assert!(matches!(failed, Err(StoreError::Io { action: "rename to", .. })), "{failed:?}");
}

#[test]
fn what_a_transaction_published_is_condemned_unless_it_is_committed() {
    let (_folder, store) = new_store();
    let recipe = recipe_of(&[b"head", b"tensor"]);
    let all = [Digest::of(b"head"), Digest::of(b"tensor"), recipe.file()];
    for is_committed in [false, true] {
        let mut ingest = begin(&store);
        ingest.add_bytes(b"head").unwrap();
        ingest.add_bytes(b"tensor").unwrap();
        assert_eq!(ingest.added_recipe(recipe.file()), None);
        ingest.add_recipe(recipe.clone());
        assert_eq!(ingest.added_recipe(recipe.file()), Some(&recipe));
        ingest.publish().unwrap();
        assert_eq!(store.content.recipes().unwrap(), [recipe.file()]);
        let inode = || store.content.root.status(&layout::recipe(recipe.file())).unwrap().unwrap().identity();
        let before = inode();
        ingest.add_recipe(recipe.clone());
        ingest.publish().unwrap();
        assert_eq!(inode(), before, "the same recipe is not written again");
        if is_committed {
            ingest.commit(&name("m"), &manifest(&[b"headtensor"]), None).unwrap();
        } else {
            drop(ingest);
        }
        assert_eq!(all.map(|digest| store.liveness.is_condemned(digest)), [!is_committed; 3]);
        store.liveness.take_condemned();
        crate::liveness::gc::collect(&store.liveness).unwrap();
        assert_eq!(store.content.blobs().unwrap().is_empty(), !is_committed);
    }
}

#[test]
fn commit_removes_the_downloads_of_its_files_and_those_that_are_noted() {
    let (_folder, store) = new_store();
    let [file, noted, other] = [&b"file"[..], b"noted", b"other"].map(Digest::of);
    for download in [file, noted, other] {
        std::fs::create_dir_all(store.path(layout::partial(download))).unwrap();
    }
    let mut ingest = begin(&store);
    ingest.add_bytes(b"file").unwrap();
    ingest.note_partial(noted);
    ingest.commit(&name("m"), &manifest(&[b"file"]), None).unwrap();
    assert_eq!(store.content.partial_files().unwrap(), [other]);
}
