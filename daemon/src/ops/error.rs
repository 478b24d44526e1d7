//! What a verb can fail with, and how the client is told.

use blobd_client::protocol::MAX_OPEN_LAYERS;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_registry::{FailureKind, RegistryError};
use blobd_store::StoreError;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::reference::{Reference, ReferenceError};

use crate::intake::IntakeError;
use crate::size::human_bytes;

/// A verb's failure.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum OpError {
    /// The store failed or lacks what was asked for.
    #[error(transparent)]
    Store(#[from] StoreError),
    /// A file was refused or could not be read.
    #[error("{name}: {source}")]
    Intake {
        /// The file, as the user knows it.
        name: String,
        /// Why.
        source: IntakeError,
    },
    /// A registry failed, lied or could not be reached.
    #[error(transparent)]
    Registry(#[from] RegistryError),
    /// What was imported does not make a manifest.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// A stored header does not parse.
    #[error("blob {digest}: damaged: {source}; `blobd verify --repair` replaces it")]
    Damaged {
        /// The header's blob.
        digest: blobd_store_format::digest::Digest,
        /// What is wrong with it.
        source: blobd_store_format::file_format::FormatError,
    },
    /// A name to be given says which manifest it stands for.
    #[error("{name}: a name that is given cannot be pinned to a digest; leave out the part from @ on")]
    PinnedTarget {
        /// The name.
        name: String,
    },
    /// The model is pinned, and a removal is no slip of the finger then.
    #[error("model {name}: is pinned; `blobd unpin {name}` first")]
    Pinned {
        /// The model.
        name: String,
    },
    /// There is no such model in the trash.
    #[error("model {name}: not in the trash; `blobd ls --trash` lists what is")]
    NotInTrash {
        /// The name.
        name: String,
    },
    /// Another model has the name by now.
    #[error("model {name}: there is another model of this name; `blobd tag` it or remove it first")]
    NameTaken {
        /// The name.
        name: String,
    },
    /// A name cannot be made from a file's.
    #[error("{file_name}: makes no model name ({source}); give one with --name")]
    Name {
        /// The file's name.
        file_name: String,
        /// What is wrong with it.
        source: ReferenceError,
    },
    /// The caller passed something that is no file.
    #[error("{name}: {found}, a regular file expected")]
    NotAFile {
        /// Its name.
        name: String,
        /// What it is.
        found: &'static str,
    },
    /// The file was written to while it was read.
    #[error("{name}: changed while it was imported; import it again when nothing writes to it")]
    Changed {
        /// Its name.
        name: String,
    },
    /// The files of a sharded model are not its shards.
    #[error("model {model}: {what}; its publisher has to mend that")]
    Shards {
        /// The model.
        model: String,
        /// What is wrong with them.
        what: String,
    },
    /// The address of a file makes no name for a model.
    #[error("{address}: makes no model name ({source}); give one with --name")]
    Address {
        /// The address.
        address: String,
        /// What is wrong with it.
        source: ReferenceError,
    },
    /// The bytes that came are not the ones that were named.
    #[error("{what}: digest {found}, {expected} expected")]
    DigestMismatch {
        /// The file.
        what: String,
        /// The digest of what came.
        found: blobd_store_format::digest::Digest,
        /// The digest that was named.
        expected: blobd_store_format::digest::Digest,
    },
    /// A transfer has ended before the file was whole.
    #[error("{name}: {source}")]
    Interrupted {
        /// The file.
        name: String,
        /// Why.
        source: Box<crate::transfer::TransferError>,
    },
    /// The model lacks something that was asked for.
    #[error("model {model}: no {what}")]
    NotInModel {
        /// The model.
        model: String,
        /// What was asked for.
        what: String,
    },
    /// What was asked for of the model is damaged, as a verification has found.
    #[error("model {model}: damaged: {parts}")]
    DamagedParts {
        /// The model.
        model: String,
        /// The first few parts.
        parts: String,
    },
    /// The model has more layers than one answer can list.
    #[error(
        "model {model}: {count} layers, at most {MAX_OPEN_LAYERS} can be opened at once; name a component"
    )]
    TooManyLayers {
        /// The model.
        model: String,
        /// How many layers were asked for.
        count: usize,
    },
    /// A pull does not fit.
    #[error("{source}")]
    NoSpaceForPull {
        /// What does not fit, and where.
        source: Box<OpError>,
        /// What a collection would free, if that is known without a look at the disk.
        reclaimable_bytes: Option<u64>,
    },
    /// The daemon itself failed: the task that did the work died.
    #[error("internal error: {0}")]
    Internal(String),
}

impl OpError {
    /// The failure as it travels.
    #[must_use]
    pub fn body(&self) -> ErrorBody {
        let body = ErrorBody::new(self.code(), self);
        match self.hint() {
            Some(hint) => body.with_hint(hint),
            None => body,
        }
    }

