//! Blobs and recipes: their files, and the updates of ledger and index when they are published or removed.

use std::path::PathBuf;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use super::reservation::Reservation;
use super::{Store, StoreError};

/// A blob or recipe.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum Node {
    /// A recipe. Ordered before blobs, so that it is deleted before the blobs that it names.
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

    fn path(self) -> PathBuf {
        match self {
            Self::Blob(digest) => layout::blob(digest),
            Self::Recipe(file) => layout::recipe(file),
        }
    }

    /// Its size on disk, or `None` when it is not there.
    pub fn bytes_on_disk(self, store: &Store) -> Result<Option<u64>, StoreError> {
        match self {
            Self::Blob(digest) => {
                Ok(store.blob_status(digest)?.map(|status| store.file_system.bytes_on_disk(&status)))
            }
            Self::Recipe(_) => store.file_bytes(&self.path()),
        }
    }
}

impl Store {
    /// Removes the file; returns its bytes on disk, or `None` if it did not exist. The caller holds a change,
    /// and notes the removal.
    pub(crate) fn remove_node(&self, node: Node) -> Result<Option<u64>, StoreError> {
        let bytes = node.bytes_on_disk(self)?;
        let removed = self.disk.remove_file(&node.path());
        self.forget_recipe(node);
        Ok(removed?.and(bytes))
    }

    /// Subtracts a removed blob or recipe of `bytes` on disk, and notes it in the index.
    pub(crate) fn note_removed(&self, node: Node, bytes: u64) {
        self.forget_recipe(node);
        self.note(node);
        self.space.freed(bytes);
    }

    /// Counts a blob or recipe that was just published and has replaced one of `replaced` bytes on disk, and
    /// notes it in the index.
    pub(crate) fn note_added(
        &self,
        node: Node,
        replaced: u64,
        reservation: &mut Reservation,
    ) -> Result<(), StoreError> {
        self.note_removed(node, replaced);
        reservation.settle(node.bytes_on_disk(self)?.unwrap_or_default());
        Ok(())
    }

    /// Removes a recipe from the cache, before or after it is deleted or replaced.
    fn forget_recipe(&self, node: Node) {
        if let Node::Recipe(file) = node {
            self.recipes.forget(file);
        }
    }
}
