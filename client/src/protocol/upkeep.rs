//! Responses about the maintenance of the store: verification, trash, pins, eviction, setup checks.
//!
//! Sizes are in bytes, times are RFC 3339 in UTC. Do not rename fields: scripts use these names.

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

use super::event::{Phase, Progress, State, progress_types};
use super::lost_model::{Kept, NameEffects};

/// Response to `Route::Gc`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReport {
    /// Whether this was a dry run, which deletes nothing.
    pub dry_run: bool,
    /// The items that were deleted, or in a dry run would be.
    pub deleted: Vec<GcItem>,
    /// Those that are not listed, because there are so many.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unlisted: Option<Unlisted>,
    /// The bytes that this frees on disk.
    pub freed_bytes: u64,
    /// Bytes that nothing needs but that stay because a running program has them open or mapped.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Kept>,
    /// The directories of the lower stores, which were not collected.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub lower_stores: Vec<String>,
}

/// An item of a collection.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcItem {
    /// Its digest; absent for files of an unfinished transaction.
    pub digest: Option<Digest>,
    /// Its size on disk.
    pub size: u64,
    /// Why it is collected.
    pub reason: GcReason,
    /// The model or file that it belonged to, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub of: Option<String>,
    /// What is known of a damaged blob in quarantine.
    #[serde(default, skip_serializing_if = "Option::is_none", flatten)]
    pub quarantined: Option<QuarantinedItem>,
}

/// A damaged blob that is deleted from quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantinedItem {
    /// When it was found to be damaged, RFC 3339 in UTC.
    pub since: String,
    /// The models that consist of it, those in the trash too.
    pub models: Vec<String>,
    /// Whether they need it and the store has no other copy, so that they stay damaged.
    pub is_needed: bool,
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
    /// The record of a model in the trash that has expired.
    ExpiredTrash,
    /// Files of a transaction that did not finish.
    AbandonedStaging,
    /// The received part of an abandoned download.
    AbandonedDownload,
    /// A damaged blob in quarantine.
    Quarantined,
}

/// The progress of a verification.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyProgress {
    /// The current step, for people.
    pub status: String,
    /// Whether the work goes on.
    #[serde(default)]
    pub state: State,
    /// What the client waits for, once the work has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The number of bytes to read.
    pub total: u64,
    /// The number of bytes read so far.
    pub completed: u64,
}

progress_types!(VerifyProgress);

/// A verification's last line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// The number of blobs read.
    pub checked_blobs: u64,
    /// The number of bytes read.
    pub checked_bytes: u64,
    /// The damaged or missing blobs and recipes that this or an earlier verification found.
    pub corrupt: Vec<CorruptBlob>,
    /// What could not be verified because a lower store cannot be used.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub unavailable: Option<Unavailable>,
}

/// Blobs that are in a lower store which cannot be used now. Nothing says that they are damaged.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unavailable {
    /// Their number.
    pub blobs: u64,
    /// Why the lower store cannot be used.
    pub reason: String,
}

/// A blob or a recipe that is damaged or missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorruptBlob {
    /// The digest that its content should have.
    pub digest: Digest,
    /// The models that need it.
    pub models: Vec<String>,
    /// Whether it has been repaired.
    pub repaired: bool,
    /// The fault; after a failed repair, also why it failed.
    pub reason: String,
    /// The number of bytes that a repair downloaded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetched_bytes: Option<u64>,
}

/// Response to `Route::Trash`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrashList {
    /// One entry per model that `rm --keep` moved to the trash, sorted by name.
    pub models: Vec<TrashedModel>,
}

/// A model in the trash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrashedModel {
    /// Its name.
    pub name: String,
    /// Its manifest's digest.
    pub digest: Digest,
    /// The sum of its files' sizes, as if nothing were shared.
    pub size: u64,
    /// When it was removed.
    pub removed: String,
    /// When it expires; then it may be collected.
    pub expires: String,
    /// Whether another model has taken its name. Such a model is deleted before it expires if its space is needed.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub replaced: bool,
    /// The user who had added the name, and may restore it besides administrators; absent if that is not recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added_by: Option<u32>,
}

