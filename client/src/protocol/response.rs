//! The daemon's responses.
//!
//! Sizes are in bytes. Do not rename fields: scripts use these names, which the command line prints
//! with `--json`.

use std::collections::{BTreeMap, HashSet};

use blobd_model::kind::ModelKind;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::Experts;
use blobd_store_format::stored_file::{FilePiece, Source, StoredForm};
use serde::{Deserialize, Serialize};

pub use super::chosen::{ChosenFile, ChosenFiles};
use super::corrected::CorrectedFile;
use super::error::ErrorBody;
use super::event::{Phase, Progress, State, progress_types};
pub use super::lost_model::Kept;
use super::lost_model::{LostModel, NameEffects};
use super::lower_store::LowerStore;
use super::model_tensor::{ModelTensor, TensorFormat};
use super::policy::PolicyDecision;
pub use super::pull_plan::{PlannedFile, PlannedSpace, PullPlan, SpaceLimit};
pub use super::pulls::{RunningPull, RunningPulls};
use super::request::SidecarComponent;
pub use super::space::{DiskUsage, ModelUsage, SharedWith};
use super::upkeep::Spared;
pub use super::upkeep::{GcItem, GcReason, GcReport, QuarantinedItem};

/// Response to `Route::Version`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    /// The daemon's version.
    pub version: String,
    /// The newest protocol version it supports.
    pub protocol: u32,
    /// The directory of its store.
    pub root: String,
    /// Its process ID.
    pub pid: u32,
}

/// Response to `Route::Models`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// One entry per tag, sorted by name.
    pub models: Vec<ModelSummary>,
    /// The reason, if nothing can be added or removed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<String>,
    /// The lower stores, in the order in which they are searched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lower_stores: Vec<LowerStore>,
}

/// One model in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSummary {
    /// The model's shortest unique name.
    pub name: String,
    /// The manifest's digest: the model's ID.
    pub digest: Digest,
    /// The sum of its files' sizes, as if nothing were shared.
    pub size: u64,
    /// What the model is; absent if that is not recorded, as in a store of an earlier version.
    #[serde(
        default,
        deserialize_with = "ModelKind::deserialize_known",
        skip_serializing_if = "Option::is_none"
    )]
    pub kind: Option<ModelKind>,
    /// When the tag was last set, RFC 3339 in UTC.
    pub modified: String,
    /// Whether it is pinned: neither evicted nor removed.
    pub pinned: bool,
    /// Where the name's content came from: the registry's name for it, or `import` and the file's name.
    pub origin: Option<String>,
    /// The source that the name was pulled from, and that `outdated` and `pull --all` compare it with. Absent if it
    /// follows none, such as an imported model or a copy made by `tag`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<String>,
    /// What is damaged, if anything; the other tensors and files can be opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
    /// The directory of the lower store that it is in; absent if it is in the writable store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// The user who has added the name, and may change it besides administrators; absent if that is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added_by: Option<u32>,
}

/// Response to `Route::Model`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelDetails {
    /// The model's shortest unique name.
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// Where it is from, if it was pulled or imported.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// The directory of the lower store that it is in; absent if it is in the writable store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// What the daemon's policy decides about it for the caller.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub policy: Option<PolicyDecision>,
    /// What the model is. Daemons of earlier versions do not say it.
    #[serde(
        default,
        deserialize_with = "ModelKind::deserialize_known",
        skip_serializing_if = "Option::is_none"
    )]
    pub kind: Option<ModelKind>,
    /// `general.architecture`. Of a model with one layer per tensor, what `config.json` names.
    pub architecture: Option<String>,
    /// The number of elements of all tensors.
    pub parameters: u64,
    /// The name of the file type, such as `Q4_K_M`. Of a model with one layer per tensor, the type with the
    /// fewest bits per element, such as `NVFP4`.
    pub quantization: Option<String>,
    /// The GGUF metadata; a long array is given as
    /// `{"type":…,"count":…,"first":[…]}`. Of a model with one layer per tensor,
    /// what `config.json` says, under the keys of GGUF.
    pub metadata: BTreeMap<String, serde_json::Value>,
    /// The model's files, the configuration first.
    pub layers: Vec<LayerSummary>,
    /// The tensors of all layers: of split files in file order, of layers that are tensors by name, without
    /// scales and biases.
    pub tensors: Vec<ModelTensor>,
}

