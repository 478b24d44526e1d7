//! The daemon and its disk as a transition system, with its invariants.

use stateright::{Model, Property};

use super::collector::{self, Collector, Task};
use super::disk::{BlobSet, Contents, Disk, Manifest, TAG_COUNT, Tag};
use super::writer::{self, Job, Writer};

/// An error in the order of steps.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Fault {
    /// The collector reads the manifests before the leases.
    LeasesAfterManifests,
    /// It deletes planned blobs even if they have been leased since.
    NoRecheck,
    /// It spares blobs that are leased when it deletes, but not those that were leased and released since.
    RecheckOfPresentLeasesOnly,
    /// A lease on a blob that is being deleted does not wait for the end of the deletion.
    LeaseDuringDeletion,
    /// A second collection may begin before the first has ended.
    CollectionsOverlap,
    /// It does not sync between planning and deleting.
    NoSyncBeforeDeletion,
    /// `rm` does not sync the directory that the tag was in.
    UnsyncedUnlink,
    /// `tag` and `rm --keep` lease what they have read and do not read the tag again.
    NoSecondRead,
    /// `rm --keep` holds no lease.
    KeepWithoutLease,
    /// An import checks whether a blob exists before it leases it.
    LookupBeforeLease,
    /// A commit does not check whether the model is complete.
    NoCheckAtCommit,
    /// A lease ends before the tag is written.
    LeaseEndsBeforeTag,
    /// A commit does not sync `blobs/`.
    UnsyncedBlobs,
    /// A commit that adds no blob does not sync `blobs/`.
    UnsyncedBlobsUnlessNew,
    /// A commit does not sync the directory that the tag is in.
    UnsyncedTag,
}

/// The operations on a store with one model, and how often each may run.
#[derive(Clone, Debug)]
pub(super) struct System {
    pub(super) writers: [Option<Job>; 2],
    pub(super) collections: u8,
    pub(super) removals: u8,
    pub(super) power_cuts: u8,
    pub(super) kills: u8,
    pub(super) faults: &'static [Fault],
}

#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(super) struct State {
    pub(super) disk: Disk,
    pub(super) writers: [Writer; 2],
    pub(super) collectors: [Collector; 2],
    /// `leases::Table::since_collection`.
    pub(super) since_collection: Option<BlobSet>,
    power_cuts_left: u8,
    kills_left: u8,
    /// The permitted contents of each tag after all acknowledged and current changes.
    promised: [Contents; TAG_COUNT],
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// A `tag` or `rm --keep` arrives.
    Take {
        writer: usize,
        source: Tag,
        target: Tag,
    },
    Write(usize, writer::Step),
    /// An `rm` arrives.
    Remove(Tag),
    Collect(Task, collector::Step),
    PowerCut(Disk),
    /// The daemon is killed and started again: the disk is as it was, synced or not.
    Kill,
}

pub(super) const WHOLE: &str = "the model of a tag is complete";
pub(super) const WRITTEN_STAYS: &str = "an acknowledged import stays";
pub(super) const REMOVED_STAYS: &str = "an acknowledged rm is final";
pub(super) const NOT_REFUSED: &str = "a commit finds every blob that its transaction has found";

impl Model for System {
    type State = State;
    type Action = Action;

    fn init_states(&self) -> Vec<State> {
        const OLD: (Tag, Manifest) = (2, Manifest::Third);
        let disk = Disk::with_one_model(OLD.0, OLD.1);
        let gc = Collector::new(Task::Gc, self.collections);
        vec![State {
            disk,
            writers: self.writers.map(Writer::new),
            collectors: [gc, Collector::new(Task::Remove, self.removals)],
            since_collection: None,
            power_cuts_left: self.power_cuts,
            kills_left: self.kills,
            promised: std::array::from_fn(|tag| Contents::only(disk.tag(tag))),
        }]
    }

    fn actions(&self, state: &State, actions: &mut Vec<Action>) {
        // After the last power cut only the remaining state is checked.
        if self.power_cuts > 0 && state.power_cuts_left == 0 {
            return;
        }
        for (writer, its) in state.writers.iter().enumerate() {
            let take = |(source, target)| Action::Take { writer, source, target };
            actions.extend(its.choices(state).into_iter().map(take));
            if its.is_busy() {
                actions.push(Action::Write(writer, its.step()));
            }
        }
        for collector in &state.collectors {
            if collector.is_busy() {
                actions.push(Action::Collect(collector.task(), collector.step()));
            }
            actions.extend(collector.choices(state).into_iter().map(Action::Remove));
        }
        if state.kills_left > 0 {
            actions.push(Action::Kill);
        }
        if state.power_cuts_left > 0 {
            actions.extend(state.disk.power_cuts().into_iter().map(Action::PowerCut));
        }
    }

