//! `POST /v1/promote`: copies what a model uses of lower stores into the writable store.

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use serde::{Deserialize, Serialize};

use super::error::ErrorResponse;
use super::lost_model::NameEffects;

/// Body of `POST /v1/promote`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct PromoteParams {
    /// The model.
    pub reference: Reference,
    /// Only report what would be copied.
    #[serde(default)]
    pub dry_run: bool,
}

/// One line of the response to `POST /v1/promote`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum PromoteEvent {
    /// The copy failed; nothing follows.
    Failed(ErrorResponse),
    /// The copy succeeded; nothing follows.
    Done(Promoted),
    /// How much has been copied.
    Progress(PromoteProgress),
}

impl From<PromoteProgress> for PromoteEvent {
    fn from(progress: PromoteProgress) -> Self {
        Self::Progress(progress)
    }
}

/// The progress of a promotion.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PromoteProgress {
    /// The current step, for people.
    pub status: String,
    /// The bytes to be copied, once known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// The bytes copied.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
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
