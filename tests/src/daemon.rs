//! A real daemon with a store of its own.

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
use crate::places::{disk_folder, fast_folder};
use crate::programs;
use crate::wait::{DEADLINE, eventually, eventually_some};

/// `blobd serve` with a temporary root and socket; killed when dropped.
#[derive(Debug)]
pub struct TestDaemon {
    child: Option<Child>,
    /// What to start instead of the binary itself, such as `sh -c 'ulimit …'`; empty for nothing.
    wrapper: Vec<String>,
    /// Its configuration file, if it has one.
    config: Option<PathBuf>,
    root: PathBuf,
    folder: TempDir,
}

impl TestDaemon {
    /// Starts a daemon on an empty store and waits until it answers.
    ///
    /// # Panics
    /// When it does not.
    #[must_use]
    pub fn start() -> Self {
        Self::start_in(fast_folder())
    }

    /// The same on a real disk.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_on_disk() -> Self {
        Self::start_in(disk_folder())
    }

    /// The same in a directory that is given, which may hold a `store` already.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_in(folder: TempDir) -> Self {
        Self::start_under(&[], folder)
    }

    /// The same under another program, which must replace itself by the command that its
    /// arguments end with.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_under(wrapper: &[&str], folder: TempDir) -> Self {
        let root = folder.path().join("store");
        let wrapper = wrapper.iter().map(ToString::to_string).collect();
        Self { child: None, wrapper, config: None, root, folder }.started()
    }

    /// The same on a store that lies somewhere else, such as on a file system that is about to
    /// fail, with this configuration file: nothing but the store is there. It dies with the thread that starts it, even if this
    /// process is killed, for it would keep that file system mounted.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_at(root: &Path, config: Option<&Path>) -> Self {
        Self::start_at_under(&["setpriv", "--pdeathsig", "KILL"], root, config)
    }

    /// The same as the command that `wrapper` begins with.
    ///
    /// # Panics
    /// As for [`Self::start`].
    #[must_use]
    pub fn start_at_under(wrapper: &[&str], root: &Path, config: Option<&Path>) -> Self {
        let wrapper = wrapper.iter().map(ToString::to_string).collect();
        let (config, root) = (config.map(Path::to_path_buf), root.to_path_buf());
        Self { child: None, wrapper, config, root, folder: fast_folder() }.started()
    }

    /// Starts the daemon again on the same store, after it was killed or stopped.
    ///
    /// # Panics
    /// When it does not answer.
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
        eventually_some("the daemon answers", || {
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

    /// Kills the daemon and starts it again while the kernel still ends the first process.
    ///
    /// # Panics
    /// When it is not running, or does not answer afterwards.
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

    /// The same for a daemon that may not end by itself: its status if it does so in time. Else it is
    /// killed when this value is dropped.
    ///
    /// # Panics
    /// When it is not running.
    pub fn stop_within(&mut self, patience: Duration) -> Option<ExitStatus> {
        let child = self.child.as_mut().expect("the daemon is running");
        kill_process(Pid::from_child(child), Signal::TERM).expect("a child can be killed");
        let start = Instant::now();
        loop {
            let status = child.try_wait().expect("a child can be waited for");
            if status.is_some() || start.elapsed() >= patience {
                return status;
            }
            sleep(Duration::from_millis(5));
        }
    }

    /// Whether the process is alive.
    pub fn is_running(&mut self) -> bool {
        self.child.as_mut().is_some_and(|child| matches!(child.try_wait(), Ok(None)))
    }

    /// Its process.
    ///
    /// # Panics
    /// When it is not running.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.child.as_ref().expect("the daemon is running").id()
    }

    /// The configuration of a daemon that has none of its own: no background scrub. That might find damage
    /// before the command under test does.
    fn default_config(&self) -> PathBuf {
        let path = self.folder.path().join("daemon.toml");
        fs::write(&path, "[scrub]\nrate_bytes_per_second = 0\n").expect("a configuration file");
        path
    }

    /// Waits until it has no more than `most` descriptors open, by [`Self::open_descriptors`].
    ///
    /// # Panics
    /// When that does not happen; the message lists what is open.
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

    /// How many descriptors it has open, but for those of its index, which a thread opens at any time, and for
    /// the directory `blobs`, which stays open once it was needed.
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
        // One that is closed meanwhile has no target any more.
        let targets = entries.flatten().filter_map(|entry| fs::read_link(entry.path()).ok());
        targets.filter(|target| !target.starts_with(&index) && *target != blobs).collect()
    }

    /// How many descriptors it has open when it serves nobody. Waits until all connections that tests have
    /// closed are closed on its side too.
    ///
    /// # Panics
    /// When a connection stays open.
    #[must_use]
    pub fn idle_descriptors(&self) -> usize {
        eventually("all connections are closed", || self.connections() == 0);
        self.open_descriptors()
    }

    /// How many connections it has not closed, those included that it has not yet accepted.
    ///
    /// # Panics
    /// When the kernel does not say.
    #[must_use]
    pub fn connections(&self) -> usize {
        // From `proc_pid_net(5)`: each accepted socket has the path of the one that listens, which alone
        // has this flag.
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

    /// A directory beside the store, for the test's own files; it goes with the daemon.
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

    /// Commands that name the daemon's root and know nothing of its socket.
    #[must_use]
    pub fn embedded(&self) -> Blobd {
        let blobd = Blobd::at_root(&self.root);
        match &self.config {
            Some(config) => blobd.configured_by(config),
            None => blobd,
        }
    }

    /// What the daemon has logged since it was last started.
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
    }
}
