//! Which models are evicted, in which order, and how many.

use std::sync::Arc;
use std::time::Duration;

use super::*;
use crate::testing::{begin, manifest, name, new_store};
use crate::{NameRule, Pinner, SpacePolicy, Store};

/// The size of a block of the disk, on which files are allocated.
const BLOCK: usize = 4096;

fn add(store: &Arc<Store>, reference: &str, files: &[&[u8]]) {
    add_from(store, reference, files, None);
}

fn add_from(store: &Arc<Store>, reference: &str, files: &[&[u8]], origin: Option<&str>) {
    let mut ingest = begin(store).may_take(NameRule::replacing_any());
    for bytes in files {
        ingest.add_bytes(bytes).unwrap();
    }
    ingest.commit(&name(reference), &manifest(files), origin).unwrap();
}

fn set_eviction(store: &Store, eviction: Eviction) {
    store.ledger.set_space_policy(SpacePolicy { eviction, ..SpacePolicy::default() }).unwrap();
}

/// A store with models of one file each, of this many blocks. They were used in this order, after they were added.
fn store_of(models: &[(&str, usize)]) -> (tempfile::TempDir, Arc<Store>) {
    let (folder, store) = new_store();
    set_eviction(&store, Eviction::All);
    for (seed, (reference, blocks)) in (0..).zip(models) {
        add(&store, reference, &[&vec![seed; blocks * BLOCK]]);
    }
    (folder, store)
}

/// A clock by which models are used in the order of `names`, long after they were added.
fn used(names: &[&str], reference: &Reference) -> Option<SystemTime> {
    let place = names.iter().position(|other| name(other) == *reference)?;
    Some(SystemTime::now() + Duration::from_secs(1000 * (1 + place as u64)))
}

/// The victims with the blocks that are free after each.
fn victims(store: &Store, goals: &[usize], used_in: &[&str]) -> Vec<(String, usize)> {
    let goals: Vec<u64> = goals.iter().map(|blocks| (blocks * BLOCK) as u64).collect();
    let plan = plan_eviction(&store.liveness, &goals, &|reference, _| used(used_in, reference)).unwrap();
    assert_eq!(plan.freed_bytes, plan.victims.last().map_or(0, |victim| victim.freed_bytes));
    let blocks = |bytes: u64| {
        assert_eq!(bytes % BLOCK as u64, 0);
        usize::try_from(bytes).unwrap() / BLOCK
    };
    plan.victims
        .iter()
        .map(|victim| (victim.reference.model().to_owned(), blocks(victim.freed_bytes)))
        .collect()
}

fn named(victims: &[(&str, usize)]) -> Vec<(String, usize)> {
    victims.iter().map(|(name, blocks)| ((*name).to_owned(), *blocks)).collect()
}

#[test]
fn least_recently_used_models_are_evicted_until_enough_is_free() {
    let (_folder, store) = store_of(&[("a", 1), ("b", 2), ("c", 4)]);
    for (goal, used_in, expected) in [
        (1, ["a", "b", "c"], &[("a", 1)][..]),
        (3, ["a", "b", "c"], &[("a", 1), ("b", 3)]),
        (7, ["a", "b", "c"], &[("a", 1), ("b", 3), ("c", 7)]),
        (8, ["a", "b", "c"], &[]),
        (6, ["b", "c", "a"], &[("b", 2), ("c", 6)]),
        (7, ["c", "b", "a"], &[("c", 4), ("b", 6), ("a", 7)]),
        // A model that need not be evicted after a larger one is spared.
        (2, ["a", "b", "c"], &[("b", 2)]),
        (4, ["a", "b", "c"], &[("c", 4)]),
        (5, ["a", "b", "c"], &[("a", 1), ("c", 5)]),
    ] {
        assert_eq!(victims(&store, &[goal], &used_in), named(expected), "{goal} {used_in:?}");
    }
}

#[test]
fn first_goal_that_can_be_reached_is_planned() {
    let (_folder, store) = store_of(&[("a", 1), ("b", 2)]);
    let in_order = ["a", "b"];
    assert_eq!(victims(&store, &[9, 3, 1], &in_order), named(&[("a", 1), ("b", 3)]));
    assert_eq!(victims(&store, &[9, 4], &in_order), []);
    assert_eq!(victims(&store, &[], &in_order), []);
    assert_eq!(victims(&store, &[0], &in_order), []);
}

