//! Models as ordinary files, for programs that know nothing but paths: a FUSE file system.
//!
//! It is a client of the daemon like any other and needs no right but that to mount. The
//! [`tree`] says which names there are; a file is opened at the daemon when somebody opens it, and is
//! then read from the descriptors that came with it. What it promises: every file is, bit for bit, the
//! one that was stored; a file that is open can be read to its end whatever becomes of the daemon and
//! the model. What it does not: share memory with the clients that map blobs. The kernel caches a
//! file of a mount by itself, once for all its readers, except where it may read the blob itself
//! (passthrough: files that are stored whole, with the right `CAP_SYS_ADMIN`).

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;

use blobd_client::client::Client;
use fuser::{Config, MountOption, Session, SessionACL, SessionUnmounter};
use tokio::sync::oneshot;

mod catalog;
mod error;
mod file;
mod file_system;
mod guard;
mod names;
mod opener;
pub(crate) mod tree;
mod workers;

pub(crate) use error::MountError;
pub(crate) use guard::watch;

use catalog::Catalog;
use file_system::ModelFileSystem;
use guard::Guard;
use opener::Opener;

/// Who may see the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Audience {
    /// The user who mounts.
    Owner,
    /// Everybody on the machine.
    Everybody,
}

/// A mount that is served by threads of this process.
#[derive(Debug)]
pub(crate) struct Mount {
    directory: PathBuf,
    unmounter: SessionUnmounter,
    ended: oneshot::Receiver<io::Result<()>>,
    _guard: Guard,
}

impl Mount {
    /// Mounts the daemon's models at an empty directory.
    ///
    /// # Errors
    /// [`MountError`].
    pub(crate) fn start(client: &Client, directory: &Path, audience: Audience) -> Result<Self, MountError> {
        let directory = usable(directory)?;
        check_fuse()?;
        let file_system = ModelFileSystem::new(Catalog::new(client.clone())?, Opener::new(client.clone()));
        let file_system = file_system.map_err(MountError::Start)?;
        let guard = Guard::start(&directory).map_err(MountError::Start)?;
        let mut session = Session::new(file_system, &directory, &config(audience))
            .map_err(|reason| refusal(&directory, reason))?;
        let unmounter = session.unmount_callable();
        let (sender, ended) = oneshot::channel();
        let serve = move || {
            // Nobody listens any more if the process is about to end.
            let _ = sender.send(session.run());
        };
        thread::Builder::new().name("mount".to_owned()).spawn(serve).map_err(MountError::Start)?;
        Ok(Self { directory, unmounter, ended, _guard: guard })
    }

    /// Where it is mounted.
    #[must_use]
    pub(crate) fn directory(&self) -> &Path {
        &self.directory
    }

    /// Waits until somebody unmounts it.
    ///
    /// # Errors
    /// What ended the service otherwise.
    pub(crate) async fn ended(&mut self) -> io::Result<()> {
        let ended = (&mut self.ended).await;
        ended.unwrap_or_else(|_gone| Err(io::Error::other("the mount's thread has died")))
    }

    /// Unmounts. Whoever has a file open then has it until this process ends.
    pub(crate) fn unmount(mut self) {
        if self.unmounter.unmount().is_err() {
            guard::detach(&self.directory);
        }
    }
}

/// The directory by its whole name, if something can be mounted there.
fn usable(directory: &Path) -> Result<PathBuf, MountError> {
    let failed = |reason: io::Error| match reason.raw_os_error() {
        Some(code) if code == rustix::io::Errno::NOTCONN.raw_os_error() => {
            MountError::Dead { directory: directory.to_path_buf() }
        }
        _ => MountError::Directory { directory: directory.to_path_buf(), reason },
    };
    let whole = directory.canonicalize().map_err(failed)?;
    if !fs::metadata(&whole).map_err(failed)?.is_dir() {
        return Err(MountError::NoDirectory { directory: whole });
    }
    match fs::read_dir(&whole).map_err(failed)?.next() {
        None => Ok(whole),
        Some(_) => Err(MountError::NotEmpty { directory: whole }),
    }
}

/// Finds out before the mount is tried what the attempt would not tell apart.
fn check_fuse() -> Result<(), MountError> {
    /// Where to find the helper; one that is no text the library does not bear.
    const HELPER_VARIABLE: &str = "FUSERMOUNT_PATH";
    if let Err(std::env::VarError::NotUnicode(_)) = std::env::var(HELPER_VARIABLE) {
        let reason = io::Error::new(io::ErrorKind::InvalidInput, "FUSERMOUNT_PATH is not UTF-8");
        return Err(MountError::NoHelper(reason));
    }
    let device = fs::File::options().read(true).write(true).open("/dev/fuse");
    device.map(drop).map_err(MountError::NoFuse)
}

fn refusal(directory: &Path, reason: io::Error) -> MountError {
    match reason.kind() {
        // The device and the directory are there: what is missing is the helper.
        io::ErrorKind::NotFound => MountError::NoHelper(reason),
        _ => MountError::Refused { directory: directory.to_path_buf(), reason },
    }
}

fn config(audience: Audience) -> Config {
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName("blobd".to_owned()),
        MountOption::Subtype("blobd".to_owned()),
        MountOption::RO,
        MountOption::NoSuid,
        MountOption::NoDev,
        MountOption::NoExec,
        MountOption::NoAtime,
        MountOption::DefaultPermissions,
    ];
    config.acl = match audience {
        Audience::Owner => SessionACL::Owner,
        Audience::Everybody => SessionACL::All,
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    config.n_threads = Some(cores.clamp(MIN_THREADS, MAX_THREADS));
    config
}

/// One that waits for the disk must not keep the others from looking up names.
const MIN_THREADS: usize = 4;
/// More copies of memory at a time make none of them faster.
const MAX_THREADS: usize = 8;
