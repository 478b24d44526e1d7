//! Quotas that the members of a group share.

use super::*;
use crate::{ChargeLimit, Members, Pool};

/// All users whose numbers are in the list.
#[derive(Debug)]
struct Listed(Vec<u32>);

impl Members for Listed {
    fn contains(&self, uid: u32) -> bool {
        self.0.contains(&uid)
    }
}

fn pool(name: &str, hard_bytes: u64, members: &[u32]) -> Pool {
    let members = Arc::new(Listed(members.to_vec()));
    Pool { name: name.to_owned(), soft_bytes: None, hard_bytes: Some(hard_bytes), members }
}

fn pooled(store: &Arc<Store>, uid: u32, verb: Verb) -> Ingest {
    ingest(store, uid, verb).within_pools()
}

fn used(store: &Store, pool: &Pool) -> u64 {
    store.liveness.charged_bytes_of(&Payer::Pool(pool.clone())).unwrap()
}

#[test]
fn members_share_a_limit_and_the_error_names_the_group() {
    let (_folder, store) = new_store();
    let limit = on_disk(&store, &[100 * KIB]) + 2 * records(&store);
    let lab = pool("lab", limit, &[ANN, BOB]);
    store.ledger.set_pools(vec![lab.clone()]);
    add_with(pooled(&store, ANN, Verb::Pull), "m:a", &[content(1, 60 * KIB)]).unwrap();
    let error = add_with(pooled(&store, BOB, Verb::Pull), "m:b", &[content(2, 60 * KIB)]).unwrap_err();
    let StoreError::OverQuota { uid: BOB, group: Some(group), .. } = &error else { panic!("{error}") };
    assert_eq!(group, "lab");
    let text = error.to_string();
    assert!(
        text.starts_with("the quota of group lab is ") && text.contains(" are used; this needs "),
        "{text}"
    );
    // For data that a member has stored, only the name is charged.
    add_with(pooled(&store, BOB, Verb::Tag), "m:c", &[content(1, 60 * KIB)]).unwrap();
    assert_eq!(used(&store, &lab), of(&store, ANN) + of(&store, BOB));
    // Others are not limited, and do not count.
    add_with(pooled(&store, CAROL, Verb::Pull), "m:d", &[content(3, 500 * KIB)]).unwrap();
    assert_eq!(used(&store, &lab), of(&store, ANN) + of(&store, BOB));
    remove(&store, "m:a");
    remove(&store, "m:c");
    assert_eq!(used(&store, &lab), 0);
    add_with(pooled(&store, BOB, Verb::Pull), "m:b", &[content(2, 60 * KIB)]).unwrap();
}

#[test]
fn own_quota_and_every_pool_of_the_user_are_checked() {
    let (_folder, store) = new_store();
    let bytes = |kib| on_disk(&store, &[kib * KIB]) + records(&store);
    store.ledger.set_pools(vec![pool("large", bytes(500), &[ANN]), pool("small", bytes(50), &[ANN, CAROL])]);
    let refused = |ingest| match add_with(ingest, "m:x", &[content(7, 100 * KIB)]) {
        Err(StoreError::OverQuota { group, .. }) => group,
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(pooled(&store, ANN, Verb::Pull)).as_deref(), Some("small"));
    assert_eq!(
        refused(pooled(&store, ANN, Verb::Pull).within_quota(Some(bytes(10)))).as_deref(),
        Some("small")
    );
    assert_eq!(refused(ingest(&store, ANN, Verb::Pull).within_quota(Some(bytes(10)))), None);
    add_with(pooled(&store, BOB, Verb::Pull), "m:b", &[content(7, 100 * KIB)]).unwrap();
}

#[test]
fn transactions_of_all_members_are_counted_together() {
    let (_folder, store) = new_store();
    let limit = on_disk(&store, &[100 * KIB]);
    let lab = pool("lab", limit, &[ANN, BOB]);
    store.ledger.set_pools(vec![lab.clone()]);
    let first = pooled(&store, ANN, Verb::Pull);
    first.reserve_quota(on_disk(&store, &[60 * KIB])).unwrap();
    let second = pooled(&store, BOB, Verb::Pull);
    let refused = second.reserve_quota(on_disk(&store, &[60 * KIB]));
    assert!(matches!(refused, Err(StoreError::OverQuota { group: Some(_), .. })), "{refused:?}");
    let limits = [ChargeLimit { payer: Payer::Pool(lab), bytes: limit }];
    assert!(store.liveness.quotas_left(&limits).unwrap()[0] <= limit - on_disk(&store, &[60 * KIB]));
    drop(first);
    second.reserve_quota(on_disk(&store, &[60 * KIB])).unwrap();
}

#[test]
fn displaced_models_of_members_do_not_block_other_members() {
    let (_folder, store) = new_store();
    let limit = on_disk(&store, &[100 * KIB]) + 4 * records(&store);
    store.ledger.set_pools(vec![pool("lab", limit, &[ANN, BOB])]);
    add_with(pooled(&store, ANN, Verb::Import), "m:a", &[content(1, 60 * KIB)]).unwrap();
    add_with(pooled(&store, ANN, Verb::Import), "m:a", &[content(2, 20 * KIB)]).unwrap();
    assert_eq!(store.names.trash().unwrap().len(), 1);
    add_with(pooled(&store, BOB, Verb::Import), "m:b", &[content(3, 60 * KIB)]).unwrap();
    assert_eq!(store.names.trash().unwrap().len(), 0);
    check(&store);
}

