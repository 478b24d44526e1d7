//! The order of commits, removals and collections, searched exhaustively.
//!
//! A small model of the steps of `daemon/store/src`, with all concurrent steps of others between two of them,
//! and power cuts. Each step names the function that it represents. The shipped order must be safe in every
//! reachable state. For each wrong order, the search must find a loss.
//!
//! This checks the order of steps, not the code. `--nocapture` prints the searched states and the losses
//! found. `docs/RELIABILITY.md` has the table.

use std::time::Instant;

use stateright::{Checker as _, HasDiscoveries, Model as _};

mod collector;
mod disk;
mod system;
mod writer;

use disk::Manifest;
use system::{Fault, NOT_REFUSED, REMOVED_STAYS, System, WHOLE, WRITTEN_STAYS};
use writer::Job;

const FIRST: Option<Job> = Some(Job::Import(Manifest::First, 0));
const SECOND: Option<Job> = Some(Job::Import(Manifest::Second, 1));

/// Each writer does its work once, while a `gc` and an `rm` of any model run once; the `rm`
/// collects too.
const fn one_of_each(writers: [Option<Job>; 2]) -> System {
    System { writers, collections: 1, removals: 1, power_cuts: 1, kills: 0, faults: &[] }
}

#[test]
fn shipped_order_never_leaves_an_incomplete_model() {
    assert_safe("two imports, gc, rm", one_of_each([FIRST, SECOND]));
}

#[test]
fn two_power_cuts_never_leave_an_incomplete_model() {
    assert_safe("import, gc, rm, again", System { power_cuts: 2, ..one_of_each([FIRST, None]) });
    let imports = System { removals: 0, power_cuts: 2, ..one_of_each([FIRST, SECOND]) };
    assert_safe("two imports, gc, again", imports);
}

#[test]
fn kill_before_a_power_cut_never_leaves_an_incomplete_model() {
    assert_safe("import, gc, rm, kill", System { kills: 1, ..one_of_each([FIRST, None]) });
}

#[test]
fn second_collection_never_leaves_an_incomplete_model() {
    assert_safe("import, two gc, rm", System { collections: 2, ..one_of_each([FIRST, None]) });
}

#[test]
fn tag_never_names_an_incomplete_model() {
    assert_safe("tag, gc, rm", one_of_each([None, Some(Job::Tag)]));
    assert_safe("import, tag, rm", System { collections: 0, ..one_of_each([FIRST, Some(Job::Tag)]) });
}

#[test]
fn trash_never_holds_an_incomplete_model() {
    assert_safe("rm --keep, gc, rm", one_of_each([None, Some(Job::Keep)]));
    assert_safe("import, rm --keep, rm", System { collections: 0, ..one_of_each([FIRST, Some(Job::Keep)]) });
}

/// Leased blobs are never deleted, so that the check finds nothing.
#[test]
fn check_at_commit_is_a_second_line_of_defence() {
    const FAULTS: &[Fault] = &[Fault::NoCheckAtCommit];
    assert_safe("no check at commit", System { faults: FAULTS, ..one_of_each([FIRST, None]) });
}

#[test]
fn leases_listed_once_after_the_manifests_lose_blobs_of_a_model() {
    assert_unsafe(&[Fault::LeasesAfterManifests, Fault::NoRecheck], [FIRST, None], WHOLE);
}

#[test]
fn leases_listed_after_the_manifests_lose_blobs_of_a_model() {
    assert_unsafe(&[Fault::LeasesAfterManifests], [FIRST, None], WHOLE);
}

#[test]
fn collection_without_recheck_at_deletion_loses_blobs_of_a_model() {
    assert_unsafe(&[Fault::NoRecheck], [FIRST, None], WHOLE);
}

#[test]
fn recheck_that_ignores_released_leases_loses_blobs_of_a_model() {
    assert_unsafe(&[Fault::RecheckOfPresentLeasesOnly], [FIRST, None], WHOLE);
}

