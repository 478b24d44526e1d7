//! What can go wrong in the store.

use std::io;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::recipe::RecipeError;

use super::lock_file::LockHolder;
use super::place::Place;

/// A failure of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// The file system refused something.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// What was tried.
        action: &'static str,
        /// On what.
        path: Place,
        /// Why it failed.
        source: io::Error,
    },
    /// Something larger than the room there is.
    #[error("store {}: {needed_bytes} bytes needed, {free_bytes} available on the disk", root.display())]
    NoRoom {
        /// The store.
        root: Place,
        /// How much was asked for.
        needed_bytes: u64,
        /// How much there is.
        free_bytes: u64,
    },
    /// Something larger than what is left of the store's share of the disk.
    #[error(
        "store {}: {needed_bytes} bytes needed, {} available: {used_bytes} of the quota of {quota_bytes} in use",
        root.display(),
        quota_bytes.saturating_sub(*used_bytes)
    )]
    Quota {
        /// The store.
        root: Place,
        /// How much was asked for.
        needed_bytes: u64,
        /// How much the store takes already.
        used_bytes: u64,
        /// The most it may take.
        quota_bytes: u64,
    },
    /// A sync has failed, so nothing that was written can be relied upon; or it could not be opened for
    /// writing.
    #[error("store is read-only: {reason}")]
    ReadOnly {
        /// What failed.
        reason: String,
    },
    /// Another process has the store open.
    #[error("store {}: held by {holder}", root.display())]
    Locked {
        /// The store.
        root: Place,
        /// Who has it.
        holder: Box<LockHolder>,
    },
    /// Written by a later blobd.
    #[error(
        "store {}: format {found} is newer than this blobd supports ({supported}); upgrade blobd or choose \
         another --root",
        root.display()
    )]
    NewerFormat {
        /// The store.
        root: Place,
        /// Its format.
        found: u32,
        /// The newest format that this code reads.
        supported: u32,
    },
    /// `store.json` is no JSON of the known form.
    #[error("{}: not a blobd store file: {source}", path.display())]
    StoreFile {
        /// The file.
        path: Place,
        /// What is wrong with it.
        source: serde_json::Error,
    },
    /// The index is being built and takes its time.
    #[error("store {}: its index is still being built", root.display())]
    IndexBuilding {
        /// The store.
        root: Place,
    },
    /// The directory has files but no `store.json`.
    #[error("store {}: has files but no store.json; choose an empty directory with --root", root.display())]
    NotAStore {
        /// The directory.
        root: Place,
    },
    /// A manifest is damaged.
    #[error("{}: {source}", path.display())]
    Manifest {
        /// The file.
        path: Place,
        /// What is wrong with it.
        source: ManifestError,
    },
    /// A recipe is damaged.
    #[error("{}: {source}", path.display())]
    Recipe {
        /// The file.
        path: Place,
        /// What is wrong with it.
        source: RecipeError,
    },
    /// A recipe lies under another file's name.
    #[error("{}: is the recipe of {found}; pull or import the model again", path.display())]
    WrongRecipe {
        /// The recipe's place.
        path: Place,
        /// The file that it rebuilds.
        found: Digest,
    },
    /// A recipe rebuilds a longer or shorter file than the manifest names.
    #[error(
        "{}: rebuilds {found} bytes, the manifest says {expected}; pull or import the model again",
        path.display()
    )]
    RecipeSize {
        /// The recipe's place.
        path: Place,
        /// What it rebuilds, in bytes.
        found: u64,
        /// What the manifest says, in bytes.
        expected: u64,
    },
    /// A tag points to a manifest one of whose files is not there.
    #[error("model {name}: file {digest} is missing; pull or import the model again, or remove it")]
    Incomplete {
        /// The model.
        name: String,
        /// The file.
        digest: Digest,
    },
    /// Something in the store is not of the kind that it must be, or not the store's own.
    #[error("{}: a {found}, {expected} expected; move it out of the store", path.display())]
    UnexpectedFile {
        /// The file.
        path: Place,
        /// What it is.
        found: String,
        /// What it must be.
        expected: &'static str,
    },
    /// A directory without which nobody knows what is needed is not there.
    #[error("{}: missing; put it back, or make an empty one if what was in it is to be given up", path.display())]
    MissingDirectory {
        /// The directory.
        path: Place,
    },
    /// A file below `manifests/` or in `trash/` has a name that blobd gives none there.
    #[error("{}: not a file of blobd's, and nothing is collected while it is there; move it out of the store", path.display())]
    ForeignFile {
        /// The file.
        path: Place,
    },
    /// A record in the trash cannot be read, so nobody knows what it keeps.
    #[error("{}: damaged record of a model in the trash: {what}; move it out of the store", path.display())]
    Trash {
        /// The file.
        path: Place,
        /// What is wrong with it.
        what: String,
    },
    /// A blob that a model needs is not there.
    #[error("blob {digest}: missing; pull or import the model again")]
    MissingBlob {
        /// The blob.
        digest: Digest,
    },
    /// A blob has not the length that is recorded.
    #[error("blob {digest}: {found} bytes on disk, {expected} recorded; pull or import the model again")]
    BlobSize {
        /// The blob.
        digest: Digest,
        /// Its length on disk.
        found: u64,
        /// The length on record.
        expected: u64,
    },
    /// A file that is being stored has not the length that was announced.
    #[error("file ends at byte {found}, {expected} expected")]
    FileSize {
        /// Where it ends.
        found: u64,
        /// Where it should.
        expected: u64,
    },
    /// No model of that name.
    #[error("model {name}: not in the store")]
    NoSuchModel {
        /// The name.
        name: String,
    },
}

impl StoreError {
    /// Wraps a failed call: `.map_err(StoreError::io("read", path))`.
    pub fn io(action: &'static str, path: impl Into<Place>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// The same for a call that reports an error number.
    pub fn errno(action: &'static str, path: impl Into<Place>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let wrap = Self::io(action, path);
        move |errno| wrap(errno.into())
    }

    /// The same refusal for more than the step that was refused.
    pub(super) fn needing(mut self, bytes: u64) -> Self {
        if let Self::NoRoom { needed_bytes, .. } | Self::Quota { needed_bytes, .. } = &mut self {
            *needed_bytes = bytes;
        }
        self
    }

    /// Whether the disk or the user's share of it is full.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::Io { source, .. } => is_no_space(source),
            Self::NoRoom { .. } | Self::Quota { .. } => true,
            _ => false,
        }
    }
}

/// Why an open file is not used. It travels in an [`io::Error`] where the seam asks for one.
#[derive(Clone, Debug, thiserror::Error)]
#[error("a {found}, {expected} expected")]
pub(super) struct UnexpectedFile {
    pub(super) found: String,
    pub(super) expected: &'static str,
}

impl UnexpectedFile {
    /// The one that an error is about, if it is.
    pub(super) fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

impl From<UnexpectedFile> for io::Error {
    fn from(unexpected: UnexpectedFile) -> Self {
        Self::new(io::ErrorKind::InvalidInput, unexpected)
    }
}

/// Whether a write failed because the disk or the user's share of it is full.
pub(crate) fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
