//! A daemon that is started as systemd starts it: with a socket that it is given, and one for notifications.
//!
//! The test process acts as systemd. It keeps the socket while daemons end and start.

use std::fs::{self, File};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::command::Blobd;
use crate::programs;
use crate::temp_dirs::tmpfs_directory;
use crate::wait::{DEADLINE, eventually};

/// Passes standard input on as descriptor 3, as `sd_listen_fds(3)` expects it. The process ID stays the same.
const PASS_SOCKET: &str = r#"exec 3<&0 </dev/null; LISTEN_PID=$$ exec "$0" "$@""#;

/// A service whose socket outlives its daemons. The daemon is killed when this is dropped.
#[derive(Debug)]
pub struct Service {
    child: Option<Child>,
    notifications: UnixDatagram,
    listener: OwnedFd,
    variables: Vec<(&'static str, String)>,
    config: String,
    folder: TempDir,
}

impl Service {
    /// The service before its first start: clients can connect, and wait.
    ///
    /// # Panics
    /// When the sockets cannot be created.
    #[must_use]
    pub fn new() -> Self {
        let folder = tmpfs_directory();
        let listener = UnixListener::bind(folder.path().join("blobd.sock")).expect("a socket");
        Self::listening_with(folder, listener.into())
    }

    /// The same with another descriptor in the place of the socket.
    ///
    /// # Panics
    /// As [`Self::new`].
    #[must_use]
    pub fn with_descriptor(descriptor: OwnedFd) -> Self {
        Self::listening_with(tmpfs_directory(), descriptor)
    }

    fn listening_with(folder: TempDir, listener: OwnedFd) -> Self {
        let notifications = UnixDatagram::bind(folder.path().join("notify")).expect("a socket");
        notifications.set_read_timeout(Some(DEADLINE)).expect("a timeout");
        let config = "[scrub]\nrate_bytes_per_second = 0\n".to_owned();
        Self { child: None, notifications, listener, variables: Vec::new(), config, folder }
    }

    /// Sets an environment variable of the daemon.
    #[must_use]
    pub fn with_variable(mut self, name: &'static str, value: &str) -> Self {
        self.variables.push((name, value.to_owned()));
        self
    }

    /// Adds lines at the beginning of the daemon's configuration.
    #[must_use]
    pub fn configured(mut self, lines: &str) -> Self {
        self.config.insert_str(0, lines);
        self
    }

    /// Starts the daemon, and does not wait for it.
    ///
    /// # Panics
    /// When the process cannot be started.
    pub fn start(&mut self) {
        self.start_with_descriptors(1);
    }

    /// The same with another number of descriptors in the environment.
    ///
    /// # Panics
    /// As [`Self::start`].
    pub fn start_with_descriptors(&mut self, count: u32) {
        let config = self.folder.path().join("config.toml");
        fs::write(&config, &self.config).expect("a configuration file");
        let mut command = Command::new("sh");
        command.args(["-c", PASS_SOCKET]).arg(programs::blobd()).arg("serve");
        Blobd::at_root(&self.root()).prepare(&mut command);
        command.env("BLOBD_CONFIG", config).env("NOTIFY_SOCKET", self.folder.path().join("notify"));
        command.env("LISTEN_FDS", count.to_string());
        command.envs(self.variables.iter().map(|(name, value)| (name, value)));
        let log = File::options().append(true).create(true).open(self.log_path()).expect("a log file");
        let listener = self.listener.try_clone().expect("a duplicate");
        let child = command.stdin(listener).stdout(Stdio::null()).stderr(log).spawn();
        self.child = Some(child.expect("the daemon starts"));
    }

    /// Receives notifications up to the first that has this line; returns all of them.
    ///
    /// # Panics
    /// When it does not arrive within the deadline.
    pub fn wait_for(&self, line: &str) -> Vec<String> {
        let mut received = Vec::new();
        loop {
            match self.notification() {
                Ok(message) => received.push(message),
                Err(error) => panic!("{line}: {error}; received {received:?}; log: {}", self.log()),
            }
            if received.last().is_some_and(|message| message.lines().any(|found| found == line)) {
                return received;
            }
        }
    }

    fn notification(&self) -> io::Result<String> {
        let mut message = [0; 4096];
        let length = self.notifications.recv(&mut message)?;
        Ok(String::from_utf8_lossy(message.get(..length).unwrap_or_default()).into_owned())
    }

    /// Stops the daemon with SIGTERM and waits until it has ended.
    ///
    /// # Panics
    /// When it is not running or does not end.
    pub fn stop(&mut self) -> ExitStatus {
        let child = self.child.as_ref().expect("the daemon is running");
        kill_process(Pid::from_child(child), Signal::TERM).expect("a child can be killed");
        self.ended()
    }

    /// Waits until the daemon has ended.
    ///
    /// # Panics
    /// When it does not within the deadline.
    pub fn ended(&mut self) -> ExitStatus {
        let mut child = self.child.take().expect("the daemon was started");
        let mut status = None;
        eventually("the daemon ends", || {
            status = child.try_wait().expect("a child can be waited for");
            status.is_some()
        });
        status.expect("it has ended")
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("blobd.sock")
    }

    /// The store's directory.
    #[must_use]
    pub fn root(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// A directory for the test's own files.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.folder.path()
    }

    /// Commands that use the service.
    #[must_use]
    pub fn command(&self) -> Blobd {
        Blobd::at_socket(&self.socket())
    }

    /// What all daemons of the service have logged.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }
}

impl Default for Service {
    fn default() -> Self {
        Self::new()
    }
}

impl Drop for Service {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Fails only if it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// How long a watchdog of tests waits: short, because a test waits for some of its messages.
pub const WATCHDOG: Duration = Duration::from_millis(200);
