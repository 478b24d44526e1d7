use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;

use crate::liveness::gc::{self, Node, Owner, walk};
use crate::testing::{self, begin, name, new_store};
use crate::{Actor, Ingest, NameRule, OtherFiles, Payer, SpacePolicy, Store, StoreError, Verb, VisitedFiles};

mod downloads;
mod pools;

const ANN: u32 = 1001;
const BOB: u32 = 1002;
const CAROL: u32 = 1003;
const KIB: usize = 1 << 10;

/// A file of `size` bytes that depends on `seed` only.
fn content(seed: u8, size: usize) -> Vec<u8> {
    vec![seed; size]
}

fn ingest(store: &Arc<Store>, uid: u32, verb: Verb) -> Ingest {
    begin(store).may_take(NameRule::replacing_any()).on_behalf_of(Actor::new(uid, verb))
}

/// Adds a model of these files.
fn add(store: &Arc<Store>, uid: u32, reference: &str, files: &[Vec<u8>]) -> Result<(), StoreError> {
    add_with(ingest(store, uid, Verb::Pull), reference, files)
}

fn add_with(mut ingest: Ingest, reference: &str, files: &[Vec<u8>]) -> Result<(), StoreError> {
    ingest.admit(files.iter().map(|bytes| bytes.len() as u64))?;
    for bytes in files {
        ingest.add_bytes(bytes)?;
    }
    ingest.commit(&name(reference), &manifest(files), None).map(drop)
}

fn manifest(files: &[Vec<u8>]) -> Manifest {
    testing::manifest(&files.iter().map(Vec::as_slice).collect::<Vec<_>>())
}

fn remove(store: &Store, reference: &str) {
    {
        let _tags = store.names.lock_tags();
        store.names.remove_tag(&name(reference), Actor::new(0, Verb::Rm)).unwrap();
    }
    gc::collect(&store.liveness).unwrap();
}

fn others(store: &Store) -> OtherFiles {
    let mut manifests = VisitedFiles::default();
    store.names.summaries_with_files(&mut manifests).unwrap();
    store.content.other_files(store.content.index().recheck_sizes().unwrap(), &manifests).unwrap()
}

/// What is charged to each user, and to none.
fn charged(store: &Store) -> BTreeMap<Option<u32>, u64> {
    let charges = store.liveness.charges(&others(store), None).unwrap();
    charges.into_iter().map(|charge| (charge.uid, charge.charged_bytes)).collect()
}

fn of(store: &Store, uid: u32) -> u64 {
    charged(store).get(&Some(uid)).copied().unwrap_or_default()
}

/// Rounded up to whole blocks, as on disk.
fn on_disk(store: &Store, sizes: &[usize]) -> u64 {
    sizes.iter().map(|size| store.ledger.size_on_disk(*size as u64)).sum()
}

/// What the manifest and the history of a name take.
fn records(store: &Store) -> u64 {
    on_disk(store, &[1, 1])
}

/// The same as [`charged`] by the definition, without the catalog.
fn expected(store: &Store) -> BTreeMap<Option<u32>, u64> {
    let (mut sums, mut seen): (BTreeMap<Option<u32>, u64>, BTreeSet<Node>) = Default::default();
    let mut claims = Vec::new();
    walk(&store.liveness, SystemTime::now(), &mut |owned| {
        let reference = match &owned.owner {
            Owner::Tag(reference) => Some((0, reference.clone())),
            Owner::Trash(reference) => Some((1, reference.clone())),
            _ => None,
        };
        if let (Some((kind, reference)), Some(manifest)) = (reference, owned.manifest) {
            let account = owned.account.or_else(|| store.names.account_of(&reference, manifest)).unwrap();
            if kind == 0 {
                for record in [layout::manifest(&reference), layout::history(&reference)] {
                    *sums.entry(Some(account.uid)).or_default() +=
                        store.content.root.allocated_bytes(&record)?;
                }
            }
            claims.push((kind, account.since, account.uid, owned.nodes(&store.liveness)?));
        }
        Ok(())
    })
    .unwrap();
    claims.sort();
    for (_, _, uid, nodes) in claims {
        for node in nodes.into_iter().filter(|node| seen.insert(*node)) {
            *sums.entry(Some(uid)).or_default() +=
                store.content.bytes_on_disk(node).unwrap().unwrap_or_default();
        }
    }
    for trashed in store.names.trash().unwrap() {
        *sums.entry(Some(trashed.account.unwrap().uid)).or_default() +=
            store.names.trashed_bytes(trashed.record).unwrap();
    }
    sums.retain(|_, bytes| *bytes > 0);
    sums
}

