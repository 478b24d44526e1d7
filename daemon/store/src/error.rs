//! Errors of the store, and the paths that they name.

use std::io;
use std::path::{Display, Path, PathBuf};

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::reference::Reference;
use blobd_store_format::similar_names::not_in_the_store;
use blobd_store_format::size::{self, human_bytes, limit_bytes};
use serde::Serialize;

use crate::lock_file::LockHolder;
use crate::owner::StoreOwner;

#[derive(Debug, thiserror::Error)]
pub enum StoreError {
    #[error("{}: cannot {action}: {source}", path.display())]
    Io { action: &'static str, path: DisplayPath, source: io::Error },
    #[error(
        "store {}: {} needed, {} available on the disk{}",
        root.display(),
        human_bytes(*needed_bytes),
        human_bytes(*available_bytes),
        why_less_is_available(*free_bytes, *available_bytes, *min_free_bytes)
    )]
    NoSpace {
        root: DisplayPath,
        needed_bytes: u64,
        /// The bytes that the store may still take.
        available_bytes: u64,
        free_bytes: u64,
        min_free_bytes: u64,
    },
    #[error("model {manifest}: too many signatures: expected at most {most}, and each is by a trusted key")]
    TooManySignatures { manifest: Digest, most: usize },
    #[error("{}: cannot {action}: the file system has no inodes left, so it can have no more files", path.display())]
    NoInodes { action: &'static str, path: DisplayPath },
    #[error(
        "store {}: its quota is {}",
        root.display(),
        too_little_left(*quota_bytes, *used_bytes, *needed_bytes)
    )]
    Quota { root: DisplayPath, needed_bytes: u64, used_bytes: u64, quota_bytes: u64 },
    #[error(
        "{} is {}",
        group.as_ref().map_or_else(|| "your quota".to_owned(), |group| format!("the quota of group {group}")),
        too_little_left(*limit_bytes, *used_bytes, *needed_bytes)
    )]
    OverQuota {
        uid: u32,
        /// The group whose members have too little left together; `None` if that is the user's own quota.
        group: Option<String>,
        needed_bytes: u64,
        /// The bytes that are charged to the user or the group, with those of transactions in progress.
        used_bytes: u64,
        limit_bytes: u64,
    },
    /// It is unknown which writes are durable, or the store could not be opened for writing.
    #[error("store is read-only: {reason}")]
    ReadOnly { reason: String },
    #[error("store {}: held by {holder}", root.display())]
    Locked { root: DisplayPath, holder: Box<LockHolder> },
    #[error(
        "store {}: format {found} is newer than this blobd supports ({supported}); upgrade blobd or choose \
         another --root",
        root.display()
    )]
    NewerFormat { root: DisplayPath, found: u32, supported: u32 },
    #[error("store {}: its index is still being built", root.display())]
    IndexBuilding { root: DisplayPath },
    #[error("store {}: {what}", root.display())]
    NotAStore { root: DisplayPath, what: String },
    #[error("{}: {source}", path.display())]
    Manifest { path: DisplayPath, source: ManifestError },
    #[error("{}: {what}", path.display())]
    Recipe { path: DisplayPath, what: String },
    #[error(
        "{}: wrong size of the file that it rebuilds: expected {expected} bytes as in the manifest, found {found}; pull or \
         import the model again",
        path.display()
    )]
    RecipeSize { path: DisplayPath, found: u64, expected: u64 },
    /// A tag's manifest lists a file that is missing.
    #[error("model {name}: file {digest} is missing; pull or import the model again, or remove it")]
    Incomplete { name: String, digest: Digest },
    #[error("{}: belongs to uid {uid}, the store to uid {}", path.display(), owner.uid)]
    WrongOwner { path: DisplayPath, uid: u32, owner: StoreOwner },
    #[error("store {}: belongs to {}; uid {} may not read it", root.display(), owner.description(), StoreOwner::for_process().uid)]
    OfAnother { root: DisplayPath, owner: StoreOwner },
    #[error("{}: {NO_SAFE_RENAME}", path.display())]
    NoSafeRename { path: DisplayPath },
    #[error("{}: wrong type: expected a {expected}, found a {found}; move it out of the store", path.display())]
    UnexpectedFile { path: DisplayPath, found: String, expected: &'static str },
    /// A directory is missing without which it is unknown what tags need.
    #[error("{}: missing; put it back, or create an empty one if its content can be lost", path.display())]
    MissingDirectory { path: DisplayPath },
    #[error("{}: not a file of blobd, and nothing is collected while it is there; move it out of the store", path.display())]
    ForeignFile { path: DisplayPath },
    /// A record in the trash is damaged, so it is unknown what it protects.
    #[error("{}: damaged record of a model in the trash: {what}; move it out of the store", path.display())]
    Trash { path: DisplayPath, what: String },
    #[error("blob {digest}: missing; pull or import the model again")]
    MissingBlob { digest: Digest },
    #[error(
        "blob {digest}: wrong size: expected {expected} bytes, found {found}; pull or import the model again"
    )]
    BlobSize { digest: Digest, found: u64, expected: u64 },
    #[error(
        "blob {digest}: its bytes have the digest {found}; run `blobd verify` in the store that it is in"
    )]
    DamagedBlob { digest: Digest, found: Digest },
    /// Bytes that are being stored differ from the stored blob that they were found to be.
    #[error("blob {digest}: differs from the file that is being stored")]
    BlobDiffers { digest: Digest },
    #[error("file: wrong size: expected {expected} bytes, found {found}")]
    FileSize { found: u64, expected: u64 },
    #[error("model {name}: is pinned, so the name is not given to another model")]
    Pinned { name: String },
    #[error("model {name}: exists already with other content: ID {}{}", digest.short(), from(origin.as_deref()))]
    NameTaken { name: String, digest: Digest, origin: Option<String> },
    #[error("model {name}: {}, found uid {by}", adder_expected(*adder))]
    NameOfAnother {
        name: String,
        /// The user who has added it; `None` if that is not recorded.
        adder: Option<u32>,
        by: u32,
    },
    #[error("model {name}: was pinned by another user: expected an administrator, found uid {by}")]
    PinOfAnother { name: String, by: u32 },
    #[error("{}", not_in_the_store(name))]
    NoSuchModel {
        name: String,
        /// Names of stored models that may have been meant.
        similar: Vec<String>,
    },
    #[error("model {name}: not in the store, and the lower store {} is left out: {problem}", store.display())]
    MayBeHidden {
        name: String,
        /// Names of stored models that may have been meant.
        similar: Vec<String>,
        store: DisplayPath,
        problem: String,
    },
    #[error("blob {digest}: not in this store, and a lower store is left out: {problem}")]
    Hidden { digest: Digest, problem: String },
    #[error("model {name}: in the lower store {}, which is read-only; its administrator can change it there", store.display())]
    InLowerStore { name: String, store: DisplayPath },
    #[error("ID {id}: means several models: {}; give more digits or a name", names.join(", "))]
    AmbiguousId { id: String, names: Vec<String> },
}

