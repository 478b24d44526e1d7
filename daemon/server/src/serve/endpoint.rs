//! Where the daemon listens, and who may connect.

use std::fs::{self, Metadata};
use std::io;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::path::{Path, PathBuf};

use blobd_client::paths::GivenPaths;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::sockets::{
    SYSTEM_SOCKET, check_private, evidence_of_service, private_directory, user_sockets,
};

use crate::config::{Config, SocketOfUnit};
use crate::names::{NameError, Names};
use crate::server::Socket;
use crate::systemd::{ActivationError, PassedSocket};

/// The group whose members may connect to a daemon of root, if there is such a group.
pub(super) const SYSTEM_GROUP: &str = "blobd";

#[derive(Debug)]
pub(super) enum Endpoint {
    At(PathBuf),
    Passed(PassedSocket),
}

impl Endpoint {
    /// The socket that systemd has passed, or the path of a new one.
    pub(super) fn find(
        paths: &GivenPaths,
        config: &mut Config,
        passed: Option<PassedSocket>,
    ) -> Result<Self, ErrorBody> {
        let Some(passed) = passed else { return path(paths, config).map(Self::At) };
        warn_of_settings_without_effect(paths, config, passed.path());
        let (gid, mode) = passed.admission().map_err(|error| bind_error(passed.path(), &error))?;
        config.passed_socket = Some(SocketOfUnit { path: passed.path().to_path_buf(), gid, mode });
        Ok(Self::Passed(passed))
    }

    pub(super) fn listen(self, config: &Config) -> Result<Socket, ErrorBody> {
        match self {
            Self::At(path) => {
                let socket = Socket::bind(&path).map_err(|error| bind_error(&path, &error))?;
                admit(&socket, config)?;
                Ok(socket)
            }
            Self::Passed(passed) => {
                if let Some(SocketOfUnit { path, gid, mode }) = &config.passed_socket {
                    warn_if_unreachable(path, Some(*gid), *mode);
                }
                let path = passed.path().to_path_buf();
                Socket::from_passed(passed).map_err(|error| bind_error(&path, &error))
            }
        }
    }
}

/// systemd has made the socket as its unit says, and keeps it for the next daemon, so its settings stay.
fn warn_of_settings_without_effect(paths: &GivenPaths, config: &Config, passed: &Path) {
    let path = passed.display();
    if let Some(other) = paths.socket.as_ref().or(config.socket.as_ref()).filter(|other| *other != passed) {
        let other = other.display();
        tracing::warn!("socket: {other}: ignored, systemd has passed {path} (ListenStream= of its unit)");
    }
    if config.socket_group.is_some() || config.socket_mode.is_some() {
        tracing::warn!(
            "socket_group, socket_mode: ignored for {path}, which systemd has made (SocketGroup=, SocketMode= of its \
             unit)"
        );
    }
}

pub(super) fn activation_error(error: &ActivationError) -> ErrorBody {
    ErrorBody::new(ErrorCode::InvalidRequest, error)
        .with_hint("the unit of the socket needs one ListenStream= with a path, and Accept=no")
}

/// The socket's path: as given, configured, or the first default one whose directory belongs to this user. Creates
/// the user's private directory if the socket is there.
fn path(paths: &GivenPaths, config: &Config) -> Result<PathBuf, ErrorBody> {
    if let Some(path) = paths.socket.as_ref().or(config.socket.as_ref()) {
        return Ok(path.clone());
    }
    let path = default_path();
    if path.starts_with(private_directory()) {
        create_private_directory(&private_directory())?;
    }
    if path != Path::new(SYSTEM_SOCKET)
        && let Some(found) = evidence_of_service(Path::new(SYSTEM_SOCKET))
    {
        let (found, path) = (found.display(), path.display());
        tracing::warn!(
            "{found}: this machine has a daemon for all users, so commands and clients use this one at {path} only if \
             BLOBD_SOCKET, or for commands root or socket in the configuration, names it"
        );
    }
    Ok(path)
}

/// The path of the socket if none is given or configured.
pub(super) fn default_path() -> PathBuf {
    let own_uid = rustix::process::geteuid();
    if own_uid.is_root() {
        return SYSTEM_SOCKET.into();
    }
    let private = private_directory();
    // The variable may be another user's, such as after `su`.
    let is_own = |found: Metadata| found.is_dir() && found.uid() == own_uid.as_raw();
    let in_runtime_directory = user_sockets().into_iter().find(|socket| {
        let directory = socket.ancestors().nth(2).filter(|directory| !private.starts_with(directory));
        directory.is_some_and(|directory| fs::metadata(directory).is_ok_and(is_own))
    });
    in_runtime_directory.unwrap_or_else(|| private.join("blobd.sock"))
}

