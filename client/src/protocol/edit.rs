//! `Route::Edit`: a model with other metadata and the same tensors.

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

use super::lost_model::NameEffects;

/// Body of `Route::Edit`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct EditParams {
    /// The model.
    pub source: Reference,
    /// The name of the new model.
    pub target: Reference,
    /// The changes of metadata keys.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub keys: Vec<KeyChange>,
    /// The text of the manifest's template layer, which engines that follow the manifest use. The layer is
    /// replaced, or added.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_layer: Option<String>,
    /// Whether another model that has the target's name loses it.
    #[serde(default)]
    pub force: bool,
    /// Only report what would change.
    #[serde(default)]
    pub dry_run: bool,
}

/// The change of a metadata key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct KeyChange {
    /// The key.
    pub key: String,
    /// The new value as text, JSON for an array; the key is removed if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub value: Option<String>,
    /// The type of the value, such as `uint32` or `array<string>`; if absent, the type that the key has, or for a
    /// new key one that fits the text.
    #[serde(default, rename = "type", skip_serializing_if = "Option::is_none")]
    pub value_type: Option<String>,
}

/// The result of an edit.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Edited {
    /// The model's name.
    pub name: String,
    /// The manifest's digest; `null` in a dry run, which does not compute it.
    pub digest: Option<Digest>,
    /// The bytes of the blobs that were written, or in a dry run would be at most.
    pub new_bytes: u64,
    /// The keys with another value.
    pub changed: Vec<ChangedKey>,
    /// The template layer of the manifest, if it has one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub template_layer: Option<TemplateLayer>,
    /// Whether the name meant the same model before, and nothing was written.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
    /// Whether this was a dry run, which writes nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// What else has happened.
    #[serde(flatten)]
    pub effects: NameEffects,
}

/// A metadata key with another value.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ChangedKey {
    /// The key.
    pub key: String,
    /// The old value in the form of `metadata` in the details of a model; `null` if there was none.
    pub from: serde_json::Value,
    /// The new value; `null` if it was removed.
    pub to: serde_json::Value,
}

/// Whether the manifest's template layer was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum TemplateLayer {
    /// It is that of the source.
    Kept,
    /// It has another text.
    Replaced,
    /// The source had none.
    Added,
}
