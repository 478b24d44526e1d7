//! Unfinished downloads, what is reserved before it is written, and what makes room for that.

use blobd_store_format::digest::Digest;
use blobd_store_format::split::SplitPlan;

use super::*;
use crate::ledger::transactions::Held;
use crate::{Assembler, ChargeLimit, DownloadAbout, PartialFile};

const SIZE: usize = 100 * KIB;

fn file() -> Digest {
    Digest::of(&content(1, SIZE))
}

/// Continues the download of [`file`], and writes this many KiB from its start.
fn receive(ingest: &Ingest, uid: u32, kib: usize) -> Result<Assembler, StoreError> {
    let partial = PartialFile::open(ingest.store(), file(), SIZE as u64)?;
    let partial = partial.about(DownloadAbout::for_pull("m".to_owned(), "a source".to_owned(), uid));
    let assembler = partial.follow(SplitPlan::whole(SIZE as u64), ingest.staging())?;
    assembler.write(0, &content(1, kib * KIB))?;
    Ok(assembler)
}

fn held(ingest: &Ingest) -> Held {
    ingest.store().ledger.transactions.lock()[&**ingest.staging().transaction()].held
}

/// What the download has on disk.
fn downloaded(store: &Store) -> u64 {
    store.content.bytes_of_partial(file()).unwrap().unwrap()
}

#[test]
fn download_is_charged_to_its_user_and_only_by_the_transaction_that_continues_it() {
    let (_folder, store) = new_store();
    let stored = testing::add_blobs(&store, [content(2, 10 * KIB)])[0];
    let pull = ingest(&store, ANN, Verb::Pull);
    let assembler = receive(&pull, ANN, 20).unwrap();
    assembler.note_digests(&[stored]).unwrap();
    drop((assembler, pull));
    let all = downloaded(&store) + on_disk(&store, &[10 * KIB]);
    assert_eq!((of(&store, ANN), store.liveness.charged_bytes(ANN).unwrap()), (all, all));
    assert_eq!(charged(&store).values().sum::<u64>(), du(&store));
    let pull = ingest(&store, ANN, Verb::Pull);
    let assembler = receive(&pull, ANN, 0).unwrap();
    let staging = store.content.root.allocated_bytes(pull.staging().directory()).unwrap();
    assert_eq!(of(&store, ANN), all + staging, "as it is on disk");
    assert_eq!(store.liveness.charged_bytes(ANN).unwrap(), 0, "the transaction counts it");
    assert_eq!(held(&pull), Held { taken: all, reserved: all, ..Held::default() });
    // Opening it again does not count it twice.
    drop(assembler);
    drop(receive(&pull, ANN, 0).unwrap());
    assert_eq!(held(&pull).taken, all);
    drop(pull);
    assert_eq!(store.liveness.charged_bytes(ANN).unwrap(), all);
    store.ledger.remove_partial(file()).unwrap();
    assert_eq!(of(&store, ANN), 0);
}

#[test]
fn download_of_another_user_must_be_within_the_quota_to_be_continued() {
    let (_folder, store) = new_store();
    drop(receive(&ingest(&store, ANN, Verb::Pull), ANN, 20).unwrap());
    let all = downloaded(&store);
    let bob = |limit| ingest(&store, BOB, Verb::Pull).within_quota(Some(limit));
    let refused = receive(&bob(all - 1), BOB, 0);
    assert!(matches!(refused, Err(StoreError::OverQuota { uid: BOB, .. })), "{refused:?}");
    assert_eq!(of(&store, ANN), all);
    let own = receive(&ingest(&store, ANN, Verb::Pull).within_quota(Some(1)), ANN, 0);
    assert!(own.is_ok(), "it is charged already: {own:?}");
    drop(own);
    let continued = bob(all);
    drop(receive(&continued, BOB, 0).unwrap());
    drop(receive(&continued, BOB, 0).unwrap());
    assert_eq!((held(&continued).taken, held(&continued).reserved), (all, all));
    drop(continued);
    assert_eq!((of(&store, ANN), of(&store, BOB)), (0, all));
}

