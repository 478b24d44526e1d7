//! The errors of all verbs, and their codes and hints in the protocol.

use blobd_client::protocol::MAX_OPEN_LAYERS;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_registry::{FailureKind, RegistryError};
use blobd_store::{RUN_OUTSIDE, StoreError, StoreOwner};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FormatError;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::model_file::ModelPathError;
use blobd_store_format::recipe::RecipeError;
use blobd_store_format::reference::ReferenceError;
use blobd_store_format::similar_names::did_you_mean;
use blobd_store_format::text::{one_line, quoted};
use rustix::io::Errno;

use crate::ingest::IngestError;
use crate::transfer::{TransferError, TwoCopies};

/// Why a verb failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the errors and their fields are")]
pub enum OpError {
    #[error(transparent)]
    Store(#[from] StoreError),
    #[error("{name}: {source}")]
    Ingest { name: String, source: IngestError },
    #[error("{name}: {reason}")]
    Archive { name: String, reason: String },
    #[error(transparent)]
    Registry(#[from] RegistryError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error("blob {digest}: damaged: {source}; `blobd verify --repair` replaces it")]
    Damaged { digest: Digest, source: FormatError },
    #[error("{name}: a new name cannot include a digest; leave out the part from @ on")]
    PinnedTarget { name: String },
    #[error("remove: no model is named; give names, patterns, older_than_seconds or unused")]
    NothingToRemove,
    #[error("model {name}: is pinned; run `blobd unpin {name}` first")]
    Pinned { name: String },
    #[error("model {name}: was changed by another command meanwhile; run this one again")]
    ChangedMeanwhile { name: String },
    #[error("model {name}: not in the trash; `blobd ls --trash` lists the models there")]
    NotInTrash { name: String },
    #[error("{}: no change is recorded that can be taken back", name.as_ref().map_or_else(|| "undo".to_owned(), |name| format!("model {name}")))]
    NothingToUndo { name: Option<String> },
    #[error("undo: there is a newer change now, by `{verb}`; nothing was taken back")]
    NewerChange { verb: &'static str },
    #[error(
        "model {name}: its newest change (`{verb}`) was made by another user: expected uid {by}, found uid {uid}"
    )]
    ChangeOfAnother { name: String, verb: &'static str, uid: u32, by: u32 },
    #[error("model {name}: `{verb}` cannot be taken back: the name was changed since: {since}")]
    ChangedSince { name: String, verb: &'static str, since: String },
    #[error("model {name}: its earlier version {} is no longer stored", digest.short())]
    EarlierVersionGone { name: String, digest: Digest, advice: String },
    /// A request has changed several names, and not all of them can be changed back.
    #[error("{source}")]
    CannotUndo { source: Box<OpError>, impossible: usize, possible: Vec<String> },
    #[error("model {model}: {reason}")]
    Edit { model: String, reason: String },
    #[error("model {model}: cannot be pushed: {reason}")]
    NotPushable { model: String, reason: String },
    #[error("{subject}: {reason}")]
    Signature { subject: String, reason: String, hint: &'static str },
    #[error("model {model}: {reason}")]
    NotEditable { model: String, reason: &'static str },
    #[error(
        "model {model}: wrong digest of its weights: expected {expected}, found {found}; \
         `blobd verify --repair {model}` repairs them"
    )]
    DamagedFile { model: String, found: Digest, expected: Digest },
    #[error(transparent)]
    Recipe(#[from] RecipeError),
    #[error("{name}: wrong kind of file: expected {expected}, found {found}")]
    NotAFile { name: String, expected: &'static str, found: &'static str },
    #[error("{name}: wrong kind of descriptor: expected one that is open for reading, found {found}")]
    NotReadable { name: String, found: &'static str },
    #[error("model {model}: {what}; {advice}")]
    Shards { model: String, what: String, advice: &'static str },
    #[error(transparent)]
    ModelPath(#[from] ModelPathError),
    #[error("files: lists the files of the model; expected no sidecars beside them")]
    FilesAndSidecars,
    #[error(
        "files: not those of the manifest: expected {expected} files of the sizes in it, in its order, found {found}{}",
        if expected == found { " of other sizes" } else { "" }
    )]
    NotOfManifest { expected: usize, found: usize },
    #[error("{from}: no model name can be derived from it ({source}); give one with --name")]
    Name { from: String, source: ReferenceError },
    /// A file had a wrong digest, and again when it was downloaded a second time.
    #[error("{what}: {copies}")]
    DigestMismatch { what: String, copies: Box<TwoCopies> },
    /// A file that was not stored.
    #[error("{name}: wrong digest: expected {expected}, found {found}, received from {sender}")]
    WrongFile { name: String, sender: String, found: Digest, expected: Digest },
    #[error("{name}: {source}")]
    Interrupted { name: String, source: Box<TransferError> },
    #[error("model {model}: no {what}")]
    NotInModel { model: String, what: String },
    #[error("model {model}: damaged: {parts}")]
    DamagedParts { model: String, parts: String },
    #[error(
        "model {model}: {count} layers, at most {MAX_OPEN_LAYERS} can be opened at once; name a component"
    )]
    TooManyLayers { model: String, count: usize },
    #[error("{name}: {source}")]
    NoMemory { name: String, source: Box<TransferError> },
    #[error("{source}")]
    NoSpace { source: Box<OpError>, hint: String },
    #[error("{target}: no unfinished download has this name or ID")]
    NoSuchDownload { target: String },
    #[error("download of {name}: a pull uses it")]
    DownloadInUse { name: String },
    #[error("download of {name}: of {}, only an administrator may drop it", uid.map_or_else(|| "an unknown user".to_owned(), |uid| format!("uid {uid}")))]
    DownloadOfAnother { name: String, uid: Option<u32> },
    /// A rule of the policy denies it, before bytes move.
    #[error("{message}")]
    DeniedByPolicy { message: String, hint: String },
    #[error("internal error: {0}")]
    Internal(String),
}

const WRONG_FILE_HINT: &str = "something changes data on its way, or the source has a damaged file: the model was not published; `blobd pull` finds out \
     which bytes differ";

impl OpError {
    /// The error as the protocol sends it.
    pub fn body(&self) -> ErrorBody {
        let body = ErrorBody::new(self.code(), self);
        match self.hint() {
            Some(hint) => body.with_hint(hint),
            None => body,
        }
    }

    pub(super) fn code(&self) -> ErrorCode {
        match self {
            Self::Store(error) | Self::Ingest { source: IngestError::Store(error), .. } => store_code(error),
            Self::Ingest { source, .. } if source.is_unreadable_file() => ErrorCode::InvalidInput,
            Self::Ingest { source: IngestError::Source(error), .. } => match registry_error(error) {
                Some(error) => registry_code(error),
                None => ErrorCode::Internal,
            },
            Self::Ingest { .. }
            | Self::Archive { .. }
            | Self::Manifest(_)
            | Self::Recipe(_)
            | Self::Shards { .. }
            | Self::Signature { .. }
            | Self::NotEditable { .. } => ErrorCode::InvalidInput,
            Self::Registry(error) => registry_code(error),
            Self::Name { .. }
            | Self::Edit { .. }
            | Self::NotAFile { .. }
            | Self::NotReadable { .. }
            | Self::PinnedTarget { .. }
            | Self::NotPushable { .. }
            | Self::NothingToRemove
            | Self::ModelPath(_)
            | Self::FilesAndSidecars
            | Self::NotOfManifest { .. }
            | Self::TooManyLayers { .. } => ErrorCode::InvalidRequest,
            Self::Damaged { .. } | Self::DamagedParts { .. } | Self::DamagedFile { .. } => ErrorCode::Corrupt,
            Self::DigestMismatch { .. } | Self::WrongFile { .. } | Self::Interrupted { .. } => {
                ErrorCode::Upstream
            }
            Self::NotInModel { .. }
            | Self::NotInTrash { .. }
            | Self::NothingToUndo { .. }
            | Self::EarlierVersionGone { .. }
            | Self::NoSuchDownload { .. } => ErrorCode::NotFound,
            Self::Pinned { .. } | Self::ChangeOfAnother { .. } | Self::DownloadOfAnother { .. } => {
                ErrorCode::Denied
            }
            Self::ChangedMeanwhile { .. }
            | Self::NewerChange { .. }
            | Self::ChangedSince { .. }
            | Self::DownloadInUse { .. }
            | Self::NoMemory { .. } => ErrorCode::Busy,
            Self::NoSpace { source, .. } | Self::CannotUndo { source, .. } => source.code(),
            Self::DeniedByPolicy { .. } => ErrorCode::DeniedByPolicy,
            Self::Internal(_) => ErrorCode::Internal,
        }
    }

    pub(super) fn is_over_quota(&self) -> bool {
        match self {
            Self::Store(error) | Self::Ingest { source: IngestError::Store(error), .. } => {
                matches!(error, StoreError::Quota { .. })
            }
            Self::NoSpace { source, .. } => source.is_over_quota(),
            _ => false,
        }
    }

    fn hint(&self) -> Option<String> {
        if let Self::Store(error) = self
            && let Some(hint) = store_hint(error)
        {
            return Some(hint);
        }
        let hint = match (self, self.code()) {
            (Self::Registry(error), _) => return error.hint(),
            (Self::DeniedByPolicy { hint, .. } | Self::NoSpace { hint, .. }, _) => return Some(hint.clone()),
            (Self::Signature { hint, .. }, _) => hint,
            (Self::EarlierVersionGone { advice, .. }, _) => {
                return Some(format!(
                    "{advice}; `blobd undo NAME` takes back the newest change of another name"
                ));
            }
            (Self::CannotUndo { source, impossible, possible }, _) => {
                return Some(partial_undo(source.hint(), *impossible, possible));
            }
            (Self::NothingToUndo { name: None }, _) => {
                "`blobd undo NAME` takes back the newest change of a name, and `blobd history NAME` shows its changes"
            }
            (Self::NothingToUndo { .. }, _) => "`blobd history NAME` shows what a name has meant",
            (Self::ChangeOfAnother { .. }, _) => "ask that user or an administrator",
            (Self::ChangedSince { .. }, _) => {
                "`blobd history NAME` shows what a name has meant; `blobd undo NAME` takes back the newest change of a name"
            }
            (Self::Store(_), ErrorCode::NotFound) => "`blobd ls` lists the models",
            (_, ErrorCode::NoSpace) if self.is_over_quota() => {
                "`blobd gc`, `blobd rm` or a larger quota provides space; nothing was stored"
            }
            (_, ErrorCode::OverQuota) => {
                "`blobd df --users` shows what is charged; `blobd rm` of models that you have added lowers it, and an \
                 administrator can set a larger quota in [quotas] of the daemon's configuration"
            }
            (_, ErrorCode::NoSpace) => "`blobd gc` or `blobd rm` frees space; nothing was stored",
            (Self::Ingest { source, .. }, ErrorCode::InvalidInput) => source.advice()?,
            (Self::NotAFile { found: "a directory", .. }, _) => {
                "name the files in it: `import` takes several"
            }
            (Self::NotReadable { .. }, _) => {
                "open the file with O_RDONLY and without O_PATH and O_DIRECT, and pass that descriptor"
            }
            (Self::NotAFile { .. }, _) => "write its content to a file first, and import that",
            (Self::NoSuchDownload { .. }, _) => "`blobd partial ls` lists them",
            (Self::DownloadInUse { .. }, _) => "wait for the pull, or stop it first",
            (Self::DownloadOfAnother { .. }, _) => {
                "administrators may: access.admin in the daemon's configuration names them"
            }
            (Self::DigestMismatch { copies, .. }, _) if copies.are_equal() => {
                "the file at its source does not have the digest that the registry gives for it, which only its \
                 publisher can correct, or a proxy or mirror keeps a damaged copy; the received data was deleted"
            }
            (Self::DigestMismatch { .. }, _) => {
                "something changes data on its way: pull again over another network, proxy or mirror, and if that \
                 does not help test this machine's memory; the received data was deleted"
            }
            (Self::WrongFile { .. }, _) => WRONG_FILE_HINT,
            (Self::Interrupted { source, .. }, _) if source.is_wrong_content() => {
                "a proxy or mirror keeps another version, or only its publisher can correct it: the next pull downloads \
                 this file again"
            }
            (Self::DamagedParts { model, .. }, _) => {
                return Some(format!(
                    "`blobd verify --repair {model}` repairs it; the other parts can be opened"
                ));
            }
            _ => return None,
        };
        Some(hint.to_owned())
    }
}

/// The hint for a change of several names that cannot be taken back as a whole.
fn partial_undo(hint: Option<String>, impossible: usize, possible: &[String]) -> String {
    const WIDTH: usize = 60;
    let hint = hint.map_or_else(String::new, |hint| format!("{hint}; "));
    let refused = match impossible {
        0 | 1 => "nothing was changed".to_owned(),
        count => format!("{count} names cannot be changed back, and nothing was changed"),
    };
    match possible {
        [] => hint + &refused,
        [only] => format!("{hint}{refused}; `blobd undo {only}` takes back the change of that name"),
        several => {
            let names = one_line(several, WIDTH);
            format!("{hint}{refused}; `blobd undo NAME` takes back the change of one name: {names}")
        }
    }
}

/// The hint for an error of the store, if it does not depend on the verb.
fn store_hint(error: &StoreError) -> Option<String> {
    let hint = match error {
        StoreError::IndexBuilding { .. } => "try again in a minute; models can be opened meanwhile",
        StoreError::Locked { .. } => {
            "only one process at a time can have a store open: connect to that one, or stop it first"
        }
        StoreError::Pinned { name } => {
            return Some(format!(
                "give another name; or, as an administrator, replace it with --force, which keeps the pin, or end the \
                 protection with `blobd unpin {name}`"
            ));
        }
        StoreError::NameTaken { .. } => "give another name, or replace that model with --force",
        StoreError::NameOfAnother { .. } => "ask that user or an administrator, or use a name of your own",
        StoreError::PinOfAnother { .. } => "ask an administrator to unpin it",
        StoreError::NoSuchModel { similar, .. } => return did_you_mean(similar),
        StoreError::MayBeHidden { similar, store, .. } => {
            let similar = did_you_mean(similar).map_or_else(String::new, |similar| format!("; {similar}"));
            return Some(format!(
                "it may be in the lower store {}, which is not available: make it available again, such as by \
                 mounting its file system{similar}",
                store.display()
            ));
        }
        StoreError::Hidden { .. } => {
            "make the lower store available again, such as by mounting its file system; nothing of the model is lost"
        }
        StoreError::InLowerStore { name, .. } => {
            return Some(format!(
                "`blobd promote {name}` or `blobd tag {name} NEW` gives this store a name of its own for it"
            ));
        }
        StoreError::OfAnother { root, owner } => {
            let StoreOwner { uid, gid } = StoreOwner::for_process();
            if !owner.is_mapped() {
                return Some(RUN_OUTSIDE.to_owned());
            }
            let command = owner.command("blobd …");
            if uid == 0 {
                return Some(format!(
                    "its file system does not let root read other users' files, as NFS with root_squash, or this \
                     process lacks the capabilities of root: run blobd as the store's owner: {command}"
                ));
            }
            return Some(format!(
                "run blobd as the store's owner: {command}; or, if uid {uid} is to own it: sudo chown -R --no-dereference \
                 {uid}:{gid} {}",
                quoted(&root.display().to_string())
            ));
        }
        error if matches!(error, StoreError::WrongOwner { .. }) || is_permission_denied(error) => {
            "`blobd doctor` finds files of other users, and prints the command that gives them to the store's owner"
        }
        StoreError::Io { source, .. } if is_broken(source) => {
            "the disk or its file system has failed: see `dmesg`; then stop the daemon, unmount the file system, check it, \
             such as with `fsck` or `xfs_repair`, and mount it again"
        }
        StoreError::NoSafeRename { .. } => {
            "move the store to a file system that has one of them, such as ext4, xfs or btrfs"
        }
        StoreError::Manifest { .. } => {
            "nothing is deleted until it can be read: pull or import this model again, or `blobd rm` it"
        }
        _ => return None,
    };
    Some(hint.to_owned())
}

/// Whether the file system reports that it can no longer be used, as after an error of its disk.
fn is_broken(error: &std::io::Error) -> bool {
    let errno = Errno::from_io_error(error);
    matches!(errno, Some(Errno::IO | Errno::UCLEAN | Errno::SHUTDOWN | Errno::NODEV))
}

fn is_permission_denied(error: &StoreError) -> bool {
    matches!(error, StoreError::Io { source, .. } if source.kind() == std::io::ErrorKind::PermissionDenied)
}

fn store_code(error: &StoreError) -> ErrorCode {
    match error {
        error if error.is_no_space() => ErrorCode::NoSpace,
        StoreError::NoSpace { .. } | StoreError::NoInodes { .. } | StoreError::Quota { .. } => {
            ErrorCode::NoSpace
        }
        StoreError::OverQuota { .. } => ErrorCode::OverQuota,
        StoreError::ReadOnly { .. } => ErrorCode::ReadOnly,
        error if is_permission_denied(error) => ErrorCode::Denied,
        StoreError::Io { .. } | StoreError::NoSafeRename { .. } => ErrorCode::Internal,
        StoreError::Locked { .. } | StoreError::IndexBuilding { .. } | StoreError::NameTaken { .. } => {
            ErrorCode::Busy
        }
        StoreError::NoSuchModel { .. } | StoreError::MayBeHidden { .. } | StoreError::Hidden { .. } => {
            ErrorCode::NotFound
        }
        StoreError::Pinned { .. }
        | StoreError::NameOfAnother { .. }
        | StoreError::PinOfAnother { .. }
        | StoreError::InLowerStore { .. }
        | StoreError::WrongOwner { .. }
        | StoreError::OfAnother { .. } => ErrorCode::Denied,
        StoreError::NewerFormat { .. }
        | StoreError::NotAStore { .. }
        | StoreError::AmbiguousId { .. }
        | StoreError::TooManySignatures { .. } => ErrorCode::InvalidRequest,
        StoreError::Manifest { .. }
        | StoreError::UnexpectedFile { .. }
        | StoreError::MissingDirectory { .. }
        | StoreError::Recipe { .. }
        | StoreError::RecipeSize { .. }
        | StoreError::Incomplete { .. }
        | StoreError::Trash { .. }
        | StoreError::ForeignFile { .. }
        | StoreError::MissingBlob { .. }
        | StoreError::BlobSize { .. }
        | StoreError::BlobDiffers { .. }
        | StoreError::DamagedBlob { .. }
        | StoreError::FileSize { .. } => ErrorCode::Corrupt,
    }
}

fn registry_code(error: &RegistryError) -> ErrorCode {
    match error.kind() {
        FailureKind::NotFound => ErrorCode::NotFound,
        FailureKind::Denied => ErrorCode::Denied,
        FailureKind::UnusableModel => ErrorCode::InvalidInput,
        FailureKind::InvalidRequest => ErrorCode::InvalidRequest,
        FailureKind::Upstream => ErrorCode::Upstream,
    }
}

/// The registry's error inside an [`std::io::Error`], as a pull's reader returns it.
fn registry_error(error: &std::io::Error) -> Option<&RegistryError> {
    error.get_ref()?.downcast_ref()
}
