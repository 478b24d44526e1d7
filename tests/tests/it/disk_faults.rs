//! Makes each call to the disk fail in turn, in every verb that changes something: with a disk error, a full
//! disk or an exhausted quota; once, or from then on.
//!
//! The verb fails with the right error code, or succeeds despite the fault. No change is half done. If the
//! failed call was not a sync, the same store keeps working. If it was one, every further change is refused
//! until the store is opened again, and reading keeps working.

use std::sync::Arc;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::naming::UndoParams;
use blobd_client::protocol::request::{FileSelection, OpenParams, OpenPurpose, TensorSelection};
use blobd_server::ops;
use blobd_store::{Durability, StoreOptions};
use blobd_tests::faulty_disk::{Call, Fault, FaultyDisk};
use blobd_tests::samples::{LARGE, LARGE_RELATIVE, MANY, NAMED, NAMES, PACKED, WHOLE, reference, weights};
use blobd_tests::steps::Step;
use blobd_tests::store_dir::staged;
use blobd_tests::store_state::{Allowed, Key, StoreState, check_collection, check_invariants};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::{InProcess, Verbs as _};
use rustix::io::Errno;
use tempfile::TempDir;

/// The name of an existing model that the failing step does not concern.
const KEPT: usize = 2;
/// The name that steps change.
const NAME: usize = 1;
/// A name in the same directory.
const OTHER: usize = 0;
/// Shares tensors with the model that is kept.
const SIBLING: usize = 1;
/// Shares no tensors with it.
const STRANGER: usize = 3;

/// A store on a disk that fails on demand.
struct TestStore {
    folder: TempDir,
    disk: Arc<FaultyDisk>,
    verbs: InProcess,
}

/// A step to test with every fault, and the steps before it.
struct Sweep {
    before: &'static [Step],
    step: Step,
    durability: Durability,
    /// Only calls of these kinds fail; all kinds if this is empty.
    only: &'static [Call],
}

impl Sweep {
    const fn of(before: &'static [Step], step: Step) -> Self {
        Self { before, step, durability: Durability::Auto, only: &[] }
    }

    fn run(&self) {
        let kinds: Vec<_> = match self.only {
            [] => vec![None],
            only => only.iter().copied().map(Some).collect(),
        };
        let mut faults = 0;
        for only in kinds {
            for (errno, stays) in [(Errno::IO, false), (Errno::NOSPC, true), (Errno::DQUOT, false)] {
                let fails = |after: &u64| self.fails(Fault { after: *after, only, errno, stays });
                faults += (0..).take_while(fails).count();
            }
        }
        println!("{:?}: {faults} faults", self.step);
        assert!(faults > 0, "the disk was never called");
    }

    /// Runs the step with a fault. Returns whether the fault occurred.
    fn fails(&self, fault: Fault) -> bool {
        let test_store = TestStore::new(self.durability, self.step);
        self.before.iter().for_each(|step| step.take(&test_store.verbs.store).unwrap());
        let before = StoreState::observe(&test_store.verbs.store);
        let reclaimable = test_store.verbs.usage().unwrap().reclaimable_bytes;
        test_store.disk.arm(fault);
        let result = self.step.take(&test_store.verbs.store);
        let failed = test_store.disk.disarm();
        if failed.is_empty() {
            result.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
            return false;
        }
        let context = format!("{:?} {fault:?} {failed:?} {result:?}", self.step);
        println!("{context}");
        let lost = failed.iter().any(|call| call.is_sync());
        let allowed = check_outcome(&test_store, self.step, &before, &result, lost, fault);
        if lost {
            test_store.refuses_changes();
            test_store.works_again_when_reopened(&allowed);
        } else {
            let removes = [Call::RemoveFile, Call::RemoveDir];
            if !failed.iter().any(|call| removes.contains(call)) {
                assert_eq!(staged(test_store.verbs.root()), [""; 0]);
                check_invariants(&test_store.verbs);
                let left = test_store.verbs.usage().unwrap().reclaimable_bytes;
                // An interrupted pull leaves a download for the next one.
                let has_downloads = !test_store.verbs.store.content().partial_files().unwrap().is_empty();
                assert!(result.is_ok() || has_downloads || left <= reclaimable, "{left} bytes leaked");
            }
            test_store.keeps_working(self.step, result.is_ok());
        }
        true
    }
}

