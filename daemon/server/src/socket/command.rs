//! The socket of a command that has a store open, for other commands of the same user.
//!
//! It is in the store's directory, which only its owner can enter. So whoever can reach the store can reach the
//! socket, also in a container that has another `/tmp`.

use std::env;
use std::fs::{self, DirBuilder, File};
use std::io;
use std::os::fd::AsRawFd as _;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};

use blobd_store::StoreOwner;
use blobd_store_format::layout;
use tokio::net::UnixListener;

use super::Socket;

/// The longest path of a Unix socket on Linux, without the final zero byte.
const MAX_SOCKET_PATH: usize = 107;

#[derive(Debug)]
pub(crate) struct CommandSocket {
    socket: Socket,
    /// The path for the lock file: relative if the socket is in the store's directory.
    announced: PathBuf,
    /// Keeps the path of the socket valid.
    _directory: Option<File>,
}

impl CommandSocket {
    /// Listens in the store's directory, or in a private directory of this user if that file system has no sockets or
    /// the store belongs to another user: root leaves no file there. The caller must have the store's lock, so that no
    /// other process uses the name.
    pub(crate) fn bind(root: &Path, owner: StoreOwner) -> io::Result<Self> {
        if !owner.is_own() {
            return Self::bind_elsewhere(root);
        }
        Self::bind_in_store(root).or_else(|_no_sockets| Self::bind_elsewhere(root))
    }

    fn bind_in_store(root: &Path) -> io::Result<Self> {
        let announced = PathBuf::from(layout::COMMAND_SOCKET);
        let (path, directory) = short_path(root, &announced)?;
        Ok(Self { socket: Socket::bind(&path)?, announced, _directory: directory })
    }

    fn bind_elsewhere(root: &Path) -> io::Result<Self> {
        let store = fs::metadata(root)?;
        let name = format!("store-{:x}-{:x}.sock", store.dev(), store.ino());
        let announced = private_directory()?.join(name);
        Ok(Self { socket: Socket::bind(&announced)?, announced, _directory: None })
    }

    pub(crate) fn announced(&self) -> &Path {
        &self.announced
    }

    pub(crate) const fn listener(&self) -> &UnixListener {
        self.socket.listener()
    }
}

pub(crate) fn connect_announced(root: &Path, announced: &Path) -> io::Result<UnixStream> {
    let (path, _directory) = short_path(root, announced)?;
    UnixStream::connect(path)
}

/// A path of `name` in `root` that is short enough for a socket. It may be valid only as long as the file, the
/// directory, is open.
fn short_path(root: &Path, name: &Path) -> io::Result<(PathBuf, Option<File>)> {
    let path = root.join(name);
    if path.as_os_str().as_bytes().len() <= MAX_SOCKET_PATH || name.is_absolute() {
        return Ok((path, None));
    }
    let directory = File::open(root)?;
    let short = Path::new("/proc/self/fd").join(directory.as_raw_fd().to_string()).join(name);
    Ok((short, Some(directory)))
}

/// A directory that only this user can enter. It is created if it does not exist.
fn private_directory() -> io::Result<PathBuf> {
    let uid = rustix::process::geteuid().as_raw();
    // The variable may be another user's, such as after `su`.
    let is_own = |path: &PathBuf| fs::metadata(path).is_ok_and(|found| found.is_dir() && found.uid() == uid);
    let runtime = env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let runtime = runtime.filter(|path| path.is_absolute() && is_own(path));
    let path = match runtime {
        Some(runtime) => runtime.join("blobd"),
        None => env::temp_dir().join(format!("blobd-{uid}")),
    };
    DirBuilder::new().recursive(true).mode(0o700).create(&path)?;
    // In /tmp another user may have created it first.
    let found = fs::symlink_metadata(&path)?;
    if found.is_dir() && found.uid() == uid && found.mode() & 0o022 == 0 {
        return Ok(path);
    }
    let message = format!("{}: not a private directory of uid {uid}", path.display());
    Err(io::Error::new(io::ErrorKind::PermissionDenied, message))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn own() -> StoreOwner {
        StoreOwner::for_process()
    }

    #[tokio::test]
    async fn socket_in_a_store_with_a_long_path_can_be_reached_and_is_removed() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path().join("long".repeat(40));
        fs::create_dir(&root).unwrap();
        let socket = CommandSocket::bind(&root, own()).unwrap();
        assert_eq!(socket.announced(), Path::new(layout::COMMAND_SOCKET));
        connect_announced(&root, socket.announced()).unwrap();
        drop(socket);
        assert_eq!(fs::read_dir(&root).unwrap().count(), 0);
    }

    #[tokio::test]
    async fn socket_that_a_killed_process_has_left_is_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let left =
            std::os::unix::net::UnixListener::bind(folder.path().join(layout::COMMAND_SOCKET)).unwrap();
        drop(left);
        let socket = CommandSocket::bind(folder.path(), own()).unwrap();
        connect_announced(folder.path(), socket.announced()).unwrap();
    }

    #[tokio::test]
    async fn socket_is_elsewhere_if_the_store_can_have_none() {
        let folder = tempfile::tempdir().unwrap();
        fs::write(folder.path().join(layout::COMMAND_SOCKET), "not a socket").unwrap();
        let socket = CommandSocket::bind(folder.path(), own()).unwrap();
        assert!(socket.announced().is_absolute());
        connect_announced(folder.path(), socket.announced()).unwrap();
    }

    #[tokio::test]
    async fn socket_is_not_in_a_store_of_another_user() {
        let folder = tempfile::tempdir().unwrap();
        let another = StoreOwner { uid: own().uid + 1, ..own() };
        let socket = CommandSocket::bind(folder.path(), another).unwrap();
        assert!(socket.announced().is_absolute());
        connect_announced(folder.path(), socket.announced()).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
