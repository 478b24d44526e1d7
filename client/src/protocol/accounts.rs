//! Responses about users: what is charged to them, and their quotas.

use serde::{Deserialize, Serialize};

/// Response to `Route::UserUsage`.
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
    /// There is no quota.
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
