//! The daemon's responses.
//!
//! Sizes are in bytes. Do not rename fields: scripts use these names, which the command line prints
//! with `--json`.
#![expect(missing_docs, reason = "a name that says it all has no comment")]

use std::collections::{BTreeMap, HashSet};

use blobd_model::kind::ModelKind;
use blobd_store_format::descriptor::MediaType;
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::{TensorEntry, literal};
use blobd_store_format::stored_file::{FilePiece, Source, StoredForm};
use blobd_store_format::tensor::Experts;
use blobd_store_format::tensor::TensorFormat;
use serde::{Deserialize, Serialize};

use super::access::PolicyDecision;
use super::space::SharedWith;
use super::{MetadataValue, Time};

/// The daemon and the store that it serves.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Version {
    pub version: String,
    /// The newest protocol version that it supports.
    pub protocol: u32,
    /// The directory of the store that it serves.
    pub root: String,
    pub pid: u32,
}

/// The models in the store.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelList {
    /// One entry per name, sorted by name.
    pub models: Vec<ModelSummary>,
    /// Why nothing can be added or removed, if so.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub read_only: Option<String>,
    /// The lower stores, in the order in which they are searched.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lower_stores: Vec<LowerStore>,
}

/// One model in a list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelSummary {
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
    /// The model family, such as `llama`; absent if it is not recorded: of an earlier version, or of safetensors.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub architecture: Option<String>,
    /// The file type, such as `Q4_K_M`; absent if it is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quantization: Option<String>,
    /// When the name was last set.
    pub modified: Time,
    /// Whether it is pinned: neither evicted nor removed.
    pub pinned: bool,
    /// Where the content came from: the registry's name for it, a URL, `import FILE`, `url URL` (it had a query),
    /// `edit NAME@DIGEST` or `copy SOURCE in PROGRAM` (from the store of another program, which names this source).
    pub origin: Option<String>,
    /// The source that `outdated` and `pull --all` compare the name with. Absent if it was not pulled, such as an
    /// imported model or a copy made by `tag`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub follows: Option<String>,
    /// What is damaged, if anything; the other tensors and files can be opened.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub damage: Option<String>,
    /// The directory of the lower store that it is in; absent if it is in the writable store.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub store: Option<String>,
    /// The uid that added the name, and may change it besides administrators; absent if that is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added_by: Option<u32>,
}

/// One model in full.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ModelDetails {
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
    /// The GGUF metadata, abridged. Of a model with one layer per tensor, what `config.json` says, under the keys of
    /// GGUF.
    pub metadata: BTreeMap<String, MetadataValue>,
    /// The model's files, the configuration first.
    pub layers: Vec<LayerSummary>,
    /// The tensors of all layers: of split files in file order, of layers that are tensors by name, without
    /// scales and biases.
    pub tensors: Vec<ModelTensor>,
}

impl ModelDetails {
    /// The digests of the files that are stored as one blob, which then has the digest of the file.
    pub fn whole_files(&self) -> HashSet<Digest> {
        let whole = self.layers.iter().filter(|layer| layer.stored == StoredForm::Blob);
        whole.map(|layer| layer.digest).collect()
    }
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerSummary {
    pub media_type: MediaType,
    /// Its original name: a tensor's name, or a relative path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The digest of the whole file.
    pub digest: Digest,
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
    pub name: String,
    /// Bytes on disk that no other model needs.
    pub unique_bytes: u64,
    /// Bytes on disk that other models need too.
    pub shared_bytes: u64,
    /// The models that need some of them, the one that shares the most first.
    pub models: Vec<SharedWith>,
}

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
    pub command: Option<String>,
    /// The program that `blobd exec` runs, if the client is one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub engine: Option<Engine>,
    /// Where the client is, if not in this PID namespace: the start of a container's ID, a control group, or `another
    /// PID namespace`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub container: Option<String>,
    pub model: String,
    /// When it was opened.
    pub since: Time,
    /// The size of the blobs whose descriptors the client has received.
    pub bytes_mapped: u64,
    /// The size of the whole model. Absent, as the next one, if it was not requested, no name has the model any more, or
    /// it is damaged.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub model_bytes: Option<u64>,
    /// How many of these bytes are in the page cache.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub resident_bytes: Option<u64>,
}

