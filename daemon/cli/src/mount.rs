//! `blobd mount`: a FUSE file system that shows models as ordinary files, for programs that need a path.
//!
//! The mount is an ordinary client of the daemon. The [`tree`] holds the names. When a program opens a file,
//! the mount opens the model at the daemon and then reads from the descriptors that it received. Every file
//! is bit for bit the original, and an open file stays readable if the daemon stops or the model is removed.
//! Memory is not shared with clients that map blobs: the kernel caches a mounted file separately, once for
//! all its readers. The exception is passthrough, where the kernel reads the blob directly: for files that
//! are stored as one blob, if the process has `CAP_SYS_ADMIN`.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::thread;
use std::time::Duration;

use blobd_client::client::Client;
use blobd_client::process::{Signals, first_of, listen_for_end, raise_descriptor_limit};
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_store_format::text::printable;
use clap::Args;
use fuser::{Config, MountOption, Session, SessionACL, SessionUnmounter};
use tokio::sync::oneshot;

use super::Global;
use super::connect::{connect, print_result};

mod catalog;
mod error;
mod file;
mod file_system;
mod guard;
mod names;
mod opener;
mod tree;
mod workers;

use error::MountError;
use guard::watch;

use catalog::Catalog;
use file_system::ModelFileSystem;
use guard::Guard;
use opener::Opener;

/// Mount the models as ordinary files, for programs that take a path
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd mount /mnt/models &
  llama-server -m /mnt/models/llama3/8b.gguf
  OLLAMA_MODELS=/mnt/models/ollama ollama serve
  umount /mnt/models                           or Ctrl-C, or kill")]
pub(super) struct Params {
    /// An empty directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Let other users read the files too
    #[arg(long)]
    allow_other: bool,
}

/// Unmount if the mount's process dies
#[derive(Debug, Args)]
pub(super) struct GuardParams {
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

pub(super) fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    /// Programs that open files wait for the daemon, so they must get an error if it hangs.
    const TIMEOUT: Duration = Duration::from_secs(30);
    raise_descriptor_limit();
    let connected = connect(global)?;
    if !connected.has_daemon() {
        let body = ErrorBody::new(ErrorCode::InvalidRequest, "mount: no daemon is running");
        return Err(body.with_hint("start `blobd serve` first: the mount reads models through the daemon"));
    }
    let readers = if params.allow_other { Readers::Everybody } else { Readers::Owner };
    let client = connected.client.with_timeout(TIMEOUT);
    let internal = |error: std::io::Error| ErrorBody::new(ErrorCode::Internal, error);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(internal)?;
    let stop = {
        let _context = runtime.enter();
        // Before mounting: a signal that ends the process would leave the mount behind.
        listen_for_end().map_err(internal)?
    };
    let mount = Mount::start(&client, &params.directory, readers).map_err(MountError::body)?;
    let directory = mount.directory().display().to_string();
    print_result(global, &BTreeMap::from([("mounted", mount.directory())]), |_| {
        format!("{}: mounted; Ctrl-C unmounts\n", printable(&directory))
    })?;
    runtime.block_on(serve(mount, stop)).map_err(internal)
}

pub(super) fn run_guard(params: &GuardParams) -> Result<(), ErrorBody> {
    watch(&params.directory);
    Ok(())
}

async fn serve(mut mount: Mount, mut stop: Signals) -> std::io::Result<()> {
    tokio::select! {
        ended = mount.ended() => return ended,
        _kind = first_of(&mut stop) => {}
    }
    mount.unmount();
    Ok(())
}

/// Which users may read the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Readers {
    Owner,
    Everybody,
}

/// A mount that is served by threads of this process.
#[derive(Debug)]
struct Mount {
    directory: PathBuf,
    unmounter: SessionUnmounter,
    ended: oneshot::Receiver<io::Result<()>>,
    _guard: Guard,
}

