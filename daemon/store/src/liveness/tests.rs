//! How space is made for a step that does not fit.

use std::cell::Cell;
use std::time::Duration;

use super::*;
use crate::testing::{begin, manifest, name, new_store};
use crate::{Eviction, NameRule, SpacePolicy, Store};

const KIB: u64 = 1 << 10;

/// Returns these answers one after the other, and notes what it is asked for.
#[derive(Debug, Default)]
struct Maker {
    answers: Mutex<Vec<bool>>,
    asked: Arc<Mutex<Vec<u64>>>,
}

impl MakeSpace for Maker {
    fn make_space(&self, bytes: u64, _observer: Option<&dyn EvictionObserver>) -> Result<bool, StoreError> {
        lock(&self.asked).push(bytes);
        let mut answers = lock(&self.answers);
        if answers.is_empty() { Err(other_error()) } else { Ok(answers.remove(0)) }
    }
}

fn other_error() -> StoreError {
    StoreError::MissingBlob { digest: Digest::of(b"other") }
}

fn no_space(store: &Store) -> StoreError {
    let root = store.content.place();
    StoreError::Quota { root, needed_bytes: 1, used_bytes: 2, quota_bytes: 3 }
}

/// How often a step that fits after `failures` attempts was tried, what the space maker was asked for, and the result.
fn tried(answers: &[bool], failures: usize) -> (usize, Vec<u64>, Result<(), StoreError>) {
    let (_folder, store) = new_store();
    let maker = Maker { answers: Mutex::new(answers.to_vec()), ..Maker::default() };
    let asked = Arc::clone(&maker.asked);
    store.liveness.set_space_maker(Box::new(maker));
    // Only the first one counts.
    store.liveness.set_space_maker(Box::new(Maker::default()));
    let attempts = Cell::new(0);
    let result = store.liveness.with_space(70, None, || {
        attempts.set(attempts.get() + 1);
        if attempts.get() > failures { Ok(()) } else { Err(no_space(&store)) }
    });
    let asked = lock(&asked).clone();
    (attempts.get(), asked, result)
}

#[test]
fn step_is_repeated_while_space_is_made_for_it() {
    let (attempts, asked, result) = tried(&[true, true, true], 2);
    assert!(result.is_ok());
    assert_eq!((attempts, asked), (3, vec![70, 70]));
}

#[test]
fn step_fails_when_no_space_is_made_or_not_enough_in_the_end() {
    for (answers, attempts) in [(vec![false], 1), (vec![true, false], 2), (vec![true; 100], 17)] {
        let (tried, asked, result) = tried(&answers, usize::MAX);
        assert_eq!((tried, asked.len()), (attempts, attempts.min(16)), "{}", answers.len());
        assert!(
            matches!(result, Err(StoreError::Quota { needed_bytes: 70, used_bytes: 2, .. })),
            "{result:?}"
        );
    }
    let (attempts, _, result) = tried(&[], usize::MAX);
    assert!(matches!(result, Err(StoreError::MissingBlob { .. })), "{result:?}");
    assert_eq!(attempts, 1);
}

#[test]
fn other_failures_are_not_repeated() {
    let (_folder, store) = new_store();
    let attempts = Cell::new(0);
    let failed: Result<(), _> = store.liveness.with_space(70, None, || {
        attempts.set(attempts.get() + 1);
        Err(other_error())
    });
    assert!(matches!(failed, Err(StoreError::MissingBlob { .. })));
    assert_eq!(attempts.get(), 1);
}

fn add(store: &Arc<Store>, reference: &str, seed: u8, kib: u64) {
    let bytes = vec![seed; usize::try_from(kib * KIB).unwrap()];
    let mut ingest = begin(store).may_take(NameRule::replacing_any());
    ingest.add_bytes(&bytes).unwrap();
    ingest.commit(&name(reference), &manifest(&[&bytes]), Some("https://example.org/m.gguf")).unwrap();
}

/// A store with a model of 100 KiB in the trash whose name another one of 60 KiB has, full but for `left` bytes.
fn full_store(eviction: Eviction, left: u64) -> (tempfile::TempDir, Arc<Store>) {
    let (folder, store) = new_store();
    let space = |quota_bytes| SpacePolicy {
        quota_bytes,
        min_free_bytes: Some(0),
        eviction,
        keep_displaced: Duration::from_secs(3600),
        ..SpacePolicy::default()
    };
    store.ledger.set_space_policy(space(None)).unwrap();
    add(&store, "m", 1, 100);
    add(&store, "m", 2, 60);
    store.ledger.set_space_policy(space(Some(store.ledger.used_bytes() + left))).unwrap();
    (folder, store)
}

