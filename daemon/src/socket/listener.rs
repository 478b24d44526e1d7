//! The name under which the daemon listens.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{DirBuilderExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, fchmod};
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, bind, listen, socket_with};
use tokio::net::UnixListener;

use crate::sys::set_takes_descriptors;

/// How many connections may wait to be accepted. The kernel cuts it to its own limit.
const BACKLOG: i32 = 4096;

/// A listening socket, whose name goes when it is dropped.
#[derive(Debug)]
pub(crate) struct Socket {
    path: PathBuf,
    listener: UnixListener,
}

impl Socket {
    /// Listens at `path`. A name that a dead daemon left is replaced; one that somebody serves
    /// is not. Nobody but the owner may connect until [`Self::admit_group`].
    ///
    /// # Errors
    /// [`io::ErrorKind::AddrInUse`] when a daemon answers there; those of `bind`.
    pub(crate) fn bind(path: &Path) -> io::Result<Self> {
        if let Some(directory) = path.parent() {
            fs::DirBuilder::new().recursive(true).mode(0o755).create(directory)?;
        }
        match std::os::unix::net::UnixStream::connect(path) {
            Ok(_served) => return Err(io::ErrorKind::AddrInUse.into()),
            Err(error) if error.kind() == io::ErrorKind::ConnectionRefused => {
                // A file that is no socket refuses connections too, and is none of ours.
                if !is_socket(path) {
                    return Err(io::Error::new(io::ErrorKind::AlreadyExists, "is there and is no socket"));
                }
                fs::remove_file(path)?;
            }
            Err(_nothing_there) => {}
        }
        Ok(Self {
            path: path.to_path_buf(),
            listener: UnixListener::from_std(private_listener(path)?.into())?,
        })
    }

    /// Lets the members of a group connect.
    ///
    /// # Errors
    /// Those of `chown` and `chmod`.
    pub(crate) fn admit_group(&self, gid: u32) -> io::Result<()> {
        std::os::unix::fs::chown(&self.path, None, Some(gid))?;
        fs::set_permissions(&self.path, fs::Permissions::from_mode(0o660))
    }

    /// What to accept connections from.
    #[must_use]
    pub(crate) const fn listener(&self) -> &UnixListener {
        &self.listener
    }
}

/// A socket with the mode 0600 from the moment it has a name. The umask, which would be that of every
/// other thread too, stays as it is: the kernel gives the name the mode that the descriptor has.
fn private_listener(path: &Path) -> io::Result<OwnedFd> {
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None)?;
    // Fails only on kernels before 6.16, which have no such option. Connections begin with it.
    let _ = set_takes_descriptors(&socket, false);
    fchmod(&socket, Mode::RUSR | Mode::WUSR)?;
    bind(&socket, &SocketAddrUnix::new(path)?)?;
    // Nobody can connect before this, should a kernel have ignored the descriptor's mode.
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
        // Already gone: somebody cleaned up. Nothing depends on it.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn socket_is_private_whatever_the_umask_is() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("s");
        let flags = SocketFlags::CLOEXEC;
        let socket = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None).unwrap();
        fchmod(&socket, Mode::RUSR).unwrap();
        bind(&socket, &SocketAddrUnix::new(folder.path().join("bare")).unwrap()).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o777;
        assert_eq!(mode(&folder.path().join("bare")), 0o400, "the kernel takes the descriptor's mode");
        let _socket = Socket::bind(&path).unwrap();
        assert_eq!(mode(&path), 0o600);
    }
}
