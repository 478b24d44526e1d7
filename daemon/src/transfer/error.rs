//! Errors of transfers.

use blobd_registry::RegistryError;
use blobd_store::StoreError;
use blobd_store_format::archive::TarError;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FormatError;
use blobd_store_format::recipe::RecipeError;

/// Why a file could not be transferred.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the errors and their fields are")]
pub enum TransferError {
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Store(#[from] StoreError),
    /// The format is unknown, or the header or the tensors are invalid.
    #[error(transparent)]
    Format(#[from] FormatError),
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error(transparent)]
    Archive(#[from] TarError),
    #[error("archive: the headers of its files have more than {limit} bytes")]
    ArchiveHeaders { limit: u64 },
    /// The headers in an archive are far apart.
    #[error("archive: its server sends no parts of files, which are needed to read the files in it")]
    NoRanges,
    #[error("digest {found}, {expected} expected; the received data was deleted")]
    Digest { found: Digest, expected: Digest },
    #[error("transfer ended early; received data is kept, pull again to continue")]
    Incomplete,
    #[error("the client has disconnected; received data is kept, pull again to continue")]
    Unwanted,
    /// The transfer made no progress, and another pull of the same file continues it.
    #[error("too slow, another pull of the same file continues; pull again to wait for that one")]
    HandedOver,
}

impl TransferError {
    /// Whether the received data is of no use to a retry.
    pub(super) const fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Format(_)
                | Self::Recipe(_)
                | Self::Archive(_)
                | Self::ArchiveHeaders { .. }
                | Self::Digest { .. }
        )
    }
}
