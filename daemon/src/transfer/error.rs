//! Why a transfer fails.

use blobd_registry::RegistryError;
use blobd_store::StoreError;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FormatError;
use blobd_store_format::recipe::RecipeError;

/// Why a file could not be transferred.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TransferError {
    /// The registry failed.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// The store failed.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// Its format is unknown, or its header or its tensors are refused.
    #[error(transparent)]
    Format(#[from] FormatError),
    /// Its recipe is refused.
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    /// What came is not the file that was named. It has been thrown away.
    #[error("digest {found}, {expected} expected; what came was thrown away")]
    Digest {
        /// The digest of what came.
        found: Digest,
        /// The digest that was named.
        expected: Digest,
    },
    /// The rest never came, and nobody said why.
    #[error("transfer ended early; what has arrived is kept, pull again to go on")]
    Incomplete,
    /// Nobody wants it any more.
    #[error("the client that asked for it has gone; what has arrived is kept, pull again to go on")]
    Unwanted,
    /// It brought almost nothing, and another pull of the same file goes on with it.
    #[error(
        "was too slow, and another pull of the same file goes on with it; pull again to wait for that one"
    )]
    HandedOver,
}

impl TransferError {
    /// Whether what has arrived is of no use to a next try.
    pub(super) const fn is_final(&self) -> bool {
        matches!(self, Self::Format(_) | Self::Recipe(_) | Self::Digest { .. })
    }
}