/// The size of the store's directory as `du` computes it.
fn du(store: &Store) -> u64 {
    use std::os::unix::fs::MetadataExt as _;
    let (mut sum, mut seen) = (0, HashSet::new());
    let mut left = vec![store.path("")];
    while let Some(path) = left.pop() {
        let metadata = std::fs::symlink_metadata(&path).unwrap();
        if metadata.is_dir() {
            left.extend(std::fs::read_dir(&path).unwrap().map(|entry| entry.unwrap().path()));
        }
        if metadata.is_dir() || seen.insert((metadata.dev(), metadata.ino())) {
            sum += metadata.blocks() * 512;
        }
    }
    sum
}

/// Compares the charges with the definition, with the sums in memory, and with the disk.
fn check(store: &Store) {
    let found = charged(store);
    let mut of_users = found.clone();
    of_users.retain(|uid, bytes| uid.is_some() && *bytes > 0);
    assert_eq!(of_users, expected(store));
    for uid in [ANN, BOB, CAROL] {
        let in_memory = store.liveness.charged_bytes(uid).unwrap();
        assert_eq!(in_memory, found.get(&Some(uid)).copied().unwrap_or_default(), "uid {uid}");
    }
    assert_eq!(found.values().sum::<u64>(), du(store));
}

#[test]
fn shared_data_is_charged_to_its_first_user_and_then_to_who_keeps_it() {
    let (_folder, store) = new_store();
    let (own, shared, other) = (content(1, 5 * KIB), content(2, 20 * KIB), content(3, 9 * KIB));
    add(&store, ANN, "m:ann", &[own, shared.clone()]).unwrap();
    add(&store, BOB, "m:bob", &[other, shared]).unwrap();
    check(&store);
    assert_eq!(of(&store, ANN), on_disk(&store, &[5 * KIB, 20 * KIB]) + records(&store));
    assert_eq!(of(&store, BOB), on_disk(&store, &[9 * KIB]) + records(&store));
    remove(&store, "m:ann");
    check(&store);
    assert_eq!(of(&store, ANN), 0);
    assert_eq!(of(&store, BOB), on_disk(&store, &[9 * KIB, 20 * KIB]) + records(&store));
}

#[test]
fn shares_say_what_only_one_user_keeps() {
    let (_folder, store) = new_store();
    add(&store, ANN, "m:ann", &[content(1, 5 * KIB), content(2, 20 * KIB)]).unwrap();
    add(&store, ANN, "m:ann2", &[content(4, KIB), content(1, 5 * KIB)]).unwrap();
    add(&store, BOB, "m:bob", &[content(3, 9 * KIB), content(2, 20 * KIB)]).unwrap();
    let charges = store.liveness.charges(&others(&store), None).unwrap();
    let of = |uid| charges.iter().find(|charge| charge.uid == Some(uid)).unwrap();
    assert_eq!(of(ANN).unique_bytes, on_disk(&store, &[5 * KIB, KIB]));
    assert_eq!(of(BOB).unique_bytes, on_disk(&store, &[9 * KIB]));
    assert_eq!(
        (of(ANN).shared_bytes, of(BOB).shared_bytes),
        (on_disk(&store, &[20 * KIB]), on_disk(&store, &[20 * KIB]))
    );
    assert_eq!((of(ANN).models, of(BOB).models), (2, 1));
}

#[test]
fn names_without_a_record_and_what_nothing_needs_are_charged_to_no_user() {
    let (_folder, store) = new_store();
    add(&store, ANN, "m:ann", &[content(1, 5 * KIB)]).unwrap();
    testing::add_blobs(&store, [content(9, 30 * KIB)]);
    std::fs::remove_file(store.path(layout::history(&name("m:ann")))).unwrap();
    // Read again, as after a restart.
    store.ledger.note_charges_changed();
    let charges = charged(&store);
    assert_eq!(charges.get(&Some(ANN)).copied().unwrap_or_default(), 0);
    assert_eq!(charges.values().sum::<u64>(), du(&store));
}

