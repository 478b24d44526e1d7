//! Responses about the state of the store: damage, space, trash, setup.
//!
//! Sizes are bytes, times RFC 3339 in UTC. The names of the fields are relied upon by scripts.

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

use super::error::ErrorAnswer;

/// One line of the answer to `POST /v1/verify`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum VerifyEvent {
    /// It failed; nothing follows.
    Failed(ErrorAnswer),
    /// It is done; nothing follows.
    Done(Verified),
    /// How far it is.
    Progress(VerifyProgress),
}

/// How far a verification is.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct VerifyProgress {
    /// What is being done, for people.
    pub status: String,
    /// How much there is to read.
    pub total: u64,
    /// How much of it has been read.
    pub completed: u64,
}

/// A verification's last line.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Verified {
    /// How many blobs were read.
    pub checked_blobs: u64,
    /// How much they are.
    pub checked_bytes: u64,
    /// What is not as it should be, now or since an earlier verification.
    pub corrupt: Vec<CorruptBlob>,
}

/// A blob or a recipe that is damaged or missing.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct CorruptBlob {
    /// What it should be.
    pub digest: Digest,
    /// The models that need it.
    pub models: Vec<String>,
    /// Whether it is whole again.
    pub repaired: bool,
    /// What is wrong, and if a repair was tried in vain, why.
    pub reason: String,
    /// How many bytes a repair fetched.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fetched_bytes: Option<u64>,
}

/// Answer to `GET /v1/trash`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrashList {
    /// One entry per model that `rm --keep` moved to the trash, by name.
    pub models: Vec<TrashedModel>,
}

/// A model that can be taken out of the trash.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TrashedModel {
    /// Its name.
    pub name: String,
    /// Its manifest's digest.
    pub digest: Digest,
    /// What its files add up to, as if nothing were shared.
    pub size: u64,
    /// When it was put there.
    pub removed: String,
    /// From when on it may be collected.
    pub expires: String,
}

/// Answer to `POST /v1/undelete`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Undeleted {
    /// The model's name.
    pub name: String,
    /// Its manifest's digest.
    pub digest: Digest,
}

/// Answer to `POST /v1/pin`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Pinned {
    /// The model's name.
    pub name: String,
    /// Whether eviction and removal leave it alone from now on.
    pub pinned: bool,
}

/// Answer to `GET /v1/limit` and `POST /v1/limit`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullLimit {
    /// The most bytes per second of all pulls together; `null` is no limit.
    pub bytes_per_second: Option<u64>,
}

/// Answer to `GET /v1/eviction`: the models that would be evicted to free space.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionPlan {
    /// Which models eviction may take: `never`, `pullable` or `all`.
    pub policy: String,
    /// What the store takes on disk.
    pub used_bytes: u64,
    /// The most it may take; absent if only the disk limits it.
    pub quota_bytes: Option<u64>,
    /// How much the plan is to free.
    pub needed_bytes: u64,
    /// How much of that no model needs; it would be collected before models are evicted.
    #[serde(default)]
    pub garbage_bytes: u64,
    /// What it would free, with the former.
    pub freed_bytes: u64,
    /// The models that would be evicted, in order.
    pub evicted: Vec<Eviction>,
    /// The models that are never evicted, and why.
    pub spared: Vec<Spared>,
}

/// A model that would be evicted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Eviction {
    /// Its name.
    pub name: String,
    /// What is freed with it and the models before it in the plan.
    pub freed_bytes: u64,
    /// When it was last opened, or set if that is not known.
    pub last_used: String,
    /// Where it can be pulled from again.
    pub origin: Option<String>,
}

/// A model that is not evicted.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Spared {
    /// Its name.
    pub name: String,
    /// Why.
    pub reason: String,
}

/// Answer to `GET /v1/doctor`.
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
    /// How it is.
    pub status: CheckStatus,
    /// What was found.
    pub detail: String,
    /// How to fix it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
}

/// How something is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum CheckStatus {
    /// As it should be.
    Ok,
    /// It works, with a problem.
    Warning,
    /// It does not work.
    Failure,
}

/// Answer to `POST /v1/reindex`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Reindexed {
    /// How many blobs there are.
    pub blob_count: u64,
    /// How many recipes.
    pub recipe_count: u64,
    /// How many models.
    pub model_count: u64,
    /// In how many entries the index was not what the disk says.
    pub differences: u64,
}
