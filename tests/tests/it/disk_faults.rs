//! Each call to the disk in turn fails, in every verb that changes something: with an error of the
//! disk, with a full disk, with a quota that is used up; once, or from then on.
//!
//! The verb fails with a code that says what is wrong, or does without. Nothing is half done. If it
//! was no sync that failed, the same store works on. If it was one, every further change is refused
//! until the store is opened again, and reading goes on.

use std::sync::Arc;

use blobd::ops;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{FileSelection, OpenParams, TensorSelection};
use blobd_store::{Durability, StoreOptions};
use blobd_tests::faulty_disk::{Call, Fault, FaultyDisk};
use blobd_tests::places::fast_folder;
use blobd_tests::samples::{LARGE, LARGE_RELATIVE, MANY, NAMES, WHOLE, reference, weights};
use blobd_tests::steps::Step;
use blobd_tests::store_dir::staged;
use blobd_tests::verbs::{InProcess, Verbs as _};
use blobd_tests::world::{Allowed, Key, World, check_collection, check_promises};
use rustix::io::Errno;
use tempfile::TempDir;

/// The name of a model that is there before and has nothing to do with what fails.
const KEPT: usize = 2;
/// The name that things are done to.
const NAME: usize = 1;
/// A name in the same directory.
const OTHER: usize = 0;
/// Shares tensors with the model that is kept.
const SIBLING: usize = 1;
/// Shares nothing.
const STRANGER: usize = 3;

/// A store on a disk that fails on demand.
struct Rig {
    folder: TempDir,
    disk: Arc<FaultyDisk>,
    verbs: InProcess,
}

/// What is swept: a step, and what is done before it.
struct Sweep {
    before: &'static [Step],
    step: Step,
    durability: Durability,
    /// Only calls of these kinds fail; all if there are none.
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

    /// Runs the step with a fault; says whether it came to that.
    fn fails(&self, fault: Fault) -> bool {
        let rig = Rig::new(self.durability);
        self.before.iter().for_each(|step| step.take(&rig.verbs.store).unwrap());
        let before = World::observe(&rig.verbs.store);
        let reclaimable = rig.verbs.usage().unwrap().reclaimable_bytes;
        rig.disk.arm(fault);
        let result = self.step.take(&rig.verbs.store);
        let failed = rig.disk.disarm();
        if failed.is_empty() {
            result.unwrap_or_else(|error| panic!("{fault:?}: {error}"));
            return false;
        }
        let context = format!("{:?} {fault:?} {failed:?} {result:?}", self.step);
        println!("{context}");
        let lost = failed.iter().any(|call| call.is_sync());
        let allowed = check_outcome(&rig, self.step, &before, &result, lost, fault);
        if lost {
            rig.refuses_changes();
            rig.works_again_when_reopened(&allowed);
        } else {
            let removes = [Call::RemoveFile, Call::RemoveDir];
            if !failed.iter().any(|call| removes.contains(call)) {
                assert_eq!(staged(rig.verbs.root()), [""; 0]);
                check_promises(&rig.verbs);
                let left = rig.verbs.usage().unwrap().reclaimable_bytes;
                // What a pull has left is for the next one to go on with.
                let has_downloads = !rig.verbs.store.partial_files().unwrap().is_empty();
                assert!(result.is_ok() || has_downloads || left <= reclaimable, "{left} bytes are left over");
            }
            rig.works_on(self.step, result.is_ok());
        }
        true
    }
}

impl Rig {
    fn new(durability: Durability) -> Self {
        let folder = fast_folder();
        let disk = Arc::new(FaultyDisk::default());
        let options = StoreOptions { disk: disk.clone(), durability, ..StoreOptions::default() };
        let verbs = InProcess::open_with(&folder.path().join("store"), &options).unwrap();
        Step::Import { file: 0, name: KEPT }.take(&verbs.store).unwrap();
        Self { folder, disk, verbs }
    }

    fn works_on(&self, step: Step, is_done: bool) {
        let store = &self.verbs.store;
        assert_eq!(store.read_only_reason(), None);
        if !is_done {
            let before = World::observe(store);
            step.take(store).unwrap_or_else(|error| panic!("once more: {error}"));
            assert!(step.outcomes(&before).worlds.contains(&World::observe(store)));
        }
        check_collection(&self.verbs);
    }

