//! Why a demonstration fails.

use std::io;
use std::path::Path;
use std::process::ExitStatus;

use blobd_client::error::ClientError;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_fixtures::model::ModelError;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::reference::ReferenceError;

/// What stopped the demo, or what it showed to be wrong.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum DemoError {
    /// What was shown is not what should be.
    #[error("{what}: {found}, {expected} expected")]
    Mismatch {
        /// What was looked at.
        what: String,
        /// What it is.
        found: String,
        /// What it should be.
        expected: String,
    },
    /// A command failed; it has said why on standard error.
    #[error("{command}: {status}")]
    Command {
        /// The command line.
        command: String,
        /// How it ended.
        status: ExitStatus,
    },
    /// The daemon does not start, or does not stop.
    #[error("daemon: {problem}; its last words: {last_words:?}")]
    Daemon {
        /// What it did.
        problem: String,
        /// The last line of its log.
        last_words: String,
    },
    /// A reader process failed; it has said why on standard error.
    #[error("reader {number}: {problem}")]
    Reader {
        /// Which.
        number: usize,
        /// What it did.
        problem: String,
    },
    /// A file or a process cannot be had.
    #[error("{subject}: {source}")]
    Io {
        /// What it is about.
        subject: String,
        /// Why not.
        source: io::Error,
    },
    /// The daemon refuses.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A model cannot be made.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The registry's manifest cannot be made.
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    /// One of the demo's names is none.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// Standard output does not take it.
    #[error(transparent)]
    Output(#[from] ErrorBody),
    /// Somebody pressed Ctrl-C.
    #[error("demo: interrupted; nothing is left behind")]
    Interrupted,
}

impl DemoError {
    /// The failure as the command line reports it.
    #[must_use]
    pub(crate) fn body(&self) -> ErrorBody {
        match self {
            Self::Output(body) => body.clone(),
            Self::Mismatch { .. } => ErrorBody::new(ErrorCode::Corrupt, self),
            Self::Client(error) => ErrorBody::new(error.code(), error),
            _ if self.is_lack_of_space() => {
                let body = ErrorBody::new(ErrorCode::NoSpace, self);
                body.with_hint("the demo needs about 200 MiB; TMPDIR names another directory")
            }
            _ => ErrorBody::new(ErrorCode::Internal, self),
        }
    }

    fn is_lack_of_space(&self) -> bool {
        match self {
            Self::Io { source, .. } | Self::Model(ModelError::Io { source, .. }) => {
                source.kind() == io::ErrorKind::StorageFull
            }
            Self::Command { status, .. } => status.code() == Some(ErrorCode::NoSpace.exit_code().into()),
            _ => false,
        }
    }

    /// Names what an I/O error is about.
    pub(super) fn io(subject: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let subject = subject.into();
        move |source| Self::Io { subject, source }
    }

    /// Names the file that an I/O error is about.
    pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        Self::io(path.display().to_string())
    }
}

/// Compares what was shown with what should be.
pub(super) fn expect<T: PartialEq + std::fmt::Display>(
    what: &str,
    found: &T,
    expected: &T,
) -> Result<(), DemoError> {
    if found == expected {
        return Ok(());
    }
    let (found, expected) = (found.to_string(), expected.to_string());
    Err(DemoError::Mismatch { what: what.to_owned(), found, expected })
}
