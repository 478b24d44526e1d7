//! `gc` frees the bytes that `df` reports as reclaimable, and the file system gains the bytes that `rm`
//! reports as freed, in every state after random steps. A model of the store records what keeps which blobs.
//!
//! After each step `df`, the dry run of `gc`, the model and the blocks on disk must agree to the byte. Each row of
//! `df` must have the bytes that the model says, and all rows together those that `du` reports. If the
//! store has its own file system, `statvfs` must agree, too. A step waits for the work that the daemon does
//! in the background because of it, so that the result does not depend on time.
//!
//! `PROPTEST_CASES` sets the number of cases. A failure is printed as the shortest list of steps that causes
//! it.

mod checked_store;
mod damage;
mod disk_snapshot;
mod location;
mod model_registry;
mod needs;
mod rows;

use blobd_fixtures::skipped::skipped;
use proptest::prelude::*;
use proptest::test_runner::TestRunner;

use checked_store::CheckedStore;
use damage::Refusal;
use location::{Kind, StoreLocation};
use model_registry::ModelRegistry;

/// One operation on a store. Numbers beyond the end of a list wrap around; a step without a suitable object
/// does nothing.
#[derive(Clone, Copy, Debug)]
enum Step {
    Import {
        file: usize,
        name: usize,
    },
    Pull {
        file: usize,
        name: usize,
    },
    /// A pull is interrupted, and the daemon killed. With `whole`, all of the weights have arrived.
    PullInterrupted {
        file: usize,
        name: usize,
        whole: bool,
    },
    Tag {
        source: usize,
        target: usize,
    },
    Remove {
        name: usize,
    },
    /// `rm --keep`.
    MoveToTrash {
        name: usize,
        expired: bool,
    },
    Undelete {
        name: usize,
    },
    Pin {
        name: usize,
        pinned: bool,
    },
    /// A session, which is a lease.
    Open {
        name: usize,
    },
    Close {
        session: usize,
    },
    /// A program opens a blob without a session.
    Hold {
        blob: usize,
    },
    CloseProgram {
        program: usize,
    },
    /// Inverts the bits of a byte.
    Flip {
        blob: usize,
    },
    /// Truncates a blob.
    Truncate {
        blob: usize,
    },
    /// Deletes a blob that is not a whole file of a model.
    Lose {
        blob: usize,
    },
    Verify {
        repair: bool,
    },
    /// Adds an unneeded blob.
    Orphan {
        pages: usize,
    },
    /// Adds a file to `staging/`, as a dead process leaves it.
    DeadTransaction {
        pages: usize,
    },
    /// Makes the unfinished downloads look more than a week old.
    AgeDownloads,
    /// Adds a file that is not blobd's to one of several directories.
    Foreign {
        location: usize,
        pages: usize,
    },
    Collect,
    Stop,
    Kill,
    /// Damages a file so that the needed blobs are unknown, and removes a model meanwhile.
    Refuse {
        refusal: Refusal,
        name: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let number = || 0..64_usize;
    let (file, name) = (number, number);
    prop_oneof![
        8 => (file(), name()).prop_map(|(file, name)| Step::Import { file, name }),
        3 => (file(), name()).prop_map(|(file, name)| Step::Pull { file, name }),
        3 => (file(), name(), any::<bool>())
            .prop_map(|(file, name, whole)| Step::PullInterrupted { file, name, whole }),
        3 => (name(), name()).prop_map(|(source, target)| Step::Tag { source, target }),
        8 => name().prop_map(|name| Step::Remove { name }),
        4 => (name(), any::<bool>()).prop_map(|(name, expired)| Step::MoveToTrash { name, expired }),
        2 => name().prop_map(|name| Step::Undelete { name }),
        2 => (name(), any::<bool>()).prop_map(|(name, pinned)| Step::Pin { name, pinned }),
        3 => name().prop_map(|name| Step::Open { name }),
        2 => number().prop_map(|session| Step::Close { session }),
        2 => number().prop_map(|blob| Step::Hold { blob }),
        1 => number().prop_map(|program| Step::CloseProgram { program }),
        2 => number().prop_map(|blob| Step::Flip { blob }),
        1 => number().prop_map(|blob| Step::Truncate { blob }),
        1 => number().prop_map(|blob| Step::Lose { blob }),
        2 => any::<bool>().prop_map(|repair| Step::Verify { repair }),
        2 => (0..4_usize).prop_map(|pages| Step::Orphan { pages }),
        1 => (0..4_usize).prop_map(|pages| Step::DeadTransaction { pages }),
        1 => Just(Step::AgeDownloads),
        1 => (number(), 0..4_usize).prop_map(|(location, pages)| Step::Foreign { location, pages }),
        2 => Just(Step::Collect),
        1 => Just(Step::Stop),
        1 => Just(Step::Kill),
        1 => (prop::sample::select(&Refusal::ALL[..]), name())
            .prop_map(|(refusal, name)| Step::Refuse { refusal, name }),
    ]
}

/// The number of cases is the environment's `PROPTEST_CASES` if that is set.
fn config() -> ProptestConfig {
    const CASES: u32 = 6;
    let config =
        ProptestConfig { max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() };
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => config,
        None => ProptestConfig { cases: CASES, ..config },
    }
}