#[test]
fn published_blobs_of_a_transaction_are_charged_to_its_user() {
    let (_folder, store) = new_store();
    let mut ingest = ingest(&store, BOB, Verb::Import);
    ingest.add_bytes(&content(1, 50 * KIB)).unwrap();
    ingest.publish().unwrap();
    assert!(of(&store, BOB) >= on_disk(&store, &[50 * KIB]));
    assert_eq!(charged(&store).values().sum::<u64>(), du(&store));
    drop(ingest);
    gc::collect(&store.liveness).unwrap();
    assert_eq!(of(&store, BOB), 0);
}

#[test]
fn transaction_beyond_the_limit_is_refused_before_it_writes() {
    let (_folder, store) = new_store();
    let limit = on_disk(&store, &[100 * KIB]) + 3 * records(&store);
    let limited = || ingest(&store, ANN, Verb::Pull).within_quota(Some(limit));
    add_with(limited(), "m:a", &[content(1, 60 * KIB)]).unwrap();
    let error = add_with(limited(), "m:b", &[content(2, 60 * KIB)]).unwrap_err();
    let needed_bytes = on_disk(&store, &[60 * KIB]);
    let used_bytes = needed_bytes + records(&store);
    let StoreError::OverQuota { uid, group: None, needed_bytes: needed, used_bytes: used, limit_bytes } =
        error
    else {
        panic!("{error}")
    };
    assert_eq!((uid, needed, used, limit_bytes), (ANN, needed_bytes, used_bytes, limit));
    // If the data is stored already, only the new name is charged; other users have limits of their own.
    add_with(limited(), "m:c", &[content(1, 60 * KIB)]).unwrap();
    add_with(ingest(&store, BOB, Verb::Pull).within_quota(Some(limit)), "m:d", &[content(2, 60 * KIB)])
        .unwrap();
    add_with(limited(), "m:e", &[content(3, 40 * KIB)]).unwrap();
    assert_eq!(of(&store, ANN), limit, "all of it can be used");
    remove(&store, "m:a");
    assert_eq!(of(&store, ANN), limit - records(&store), "the other name keeps it");
    remove(&store, "m:c");
    add_with(limited(), "m:f", &[content(4, 60 * KIB)]).unwrap();
    check(&store);
}

#[test]
fn transactions_of_a_user_are_counted_together_until_they_end() {
    let (_folder, store) = new_store();
    let limit = Some(on_disk(&store, &[100 * KIB]));
    let first = ingest(&store, ANN, Verb::Pull).within_quota(limit);
    first.reserve_quota(on_disk(&store, &[60 * KIB])).unwrap();
    let second = ingest(&store, ANN, Verb::Import).within_quota(limit);
    let refused = second.reserve_quota(on_disk(&store, &[60 * KIB]));
    assert!(matches!(refused, Err(StoreError::OverQuota { .. })), "{refused:?}");
    drop(first);
    second.reserve_quota(on_disk(&store, &[60 * KIB])).unwrap();
}

#[test]
fn bytes_that_move_to_a_user_may_exceed_the_limit_and_stop_only_growth() {
    let (_folder, store) = new_store();
    let limit = Some(on_disk(&store, &[10 * KIB]));
    add(&store, BOB, "m:bob", &[content(1, 50 * KIB)]).unwrap();
    add_with(ingest(&store, ANN, Verb::Tag).within_quota(limit), "m:ann", &[content(1, 50 * KIB)]).unwrap();
    remove(&store, "m:bob");
    assert_eq!(of(&store, ANN), on_disk(&store, &[50 * KIB]) + records(&store));
    let more = add_with(ingest(&store, ANN, Verb::Pull).within_quota(limit), "m:x", &[content(2, KIB)]);
    assert!(matches!(more, Err(StoreError::OverQuota { .. })), "{more:?}");
}

