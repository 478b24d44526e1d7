//! The bodies of requests.
#![expect(missing_docs, reason = "a name that says it all has no comment")]

use blobd_store_format::digest::Digest;
use blobd_store_format::name_pattern::NamePattern;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{Components, PullSource};
use serde::{Deserialize, Serialize};

use super::lists;

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenParams {
    pub reference: Reference,
    /// The tensors whose locations and descriptors the response contains.
    #[serde(default)]
    pub tensors: TensorSelection,
    /// Only the layers of this component (`model`, `projector`, `template`, …), or, if it ends in a
    /// slash, only those whose name starts with it (`text_encoder/`); all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<String>,
    /// The layers that can be read as files: the response contains their descriptor or their pieces.
    #[serde(default)]
    pub files: FileSelection,
    /// What the client says that it needs the model for: the verb of the request in the audit log.
    #[serde(default, skip_serializing_if = "OpenPurpose::is_default")]
    pub purpose: OpenPurpose,
}

impl OpenParams {
    /// Requests all tensors of all layers, and the files that are stored whole.
    pub const fn new(reference: Reference) -> Self {
        Self {
            reference,
            tensors: TensorSelection::All,
            component: None,
            files: FileSelection::Whole,
            purpose: OpenPurpose::Open,
        }
    }
}

/// What a model is opened for.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum OpenPurpose {
    /// To compute with it, as inference engines do.
    #[default]
    Open,
    /// To write its files elsewhere.
    Export,
    /// For a program that `blobd exec` runs.
    Exec,
    /// To show its files in a file system.
    Mount,
}

impl OpenPurpose {
    /// All purposes.
    pub const ALL: [Self; 4] = [Self::Open, Self::Export, Self::Exec, Self::Mount];

    pub const fn verb(self) -> &'static str {
        match self {
            Self::Open => "open",
            Self::Export => "export",
            Self::Exec => "exec",
            Self::Mount => "mount",
        }
    }

    fn is_default(&self) -> bool {
        *self == Self::default()
    }
}

/// Some of a model's tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorSelection {
    /// Every tensor.
    #[default]
    All,
    /// None, for a client that needs only files.
    None,
    /// Those whose names start with this.
    Prefix(String),
    /// Those with these names; one that the model lacks is an error.
    Names(#[serde(deserialize_with = "lists::names")] Vec<String>),
    /// Stacks that contain one of these experts, and tensors that are one of them.
    Experts(ExpertSelection),
}

/// Some experts of a mixture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertSelection {
    /// The prefix of their tensors' names, such as `blk.3.`; empty for all blocks.
    #[serde(default)]
    pub prefix: String,
    /// The experts' numbers, from 0.
    #[serde(deserialize_with = "lists::numbers")]
    pub numbers: Vec<u64>,
}

/// The layers that can be read as files.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileSelection {
    /// Those that are stored whole: templates, parameters, licences. Each has one descriptor.
    #[default]
    Whole,
    /// All: the response also lists the pieces of each split file.
    All,
}

/// Body of `Route::Import`; the descriptors of the file and of its sidecars follow in a frame, those of `files` in frames
/// that the daemon requests.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportParams {
    /// The file's name, for messages and to derive the model's name if `name` is absent. The folders that it is in may
    /// come before it: they distinguish it from another file of the same name. With `files`, the path of the folder that
    /// they are in, or of the first of the shards.
    pub file_name: String,
    /// The model's name; derived from the file's name if absent, and made distinct from those of other models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Reference>,
    /// Whether another model that has the name is replaced. For the name of a pinned model this needs the right to
    /// administer, and the pin stays with the name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// The files that are stored as components of the same model, in the order of their descriptors; at most
    /// [`MAX_SIDECARS`](lists::MAX_SIDECARS).
    #[serde(default, deserialize_with = "lists::sidecars", skip_serializing_if = "Vec::is_empty")]
    pub sidecars: Vec<Sidecar>,
    /// All files of a model of several files, in the order of its layers, instead of one file and its sidecars; at most
    /// [`MAX_IMPORTED_FILES`](lists::MAX_IMPORTED_FILES). The daemon requests their descriptors a few at a time.
    #[serde(default, deserialize_with = "lists::files", skip_serializing_if = "Vec::is_empty")]
    pub files: Vec<ImportFile>,
    /// The manifest of a model that another program has pulled: the model gets exactly this one. `files` then has an entry
    /// for each digest that the manifest names, once and in its order: the configuration, then the layers. A file whose
    /// content has another digest is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub manifest: Option<String>,
    /// With `manifest`: the texts of bundles with signatures of the model, at most
    /// [`MAX_SIGNATURES`](lists::MAX_SIGNATURES). Those that are over its files are kept with it.
    #[serde(default, deserialize_with = "lists::signatures", skip_serializing_if = "Vec::is_empty")]
    pub signatures: Vec<String>,
    /// Where another program says that it pulled the model from. A repair can fetch damaged files from there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_from: Option<PullSource>,
    /// The program in whose store the model was found, such as `ollama`. Then the name is made distinct if another model has
    /// it, unless that is to be replaced.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

impl ImportParams {
    /// The longest body: the longest manifest, a list of its files, and the longest signature.
    pub const MAX_BODY_BYTES: usize = 12 << 20;

    /// The import of one file without sidecars, under a name that is derived from the file's.
    pub fn new(file_name: impl Into<String>) -> Self {
        Self {
            file_name: file_name.into(),
            name: None,
            force: false,
            sidecars: Vec::new(),
            files: Vec::new(),
            manifest: None,
            signatures: Vec::new(),
            copied_from: None,
            program: None,
        }
    }
}

