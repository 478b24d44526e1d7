//! Responses about disk space: what uses it, what is charged to users, and unfinished downloads.
//!
//! Sizes are in bytes. Do not rename fields: scripts use these names.
#![expect(missing_docs, reason = "a name that says it all has no comment")]

use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

use super::Time;

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DiskUsage {
    /// The sum of the models' files, as if nothing were shared. A model with several names counts once, and missing
    /// files count nothing.
    pub logical_bytes: u64,
    /// The size of blobs and recipes on disk.
    pub physical_bytes: u64,
    /// What the models need of `physical_bytes`: the sum of the rows of models and of the shared one.
    #[serde(default)]
    pub stored_bytes: u64,
    /// The bytes saved by sharing: `logical_bytes` minus `stored_bytes`, at least zero.
    pub saved_bytes: u64,
    /// How many models there are: names of the same manifest are one model.
    #[serde(default)]
    pub model_count: u64,
    /// The bytes that `gc` would free.
    pub reclaimable_bytes: u64,
    /// The size on disk of unfinished imports and pulls.
    pub partial_bytes: u64,
    /// The size on disk of what only models in the trash need.
    #[serde(default)]
    pub trash_bytes: u64,
    /// The size on disk of damaged blobs in quarantine.
    #[serde(default)]
    pub quarantine_bytes: u64,
    /// The size on disk of what nothing needs but a running program still has mapped or open.
    #[serde(default)]
    pub held_bytes: u64,
    /// The size of the reserve, which is allocated so that removing works on a full disk.
    #[serde(default)]
    pub reserve_bytes: u64,
    /// The maximum size of the store on disk, if it is limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub quota_bytes: Option<u64>,
    /// The bytes that count against the quota: blobs, recipes, manifests, downloads, the trash and quarantine, but
    /// not the index, the reserve and directories.
    #[serde(default)]
    pub used_bytes: u64,
    /// Above this size models are evicted, if there is a quota and eviction is allowed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub high_watermark_bytes: Option<u64>,
    /// Eviction stops at this size.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub low_watermark_bytes: Option<u64>,
    /// The bytes of the file system that the store leaves free.
    #[serde(default)]
    pub min_free_bytes: u64,
    /// The free space of the file system.
    pub free_bytes: u64,
    pub blob_count: u64,
    /// The size on disk of the store's directory, as `du` reports it: allocated blocks, each file once. The sum of
    /// `rows`.
    #[serde(default)]
    pub disk_bytes: u64,
    /// The disjoint parts of `disk_bytes`: models first, the largest first, one row for all names of a model; then
    /// one row of each other kind, and one per unfinished download.
    #[serde(default)]
    pub rows: Vec<UsageRow>,
    /// One entry per model, sorted by name.
    pub models: Vec<ModelUsage>,
    /// With details: the parts of what several models need, the largest first; of very many, only the largest.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared_parts: Vec<SharedPart>,
    /// With details: the damaged blobs, the latest first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub quarantined: Vec<QuarantinedBlob>,
}

/// One model's disk usage.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelUsage {
    pub name: String,
    /// The sum of its files' sizes.
    pub logical_bytes: u64,
    /// The bytes on disk that only this name keeps.
    pub unique_bytes: u64,
    /// The bytes on disk that other names keep too.
    pub shared_bytes: u64,
    /// When it was last opened, if that is known.
    pub last_opened: Option<Time>,
    /// The user who opened it then, if known.
    #[serde(default)]
    pub last_opened_by: Option<UserId>,
    /// With details: which models it shares bytes with, the one that shares the most first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub shared_with: Vec<SharedWith>,
}

/// A user.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserId {
    /// The user's number.
    pub uid: u32,
    /// The user's name, if the uid has one.
    pub user: Option<String>,
}

/// A model that shares bytes with another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedWith {
    /// Its shortest unique name.
    pub name: String,
    /// The bytes on disk that both need.
    pub bytes: u64,
}

/// Bytes on disk that the same models need.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SharedPart {
    pub bytes: u64,
    /// How many models need it.
    pub model_count: u64,
    /// Their names in order; of more than were requested, the first.
    pub models: Vec<String>,
}

/// A damaged blob in quarantine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct QuarantinedBlob {
    /// The digest that its content should have.
    pub digest: Digest,
    /// Its size on disk.
    pub bytes: u64,
    /// When it was found to be damaged.
    pub since: Time,
}

/// A part of what the store takes on disk. The parts are disjoint.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UsageRow {
    pub kind: UsageKind,
    /// The first name of the model; of a download, the name that it was pulled as, if that is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub name: Option<String>,
    /// The other names of the model.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_names: Vec<String>,
    /// The digest of a download's file.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub digest: Option<Digest>,
    /// Its size on disk.
    pub bytes: u64,
    /// With details: the size of a download's file, if it is known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub size: Option<u64>,
    /// With details: how much of a download's file has arrived or was reused.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub received_bytes: Option<u64>,
    /// With details: the user who pulls a download, if that is recorded.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<UserId>,
    /// Who uses it, if it is in use; a few paths of other files.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub by: Vec<String>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnfinishedDownloads {
    /// One entry per file, the largest on disk first.
    pub downloads: Vec<UnfinishedDownload>,
}

