//! Errors of mounting, and of opening a mounted file.

use std::io;
use std::path::PathBuf;

use blobd_client::error::ClientError;
use fuser::Errno;

use crate::{ErrorBody, ErrorCode};

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub(crate) enum MountError {
    #[error("{directory}: {reason}", directory = directory.display())]
    Directory { directory: PathBuf, reason: io::Error },
    #[error("{directory}: has a stale mount, whose process has died", directory = directory.display())]
    Dead { directory: PathBuf },
    #[error("{directory}: not a directory", directory = directory.display())]
    NoDirectory { directory: PathBuf },
    /// The mount would hide the existing files.
    #[error("{directory}: not empty", directory = directory.display())]
    NotEmpty { directory: PathBuf },
    /// The kernel module is not loaded, or the device is not visible to this process.
    #[error("/dev/fuse: {0}")]
    NoFuse(io::Error),
    /// The helper that unprivileged processes need to mount was not found.
    #[error("fusermount3: {0}")]
    NoHelper(io::Error),
    #[error("{directory}: cannot mount: {reason}", directory = directory.display())]
    Refused { directory: PathBuf, reason: io::Error },
    #[error("cannot start: {0}")]
    Start(io::Error),
    #[error(transparent)]
    Client(#[from] ClientError),
}

impl MountError {
    pub(crate) fn body(self) -> ErrorBody {
        let message = self.to_string();
        let body = |code| ErrorBody::new(code, &message);
        match self {
            Self::Directory { reason, .. } => match reason.kind() {
                io::ErrorKind::NotFound => {
                    body(ErrorCode::NotFound).with_hint("create the directory first: `mkdir`")
                }
                io::ErrorKind::PermissionDenied => body(ErrorCode::Denied),
                _ => body(ErrorCode::Internal),
            },
            Self::Dead { directory } => body(ErrorCode::Busy).with_hint(format!(
                "unmount it: `umount -l {0}` or `fusermount3 -u -z {0}`",
                directory.display()
            )),
            Self::NoDirectory { .. } | Self::NotEmpty { .. } => {
                body(ErrorCode::InvalidRequest).with_hint("give an empty directory")
            }
            Self::NoFuse(reason) => match reason.kind() {
                io::ErrorKind::PermissionDenied => body(ErrorCode::Denied)
                    .with_hint("give this user access to /dev/fuse, which usually has mode 0666"),
                _ => body(ErrorCode::Internal)
                    .with_hint("load the module: `modprobe fuse`; in a container, add `--device /dev/fuse`"),
            },
            Self::NoHelper(_) => body(ErrorCode::Internal)
                .with_hint("install the package fuse3, or mount as root, or use `blobd export` instead"),
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

#[derive(Debug, thiserror::Error)]
pub(super) enum OpenError {
    #[error("no model contains this file any more")]
    Removed,
    #[error(transparent)]
    Client(#[from] ClientError),
}

impl OpenError {
    pub(super) fn errno(&self) -> Errno {
        match self {
            Self::Removed => Errno::ESTALE,
            Self::Client(
                ClientError::NotRunning { .. }
                | ClientError::Unavailable { .. }
                | ClientError::Closed
                | ClientError::TimedOut,
            ) => Errno::EHOSTDOWN,
            Self::Client(ClientError::FdsLost) => Errno::EMFILE,
            Self::Client(error) => match error.code() {
                ErrorCode::NotFound => Errno::ESTALE,
                ErrorCode::Denied | ErrorCode::DeniedByPolicy => Errno::EACCES,
                ErrorCode::Busy => Errno::EBUSY,
                _ => Errno::EIO,
            },
        }
    }
}
