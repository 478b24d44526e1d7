//! Errors of the client and of an open model.

use std::io;
use std::path::PathBuf;

use blobd_store_format::gguf::GgufError;

use crate::protocol::connection::{ConnectionError, FdsLost, TOO_MANY_IN_FLIGHT};
use crate::protocol::error::{ErrorBody, ErrorCode};
use crate::protocol::frame::FrameError;

/// Why a request failed.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[non_exhaustive]
pub enum ClientError {
    #[error(transparent)]
    Daemon(#[from] ErrorBody),
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
        socket: String,
        /// A file that only machines with such a daemon have.
        evidence: PathBuf,
    },
    #[error("blobd daemon: cannot connect to {socket}: {reason}{}", after_semicolon(.hint))]
    Connect { socket: String, reason: io::Error, hint: Option<String> },
    #[error("blobd daemon: closed the connection before its response was complete; see its log")]
    Closed,
    /// The server ended before its response was complete. The request may have been executed, and a second
    /// execution would have another result.
    #[error(
        "blobd: the process that had the store open ended before its response was complete; the request may \
         have been executed"
    )]
    ServerEnded,
    #[error("blobd daemon: silent for longer than the timeout")]
    TimedOut,
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
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("blobd daemon: connection failed: {0}")]
    Io(io::Error),
}

impl ClientError {
    /// The kind of failure: the daemon's, if it sent one.
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
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[non_exhaustive]
pub enum ProtocolError {
    #[error("response is not HTTP: {reason}")]
    NotHttp { reason: String },
    /// An unexpected status, or an error without blobd's envelope.
    #[error("response: wrong status: expected {expected}, found {found}")]
    Status { found: u16, expected: u16 },
    #[error("response's {what} is longer than the {limit} allowed")]
    TooLong { what: &'static str, limit: u64 },
    #[error("response's chunks are malformed")]
    Chunks,
    #[error("response: wrong JSON: {reason}")]
    Json { reason: String },
    #[error(transparent)]
    Frame(#[from] FrameError),
    #[error("frame: wrong kind: expected {expected:?}, found {found:?}")]
    UnexpectedFrame { found: &'static str, expected: &'static str },
    #[error("frame: wrong number of descriptors: expected {expected}, found {found}")]
    FdCount { found: usize, expected: u32 },
    #[error("frame: wrong number of {what}: expected 1 to {expected}, found {found}")]
    Count { what: &'static str, found: u64, expected: u64 },
    #[error("descriptors {first}+{count} received after {received} of {fd_count}")]
    Batch { first: u32, count: u32, received: u32, fd_count: u32 },
    #[error("too many {what} announced: expected at most {limit}, found {found}")]
    TooMany { what: &'static str, found: u64, limit: u64 },
    #[error("layer {layer}: {problem}")]
    Layer { layer: usize, problem: &'static str },
    #[error("tensor {name:?}: {problem}")]
    Tensor { name: String, problem: &'static str },
}

/// Why an open model cannot be read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[non_exhaustive]
pub enum ModelError {
    #[error("model {model}: no tensor {name:?}")]
    NoTensor { model: String, name: String },
    #[error("layer {layer}: no such layer, the model has {count}")]
    NoLayer { layer: usize, count: usize },
    #[error("{}: no GGUF header", .layer.map_or("model".to_owned(), |layer| format!("layer {layer}")))]
    NoHeader {
        /// The requested layer; any if absent.
        layer: Option<usize>,
    },
    #[error("{}{reason}", .layer.map_or(String::new(), |layer| format!("layer {layer}: ")))]
    Gguf {
        /// The layer; absent for the header to be made.
        layer: Option<usize>,
        reason: GgufError,
    },
    /// A tensor was not opened, so no image of the file can be made.
    #[error("layer {layer}: tensor {name:?} was not requested; open with TensorSelection::All")]
    NotOpened { layer: usize, name: String },
    /// The tensor table and the file's header disagree about a size.
    #[error(
        "tensor {name:?}: wrong size: expected {expected} bytes by its type and shape, found {found}; run `blobd verify`"
    )]
    Size { name: String, found: u64, expected: u64 },
    /// The address space for an image cannot be reserved.
    #[error("image of {length} bytes: {reason}; raise `ulimit -v` or `sysctl vm.max_map_count`")]
    Image { length: u64, reason: io::Error },
    #[error("layer {layer}: stored in pieces; use write_layer")]
    NotWhole { layer: usize },
    #[error("layer {layer}: its pieces were not requested; open with FileSelection::All")]
    NoPieces { layer: usize },
    #[error("layer {layer}: not UTF-8 text")]
    NotText { layer: usize },
    /// No descriptor with this number: the location is not from this model.
    #[error("descriptor {fd}: no such descriptor, the model has {count}")]
    NoFd { fd: u32, count: usize },
    #[error("descriptor {fd}: file too short: expected {expected} bytes, found {found}; run `blobd verify`")]
    Short { fd: u32, found: u64, expected: u64 },
    #[error("descriptor {fd}: cannot be mapped: {reason}{}", map_hint(.reason))]
    Map { fd: u32, reason: io::Error },
    #[error("descriptor {fd}: cannot be read: {reason}")]
    Read { fd: u32, reason: io::Error },
    #[error("layer cannot be written: {0}")]
    Write(io::Error),
}

impl ModelError {
    /// The kind of failure.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::NoTensor { .. } | Self::NoLayer { .. } | Self::NoHeader { .. } => ErrorCode::NotFound,
            Self::NotWhole { .. } | Self::NoPieces { .. } | Self::NotOpened { .. } | Self::NoFd { .. } => {
                ErrorCode::InvalidRequest
            }
            Self::NotText { .. } | Self::Short { .. } | Self::Gguf { .. } | Self::Size { .. } => {
                ErrorCode::Corrupt
            }
            Self::Write(error) if error.kind() == io::ErrorKind::StorageFull => ErrorCode::NoSpace,
            Self::Map { .. } | Self::Read { .. } | Self::Image { .. } | Self::Write(_) => ErrorCode::Internal,
        }
    }

    pub(crate) fn short(fd: u32, found: u64, offset: u64, length: u64) -> Self {
        Self::Short { fd, found, expected: offset.saturating_add(length) }
    }
}

fn map_hint(reason: &io::Error) -> &'static str {
    match reason.kind() {
        io::ErrorKind::OutOfMemory => "; raise `sysctl vm.max_map_count`",
        _ => "",
    }
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
    fn code_of_a_daemons_error_is_kept() {
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
