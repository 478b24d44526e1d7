//! Stored data that no name pays for, and whom the trash is charged to.

use super::*;

/// Moves a model to the trash.
fn trash(store: &Store, reference: &str) {
    let manifest = store.names().manifest(&name(reference)).unwrap();
    store.names().add_to_trash(&name(reference), &manifest, Duration::from_secs(3600)).unwrap();
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
    assert_eq!(store.liveness().charged_bytes(ANN).unwrap(), of_ann);
    assert_eq!(charged(&store).values().sum::<u64>(), du(&store));
}

/// A response that is ready must not wait for the index.
#[test]
fn use_is_unknown_and_not_waited_for_while_the_index_is_built() {
    let (_folder, store) = new_store();
    add(&store, ANN, "m:a", &[content(1, 20 * KIB)]).unwrap();
    // Builds the index.
    assert!(of(&store, ANN) > 0);
    store.ledger().note_charges_changed();
    store.content().index().set_building(true);
    let begun = std::time::Instant::now();
    assert_eq!(store.liveness().charged_bytes_unless_building(&crate::Payer::User(ANN)).unwrap(), None);
    assert!(begun.elapsed() < Duration::from_secs(5));
    store.content().index().set_building(false);
    assert_eq!(
        store.liveness().charged_bytes_unless_building(&crate::Payer::User(ANN)).unwrap(),
        Some(on_disk(&store, &[20 * KIB]) + records(&store))
    );
}
