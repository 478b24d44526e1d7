//! A real mount of a daemon's models.

use std::fs;
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus};

use blobd_fixtures::skipped::skipped;
use rustix::process::{Pid, Signal, kill_process};

use crate::command::{Blobd, run};
use crate::daemon::TestDaemon;
use crate::wait::eventually;

/// `blobd mount` on a directory beside the daemon's store; ended when dropped.
#[derive(Debug)]
pub struct TestMount {
    child: Option<Child>,
    directory: PathBuf,
}

impl TestMount {
    /// Mounts and waits until the files appear. Prints the reason and returns `None` if mounting is not
    /// possible here.
    ///
    /// # Panics
    /// When mounting is possible and `blobd mount` fails.
    #[must_use]
    pub fn start(daemon: &TestDaemon) -> Option<Self> {
        let device = fs::File::options().read(true).write(true).open("/dev/fuse");
        if let Err(error) = device {
            skipped(format_args!("/dev/fuse: {error}"));
            return None;
        }
        if !rustix::process::geteuid().is_root() {
            skipped("root mounts without a helper, this user does not");
            return None;
        }
        let mut mount = Self { child: None, directory: daemon.scratch().join("mount") };
        fs::create_dir(&mount.directory).expect("a directory to mount at");
        mount.restart(&daemon.command());
        Some(mount)
    }

    /// Mounts again at the same place.
    ///
    /// # Panics
    /// When that fails.
    pub fn restart(&mut self, command: &Blobd) {
        let mut command = command.command();
        command.arg("mount").arg(&self.directory).stdout(std::process::Stdio::null());
        let stderr = fs::File::create(self.directory.with_extension("log")).expect("a log file");
        self.child = Some(command.stderr(stderr).spawn().expect("the mount starts"));
        eventually("the mount appears", || {
            let child = self.child.as_mut().expect("it was started");
            assert!(matches!(child.try_wait(), Ok(None)), "the mount has ended: {}", self.log());
            self.is_mounted()
        });
    }

    /// A file below the mount.
    #[must_use]
    pub fn path(&self, path: &str) -> PathBuf {
        self.directory.join(path)
    }

    /// Whether the file system is mounted.
    #[must_use]
    pub fn is_mounted(&self) -> bool {
        self.directory.join("ollama/blobs").is_dir()
    }

    /// The process ID.
    ///
    /// # Panics
    /// When it is not running.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the mount is running").id()
    }

    /// Its standard error.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.directory.with_extension("log")).unwrap_or_default()
    }

    /// Ends it.
    ///
    /// # Panics
    /// When it is not running, or does not end.
    pub fn end_with(&mut self, signal: Signal) -> ExitStatus {
        let mut child = self.child.take().expect("the mount is running");
        kill_process(Pid::from_child(&child), signal).expect("a child can be killed");
        let mut status = None;
        eventually("the mount ends", || {
            status = child.try_wait().expect("a child can be waited for");
            status.is_some()
        });
        status.unwrap_or_else(|| ExitStatus::from_raw(0))
    }

    /// Waits until the directory is empty and usable again.
    ///
    /// # Panics
    /// When the deadline passes.
    pub fn is_left_clean(&self) {
        eventually("the directory is usable again", || is_empty(&self.directory));
    }
}

impl Drop for TestMount {
    fn drop(&mut self) {
        if self.child.is_some() {
            self.end_with(Signal::TERM);
        }
        if !is_empty(&self.directory) {
            run(std::process::Command::new("umount").arg("-l").arg(&self.directory));
        }
    }
}

fn is_empty(directory: &Path) -> bool {
    fs::read_dir(directory).is_ok_and(|mut entries| entries.next().is_none())
}