fn create_private_directory(directory: &Path) -> Result<(), ErrorBody> {
    const HINT: &str =
        "set XDG_RUNTIME_DIR to a directory of your own, or give --socket, and BLOBD_SOCKET to clients";
    let refused = |error| ErrorBody::new(ErrorCode::Denied, format!("socket: {error}")).with_hint(HINT);
    match fs::DirBuilder::new().mode(0o700).create(directory) {
        Err(error) if error.kind() != io::ErrorKind::AlreadyExists => {
            return Err(refused(io::Error::new(error.kind(), format!("{}: {error}", directory.display()))));
        }
        _ => check_private(directory).map_err(refused)?,
    }
    tracing::info!(
        "this user has no runtime directory (XDG_RUNTIME_DIR): the socket is in {}",
        directory.display()
    );
    Ok(())
}

fn bind_error(path: &Path, error: &io::Error) -> ErrorBody {
    const ELSEWHERE: &str = "choose another --socket; BLOBD_SOCKET names it to clients";
    let name = path.display();
    if error.kind() == io::ErrorKind::AddrInUse {
        let body = ErrorBody::new(ErrorCode::Busy, format!("{name}: in use by another daemon"));
        return body.with_hint("choose another --socket");
    }
    if error.raw_os_error() == Some(rustix::io::Errno::NAMETOOLONG.raw_os_error()) {
        let (bytes, most) = (path.as_os_str().len(), Socket::MAX_PATH_BYTES);
        return ErrorBody::new(
            ErrorCode::InvalidRequest,
            format!("{name}: path of a socket is too long: expected at most {most} bytes, found {bytes}"),
        )
        .with_hint(ELSEWHERE);
    }
    let code = match error.kind() {
        io::ErrorKind::PermissionDenied => ErrorCode::Denied,
        _ => ErrorCode::Internal,
    };
    ErrorBody::new(code, format!("{name}: cannot listen: {error}")).with_hint(ELSEWHERE)
}

pub(super) struct Admitted {
    pub(super) gid: Option<u32>,
    pub(super) mode: u32,
}

impl Admitted {
    pub(super) fn by(config: &Config) -> Result<Self, ErrorBody> {
        let is_root = rustix::process::geteuid().is_root();
        let gid = match config.socket_gid()? {
            None if is_root => system_group(),
            configured => configured,
        };
        let mode = config.socket_mode.unwrap_or(if gid.is_some() { 0o660 } else { 0o600 });
        Ok(Self { gid, mode })
    }
}

fn admit(socket: &Socket, config: &Config) -> Result<(), ErrorBody> {
    let Admitted { gid, mode } = Admitted::by(config)?;
    let is_configured = config.socket_group.is_some() || config.socket_mode.is_some();
    match socket.admit(gid, mode) {
        Ok(()) => warn_if_unreachable(socket.path(), gid, mode),
        Err(error) if is_configured => return Err(admission_error(gid, &error)),
        Err(error) => tracing::warn!("group {SYSTEM_GROUP}: cannot be given access to the socket: {error}"),
    }
    Ok(())
}

/// `None` if there is no such group. Then only root may connect, which is also safe while the answer is not known.
fn system_group() -> Option<u32> {
    match Names::system().gid_of(SYSTEM_GROUP) {
        Ok(gid) => Some(gid),
        Err(NameError::Unknown) => None,
        Err(NameError::Unavailable(reason)) => {
            tracing::warn!(
                "group {SYSTEM_GROUP}: {reason}; only root can connect until the daemon is restarted"
            );
            None
        }
    }
}

fn admission_error(gid: Option<u32>, error: &io::Error) -> ErrorBody {
    let uid = rustix::process::geteuid().as_raw();
    let gid = gid.map_or_else(String::new, |gid| format!(" to group {gid}"));
    let message = format!("socket_group: uid {uid} cannot give the socket{gid}: {error}");
    ErrorBody::new(ErrorCode::Denied, message)
        .with_hint("add the daemon's user to the group with `usermod -aG`, and restart the daemon")
}

/// Warns if those who may connect cannot reach the socket. Only a warning: an access control list may admit them.
fn warn_if_unreachable(socket: &Path, gid: Option<u32>, mode: u32) {
    let admits_all = mode & 0o006 == 0o006;
    let admits_group = mode & 0o060 == 0o060 && gid.is_some();
    let is_closed = |directory: &Metadata| {
        let is_in_group = gid == Some(directory.gid()) && !admits_all;
        directory.mode() & if is_in_group { 0o010 } else { 0o001 } == 0
    };
    let mut directories = socket.ancestors().skip(1);
    let closed = directories.find(|directory| fs::metadata(directory).is_ok_and(|found| is_closed(&found)));
    if let Some(directory) = closed.filter(|_| admits_all || admits_group) {
        tracing::warn!(
            "{}: does not admit those who may connect to the socket; set socket to a path that they can reach, such \
             as {SYSTEM_SOCKET}",
            directory.display()
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn error_about_a_long_path_names_the_limit() {
        let path = PathBuf::from(format!("/{}", "x".repeat(107)));
        let body = bind_error(&path, &rustix::io::Errno::NAMETOOLONG.into());
        assert!(body.message.ends_with("is too long: expected at most 107 bytes, found 108"), "{body}");
    }
}