impl TestStore {
    fn new(durability: Durability, step: Step) -> Self {
        let folder = tmpfs_directory();
        let disk = Arc::new(FaultyDisk::default());
        let below = folder.path().join("lower");
        let lower = step.lower_stores(&below);
        let options = StoreOptions { disk: disk.clone(), durability, lower, ..StoreOptions::default() };
        let verbs = InProcess::open_with(&folder.path().join("store"), &options).unwrap();
        Step::Import { file: 0, name: KEPT }.take(&verbs.store).unwrap();
        step.fill_lower_store(&below);
        Self { folder, disk, verbs }
    }

    fn keeps_working(&self, step: Step, is_done: bool) {
        let store = &self.verbs.store;
        assert_eq!(store.content().read_only_reason(), None);
        if !is_done {
            let before = StoreState::observe(store);
            step.take(store).unwrap_or_else(|error| panic!("once more: {error}"));
            assert!(step.outcomes(&before).states.contains(&StoreState::observe(store)));
        }
        check_collection(&self.verbs);
    }

    fn refuses_changes(&self) {
        let store = &self.verbs.store;
        let reason = store.content().read_only_reason().expect("a reason");
        assert!(reason.contains("cannot sync"), "{reason}");
        for step in [
            Step::Import { file: STRANGER, name: OTHER },
            Step::Tag { source: KEPT, target: OTHER },
            Step::Remove { name: KEPT },
            Step::MoveToTrash { name: KEPT },
            Step::Pin { name: KEPT, pinned: true },
        ] {
            let error = step.take(store).expect_err("a change");
            assert_eq!(error.code, ErrorCode::ReadOnly, "{step:?}: {error}");
            // A message does not have the number of the system's error.
            let text = reason.split(" (os error").next().unwrap();
            assert!(error.message.contains(text), "{error}");
        }
        self.reads();
    }

    fn reads(&self) {
        let name = NAMES[KEPT];
        assert!(!self.verbs.list().unwrap().models.is_empty());
        self.verbs.show(name).unwrap();
        let file = StoreState::observe(&self.verbs.store).get(Key::Tag(KEPT)) - 1;
        assert!(self.verbs.export(name).unwrap() == weights(file));
        let params = OpenParams {
            reference: reference(KEPT),
            tensors: TensorSelection::All,
            component: None,
            files: FileSelection::All,
            purpose: OpenPurpose::Open,
        };
        ops::open(
            &self.verbs.store,
            &ops::OpenCache::default(),
            &params,
            &ops::CallerPolicy::default(),
            0,
            "a test".to_owned(),
        )
        .unwrap();
    }

    fn works_again_when_reopened(self, allowed: &Allowed) {
        drop(self.verbs);
        let verbs = InProcess::open(&self.folder.path().join("store"));
        allowed.check(&StoreState::observe(&verbs.store));
        check_invariants(&verbs);
        check_collection(&verbs);
    }
}

/// Asserts that a step has happened completely or not at all, and that a failure has the right error code.
/// Returns the permitted contents.
fn check_outcome(
    test_store: &TestStore,
    step: Step,
    before: &StoreState,
    result: &Result<(), ErrorBody>,
    lost: bool,
    fault: Fault,
) -> Allowed {
    let states = step.outcomes(before).states;
    let now = StoreState::observe(&test_store.verbs.store);
    let mut allowed = Allowed::only(before);
    states.iter().for_each(|after| allowed.widen(before, after));
    // What other models have replaced is not kept when space is needed.
    let is_full = fault.errno != Errno::IO;
    if is_full {
        states.iter().chain([before]).for_each(|state| allowed.widen(state, &state.without_trash()));
    }
    allowed.check(&now);
    let own = if fault.errno == Errno::IO { ErrorCode::Internal } else { ErrorCode::NoSpace };
    let is_done =
        |after: &StoreState| *after == now || is_full && after.without_trash() == now.without_trash();
    match result {
        Ok(()) => assert!(states.iter().any(is_done), "acknowledged, but not done: {now:?}"),
        // If another thread hit the fault, this one may report only the consequence.
        Err(error) => assert!(error.code == own || lost && error.code == ErrorCode::ReadOnly, "{error}"),
    }
    allowed
}

