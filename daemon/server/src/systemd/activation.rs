//! Socket activation: the listening socket that systemd passes as the first descriptor after the standard ones.

use std::env;
use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::MetadataExt as _;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use rustix::io::{FdFlags, fcntl_setfd};
use rustix::net::sockopt::{socket_acceptconn, socket_domain, socket_type};
use rustix::net::{AddressFamily, SocketType};

use crate::sys::take_first_passed_descriptor;

/// A listening socket that belongs to systemd: its path stays when this process ends.
#[derive(Debug)]
pub(crate) struct PassedSocket {
    listener: UnixListener,
    path: PathBuf,
}

#[derive(Debug, thiserror::Error)]
pub(crate) enum ActivationError {
    #[error("{variable}: expected a number, found {value:?}")]
    NoNumber { variable: &'static str, value: String },
    #[error("descriptors from systemd: expected one, found {count}{names}")]
    Count { count: u32, names: String },
    #[error("descriptor from systemd: expected a listening Unix stream socket, found {found}")]
    NotListening { found: &'static str },
    #[error("descriptor from systemd: expected a socket with a path in the file system, found one without")]
    NoPath,
    #[error("the descriptor that systemd has passed: {0}")]
    Io(#[from] io::Error),
}

impl PassedSocket {
    /// `None` if systemd has passed none. Must be called once, before this process opens anything.
    pub(crate) fn take() -> Result<Option<Self>, ActivationError> {
        let variable = |name: &'static str| env::var(name).ok();
        if !is_one_passed(variable, std::process::id())? {
            return Ok(None);
        }
        let descriptor = take_first_passed_descriptor()?;
        Self::checked(descriptor).map(Some)
    }

    fn checked(descriptor: OwnedFd) -> Result<Self, ActivationError> {
        if let Some(found) = other_than_listening(&descriptor) {
            return Err(ActivationError::NotListening { found });
        }
        // Not for the processes that read files of clients.
        fcntl_setfd(&descriptor, FdFlags::CLOEXEC).map_err(io::Error::from)?;
        let listener = UnixListener::from(descriptor);
        listener.set_nonblocking(true)?;
        let path = listener.local_addr()?.as_pathname().map(Path::to_path_buf);
        Ok(Self { listener, path: path.ok_or(ActivationError::NoPath)? })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    pub(crate) const fn listener(&self) -> &UnixListener {
        &self.listener
    }

    pub(crate) fn into_parts(self) -> (UnixListener, PathBuf) {
        (self.listener, self.path)
    }

    /// The socket's group and permissions, which are those of its unit.
    pub(crate) fn admission(&self) -> io::Result<(u32, u32)> {
        fs::symlink_metadata(&self.path).map(|found| (found.gid(), found.mode() & 0o777))
    }
}

/// Whether the variables say that one descriptor was passed to the process `pid`. They are inherited, so they may be
/// meant for a parent process.
fn is_one_passed(
    variable: impl Fn(&'static str) -> Option<String>,
    pid: u32,
) -> Result<bool, ActivationError> {
    let number = |name| match variable(name) {
        None => Ok(None),
        Some(value) => match value.parse::<u32>() {
            Ok(number) => Ok(Some(number)),
            Err(_) => Err(ActivationError::NoNumber { variable: name, value }),
        },
    };
    if number("LISTEN_PID")? != Some(pid) {
        return Ok(false);
    }
    match number("LISTEN_FDS")? {
        None | Some(0) => Ok(false),
        Some(1) => Ok(true),
        Some(count) => {
            let names = variable("LISTEN_FDNAMES").map(|names| format!(" ({})", names.replace(':', ", ")));
            Err(ActivationError::Count { count, names: names.unwrap_or_default() })
        }
    }
}

/// `None` for a listening Unix stream socket.
fn other_than_listening(descriptor: &OwnedFd) -> Option<&'static str> {
    match socket_domain(descriptor) {
        Err(_not_a_socket) => Some("a file that is not a socket"),
        Ok(domain) if domain != AddressFamily::UNIX => Some("a network socket"),
        Ok(_) if socket_type(descriptor) != Ok(SocketType::STREAM) => Some("a Unix socket for datagrams"),
        Ok(_) if socket_acceptconn(descriptor) != Ok(true) => Some("a Unix socket that does not listen"),
        Ok(_) => None,
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::{UnixDatagram, UnixStream};

    use super::*;

    fn is_passed(variables: &[(&str, &str)]) -> Result<bool, String> {
        let find = |name: &str| variables.iter().find(|(known, _)| *known == name);
        let variable = |name: &'static str| find(name).map(|(_, value)| (*value).to_owned());
        is_one_passed(variable, 7).map_err(|error| error.to_string())
    }

    #[test]
    fn only_descriptors_for_this_process_count() {
        assert_eq!(is_passed(&[]), Ok(false));
        assert_eq!(is_passed(&[("LISTEN_PID", "7"), ("LISTEN_FDS", "1")]), Ok(true));
        assert_eq!(is_passed(&[("LISTEN_PID", "8"), ("LISTEN_FDS", "1")]), Ok(false));
        assert_eq!(is_passed(&[("LISTEN_FDS", "1")]), Ok(false));
        assert_eq!(is_passed(&[("LISTEN_PID", "7")]), Ok(false));
    }

    #[test]
    fn several_descriptors_are_refused_with_their_names() {
        let several = [("LISTEN_PID", "7"), ("LISTEN_FDS", "2"), ("LISTEN_FDNAMES", "blobd.socket:metrics")];
        let refusal = is_passed(&several).unwrap_err();
        assert_eq!(refusal, "descriptors from systemd: expected one, found 2 (blobd.socket, metrics)");
        let refusal = is_passed(&[("LISTEN_PID", "7"), ("LISTEN_FDS", "one")]).unwrap_err();
        assert_eq!(refusal, "LISTEN_FDS: expected a number, found \"one\"");
    }

    #[test]
    fn listening_socket_with_a_path_is_taken_and_anything_else_refused() {
        let folder = tempfile::tempdir().unwrap();
        let refusal = |descriptor: OwnedFd| PassedSocket::checked(descriptor).unwrap_err().to_string();
        assert!(refusal(tempfile::tempfile().unwrap().into()).contains("a file that is not a socket"));
        let datagrams = UnixDatagram::bind(folder.path().join("d")).unwrap();
        assert!(refusal(datagrams.into()).contains("for datagrams"));
        assert!(refusal(UnixStream::pair().unwrap().0.into()).contains("does not listen"));
        let network = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        assert!(refusal(network.into()).contains("a network socket"));
        let path = folder.path().join("s");
        let passed = PassedSocket::checked(UnixListener::bind(&path).unwrap().into()).unwrap();
        assert_eq!(passed.path(), path);
    }
}