impl StoreError {
    pub(crate) fn no_such_model(reference: &Reference) -> Self {
        Self::NoSuchModel { name: reference.short(), similar: Vec::new() }
    }

    pub const fn is_no_such_model(&self) -> bool {
        matches!(self, Self::NoSuchModel { .. } | Self::MayBeHidden { .. })
    }

    pub(crate) fn wrong_recipe(path: DisplayPath, found: Digest) -> Self {
        Self::Recipe { path, what: format!("is the recipe of {found}; pull or import the model again") }
    }

    /// Wraps a failed call: `.map_err(StoreError::io("read", path))`.
    pub fn io(action: &'static str, path: impl Into<DisplayPath>) -> impl FnOnce(io::Error) -> Self {
        let path = path.into();
        move |source| Self::Io { action, path, source }
    }

    /// The JSON of a record that is to be written to `path`.
    pub(crate) fn encode(record: &impl Serialize, path: impl Into<DisplayPath>) -> Result<Vec<u8>, Self> {
        serde_json::to_vec(record).map_err(|error| Self::io("encode", path)(error.into()))
    }

    /// Like [`Self::io`] for a call that reports an error number.
    pub fn errno(
        action: &'static str,
        path: impl Into<DisplayPath>,
    ) -> impl FnOnce(rustix::io::Errno) -> Self {
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
    let limit = size::limit_bytes(limit_bytes);
    let [used, needed, left] = [used_bytes, needed_bytes, left_bytes].map(human_bytes);
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
    let kept = limit_bytes(min_free_bytes);
    let taken = free_bytes.saturating_sub(min_free_bytes).saturating_sub(available_bytes);
    match (min_free_bytes, taken) {
        (0, 0) => String::new(),
        (_, 0) => format!(": {free} free, {kept} of it kept free by min_free"),
        (_, taken) => {
            let taken = human_bytes(taken);
            format!(
                ": {free} free, {kept} of it kept free by min_free, {taken} reserved for imports and pulls"
            )
        }
    }
}

/// Why a [`Disk`](crate::disk::Disk) refuses to use a file. It is returned inside an [`io::Error`].
#[derive(Clone, Debug, thiserror::Error)]
pub(super) enum Refusal {
    /// It has the wrong type or number of names.
    #[error("wrong type: expected a {expected}, found a {found}")]
    UnexpectedFile { found: String, expected: &'static str },
    #[error("belongs to uid {uid}, the store to uid {}", owner.uid)]
    WrongOwner { uid: u32, owner: StoreOwner },
    #[error("{NO_SAFE_RENAME}")]
    NoSafeRename,
}

const NO_SAFE_RENAME: &str = "this file system has neither renames that replace nothing (RENAME_NOREPLACE) nor hard links, \
                              and a store needs one of them";

impl From<Refusal> for io::Error {
    fn from(refusal: Refusal) -> Self {
        let kind = match refusal {
            Refusal::UnexpectedFile { .. } => io::ErrorKind::InvalidInput,
            Refusal::WrongOwner { .. } => io::ErrorKind::PermissionDenied,
            Refusal::NoSafeRename => io::ErrorKind::Unsupported,
        };
        Self::new(kind, refusal)
    }
}

/// Whether a write failed because the disk or a quota is full.
pub(crate) fn is_no_space(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded)
}

/// A path that can be shown in messages but not opened.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct DisplayPath(PathBuf);

impl DisplayPath {
    pub fn display(&self) -> Display<'_> {
        self.0.display()
    }

