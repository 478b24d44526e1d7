//! Models that are published at a registry: pushes of stored ones, and transfers from another registry.

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

/// Body of `Route::Push`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PushParams {
    /// The stored model.
    pub reference: Reference,
    /// The name to publish it as, with the registry's host; absent for its own name.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub destination: Option<Reference>,
    /// Whether the registry is asked over plain HTTP.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
    /// The most bytes per second to send.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_rate: Option<u64>,
    /// Only finds out what the registry has already.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// Publishes no tensor index.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub no_index: bool,
    /// The form of the manifest at the registry.
    #[serde(default, skip_serializing_if = "PushForm::is_original")]
    pub form: PushForm,
}

/// The form of a manifest that is published.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum PushForm {
    /// The bytes that it has in the store.
    #[default]
    Original,
    /// CNCF ModelPack's.
    Modelpack,
    /// Docker Model Runner's.
    Docker,
    /// An OCI image of a container, with the files under `/models`.
    Image,
    /// A layer for each tensor, which only blobds read.
    Tensors,
}

impl PushForm {
    /// Whether it is the stored manifest's own, which requests need not state.
    pub fn is_original(&self) -> bool {
        *self == Self::Original
    }
}

/// The arguments of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TransferParams {
    /// The model at its registry.
    pub source: Reference,
    /// The name to publish it as, with the registry's host.
    pub destination: Reference,
    /// Whether the registry of the destination is asked over plain HTTP.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub insecure: bool,
    /// The most bytes per second to pass on.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub limit_rate: Option<u64>,
    /// Only finds out what the destination has already.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// The last line of a push.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pushed {
    /// The model's name in the store.
    pub name: String,
    /// The form of the manifest at the registry.
    #[serde(default)]
    pub form: PushForm,
    /// What the registry has now.
    #[serde(flatten)]
    pub publication: Publication,
}

/// The last line of a transfer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Transferred {
    /// The model's name at its registry, with the host.
    pub source: String,
    /// What the registry has now.
    #[serde(flatten)]
    pub publication: Publication,
}

/// A model that a registry has now.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Publication {
    /// Its name at the registry, with the host.
    pub destination: String,
    /// The digest of the manifest at the registry.
    pub digest: Digest,
    /// The digest of the manifest that had this name at the registry before, if it was another.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced: Option<Digest>,
    /// Whether the name at the registry meant the same model before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
    /// The size of the files: the sum of the next three.
    pub size: u64,
    /// The bytes of files that were sent, or in a dry run would be.
    pub sent_bytes: u64,
    /// The bytes of files that the registry took from another of its repositories.
    pub mounted_bytes: u64,
    /// The bytes of files that the repository had already.
    pub present_bytes: u64,
    /// The files, the layers first. Equal files are listed once.
    pub files: Vec<PushedFile>,
    /// The tensor index; absent if the model has none.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub index: Option<PushedIndex>,
    /// The signatures of the model that the store, or the other registry, has.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub signatures: Vec<PushedSignature>,
    /// Whether this was a dry run, which sends nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
}

/// The tensor index of a model that was pushed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushedIndex {
    /// Its size in bytes.
    pub size: u64,
    /// Whether the registry got it.
    pub delivery: ArtifactDelivery,
    /// Why the registry did not take it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// A signature of a model that was pushed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushedSignature {
    /// The ID of the key that it names: the SHA-256 of the public key's PEM file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub key_id: Option<String>,
    /// Whether the registry got it.
    pub delivery: ArtifactDelivery,
    /// Why the registry did not take it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Whether a registry got a tensor index, or a signature.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum ArtifactDelivery {
    /// The repository had it already.
    Present,
    /// It was sent, or in a dry run would be.
    Sent,
    /// The registry did not take it; the model is there nevertheless.
    Refused,
}

/// A file of a model that was pushed.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PushedFile {
    /// Its name in the manifest, or what it is in the model, such as `template`.
    pub name: String,
    /// Its SHA-256.
    pub digest: Digest,
    /// Its size in bytes.
    pub size: u64,
    /// How the registry got it.
    pub delivery: FileDelivery,
}

/// How a registry got a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum FileDelivery {
    /// The repository had it already.
    Present,
    /// The registry took it from another of its repositories.
    Mounted,
    /// It was sent, or in a dry run would be.
    Sent,
}
