//! Errors of the store.

use std::io;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::reference::Reference;
use blobd_store_format::similar_names::not_in_the_store;
use blobd_store_format::size::human_bytes;

use crate::lock_file::LockHolder;
use crate::owner::StoreOwner;
use crate::place::Place;

/// A failure of the store.
#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    /// A system call failed.
    #[error("{}: cannot {action}: {source}", path.display())]
    Io {
        /// The failed operation.
        action: &'static str,
        /// Its file.
        path: Place,
        /// The error that the system reported.
        source: io::Error,
    },
    /// The file system has too little free space.
    #[error(
        "store {}: {} needed, {} available on the disk{}",
        root.display(),
        human_bytes(*needed_bytes),
        human_bytes(*available_bytes),
        why_less_is_available(*free_bytes, *available_bytes, *min_free_bytes)
    )]
    NoSpace {
        /// The store.
        root: Place,
        /// The bytes requested.
        needed_bytes: u64,
        /// The bytes that the store may still take.
        available_bytes: u64,
        /// The free bytes of the file system.
        free_bytes: u64,
        /// The bytes of the file system that the store leaves free.
        min_free_bytes: u64,
    },
    /// The file system has no space for the names of more files.
    #[error("{}: cannot {action}: the file system has no inodes left, so it can have no more files", path.display())]
    NoInodes {
        /// The failed operation.
        action: &'static str,
        /// Its file.
        path: Place,
    },
    /// The store's quota has too little space left.
    #[error(
        "store {}: its quota is {}",
        root.display(),
        too_little_left(*quota_bytes, *used_bytes, *needed_bytes)
    )]
    Quota {
        /// The store.
        root: Place,
        /// The bytes requested.
        needed_bytes: u64,
        /// The bytes that the store uses already.
        used_bytes: u64,
        /// The most bytes that it may use.
        quota_bytes: u64,
    },
    /// The quota of a user or of a group has too little space left.
    #[error(
        "{} is {}",
        group.as_ref().map_or_else(|| "your quota".to_owned(), |group| format!("the quota of group {group}")),
        too_little_left(*limit_bytes, *used_bytes, *needed_bytes)
    )]
    OverQuota {
        /// The user whom the bytes would be charged to.
        uid: u32,
        /// The group whose members have too little left together; `None` if that is the user's own quota.
        group: Option<String>,
        /// The bytes requested.
        needed_bytes: u64,
        /// The bytes that are charged to the user or the group, with those of transactions in progress.
        used_bytes: u64,
        /// The most bytes that may be charged to the user or the group.
        limit_bytes: u64,
    },
    /// A sync has failed, so it is unknown which writes are durable; or the store could not be opened
    /// for writing.
    #[error("store is read-only: {reason}")]
    ReadOnly {
        /// The cause.
        reason: String,
    },
    /// Another process has the store open.
    #[error("store {}: held by {holder}", root.display())]
    Locked {
        /// The store.
        root: Place,
        /// The other process.
        holder: Box<LockHolder>,
    },
    /// A newer blobd wrote the store.
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
        /// The newest supported format.
        supported: u32,
    },
    /// The index is not built yet.
    #[error("store {}: its index is still being built", root.display())]
    IndexBuilding {
        /// The store.
        root: Place,
    },
    /// The directory has files but no `store.json`, or that cannot be parsed.
    #[error("store {}: {what}", root.display())]
    NotAStore {
        /// The directory.
        root: Place,
        /// The fault in it.
        what: String,
    },
    /// A manifest is damaged.
    #[error("{}: {source}", path.display())]
    Manifest {
        /// The file.
        path: Place,
        /// The fault in it.
        source: ManifestError,
    },
    /// A recipe is damaged, or has another file's name.
    #[error("{}: {what}", path.display())]
    Recipe {
        /// The file.
        path: Place,
        /// The fault in it.
        what: String,
    },
    /// A recipe rebuilds a file of another size than the manifest says.
    #[error(
        "{}: wrong size of the file that it rebuilds: expected {expected} bytes as in the manifest, found {found}; pull or \
         import the model again",
        path.display()
    )]
    RecipeSize {
        /// The recipe's place.
        path: Place,
        /// The size that it rebuilds, in bytes.
        found: u64,
        /// The size in the manifest, in bytes.
        expected: u64,
    },
    /// A tag's manifest lists a file that is missing.
    #[error("model {name}: file {digest} is missing; pull or import the model again, or remove it")]
    Incomplete {
        /// The model.
        name: String,
        /// The file.
        digest: Digest,
    },
    /// A file in the store belongs to another user than the store.
    #[error("{}: belongs to uid {uid}, the store to uid {}", path.display(), owner.uid)]
    WrongOwner {
        /// The file.
        path: Place,
        /// The file's owner.
        uid: u32,
        /// The store's owner.
        owner: StoreOwner,
    },
    /// The store belongs to another user, and this process may not enter its directory.
    #[error("store {}: belongs to {}; uid {} may not read it", root.display(), owner.description(), own_uid())]
    OfAnother {
        /// The store.
        root: Place,
        /// The owner of its directory.
        owner: StoreOwner,
    },
    /// The file system cannot give a file a name without replacing another one.
    #[error("{}: {NoSafeRename}", path.display())]
    NoSafeRename {
        /// The file that was to be renamed, or the store.
        path: Place,
    },
    /// A file in the store has the wrong type or another name too.
    #[error("{}: wrong type: expected a {expected}, found a {found}; move it out of the store", path.display())]
    UnexpectedFile {
        /// The file.
        path: Place,
        /// Its type.
        found: String,
        /// The expected type.
        expected: &'static str,
    },
    /// A directory is missing without which it is unknown what tags need.
    #[error("{}: missing; put it back, or make an empty one if what was in it is to be given up", path.display())]
    MissingDirectory {
        /// The directory.
        path: Place,
    },
    /// A file below `manifests/` or in `trash/` that blobd did not create.
    #[error("{}: not a file of blobd's, and nothing is collected while it is there; move it out of the store", path.display())]
    ForeignFile {
        /// The file.
        path: Place,
    },
    /// A record in the trash is damaged, so it is unknown what it protects.
    #[error("{}: damaged record of a model in the trash: {what}; move it out of the store", path.display())]
    Trash {
        /// The file.
        path: Place,
        /// The fault in it.
        what: String,
    },
    /// A blob that a model needs is missing.
    #[error("blob {digest}: missing; pull or import the model again")]
    MissingBlob {
        /// The blob.
        digest: Digest,
    },
    /// A blob has not the recorded length.
    #[error(
        "blob {digest}: wrong size: expected {expected} bytes, found {found}; pull or import the model again"
    )]
    BlobSize {
        /// The blob.
        digest: Digest,
        /// Its length on disk.
        found: u64,
        /// The recorded length.
        expected: u64,
    },
    /// The bytes of a blob have another digest.
    #[error(
        "blob {digest}: its bytes have the digest {found}; run `blobd verify` in the store that it is in"
    )]
    DamagedBlob {
        /// The blob.
        digest: Digest,
        /// The digest of its bytes.
        found: Digest,
    },
    /// Bytes that are being stored differ from the stored blob that they were found to be.
    #[error("blob {digest}: differs from the file that is being stored")]
    BlobDiffers {
        /// The blob.
        digest: Digest,
    },
    /// A file that is being stored has not the announced length.
    #[error("file: wrong size: expected {expected} bytes, found {found}")]
    FileSize {
        /// Its length.
        found: u64,
        /// The announced length.
        expected: u64,
    },
    /// Another model has the name, and is pinned.
    #[error("model {name}: is pinned, so the name is not given to another model")]
    Pinned {
        /// The name.
        name: String,
    },
    /// Another model has the name.
    #[error("model {name}: exists already with other content: ID {}{}", digest.short(), from(origin.as_deref()))]
    NameTaken {
        /// The name.
        name: String,
        /// The manifest that it has.
        digest: Digest,
        /// Where that came from, if known.
        origin: Option<String>,
    },
    /// Another user has added the name.
    #[error("model {name}: {}, found uid {by}", adder_expected(*adder))]
    NameOfAnother {
        /// The name.
        name: String,
        /// The user who has added it; `None` if that is not recorded.
        adder: Option<u32>,
        /// The user who may not change it.
        by: u32,
    },
    /// An administrator has pinned the name, or a user who had it before.
    #[error("model {name}: was pinned by another user: expected an administrator, found uid {by}")]
    PinOfAnother {
        /// The name.
        name: String,
        /// The user who may not change it.
        by: u32,
    },
    /// No model has that name.
    #[error("{}", not_in_the_store(name))]
    NoSuchModel {
        /// The name.
        name: String,
        /// Names of stored models that may have been meant.
        similar: Vec<String>,
    },
    /// No model has that name, but it may be in a lower store which cannot be used now.
    #[error("model {name}: not in the store, and the lower store {} is left out: {problem}", store.display())]
    MayBeHidden {
        /// The name.
        name: String,
        /// Names of stored models that may have been meant.
        similar: Vec<String>,
        /// The lower store.
        store: Place,
        /// Why it cannot be used.
        problem: String,
    },
    /// A blob is missing that may be in a lower store which cannot be used now.
    #[error("blob {digest}: not in this store, and a lower store is left out: {problem}")]
    Hidden {
        /// The blob.
        digest: Digest,
        /// Why the lower store cannot be used.
        problem: String,
    },
    /// The model is in a lower store, which is never changed.
    #[error("model {name}: in the lower store {}, which is read-only; its administrator can change it there", store.display())]
    InLowerStore {
        /// The model.
        name: String,
        /// The lower store.
        store: Place,
    },
    /// Several models have an ID that begins with these digits, or several names belong to it.
    #[error("ID {id}: means several models: {}; give more digits or a name", names.join(", "))]
    AmbiguousId {
        /// The digits.
        id: String,
        /// The models' names and IDs.
        names: Vec<String>,
    },
}