impl Mount {
    /// Mounts the daemon's models at an empty directory.
    fn start(client: &Client, directory: &Path, readers: Readers) -> Result<Self, MountError> {
        let directory = check_directory(directory)?;
        check_fuse()?;
        let file_system = ModelFileSystem::new(Catalog::new(client.clone())?, Opener::new(client.clone()));
        let file_system = file_system.map_err(MountError::Start)?;
        let guard = Guard::start(&directory).map_err(MountError::Start)?;
        let mut session = Session::new(file_system, &directory, &config(readers))
            .map_err(|reason| refusal(&directory, reason))?;
        let unmounter = session.unmount_callable();
        let (sender, ended) = oneshot::channel();
        let serve = move || {
            // Fails only if the process is about to end.
            let _ = sender.send(session.run());
        };
        thread::Builder::new().name("mount".to_owned()).spawn(serve).map_err(MountError::Start)?;
        Ok(Self { directory, unmounter, ended, _guard: guard })
    }

    fn directory(&self) -> &Path {
        &self.directory
    }

    /// Waits until it is unmounted by another process, or fails.
    async fn ended(&mut self) -> io::Result<()> {
        let ended = (&mut self.ended).await;
        ended.unwrap_or_else(|_gone| Err(io::Error::other("mount: its thread ended unexpectedly")))
    }

    /// Unmounts. Files that are open stay readable until this process ends.
    fn unmount(mut self) {
        if self.unmounter.unmount().is_err() {
            guard::detach(&self.directory);
        }
    }
}

/// Checks that the directory can be mounted at, and returns its absolute path.
fn check_directory(directory: &Path) -> Result<PathBuf, MountError> {
    let failed = |reason: io::Error| match reason.raw_os_error() {
        Some(code) if code == rustix::io::Errno::NOTCONN.raw_os_error() => {
            MountError::Dead { directory: directory.to_path_buf() }
        }
        _ => MountError::Directory { directory: directory.to_path_buf(), reason },
    };
    let absolute = directory.canonicalize().map_err(failed)?;
    if !fs::metadata(&absolute).map_err(failed)?.is_dir() {
        return Err(MountError::NoDirectory { directory: absolute });
    }
    match fs::read_dir(&absolute).map_err(failed)?.next() {
        None => Ok(absolute),
        Some(_) => Err(MountError::NotEmpty { directory: absolute }),
    }
}

/// Detects problems that the error of a failed mount would not tell apart.
fn check_fuse() -> Result<(), MountError> {
    /// The path of the helper `fusermount3`; the FUSE library panics if it is not UTF-8.
    const HELPER_VARIABLE: &str = "FUSERMOUNT_PATH";
    if let Err(std::env::VarError::NotUnicode(_)) = std::env::var(HELPER_VARIABLE) {
        let reason = io::Error::new(io::ErrorKind::InvalidInput, "FUSERMOUNT_PATH: not UTF-8");
        return Err(MountError::NoHelper(reason));
    }
    let device = fs::File::options().read(true).write(true).open("/dev/fuse");
    device.map(drop).map_err(MountError::NoFuse)
}

fn refusal(directory: &Path, reason: io::Error) -> MountError {
    match reason.kind() {
        // The device and the directory exist, so the helper is missing.
        io::ErrorKind::NotFound => MountError::NoHelper(reason),
        _ => MountError::Refused { directory: directory.to_path_buf(), reason },
    }
}

fn config(readers: Readers) -> Config {
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
    config.acl = match readers {
        Readers::Owner => SessionACL::Owner,
        Readers::Everybody => SessionACL::All,
    };
    let cores = thread::available_parallelism().map_or(1, usize::from);
    config.n_threads = Some(cores.clamp(MIN_THREADS, MAX_THREADS));
    config
}

/// Name lookups must be served while some threads wait for the disk.
const MIN_THREADS: usize = 4;
/// More threads do not copy faster: memory bandwidth is the limit.
const MAX_THREADS: usize = 8;
