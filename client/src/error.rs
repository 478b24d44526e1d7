//! What can go wrong between a client and its daemon.

mod model;

use std::io;

pub use self::model::ModelError;
use crate::protocol::connection::{ConnectionError, FdsLost, TOO_MANY_IN_FLIGHT};
use crate::protocol::error::{ErrorBody, ErrorCode};
use crate::protocol::frame::FrameError;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ClientError {
    /// The daemon answered with an error.
    #[error(transparent)]
    Daemon(#[from] ErrorBody),
    /// There is no socket, or nobody behind it.
    #[error("blobd daemon: nothing listens on {socket}; start it with `blobd serve`")]
    NotRunning {
        /// The socket; several when the default ones were tried.
        socket: String,
    },
    /// The socket cannot be connected to.
    #[error("blobd daemon: cannot connect to {socket}: {reason}{}", connect_hint(.reason))]
    Connect {
        /// The socket.
        socket: String,
        /// Why not.
        reason: io::Error,
    },
    /// The daemon went away in the middle.
    #[error("blobd daemon: closed the connection before its answer was complete; see its log")]
    Closed,
    /// The daemon took or sent nothing for longer than the client's timeout.
    #[error("blobd daemon: silent for longer than the timeout")]
    TimedOut,
    /// What came is not the protocol.
    #[error("blobd daemon: {0}; are client and daemon of the same version?")]
    Protocol(ProtocolError),
    /// The descriptors that the daemon sent do not fit this process.
    #[error("{FdsLost}")]
    FdsLost,
    /// The user has too many descriptors in flight over Unix sockets to send one more, and waiting did
    /// not help.
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
    /// The kind of failure: the daemon's own if it told one.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Daemon(body) => body.code,
            Self::Model(error) => error.code(),
            Self::Connect { reason, .. } if reason.kind() == io::ErrorKind::PermissionDenied => {
                ErrorCode::Denied
            }
            Self::TooManyInFlight => ErrorCode::Busy,
            _ => ErrorCode::Internal,
        }
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

/// How an answer departs from `docs/PROTOCOL.md`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ProtocolError {
    /// Not HTTP/1.1.
    #[error("answer is not HTTP: {reason}")]
    NotHttp {
        /// What the parser says.
        reason: String,
    },
    /// Another status than the request can have, or an error without blobd's envelope.
    #[error("answer has status {found}, {expected} expected")]
    Status {
        /// The status.
        found: u16,
        /// The one for success.
        expected: u16,
    },
    /// Something is longer than it may be.
    #[error("answer's {what} is longer than the {limit} allowed")]
    TooLong {
        /// What.
        what: &'static str,
        /// How much may come.
        limit: u64,
    },
    /// The body's chunks are malformed.
    #[error("answer's chunks are malformed")]
    Chunks,
    /// JSON of another form than the request has for an answer.
    #[error("answer is not the JSON expected: {reason}")]
    Json {
        /// What the parser says.
        reason: String,
    },
    /// Bytes after the upgrade are no frame.
    #[error(transparent)]
    Frame(#[from] FrameError),
    /// A frame that has no place here.
    #[error("frame {found:?} came, {expected:?} expected")]
    UnexpectedFrame {
        /// Its kind.
        found: &'static str,
        /// The kind that belongs here.
        expected: &'static str,
    },
    /// An `fds` frame came with another number of descriptors than it says.
    #[error("{found} descriptors came with a frame that promises {expected}")]
    FdCount {
        /// How many came.
        found: usize,
        /// How many were promised.
        expected: u32,
    },
    /// A frame has more parts of a list than are left, or none.
    #[error("{found} {what} in one frame, 1 to {expected} expected")]
    Count {
        /// What is counted.
        what: &'static str,
        /// How many came.
        found: u64,
        /// How many are still to come.
        expected: u64,
    },
    /// A batch of descriptors does not follow the one before, is empty, or is too large.
    #[error("descriptors {first}+{count} came after {received} of {fd_count}")]
    Batch {
        /// The number of its first.
        first: u32,
        /// How many it has.
        count: u32,
        /// How many came before.
        received: u32,
        /// How many were promised in all.
        fd_count: u32,
    },
    /// A count is above its limit.
    #[error("{found} {what} announced, at most {limit} allowed")]
    TooMany {
        /// What is counted.
        what: &'static str,
        /// How many were announced.
        found: u64,
        /// How many are allowed.
        limit: u64,
    },
    /// A layer's place, header or pieces make no sense.
    #[error("layer {layer}: {problem}")]
    Layer {
        /// Its number.
        layer: usize,
        /// What is wrong.
        problem: &'static str,
    },
    /// A tensor's place makes no sense.
    #[error("tensor {name:?}: {problem}")]
    Tensor {
        /// Its name.
        name: String,
        /// What is wrong.
        problem: &'static str,
    },
}

fn connect_hint(reason: &io::Error) -> &'static str {
    match reason.kind() {
        io::ErrorKind::PermissionDenied => "; join the group that the socket belongs to",
        _ => "",
    }
}

fn is_fds_lost(error: &io::Error) -> bool {
    error.get_ref().is_some_and(<dyn std::error::Error + Send + Sync>::is::<FdsLost>)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn code_is_the_daemons_if_it_told_one() {
        let daemon = ClientError::from(ErrorBody::new(ErrorCode::NoSpace, "disk full"));
        assert_eq!((daemon.code(), daemon.to_string().as_str()), (ErrorCode::NoSpace, "disk full"));
        let away = ClientError::NotRunning { socket: "/run/x.sock".into() };
        assert_eq!(away.code(), ErrorCode::Internal);
        assert_eq!(
            away.to_string(),
            "blobd daemon: nothing listens on /run/x.sock; start it with `blobd serve`"
        );
        let reason = io::Error::from(io::ErrorKind::PermissionDenied);
        let denied = ClientError::Connect { socket: "/run/x.sock".into(), reason };
        assert_eq!(denied.code(), ErrorCode::Denied);
    }

    #[test]
    fn lost_descriptors_are_told_from_other_failures_of_the_socket() {
        let lost = ClientError::from(io::Error::other(FdsLost));
        assert!(matches!(lost, ClientError::FdsLost), "{lost}");
        assert!(lost.to_string().contains("ulimit -n"));
        assert!(matches!(ClientError::from(io::Error::other("x")), ClientError::Io(_)));
    }
}
