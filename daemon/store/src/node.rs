//! Blobs and recipes: their files, and the updates of ledger and index when they are published or removed.

use std::path::PathBuf;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

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

    pub(crate) fn path(self) -> PathBuf {
        match self {
            Self::Blob(digest) => layout::blob(digest),
            Self::Recipe(file) => layout::recipe(file),
        }
    }
}