#[test]
fn bytes_of_a_download_are_those_of_its_own_user() {
    let (_folder, store) = new_store();
    let own = |uid| ingest(&store, uid, Verb::Pull).own_download_bytes(file()).unwrap();
    assert_eq!(own(ANN), 0);
    drop(receive(&ingest(&store, ANN, Verb::Pull), ANN, 20).unwrap());
    assert_eq!((own(ANN), own(BOB)), (downloaded(&store), 0));
}

#[test]
fn what_is_left_of_a_limit_is_neither_charged_nor_in_progress() {
    let (_folder, store) = new_store();
    add(&store, ANN, "m:a", &[content(3, 40 * KIB)]).unwrap();
    let pull = ingest(&store, ANN, Verb::Pull).within_quota(Some(1 << 30));
    pull.reserve_quota(on_disk(&store, &[30 * KIB])).unwrap();
    let (in_progress, charged) = (held(&pull).bytes(), store.liveness.charged_bytes(ANN).unwrap());
    assert_eq!(in_progress, on_disk(&store, &[30 * KIB]) + records(&store));
    let limits = [
        ChargeLimit::for_user(ANN, 1 << 20),
        ChargeLimit::for_user(BOB, 1 << 20),
        ChargeLimit::for_user(ANN, 1),
    ];
    let left = store.liveness.quotas_left(&limits).unwrap();
    assert_eq!(left, [(1 << 20) - charged - in_progress, 1 << 20, 0]);
}

/// A model of 50 KiB in the trash whose name another one of 20 KiB has, both of ann's.
fn displaced() -> (tempfile::TempDir, Arc<Store>) {
    let (folder, store) = new_store();
    let keep_displaced = Duration::from_secs(3600);
    store.ledger.set_space_policy(SpacePolicy { keep_displaced, ..SpacePolicy::default() }).unwrap();
    add(&store, ANN, "m:a", &[content(3, 50 * KIB)]).unwrap();
    add(&store, ANN, "m:a", &[content(4, 20 * KIB)]).unwrap();
    assert!(store.liveness.has_displaced().unwrap());
    (folder, store)
}

#[test]
fn displaced_models_make_room_in_a_quota_if_they_suffice() {
    let block = 4096;
    for (more, is_made) in [(0, true), (block, false)] {
        let (_folder, store) = displaced();
        let limit = of(&store, ANN);
        let limited = ingest(&store, ANN, Verb::Pull).within_quota(Some(limit));
        // The records of the new name are reserved with it. The one in the trash has a block.
        let bytes = on_disk(&store, &[50 * KIB]) + on_disk(&store, &[1]) - records(&store) + more;
        let free = limited.reserve_free_quota(bytes);
        assert!(matches!(free, Err(StoreError::OverQuota { uid: ANN, .. })), "{free:?}");
        assert!(store.liveness.has_displaced().unwrap(), "this deletes nothing");
        let made = limited.reserve_quota(bytes);
        assert_eq!((made.is_ok(), store.liveness.has_displaced().unwrap()), (is_made, !is_made), "{made:?}");
        // It makes no room in the quotas of other users.
        let (_folder, store) = displaced();
        let other = ingest(&store, BOB, Verb::Pull).within_quota(Some(block));
        assert!(other.reserve_quota(2 * block).is_err() && store.liveness.has_displaced().unwrap());
    }
}

#[test]
fn nothing_is_reserved_for_no_bytes() {
    let (_folder, store) = new_store();
    let limited = ingest(&store, ANN, Verb::Pull).within_quota(Some(0));
    limited.reserve_quota(0).unwrap();
    limited.reserve_free_quota(0).unwrap();
    assert_eq!(held(&limited).reserved, 0);
    assert!(limited.reserve_quota(1).is_err() && limited.reserve_free_quota(1).is_err());
}