    fn next_state(&self, state: &State, action: Action) -> Option<State> {
        let mut next = state.clone();
        match action {
            Action::Take { writer, source, target } => next.writers[writer].start(state, source, target),
            Action::Write(writer, _) => {
                next.writers[writer] = state.writers[writer].next(&mut next, self.faults)?;
            }
            Action::Remove(tag) => next.collectors[Task::Remove as usize].start(state, tag),
            Action::Collect(task, _) => {
                let collector = state.collectors[task as usize].next(&mut next, self.faults)?;
                next.collectors[task as usize] = collector;
            }
            Action::PowerCut(disk) => {
                next = State { power_cuts_left: state.power_cuts_left - 1, ..state.restarted(disk) };
            }
            Action::Kill => next = State { kills_left: state.kills_left - 1, ..state.restarted(state.disk) },
        }
        Some(next)
    }

    fn properties(&self) -> Vec<Property<Self>> {
        vec![
            Property::always(WHOLE, |_, state: &State| state.is_whole()),
            Property::always(WRITTEN_STAYS, |_, state: &State| state.is_as_promised(true)),
            Property::always(REMOVED_STAYS, |_, state: &State| state.is_as_promised(false)),
            Property::always(NOT_REFUSED, |_, state: &State| {
                !state.writers.iter().any(|writer| writer.step() == writer::Step::Refused)
            }),
            // Without these, the invariants would hold in a system that does nothing.
            Property::sometimes("a collection deletes a blob", |system: &Self, state: &State| {
                system.removals == 0 || !state.was_cut(system) && !state.disk.has(Manifest::Third.needs())
            }),
            Property::sometimes("a collection spares what it planned to delete", |_, state: &State| {
                let leased = state.leased().with(state.since_collection.unwrap_or_default());
                let deletes = |its: &&Collector| its.step() == collector::Step::Delete;
                state.collectors.iter().filter(deletes).any(|its| !its.plan().and(leased).is_empty())
            }),
            Property::sometimes("all is done between two power cuts", |system: &Self, state: &State| {
                let written = state.writers.iter().all(|writer| writer.step() == writer::Step::Done);
                let collected = state.collectors.iter().all(|its| its.step() == collector::Step::Done);
                system.power_cuts < 2 || state.was_cut(system) && written && collected
            }),
        ]
    }
}

impl State {
    /// `Leases::leased`.
    pub(super) fn leased(&self) -> BlobSet {
        self.writers.iter().fold(BlobSet::NONE, |leased, writer| leased.with(writer.leased()))
    }

    /// `leases::Table::deleting`.
    pub(super) fn deleting(&self) -> BlobSet {
        self.collectors.iter().fold(BlobSet::NONE, |deleting, its| deleting.with(its.deleting()))
    }

    /// `Store::lock_tags`.
    pub(super) fn tags_are_locked(&self) -> bool {
        self.writers.iter().any(Writer::locks_tags) || self.collectors.iter().any(Collector::locks_tags)
    }

    pub(super) fn change_tag(&mut self, tag: Tag, content: Option<Manifest>) {
        self.disk.set_tag(tag, content);
        self.promised[tag] = self.promised[tag].or(content);
    }

    /// Acknowledges a change. If the tag has changed since, the acknowledgement guarantees nothing.
    pub(super) fn acknowledge(&mut self, tag: Tag, content: Option<Manifest>) {
        if self.disk.tag(tag) == content {
            self.promised[tag] = Contents::only(content);
        }
    }

    /// The state of the next start: memory, with its leases and locks, is lost.
    fn restarted(&self, disk: Disk) -> Self {
        Self {
            disk,
            writers: self.writers.each_ref().map(Writer::restarted),
            collectors: self.collectors.each_ref().map(Collector::restarted),
            since_collection: None,
            ..self.clone()
        }
    }

    fn was_cut(&self, system: &System) -> bool {
        self.power_cuts_left < system.power_cuts
    }

    fn is_whole(&self) -> bool {
        self.disk.tagged().all(|(_, manifest)| self.disk.has(manifest.needs()))
    }

    /// Checks the tags that must hold a manifest, or those that must not.
    fn is_as_promised(&self, written: bool) -> bool {
        let promised = self.promised.iter().enumerate();
        promised
            .filter(
                |(_, promise)| if written { !promise.has(None) } else { **promise == Contents::only(None) },
            )
            .all(|(tag, promise)| promise.has(self.disk.tag(tag)))
    }
}