/// A pull updates a name that another user has added, and then its user pays for what both versions need.
#[test]
fn update_of_the_name_of_another_user_counts_what_both_versions_share() {
    let (_folder, store) = new_store();
    let limit = on_disk(&store, &[50 * KIB]);
    store.ledger.set_pools(vec![pool("lab", limit, &[ANN])]);
    let (shared, old, new) = (content(1, 80 * KIB), content(2, KIB), content(3, KIB));
    add(&store, BOB, "m:latest", &[old, shared.clone()]).unwrap();
    let refused = add_with(pooled(&store, ANN, Verb::Pull), "m:latest", &[new.clone(), shared.clone()]);
    assert!(matches!(refused, Err(StoreError::OverQuota { group: Some(_), .. })), "{refused:?}");
    add_with(pooled(&store, CAROL, Verb::Pull), "m:latest", &[new, shared]).unwrap();
    assert_eq!(of(&store, ANN), 0);
    check(&store);
}

/// Whatever members and others do, a pool is the sum of its members' charges, nobody pays for what no name, trash or
/// download of theirs needs, and nothing that a member adds exceeds a limit of theirs.
#[test]
fn no_sequence_of_changes_adds_beyond_a_quota_or_a_pool() {
    let users = [ANN, BOB, CAROL];
    proptest::proptest!(proptest::prelude::ProptestConfig::with_cases(16), |(
        steps in proptest::collection::vec((0_usize..7, 0_usize..3, 0_usize..4, 0_u8..6, 0_u8..6), 1..20)
    )| {
        let (_folder, store) = new_store();
        let lab = pool("lab", 90 << 10, &[ANN, BOB]);
        let all = pool("all", 140 << 10, &users);
        let pools = [lab, all];
        store.ledger.set_pools(pools.to_vec());
        let own_limit = 70 << 10;
        for (action, user, tag, first, second) in steps {
            let (uid, reference) = (users[user], format!("m:{tag}"));
            let is_there = store.names.manifest(&name(&reference)).is_ok();
            // Each replaces only names of its own.
            let may = NameRule { uid, replace: true, ..NameRule::default() };
            let limited = |verb| pooled(&store, uid, verb).may_take(may.clone()).within_quota(Some(own_limit));
            let added = match action {
                0..=2 => {
                    let files = [content(first, 3 * KIB * (1 + usize::from(first))), content(second + 10, 7 * KIB)];
                    add_with(limited(Verb::Import), &reference, &files)
                }
                // A tag of what another user pays for, and its removal.
                3 | 4 if is_there => {
                    let manifest = store.names.manifest(&name(&reference)).unwrap();
                    let tagged = format!("t:{uid}-{tag}");
                    limited(Verb::Tag).commit(&name(&tagged), &manifest, None).map(drop)
                }
                5 if is_there => {
                    remove(&store, &reference);
                    continue;
                }
                6 if is_there => {
                    trash(&store, &reference);
                    continue;
                }
                _ => continue,
            };
            // Data of the trash that the addition used, or was about to use, was not deleted to make space for it: its
            // user pays for it until the next collection, which the daemon repeats.
            gc::collect_condemned(&store.liveness).unwrap();
            check(&store);
            let charged: BTreeMap<u32, u64> = users.iter().map(|uid| (*uid, of(&store, *uid))).collect();
            for pool in &pools {
                let members = charged.iter().filter(|(uid, _)| pool.members.contains(**uid));
                proptest::prop_assert_eq!(used(&store, pool), members.map(|(_, bytes)| *bytes).sum::<u64>());
                let is_limited = pool.members.contains(uid) && added.is_ok();
                proptest::prop_assert!(!is_limited || used(&store, pool) <= pool.hard_bytes.unwrap());
            }
            proptest::prop_assert!(added.is_err() || charged[&uid] <= own_limit);
            let expected = |error: &StoreError| {
                matches!(error, StoreError::OverQuota { .. } | StoreError::NameOfAnother { .. })
            };
            proptest::prop_assert!(added.as_ref().err().is_none_or(expected), "{:?}", added);
        }
    });
}

/// Knows the membership only of users that it was asked to look up.
#[derive(Debug, Default)]
struct Looked(std::sync::Mutex<BTreeSet<u32>>);

impl Members for Looked {
    fn contains(&self, uid: u32) -> bool {
        self.0.lock().unwrap().contains(&uid)
    }
    fn prepare(&self, uids: &[u32]) {
        self.0.lock().unwrap().extend(uids);
    }
}

#[test]
fn membership_of_every_user_with_charges_is_found_out_before_they_are_counted() {
    let (_folder, store) = new_store();
    add(&store, ANN, "m:a", &[content(1, 60 * KIB)]).unwrap();
    let carol = ingest(&store, CAROL, Verb::Pull);
    let members = Arc::new(Looked::default());
    let hard_bytes = Some(on_disk(&store, &[100 * KIB]));
    store.ledger.set_pools(vec![Pool {
        name: "lab".to_owned(),
        soft_bytes: None,
        hard_bytes,
        members: members.clone(),
    }]);
    let limited = pooled(&store, BOB, Verb::Pull);
    assert!(!members.contains(ANN));
    let refused = limited.reserve_quota(on_disk(&store, &[60 * KIB]));
    assert!(matches!(refused, Err(StoreError::OverQuota { uid: BOB, group: Some(_), .. })), "{refused:?}");
    assert!([ANN, BOB, CAROL].iter().all(|uid| members.contains(*uid)), "of transactions too");
    drop(carol);
}
