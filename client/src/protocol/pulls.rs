//! The pulls in progress.

use serde::{Deserialize, Serialize};

use super::event::{Phase, State};

/// Response to `Route::RunningPulls`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningPulls {
    /// One entry per pull, the oldest first.
    pub pulls: Vec<RunningPull>,
}

/// A pull in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct RunningPull {
    /// The name that the model is to get.
    pub model: String,
    /// The reference or the URL that is pulled, without credentials and query.
    pub source: String,
    /// The process that requested it.
    pub pid: i32,
    /// Its user.
    pub uid: u32,
    /// The user's name, if the uid has one.
    pub user: Option<String>,
    /// When it began, RFC 3339 in UTC.
    pub since: String,
    /// What is being done, for people: the status of the last event.
    pub status: String,
    /// Whether the pull goes on: that of the last event.
    #[serde(default)]
    pub state: State,
    /// The step that it is in: that of the last event.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The size of the model's files, if known.
    pub total_bytes: Option<u64>,
    /// How many of these bytes are there.
    pub completed_bytes: u64,
    /// How many bytes have arrived in each second recently.
    pub bytes_per_second: u64,
}
