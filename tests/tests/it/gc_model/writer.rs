//! The operations that write a tag: imports (and pulls, which are the same here), `tag`, `rm --keep`.

use super::disk::{BlobSet, Manifest, TAG_COUNT, TRASH, Tag};
use super::system::{Fault, State};

/// The operation of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Job {
    /// `ops::import`, `ops::pull`.
    Import(Manifest, Tag),
    /// `ops::tag` of any tag to any other.
    Tag,
    /// `rm --keep` of any tag: takes a lease, commits the record in the trash like a tag, then removes the
    /// tag.
    Keep,
}

/// The next step of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum Step {
    /// Waits for the request that names the tags ([`Writer::start`]).
    Idle,
    /// `Store::leased_model`: leases the blobs of the manifest that it has read.
    Lease,
    /// `Store::leased_model`: reads the tag again.
    Reread,
    /// `Ingest::add_blob` of one blob after the other: leases it and checks whether it exists.
    Take,
    /// `Ingest::publish_blobs`: the renames, then the sync.
    Publish,
    /// `Ingest::commit`: the lock of the tags, then `Store::check_file` of each file.
    Check,
    /// `Store::write_tag`: the rename.
    WriteTag,
    /// `Store::write_tag`: the sync; and then the end of the transaction and of its lease.
    SyncTag,
    /// `Store::remove_tag`: the unlink.
    RemoveSource,
    /// `Store::remove_tag`: the sync.
    SyncSource,
    /// Acknowledged, or its model is gone.
    Done,
    /// `StoreError::MissingBlob`: a blob that it relied on is gone.
    Refused,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) struct Writer {
    job: Option<Job>,
    step: Step,
    manifest: Manifest,
    source: Tag,
    target: Tag,
    /// The blobs that its lease protects.
    leased: BlobSet,
    looked: BlobSet,
    /// `Ingest::new`.
    new: BlobSet,
    had_new: bool,
}

impl Writer {
    pub(super) const fn new(job: Option<Job>) -> Self {
        let (step, manifest, target) = match job {
            Some(Job::Import(manifest, tag)) => (Step::Take, manifest, tag),
            Some(Job::Tag | Job::Keep) => (Step::Idle, Manifest::First, TRASH),
            None => (Step::Done, Manifest::First, TRASH),
        };
        let none = BlobSet::NONE;
        let (leased, looked, new) = (none, none, none);
        Self { job, step, manifest, source: target, target, leased, looked, new, had_new: false }
    }

    pub(super) const fn step(&self) -> Step {
        self.step
    }

    pub(super) const fn leased(&self) -> BlobSet {
        self.leased
    }

    pub(super) const fn locks_tags(&self) -> bool {
        matches!(self.step, Step::WriteTag | Step::SyncTag | Step::RemoveSource | Step::SyncSource)
    }

    /// Whether it can continue without a request.
    pub(super) const fn is_busy(&self) -> bool {
        !matches!(self.step, Step::Idle | Step::Done | Step::Refused)
    }

    const fn keeps(&self) -> bool {
        matches!(self.job, Some(Job::Keep))
    }

    /// The tags that an idle writer may be told to take and to write.
    pub(super) fn choices(&self, state: &State) -> Vec<(Tag, Tag)> {
        if self.step != Step::Idle {
            return Vec::new();
        }
        let targets = if self.keeps() { TRASH..TRASH + 1 } else { 0..TAG_COUNT };
        let sources = state.disk.tagged().map(|(tag, _)| tag);
        sources.flat_map(|s| targets.clone().map(move |t| (s, t))).filter(|(s, t)| s != t).collect()
    }

    /// `Store::leased_model`: the first read of the tag.
    pub(super) fn start(&mut self, state: &State, source: Tag, target: Tag) {
        if let Some(manifest) = state.disk.tag(source) {
            *self = Self { step: Step::Lease, manifest, source, target, ..Self::new(self.job) };
        }
    }

    /// After a power cut: nothing in memory is left.
    pub(super) const fn restarted(&self) -> Self {
        match self.step {
            Step::Done | Step::Refused => *self,
            _ => Self::new(self.job),
        }
    }

    const fn over(&self, step: Step) -> Self {
        Self { step, ..Self::new(self.job) }
    }

