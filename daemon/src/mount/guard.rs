//! What unmounts when the mount's process cannot: another process, which waits for its end.
//!
//! The kernel ends a FUSE connection when its process dies, but leaves the mount: a directory in
//! which everything fails with "transport endpoint is not connected" until somebody unmounts it.

use std::io::{self, Read as _};
use std::os::unix::process::CommandExt as _;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::thread::sleep;
use std::time::Duration;

use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};

/// The hidden command that is the guard.
pub(crate) const COMMAND: &str = "mount-guard";

/// The other process; it looks after the mount when this is dropped, or when this process dies.
#[derive(Debug)]
#[must_use]
pub(super) struct Guard {
    _process: Child,
}

impl Guard {
    /// Starts it. It is in no terminal's foreground: Ctrl-C does not reach it.
    ///
    /// # Errors
    /// When no process can be started.
    pub(super) fn start(directory: &Path) -> io::Result<Self> {
        let mut command = Command::new("/proc/self/exe");
        command.arg(COMMAND).arg(directory).stdin(Stdio::piped()).stdout(Stdio::null()).stderr(Stdio::null());
        Ok(Self { _process: command.process_group(0).spawn()? })
    }
}

/// Waits until the other end of standard input is closed, and unmounts what is dead at `directory`.
pub(crate) fn watch(directory: &Path) {
    // A mount's process that is alive says nothing; an error is as good as its end.
    let _ = io::stdin().read_to_end(&mut Vec::new());
    for _ in 0..MAX_LOOKS {
        match rustix::fs::statfs(directory) {
            Err(Errno::NOTCONN | Errno::CONNABORTED) => return detach(directory),
            Ok(file_system) if u32::try_from(file_system.f_type) == Ok(FUSE_MAGIC) => sleep(BETWEEN_LOOKS),
            // It has been unmounted.
            _ => return,
        }
    }
}

/// Unmounts at once for everybody who looks it up, and for good when the last file is closed.
pub(super) fn detach(directory: &Path) {
    if unmount(directory, UnmountFlags::DETACH).is_err() {
        // Only root may do that by itself. If this fails too, nothing is left to try.
        let helper = Command::new("fusermount3").args(["-u", "-q", "-z", "--"]).arg(directory).output();
        drop(helper);
    }
}

const FUSE_MAGIC: u32 = 0x6573_5546;
/// For so long a dying process may still have its connection: it closes one file after the other.
const MAX_LOOKS: u32 = 100;
const BETWEEN_LOOKS: Duration = Duration::from_millis(50);
