//! Errors of transfers.

use blobd_registry::RegistryError;
use blobd_store::StoreError;
use blobd_store_format::archive::TarError;
use blobd_store_format::descriptor::Compression;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FormatError;
use blobd_store_format::git_id::GitId;
use blobd_store_format::recipe::RecipeError;

use super::two_copies::TwoCopies;

/// Why a file could not be transferred.
#[derive(Debug, thiserror::Error)]
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
    #[error(
        "header: its first {bytes} bytes take more memory than is free for this user now; try again later"
    )]
    NoMemory { bytes: usize },
    /// Not shown: the header is requested again when enough memory is free.
    #[error("header: others use the memory that it needs")]
    MemoryInUse,
    #[error("archive: the headers of its files have more than {limit} bytes")]
    ArchiveHeaders { limit: u64 },
    #[error("archive: more than {limit} bytes between two of its files, or after the last one")]
    ArchiveGap { limit: u64 },
    #[error("archive: unpacks to more than {limit} bytes, which is far more than its size")]
    ArchiveTooLarge { limit: u64 },
    #[error("archive: ends at byte {position} of its content, inside of a file")]
    ArchiveEnds { position: u64 },
    #[error("archive: contains no files")]
    EmptyArchive,
    #[error("archive: its compressed data is damaged: {reason}")]
    Compression { reason: String },
    #[error(
        "archive: its files are known when it has been pulled, because it is compressed with {compression}"
    )]
    NotInspected { compression: Compression },
    /// The headers in an archive are far apart, so the archive is read as one stream instead.
    #[error("archive: its server sends no parts of files, which are needed to read the headers in it")]
    NoRanges,
    /// Its parts are combined only if the digest of the whole file is verified afterwards.
    #[error("its parts come from several servers, so its header is known when it has been pulled")]
    SeveralServers,
    #[error("wrong digest: expected {expected} as in its manifest, found another")]
    WrongHeader { expected: Digest },
    #[error(
        "wrong content: expected the git object {expected}, found {found}; the received data was deleted"
    )]
    GitId { expected: GitId, found: GitId },
    #[error("wrong size: expected at most {limit} bytes of a file that a hub stores in git")]
    TooLargeForGit { limit: u64 },
    #[error("{0}")]
    Digest(Box<TwoCopies>),
    #[error("wrong digest: expected {expected}, found {found}; the received data was deleted")]
    StreamDigest { found: Digest, expected: Digest },
    #[error("transfer ended early; received data is kept, pull again to continue")]
    Incomplete,
    #[error("the client has disconnected; received data is kept, pull again to continue")]
    Unwanted,
    #[error("transfer ended early; pull again to download this archive from its start")]
    StreamEnded,
    #[error("too slow, another pull of the same file continues; pull again to wait for that one")]
    HandedOver,
}

impl TransferError {
    /// Whether the content is not what the list of files says.
    pub(crate) const fn is_wrong_content(&self) -> bool {
        matches!(self, Self::GitId { .. } | Self::StreamDigest { .. } | Self::WrongHeader { .. })
    }

    /// Whether a retry cannot use the received data.
    pub(super) const fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Format(_)
                | Self::Recipe(_)
                | Self::Archive(_)
                | Self::ArchiveHeaders { .. }
                | Self::ArchiveGap { .. }
                | Self::ArchiveTooLarge { .. }
                | Self::ArchiveEnds { .. }
                | Self::EmptyArchive
                | Self::Compression { .. }
                | Self::Digest(_)
                | Self::StreamDigest { .. }
                | Self::SeveralServers
                | Self::WrongHeader { .. }
                | Self::GitId { .. }
                | Self::TooLargeForGit { .. }
        )
    }
}