    /// Does the next step; `None` while another operation has the lock that it needs.
    pub(super) fn next(&self, state: &mut State, faults: &[Fault]) -> Option<Self> {
        let (mut next, needs) = (*self, self.manifest.needs());
        let is_wrong = |fault| faults.contains(&fault);
        match self.step {
            Step::Idle | Step::Done | Step::Refused => return None,
            Step::Lease if self.waits(needs, state, faults) => return None,
            Step::Lease => {
                if !(self.keeps() && is_wrong(Fault::KeepWithoutLease)) {
                    next.lease(needs, state);
                }
                next.step = if is_wrong(Fault::NoSecondRead) { Step::Publish } else { Step::Reread };
            }
            Step::Reread => match state.disk.tag(self.source) {
                Some(manifest) if manifest == self.manifest => next.step = Step::Publish,
                Some(manifest) => (next.manifest, next.step) = (manifest, Step::Lease),
                None => next = self.over(Step::Done),
            },
            Step::Take if self.waits(self.leased_next(), state, faults) => return None,
            Step::Take => next.take(state, is_wrong(Fault::LookupBeforeLease)),
            Step::Publish => next.publish(state, faults),
            Step::Check if state.tags_are_locked() => return None,
            Step::Check => {
                next.step = Step::WriteTag;
                if is_wrong(Fault::LeaseEndsBeforeTag) {
                    next.leased = BlobSet::NONE;
                }
                if !is_wrong(Fault::NoCheckAtCommit) && !state.disk.has(needs) {
                    next = self.over(Step::Refused);
                } else if self.keeps() && state.disk.tag(self.source) != Some(self.manifest) {
                    next = self.over(Step::Done);
                }
            }
            Step::WriteTag => {
                state.change_tag(self.target, Some(self.manifest));
                next.step = Step::SyncTag;
            }
            Step::SyncTag => {
                if !is_wrong(Fault::UnsyncedTag) {
                    state.disk.sync_tag(self.target);
                }
                if self.keeps() {
                    next.step = Step::RemoveSource;
                } else {
                    state.acknowledge(self.target, Some(self.manifest));
                    next = self.over(Step::Done);
                }
            }
            Step::RemoveSource => {
                state.change_tag(self.source, None);
                next.step = Step::SyncSource;
            }
            Step::SyncSource => {
                state.disk.sync_tag(self.source);
                state.acknowledge(self.target, Some(self.manifest));
                state.acknowledge(self.source, None);
                next = self.over(Step::Done);
            }
        }
        Some(next)
    }

    /// `Leases::lock_unless_deleting`.
    fn waits(&self, blobs: BlobSet, state: &State, faults: &[Fault]) -> bool {
        !faults.contains(&Fault::LeaseDuringDeletion) && !state.deleting().and(blobs).is_empty()
    }

    /// The blobs that the next step of [`Step::Take`] may lease.
    fn leased_next(&self) -> BlobSet {
        let missing = self.manifest.needs().without(self.leased);
        missing.first().map(BlobSet::of).unwrap_or_default()
    }

    /// `Lease::protect_all`.
    fn lease(&mut self, blobs: BlobSet, state: &mut State) {
        self.leased = self.leased.with(blobs);
        state.since_collection = state.since_collection.map(|since| since.with(blobs));
    }

    /// `Ingest::add_blob`: leases one blob, and checks the blob leased before it. Steps of others between that
    /// check and this lease could as well happen before the check or after the lease.
    fn take(&mut self, state: &mut State, look_first: bool) {
        let needs = self.manifest.needs();
        if !look_first {
            self.look(self.leased.without(self.looked), state);
        }
        if let Some(blob) = needs.without(self.leased).first().map(BlobSet::of)
            && (!look_first || self.looked.contains(blob))
        {
            self.lease(blob, state);
        }
        if look_first && let Some(blob) = needs.without(self.looked).first() {
            self.look(BlobSet::of(blob), state);
        }
        if self.leased.contains(needs) && self.looked.contains(needs) {
            self.step = Step::Publish;
        }
    }

    fn look(&mut self, blobs: BlobSet, state: &State) {
        self.looked = self.looked.with(blobs);
        self.new = self.new.with(blobs.without(state.disk.blobs()));
    }

    /// `Ingest::publish_blobs`.
    fn publish(&mut self, state: &mut State, faults: &[Fault]) {
        if !self.new.is_empty() {
            state.disk.publish(self.new);
            (self.new, self.had_new) = (BlobSet::NONE, true);
            return;
        }
        let skips = faults.contains(&Fault::UnsyncedBlobs)
            || faults.contains(&Fault::UnsyncedBlobsUnlessNew) && !self.had_new;
        if !skips {
            state.disk.sync_blobs();
        }
        self.step = Step::Check;
    }
}
