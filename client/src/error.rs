//! Errors of the client.

mod model;

use std::io;
use std::path::PathBuf;

pub use self::model::ModelError;
use crate::protocol::connection::{ConnectionError, FdsLost, TOO_MANY_IN_FLIGHT};
use crate::protocol::error::{ErrorBody, ErrorCode};
use crate::protocol::frame::FrameError;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The daemon responded with an error.
    #[error(transparent)]
    Daemon(#[from] ErrorBody),
    /// The socket does not exist, or nothing listens on it.
    #[error("blobd daemon: nothing listens on {socket}; start it with `blobd serve`")]
    NotRunning {
        /// The socket; several when the default ones were tried.
        socket: String,
    },
    /// Nothing listens at the system's socket, although this machine has a daemon for all its users. A program that
    /// used another daemon now would not find the models of the system.
    #[error(
        "blobd daemon: nothing listens on {socket}, although {} exists; see `systemctl status blobd`, or name \
         another socket in BLOBD_SOCKET",
        evidence.display()
    )]
    Unavailable {
        /// The system's socket.
        socket: String,
        /// A file that only machines with such a daemon have.
        evidence: PathBuf,
    },
    /// The socket cannot be connected to.
    #[error("blobd daemon: cannot connect to {socket}: {reason}{}", after_semicolon(.hint))]
    Connect {
        /// The socket.
        socket: String,
        /// Why not.
        reason: io::Error,
        /// What to do, if it is known.
        hint: Option<String>,
    },
    /// The daemon closed the connection early.
    #[error("blobd daemon: closed the connection before its response was complete; see its log")]
    Closed,
    /// The server ended before its response was complete. The request may have been executed, and a second
    /// execution would have another result.
    #[error(
        "blobd: the process that had the store open ended before its response was complete; the request may \
         have been executed"
    )]
    ServerEnded,
    /// A send or receive timed out.
    #[error("blobd daemon: silent for longer than the timeout")]
    TimedOut,
    /// The response violates the protocol.
    #[error("blobd daemon: {0}; are client and daemon of the same version?")]
    Protocol(ProtocolError),
    /// This process cannot receive all descriptors that the daemon sent.
    #[error("{FdsLost}")]
    FdsLost,
    /// The user has too many descriptors in flight over Unix sockets, and waiting did not help.
    #[error(
        "{TOO_MANY_IN_FLIGHT}; try again, raise `ulimit -n`, or end the program that does not receive its own"
    )]
    TooManyInFlight,
    /// The open model cannot be read.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The socket failed.
    #[error("blobd daemon: connection failed: {0}")]
    Io(io::Error),
}

impl ClientError {
    /// The kind of failure: the daemon's, if it sent one.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Daemon(body) => body.code,
            Self::Model(error) => error.code(),
            Self::Connect { reason, .. } if reason.kind() == io::ErrorKind::PermissionDenied => {
                ErrorCode::Denied
            }
            Self::NotRunning { .. } | Self::Unavailable { .. } => ErrorCode::Unavailable,
            Self::TooManyInFlight => ErrorCode::Busy,
            _ => ErrorCode::Internal,
        }
    }
}

impl ClientError {
    /// Whether a daemon has refused a request because it does not know this field, as an older one does.
    pub(crate) fn says_unknown_field(&self, field: &str) -> bool {
        let Self::Daemon(ErrorBody { code: ErrorCode::InvalidRequest, message, .. }) = self else {
            return false;
        };
        message.contains(&format!("unknown field `{field}`"))
    }
}

impl From<ProtocolError> for ClientError {
    fn from(error: ProtocolError) -> Self {
        Self::Protocol(error)
    }
}

impl From<ConnectionError> for ClientError {
    fn from(error: ConnectionError) -> Self {
        match error {
            ConnectionError::Closed { .. } => Self::Closed,
            ConnectionError::TimedOut => Self::TimedOut,
            ConnectionError::FdCount { found, expected } => ProtocolError::FdCount { found, expected }.into(),
            ConnectionError::Frame(error) => ProtocolError::from(error).into(),
            ConnectionError::TooManyInFlight => Self::TooManyInFlight,
            ConnectionError::Io(error) if is_fds_lost(&error) => Self::FdsLost,
            ConnectionError::Io(error) => Self::Io(error),
        }
    }
}

