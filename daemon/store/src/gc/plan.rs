//! What a collection would delete, as a value.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsString;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;

use super::held::is_held_by_a_program;
use super::holders;
use crate::{Store, StoreError};

/// Who holds a blob, when the kernel says that somebody does and `/proc` does not say who.
pub const UNKNOWN_HOLDER: &str = "a program that has it open or mapped";

/// Something that a collection may delete.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// How to rebuild a file. Ordered before blobs: a recipe goes before what it refers to.
    Recipe(Digest),
    /// A blob.
    Blob(Digest),
}

impl Node {
    /// The digest that names it.
    #[must_use]
    pub const fn digest(self) -> Digest {
        match self {
            Self::Recipe(digest) | Self::Blob(digest) => digest,
        }
    }

    /// What it takes on disk, or `None` when it is not there.
    pub fn bytes_on_disk(self, store: &Store) -> Result<Option<u64>, StoreError> {
        match self {
            Self::Blob(digest) => store.blob_bytes_on_disk(digest),
            Self::Recipe(file) => store.recipe_bytes(file),
        }
    }

    /// Deletes the file; what it took on disk, or `None` when there was none. [`Self::note_removed`]
    /// has to follow.
    pub(super) fn remove(self, store: &Store) -> Result<Option<u64>, StoreError> {
        match self {
            Self::Blob(digest) => store.remove_blob_file(digest),
            Self::Recipe(file) => store.remove_recipe_file(file),
        }
    }

    /// Enters into the books that it is gone, which took `bytes` on disk.
    pub(super) fn note_removed(self, store: &Store, bytes: u64) {
        match self {
            Self::Blob(digest) => store.note_blob_removed(digest, bytes),
            Self::Recipe(file) => store.note_recipe_removed(file, bytes),
        }
    }
}

/// Something that lies in the store and is neither blob nor recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Litter {
    /// The record of a model in the trash whose time is over.
    Trash {
        /// Its name.
        record: Digest,
        /// What it takes on disk.
        bytes: u64,
    },
    /// What a transaction that died has left in `staging/`.
    Staging {
        /// What it is called there.
        name: OsString,
        /// What it takes on disk.
        bytes: u64,
    },
    /// What has arrived of a file whose download nobody has gone on with for a week.
    Partial {
        /// The file.
        file: Digest,
        /// What it takes on disk.
        bytes: u64,
    },
}

impl Litter {
    const fn bytes(&self) -> u64 {
        match self {
            Self::Trash { bytes, .. } | Self::Staging { bytes, .. } | Self::Partial { bytes, .. } => *bytes,
        }
    }
}

/// Bytes that nothing needs and that stay because a process holds them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KeptBytes {
    /// What it takes on disk.
    pub bytes: u64,
    /// The processes, or what is known of them.
    pub by: Vec<String>,
}

/// A list of deletions: nothing reachable and nothing pinned is on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcPlan {
    /// What goes, recipes first, with its size on disk in bytes.
    pub deletions: Vec<(Node, u64)>,
    /// What nothing needs and some process has open or mapped, with its size on disk: it stays.
    pub held: Vec<(Node, u64)>,
    /// What nothing needs and a lease pins: it goes when that ends.
    pub leased: Vec<Digest>,
    /// What else goes.
    pub litter: Vec<Litter>,
}

impl GcPlan {
    /// Plans to delete what of `unneeded` is not pinned, in the order in which it comes.
    ///
    /// # Errors
    /// [`StoreError::Io`] when a candidate's size cannot be read.
    pub fn new(
        store: &Store,
        unneeded: impl IntoIterator<Item = Node>,
        pinned: &BTreeSet<Digest>,
    ) -> Result<Self, StoreError> {
        let mut plan = Self::default();
        for node in unneeded {
            if pinned.contains(&node.digest()) {
                plan.leased.push(node.digest());
                continue;
            }
            let Some(bytes) = node.bytes_on_disk(store)? else { continue };
            match node {
                Node::Blob(digest) if is_held_by_a_program(store, digest) => plan.held.push((node, bytes)),
                _ => plan.deletions.push((node, bytes)),
            }
        }
        Ok(plan)
    }

    /// Adds what transactions that died, downloads that nobody goes on with and models whose time in
    /// the trash is over have left.
    ///
    /// # Errors
    /// [`StoreError`].
    pub fn with_litter(mut self, store: &Store, now: SystemTime) -> Result<Self, StoreError> {
        for trashed in store.trash()?.into_iter().filter(|trashed| trashed.is_expired(now)) {
            let bytes = store.trashed_bytes(trashed.record)?;
            self.litter.push(Litter::Trash { record: trashed.record, bytes });
        }
        for (name, bytes) in store.abandoned_staging()? {
            self.litter.push(Litter::Staging { name, bytes });
        }
        let pinned = store.leases().pinned();
        for partial in store.partials()?.into_iter().filter(|partial| partial.is_abandoned(now)) {
            if !pinned.contains(&partial.file) {
                self.litter.push(Litter::Partial { file: partial.file, bytes: partial.bytes });
            }
        }
        Ok(self)
    }

    /// The blobs that it deletes, or would if no program held them.
    pub(super) fn blobs(&self) -> BTreeSet<Digest> {
        let nodes = self.deletions.iter().chain(&self.held);
        let blob = |(node, _): &(Node, u64)| matches!(node, Node::Blob(_)).then(|| node.digest());
        nodes.filter_map(blob).collect()
    }

    /// What the plan frees on disk.
    #[must_use]
    pub fn freed_bytes(&self) -> u64 {
        let deletions = self.deletions.iter().map(|(_, bytes)| *bytes);
        deletions.chain(self.litter.iter().map(Litter::bytes)).fold(0, u64::saturating_add)
    }

    /// What nothing needs and stays all the same on disk.
    #[must_use]
    pub fn held_bytes(&self) -> u64 {
        self.held.iter().map(|(_, bytes)| *bytes).fold(0, u64::saturating_add)
    }

    /// What stays, grouped by who holds it.
    #[must_use]
    pub fn kept(&self, store: &Store) -> Vec<KeptBytes> {
        let holders = holders(store, &self.held.iter().map(|(node, _)| node.digest()).collect());
        let mut groups: BTreeMap<Vec<String>, u64> = BTreeMap::new();
        for (node, bytes) in &self.held {
            let by = holders.get(&node.digest()).map(|by| by.iter().cloned().collect());
            *groups.entry(by.unwrap_or_else(|| vec![UNKNOWN_HOLDER.to_owned()])).or_default() += bytes;
        }
        groups.into_iter().map(|(by, bytes)| KeptBytes { bytes, by }).collect()
    }
}
