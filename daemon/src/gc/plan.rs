//! What a collection would delete, as a value.

use std::collections::BTreeSet;

use blobd_client::protocol::response::{GcItem, GcReason};
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use crate::store::{Store, StoreError, disk};

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

    /// Why it goes when nothing needs it.
    const fn reason(self) -> GcReason {
        match self {
            Self::Recipe(_) => GcReason::UnreferencedRecipe,
            Self::Blob(_) => GcReason::UnreferencedBlob,
        }
    }

    /// What it takes on disk, or `None` when it is not there.
    pub(crate) fn bytes_on_disk(self, store: &Store) -> Result<Option<u64>, StoreError> {
        match self {
            Self::Blob(digest) => store.blob_bytes_on_disk(digest),
            Self::Recipe(file) => {
                let metadata = std::fs::symlink_metadata(store.path(layout::recipe(file)));
                Ok(metadata.ok().map(|metadata| disk::bytes_on_disk(&metadata)))
            }
        }
    }

    pub(super) fn remove(self, store: &Store) -> Result<Option<u64>, StoreError> {
        let path = match self {
            Self::Blob(digest) => layout::blob(digest),
            Self::Recipe(file) => layout::recipe(file),
        };
        let removed = disk::remove_file(&store.path(path));
        store.forget_recipe(self.digest());
        removed
    }
}

/// A list of deletions: nothing reachable and nothing pinned is on it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct GcPlan {
    /// What goes, recipes first, with its size on disk in bytes.
    pub deletions: Vec<(Node, u64)>,
}

impl GcPlan {
    /// Plans to delete what of `candidates` is neither reachable nor pinned.
    ///
    /// # Errors
    /// [`StoreError::Io`] when a candidate's size cannot be read.
    pub fn new(
        store: &Store,
        candidates: impl IntoIterator<Item = Node>,
        reachable: &BTreeSet<Node>,
        pinned: &BTreeSet<Digest>,
    ) -> Result<Self, StoreError> {
        let unneeded: BTreeSet<Node> = candidates
            .into_iter()
            .filter(|node| !reachable.contains(node) && !pinned.contains(&node.digest()))
            .collect();
        let mut deletions = Vec::new();
        for node in unneeded {
            if let Some(bytes) = node.bytes_on_disk(store)? {
                deletions.push((node, bytes));
            }
        }
        Ok(Self { deletions })
    }

    /// What the plan frees on disk.
    #[must_use]
    pub fn freed_bytes(&self) -> u64 {
        self.deletions.iter().fold(0, |sum, (_, bytes)| sum.saturating_add(*bytes))
    }

    /// The plan as it is told to people and scripts.
    #[must_use]
    pub fn items(&self) -> Vec<GcItem> {
        let item = |(node, size): &(Node, u64)| GcItem {
            digest: Some(node.digest()),
            size: *size,
            reason: node.reason(),
        };
        self.deletions.iter().map(item).collect()
    }
}
