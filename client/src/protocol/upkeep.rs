//! Responses about the maintenance of the store: collection, verification, eviction, setup checks, health, settings.
//!
//! Sizes are in bytes. Do not rename fields: scripts use these names.
#![expect(missing_docs, reason = "a name that says it all has no comment")]

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

use super::Time;
use super::event::{Phase, Progress, State, progress_types};
use super::naming::{Kept, Spared};

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct GcReport {
    /// Whether this was a dry run, which deletes nothing.
    pub dry_run: bool,
    /// The items that were deleted, or in a dry run would be.
    pub deleted: Vec<GcItem>,
    /// The items that are not listed, if there are too many.
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
    /// Its digest; `null` for files of an unfinished transaction.
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
    /// When it was found to be damaged.
    pub since: Time,
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

/// Files of a collection that its response does not list.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Unlisted {
    /// How many.
    pub files: u64,
    /// Their size on disk in bytes.
    pub bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullLimit {
    /// The maximum rate of all pulls, pushes and transfers together, in bytes per second; `null` if not limited.
    pub bytes_per_second: Option<u64>,
}

/// Response to `Route::Eviction`: the models that would be evicted to free space.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionPlan {
    /// Which models eviction may take: `never`, `pullable` or `all`.
    pub policy: String,
    /// The size of the store on disk.
    pub used_bytes: u64,
    /// The quota; `null` if only the disk limits the store.
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
    pub name: String,
    /// The bytes freed after this model and those before it in the plan have been evicted.
    pub freed_bytes: u64,
    /// When it was last opened; if that is not known, when its tag was set.
    pub last_used: Time,
    /// Its origin: the registry's name for it, or `import` and the file's name.
    pub origin: Option<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DoctorReport {
    /// One entry per check.
    pub checks: Vec<Check>,
}

/// One check of the setup.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Check {
    pub name: String,
    pub status: CheckStatus,
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

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reindexed {
    pub blob_count: u64,
    pub recipe_count: u64,
    pub model_count: u64,
    /// The number of entries in which the index differed from the disk.
    pub differences: u64,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The worst status of a check.
    pub status: HealthStatus,
    pub checks: Vec<HealthCheck>,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthCheck {
    /// Its name, such as `space`.
    pub name: String,
    /// Whether this works.
    pub status: HealthStatus,
    pub detail: String,
}

/// Whether something works.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum HealthStatus {
    /// It works.
    Ok,
    /// It works, and an administrator should look at it.
    Degraded,
    /// It does not work, or this client does not know its status.
    #[serde(other)]
    Failing,
}

impl HealthStatus {
    /// As in JSON.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Ok => "ok",
            Self::Degraded => "degraded",
            Self::Failing => "failing",
        }
    }
}

impl From<Vec<HealthCheck>> for Health {
    fn from(checks: Vec<HealthCheck>) -> Self {
        let status = checks.iter().map(|check| check.status).max().unwrap_or(HealthStatus::Ok);
        Self { status, checks }
    }
}

impl HealthCheck {
    /// A result.
    pub fn new(name: &str, status: HealthStatus, detail: impl Into<String>) -> Self {
        Self { name: name.to_owned(), status, detail: detail.into() }
    }
}

/// Response to `Route::Configuration`: the settings that the daemon uses.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Configuration {
    /// The path of the configuration file; absent if there is no such file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub file: Option<String>,
    /// Every key of the configuration file, whether it is set or not.
    pub settings: Vec<Setting>,
}

/// A value as the configuration file would have it.
pub type SettingValue = serde_json::Value;

/// The value of one key.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    /// The key with its section, such as `space.quota`.
    pub key: String,
    /// The value as the configuration file would have it; `null` if the key has neither a value nor a default.
    /// Sizes are texts such as `"200 GiB"`, or numbers of bytes if they are not whole KiB.
    pub value: SettingValue,
    /// Where the value comes from.
    pub origin: SettingOrigin,
    /// The exact place: `FILE:LINE`, the environment variable, or the option; absent for defaults.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
    /// What makes a changed value take effect.
    pub applied_by: AppliedBy,
}

/// Where a value comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum SettingOrigin {
    /// The key is not set.
    Default,
    /// The configuration file.
    File,
    /// An environment variable.
    Environment,
    /// An option of the command line.
    Option,
}

/// What makes a running daemon use a changed value.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum AppliedBy {
    /// SIGHUP, as `systemctl reload` sends it.
    Reload,
    /// A restart of the daemon.
    Restart,
}

/// The settings whose values differ, as pairs of `old` and `new`.
pub fn differences<'s>(
    old: &'s Configuration,
    new: &'s Configuration,
) -> impl Iterator<Item = (&'s Setting, &'s Setting)> {
    let pairs = new
        .settings
        .iter()
        .filter_map(|new| old.settings.iter().find(|old| old.key == new.key).map(|old| (old, new)));
    pairs.filter(|(old, new)| old.value != new.value)
}