/// Files of a collection that its response does not list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unlisted {
    /// How many.
    pub files: u64,
    /// Their size on disk in bytes.
    pub bytes: u64,
}

/// Response to `Route::Undelete`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undeleted {
    /// The model's name.
    pub name: String,
    /// Its manifest's digest.
    pub digest: Digest,
    /// What else has happened.
    #[serde(flatten)]
    pub effects: NameEffects,
}

/// Response to `Route::Pin`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// The model's name.
    pub name: String,
    /// Whether it is pinned now: neither evicted nor removed.
    pub pinned: bool,
    /// Whether it was so before.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub unchanged: bool,
}

/// Response to `Route::Limit` and `Route::SetLimit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullLimit {
    /// The maximum rate of all pulls together, in bytes per second; `null` is no limit.
    pub bytes_per_second: Option<u64>,
}

/// Response to `Route::Eviction`: the models that would be evicted to free space.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionPlan {
    /// Which models eviction may take: `never`, `pullable` or `all`.
    pub policy: String,
    /// The size of the store on disk.
    pub used_bytes: u64,
    /// The quota; absent if only the disk limits the store.
    pub quota_bytes: Option<u64>,
    /// The bytes that the plan must free.
    pub needed_bytes: u64,
    /// The bytes that no model needs; they are collected before models are evicted.
    #[serde(default)]
    pub garbage_bytes: u64,
    /// The bytes that the plan would free, including `garbage_bytes`.
    pub freed_bytes: u64,
    /// The models that would be evicted, in order.
    pub evicted: Vec<Eviction>,
    /// The models that are never evicted, and why.
    pub spared: Vec<Spared>,
}

/// A model in the eviction plan.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Eviction {
    /// Its name.
    pub name: String,
    /// The bytes freed after this model and those before it in the plan have been evicted.
    pub freed_bytes: u64,
    /// When it was last opened; if that is not known, when its tag was set.
    pub last_used: String,
    /// Its origin: the registry's name for it, or `import` and the file's name.
    pub origin: Option<String>,
}

/// A model that the plan does not evict.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spared {
    /// Its name.
    pub name: String,
    /// Why it is not evicted.
    pub reason: String,
}

/// Response to `Route::Doctor`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorReport {
    /// One entry per check.
    pub checks: Vec<Check>,
}

/// One check of the setup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    /// What was checked.
    pub name: String,
    /// The result.
    pub status: CheckStatus,
    /// What was found.
    pub detail: String,
    /// What may happen because of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why: Option<String>,
    /// How to fix it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// The command for a shell that fixes it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub command: Option<String>,
}

impl Check {
    /// The result of a check, without reason and advice.
    pub fn new(name: impl Into<String>, status: CheckStatus, detail: impl Into<String>) -> Self {
        Self { name: name.into(), status, detail: detail.into(), why: None, hint: None, command: None }
    }

    /// Adds what may happen because of it.
    #[must_use]
    pub fn because(self, why: impl Into<String>) -> Self {
        Self { why: Some(why.into()), ..self }
    }

    /// Adds how to fix it.
    #[must_use]
    pub fn with_hint(self, hint: impl Into<String>) -> Self {
        Self { hint: Some(hint.into()), ..self }
    }

    /// Adds the command for a shell that fixes it.
    #[must_use]
    pub fn mended_by(self, command: impl Into<String>) -> Self {
        Self { command: Some(command.into()), ..self }
    }
}

/// The result of a check.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckStatus {
    /// No problem was found.
    Ok,
    /// It works, and could work better.
    Note,
    /// It works, but there is a problem.
    Warning,
    /// It does not work.
    Failure,
}

/// Response to `Route::Reindex`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reindexed {
    /// The number of blobs.
    pub blob_count: u64,
    /// The number of recipes.
    pub recipe_count: u64,
    /// The number of models.
    pub model_count: u64,
    /// The number of entries in which the index differed from the disk.
    pub differences: u64,
}
