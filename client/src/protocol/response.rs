//! The daemon's responses.
//!
//! Sizes are bytes. The names of the fields are relied upon by scripts: they are what the
//! command line prints with `--json`.

use std::collections::BTreeMap;

use blobd_store_format::descriptor::MediaType;
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::{Experts, TensorEntry};
use blobd_store_format::stored_file::{FilePiece, Source, StoredForm};
use serde::{Deserialize, Serialize};

/// Answer to `GET /v1/version`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// The daemon's version.
    pub version: String,
    /// The newest protocol it speaks.
    pub protocol: u32,
    /// The store it serves.
    pub root: String,
    /// Its process.
    pub pid: u32,
}

/// Answer to `GET /v1/models`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// One entry per tag, by name.
    pub models: Vec<ModelSummary>,
    /// Why nothing can be added or removed, if that is so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<String>,
}

/// One model in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSummary {
    /// The shortest name that is still unique.
    pub name: String,
    /// The manifest's digest: the model's ID.
    pub digest: Digest,
    /// What its files add up to, as if nothing were shared.
    pub size: u64,
    /// When the tag was last set, RFC 3339 in UTC.
    pub modified: String,
    /// Whether eviction leaves it alone.
    pub pinned: bool,
    /// Where it came from: the registry's name for it, or `import` and the file's name.
    pub origin: Option<String>,
    /// What is wrong with it; what is not damaged can be opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
}

/// Answer to `GET /v1/models/{reference}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelDetails {
    /// The shortest name that is still unique.
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// `general.architecture`.
    pub architecture: Option<String>,
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The name of the file type, such as `Q4_K_M`.
    pub quantization: Option<String>,
    /// The GGUF metadata; a long array is given as `{"type":…,"count":…}`.
    pub metadata: BTreeMap<String, serde_json::Value>,
    /// The model's files, the configuration first.
    pub layers: Vec<LayerSummary>,
    /// The tensors of all layers, in file order.
    pub tensors: Vec<TensorEntry>,
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSummary {
    /// What it is.
    pub media_type: MediaType,
    /// Its original name: a tensor's name, or a relative path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The digest of the whole file.
    pub digest: Digest,
    /// Its length.
    pub size: u64,
    /// Whether it is stored as one blob or split.
    pub stored: StoredForm,
}

/// Answer to `GET /v1/df`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUsage {
    /// What all models add up to, as if nothing were shared.
    pub logical_bytes: u64,
    /// What blobs and recipes take on disk.
    pub physical_bytes: u64,
    /// What sharing saves: logical less what is needed on disk, not below zero. What is missing is
    /// not saved.
    pub saved_bytes: u64,
    /// What `gc` would free.
    pub reclaimable_bytes: u64,
    /// What unfinished work takes on disk.
    pub partial_bytes: u64,
    /// What only models in the trash need.
    #[serde(default)]
    pub trash_bytes: u64,
    /// What damaged blobs in quarantine take on disk.
    #[serde(default)]
    pub quarantine_bytes: u64,
    /// What nothing needs and a running program still has mapped or open.
    #[serde(default)]
    pub held_bytes: u64,
    /// What is set aside so that removing works on a full disk.
    #[serde(default)]
    pub reserve_bytes: u64,
    /// The most the store may take on disk, if that is limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// What is free on the file system.
    pub free_bytes: u64,
    /// How many blobs there are.
    pub blob_count: u64,
    /// One entry per model, by name.
    pub models: Vec<ModelUsage>,
}

/// One model's share of the disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelUsage {
    /// The shortest name that is still unique.
    pub name: String,
    /// What its files add up to.
    pub logical_bytes: u64,
    /// What it alone keeps on disk.
    pub unique_bytes: u64,
    /// What it shares with others.
    pub shared_bytes: u64,
    /// When it was last opened since the daemon started, RFC 3339 in UTC.
    pub last_opened: Option<String>,
}

/// Answer to `GET /v1/ps`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionList {
    /// One entry per open model and client.
    pub sessions: Vec<SessionSummary>,
}

/// One client that has a model open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSummary {
    /// The client's process, as the kernel names it.
    pub pid: i32,
    /// The client's user.
    pub uid: u32,
    /// That user's name, if there is one.
    pub user: Option<String>,
    /// The process's command name.
    pub command: Option<String>,
    /// The model.
    pub model: String,
    /// Since when, RFC 3339 in UTC.
    pub since: String,
    /// The size of the blobs that were passed.
    pub bytes_mapped: u64,
}

/// Answer to `POST /v1/release`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// The leases that were ended, as `ps` listed them.
    pub released: Vec<SessionSummary>,
}

/// Answer to `POST /v1/remove`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// The names that are gone.
    pub removed: Vec<String>,
    /// What was freed on disk.
    pub freed_bytes: u64,
    /// What stays, and who needs it.
    pub kept: Vec<Kept>,
    /// Until when `undelete` brings the models back, if they were put into the trash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trashed_until: Option<String>,
}

/// Bytes that a removal did not free.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Kept {
    /// How many, on disk.
    pub bytes: u64,
    /// The models and sessions that need them.
    pub by: Vec<String>,
}

/// Answer to `POST /v1/tag`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tagged {
    /// The further name.
    pub name: String,
    /// The manifest it points to.
    pub digest: Digest,
}

/// Answer to `POST /v1/gc`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReport {
    /// Whether nothing was done.
    pub dry_run: bool,
    /// What was, or would be, deleted.
    pub deleted: Vec<GcItem>,
    /// What that frees on disk.
    pub freed_bytes: u64,
    /// What nothing needs and stays all the same, because a running program has it mapped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Kept>,
}

