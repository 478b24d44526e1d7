//! `Route::PullPlan`: what a pull would download, reuse and need.

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

use super::chosen::ChosenFiles;
use super::upkeep::Eviction;

/// Response to `Route::PullPlan`: what a pull would download and reuse.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PullPlan {
    /// The model's name.
    pub name: String,
    /// The manifest's digest, if the model has a manifest already.
    pub digest: Option<Digest>,
    /// An estimate of the bytes that a pull would download, without headers and samples. Similar tensors count as stored.
    pub download_bytes: u64,
    /// Whether the store has space for it now, if necessary after it has evicted models. If not, the pull would fail.
    #[serde(default = "always")]
    pub enough_space: bool,
    /// How much space that is.
    #[serde(default)]
    pub space: PlannedSpace,
    /// The files that were chosen, if the model is some files of a repository.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub chosen: Option<ChosenFiles>,
    /// The files, in the order in which they would be pulled.
    pub files: Vec<PlannedFile>,
}

const fn always() -> bool {
    true
}

/// The disk space that a planned pull needs.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedSpace {
    /// An estimate of the bytes on disk that the pull would take.
    pub needed_bytes: u64,
    /// The bytes that may still be stored.
    pub available_bytes: u64,
    /// What limits them.
    pub limit: SpaceLimit,
    /// The group whose quota that is; only with [`SpaceLimit::GroupQuota`].
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub group: Option<String>,
    /// How many bytes must become free before the pull; 0 if it fits.
    pub missing_bytes: u64,
    /// If bytes are missing: how many models in the trash take whose names other models have taken. The pull frees them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replaced_bytes: Option<u64>,
    /// If bytes are missing: how many of them `gc` would free, if known. If models may be evicted, the pull does that.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reclaimable_bytes: Option<u64>,
    /// If bytes are missing and models may be evicted: how many bytes that would free at most, after a collection.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub evictable_bytes: Option<u64>,
    /// The models that the pull would evict.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub evicted: Vec<Eviction>,
}

/// What limits the space of a store.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum SpaceLimit {
    /// The free space of the file system, without what the store leaves free.
    #[default]
    Disk,
    /// The store's quota.
    Quota,
    /// What the quota of the user leaves; evictions and collections do not help.
    UserQuota,
    /// What the quota of a group leaves that the user is a member of; likewise.
    GroupQuota,
}

/// One file of a planned pull. The last four sizes are disjoint parts of it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlannedFile {
    /// Its component, such as `model`, or its URL.
    pub name: String,
    /// Its digest, if known in advance.
    pub digest: Option<Digest>,
    /// Its size.
    pub size: u64,
    /// The bytes that are certain to be in the store.
    pub stored_bytes: u64,
    /// The bytes that an earlier, unfinished pull has received.
    pub resumed_bytes: u64,
    /// The bytes of tensors that a similar stored model seems to have: samples of them are equal.
    pub similar_bytes: u64,
    /// The bytes that would be downloaded.
    pub download_bytes: u64,
}
