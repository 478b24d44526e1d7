//! A real daemon with its own store.

use std::fs::{self, File};
use std::os::unix::process::ExitStatusExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::sleep;
use std::time::{Duration, Instant};

use blobd_client::Client;
use rustix::process::{Pid, Signal, kill_process};
use tempfile::TempDir;

use crate::command::Blobd;
use crate::programs;
use crate::temp_dirs::{disk_directory, tmpfs_directory};
use crate::wait::{DEADLINE, eventually, eventually_some};

/// How many lines of the daemon's log a failed test prints.
const LOG_LINES: usize = 40;

/// `blobd serve` with a temporary root and socket; killed when dropped. If the test has failed by then, the end of
/// the log is printed, and with `BLOBD_KEEP` in the environment the directory is not deleted.
#[derive(Debug)]
pub struct TestDaemon {
    child: Option<Child>,
    /// A program that starts the binary, such as `sh -c 'ulimit …'`; empty for none.
    wrapper: Vec<String>,
    /// Its configuration file, if it has one.
    config: Option<PathBuf>,
    root: PathBuf,
    folder: TempDir,
}

impl TestDaemon {
    /// Starts a daemon on an empty store and waits until it responds.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn start() -> Self {
        Self::start_in(tmpfs_directory())
    }

    /// The same on a real disk.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_on_disk() -> Self {
        Self::start_in(disk_directory())
    }

    /// The same in a given directory, which may already contain a `store`.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_in(folder: TempDir) -> Self {
        Self::start_under(&[], folder)
    }

    /// The same, started by another program, which must exec the command at the end of its arguments.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_under(wrapper: &[&str], folder: TempDir) -> Self {
        let root = folder.path().join("store");
        let wrapper = wrapper.iter().map(ToString::to_string).collect();
        Self { child: None, wrapper, config: None, root, folder }.started()
    }

    /// The same on a store in another directory, such as on a file system that is about to fail, with this
    /// configuration file. All other files stay outside that directory. The daemon is killed when the thread
    /// that started it ends, even if this process is killed: otherwise it would keep the file system mounted.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_at(root: &Path, config: Option<&Path>) -> Self {
        Self::start_at_under(&["setpriv", "--pdeathsig", "KILL"], root, config)
    }

    /// The same, started by `wrapper`.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_at_under(wrapper: &[&str], root: &Path, config: Option<&Path>) -> Self {
        let wrapper = wrapper.iter().map(ToString::to_string).collect();
        let (config, root) = (config.map(Path::to_path_buf), root.to_path_buf());
        Self { child: None, wrapper, config, root, folder: tmpfs_directory() }.started()
    }

    /// Starts the daemon again on the same store, after it was killed or stopped.
    ///
    /// # Panics
    /// When it does not respond.
    pub fn restart(&mut self) {
        assert!(self.child.is_none(), "the daemon is running");
        let log = File::create(self.log_path()).expect("a log file");
        let mut words = self.wrapper.iter().map(String::as_str).chain(programs::blobd().to_str());
        let mut command = Command::new(words.next().expect("a program"));
        command.args(words);
        self.embedded().prepare(&mut command);
        if self.config.is_none() {
            command.env("BLOBD_CONFIG", self.default_config());
        }
        command.arg("serve").arg("--socket").arg(self.socket());
        let child = command.stdout(Stdio::null()).stderr(log).spawn().expect("the daemon starts");
        self.child = Some(child);
        eventually_some("the daemon responds", || {
            assert!(self.is_running(), "the daemon has ended: {}", self.log());
            Client::connect(self.socket()).and_then(|client| client.version()).ok()
        });
    }

    /// Kills the daemon as a crash would.
    ///
    /// # Panics
    /// When it is not running.
    pub fn kill(&mut self) {
        let status = self.end_with(Signal::KILL);
        assert_eq!(status.signal(), Some(9), "{}", self.log());
    }

    /// Kills the daemon and restarts it before the first process has ended.
    ///
    /// # Panics
    /// When it is not running, or does not respond afterwards.
    pub fn kill_and_restart_at_once(&mut self) {
        let mut killed = self.child.take().expect("the daemon is running");
        killed.kill().expect("a child can be killed");
        self.restart();
        killed.wait().expect("a child can be waited for");
    }

    /// Kills the daemon if it has not ended by itself.
    pub fn kill_if_running(&mut self) {
        if let Some(mut child) = self.child.take() {
            // Fails only if it has ended already.
            let _ = child.kill();
            let _ = child.wait();
        }
    }

    /// Stops the daemon as the system does.
    ///
    /// # Panics
    /// When it is not running.
    pub fn stop(&mut self) -> ExitStatus {
        self.end_with(Signal::TERM)
    }

    /// The same with a time limit: its status if it ends in time. If not, it is killed when this value is
    /// dropped.
    ///
    /// # Panics
    /// When it is not running.
    pub fn stop_within(&mut self, time_limit: Duration) -> Option<ExitStatus> {
        let child = self.child.as_mut().expect("the daemon is running");
        kill_process(Pid::from_child(child), Signal::TERM).expect("a child can be killed");
        let start = Instant::now();
        loop {
            let status = child.try_wait().expect("a child can be waited for");
            if status.is_some() || start.elapsed() >= time_limit {
                return status;
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// Whether the process is alive.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Its process ID.
    ///
    /// # Panics
    /// When it is not running.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the daemon is running").id()
    }

    /// The default configuration of tests: no background scrub, which might find damage before the command
    /// under test does.
    fn default_config(&self) -> PathBuf {
        let path = self.folder.path().join("daemon.toml");
        fs::write(&path, "[scrub]\nrate_bytes_per_second = 0\n").expect("a configuration file");
        path
    }

    /// Waits until it has at most `most` descriptors open, counted by [`Self::open_descriptors`].
    ///
    /// # Panics
    /// When the deadline passes; the message lists the open files.
    pub fn wait_for_descriptors(&self, most: usize) {
        let start = Instant::now();
        loop {
            let open = self.open_files();
            if open.len() <= most {
                return;
            }
            assert!(start.elapsed() < DEADLINE, "more than {most} descriptors are open: {open:#?}");
            sleep(Duration::from_millis(5));
        }
    }

    /// The number of its open descriptors, without those of its index, which a thread opens at any time, and
    /// without the directory `blobs`, which stays open after its first use.
    ///
    /// # Panics
    /// When it is not running.
    #[must_use]
    pub fn open_descriptors(&self) -> usize {
        self.open_files().len()
    }

    fn open_files(&self) -> Vec<PathBuf> {
        let entries = fs::read_dir(format!("/proc/{}/fd", self.pid())).expect("a running process");
        let (index, blobs) = (self.root.join("index"), self.root.join("blobs"));
        // Opened with the first record.
        let audit = self.root.join("audit");
        // A descriptor that was closed since the listing has no target.
        let targets = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        let is_kept =
            |target: &Path| target.starts_with(&index) || target.starts_with(&audit) || *target == blobs;
        targets.filter(|target| !is_kept(target)).collect()
    }

    /// The number of its open descriptors while it serves no client. First waits until it has closed all
    /// connections that tests have closed.
    ///
    /// # Panics
    /// When a connection stays open.
    #[must_use]
    pub fn idle_descriptors(&self) -> usize {
        eventually("all connections are closed", || self.connections() == 0);
        self.open_descriptors()
    }

    /// The number of its open connections, including those not yet accepted.
    ///
    /// # Panics
    /// When `/proc/net/unix` cannot be read.
    #[must_use]
    pub fn connections(&self) -> usize {
        // From `proc_pid_net(5)`: each accepted socket has the path of the listening one; only that has this
        // flag.
        const LISTENING: &str = "00010000";
        let sockets = fs::read_to_string("/proc/net/unix").expect("the kernel's list of sockets");
        let path = self.socket();
        let is_ours = |line: &&str| line.split_ascii_whitespace().nth(7).map(Path::new) == Some(&path);
        let is_connection = |line: &&str| line.split_ascii_whitespace().nth(3) != Some(LISTENING);
        sockets.lines().filter(is_ours).filter(is_connection).count()
    }

    /// The store's directory.
    #[must_use]
    pub fn root(&self) -> &Path {
        &self.root
    }

    /// The socket.
    #[must_use]
    pub fn socket(&self) -> PathBuf {
        self.folder.path().join("blobd.sock")
    }

    /// A directory beside the store for the test's own files, removed with the daemon.
    #[must_use]
    pub fn scratch(&self) -> &Path {
        self.folder.path()
    }

    /// A client of the daemon.
    ///
    /// # Panics
    /// When it cannot connect.
    #[must_use]
    pub fn client(&self) -> Client {
        Client::connect(self.socket()).expect("the daemon is there")
    }

    /// Commands that talk to the daemon.
    #[must_use]
    pub fn command(&self) -> Blobd {
        Blobd::at_socket(&self.socket())
    }

    /// Commands that know the daemon's root but not its socket.
    #[must_use]
    pub fn embedded(&self) -> Blobd {
        let blobd = Blobd::at_root(&self.root);
        match &self.config {
            Some(config) => blobd.configured_by(config),
            None => blobd,
        }
    }

    /// The daemon's log since its last start.
    #[must_use]
    pub fn log(&self) -> String {
        fs::read_to_string(self.log_path()).unwrap_or_default()
    }

    fn started(mut self) -> Self {
        self.restart();
        self
    }

    fn log_path(&self) -> PathBuf {
        self.folder.path().join("log")
    }

    fn end_with(&mut self, signal: Signal) -> ExitStatus {
        let mut child = self.child.take().expect("the daemon is running");
        let pid = Pid::from_child(&child);
        kill_process(pid, signal).expect("a child can be killed");
        let mut status = None;
        eventually("the daemon ends", || {
            status = child.try_wait().expect("a child can be waited for");
            status.is_some()
        });
        status.expect("it has ended")
    }
}

impl Drop for TestDaemon {
    fn drop(&mut self) {
        self.kill_if_running();
        if std::thread::panicking() {
            let log = self.log();
            let lines: Vec<&str> = log.lines().collect();
            eprintln!(
                "the end of the daemon's log:\n{}",
                lines[lines.len().saturating_sub(LOG_LINES)..].join("\n")
            );
            if std::env::var_os("BLOBD_KEEP").is_some() {
                self.folder.disable_cleanup(true);
                eprintln!("kept: {}", self.folder.path().display());
            }
        }
    }
}
