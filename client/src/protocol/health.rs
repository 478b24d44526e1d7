//! Whether a daemon works.

use serde::{Deserialize, Serialize};

/// Response to `Route::Health`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Health {
    /// The worst status of a check.
    pub status: HealthStatus,
    /// What was checked.
    pub checks: Vec<HealthCheck>,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct HealthCheck {
    /// Its name, such as `space`.
    pub name: String,
    /// Whether this works.
    pub status: HealthStatus,
    /// What was found.
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
    #[must_use]
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