    fn refuses_changes(&self) {
        let store = &self.verbs.store;
        let reason = store.read_only_reason().expect("a reason");
        assert!(reason.contains("cannot sync"), "{reason}");
        for step in [
            Step::Import { file: STRANGER, name: OTHER },
            Step::Tag { source: KEPT, target: OTHER },
            Step::Remove { name: KEPT },
            Step::PutAside { name: KEPT },
            Step::Pin { name: KEPT, pinned: true },
        ] {
            let error = step.take(store).expect_err("a change");
            assert_eq!(error.code, ErrorCode::ReadOnly, "{step:?}: {error}");
            assert!(error.message.contains(reason), "{error}");
        }
        self.reads();
    }

    fn reads(&self) {
        let name = NAMES[KEPT];
        assert!(!self.verbs.list().unwrap().models.is_empty());
        self.verbs.show(name).unwrap();
        let file = World::observe(&self.verbs.store).get(Key::Tag(KEPT)) - 1;
        assert!(self.verbs.export(name).unwrap() == weights(file));
        let params = OpenParams {
            reference: reference(KEPT),
            tensors: TensorSelection::All,
            component: None,
            files: FileSelection::All,
        };
        ops::open(&self.verbs.store, &ops::OpenCache::default(), &params, "a test".to_owned()).unwrap();
    }

    fn works_again_when_reopened(self, allowed: &Allowed) {
        drop(self.verbs);
        let verbs = InProcess::open(&self.folder.path().join("store"));
        allowed.check(&World::observe(&verbs.store));
        check_promises(&verbs);
        check_collection(&verbs);
    }
}

/// Asserts that a step has happened or not, and that a failure says why; returns what may be found.
fn check_outcome(
    rig: &Rig,
    step: Step,
    before: &World,
    result: &Result<(), ErrorBody>,
    lost: bool,
    fault: Fault,
) -> Allowed {
    let worlds = step.outcomes(before).worlds;
    let now = World::observe(&rig.verbs.store);
    let mut allowed = Allowed::only(before);
    worlds.iter().for_each(|after| allowed.widen(before, after));
    allowed.check(&now);
    let own = if fault.errno == Errno::IO { ErrorCode::Internal } else { ErrorCode::NoSpace };
    match result {
        Ok(()) => assert!(worlds.contains(&now), "acknowledged and not done: {now:?}"),
        // What a thread beside it has run into, it may only have seen the consequence of.
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
fn import_with_a_sync_per_blob_fails_cleanly_at_every_call() {
    let step = Step::Import { file: SIBLING, name: NAME };
    Sweep { durability: Durability::Fsync, ..Sweep::of(&[], step) }.run();
}

/// At every call, and at every sync in those modes too that sync in another way.
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
fn pull_that_goes_on_fails_cleanly_at_every_call() {
    sweep_in_every_mode(&[], Step::PullInTwoParts { file: STRANGER, name: NAME });
}

#[test]
fn pull_of_a_file_that_is_not_split_fails_cleanly_at_every_call() {
    sweep_in_every_mode(&[], Step::Pull { file: WHOLE, name: NAME });
}

#[test]
fn pull_of_a_relative_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: LARGE, name: OTHER }];
    sweep_in_every_mode(BEFORE, Step::Pull { file: LARGE_RELATIVE, name: NAME });
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
fn import_of_what_is_there_fails_cleanly_at_every_call() {
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
fn rm_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: SIBLING, name: NAME }];
    Sweep::of(BEFORE, Step::Remove { name: NAME }).run();
}

#[test]
fn rm_keep_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: SIBLING, name: NAME }];
    Sweep::of(BEFORE, Step::PutAside { name: NAME }).run();
}

#[test]
fn undelete_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] = &[Step::Import { file: SIBLING, name: NAME }, Step::PutAside { name: NAME }];
    Sweep::of(BEFORE, Step::Undelete { name: NAME }).run();
}

#[test]
fn pin_and_unpin_fail_cleanly_at_every_call() {
    const TAGGED: Step = Step::Tag { source: KEPT, target: NAME };
    const PINNED: Step = Step::Pin { name: NAME, pinned: true };
    Sweep::of(&[TAGGED], PINNED).run();
    Sweep::of(&[TAGGED, PINNED], Step::Pin { name: NAME, pinned: false }).run();
}

#[test]
fn gc_fails_cleanly_at_every_call() {
    const BEFORE: &[Step] =
        &[Step::Import { file: SIBLING, name: NAME }, Step::Import { file: 4, name: NAME }];
    Sweep::of(BEFORE, Step::Collect).run();
}