    pub(crate) fn join(&self, name: impl AsRef<Path>) -> Self {
        Self(self.0.join(name))
    }

    /// For tests that inspect the store's files directly.
    #[cfg(test)]
    pub(crate) fn path(&self) -> &Path {
        &self.0
    }
}

impl From<PathBuf> for DisplayPath {
    fn from(path: PathBuf) -> Self {
        Self(path)
    }
}

impl<P: AsRef<Path> + ?Sized> From<&P> for DisplayPath {
    fn from(path: &P) -> Self {
        Self(path.as_ref().to_path_buf())
    }
}

#[cfg(test)]
mod tests {

    use super::*;

    fn io_error(kind: io::ErrorKind) -> StoreError {
        StoreError::io("write", "/f")(kind.into())
    }

    fn no_space(free_bytes: u64, available_bytes: u64, min_free_bytes: u64) -> String {
        let root = "/store".into();
        StoreError::NoSpace { root, needed_bytes: 1 << 20, available_bytes, free_bytes, min_free_bytes }
            .to_string()
    }

    #[test]
    fn error_says_why_less_is_available_than_is_free() {
        let [mib, two, three] = [1_u64 << 20, 2 << 20, 3 << 20];
        let start = |available: u64| {
            format!(
                "store /store: {} needed, {} available on the disk",
                human_bytes(mib),
                human_bytes(available)
            )
        };
        assert_eq!(no_space(two, two, 0), start(two));
        let kept = format!(": {} free, {} of it kept free by min_free", human_bytes(three), limit_bytes(two));
        assert_eq!(no_space(three, mib, two), format!("{}{kept}", start(mib)));
        let taken = format!("{kept}, {} reserved for imports and pulls", human_bytes(mib));
        assert_eq!(no_space(three, 0, two), format!("{}{taken}", start(0)));
        let only_taken = no_space(three, two, 0);
        assert!(
            only_taken.ends_with(&format!("{} reserved for imports and pulls", human_bytes(mib))),
            "{only_taken}"
        );
    }