#[test]
fn import_of_few_blobs_fails_cleanly_at_every_call() {
    Sweep::of(&[], Step::Import { file: SIBLING, name: NAME }).run();
}

#[test]
fn import_of_a_dozen_blobs_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: STRANGER, name: KEPT }, Step::Collect];
    Sweep::of(BEFORE, Step::Import { file: 0, name: KEPT }).run();
}

#[test]
fn import_of_a_file_that_shares_its_blocks_fails_cleanly_at_every_call() {
    sweep_in_every_mode(&[], Step::Import { file: WHOLE, name: NAME });
}

#[test]
fn import_with_a_sync_per_blob_fails_cleanly_at_every_call() {
    let step = Step::Import { file: SIBLING, name: NAME };
    Sweep { durability: Durability::Fsync, ..Sweep::of(&[], step) }.run();
}

/// Tests every call, and in the other modes of durability every sync.
fn sweep_in_every_mode(before: &'static [Step], step: Step) {
    Sweep::of(before, step).run();
    for durability in [Durability::Fsync, Durability::Syncfs] {
        let only = &[Call::SyncFile, Call::SyncFileSystem];
        Sweep { durability, only, ..Sweep::of(before, step) }.run();
    }
}

#[test]
fn pull_fails_cleanly_at_every_call() {
    sweep_in_every_mode(&[], Step::Pull { file: SIBLING, name: NAME });
}

#[test]
fn resumed_pull_fails_cleanly_at_every_call() {
    sweep_in_every_mode(&[], Step::PullInTwoParts { file: STRANGER, name: NAME });
}

#[test]
fn second_download_of_a_damaged_file_fails_cleanly_at_every_call() {
    sweep_in_every_mode(&[], Step::PullTwice { file: STRANGER, name: NAME });
}

#[test]
fn pull_of_a_file_that_is_not_split_fails_cleanly_at_every_call() {
    sweep_in_every_mode(&[], Step::Pull { file: WHOLE, name: NAME });
}

#[test]
fn pull_of_a_related_model_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: LARGE, name: OTHER }];
    sweep_in_every_mode(BEFORE, Step::Pull { file: LARGE_RELATIVE, name: NAME });
}

#[test]
fn pull_of_a_compressed_archive_fails_cleanly_at_every_call() {
    sweep_in_every_mode(&[], Step::Pull { file: PACKED, name: NAME });
}

#[test]
fn pull_of_many_blobs_fails_cleanly_at_every_sync_and_rename() {
    let step = Step::Pull { file: MANY, name: NAME };
    let only = &[Call::SyncFileSystem, Call::SyncDir, Call::Rename, Call::CreateDir];
    Sweep { only, ..Sweep::of(&[], step) }.run();
}

#[test]
fn import_in_groups_fails_cleanly_at_every_sync_and_rename() {
    let step = Step::Import { file: MANY, name: NAME };
    let only = &[Call::SyncFileSystem, Call::SyncFile, Call::SyncDir, Call::Rename, Call::CreateDir];
    Sweep { only, ..Sweep::of(&[], step) }.run();
}

#[test]
fn import_of_a_stored_file_fails_cleanly_at_every_call() {
    Sweep::of(&[], Step::Import { file: 0, name: NAME }).run();
}

#[test]
fn import_that_replaces_a_tag_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: STRANGER, name: NAME }];
    Sweep::of(BEFORE, Step::Import { file: SIBLING, name: NAME }).run();
}

#[test]
fn tag_fails_cleanly_at_every_call() {
    Sweep::of(&[], Step::Tag { source: KEPT, target: NAME }).run();
}

#[test]
fn edit_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: NAMED, name: OTHER }];
    sweep_in_every_mode(BEFORE, Step::Edit { source: OTHER, target: NAME });
}

