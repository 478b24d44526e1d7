use crate::HistoryEntry;
use crate::Store;
use std::sync::Arc;
use std::time::UNIX_EPOCH;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::manifest::Manifest;
use tempfile::TempDir;

use super::*;
use crate::NameRule;
use crate::testing::{begin, new_store};

const ANN: u32 = 1001;
const BOB: u32 = 1002;

fn name(text: &str) -> Reference {
    text.parse().unwrap()
}

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
    let digest = ingest.add_bytes(content.as_bytes()).unwrap();
    let file = Descriptor { media_type: MediaType::new("text/plain"), digest, size: content.len() as u64 };
    let manifest = Manifest::compose(file.clone(), vec![file]).unwrap();
    let origin = (actor.verb == Verb::Pull).then_some("example.org/model");
    ingest.commit(&name(reference), &manifest, origin).unwrap();
    manifest.digest()
}

const fn pull(uid: u32) -> Actor {
    Actor { uid, verb: Verb::Pull }
}

fn remove(store: &Store, uid: u32, reference: &str) {
    let _tags = store.names().lock_tags();
    store.names().remove_tag(&name(reference), Actor { uid, verb: Verb::Rm }).unwrap();
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
    store.names().history(&name(reference)).unwrap().rows.into_iter().map(row).collect()
}

fn forget(folder: &TempDir, reference: &str) {
    std::fs::remove_file(folder.path().join("store").join(layout::history(&name(reference)))).unwrap();
}

#[test]
fn history_says_who_set_and_removed_a_name() {
    let (_folder, store) = new_store();
    let first = set(&store, pull(ANN), "m:a", "one").short();
    let second = set(&store, Actor { uid: BOB, verb: Verb::Import }, "m:a", "two").short();
    remove(&store, 0, "m:a");
    let expected = [
        "0 rm none ".to_owned(),
        format!("{BOB} import {second} "),
        format!("{ANN} pull {first} example.org/model"),
    ];
    assert_eq!(rows(&store, "m:a"), expected);
    assert_eq!(rows(&store, "M:A"), expected, "names are compared without case");
}

#[test]
fn model_that_stays_the_same_is_no_change() {
    let (_folder, store) = new_store();
    let digest = set(&store, pull(ANN), "m:a", "one");
    set(&store, pull(BOB), "m:a", "one");
    assert_eq!(rows(&store, "m:a").len(), 1);
    assert_eq!(store.names().account_of(&name("m:a"), digest).unwrap().uid, ANN);
}

#[test]
fn change_that_did_not_happen_is_left_out_and_replaced() {
    let (folder, store) = new_store();
    let digest = set(&store, pull(ANN), "m:a", "one");
    let manifest = folder.path().join("store").join(layout::manifest(&name("m:a")));
    let content = std::fs::read(&manifest).unwrap();
    remove(&store, BOB, "m:a");
    // As after a crash between the record and the removal.
    std::fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    std::fs::write(&manifest, content).unwrap();
    let before = [format!("{ANN} pull {} example.org/model", digest.short())];
    assert_eq!(rows(&store, "m:a"), before);
    let second = set(&store, pull(BOB), "m:a", "two");
    let expected = [format!("{BOB} pull {} example.org/model", second.short()), before[0].clone()];
    assert_eq!(rows(&store, "m:a"), expected);
}

#[test]
fn first_setting_that_did_not_happen_is_no_history() {
    let (folder, store) = new_store();
    set(&store, pull(ANN), "m:a", "one");
    std::fs::remove_file(folder.path().join("store").join(layout::manifest(&name("m:a")))).unwrap();
    assert!(matches!(store.names().history(&name("m:a")), Err(StoreError::NoSuchModel { .. })));
}

#[test]
fn name_of_an_earlier_version_begins_with_what_it_means() {
    let (folder, store) = new_store();
    let first = set(&store, pull(ANN), "m:a", "one");
    forget(&folder, "m:a");
    assert_eq!(rows(&store, "m:a"), [format!("unrecorded {}", first.short())]);
    assert_eq!(store.names().account_of(&name("m:a"), first), None);
    let second = set(&store, pull(BOB), "m:a", "two");
    let expected =
        [format!("{BOB} pull {} example.org/model", second.short()), format!("unrecorded {}", first.short())];
    assert_eq!(rows(&store, "m:a"), expected);
}

#[test]
fn change_by_another_program_is_a_row_without_a_record() {
    let (folder, store) = new_store();
    let first = set(&store, pull(ANN), "m:a", "one");
    let other = set(&store, pull(ANN), "m:b", "two");
    let path = |tag: &str| folder.path().join("store").join(layout::manifest(&name(tag)));
    std::fs::copy(path("m:b"), path("m:a")).unwrap();
    let expected =
        [format!("unrecorded {}", other.short()), format!("{ANN} pull {} example.org/model", first.short())];
    assert_eq!(rows(&store, "m:a"), expected);
}

