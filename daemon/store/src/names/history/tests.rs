use std::io;
use std::path::Path;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use rustix::io::Errno;
use tracing_mutex::stdsync::Mutex;

use super::*;
use crate::disk::{Disk, KernelDisk, Root};
use crate::testing::{begin, manifest, name, new_store, new_store_with};
use crate::{HistoryEntry, NameRule, Store, StoreOptions, lock};

const ANN: u32 = 1001;
const BOB: u32 = 1002;

/// A manifest of one model per content, whose files the store gets.
fn set(store: &Arc<Store>, actor: Actor, reference: &str, content: &str) -> Digest {
    commit(store, actor, reference, content, |ingest| ingest)
}

fn commit(
    store: &Arc<Store>,
    actor: Actor,
    reference: &str,
    content: &str,
    prepare: impl FnOnce(crate::Ingest) -> crate::Ingest,
) -> Digest {
    let rule = NameRule::replacing_any();
    let mut ingest = prepare(begin(store).may_take(rule).on_behalf_of(actor));
    ingest.add_bytes(content.as_bytes()).unwrap();
    let manifest = manifest(&[content.as_bytes()]);
    let origin = (actor.verb == Verb::Pull).then_some("example.org/model");
    ingest.commit(&name(reference), &manifest, origin).unwrap();
    manifest.digest()
}

/// The row of a pull.
fn pulled(uid: u32, digest: Digest) -> String {
    format!("{uid} pull {} example.org/model", digest.short())
}

const fn pull(uid: u32) -> Actor {
    Actor::new(uid, Verb::Pull)
}

fn remove(store: &Store, uid: u32, reference: &str) {
    let _tags = store.names.lock_tags();
    store.names.remove_tag(&name(reference), Actor::new(uid, Verb::Rm)).unwrap();
}

/// The rows as `uid verb digest`, the newest first.
fn rows(store: &Store, reference: &str) -> Vec<String> {
    let row = |row: HistoryRow| match row {
        HistoryRow::Recorded(HistoryEntry { actor, digest, origin, .. }) => {
            let digest = digest.map_or_else(|| "none".to_owned(), Digest::short);
            format!("{} {} {digest} {}", actor.uid, actor.verb.name(), origin.unwrap_or_default())
        }
        HistoryRow::Unrecorded(digest) => {
            format!("unrecorded {}", digest.map_or_else(|| "none".to_owned(), Digest::short))
        }
    };
    store.names.history(&name(reference)).unwrap().rows.into_iter().map(row).collect()
}

#[test]
fn history_says_who_set_and_removed_a_name() {
    let (_folder, store) = new_store();
    let first = set(&store, pull(ANN), "m:a", "one");
    let second = set(&store, Actor::new(BOB, Verb::Import), "m:a", "two").short();
    remove(&store, 0, "m:a");
    let expected = ["0 rm none ".to_owned(), format!("{BOB} import {second} "), pulled(ANN, first)];
    assert_eq!(rows(&store, "m:a"), expected);
    assert_eq!(rows(&store, "M:A"), expected, "names are compared without case");
}

#[test]
fn unchanged_model_is_not_a_change() {
    let (_folder, store) = new_store();
    let digest = set(&store, pull(ANN), "m:a", "one");
    set(&store, pull(BOB), "m:a", "one");
    assert_eq!(rows(&store, "m:a").len(), 1);
    assert_eq!(store.names.account_of(&name("m:a"), digest).unwrap().uid, ANN);
}

#[test]
fn change_that_did_not_happen_is_left_out_and_replaced() {
    let (_folder, store) = new_store();
    let digest = set(&store, pull(ANN), "m:a", "one");
    let manifest = store.path(layout::manifest(&name("m:a")));
    let content = std::fs::read(&manifest).unwrap();
    remove(&store, BOB, "m:a");
    // As after a crash between the record and the removal.
    std::fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    std::fs::write(&manifest, content).unwrap();
    let before = [pulled(ANN, digest)];
    assert_eq!(rows(&store, "m:a"), before);
    let second = set(&store, pull(BOB), "m:a", "two");
    let expected = [pulled(BOB, second), before[0].clone()];
    assert_eq!(rows(&store, "m:a"), expected);
}

#[test]
fn first_change_that_did_not_happen_is_not_history() {
    let (_folder, store) = new_store();
    set(&store, pull(ANN), "m:a", "one");
    std::fs::remove_file(store.path(layout::manifest(&name("m:a")))).unwrap();
    assert!(matches!(store.names.history(&name("m:a")), Err(StoreError::NoSuchModel { .. })));
}