impl From<io::Error> for ClientError {
    fn from(error: io::Error) -> Self {
        ConnectionError::from(error).into()
    }
}

/// How a response violates `docs/PROTOCOL.md`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// Not HTTP/1.1.
    #[error("response is not HTTP: {reason}")]
    NotHttp {
        /// The parser's message.
        reason: String,
    },
    /// An unexpected status, or an error without blobd's envelope.
    #[error("response: wrong status: expected {expected}, found {found}")]
    Status {
        /// The status.
        found: u16,
        /// The one for success.
        expected: u16,
    },
    /// A part is above its length limit.
    #[error("response's {what} is longer than the {limit} allowed")]
    TooLong {
        /// What.
        what: &'static str,
        /// The limit.
        limit: u64,
    },
    /// The body's chunks are malformed.
    #[error("response's chunks are malformed")]
    Chunks,
    /// The JSON has an unexpected form.
    #[error("response: wrong JSON: {reason}")]
    Json {
        /// The parser's message.
        reason: String,
    },
    /// Invalid frame after the upgrade.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// An unexpected kind of frame.
    #[error("frame: wrong kind: expected {expected:?}, found {found:?}")]
    UnexpectedFrame {
        /// Its kind.
        found: &'static str,
        /// The expected kind.
        expected: &'static str,
    },
    /// The number of descriptors does not match the `fds` frame.
    #[error("frame: wrong number of descriptors: expected {expected}, found {found}")]
    FdCount {
        /// The number received.
        found: usize,
        /// The number announced.
        expected: u32,
    },
    /// A frame has no items of a list, or more than are left.
    #[error("frame: wrong number of {what}: expected 1 to {expected}, found {found}")]
    Count {
        /// The kind of things that are counted.
        what: &'static str,
        /// The number received.
        found: u64,
        /// The number left.
        expected: u64,
    },
    /// A batch of descriptors is out of order, empty or too large.
    #[error("descriptors {first}+{count} received after {received} of {fd_count}")]
    Batch {
        /// The number of its first descriptor.
        first: u32,
        /// Its length.
        count: u32,
        /// The number received before.
        received: u32,
        /// The total announced.
        fd_count: u32,
    },
    /// A count is above its limit.
    #[error("too many {what} announced: expected at most {limit}, found {found}")]
    TooMany {
        /// The kind of things that are counted.
        what: &'static str,
        /// The number announced.
        found: u64,
        /// The limit.
        limit: u64,
    },
    /// A layer's descriptor, header or pieces are invalid.
    #[error("layer {layer}: {problem}")]
    Layer {
        /// Its number.
        layer: usize,
        /// The fault.
        problem: &'static str,
    },
    /// A tensor's location is invalid.
    #[error("tensor {name:?}: {problem}")]
    Tensor {
        /// Its name.
        name: String,
        /// The fault.
        problem: &'static str,
    },
}

fn after_semicolon(hint: &Option<String>) -> String {
    hint.as_ref().map_or_else(String::new, |hint| format!("; {hint}"))
}

fn is_fds_lost(error: &io::Error) -> bool {
    error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<FdsLost>)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_that_of_the_daemon_if_any() {
        let daemon = ClientError::from(ErrorBody::new(ErrorCode::NoSpace, "disk full"));
        assert_eq!((daemon.code(), daemon.to_string().as_str()), (ErrorCode::NoSpace, "disk full"));
        let away = ClientError::NotRunning { socket: "/run/x.sock".into() };
        assert_eq!(away.code(), ErrorCode::Unavailable);
        assert_eq!(
            away.to_string(),
            "blobd daemon: nothing listens on /run/x.sock; start it with `blobd serve`"
        );
        let reason = io::Error::from(io::ErrorKind::PermissionDenied);
        let denied = ClientError::Connect { socket: "/x".into(), reason, hint: Some("ask".into()) };
        assert_eq!(denied.code(), ErrorCode::Denied);
        assert_eq!(denied.to_string(), "blobd daemon: cannot connect to /x: permission denied; ask");
    }

    #[test]
    fn lost_descriptors_are_distinguished_from_other_socket_errors() {
        let lost = ClientError::from(io::Error::other(FdsLost));
        assert!(matches!(lost, ClientError::FdsLost), "{lost}");
        assert!(lost.to_string().contains("ulimit -n"));
        assert!(matches!(ClientError::from(io::Error::other("x")), ClientError::Io(_)));
    }
}