    #[test]
    fn error_says_whose_a_name_is() {
        let error = |adder| StoreError::NameOfAnother { name: "m".to_owned(), adder, by: 8 }.to_string();
        let of_7 = "model m: was added by another user: expected uid 7 or an administrator, found uid 8";
        assert_eq!(error(Some(7)), of_7);
        assert_eq!(
            error(None),
            "model m: has no record of who added it: expected an administrator, found uid 8"
        );
        let taken = |origin: Option<&str>| {
            let (name, digest) = ("m".to_owned(), Digest::of(b""));
            StoreError::NameTaken { name, digest, origin: origin.map(str::to_owned) }.to_string()
        };
        let start = format!("model m: exists already with other content: ID {}", Digest::of(b"").short());
        assert_eq!(taken(None), start);
        assert_eq!(taken(Some("import m.gguf@1")), format!("{start}, from import m.gguf@1"));
        assert_eq!(taken(Some("edit n@sha256:00")), format!("{start}, from edit n"));
    }

    #[test]
    fn error_says_how_much_of_a_limit_is_left() {
        let quota =
            StoreError::Quota { root: "/store".into(), needed_bytes: 30, used_bytes: 90, quota_bytes: 100 };
        let [limit, used, needed, left] = [100, 90, 30, 10].map(human_bytes);
        let expected = format!(
            "store /store: its quota is {limit} and {used} are used; this needs {needed}, {left} are left"
        );
        assert_eq!(quota.to_string(), expected);
        let StoreError::Quota { needed_bytes: 70, .. } = quota.needing(70) else { panic!() };
    }

    #[test]
    fn kinds_of_errors_are_distinguished() {
        let name = || "m".to_owned();
        let missing = StoreError::NoSuchModel { name: name(), similar: Vec::new() };
        let (store, problem) = ("/lower".into(), String::new());
        let hidden = StoreError::MayBeHidden { name: name(), similar: Vec::new(), store, problem };
        let pinned = StoreError::Pinned { name: name() };
        assert!(missing.is_no_such_model() && hidden.is_no_such_model() && !pinned.is_no_such_model());
        let full = StoreError::NoInodes { action: "create", path: "/f".into() };
        assert!(full.is_no_space() && !missing.is_no_space());
        for (kind, expected) in [
            (io::ErrorKind::StorageFull, true),
            (io::ErrorKind::QuotaExceeded, true),
            (io::ErrorKind::Other, false),
        ] {
            assert_eq!(io_error(kind).is_no_space(), expected, "{kind}");
        }
        assert_eq!(
            io_error(io::ErrorKind::NotFound).needing(7).to_string(),
            "/f: cannot write: entity not found"
        );
        let kind = |refusal: Refusal| io::Error::from(refusal).kind();
        assert_eq!(kind(Refusal::NoSafeRename), io::ErrorKind::Unsupported);
        let owner = StoreOwner { uid: 1, gid: 1 };
        assert_eq!(kind(Refusal::WrongOwner { uid: 2, owner }), io::ErrorKind::PermissionDenied);
        let unexpected = Refusal::UnexpectedFile { found: name(), expected: "file" };
        assert_eq!(kind(unexpected), io::ErrorKind::InvalidInput);
    }
}