#[test]
fn lease_that_does_not_wait_for_a_deletion_loses_blobs_of_a_model() {
    assert_unsafe(&[Fault::LeaseDuringDeletion, Fault::NoCheckAtCommit], [FIRST, None], WHOLE);
}

#[test]
fn lease_that_does_not_wait_for_a_deletion_fails_an_import() {
    assert_unsafe(&[Fault::LeaseDuringDeletion], [FIRST, None], NOT_REFUSED);
}

#[test]
fn concurrent_collections_lose_blobs_of_a_model() {
    assert_unsafe(&[Fault::CollectionsOverlap], [FIRST, None], WHOLE);
}

#[test]
fn lookup_before_lease_fails_an_import() {
    assert_unsafe(&[Fault::LookupBeforeLease], [FIRST, None], NOT_REFUSED);
}

#[test]
fn lookup_before_lease_without_check_at_commit_tags_an_incomplete_model() {
    assert_unsafe(&[Fault::LookupBeforeLease, Fault::NoCheckAtCommit], [FIRST, None], WHOLE);
}

#[test]
fn tag_that_is_read_once_may_name_a_removed_model() {
    assert_unsafe(&[Fault::NoSecondRead], [None, Some(Job::Tag)], NOT_REFUSED);
}

#[test]
fn lease_that_ends_before_the_tag_is_written_loses_blobs_of_a_model() {
    assert_unsafe(&[Fault::LeaseEndsBeforeTag], [FIRST, None], WHOLE);
}

#[test]
fn model_moved_to_the_trash_without_a_lease_loses_blobs() {
    assert_unsafe(&[Fault::KeepWithoutLease], [None, Some(Job::Keep)], WHOLE);
}

#[test]
fn rm_without_any_sync_restores_an_incomplete_model() {
    assert_unsafe(&[Fault::UnsyncedUnlink, Fault::NoSyncBeforeDeletion], [None, None], WHOLE);
}

#[test]
fn rm_without_its_own_sync_is_undone_by_a_power_cut() {
    assert_unsafe(&[Fault::UnsyncedUnlink], [FIRST, SECOND], REMOVED_STAYS);
}

#[test]
fn collection_that_does_not_sync_restores_an_incomplete_model() {
    assert_unsafe(&[Fault::NoSyncBeforeDeletion], [None, None], WHOLE);
}

#[test]
fn tag_written_before_its_blobs_are_durable_names_an_incomplete_model() {
    assert_unsafe(&[Fault::UnsyncedBlobs], [FIRST, None], WHOLE);
}

#[test]
fn import_of_stored_blobs_must_sync_them() {
    assert_unsafe(&[Fault::UnsyncedBlobsUnlessNew], [FIRST, SECOND], WHOLE);
}

#[test]
fn import_without_sync_of_its_tag_is_lost() {
    assert_unsafe(&[Fault::UnsyncedTag], [FIRST, None], WRITTEN_STAYS);
}

fn assert_safe(name: &str, system: System) {
    let start = Instant::now();
    let checker = system.checker().spawn_bfs().join();
    checker.assert_properties();
    println!("{name}: safe in all of {} states, {:.1?}", checker.unique_state_count(), start.elapsed());
}

/// Asserts that the search finds a state in which `property` does not hold.
fn assert_unsafe(faults: &'static [Fault], writers: [Option<Job>; 2], property: &'static str) {
    let checker = System { faults, ..one_of_each(writers) }.checker();
    let checker = checker.finish_when(HasDiscoveries::AnyOf([property].into())).spawn_bfs().join();
    let path = checker.discovery(property).unwrap_or_else(|| panic!("{faults:?}: not found: {property}"));
    let (states, actions) = (checker.unique_state_count(), path.into_actions());
    println!("{faults:?}: after {states} states {} steps to the contrary of: {property}", actions.len());
    for action in actions {
        println!("    {action:?}");
    }
}
