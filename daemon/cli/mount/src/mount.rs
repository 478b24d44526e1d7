//! `blobd mount`: a FUSE file system that shows models as ordinary files, for programs that need a path.
//!
//! The mount is an ordinary client of the daemon. The module `tree` holds the names. When a program opens a file,
//! the mount opens the model at the daemon and then reads from the descriptors that it received. Every file
//! is bit for bit the original, and an open file stays readable if the daemon stops or the model is removed.
//! Memory is not shared with clients that map blobs: the kernel caches a mounted file separately, once for
//! all its readers. The exception is passthrough, where the kernel reads the blob directly: for files that
//! are stored as one blob, if the process has `CAP_SYS_ADMIN`.

use std::collections::BTreeMap;
use std::fs;
use std::io::{self, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::thread::{self, sleep};
use std::time::Duration;

use blobd_cli_common::connect::{connect, print_result};
use blobd_cli_common::output::printable;
use blobd_cli_common::{Global, internal};
use blobd_client::process::{Signals, first_of, listen_for_end, raise_descriptor_limit};
use clap::Args;
use fuser::{Config, MountOption, Session, SessionACL, SessionUnmounter};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use tokio::sync::oneshot;

use self::catalog::Catalog;
use self::error::MountError;
use self::file_system::ModelFileSystem;
use self::opener::Opener;
pub(crate) use self::tree::inode;
use crate::{Client, ErrorBody};

mod aliases;
mod catalog;
mod error;
mod file;
mod file_system;
mod hub;
mod names;
mod opener;
mod router;
mod tree;

/// Mount the models as ordinary files, for programs that take a path
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  blobd mount /mnt/models &
  llama-server -m /mnt/models/llama3/8b.gguf
  OLLAMA_MODELS=/mnt/models/ollama ollama serve
  HF_HUB_CACHE=/mnt/models/hub HF_HUB_OFFLINE=1 python3 generate.py
  llama-server --models-dir /mnt/models/models
  umount /mnt/models                           or Ctrl-C, or kill")]
pub struct Params {
    /// An empty directory
    #[arg(value_name = "DIR")]
    directory: PathBuf,
    /// Let other users read the files too
    #[arg(long)]
    allow_other: bool,
}

/// Unmount if the mount's process dies
#[derive(Debug, Args)]
pub struct GuardArgs {
    #[arg(value_name = "DIR")]
    directory: PathBuf,
}

/// Mounts the models, and serves them until the mount is removed.
pub fn run(global: &Global, params: &Params) -> Result<(), ErrorBody> {
    /// Programs that open files wait for the daemon, so they must get an error if it hangs.
    const TIMEOUT: Duration = Duration::from_secs(30);
    raise_descriptor_limit();
    let connected = connect(global)?;
    connected.require_daemon("mount")?;
    let readers = if params.allow_other { Readers::Everybody } else { Readers::Owner };
    let client = connected.client.with_timeout(TIMEOUT);
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().map_err(internal)?;
    let stop = {
        let _context = runtime.enter();
        // Before mounting: a signal that ends the process would leave the mount behind.
        listen_for_end().map_err(internal)?
    };
    let mount = Mount::start(&client, &params.directory, readers).map_err(MountError::body)?;
    let directory = mount.directory.display().to_string();
    print_result(global, &BTreeMap::from([("mounted", &mount.directory)]), |_| {
        format!("{}: mounted; Ctrl-C unmounts\n", printable(&directory))
    })?;
    runtime.block_on(serve(mount, stop)).map_err(internal)
}

/// Removes the mount when the process that served it has ended.
pub fn run_guard(args: &GuardArgs) -> Result<(), ErrorBody> {
    watch(&args.directory);
    Ok(())
}

async fn serve(mut mount: Mount, mut stop: Signals) -> io::Result<()> {
    tokio::select! {
        ended = mount.ended() => return ended,
        _kind = first_of(&mut stop) => {}
    }
    mount.unmount();
    Ok(())
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Readers {
    Owner,
    Everybody,
}

#[derive(Debug)]
struct Mount {
    directory: PathBuf,
    unmounter: SessionUnmounter,
    ended: oneshot::Receiver<io::Result<()>>,
    _guard: Guard,
}

impl Mount {
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

    async fn ended(&mut self) -> io::Result<()> {
        let ended = (&mut self.ended).await;
        ended.unwrap_or_else(|_gone| Err(io::Error::other("mount: its thread ended unexpectedly")))
    }

    /// Files that are open stay readable until this process ends.
    fn unmount(mut self) {
        if self.unmounter.unmount().is_err() {
            detach(&self.directory);
        }
    }
}

/// Checks that the directory can be a mount point, and returns its absolute path.
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

/// Detects problems that a failed mount reports with the same error.
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

/// A second process that unmounts a stale mount when this is dropped or this process dies.
///
/// When a FUSE process dies, the kernel closes its connection but leaves the mount, in which every access fails with
/// "transport endpoint is not connected" until it is unmounted.
#[derive(Debug)]
#[must_use]
struct Guard {
    _process: Child,
}

impl Guard {
    /// Starts the process in its own group, where Ctrl-C does not reach it.
    fn start(directory: &Path) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command
            .arg("mount-guard")
            .arg(directory)
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::null());
        Ok(Self { _process: command.process_group(0).spawn()? })
    }
}

/// Waits until the other end of standard input is closed, and unmounts `directory` if its mount is stale.
fn watch(directory: &Path) {
    const FUSE_MAGIC: u32 = 0x6573_5546;
    /// A dying process closes its files one after the other, so its connection may stay open for some time.
    const MAX_CHECKS: u32 = 100;
    const CHECK_INTERVAL: Duration = Duration::from_millis(50);
    // The mount's process writes nothing; an error has the same meaning as its end.
    let _ = io::stdin().read_to_end(&mut Vec::new());
    for _ in 0..MAX_CHECKS {
        match rustix::fs::statfs(directory) {
            Err(Errno::NOTCONN | Errno::CONNABORTED) => return detach(directory),
            Ok(file_system) if u32::try_from(file_system.f_type) == Ok(FUSE_MAGIC) => sleep(CHECK_INTERVAL),
            // Unmounted.
            _ => return,
        }
    }
}

/// Unmounts lazily: the mount disappears now, and the kernel frees it when the last file is closed.
fn detach(directory: &Path) {
    if unmount(directory, UnmountFlags::DETACH).is_err() {
        // Only root may unmount directly. If the helper fails too, there is no other way.
        let _ = Command::new("fusermount3").args(["-u", "-q", "-z", "--"]).arg(directory).output();
    }
}