#[test]
fn displaced_models_are_deleted_only_if_that_suffices() {
    for (needed_kib, is_made) in [(100, true), (104, true), (105, false)] {
        // The record in the trash has a block.
        let (_folder, store) = full_store(Eviction::Never, 0);
        let fits = || store.ledger.check_fits(needed_kib * KIB);
        let made = store.liveness.with_space(needed_kib * KIB, None, fits);
        assert_eq!(
            (made.is_ok(), store.liveness.has_displaced().unwrap()),
            (is_made, !is_made),
            "{needed_kib} KiB"
        );
        assert_eq!(store.names.tags().unwrap().references, [name("m")]);
    }
}

#[test]
fn displaced_models_are_deleted_if_eviction_can_free_the_rest() {
    for (eviction, needed_kib, is_dropped) in [
        (Eviction::Never, 110, false),
        (Eviction::Pullable, 110, true),
        (Eviction::Pullable, 164, true),
        (Eviction::Pullable, 200, false),
    ] {
        let (_folder, store) = full_store(eviction, 0);
        let fits = || store.ledger.check_fits(needed_kib * KIB);
        let refused = store.liveness.with_space(needed_kib * KIB, None, fits);
        assert!(matches!(refused, Err(StoreError::Quota { .. })), "there is nothing that evicts");
        assert_eq!(store.liveness.has_displaced().unwrap(), !is_dropped, "{eviction:?} {needed_kib} KiB");
    }
}

#[test]
fn only_as_many_displaced_models_are_deleted_as_are_needed() {
    let (_folder, store) = full_store(Eviction::Never, 0);
    let policy = store.ledger.space_policy();
    store.ledger.set_space_policy(SpacePolicy { quota_bytes: None, ..policy }).unwrap();
    add(&store, "m", 3, 4);
    let quota_bytes = Some(store.ledger.used_bytes());
    store.ledger.set_space_policy(SpacePolicy { quota_bytes, ..policy }).unwrap();
    store.liveness.with_space(50 * KIB, None, || store.ledger.check_fits(50 * KIB)).unwrap();
    let kept: Vec<u64> = store.names.trash().unwrap().iter().map(|model| model.manifest.size()).collect();
    assert_eq!(kept, [2 * 60 * KIB], "the oldest goes first");
}

#[test]
fn one_collection_at_a_time_is_locked() {
    let (_folder, store) = new_store();
    let other =
        || std::thread::scope(|scope| scope.spawn(|| store.liveness.try_lock_collections().is_some()).join());
    let guard = store.liveness.lock_collections();
    assert!(!other().unwrap());
    assert!(gc_plan_elsewhere(&store).is_none());
    drop(guard);
    assert!(other().unwrap());
    assert!(gc_plan_elsewhere(&store).is_some());
}

fn gc_plan_elsewhere(store: &Store) -> Option<gc::GcPlan> {
    let plan = || gc::plan_unless_collecting(&store.liveness).unwrap();
    std::thread::scope(|scope| scope.spawn(plan).join().unwrap())
}

#[test]
fn condemned_digests_are_known_until_they_are_taken() {
    let (_folder, store) = new_store();
    let (first, second) = (Digest::of(b"first"), Digest::of(b"second"));
    assert!(!store.liveness.has_condemned());
    store.liveness.condemn([first]);
    assert!(store.liveness.has_condemned() && store.liveness.is_condemned(first));
    assert!(!store.liveness.is_condemned(second));
    store.liveness.condemn([second]);
    assert_eq!(store.liveness.take_condemned(), [first, second].into());
    assert!(!store.liveness.has_condemned() && store.liveness.take_condemned().is_empty());
}

#[test]
fn what_displaced_models_leave_is_claimed_by_user_until_it_is_deleted() {
    let (_folder, store) = new_store();
    let [a, b, c] = crate::testing::add_blobs(&store, [b"a", b"b", b"c"]).try_into().unwrap();
    store.liveness.charge_displaced(7, [Node::Blob(a), Node::Blob(b), Node::Recipe(a)]);
    store.liveness.charge_displaced(8, [Node::Blob(c)]);
    let claim = |uid, digests: &[Digest]| {
        let mut roots: Vec<_> = digests.iter().copied().map(Node::Blob).collect();
        roots.sort_unstable();
        Claim { kind: ClaimKind::Displaced, since: 0, uid: Some(uid), roots }
    };
    assert_eq!(store.liveness.claims_of_displaced(), [claim(7, &[a, b]), claim(8, &[c])]);
    store.content.remove_node(Node::Blob(a)).unwrap();
    assert_eq!(store.liveness.claims_of_displaced(), [claim(7, &[b]), claim(8, &[c])]);
    assert_eq!(lock(&store.liveness.displaced).len(), 2, "what is deleted is forgotten");
}