impl ModelDetails {
    /// The digests of the files that are stored as one blob, which then has the digest of the file.
    #[must_use]
    pub fn whole_files(&self) -> HashSet<Digest> {
        let whole = self.layers.iter().filter(|layer| layer.stored == StoredForm::Blob);
        whole.map(|layer| layer.digest).collect()
    }
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSummary {
    /// Its media type.
    pub media_type: MediaType,
    /// Its original name: a tensor's name, or a relative path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The digest of the whole file.
    pub digest: Digest,
    /// Its size.
    pub size: u64,
    /// Whether it is stored as one blob or split.
    pub stored: StoredForm,
    /// The layer of the manifest that it was in, if that is compressed: its own bytes are not stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unpacked_from: Option<Digest>,
}

/// Response to `Route::Sharing`: the bytes of a model on disk, and who shares them.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSharing {
    /// The model's shortest unique name.
    pub name: String,
    /// Bytes on disk that no other model needs.
    pub unique_bytes: u64,
    /// Bytes on disk that other models need too.
    pub shared_bytes: u64,
    /// The models that need some of them, the one that shares the most first.
    pub models: Vec<SharedWith>,
}

/// The manifest or files that a source names at its server.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Resolved {
    /// The manifest's digest; absent if the source is files without a manifest.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The digests of its files, as far as the server says them.
    pub files: Vec<Digest>,
}

/// Response to `Route::Sessions`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionList {
    /// One entry per open model and client.
    pub sessions: Vec<SessionSummary>,
}

/// One client that has a model open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SessionSummary {
    /// The client's process ID, as the kernel reports it.
    pub pid: i32,
    /// The client's uid.
    pub uid: u32,
    /// The user's name, if the uid has one.
    pub user: Option<String>,
    /// The process's command name.
    pub command: Option<String>,
    /// The program that `blobd exec` runs, if the client is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// The client's container or other PID namespace, if it is in one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    /// The model.
    pub model: String,
    /// When it was opened, RFC 3339 in UTC.
    pub since: String,
    /// The size of the blobs whose descriptors were passed.
    pub bytes_mapped: u64,
    /// The size of the whole model; as the next one, only if it was requested and is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_bytes: Option<u64>,
    /// How many of these bytes are in the page cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
}

/// A process that uses a model which another process has opened for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    /// Its process ID.
    pub pid: i32,
    /// Its command name.
    pub command: String,
}

/// Response to `Route::Release`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// The leases that were released, in the form of `ps`.
    pub released: Vec<SessionSummary>,
}

/// Response to `Route::Remove`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removed {
    /// The names that were dropped.
    pub removed: Vec<String>,
    /// The bytes freed on disk.
    pub freed_bytes: u64,
    /// The bytes that were not freed, and what needs them.
    pub kept: Vec<Kept>,
    /// Until when `undelete` can restore the models, if they went to the trash.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub trashed_until: Option<String>,
    /// The removed models one by one.
    #[serde(default)]
    pub models: Vec<LostModel>,
    /// The models that match a pattern, or are old or unused, and are not removed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub spared: Vec<Spared>,
    /// The names and patterns that were refused, if the request says that the others are removed all the same.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub failed: Vec<NotRemoved>,
    /// Whether this was a dry run, which removes nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// A name or pattern of a request whose models were not removed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NotRemoved {
    /// The name or the pattern.
    pub name: String,
    /// Why.
    pub error: ErrorBody,
}

/// Response to `Route::Tag`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Tagged {
    /// The new name.
    pub name: String,
    /// The digest of the manifest.
    pub digest: Digest,
    /// Whether the name meant the same model before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
    /// What else has happened.
    #[serde(flatten)]
    pub effects: NameEffects,
}

/// Response to `Route::Rename`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Renamed {
    /// The old name.
    pub from: String,
    /// The new name.
    pub name: String,
    /// The digest of the manifest.
    pub digest: Digest,
    /// What else has happened.
    #[serde(flatten)]
    pub effects: NameEffects,
}

/// The progress of a pull.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullProgress {
    /// The current step, for people.
    pub status: String,
    /// Whether the work goes on.
    #[serde(default)]
    pub state: State,
    /// What the client waits for, once the work has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The file in progress.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// The file's size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// How much of it has been received.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
    /// How much of it was already stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reused: Option<u64>,
    /// Whether an interruption loses what has been received of the file, such as of a compressed archive.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub restarts: bool,
    /// Models that were just evicted to make space.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicted: Vec<LostModel>,
}