/// The leftovers of a failed promotion do not need the lower store, which is absent when the store is opened again.
#[test]
fn promotion_fails_cleanly_at_every_call() {
    sweep_in_every_mode(&[], Step::Promote { file: STRANGER, name: NAME });
}

#[test]
fn rm_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: SIBLING, name: NAME }];
    Sweep::of(BEFORE, Step::Remove { name: NAME }).run();
}

#[test]
fn rm_keep_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: SIBLING, name: NAME }];
    Sweep::of(BEFORE, Step::MoveToTrash { name: NAME }).run();
}

#[test]
fn undelete_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: SIBLING, name: NAME }, Step::MoveToTrash { name: NAME }];
    Sweep::of(BEFORE, Step::Undelete { name: NAME }).run();
}

#[test]
fn undo_of_an_import_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: SIBLING, name: NAME }];
    Sweep::of(BEFORE, Step::Undo { name: NAME, earlier: None }).run();
}

#[test]
fn undo_of_a_removal_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: SIBLING, name: NAME }, Step::MoveToTrash { name: NAME }];
    Sweep::of(BEFORE, Step::Undo { name: NAME, earlier: Some(SIBLING) }).run();
}

#[test]
fn undo_of_a_replacement_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] =
        &[Step::Import { file: SIBLING, name: NAME }, Step::Import { file: STRANGER, name: NAME }];
    Sweep::of(BEFORE, Step::Undo { name: NAME, earlier: Some(SIBLING) }).run();
}

/// The new name is removed after the old one is durable. What a fault leaves of that, the next undo does.
#[test]
fn undo_of_a_renaming_is_completed_by_the_next_undo() {
    let mut faults = 0;
    loop {
        let test_store = TestStore::new(Durability::Auto, Step::Collect);
        Step::Import { file: SIBLING, name: NAME }.take(&test_store.verbs.store).unwrap();
        test_store.verbs.rename(NAMES[NAME], NAMES[OTHER], false).unwrap();
        test_store.disk.arm(Fault { after: faults, only: None, errno: Errno::IO, stays: false });
        let undone = undo_newest(&test_store.verbs);
        let failed = test_store.disk.disarm();
        if failed.is_empty() {
            undone.unwrap();
            break;
        }
        faults += 1;
        let TestStore { folder, verbs, .. } = test_store;
        drop(verbs);
        let verbs = InProcess::open(&folder.path().join("store"));
        let is_done = |verbs: &InProcess| {
            let state = StoreState::observe(&verbs.store);
            let [old, new] = [NAME, OTHER].map(|name| state.get(Key::Tag(name)));
            assert!(old == SIBLING + 1 || new == SIBLING + 1, "{failed:?}: the model has no name");
            old == SIBLING + 1 && new == 0
        };
        if undone.is_ok() || is_done(&verbs) {
            assert!(is_done(&verbs), "{failed:?}");
        } else {
            undo_newest(&verbs).unwrap_or_else(|error| panic!("{failed:?}: {error}"));
            assert!(is_done(&verbs), "{failed:?}");
        }
        check_invariants(&verbs);
        check_collection(&verbs);
    }
    assert!(faults > 10, "{faults}");
}

fn undo_newest(verbs: &InProcess) -> Result<(), ErrorBody> {
    let (requester, policy) = (ops::Requester::own(), ops::CallerPolicy::default());
    let undone = ops::undo(&verbs.store, requester, &policy, &UndoParams::default());
    undone.map(drop).map_err(|error| error.body())
}

#[test]
fn pin_and_unpin_fail_cleanly_at_every_call() {
    const TAGGED: Step = Step::Tag { source: KEPT, target: NAME };
    const PINNED: Step = Step::Pin { name: NAME, pinned: true };
    Sweep::of(&[TAGGED], PINNED).run();
    Sweep::of(&[TAGGED, PINNED], Step::Pin { name: NAME, pinned: false }).run();
}

#[test]
fn signing_fails_cleanly_at_every_call() {
    Sweep::of(&[], Step::Sign { name: KEPT }).run();
}

#[test]
fn gc_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] =
        &[Step::Import { file: SIBLING, name: NAME }, Step::Import { file: 4, name: NAME }];
    Sweep::of(BEFORE, Step::Collect).run();
}
