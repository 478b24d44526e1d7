//! What a client asks for.

use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use serde::{Deserialize, Serialize};

/// Body of `POST /v1/open`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct OpenParams {
    /// The model.
    pub reference: Reference,
    /// Which tensors to locate and pass descriptors for.
    #[serde(default)]
    pub tensors: TensorSelection,
    /// Only the layers that play this part (`model`, `projector`, `template`, …), or, if it ends in
    /// a slash, whose name starts with it (`text_encoder/`); all if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub component: Option<String>,
    /// Which layers to describe so that they can be read as the files they were.
    #[serde(default)]
    pub files: FileSelection,
}

impl OpenParams {
    /// All tensors of all layers, and those files that are stored whole.
    #[must_use]
    pub const fn new(reference: Reference) -> Self {
        Self { reference, tensors: TensorSelection::All, component: None, files: FileSelection::Whole }
    }
}

/// Some of a model's tensors.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TensorSelection {
    /// Every tensor.
    #[default]
    All,
    /// None: for a caller who wants files only.
    None,
    /// Those whose name starts with this.
    Prefix(String),
    /// Those with these names; one that the model lacks is an error.
    Names(Vec<String>),
    /// Stacks that have one of these experts, and tensors that are one of them.
    Experts(ExpertSelection),
}

/// Some experts of a mixture.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ExpertSelection {
    /// How the names of their tensors start, such as `blk.3.`; empty for all layers.
    #[serde(default)]
    pub prefix: String,
    /// Which experts, counted from 0.
    pub numbers: Vec<u64>,
}

/// Which layers come with the pieces that they are made of.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FileSelection {
    /// Those that are stored whole: templates, parameters, licences. They cost one descriptor.
    #[default]
    Whole,
    /// All: split files too come with the list of segments that rebuilds them.
    All,
}

/// Body of `POST /v1/import`; the open file follows in a frame.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ImportParams {
    /// The file's name, for messages and for the model's name when none is given.
    pub file_name: String,
    /// The model's name; made from the file's name if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Reference>,
}

/// Body of `POST /v1/pull`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PullParams {
    /// The model, or the address of a GGUF file.
    #[serde(rename = "reference")]
    pub source: PullSource,
    /// The model's name in the store; that of its source if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<Reference>,
    /// The most bytes per second that may come over the network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_rate: Option<u64>,
}

impl PullParams {
    /// The model that a registry has, under the registry's own name for it.
    #[must_use]
    pub const fn of(reference: Reference) -> Self {
        Self { source: PullSource::Registry(reference), name: None, limit_rate: None }
    }
}

/// Body of `POST /v1/remove`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemoveParams {
    /// The names to drop; what only they need is freed.
    pub references: Vec<Reference>,
    /// For so many seconds nothing is freed: the models go to the trash, and can be taken out.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_seconds: Option<u64>,
}

/// Body of `POST /v1/undelete`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct UndeleteParams {
    /// The model, by the name that it had.
    pub reference: Reference,
}

/// Body of `POST /v1/pin`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PinParams {
    /// The model.
    pub reference: Reference,
    /// Whether it is to be pinned from now on.
    pub pinned: bool,
}

/// Body of `POST /v1/limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct LimitParams {
    /// The most bytes per second of all pulls together; `null` or 0 is no limit. It must be there:
    /// a body that says nothing lifts no limit.
    #[serde(deserialize_with = "Option::deserialize")]
    pub bytes_per_second: Option<u64>,
}

/// Body of `POST /v1/verify`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct VerifyParams {
    /// The model; everything there is if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reference: Option<Reference>,
    /// Fetch again what is damaged.
    #[serde(default)]
    pub repair: bool,
}

/// Body of `POST /v1/tag`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TagParams {
    /// The model.
    pub source: Reference,
    /// Its further name; what it named before is let go.
    pub target: Reference,
}

/// Body of `POST /v1/release`: one of both.
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

/// Body of `POST /v1/gc`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct GcParams {
    /// Make the plan and do nothing.
    #[serde(default)]
    pub dry_run: bool,
}