progress_types!(PullProgress);

/// A pull's last line.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullDone {
    /// Always `success`.
    pub status: String,
    /// The model's name.
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The size of the files: the sum of the next three.
    #[serde(default)]
    pub size: u64,
    /// The bytes that were downloaded.
    pub downloaded_bytes: u64,
    /// The bytes that were taken from other stored models.
    pub reused_bytes: u64,
    /// The bytes of files that were stored already, and of those that an earlier pull had begun.
    #[serde(default)]
    pub already_stored_bytes: u64,
    /// Whether the name meant the same model before, and nothing was downloaded.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
    /// The files that were chosen, if the model is some files of a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<ChosenFiles>,
    /// The files whose first download had a wrong digest, and whose second download was right.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub corrected: Vec<CorrectedFile>,
    /// What else has happened.
    #[serde(flatten)]
    pub effects: NameEffects,
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
    /// The file's size.
    pub size: u64,
    /// The bytes of the file that were written.
    pub new_bytes: u64,
    /// The bytes of the file that were already stored.
    pub reused_bytes: u64,
    /// The number of its tensors.
    pub tensor_count: u64,
    /// The number of blobs that were written.
    pub new_blob_count: u64,
    /// The sidecars that are components of the model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub sidecars: Vec<ImportedSidecar>,
    /// Whether the name meant the same model before, and nothing was written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
    /// What else has happened.
    #[serde(flatten)]
    pub effects: NameEffects,
}

/// A file that was stored as a component of an imported model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportedSidecar {
    /// What it is in the model.
    pub component: SidecarComponent,
    /// Its name.
    pub file_name: String,
    /// Its digest.
    pub digest: Digest,
    /// Its size.
    pub size: u64,
}

/// First frame of the response to an open: the model, and how many tensors and descriptors follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenHead {
    /// The model's shortest unique name.
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The model's files, the configuration first.
    pub layers: Vec<OpenLayer>,
    /// The number of tensors that follow.
    pub tensor_count: u64,
    /// The number of descriptors that follow.
    pub fd_count: u32,
}

/// One file of an open model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenLayer {
    /// Its media type.
    pub media_type: MediaType,
    /// Its original name: a tensor's name, or a relative path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The digest of the whole file.
    pub digest: Digest,
    /// Its size.
    pub size: u64,
    /// The number of the descriptor of the whole file, if it is stored whole.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<u32>,
    /// The format of a split file; not written for GGUF.
    #[serde(default, skip_serializing_if = "TensorFormat::is_gguf")]
    pub format: TensorFormat,
    /// The header, if it is a split file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub header: Option<HeaderLocation>,
    /// The number of pieces that follow; 0 unless they were requested.
    #[serde(default)]
    pub piece_count: u64,
}

/// The location of a file's header: all bytes of the file of `fd`, including the padding up to the data
/// section.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HeaderLocation {
    /// The descriptor's number.
    pub fd: u32,
    /// Its size.
    pub size: u64,
}

/// The location of a tensor's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorLocation {
    /// Its name.
    pub name: String,
    /// The name of its type in the format of its layer.
    #[serde(rename = "type")]
    pub type_name: String,
    /// Its dimensions in the order of that format: of GGUF the fastest first, of safetensors the slowest.
    pub shape: Vec<u64>,
    /// The number of the layer that contains it.
    pub layer: u32,
    /// The number of its descriptor; absent for a tensor without elements.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fd: Option<u32>,
    /// The offset of its bytes in the file of `fd`.
    pub offset: u64,
    /// Its size.
    pub size: u64,
    /// The position of each expert, if it is a stack of experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
}

/// One piece of a split file, in the response to an open.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub enum OpenPiece {
    /// A segment: `length` bytes of the file of `fd`, from `offset` on.
    Fd {
        /// The descriptor's number.
        fd: u32,
        /// The offset of the segment in that file.
        offset: u64,
        /// The segment's length.
        length: u64,
    },
    /// Zero bytes.
    Zeros {
        /// Their number.
        zeros: u64,
    },
    /// Literal bytes.
    Literal {
        /// The bytes; base64 in JSON, because hexadecimal would double their size.
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
