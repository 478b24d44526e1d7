//! What the daemon's policy decides about a model.

use serde::{Deserialize, Serialize};

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