fn check_random_steps(kind: Kind) {
    if StoreLocation::make(kind).is_none() {
        skipped(format_args!("{kind:?} for a daemon is not available here"));
        return;
    }
    let registry = ModelRegistry::start();
    let run = TestRunner::new(config()).run(&prop::collection::vec(step(), 1..32), |steps| {
        let mut store =
            CheckedStore::new(StoreLocation::make(kind).expect("it was available before"), &registry);
        for step in &steps {
            if store.is_old() {
                break;
            }
            store.take(*step);
            store.check();
        }
        store.collect();
        Ok(())
    });
    run.unwrap_or_else(|failure| panic!("{failure}"));
}

#[test]
fn df_gc_and_rm_agree_with_allocated_blocks_in_a_directory() {
    check_random_steps(Kind::Directory);
}

#[test]
fn df_gc_and_rm_agree_with_statvfs_on_tmpfs() {
    check_random_steps(Kind::Tmpfs);
}

#[test]
fn df_gc_and_rm_agree_with_statvfs_on_ext4() {
    check_random_steps(Kind::Ext4);
}

/// Steps that are refused or do nothing would test nothing.
#[test]
fn every_step_reaches_its_intended_state() {
    let registry = ModelRegistry::start();
    let mut store = CheckedStore::new(StoreLocation::make(Kind::Directory).unwrap(), &registry);
    let mut last = store.reached();
    let mut take = |step| {
        store.take(step);
        store.check();
        let (before, reached) = (last, store.reached());
        last = reached;
        (before, reached)
    };
    let (_, reached) = take(Step::PullInterrupted { file: 4, name: 0, whole: false });
    assert_eq!((reached.downloads, reached.whole_downloads), (1, 0));
    let (_, reached) = take(Step::PullInterrupted { file: 4, name: 0, whole: true });
    assert_eq!((reached.downloads, reached.whole_downloads), (1, 1));
    take(Step::AgeDownloads);
    let (_, reached) = take(Step::Collect);
    assert!(reached.downloads == 0 && reached.unneeded > 0, "{reached:?}");
    take(Step::Pull { file: 0, name: 0 });
    take(Step::Open { name: 0 });
    let (_, reached) = take(Step::Remove { name: 0 });
    assert_eq!((reached.sessions, reached.condemned > 0), (1, true));
    let (before, reached) = take(Step::Close { session: 0 });
    assert!(reached.content < before.content, "{before:?} {reached:?}");
    take(Step::Collect);
    take(Step::Import { file: 1, name: 1 });
    take(Step::MoveToTrash { name: 1, expired: true });
    let (_, reached) = take(Step::Hold { blob: 0 });
    assert_eq!((reached.trashed, reached.programs), (1, 1));
    let (_, reached) = take(Step::Collect);
    assert_eq!((reached.trashed, reached.content, reached.condemned), (0, 1, 1));
    let (_, reached) = take(Step::CloseProgram { program: 0 });
    assert_eq!(reached.content, 0);
    take(Step::Import { file: 1, name: 1 });
    take(Step::Flip { blob: 0 });
    let (before, reached) = take(Step::Verify { repair: false });
    assert_eq!((reached.quarantined, reached.content), (1, before.content - 1));
    for refusal in Refusal::ALL {
        take(Step::Import { file: 1, name: 1 });
        take(Step::MoveToTrash { name: 1, expired: false });
        take(Step::Import { file: 1, name: 1 });
        let (before, reached) = take(Step::Refuse { refusal, name: 1 });
        assert_eq!(reached.refusals, before.refusals + 1, "{refusal:?}");
    }
}

/// The model is deleted together with its record, not before, although nothing else needs it.
#[test]
fn expired_model_and_its_record_are_deleted_together() {
    let registry = ModelRegistry::start();
    let mut store = CheckedStore::new(StoreLocation::make(Kind::Directory).unwrap(), &registry);
    let steps = [
        Step::Import { file: 1, name: 0 },
        Step::Tag { source: 0, target: 1 },
        Step::Open { name: 1 },
        Step::MoveToTrash { name: 0, expired: true },
        Step::Remove { name: 1 },
        Step::Stop,
        Step::Undelete { name: 0 },
    ];
    for step in steps {
        store.take(step);
        store.check();
    }
    assert_eq!(store.reached().trashed, 0);
}