#[test]
fn admission_reserves_all_or_only_what_is_certainly_new() {
    let (_folder, store) = new_store();
    testing::add_blobs(&store, [content(1, 40 * KIB)]);
    let sizes = || [40 * KIB, 60 * KIB].into_iter().map(|size| size as u64);
    let all = on_disk(&store, &[40 * KIB, 60 * KIB]);
    let limited = |limit| ingest(&store, ANN, Verb::Pull).within_quota(Some(limit));
    let records = records(&store);
    let enough = limited(all + records);
    enough.admit(sizes()).unwrap();
    assert_eq!(held(&enough).reserved, all + records);
    drop(enough);
    let tight = limited(all + records - 1);
    tight.admit(sizes()).unwrap();
    assert_eq!(held(&tight).reserved, 60 * KIB as u64 + records, "a blob of the other length is stored");
    drop(tight);
    let refused = limited(60 * KIB as u64 + records - 1).admit(sizes());
    assert!(matches!(refused, Err(StoreError::OverQuota { .. })), "{refused:?}");
    assert!(limited(all + records).admit_now(sizes()).unwrap());
    assert!(!limited(all + records - 1).admit_now(sizes()).unwrap());
    assert!(limited(all + records).admit_all(sizes()).is_ok());
    assert!(limited(all + records - 1).admit_all(sizes()).is_err());
    let tight = limited(60 * KIB as u64 + records);
    tight.reserve_certainly_new(sizes()).unwrap();
    assert_eq!(held(&tight).reserved, 60 * KIB as u64 + records);
    assert!(limited(60 * KIB as u64 + records - 1).reserve_certainly_new(sizes()).is_err());
}

#[test]
fn admission_promises_disk_space_that_others_do_not_get() {
    let (_folder, store) = new_store();
    let policy =
        SpacePolicy { quota_bytes: Some(1 << 20), min_free_bytes: Some(0), ..SpacePolicy::default() };
    store.ledger.set_space_policy(policy).unwrap();
    let left = || store.ledger.available_space().unwrap().bytes;
    let (all, sizes) = (left(), |kib: u64| std::iter::once(kib << 10));
    let first = begin(&store);
    assert!(first.admit_now(sizes(600)).unwrap());
    assert_eq!(left(), all - (600 << 10));
    assert!(!begin(&store).admit_now(sizes(600)).unwrap());
    assert!(begin(&store).admit_now(sizes(400)).unwrap());
    first.staging().return_promises();
    assert_eq!(left(), all);
    first.admit(sizes(600)).unwrap();
    assert_eq!(left(), all - (600 << 10));
    drop(first);
    assert_eq!(left(), all, "it ends with the transaction");
    // What does not fit with all of it may still fit without what is stored.
    testing::add_blobs(&store, [content(1, 600 * KIB)]);
    let (second, before) = (begin(&store), left());
    second.admit([600_u64 << 10, 300 << 10].into_iter()).unwrap();
    assert_eq!(before - left(), 300 << 10);
}

#[test]
fn files_that_nobody_pays_for_are_claimed_before_the_commit() {
    let (_folder, store) = new_store();
    testing::add_blobs(&store, [content(1, 40 * KIB)]);
    let bytes = on_disk(&store, &[40 * KIB]);
    let files = BTreeSet::from([Digest::of(&content(1, 40 * KIB))]);
    let limited = ingest(&store, ANN, Verb::Pull).within_quota(Some(bytes));
    limited.claim_quota(&files).unwrap();
    assert_eq!(held(&limited).claimed, bytes);
    limited.claim_quota(&BTreeSet::new()).unwrap();
    assert_eq!(held(&limited).claimed, bytes, "what was claimed stays so");
    let tight = ingest(&store, BOB, Verb::Pull).within_quota(Some(bytes - 1));
    assert!(matches!(tight.claim_quota(&files), Err(StoreError::OverQuota { uid: BOB, .. })));
    let unlimited = ingest(&store, CAROL, Verb::Pull);
    unlimited.claim_quota(&files).unwrap();
    assert_eq!(held(&unlimited).claimed, 0, "without limits nothing is counted");
}