#[test]
fn name_of_an_earlier_version_begins_with_what_it_means() {
    let (_folder, store) = new_store();
    let first = set(&store, pull(ANN), "m:a", "one");
    std::fs::remove_file(store.path(layout::history(&name("m:a")))).unwrap();
    assert_eq!(rows(&store, "m:a"), [format!("unrecorded {}", first.short())]);
    assert_eq!(store.names.account_of(&name("m:a"), first), None);
    let second = set(&store, pull(BOB), "m:a", "two");
    let expected = [pulled(BOB, second), format!("unrecorded {}", first.short())];
    assert_eq!(rows(&store, "m:a"), expected);
}

#[test]
fn change_by_another_program_is_a_row_without_a_record() {
    let (_folder, store) = new_store();
    let first = set(&store, pull(ANN), "m:a", "one");
    let other = set(&store, pull(ANN), "m:b", "two");
    let path = |tag: &str| store.path(layout::manifest(&name(tag)));
    std::fs::copy(path("m:b"), path("m:a")).unwrap();
    let expected = [format!("unrecorded {}", other.short()), pulled(ANN, first)];
    assert_eq!(rows(&store, "m:a"), expected);
}

#[test]
fn renamed_model_stays_with_its_user() {
    let (_folder, store) = new_store();
    let digest = set(&store, pull(ANN), "m:a", "one");
    let since = store.names.account_of(&name("m:a"), digest);
    let actor = Actor::new(0, Verb::Rename);
    commit(&store, actor, "m:b", "one", |ingest| ingest.renaming(name("m:a")));
    assert_eq!(store.names.account_of(&name("m:b"), digest), since);
    assert_eq!(rows(&store, "m:b"), [format!("0 rename {} example.org/model", digest.short())]);
    assert_eq!(rows(&store, "m:a")[0], "0 rename none ");
    commit(&store, actor, "m:B", "one", |ingest| ingest.renaming(name("m:b")));
    assert_eq!(rows(&store, "m:B").len(), 1, "another case is no other name");
    assert_eq!(store.names.account_of(&name("m:B"), digest), since);
}

#[test]
fn restored_model_stays_with_its_user() {
    let (_folder, store) = new_store();
    let digest = set(&store, pull(ANN), "m:a", "one");
    let since = store.names.account_of(&name("m:a"), digest);
    remove(&store, 0, "m:a");
    let undelete = Actor::new(0, Verb::Undelete);
    commit(&store, undelete, "m:a", "one", |ingest| ingest.charged_to(since));
    assert_eq!(store.names.account_of(&name("m:a"), digest), since);
}

#[test]
fn oldest_entries_are_dropped_and_counted() {
    let (_folder, store) = new_store();
    let long = "é".repeat(Record::MAX_ORIGIN * 2);
    for number in 0..Record::MAX_ENTRIES + 3 {
        let mut ingest = begin(&store).may_take(NameRule::replacing_any()).on_behalf_of(pull(ANN));
        let content = number.to_string();
        ingest.add_bytes(content.as_bytes()).unwrap();
        ingest.commit(&name("m:a"), &manifest(&[content.as_bytes()]), Some(&long)).unwrap();
    }
    let history = store.names.history(&name("m:a")).unwrap();
    assert_eq!((history.rows.len(), history.dropped), (Record::MAX_ENTRIES + 1, 3));
    let HistoryRow::Recorded(newest) = &history.rows[0] else { panic!("no record") };
    assert_eq!(newest.origin.as_ref().unwrap().chars().count(), Record::MAX_ORIGIN);
    assert!(matches!(history.rows.last(), Some(HistoryRow::Unrecorded(Some(_)))));
}

#[test]
fn longest_record_can_be_read() {
    let mut record = Record::new(name("m:a"));
    for _ in 0..Record::MAX_ENTRIES {
        let digest = Some(Digest::of(b"x"));
        let origin = Some(shortened(&"\u{1}".repeat(5000)));
        let account = Some(Charged { uid: u32::MAX, since: u64::MAX, added_by: Some(u32::MAX) });
        let source = Some("a".repeat(Record::MAX_SOURCE));
        record.add(Entry { origin, source, account, ..Entry::new(pull(u32::MAX), digest, digest) });
    }
    let length = serde_json::to_vec(&record).unwrap().len() as u64;
    assert!(length <= Record::MAX_BYTES, "{length}");
    let entry = length / Record::MAX_ENTRIES as u64;
    let longest = Record::ENTRY_BYTES + (Record::MAX_ORIGIN * 6 + Record::MAX_SOURCE) as u64;
    assert!(entry <= longest, "{entry}");
}

