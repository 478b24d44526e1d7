//! A read-only store below the writable one.

use serde::{Deserialize, Serialize};

/// A read-only store in which is looked for what the writable one lacks.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LowerStore {
    /// Its directory.
    pub path: String,
    /// Why it cannot be used, if so: its models are hidden.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub problem: Option<String>,
}