/// A process that uses a model which another process has opened for it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Engine {
    pub pid: i32,
    pub command: String,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Released {
    /// The leases that were released, in the form of `ps`.
    pub released: Vec<SessionSummary>,
}

/// First frame of the response to an open: the model, and how many tensors and descriptors follow.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct OpenHead {
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
    pub media_type: MediaType,
    /// Its original name: a tensor's name, or a relative path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The digest of the whole file.
    pub digest: Digest,
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
    pub fd: u32,
    pub size: u64,
}

/// The location of a tensor's bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TensorLocation {
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
        fd: u32,
        /// The offset of the segment in that file.
        offset: u64,
        /// The segment's length.
        length: u64,
    },
    /// Zero bytes.
    Zeros { zeros: u64 },
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

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelHeads {
    /// Its shortest unique name; at a registry, the name that a pull would give it.
    pub name: String,
    /// The digest of its manifest; absent if it has none, such as a file on a web server.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Where it is from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<String>,
    /// Its files, in the order of its manifest, the configuration first.
    pub files: Vec<FileHead>,
}

impl ModelHeads {
    /// The bytes of all headers and texts.
    pub fn content_bytes(&self) -> usize {
        let contents = self.files.iter().filter_map(|file| file.content.as_ref());
        contents.fold(0, |sum, content| sum.saturating_add(content.0.len()))
    }
}

/// One file of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FileHead {
    pub media_type: MediaType,
    /// Its original name, if its manifest or server names it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The digest of the whole file, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    pub size: u64,
    /// What was read of it, as base64: the header of a file with tensors, without the padding before its
    /// data section, or all of a short text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub content: Option<Content>,
}

/// Bytes that are base64 in JSON.
#[derive(Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Content(#[serde(with = "literal")] pub Vec<u8>);

/// The length instead of the bytes, which may be megabytes.
impl std::fmt::Debug for Content {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} bytes", self.0.len())
    }
}

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelTensor {
    pub name: String,
    /// The name of its type: in a GGUF file the ggml type, such as `Q4_K`; in a layer of its own the element
    /// type, such as `BF16`, or how it is quantised, such as `NVFP4`.
    #[serde(rename = "type")]
    pub type_name: String,
    /// The format of its file, which gives the order of its dimensions. Daemons before it was added list only
    /// tensors of GGUF files.
    #[serde(default)]
    pub format: TensorFormat,
    /// Its dimensions: of GGUF the fastest first, of safetensors the slowest first. Of a quantised tensor in
    /// safetensors, those of its unpacked elements.
    pub shape: Vec<u64>,
    /// The blob that holds it.
    pub digest: Digest,
    /// Its offset in the blob.
    pub offset: u64,
    /// Its size in bytes. Scales and biases in the same blob are not included.
    pub size: u64,
    /// The number in `layers` of the file that has it. Daemons of earlier versions do not say it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layer: Option<u32>,
    /// The position of each expert, if it is a stack of experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
}

impl ModelTensor {
    /// A tensor of the file of this number and format.
    pub fn new(layer: u32, format: TensorFormat, entry: TensorEntry<'_>) -> Self {
        let TensorEntry { name, type_name, shape, digest, offset, size, experts } = entry;
        let (name, type_name, shape) = (name.into_owned(), type_name.into_owned(), shape.into_owned());
        Self { name, type_name, format, shape, digest, offset, size, layer: Some(layer), experts }
    }
}

/// Without the file and its format.
impl From<ModelTensor> for TensorEntry<'static> {
    fn from(tensor: ModelTensor) -> Self {
        let ModelTensor { name, type_name, shape, digest, offset, size, experts, .. } = tensor;
        let (name, type_name, shape) = (name.into(), type_name.into(), shape.into());
        Self { name, type_name, shape, digest, offset, size, experts }
    }
}

/// A read-only store, searched after the writable one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LowerStore {
    /// Its directory.
    pub path: String,
    /// Why it cannot be used, if so; its models are not listed then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}
