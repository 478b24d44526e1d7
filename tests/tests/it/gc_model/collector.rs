//! The operations that delete blobs: `gc`, and `rm` after it has removed a tag.

use super::disk::{BlobSet, Manifest, TAG_COUNT, Tag};
use super::system::{Fault, State};

/// The operation of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Task {
    /// `gc::collect`.
    Gc,
    /// `ops::remove` of any tag; of one in the trash, its expiry. Then `gc::collect_from`.
    Remove,
}

/// The next step of a collector.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Step {
    /// Waits for the request that names the tag ([`Collector::start`]).
    Idle,
    /// `Store::remove_tag`: the unlink, under the lock of the tags.
    Unlink,
    /// `Store::remove_tag`: the sync, and the end of that lock.
    SyncUnlink,
    /// The lock of the collections, `Leases::begin_collection`.
    Begin,
    /// `Leases::leased`.
    ListLeases,
    /// `gc::mark`: one tag after the other. The real one lists all and then reads each; a tag
    /// that is absent at either moment is passed over, so that one moment stands for both.
    Mark,
    /// `Store::blobs`, `GcPlan::new`.
    Plan,
    /// `gc::settle`.
    Settle,
    /// `Collection::delete_unleased` of one blob after the other: the claim, under the lock of the leases.
    Delete,
    /// The same: `Node::remove`, without that lock, and the end of the claim.
    Remove,
    /// `Collection::drop` and the end of the lock; `rm` responds.
    End,
    /// All its runs are over.
    Done,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Collector {
    task: Task,
    step: Step,
    runs_left: u8,
    tag: Tag,
    /// The candidates for deletion; for `rm`, the blobs that the model needed. `Collection::delete_unleased`
    /// only removes candidates.
    candidates: BlobSet,
    leased: BlobSet,
    next_tag: Tag,
    reachable: BlobSet,
    plan: BlobSet,
    /// The claimed blobs: `leases::Table::deleting`.
    deleting: BlobSet,
}

impl Collector {
    pub(super) const fn new(task: Task, runs: u8) -> Self {
        let (step, candidates) = match task {
            _ if runs == 0 => (Step::Done, BlobSet::NONE),
            Task::Gc => (Step::Begin, BlobSet::ALL),
            Task::Remove => (Step::Idle, BlobSet::NONE),
        };
        let none = BlobSet::NONE;
        let (leased, reachable, plan, deleting) = (none, none, none, none);
        Self {
            task,
            step,
            runs_left: runs,
            tag: 0,
            candidates,
            leased,
            next_tag: 0,
            reachable,
            plan,
            deleting,
        }
    }

    pub(super) const fn task(&self) -> Task {
        self.task
    }

    pub(super) const fn step(&self) -> Step {
        self.step
    }

    /// Whether it can continue without a request.
    pub(super) const fn is_busy(&self) -> bool {
        !matches!(self.step, Step::Idle | Step::Done)
    }

    pub(super) const fn plan(&self) -> BlobSet {
        self.plan
    }

    pub(super) const fn deleting(&self) -> BlobSet {
        self.deleting
    }

    pub(super) const fn locks_tags(&self) -> bool {
        matches!(self.step, Step::Unlink | Step::SyncUnlink)
    }

    const fn locks_collections(&self) -> bool {
        use Step::{Delete, End, ListLeases, Mark, Plan, Remove, Settle};
        matches!(self.step, ListLeases | Mark | Plan | Settle | Delete | Remove | End)
    }

    /// The tags that an idle `rm` may be told to remove.
    pub(super) fn choices(&self, state: &State) -> Vec<Tag> {
        let may_start = self.step == Step::Idle && !state.tags_are_locked();
        state.disk.tagged().map(|(tag, _)| tag).filter(|_| may_start).collect()
    }

    /// `remove::drop_names`: the lock of the tags, and what the model needs.
    pub(super) fn start(&mut self, state: &State, tag: Tag) {
        let candidates = state.disk.tag(tag).map(Manifest::needs).unwrap_or_default();
        *self = Self { step: Step::Unlink, tag, candidates, ..*self };
    }

    /// After a power cut: nothing in memory is left.
    pub(super) const fn restarted(&self) -> Self {
        Self::new(self.task, self.runs_left)
    }

    /// Does the next step; `None` while another operation has the lock that it needs.
    pub(super) fn next(&self, state: &mut State, faults: &[Fault]) -> Option<Self> {
        let mut next = *self;
        let is_wrong = |fault| faults.contains(&fault);
        match self.step {
            Step::Idle | Step::Done => return None,
            Step::Unlink => {
                state.change_tag(self.tag, None);
                next.step = Step::SyncUnlink;
            }
            Step::SyncUnlink => {
                if !is_wrong(Fault::UnsyncedUnlink) {
                    state.disk.sync_tag(self.tag);
                }
                next.step = Step::Begin;
            }
            Step::Begin => {
                let others_run = state.collectors.iter().any(Self::locks_collections);
                if others_run && !is_wrong(Fault::CollectionsOverlap) {
                    return None;
                }
                state.since_collection.get_or_insert_default();
                let leases_last = is_wrong(Fault::LeasesAfterManifests);
                next.step = if leases_last { Step::Mark } else { Step::ListLeases };
            }
            Step::ListLeases => {
                next.leased = state.leased();
                let leases_last = is_wrong(Fault::LeasesAfterManifests);
                next.step = if leases_last { Step::Plan } else { Step::Mark };
            }
            Step::Mark => {
                let needs = state.disk.tag(self.next_tag).map(Manifest::needs).unwrap_or_default();
                next.reachable = self.reachable.with(needs);
                next.next_tag += 1;
                if next.next_tag == TAG_COUNT {
                    let leases_last = is_wrong(Fault::LeasesAfterManifests);
                    next.step = if leases_last { Step::ListLeases } else { Step::Plan };
                }
            }
            Step::Plan => {
                let candidates = self.candidates.and(state.disk.blobs());
                next.plan = candidates.without(self.reachable).without(self.leased);
                next.step = if next.plan.is_empty() { Step::End } else { Step::Settle };
            }
            Step::Settle => {
                if !is_wrong(Fault::NoSyncBeforeDeletion) {
                    state.disk.sync_all();
                }
                next.step = Step::Delete;
            }
            Step::Delete => next.claim(state, faults),
            Step::Remove => {
                state.disk.remove(self.deleting);
                next.deleting = BlobSet::NONE;
                next.step = if self.plan.is_empty() { Step::End } else { Step::Delete };
            }
            Step::End => {
                state.since_collection = None;
                if self.task == Task::Remove {
                    state.acknowledge(self.tag, None);
                }
                next = Self::new(self.task, self.runs_left - 1);
            }
        }
        Some(next)
    }

    /// `Collection::claim`.
    fn claim(&mut self, state: &State, faults: &[Fault]) {
        let Some(blob) = self.plan.first().map(BlobSet::of) else { return };
        let since = state.since_collection.unwrap_or_default();
        let protected = if faults.contains(&Fault::NoRecheck) {
            BlobSet::NONE
        } else if faults.contains(&Fault::RecheckOfPresentLeasesOnly) {
            state.leased()
        } else {
            state.leased().with(since)
        };
        self.plan = self.plan.without(blob);
        if !protected.contains(blob) {
            (self.deleting, self.step) = (blob, Step::Remove);
        } else if self.plan.is_empty() {
            self.step = Step::End;
        }
    }
}