#[test]
fn renamed_model_stays_with_its_user() {
    let (_folder, store) = new_store();
    let digest = set(&store, pull(ANN), "m:a", "one");
    let since = store.names().account_of(&name("m:a"), digest);
    let actor = Actor { uid: 0, verb: Verb::Rename };
    commit(&store, actor, "m:b", "one", |ingest| ingest.renaming(name("m:a")));
    assert_eq!(store.names().account_of(&name("m:b"), digest), since);
    assert_eq!(rows(&store, "m:b"), [format!("0 rename {} example.org/model", digest.short())]);
    assert_eq!(rows(&store, "m:a")[0], "0 rename none ");
    commit(&store, actor, "m:B", "one", |ingest| ingest.renaming(name("m:b")));
    assert_eq!(rows(&store, "m:B").len(), 1, "another case is no other name");
    assert_eq!(store.names().account_of(&name("m:B"), digest), since);
}

#[test]
fn restored_model_stays_with_its_user() {
    let (_folder, store) = new_store();
    let digest = set(&store, pull(ANN), "m:a", "one");
    let since = store.names().account_of(&name("m:a"), digest);
    remove(&store, 0, "m:a");
    let undelete = Actor { uid: 0, verb: Verb::Undelete };
    commit(&store, undelete, "m:a", "one", |ingest| ingest.charged_to(since));
    assert_eq!(store.names().account_of(&name("m:a"), digest), since);
}

#[test]
fn oldest_entries_are_dropped_and_counted() {
    let (_folder, store) = new_store();
    let long = "é".repeat(Record::MAX_ORIGIN * 2);
    for number in 0..Record::MAX_ENTRIES + 3 {
        let mut ingest = begin(&store).may_take(NameRule::replacing_any()).on_behalf_of(pull(ANN));
        let content = number.to_string();
        let digest = ingest.add_bytes(content.as_bytes()).unwrap();
        let file =
            Descriptor { media_type: MediaType::new("text/plain"), digest, size: content.len() as u64 };
        let manifest = Manifest::compose(file.clone(), vec![file]).unwrap();
        ingest.commit(&name("m:a"), &manifest, Some(&long)).unwrap();
    }
    let history = store.names().history(&name("m:a")).unwrap();
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
        let account = Some(Charged { uid: u32::MAX, since: u64::MAX });
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
    let (folder, store) = new_store();
    set(&store, pull(ANN), "m:a", "one");
    std::fs::write(folder.path().join("store").join(layout::history(&name("m:a"))), "{").unwrap();
    let second = set(&store, pull(BOB), "m:a", "two");
    assert_eq!(rows(&store, "m:a")[0], format!("{BOB} pull {} example.org/model", second.short()));
    remove(&store, 0, "m:a");
    assert_eq!(rows(&store, "m:a")[0], "0 rm none ");
}

#[test]
fn name_that_never_existed_is_not_found_and_removed_names_are_suggested() {
    let (_folder, store) = new_store();
    set(&store, pull(ANN), "llama3:8b", "one");
    remove(&store, ANN, "llama3:8b");
    let error = store.names().history(&name("llama3:9b")).unwrap_err();
    let StoreError::NoSuchModel { similar, .. } = error else { panic!("{error}") };
    assert_eq!(similar, ["llama3:8b"]);
}

#[test]
fn histories_of_removed_names_are_bounded() {
    let (folder, store) = new_store();
    let kept = set(&store, pull(ANN), "m:kept", "one");
    let directory = folder.path().join("store").join(layout::HISTORY);
    for number in 0..MAX_REMOVED_NAMES + 5 {
        let removed = name(&format!("m:removed{number}"));
        let content = serde_json::to_vec(&Record::new(removed.clone())).unwrap();
        std::fs::write(folder.path().join("store").join(layout::history(&removed)), content).unwrap();
    }
    // The oldest of all is of a name that exists.
    let old =
        std::fs::File::open(folder.path().join("store").join(layout::history(&name("m:kept")))).unwrap();
    old.set_modified(UNIX_EPOCH).unwrap();
    crate::liveness::gc::collect(store.liveness()).unwrap();
    assert_eq!(std::fs::read_dir(directory).unwrap().count(), MAX_REMOVED_NAMES + 1);
    assert_eq!(rows(&store, "m:kept"), [format!("{ANN} pull {} example.org/model", kept.short())]);
}
