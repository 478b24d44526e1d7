//! The plan of a collection.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;

use super::held::is_held_by_a_program;
use super::{Node, holders};
use crate::StoreError;
use crate::liveness::Liveness;

/// Names the holder of a blob when the kernel says that one exists and `/proc` does not show it.
pub const UNKNOWN_HOLDER: &str = "a program that has it open or mapped";

/// Something else that a collection removes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum OtherDeletion {
    /// The record of an expired model in the trash.
    Trash { record: Digest, bytes: u64 },
    /// Files that a transaction left in `staging/` when its process died.
    Staging { name: OsString, bytes: u64 },
    /// An unfinished download that was not continued for a week.
    Partial { file: Digest, bytes: u64 },
}

impl Unlisted {
    fn add(&mut self, bytes: u64) {
        self.files = self.files.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes);
    }
}

impl OtherDeletion {
    pub(super) const fn bytes(&self) -> u64 {
        match self {
            Self::Trash { bytes, .. } | Self::Staging { bytes, .. } | Self::Partial { bytes, .. } => *bytes,
        }
    }
}

/// Unneeded bytes that stay because a process holds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptBytes {
    pub bytes: u64,
    pub by: Vec<String>,
}

/// The deletions of a collection, and the data that it has to keep. Nothing needed or leased is deleted.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcPlan {
    /// What is deleted, recipes first, with its size on disk in bytes.
    pub deletions: Vec<(Node, u64)>,
    /// Unneeded, but open or mapped in a process: kept. With its size on disk in bytes.
    pub held: Vec<(Node, u64)>,
    /// Unneeded, but leased: kept until the lease ends.
    pub leased: Vec<Digest>,
    pub other_deletions: Vec<OtherDeletion>,
    /// What is unneeded too, and not listed because there is so much of it.
    pub unlisted: Unlisted,
}

/// Unneeded blobs and recipes that a plan does not list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Unlisted {
    /// How many, at least.
    pub files: u64,
    /// Their size on disk in bytes, if the plan is not executed.
    pub bytes: u64,
}

/// How much a plan lists.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// The most deletions. They are kept in memory several times, with some 200 bytes in all for each.
    pub(super) deletions: usize,
    pub(super) measures_all: bool,
}

impl Extent {
    const MAX_DELETIONS: usize = 1 << 16;

    /// For a plan that is shown.
    pub(super) const SHOWN: Self = Self { deletions: Self::MAX_DELETIONS, measures_all: true };
    /// For one of several plans that are executed, one after the other.
    pub(super) const BATCH: Self = Self { deletions: Self::MAX_DELETIONS, measures_all: false };
    /// For a collection of few candidates.
    pub(super) const ALL: Self = Self { deletions: usize::MAX, measures_all: false };
}

impl GcPlan {
    /// Plans to delete the nodes of `unneeded` that are not leased, in their order. Lists only the first of very many.
    pub fn new(
        store: &Liveness,
        unneeded: impl IntoIterator<Item = Node>,
        leased: &BTreeSet<Digest>,
    ) -> Result<Self, StoreError> {
        Self::up_to(store, unneeded, leased, Extent::SHOWN)
    }

    pub(super) fn up_to(
        store: &Liveness,
        unneeded: impl IntoIterator<Item = Node>,
        leased: &BTreeSet<Digest>,
        extent: Extent,
    ) -> Result<Self, StoreError> {
        let mut plan = Self::default();
        for node in unneeded {
            let is_full = plan.deletions.len() >= extent.deletions;
            if is_full && !extent.measures_all {
                plan.unlisted.files = 1;
                break;
            }
            if leased.contains(&node.digest()) {
                plan.leased.push(node.digest());
                continue;
            }
            let Some(bytes) = store.content.bytes_on_disk(node)? else { continue };
            match node {
                Node::Blob(digest) if is_held_by_a_program(store, digest) => plan.held.push((node, bytes)),
                _ if is_full => plan.unlisted.add(bytes),
                _ => plan.deletions.push((node, bytes)),
            }
        }
        Ok(plan)
    }

    /// Adds abandoned staging files, abandoned downloads and expired models in the trash.
    pub fn with_litter(mut self, store: &Liveness, now: SystemTime) -> Result<Self, StoreError> {
        for trashed in store.names.trash()?.into_iter().filter(|trashed| trashed.is_expired(now)) {
            let bytes = store.names.trashed_bytes(trashed.record)?;
            self.other_deletions.push(OtherDeletion::Trash { record: trashed.record, bytes });
        }
        for (name, bytes) in store.content.abandoned_staging()? {
            self.other_deletions.push(OtherDeletion::Staging { name, bytes });
        }
        let leased = store.leases().leased();
        for partial in store.content.partials()?.into_iter().filter(|partial| partial.is_abandoned(now)) {
            if !leased.contains(&partial.file) {
                self.other_deletions
                    .push(OtherDeletion::Partial { file: partial.file, bytes: partial.bytes });
            }
        }
        Ok(self)
    }

    /// The blobs to delete, and those that are kept only because a program holds them.
    pub(super) fn blobs(&self) -> BTreeSet<Digest> {
        self.deletions.iter().chain(&self.held).filter_map(|(node, _)| node.blob()).collect()
    }

    pub fn freed_bytes(&self) -> u64 {
        let deletions = self.deletions.iter().map(|(_, bytes)| *bytes);
        deletions
            .chain(self.other_deletions.iter().map(OtherDeletion::bytes))
            .fold(self.unlisted.bytes, u64::saturating_add)
    }

    /// Whether nothing is left to delete. A plan that could delete nothing is the last, so that a collection ends.
    pub fn is_last_batch(&self) -> bool {
        self.unlisted.files == 0 || self.deletions.is_empty()
    }

    pub fn held_bytes(&self) -> u64 {
        self.held.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
    }

    /// Bytes that are kept, grouped by their holders.
    pub fn kept(&self, store: &Liveness) -> Vec<KeptBytes> {
        let holders = holders(store, &self.held.iter().map(|(node, _)| node.digest()).collect());
        let mut groups: BTreeMap<Vec<String>, u64> = BTreeMap::new();
        for (node, bytes) in &self.held {
            let by = holders.get(&node.digest()).map(|by| by.iter().cloned().collect());
            *groups.entry(by.unwrap_or_else(|| vec![UNKNOWN_HOLDER.to_owned()])).or_default() += bytes;
        }
        groups.into_iter().map(|(by, bytes)| KeptBytes { bytes, by }).collect()
    }
}