/// One of the files that make up an imported model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportFile {
    /// Its path in the model, such as `tokenizer/tokenizer.json`: relative, without `..`.
    pub path: String,
    /// Its size in bytes. A file that has another one when it is read is refused.
    pub size: u64,
    /// What it is in the model, if it does not follow from its path and its content.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<SidecarComponent>,
    /// Its digest, if that is known. A file with another one is refused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Whether an earlier import has just read this file, and found `digest`. It is not read again if the store has it.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub was_read: bool,
    /// Where its content begins in its descriptor, which may be that of a larger file, such as an archive. At 0 it is the
    /// whole of its descriptor.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub offset: u64,
    /// Whether its descriptor is a pipe, which has exactly these `size` bytes. They are read once, in order, so a file that
    /// `was_read` is read again.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub stream: bool,
}

#[expect(clippy::trivially_copy_pass_by_ref, reason = "serde calls it with a reference")]
fn is_zero(offset: &u64) -> bool {
    *offset == 0
}

/// A file that belongs to an imported one and becomes a component of the same model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Sidecar {
    pub component: SidecarComponent,
    /// Its name, without a folder.
    pub file_name: String,
}

/// What a sidecar is in its model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SidecarComponent {
    /// The projector of a multimodal model.
    Projector,
    /// A model for speculative decoding.
    Draft,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PullParams {
    /// The model, or the URL of a GGUF file.
    #[serde(rename = "reference")]
    pub source: PullSource,
    /// The model's name in the store. If absent, the name of its source; one that is derived from a file's address is
    /// made distinct from those of other models.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Reference>,
    /// What is pulled with the weights of a model at Hugging Face.
    #[serde(default, skip_serializing_if = "Components::are_default")]
    pub components: Components,
    /// The maximum rate of the download in bytes per second.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_rate: Option<u64>,
    /// Whether another model that has the name is replaced, although the name does not follow this source. For the name
    /// of a pinned model this needs the right to administer, and the pin stays with the name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

impl PullParams {
    /// Requests a model from its registry, under the registry's name for it.
    pub const fn of(reference: Reference) -> Self {
        Self::of_source(PullSource::Registry(reference))
    }

    /// Requests a source with the components that belong to it, under the name that it has.
    pub const fn of_source(source: PullSource) -> Self {
        Self { source, name: None, components: Components::DEFAULT, limit_rate: None, force: false }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveParams {
    /// The names to drop; blobs that only they need are freed.
    #[serde(default, deserialize_with = "lists::references")]
    pub references: Vec<Reference>,
    /// Patterns of names.
    #[serde(default, deserialize_with = "lists::patterns", skip_serializing_if = "Vec::is_empty")]
    pub patterns: Vec<NamePattern>,
    /// Only models that were last used longer ago than this many seconds; of all models, if neither names nor patterns
    /// are given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub older_than_seconds: Option<u64>,
    /// Only models that were never opened; of all models, if neither names nor patterns are given.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unused: bool,
    /// If present, nothing is freed for this many seconds: the models go to the trash and can be restored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_seconds: Option<u64>,
    /// Only report what would be removed and freed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// Remove the other models if a name or a pattern is refused, and report it in `failed`. Without this, all are
    /// removed or none.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub go_on: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UndeleteParams {
    /// The model's name before it was removed or replaced.
    pub reference: Reference,
    /// The name that it gets; the one that it had if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Reference>,
    /// Whether another model that has the name now is replaced.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinParams {
    pub reference: Reference,
    /// Whether to set the pin or to remove it.
    pub pinned: bool,
}

impl PinParams {
    /// The verb that `pinned` sets; without a pin, this.
    pub const UNPIN: &'static str = "unpin";

    pub const fn verb(&self) -> &'static str {
        if self.pinned { "pin" } else { Self::UNPIN }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitParams {
    /// The maximum rate of all pulls, pushes and transfers together, in bytes per second; `null` or 0 removes the limit. The field is
    /// required, so that an empty body does not remove the limit.
    #[serde(deserialize_with = "Option::deserialize")]
    pub bytes_per_second: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifyParams {
    /// The model to verify; the whole store if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
    /// Whether to download damaged blobs again.
    #[serde(default)]
    pub repair: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TagParams {
    pub source: Reference,
    pub target: Reference,
    /// Whether another model that has the name is replaced. For the name of a pinned model this needs the right to
    /// administer, and the pin stays with the name.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
    /// For the import of a model whose files are stored under another name already: its own origin. Otherwise the new name
    /// has the origin of `source`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub origin: Option<ImportOrigin>,
}

/// Where an imported model comes from, as in [`ImportParams`].
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportOrigin {
    /// The name of the file, or of the model in the store of another program.
    pub file_name: String,
    /// Where another program says that it pulled the model from.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub copied_from: Option<PullSource>,
    /// The program in whose store the model was found.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub program: Option<String>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RenameParams {
    pub source: Reference,
    pub target: Reference,
    /// Whether another model that has the new name is replaced.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub force: bool,
}

/// Body of `Route::Release`: exactly one of the two fields.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ReleaseParams {
    /// The process whose leases end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pid: Option<i32>,
    /// The model whose leases end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GcParams {
    /// Only list what would be deleted.
    #[serde(default)]
    pub dry_run: bool,
    /// Delete the damaged blobs in quarantine, and nothing else.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub quarantine: bool,
}