#[test]
fn damaged_record_prevents_no_change() {
    let (_folder, store) = new_store();
    set(&store, pull(ANN), "m:a", "one");
    std::fs::write(store.path(layout::history(&name("m:a"))), "{").unwrap();
    let second = set(&store, pull(BOB), "m:a", "two");
    assert_eq!(rows(&store, "m:a")[0], pulled(BOB, second));
    remove(&store, 0, "m:a");
    assert_eq!(rows(&store, "m:a")[0], "0 rm none ");
}

#[test]
fn name_that_never_existed_is_not_found_and_removed_names_are_suggested() {
    let (_folder, store) = new_store();
    set(&store, pull(ANN), "llama3:8b", "one");
    remove(&store, ANN, "llama3:8b");
    let error = store.names.history(&name("llama3:9b")).unwrap_err();
    let StoreError::NoSuchModel { similar, .. } = error else { panic!("{error}") };
    assert_eq!(similar, ["llama3:8b"]);
}

#[test]
fn histories_of_removed_names_are_bounded() {
    let (_folder, store) = new_store();
    let kept = set(&store, pull(ANN), "m:kept", "one");
    let directory = store.path(layout::HISTORY);
    for number in 0..MAX_REMOVED_NAMES + 5 {
        let removed = name(&format!("m:removed{number}"));
        let content = serde_json::to_vec(&Record::new(removed.clone())).unwrap();
        std::fs::write(store.path(layout::history(&removed)), content).unwrap();
    }
    // The oldest of all is of a name that exists.
    let old = std::fs::File::open(store.path(layout::history(&name("m:kept")))).unwrap();
    old.set_modified(UNIX_EPOCH).unwrap();
    crate::liveness::gc::collect(&store.liveness).unwrap();
    assert_eq!(std::fs::read_dir(directory).unwrap().count(), MAX_REMOVED_NAMES + 1);
    assert_eq!(rows(&store, "m:kept"), [pulled(ANN, kept)]);
}

/// A disk that refuses to put records into a directory once it was told to.
#[derive(Debug, Default)]
struct FailingRecords {
    failure: Mutex<Option<(&'static str, Errno)>>,
}

impl Disk for FailingRecords {
    fn rename(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        match *lock(&self.failure) {
            Some((directory, errno)) if to.starts_with(directory) => Err(errno.into()),
            _ => KernelDisk.rename(root, from, to),
        }
    }
}

fn store_with_failing_records() -> (tempfile::TempDir, Arc<Store>, Arc<FailingRecords>) {
    let disk = Arc::new(FailingRecords::default());
    let options = StoreOptions { disk: Arc::clone(&disk) as Arc<dyn Disk>, ..StoreOptions::default() };
    let (folder, store) = new_store_with(options);
    (folder, store, disk)
}

#[test]
fn name_is_removed_without_a_record_on_a_full_disk_only() {
    for (errno, is_removed) in [(Errno::NOSPC, true), (Errno::ACCESS, false)] {
        let (_folder, store, disk) = store_with_failing_records();
        set(&store, pull(ANN), "m", "a");
        *lock(&disk.failure) = Some((layout::HISTORY, errno));
        let removed = {
            let _tags = store.names.lock_tags();
            store.names.remove_tag(&name("m"), Actor::new(ANN, Verb::Rm))
        };
        assert_eq!(removed.is_ok(), is_removed, "{errno}");
        assert_eq!(store.names.stored_case(&name("m")).unwrap().is_none(), is_removed, "{errno}");
    }
}

#[test]
fn model_is_replaced_without_being_kept_in_the_trash_on_a_full_disk_only() {
    for (errno, is_replaced) in [(Errno::NOSPC, true), (Errno::ACCESS, false)] {
        let (_folder, store, disk) = store_with_failing_records();
        let old = set(&store, pull(ANN), "m", "a");
        *lock(&disk.failure) = Some((layout::TRASH, errno));
        let mut ingest = begin(&store).may_take(NameRule::replacing_any()).on_behalf_of(pull(ANN));
        ingest.add_bytes(b"b").unwrap();
        let replaced = ingest.commit(&name("m"), &manifest(&[b"b"]), None);
        assert_eq!(replaced.is_ok(), is_replaced, "{errno}");
        let now = store.names.own_manifest(&name("m")).unwrap().digest();
        assert_eq!(now != old, is_replaced, "{errno}");
    }
}
