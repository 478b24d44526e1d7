//! The lines of a response that reports work in progress.

use serde::{Deserialize, Serialize};

use super::error::ErrorResponse;

/// One line of a response that reports work in progress.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Event<P, D> {
    /// The work failed; nothing follows.
    Failed(ErrorResponse),
    /// The work succeeded; nothing follows.
    Done(D),
    /// Its progress.
    Progress(P),
}

/// The progress of an edit, a promotion or a push.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WorkProgress {
    /// The current step, for people.
    pub status: String,
    /// Whether the work goes on.
    #[serde(default)]
    pub state: State,
    /// What the client waits for, once the work has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// The bytes to be read, copied or sent, once known.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub total: Option<u64>,
    /// How many of them have been.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub completed: Option<u64>,
}

/// The progress of an import: a frame.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ImportProgress {
    /// How many bytes of the files have been read.
    pub completed: u64,
    /// The size of the files; 0 until it is known.
    pub total: u64,
    /// Whether the work goes on; `working` if absent.
    #[serde(default, skip_serializing_if = "State::is_working")]
    pub state: State,
    /// What the client waits for, once the work has begun.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase: Option<Phase>,
    /// While tensors are written after all bytes have been read: how many are stored.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase_completed: Option<u64>,
    /// How many there are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub phase_total: Option<u64>,
}

/// The progress of some kind of work.
pub trait Progress: Default {
    /// The progress at the beginning of a step. `status` describes it for people.
    fn step(status: impl Into<String>, state: State, phase: Option<Phase>) -> Self;

    /// The work waits for its turn.
    fn queued(status: impl Into<String>) -> Self {
        Self::step(status, State::Queued, None)
    }

    /// The work goes on.
    fn working(status: impl Into<String>, phase: Phase) -> Self {
        Self::step(status, State::Working, Some(phase))
    }

    /// The work waits for a server.
    fn waiting(status: impl Into<String>, phase: Phase) -> Self {
        Self::step(status, State::Waiting, Some(phase))
    }
}

macro_rules! progress_types {
    ($($progress:ty),*) => {
        $(impl Progress for $progress {
            fn step(status: impl Into<String>, state: State, phase: Option<Phase>) -> Self {
                Self { status: status.into(), state, phase, ..Self::default() }
            }
        })*
    };
}

pub(super) use progress_types;

progress_types!(WorkProgress);

/// Whether work goes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum State {
    /// It goes on.
    #[default]
    Working,
    /// It waits for its turn: other work of the daemon must end before.
    Queued,
    /// It waits for a server that sends nothing.
    Waiting,
    /// A state of a later version.
    #[serde(other)]
    Unknown,
}

impl State {
    pub(super) fn is_working(&self) -> bool {
        *self == Self::Working
    }
}

/// The step that work is in, which is what its client waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Phase {
    /// A registry is asked which files the model has.
    Resolving,
    /// A file is received.
    Receiving,
    /// Files are sent to a registry.
    Sending,
    /// Manifests and recipes are read.
    Reading,
    /// Stored or received bytes are read, and their digests computed.
    Hashing,
    /// Bytes are written to the store.
    Writing,
    /// Written bytes are made durable.
    Syncing,
    /// The model gets its manifest and its name.
    Committing,
    /// A damaged blob is replaced.
    Repairing,
    /// A phase of a later version.
    #[serde(other)]
    Unknown,
}