/// A file whose download has not finished, or that belongs to a model that is not complete.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnfinishedDownload {
    /// The digest of the whole file; if only its URL is known, a digest of the URL, its length and its version.
    pub digest: Digest,
    /// The name that the model is to get, if that is recorded.
    pub name: Option<String>,
    /// The reference or the URL, without its query, that was pulled.
    pub source: Option<String>,
    /// The size of the whole file, if known.
    pub size: Option<u64>,
    /// How much of it has arrived or was reused.
    pub received_bytes: u64,
    /// Its size on disk, with blobs that only it needs.
    pub disk_bytes: u64,
    /// When the pull began, if recorded.
    pub started: Option<Time>,
    /// When bytes last arrived.
    pub last_received: Option<Time>,
    /// The user who pulls it, if recorded.
    pub uid: Option<u32>,
    /// The user's name, if the uid has one.
    pub user: Option<String>,
    /// Whether a pull uses it now.
    pub running: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RemovePartialsParams {
    /// Names of models, URLs, or digests, which may be shortened; all downloads if there are none.
    #[serde(default, deserialize_with = "super::lists::targets")]
    pub targets: Vec<String>,
    /// Only downloads that have received nothing for longer than this.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub older_than_seconds: Option<u64>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedDownloads {
    /// The downloads that were dropped.
    pub removed: Vec<DroppedDownload>,
    /// The bytes freed on disk.
    pub freed_bytes: u64,
    /// The downloads that were not dropped.
    pub kept: Vec<KeptDownload>,
}

/// A dropped download.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct DroppedDownload {
    /// The digest of the file.
    pub digest: Digest,
    /// The model's name, if recorded.
    pub name: Option<String>,
}

/// A download that was not dropped.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct KeptDownload {
    /// The digest of the file.
    pub digest: Digest,
    /// The model's name, if recorded.
    pub name: Option<String>,
    /// Why it was kept.
    pub reason: String,
}

/// The kinds of parts of a store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum UsageKind {
    /// Blobs and recipes that only one model needs.
    Model,
    /// Those that several models need, or models and the trash.
    Shared,
    /// Those that nothing needs any more, but sessions, transactions or programs use.
    InUse,
    /// An unfinished download.
    Download,
    /// Files of imports and pulls in progress.
    Staging,
    /// Data that only models in the trash need, with their records.
    Trash,
    /// Damaged blobs.
    Quarantine,
    /// Unneeded data: `gc` frees it.
    Unneeded,
    /// Manifests, origins, pins and the files that describe the store.
    Records,
    /// The copy of the index.
    Index,
    /// The audit log.
    Audit,
    /// The reserve for a full disk.
    Reserve,
    /// The directories themselves.
    Directories,
    /// Files that do not belong to blobd, and kinds that this client does not know.
    #[serde(other)]
    Other,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserUsage {
    /// The users, the one that pays for the most first. Administrators see all, and a last entry for what is charged
    /// to no user; others see only themselves.
    pub users: Vec<ChargedUser>,
    /// The groups whose members have a quota together. Administrators see all, others those that they are members of.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub groups: Vec<ChargedGroup>,
    /// The size on disk of the store's directory, for administrators: the sum of `charged_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk_bytes: Option<u64>,
}

/// What is charged to a user.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChargedUser {
    /// The user's number; `null` for what is charged to no user.
    pub uid: Option<u32>,
    /// The user's name, if the uid has one.
    pub user: Option<String>,
    /// The bytes on disk that the user pays for.
    pub charged_bytes: u64,
    /// The bytes on disk that only models and downloads of this user keep.
    pub unique_bytes: u64,
    /// The bytes on disk that other users' models and downloads keep too, whoever pays for them.
    pub shared_bytes: u64,
    /// The number of names that the user has added.
    pub models: u64,
    /// The limits; `null` if the user has none.
    pub quota: Option<UserLimits>,
    /// How the charged bytes compare with the limits.
    pub state: QuotaState,
}

/// What is charged to the members of a group together.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChargedGroup {
    /// The group, by the name or number that the configuration has.
    pub group: String,
    /// The bytes on disk that its members pay for: the sum of their `charged_bytes`.
    pub charged_bytes: u64,
    /// The number of members with a charge above 0.
    pub members: u64,
    /// The limits.
    pub quota: UserLimits,
    /// How the charged bytes compare with the limits.
    pub state: QuotaState,
}

/// The limits of a user or of a group in bytes on disk.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct UserLimits {
    /// Above it requests succeed with a note.
    pub soft_bytes: Option<u64>,
    /// Nothing is added that would exceed it.
    pub hard_bytes: Option<u64>,
}

/// How the charged bytes of a user or a group compare with the quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum QuotaState {
    /// No quota is set.
    #[default]
    None,
    /// Within it.
    Ok,
    /// More than the soft limit.
    OverSoft,
    /// As much as the hard limit or more: nothing can be added.
    Full,
    /// A state of a later version.
    #[serde(other)]
    Unknown,
}