#[test]
fn what_a_user_replaces_stays_charged_to_the_user_until_it_is_deleted() {
    let (_folder, store) = new_store();
    store
        .ledger
        .set_space_policy(SpacePolicy { keep_displaced: Duration::ZERO, ..SpacePolicy::default() })
        .unwrap();
    add(&store, ANN, "m:a", &[content(1, 50 * KIB)]).unwrap();
    let before = store.names.manifest(&name("m:a")).unwrap();
    add(&store, ANN, "m:a", &[content(2, 20 * KIB)]).unwrap();
    let own = on_disk(&store, &[20 * KIB]) + records(&store);
    assert_eq!(of(&store, ANN), own, "without a quota it is left to the next collection");
    store.liveness.charge_displaced(ANN, before.digests().into_iter().map(Node::Blob));
    assert_eq!(of(&store, ANN), own + on_disk(&store, &[50 * KIB]));
    assert_eq!(store.liveness.charged_bytes(ANN).unwrap(), of(&store, ANN));
    // Another name that needs it pays for it.
    add(&store, BOB, "m:b", &[content(1, 50 * KIB)]).unwrap();
    assert_eq!(of(&store, ANN), own);
    remove(&store, "m:b");
    assert_eq!((of(&store, ANN), of(&store, BOB)), (own, 0));
    check(&store);
}

#[test]
fn new_name_of_data_that_was_stored_and_unpaid_is_counted_once() {
    let (_folder, store) = new_store();
    let limit = on_disk(&store, &[100 * KIB]) + 2 * records(&store);
    let limited = || ingest(&store, ANN, Verb::Import).within_quota(Some(limit));
    add_with(limited(), "m:a", &[content(1, 60 * KIB)]).unwrap();
    add_with(limited(), "m:a", &[content(2, 20 * KIB)]).unwrap();
    // Nothing needs the first content now, and it fits beside the second.
    add_with(limited(), "m:b", &[content(1, 60 * KIB)]).unwrap();
    check(&store);
}

/// Any sequence of changes leaves the charges as their definition says, and their sum is what the disk has.
#[test]
fn charges_follow_every_change() {
    let users = [ANN, BOB, CAROL];
    proptest::proptest!(proptest::prelude::ProptestConfig::with_cases(12), |(
        steps in proptest::collection::vec((0_usize..6, 0_usize..3, 0_usize..4, 0_u8..6, 0_u8..6), 1..14)
    )| {
        let (_folder, store) = new_store();
        for (action, user, tag, first, second) in steps {
            let (uid, reference) = (users[user], format!("m:{tag}"));
            let is_there = store.names.manifest(&name(&reference)).is_ok();
            match action {
                0..=2 => {
                    let files = [content(first, 3 * KIB * (1 + usize::from(first))), content(second + 10, 7 * KIB)];
                    add(&store, uid, &reference, &files).unwrap();
                }
                3 if is_there => remove(&store, &reference),
                4 if is_there => trash(&store, &reference),
                5 if is_there => {
                    let to = format!("m:{}", (tag + 1) % 4);
                    let manifest = store.names.manifest(&name(&reference)).unwrap();
                    let renaming = ingest(&store, uid, Verb::Rename).renaming(name(&reference));
                    renaming.commit(&name(&to), &manifest, None).unwrap();
                    gc::collect(&store.liveness).unwrap();
                }
                _ => {}
            }
            check(&store);
        }
    });
}

/// Moves a model to the trash.
fn trash(store: &Store, reference: &str) {
    let manifest = store.names.manifest(&name(reference)).unwrap();
    store.names.add_to_trash(&name(reference), &manifest, Duration::from_secs(3600)).unwrap();
    remove(store, reference);
}

