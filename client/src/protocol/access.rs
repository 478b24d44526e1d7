//! What the user of a connection may do, and what the policy decides about a model.

use serde::{Deserialize, Serialize};

/// What a user may do. Each right includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Right {
    /// List and open models.
    Read,
    /// Add models, and remove, rename and pin those that the user has added.
    Pull,
    /// Do the same with the models of all users, and collect.
    Administer,
}

impl Right {
    /// All rights.
    pub const ALL: [Self; 3] = [Self::Read, Self::Pull, Self::Administer];

    /// Its name in the configuration and in the protocol.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Pull => "pull",
            Self::Administer => "admin",
        }
    }
}

/// Response to `Route::Access`: the caller as the daemon sees it, and its rights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OwnAccess {
    /// The caller's user.
    pub uid: u32,
    /// The name of that user, if the daemon knows it.
    pub user: Option<String>,
    /// The groups of the process when it connected.
    pub groups: Vec<u32>,
    /// `read`, `pull` and `admin`, as far as the user has them.
    pub rights: Vec<String>,
}

/// What the policy decides about a model for the caller.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PolicyDecision {
    /// Whether the caller may use the model.
    pub allowed: bool,
    /// The number of the rule that decides, from 1; absent if none applies and the default decides.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rule: Option<u64>,
    /// The reason that the rule gives.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
    /// What the denial depends on, such as `license unknown`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// Where the rule is: `FILE:LINE`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub place: Option<String>,
}
