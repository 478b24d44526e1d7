//! `Route::Promote`: copies what a model uses of lower stores into the writable store.

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

use super::lost_model::NameEffects;

/// Body of `Route::Promote`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromoteParams {
    /// The model.
    pub reference: Reference,
    /// Only report what would be copied.
    #[serde(default)]
    pub dry_run: bool,
}

/// The result of a promotion.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Promoted {
    /// The model's name.
    pub name: String,
    /// The manifest's digest.
    pub digest: Digest,
    /// The lower store that the model was in; absent if the writable store had its name already.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<String>,
    /// The bytes of the blobs that were copied, or in a dry run would be.
    pub copied_bytes: u64,
    /// The number of these blobs.
    pub copied_blobs: u64,
    /// Whether this was a dry run, which writes nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub dry_run: bool,
    /// What else has happened.
    #[serde(flatten)]
    pub effects: NameEffects,
}