impl StoreError {
    pub(crate) fn no_such_model(reference: &Reference) -> Self {
        Self::NoSuchModel { name: reference.short(), similar: Vec::new() }
    }

    /// Whether no model has the name that was looked up.
    #[must_use]
    pub const fn is_no_such_model(&self) -> bool {
        matches!(self, Self::NoSuchModel { .. } | Self::MayBeHidden { .. })
    }

    pub(crate) fn wrong_recipe(path: Place, found: Digest) -> Self {
        Self::Recipe { path, what: format!("is the recipe of {found}; pull or import the model again") }
    }

    /// Wraps a failed call: `.map_err(StoreError::io("read", path))`.
    pub fn io(action: &'static str, path: impl Into<Place>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// Like [`Self::io`] for a call that reports an error number.
    pub fn errno(action: &'static str, path: impl Into<Place>) -> impl FnOnce(rustix::io::Errno) -> Self {
        let wrap = Self::io(action, path);
        move |errno| wrap(errno.into())
    }

    /// Sets the bytes needed, which may be more than the failed step needed.
    pub(super) fn needing(mut self, bytes: u64) -> Self {
        if let Self::NoSpace { needed_bytes, .. } | Self::Quota { needed_bytes, .. } = &mut self {
            *needed_bytes = bytes;
        }
        self
    }

    /// Whether the disk or a quota is full.
    #[must_use]
    pub fn is_no_space(&self) -> bool {
        match self {
            Self::Io { source, .. } => is_no_space(source),
            Self::NoSpace { .. } | Self::NoInodes { .. } | Self::Quota { .. } => true,
            _ => false,
        }
    }
}

fn from(origin: Option<&str>) -> String {
    origin.map_or_else(String::new, |origin| {
        // The digest of the model that was edited says nothing to people.
        let shown = origin.split_once('@').filter(|(name, _)| name.starts_with("edit "));
        format!(", from {}", shown.map_or(origin, |(name, _)| name))
    })
}

fn too_little_left(limit_bytes: u64, used_bytes: u64, needed_bytes: u64) -> String {
    let left_bytes = limit_bytes.saturating_sub(used_bytes);
    let [limit, used, needed, left] = [limit_bytes, used_bytes, needed_bytes, left_bytes].map(human_bytes);
    format!("{limit} and {used} are used; this needs {needed}, {left} are left")
}

fn adder_expected(adder: Option<u32>) -> String {
    match adder {
        Some(adder) => format!("was added by another user: expected uid {adder} or an administrator"),
        None => "has no record of who added it: expected an administrator".to_owned(),
    }
}

/// Explains why fewer bytes are available than the file system has free.
fn why_less_is_available(free_bytes: u64, available_bytes: u64, min_free_bytes: u64) -> String {
    let free = human_bytes(free_bytes);
    let kept = human_bytes(min_free_bytes);
    let taken = free_bytes.saturating_sub(min_free_bytes).saturating_sub(available_bytes);
    match (min_free_bytes, taken) {
        (0, 0) => String::new(),
        (_, 0) => format!(": {free} free, {kept} of it kept free by min_free"),
        (_, taken) => {
            let taken = human_bytes(taken);
            format!(
                ": {free} free, {kept} of it kept free by min_free, {taken} promised to imports and pulls"
            )
        }
    }
}

fn own_uid() -> u32 {
    rustix::process::geteuid().as_raw()
}

/// An open file belongs to another user than the store, as [`UnexpectedFile`].
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error("belongs to uid {uid}, the store to uid {}", owner.uid)]
pub(super) struct WrongOwner {
    pub(super) uid: u32,
    pub(super) owner: StoreOwner,
}