#[test]
fn blob_of_several_models_is_freed_with_the_last_of_them() {
    let (_folder, store) = new_store();
    set_eviction(&store, Eviction::All);
    let (shared, own) = (vec![1; 4 * BLOCK], vec![2; BLOCK]);
    add(&store, "a", &[&shared]);
    add(&store, "b", &[&shared, &own]);
    add(&store, "c", &[&vec![3; 2 * BLOCK]]);
    let in_order = ["a", "b", "c"];
    assert_eq!(victims(&store, &[1], &in_order), named(&[("b", 1)]), "a alone frees nothing");
    for goal in [2, 5] {
        assert_eq!(victims(&store, &[goal], &in_order), named(&[("a", 0), ("b", 5)]), "{goal}");
    }
    assert_eq!(victims(&store, &[7], &in_order), named(&[("a", 0), ("b", 5), ("c", 7)]));
    assert_eq!(evictable_bytes(&store.liveness).unwrap(), 7 * BLOCK as u64);
    store.names.pin(&name("a"), Pinner::Administrator).unwrap();
    assert_eq!(evictable_bytes(&store.liveness).unwrap(), 3 * BLOCK as u64);
    assert_eq!(victims(&store, &[4], &in_order), []);
    assert_eq!(victims(&store, &[3], &in_order), named(&[("b", 1), ("c", 3)]));
}

#[test]
fn model_counts_as_used_when_its_name_was_set() {
    let (_folder, store) = store_of(&[("a", 1), ("b", 1)]);
    let last_used = |clock: &dyn Fn(&Reference) -> Option<SystemTime>| {
        let plan = plan_eviction(&store.liveness, &[1], &|reference, _| clock(reference)).unwrap();
        (plan.victims[0].reference.clone(), plan.victims[0].last_used)
    };
    let (a, b) = (store.names.modified(&name("a")).unwrap(), store.names.modified(&name("b")).unwrap());
    let before = a - Duration::from_secs(1000);
    assert_eq!(last_used(&|_| Some(before)), (name("a"), a));
    assert_eq!(last_used(&|_| None).1, a.min(b));
    let later = b + Duration::from_secs(1000);
    let by_a = |reference: &Reference| (*reference == name("a")).then_some(later);
    assert_eq!(last_used(&by_a), (name("b"), b));
    // The index knows when it was last used, if the caller does not.
    let manifest = store.names.manifest(&name("a")).unwrap().digest();
    store.content.index().note_use(manifest, 7);
    let recorded = store.content.index().last_use(manifest).unwrap().at;
    let plan = plan_eviction(&store.liveness, &[2 * BLOCK as u64], &|_, _| None).unwrap();
    let of_a = plan.victims.iter().find(|victim| victim.reference == name("a")).unwrap();
    assert_eq!(of_a.last_used, recorded.max(a));
}

#[test]
fn models_that_are_kept_are_named_with_the_reason() {
    let (_folder, store) = new_store();
    let files: Vec<Vec<u8>> = (0..5).map(|seed| vec![seed; BLOCK]).collect();
    for (tag, bytes) in ["pinned", "open", "mapped", "imported", "pulled"].into_iter().zip(&files) {
        let origin = (tag != "imported").then_some("https://example.org/m.gguf");
        add_from(&store, tag, &[bytes], origin);
    }
    store.names.pin(&name("pinned"), Pinner::User(7)).unwrap();
    let lease = store.liveness.leases().grant("a test");
    store.names.leased_model(&name("open"), &lease).unwrap();
    let mapped = store.content.open_blob(Digest::of(&files[2]), 0).unwrap();
    let plan = |eviction, blocks| {
        set_eviction(&store, eviction);
        let plan = plan_eviction(&store.liveness, &[blocks * BLOCK as u64], &|_, _| None).unwrap();
        let mut spared: Vec<_> =
            plan.spared.iter().map(|(reference, why)| (reference.model().to_owned(), *why)).collect();
        spared.sort();
        let mut victims: Vec<_> =
            plan.victims.iter().map(|victim| victim.reference.model().to_owned()).collect();
        victims.sort();
        (victims, spared)
    };
    let spared = |imported: bool| {
        let all = [
            ("imported", "cannot be pulled again"),
            ("mapped", "mapped by a running program"),
            ("open", "open"),
            ("pinned", "pinned"),
        ];
        let all = all.into_iter().filter(|(name, _)| imported || *name != "imported");
        all.map(|(name, why)| (name.to_owned(), why)).collect::<Vec<_>>()
    };
    assert_eq!(plan(Eviction::Pullable, 1), (vec!["pulled".to_owned()], spared(true)));
    assert_eq!(plan(Eviction::Pullable, 2), (vec![], spared(true)));
    assert_eq!(plan(Eviction::All, 2), (vec!["imported".to_owned(), "pulled".to_owned()], spared(false)));
    set_eviction(&store, Eviction::Pullable);
    assert_eq!(evictable_bytes(&store.liveness).unwrap(), BLOCK as u64);
    drop(mapped);
    assert_eq!(evictable_bytes(&store.liveness).unwrap(), 2 * BLOCK as u64);
}