    /// The peer's fault or ours, and which.
    pub(super) fn code(&self) -> ErrorCode {
        match self {
            Self::Store(error) | Self::Intake { source: IntakeError::Store(error), .. } => store_code(error),
            Self::Intake { source: IntakeError::Source(error), .. } => match registry_error(error) {
                Some(error) => registry_code(error),
                None => ErrorCode::Internal,
            },
            Self::Intake { .. } | Self::Manifest(_) | Self::Changed { .. } | Self::Shards { .. } => {
                ErrorCode::InvalidInput
            }
            Self::Registry(error) => registry_code(error),
            Self::Name { .. }
            | Self::Address { .. }
            | Self::NotAFile { .. }
            | Self::PinnedTarget { .. }
            | Self::TooManyLayers { .. } => ErrorCode::InvalidRequest,
            Self::Damaged { .. } | Self::DamagedParts { .. } => ErrorCode::Corrupt,
            Self::DigestMismatch { .. } | Self::Interrupted { .. } => ErrorCode::Upstream,
            Self::NotInModel { .. } | Self::NotInTrash { .. } => ErrorCode::NotFound,
            Self::Pinned { .. } => ErrorCode::Denied,
            Self::NameTaken { .. } => ErrorCode::Busy,
            Self::NoSpaceForPull { source, .. } => source.code(),
            Self::Internal(_) => ErrorCode::Internal,
        }
    }

    fn is_over_quota(&self) -> bool {
        match self {
            Self::Store(error) | Self::Intake { source: IntakeError::Store(error), .. } => {
                matches!(error, StoreError::Quota { .. })
            }
            Self::NoSpaceForPull { source, .. } => source.is_over_quota(),
            _ => false,
        }
    }

    fn hint(&self) -> Option<String> {
        let hint = match (self, self.code()) {
            (Self::Store(StoreError::IndexBuilding { .. }), _) => {
                "try again in a minute; models can be opened meanwhile"
            }
            (Self::Store(StoreError::Locked { .. }), _) => {
                "one process at a time has a store open: talk to that one, or stop it first"
            }
            (Self::Store(_), ErrorCode::NotFound) => "`blobd ls` lists what there is",
            (Self::NoSpaceForPull { reclaimable_bytes, .. }, _) => {
                return Some(self.room_hint(*reclaimable_bytes));
            }
            (_, ErrorCode::NoSpace) if self.is_over_quota() => {
                "`blobd gc` or `blobd rm` makes room, and so does a larger quota; nothing was kept of this"
            }
            (_, ErrorCode::NoSpace) => "`blobd gc` or `blobd rm` makes room; nothing was kept of this",
            (Self::DigestMismatch { .. }, _) => {
                "what came was thrown away: pull again, and if that ends the same way, the registry or \
                 something on the way changes it"
            }
            (Self::DamagedParts { model, .. }, _) => {
                return Some(format!("`blobd verify --repair {model}` mends it; the rest can be opened"));
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

impl OpError {
    /// What a pull that does not fit can be helped with.
    fn room_hint(&self, reclaimable_bytes: Option<u64>) -> String {
        let way = match reclaimable_bytes {
            None => "`blobd gc --dry-run` shows what could be freed, `blobd rm` frees models".to_owned(),
            Some(0) => "`blobd gc` would free nothing; `blobd rm` frees models".to_owned(),
            Some(bytes) => format!("`blobd gc` frees {}, `blobd rm` more", human_bytes(bytes)),
        };
        let quota = if self.is_over_quota() { ", and a larger quota helps too" } else { "" };
        format!("{way}{quota}; what has arrived is kept for the next pull")
    }
}

fn store_code(error: &StoreError) -> ErrorCode {
    match error {
        error if error.is_no_space() => ErrorCode::NoSpace,
        StoreError::NoSpace { .. } | StoreError::Quota { .. } => ErrorCode::NoSpace,
        StoreError::ReadOnly { .. } => ErrorCode::ReadOnly,
        StoreError::Io { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied => {
            ErrorCode::Denied
        }
        StoreError::Io { .. } => ErrorCode::Internal,
        StoreError::Locked { .. } | StoreError::IndexBuilding { .. } => ErrorCode::Busy,
        StoreError::NoSuchModel { .. } => ErrorCode::NotFound,
        StoreError::NewerFormat { .. } | StoreError::NotAStore { .. } | StoreError::StoreFile { .. } => {
            ErrorCode::InvalidRequest
        }
        StoreError::Manifest { .. }
        | StoreError::UnexpectedFile { .. }
        | StoreError::MissingDirectory { .. }
        | StoreError::Recipe { .. }
        | StoreError::WrongRecipe { .. }
        | StoreError::RecipeSize { .. }
        | StoreError::Incomplete { .. }
        | StoreError::Trash { .. }
        | StoreError::ForeignFile { .. }
        | StoreError::MissingBlob { .. }
        | StoreError::BlobSize { .. }
        | StoreError::FileSize { .. } => ErrorCode::Corrupt,
    }
}

/// Refuses a name with a digest where a name is given, not looked up.
///
/// # Errors
/// [`OpError::PinnedTarget`].
pub(super) fn refuse_pinned(target: &Reference) -> Result<(), OpError> {
    match target.digest() {
        Some(_) => Err(OpError::PinnedTarget { name: target.short() }),
        None => Ok(()),
    }
}

const fn registry_code(error: &RegistryError) -> ErrorCode {
    match error.kind() {
        FailureKind::NotFound => ErrorCode::NotFound,
        FailureKind::Denied => ErrorCode::Denied,
        FailureKind::UnusableModel => ErrorCode::InvalidInput,
        FailureKind::InvalidRequest => ErrorCode::InvalidRequest,
        FailureKind::Upstream => ErrorCode::Upstream,
    }
}

/// A pull reads its layers through [`std::io::Read`]; the registry's own error is inside.
fn registry_error(error: &std::io::Error) -> Option<&RegistryError> {
    error.get_ref()?.downcast_ref()
}