impl From<WrongOwner> for io::Error {
    fn from(wrong: WrongOwner) -> Self {
        Self::new(io::ErrorKind::PermissionDenied, wrong)
    }
}

/// As [`UnexpectedFile`].
#[derive(Clone, Copy, Debug, thiserror::Error)]
#[error(
    "this file system has neither renames that replace nothing (RENAME_NOREPLACE) nor hard links, and a store \
         needs one of them"
)]
pub(super) struct NoSafeRename;

impl From<NoSafeRename> for io::Error {
    fn from(missing: NoSafeRename) -> Self {
        Self::new(io::ErrorKind::Unsupported, missing)
    }
}

/// An open file has the wrong type or number of names. [`Disk`](crate::disk::Disk) returns it inside
/// an [`io::Error`].
#[derive(Clone, Debug, thiserror::Error)]
#[error("wrong type: expected a {expected}, found a {found}")]
pub(super) struct UnexpectedFile {
    pub(super) found: String,
    pub(super) expected: &'static str,
}

impl UnexpectedFile {
    pub(super) fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }
}

impl From<UnexpectedFile> for io::Error {
    fn from(unexpected: UnexpectedFile) -> Self {
        Self::new(io::ErrorKind::InvalidInput, unexpected)
    }
}

/// Whether a write failed because the disk or a quota is full.
pub(crate) fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}