#[test]
fn only_origins_that_can_be_pulled_again_are_pullable() {
    for (origin, expected) in [
        ("https://example.org/m.gguf", true),
        ("import m.gguf", false),
        ("edit m@sha256:00", false),
        ("", false),
    ] {
        assert_eq!(is_pullable(origin), expected, "{origin}");
    }
}

#[test]
fn model_that_was_changed_pinned_or_leased_since_the_plan_is_not_evicted() {
    for since in ["nothing", "pinned", "changed", "leased", "removed"] {
        let (_folder, store) = new_store();
        set_eviction(&store, Eviction::All);
        add(&store, "m", &[b"model"]);
        let plan = plan_eviction(&store.liveness, &[1], &|_, _| None).unwrap();
        assert_eq!(plan.victims.len(), 1);
        let lease = store.liveness.leases().grant("a test");
        match since {
            "pinned" => store.names.pin(&name("m"), Pinner::Administrator).unwrap(),
            "changed" => add(&store, "m", &[b"another"]),
            "leased" => lease.protect(plan.victims[0].manifest),
            "removed" => store.names.remove_tag(&name("m"), Actor::daemon(Verb::Rm)).unwrap(),
            _ => {}
        }
        let freed = evict(&store.liveness, &plan, &|_| ()).unwrap();
        let is_evicted = store.names.stored_case(&name("m")).unwrap().is_none() && since != "removed";
        assert_eq!((is_evicted, freed > 0), (since == "nothing", since == "nothing"), "{since}");
    }
}

#[test]
fn evicted_models_are_reported_and_counted() {
    let (_folder, store) = store_of(&[("a", 1), ("b", 2), ("c", 4)]);
    let plan =
        plan_eviction(&store.liveness, &[3 * BLOCK as u64], &|tag, _| used(&["a", "b", "c"], tag)).unwrap();
    let reported = std::cell::RefCell::new(Vec::new());
    let report = |lost: &LostModel| reported.borrow_mut().push((lost.reference.clone(), lost.freed_bytes));
    let freed = evict(&store.liveness, &plan, &report).unwrap();
    assert_eq!(freed, 3 * BLOCK as u64);
    assert_eq!(reported.into_inner(), [(name("a"), BLOCK as u64), (name("b"), 2 * BLOCK as u64)]);
    let events = store.content.events();
    assert_eq!((events.evicted_models, events.evicted_bytes), (2, 3 * BLOCK as u64));
    assert_eq!((events.collections, events.freed_bytes), (1, 3 * BLOCK as u64));
    assert_eq!(store.names.tags().unwrap().references, [name("c")]);
    assert_eq!(evict(&store.liveness, &EvictionPlan::default(), &|_| ()).unwrap(), 0);
    // While collections are refused, no model is removed.
    let plan = plan_eviction(&store.liveness, &[1], &|_, _| None).unwrap();
    std::fs::write(store.path("manifests/notes.txt"), "").unwrap();
    assert!(matches!(evict(&store.liveness, &plan, &|_| ()), Err(StoreError::ForeignFile { .. })));
    assert!(store.names.stored_case(&name("c")).unwrap().is_some());
}
