//! The listening socket and its path.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd as _, OwnedFd};
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, chownat, fchmod, fstat, open};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use tokio::net::UnixListener;

use crate::sys::set_takes_descriptors;
use crate::systemd::PassedSocket;

/// The kernel reduces it to its own limit.
const BACKLOG: i32 = 4096;

/// A listening socket. The path of one that was made here is removed on drop.
#[derive(Debug)]
pub(crate) struct Socket {
    path: PathBuf,
    listener: UnixListener,
    /// Whether the socket was made by another process, which keeps it.
    is_passed: bool,
}

impl Socket {
    /// The kernel takes one byte more, but most clients end the path with a zero.
    pub(crate) const MAX_PATH_BYTES: usize = 107;

    /// Listens at `path`. Replaces the socket of a daemon that has ended, but fails with
    /// [`io::ErrorKind::AddrInUse`] if another process listens there. Only the owner may connect until
    /// [`Self::admit`].
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        if path.as_os_str().len() > Self::MAX_PATH_BYTES {
            return Err(Errno::NAMETOOLONG.into());
        }
        if let Some(directory) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
        }
        match std::os::unix::net::UnixStream::connect(path) {
            Ok(_served) => return Err(io::ErrorKind::AddrInUse.into()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                // A file that is not a socket also refuses connections, and must not be removed.
                if !is_socket(path) {
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, "exists and is not a socket"));
                }
                fs::remove_file(path)?;
            }
            Err(_not_found) => {}
        }
        Ok(Self {
            path: path.to_path_buf(),
            listener: UnixListener::from_std(private_listener(path)?.into())?,
            is_passed: false,
        })
    }

    /// A socket that another process has made and keeps: connections that are not accepted here wait there.
    pub(crate) fn from_passed(passed: PassedSocket) -> io::Result<Self> {
        let (listener, path) = passed.into_parts();
        let _ = set_takes_descriptors(&listener, false);
        Ok(Self { path, listener: UnixListener::from_std(listener)?, is_passed: true })
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Whoever may write to the socket may connect.
    pub(crate) fn admit(&self, gid: Option<u32>, mode: u32) -> io::Result<()> {
        // Through a descriptor: whoever may write to the directory could have put a link in the socket's place.
        let socket = open(&self.path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
        if FileType::from_raw_mode(fstat(&socket)?.st_mode) != FileType::Socket {
            return Err(io::Error::other("the socket was replaced"));
        }
        if let Some(gid) = gid {
            chownat(&socket, "", None, Some(Gid::from_raw(gid)), AtFlags::EMPTY_PATH)?;
        }
        let path = format!("/proc/self/fd/{}", socket.as_raw_fd());
        fs::set_permissions(path, fs::Permissions::from_mode(mode))
    }

    pub(crate) const fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

/// Creates a socket that has the mode 0600 as soon as it has a path: the kernel gives the path the
/// descriptor's mode. The umask is not changed, because it is shared with all other threads.
fn private_listener(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Fails only on kernels before 6.16, which have no such option. Accepted connections inherit it.
    let _ = set_takes_descriptors(&socket, false);
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    // In case the kernel has ignored the descriptor's mode. No client can connect before `listen`.
    fs::set_permissions(path, fs::Permissions::from_mode(0o600))?;
    listen(&socket, BACKLOG)?;
    Ok(socket)
}

fn is_socket(path: &Path) -> bool {
    use std::os::unix::fs::FileTypeExt as _;
    fs::symlink_metadata(path).is_ok_and(|metadata| metadata.file_type().is_socket())
}

impl Drop for Socket {
    fn drop(&mut self) {
        if !self.is_passed {
            // Fails if the path was already removed, which does no harm.
            let _ = fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn socket_mode_does_not_depend_on_the_umask() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        fchmod(&socket, Mode::RUSR).unwrap();
        bind(&socket, &SocketAddrUnix::new(folder.path().join("bare")).unwrap()).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder.path().join("bare")), 0o400, "the kernel uses the descriptor's mode");
        let socket = Socket::bind(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
        socket.admit(None, 0o660).unwrap();
        assert_eq!(mode(&path), 0o660);
        fs::rename(&path, folder.path().join("moved")).unwrap();
        fs::write(folder.path().join("other"), "").unwrap();
        std::os::unix::fs::symlink("other", &path).unwrap();
        assert!(socket.admit(None, 0o666).is_err(), "it does not follow a link");
        assert_ne!(mode(&folder.path().join("other")), 0o666);
    }
}