fn over_quota(result: Result<(), StoreError>) -> [u64; 3] {
    match result {
        Err(StoreError::OverQuota { uid: ANN, group: None, needed_bytes, used_bytes, limit_bytes }) => {
            [needed_bytes, used_bytes, limit_bytes]
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn model_that_only_the_trash_of_another_user_keeps_counts_against_the_quota() {
    let (_folder, store) = new_store();
    let files = [content(1, 5 * KIB), content(2, 50 * KIB)];
    add(&store, BOB, "m:bob", &files).unwrap();
    trash(&store, "m:bob");
    let all = on_disk(&store, &[5 * KIB, 50 * KIB]);
    assert!(of(&store, BOB) >= all, "the trash is bob's");
    let limited = |bytes| ingest(&store, ANN, Verb::Pull).within_quota(Some(bytes));
    let [needed, used, limit] = over_quota(add_with(limited(all / 2), "m:ann", &files));
    assert!(needed >= all && (used, limit) == (0, all / 2), "{needed} needed, {used} used");
    assert_eq!(of(&store, ANN), 0);
    add_with(limited(2 * all), "m:ann", &files).unwrap();
    assert_eq!(of(&store, ANN), all + records(&store));
    check(&store);
}

#[test]
fn error_has_the_whole_transaction_as_needed_and_everything_else_as_used() {
    let (_folder, store) = new_store();
    let limit = on_disk(&store, &[130 * KIB]);
    let limited = || ingest(&store, ANN, Verb::Pull).within_quota(Some(limit));
    add_with(limited(), "m:a", &[content(1, 40 * KIB)]).unwrap();
    let other = limited();
    other.reserve_quota(on_disk(&store, &[20 * KIB])).unwrap();
    let transaction = limited();
    transaction.reserve_quota(on_disk(&store, &[30 * KIB])).unwrap();
    let refused = over_quota(transaction.reserve_quota(on_disk(&store, &[50 * KIB])));
    let used = on_disk(&store, &[40 * KIB, 20 * KIB]) + 2 * records(&store);
    assert_eq!(refused, [on_disk(&store, &[50 * KIB]) + records(&store), used, limit]);
}

#[test]
fn trash_stays_with_its_user_when_another_reuses_the_name() {
    let (_folder, store) = new_store();
    add(&store, ANN, "m:x", &[content(1, 20 * KIB)]).unwrap();
    trash(&store, "m:x");
    let of_ann = of(&store, ANN);
    assert!(of_ann >= on_disk(&store, &[20 * KIB]));
    add(&store, BOB, "m:x", &[content(2, 9 * KIB)]).unwrap();
    assert_eq!((of(&store, ANN), of(&store, BOB)), (of_ann, on_disk(&store, &[9 * KIB]) + records(&store)));
    assert_eq!(store.liveness.charged_bytes(ANN).unwrap(), of_ann);
    assert_eq!(charged(&store).values().sum::<u64>(), du(&store));
}

/// A response that is ready must not wait for the index.
#[test]
fn use_is_unknown_and_not_waited_for_while_the_index_is_built() {
    let (_folder, store) = new_store();
    add(&store, ANN, "m:a", &[content(1, 20 * KIB)]).unwrap();
    // Builds the index.
    assert!(of(&store, ANN) > 0);
    store.ledger.note_charges_changed();
    store.content.index().set_building(true);
    let begun = std::time::Instant::now();
    assert_eq!(store.liveness.charged_bytes_unless_building(&Payer::User(ANN)).unwrap(), None);
    assert!(begun.elapsed() < Duration::from_secs(5));
    store.content.index().set_building(false);
    assert_eq!(
        store.liveness.charged_bytes_unless_building(&Payer::User(ANN)).unwrap(),
        Some(on_disk(&store, &[20 * KIB]) + records(&store))
    );
}

#[test]
fn users_with_charges_are_known() {
    let (_folder, store) = new_store();
    assert!(store.liveness.charged_users().unwrap().is_empty());
    add(&store, ANN, "a", &[content(1, KIB)]).unwrap();
    add(&store, BOB, "b", &[content(2, KIB)]).unwrap();
    assert_eq!(store.liveness.charged_users().unwrap(), [ANN, BOB].into());
}

#[test]
fn new_name_is_added_to_the_sums_without_a_new_count() {
    let (_folder, store) = new_store();
    let now = |uid| store.ledger.read_charges_now(|counted| counted.charged_to(uid));
    assert_eq!(now(ANN), None, "not counted yet");
    add(&store, ANN, "m:a", &[content(1, 20 * KIB)]).unwrap();
    let first = store.liveness.charged_bytes(ANN).unwrap();
    assert_eq!(now(ANN), Some(first));
    add(&store, BOB, "m:b", &[content(1, 20 * KIB), content(2, 9 * KIB)]).unwrap();
    let second = on_disk(&store, &[9 * KIB]) + records(&store);
    assert_eq!((now(ANN), now(BOB), now(CAROL)), (Some(first), Some(second), Some(0)));
    let limits = [(ANN, 1), (BOB, 1)].map(|(uid, bytes)| crate::ChargeLimit::for_user(uid, bytes));
    assert_eq!(store.ledger.charged_to_now(&limits), Some(vec![first, second]));
    assert_eq!(store.liveness.charged_to(&limits).unwrap(), [first, second]);
    store.ledger.note_charges_changed();
    assert_eq!((now(ANN), store.ledger.charged_to_now(&limits)), (None, None));
    check(&store);
}
