//! Errors of the demo.

use std::io;
use std::path::Path;
use std::process::ExitStatus;

use blobd_client::error::ClientError;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_fixtures::model::ModelError;
use blobd_store_format::manifest::ManifestError;
use blobd_store_format::reference::ReferenceError;

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum DemoError {
    #[error("{what}: expected {expected}, found {found}")]
    Mismatch { what: String, found: String, expected: String },
    /// A command failed, and has printed the reason on standard error.
    #[error("{command}: {status}")]
    Command { command: String, status: ExitStatus },
    #[error("daemon: {problem}; the last line of its log is {last_log_line:?}")]
    Daemon { problem: String, last_log_line: String },
    /// A reader process failed, and has printed the reason on standard error.
    #[error("reader {number}: {problem}")]
    Reader { number: usize, problem: String },
    #[error("{subject}: {source}")]
    Io { subject: String, source: io::Error },
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error(transparent)]
    Manifest(#[from] ManifestError),
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// Standard output cannot be written.
    #[error(transparent)]
    Output(#[from] ErrorBody),
    #[error("demo: interrupted; its processes and files are removed")]
    Interrupted,
}

impl DemoError {
    pub(crate) fn body(&self) -> ErrorBody {
        match self {
            Self::Output(body) => body.clone(),
            Self::Mismatch { .. } => ErrorBody::new(ErrorCode::Corrupt, self),
            Self::Client(error) => ErrorBody::new(error.code(), error),
            _ if self.is_lack_of_space() => {
                let body = ErrorBody::new(ErrorCode::NoSpace, self);
                body.with_hint("the demo needs about 200 MiB; set TMPDIR to use another directory")
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

    pub(super) fn io(subject: impl Into<String>) -> impl FnOnce(io::Error) -> Self {
        let subject = subject.into();
        move |source| Self::Io { subject, source }
    }

    pub(super) fn at(path: &Path) -> impl FnOnce(io::Error) -> Self {
        Self::io(path.display().to_string())
    }
}

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
