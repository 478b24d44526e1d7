//! Why a mount cannot be made, and what programs are told when a file cannot be opened.

use std::io;
use std::path::PathBuf;

use blobd_client::error::ClientError;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use fuser::Errno;

/// Why there is no mount.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum MountError {
    /// The place to mount at cannot be looked at.
    #[error("{directory}: {reason}", directory = directory.display())]
    Directory {
        /// The place.
        directory: PathBuf,
        /// Why not.
        reason: io::Error,
    },
    /// A mount is there whose process has died.
    #[error("{directory}: a mount whose process has died", directory = directory.display())]
    Dead {
        /// The place.
        directory: PathBuf,
    },
    /// The place to mount at is a file.
    #[error("{directory}: not a directory", directory = directory.display())]
    NoDirectory {
        /// The place.
        directory: PathBuf,
    },
    /// The place to mount at has files, which the mount would hide.
    #[error("{directory}: not empty", directory = directory.display())]
    NotEmpty {
        /// The place.
        directory: PathBuf,
    },
    /// The kernel has no FUSE, or this process does not see it.
    #[error("/dev/fuse: {0}")]
    NoFuse(io::Error),
    /// An unprivileged process needs a helper to mount, and it is not there.
    #[error("fusermount3: {0}")]
    NoHelper(io::Error),
    /// The kernel, or the helper, refuses.
    #[error("{directory}: cannot mount: {reason}", directory = directory.display())]
    Refused {
        /// The place.
        directory: PathBuf,
        /// Why.
        reason: io::Error,
    },
    /// Mounted, but no thread to serve it.
    #[error("cannot start: {0}")]
    Start(io::Error),
    /// The daemon does not answer.
    #[error(transparent)]
    Client(#[from] ClientError),
}

impl MountError {
    /// As the command line reports it.
    #[must_use]
    pub(crate) fn body(self) -> ErrorBody {
        let message = self.to_string();
        let body = |code| ErrorBody::new(code, &message);
        match self {
            Self::Directory { reason, .. } => match reason.kind() {
                io::ErrorKind::NotFound => {
                    body(ErrorCode::NotFound).with_hint("make the directory first: `mkdir`")
                }
                io::ErrorKind::PermissionDenied => body(ErrorCode::Denied),
                _ => body(ErrorCode::Internal),
            },
            Self::Dead { directory } => body(ErrorCode::Busy)
                .with_hint(format!("`umount -l {0}` or `fusermount3 -u -z {0}`", directory.display())),
            Self::NoDirectory { .. } | Self::NotEmpty { .. } => {
                body(ErrorCode::InvalidRequest).with_hint("name an empty directory")
            }
            Self::NoFuse(reason) => match reason.kind() {
                io::ErrorKind::PermissionDenied => body(ErrorCode::Denied)
                    .with_hint("let this user open /dev/fuse: it usually has mode 0666"),
                _ => body(ErrorCode::Internal)
                    .with_hint("load the module: `modprobe fuse`; in a container, add `--device /dev/fuse`"),
            },
            Self::NoHelper(_) => body(ErrorCode::Internal)
                .with_hint("install the package fuse3, or mount as root; without either, `blobd export`"),
            Self::Refused { reason, .. } if reason.kind() == io::ErrorKind::PermissionDenied => {
                body(ErrorCode::Denied)
                    .with_hint("for --allow-other, put user_allow_other into /etc/fuse.conf")
            }
            Self::Refused { .. } | Self::Start(_) => body(ErrorCode::Internal),
            Self::Client(ClientError::Daemon(body)) => body,
            Self::Client(error) => ErrorBody::new(error.code(), error),
        }
    }
}

/// Why a file cannot be opened.
#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    /// No model has it any more.
    #[error("no model has it any more")]
    Gone,
    /// The daemon does not hand it out.
    #[error(transparent)]
    Client(#[from] ClientError),
}

impl OpenError {
    /// What the program is told.
    pub(super) fn errno(&self) -> Errno {
        match self {
            Self::Gone => Errno::ESTALE,
            Self::Client(ClientError::NotRunning { .. } | ClientError::Closed | ClientError::TimedOut) => {
                Errno::EHOSTDOWN
            }
            Self::Client(ClientError::FdsLost) => Errno::EMFILE,
            Self::Client(error) => match error.code() {
                ErrorCode::NotFound => Errno::ESTALE,
                ErrorCode::Denied => Errno::EACCES,
                ErrorCode::Busy => Errno::EBUSY,
                _ => Errno::EIO,
            },
        }
    }
}