/// An item of a collection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcItem {
    /// Its digest; of what is left of a dead transaction, nothing.
    pub digest: Option<Digest>,
    /// What it takes on disk.
    pub size: u64,
    /// Why it is collected.
    pub reason: GcReason,
}

/// Why something is collected.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum GcReason {
    /// A blob that no model and no recipe in use needs.
    UnreferencedBlob,
    /// A recipe that no model needs.
    UnreferencedRecipe,
    /// The record of a model in the trash whose time is over.
    ExpiredTrash,
    /// Files of a transaction that did not finish.
    AbandonedStaging,
    /// The received part of an abandoned download.
    AbandonedDownload,
}

/// One line of the answer to `POST /v1/pull`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PullEvent {
    /// It failed; nothing follows.
    Failed(super::error::ErrorAnswer),
    /// It is done; nothing follows.
    Done(PullDone),
    /// Something happened.
    Progress(PullProgress),
}

/// How far a pull is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullProgress {
    /// What is being done, for people.
    pub status: String,
    /// The file that it is about.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The file's length.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// How much of it has arrived.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
    /// How much of it was there already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reused: Option<u64>,
}

/// A pull's last line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullDone {
    /// Always `success`.
    pub status: String,
    /// The model's name.
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// What came over the network.
    pub downloaded_bytes: u64,
    /// What did not have to be stored, because it was there.
    pub reused_bytes: u64,
}

/// Answer to `POST /v1/pull/plan`: what a pull would download and reuse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullPlan {
    /// The model's name.
    pub name: String,
    /// The manifest's digest, if the model has a manifest already.
    pub digest: Option<Digest>,
    /// What would come over the network in bytes, as far as can be told: what is similar is taken
    /// for the same, and headers and samples, which have come for this answer, come again.
    pub download_bytes: u64,
    /// The files, in the order in which they would be taken.
    pub files: Vec<PlannedFile>,
}

/// One file of a pull that is planned. Of its bytes, the four parts are disjoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedFile {
    /// What it is: a component such as `model`, or a file's address.
    pub name: String,
    /// Its digest, if known in advance.
    pub digest: Option<Digest>,
    /// Its length in bytes.
    pub size: u64,
    /// What the store has of it for certain.
    pub stored_bytes: u64,
    /// What an earlier pull has left.
    pub resumed_bytes: u64,
    /// What tensors of a relative seem to be: samples of them agree.
    pub similar_bytes: u64,
    /// What would have to come.
    pub download_bytes: u64,
}

/// The last frame of an import.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Imported {
    /// The model's name.
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The file's digest.
    pub file: Digest,
    /// The file's length.
    pub size: u64,
    /// How much of the file had to be written.
    pub new_bytes: u64,
    /// How much of it was there already.
    pub reused_bytes: u64,
    /// How many tensors it has.
    pub tensor_count: u64,
    /// How many blobs had to be written.
    pub new_blob_count: u64,
}

/// First frame of the response to an open: the model, and how much follows.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenHead {
    /// The shortest name that is still unique.
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The model's files, the configuration first.
    pub layers: Vec<OpenLayer>,
    /// How many tensors follow.
    pub tensor_count: u64,
    /// How many descriptors follow.
    pub fd_count: u32,
}

/// One file of an open model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenLayer {
    /// What it is.
    pub media_type: MediaType,
    /// Its original name: a tensor's name, or a relative path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The digest of the whole file.
    pub digest: Digest,
    /// Its length.
    pub size: u64,
    /// The descriptor of the whole file, if it is stored whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<u32>,
    /// The GGUF header, if it is a split GGUF file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<HeaderLocation>,
    /// How many pieces follow; 0 unless asked for.
    #[serde(default)]
    pub piece_count: u64,
}

/// Where a GGUF header is: all bytes of its descriptor, padding up to the data included.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderLocation {
    /// The descriptor's number.
    pub fd: u32,
    /// How long it is.
    pub size: u64,
}

/// Where a tensor is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorLocation {
    /// Its name.
    pub name: String,
    /// The name of its ggml type.
    #[serde(rename = "type")]
    pub type_name: String,
    /// Its dimensions in GGUF order, the fastest first.
    pub shape: Vec<u64>,
    /// The number of the layer it belongs to.
    pub layer: u32,
    /// The descriptor's number; absent for a tensor without elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<u32>,
    /// Where behind that descriptor its bytes start.
    pub offset: u64,
    /// How many bytes it has.
    pub size: u64,
    /// For a stack of experts, how to find each.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
}

/// One part of a split file, in an open answer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum OpenPiece {
    /// `length` bytes behind a descriptor, from `offset` on.
    Fd {
        /// The descriptor's number.
        fd: u32,
        /// Where behind it the segment starts.
        offset: u64,
        /// How long it is.
        length: u64,
    },
    /// That many zero bytes.
    Zeros {
        /// How many.
        zeros: u64,
    },
    /// These bytes.
    Literal {
        /// The bytes; hexadecimal would double them, so base64.
        #[serde(with = "blobd_store_format::recipe::literal")]
        literal: Vec<u8>,
    },
}

impl FilePiece for OpenPiece {
    type Blob = u32;

    fn whole(fd: u32, size: u64) -> Self {
        Self::Fd { fd, offset: 0, length: size }
    }

    fn source(&self) -> Source<'_, u32> {
        match self {
            Self::Fd { fd, offset, length } => Source::Blob { blob: *fd, offset: *offset, length: *length },
            Self::Zeros { zeros } => Source::Zeros { length: *zeros },
            Self::Literal { literal } => Source::Literal { bytes: literal },
        }
    }
}
