//! The daemon under attack, and the directories of the witness and the attackers.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, chown};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

use blobd_client::Client;
use blobd_client::protocol::request::ImportParams;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::hanging::HangingFiles;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::tmpfs_directory;

use crate::{CROWD, DAEMON_UID, Outcome, WITNESS_UID};

/// The model that the witness opens.
pub(crate) const MODEL: &str = "witness/model";

/// The time limit of the first import.
const TIMEOUT: Duration = Duration::from_secs(30);

/// A daemon for several users, which runs as a user of its own.
pub(crate) struct Environment {
    pub(crate) daemon: TestDaemon,
    mounts: AtomicU32,
}

impl Environment {
    /// Starts a daemon and imports one model. Every user may connect, like the members of the group `blobd`
    /// to the system's daemon.
    ///
    /// # Errors
    /// When the daemon cannot be set up or the import fails.
    pub(crate) fn start() -> Outcome<Self> {
        let folder = tmpfs_directory();
        chown(folder.path(), Some(DAEMON_UID), Some(DAEMON_UID))?;
        let config = folder.path().join("config.toml");
        fs::write(&config, "single_user = false\n[space]\nquota = \"4 GiB\"\n")?;
        open_to_all(&config, 0o644)?;
        let (uid, gid) = (format!("--reuid={DAEMON_UID}"), format!("--regid={DAEMON_UID}"));
        let config = format!("BLOBD_CONFIG={}", config.display());
        // It ends with this program, even if that is killed.
        let wrapper =
            ["setpriv", "--pdeathsig=KILL", &uid, &gid, "--clear-groups", "--", "env", config.as_str()];
        let environment =
            Self { daemon: TestDaemon::start_under(&wrapper, folder), mounts: AtomicU32::new(0) };
        open_to_all(environment.daemon.scratch(), 0o755)?;
        environment.open_socket()?;
        for uid in CROWD.into_iter().chain([WITNESS_UID]) {
            let folder = environment.folder_of(uid);
            fs::create_dir(&folder)?;
            chown(&folder, Some(uid), Some(uid))?;
        }
        environment.import(&ModelFile::dense(1), MODEL)?;
        Ok(environment)
    }

    /// Kills the daemon and restarts it on its store.
    ///
    /// # Errors
    /// When its socket cannot be opened to all.
    pub(crate) fn restart(&mut self) -> Outcome<()> {
        self.daemon.kill_if_running();
        self.daemon.restart();
        self.open_socket()
    }

    /// The directory for the files of a user.
    pub(crate) fn folder_of(&self, uid: u32) -> PathBuf {
        self.folder(&format!("user-{uid}"))
    }

    /// A directory of the daemon's.
    fn folder(&self, name: &str) -> PathBuf {
        self.daemon.scratch().join(name)
    }

    /// The path of the daemon's socket.
    pub(crate) fn socket(&self) -> PathBuf {
        self.daemon.socket()
    }

    /// Mounts files that hang, until the result is dropped.
    pub(crate) fn mount_hanging_files(&self) -> Option<HangingFiles> {
        let number = self.mounts.fetch_add(1, Ordering::Relaxed);
        // Longer than the part that can be read before a file hangs.
        HangingFiles::mount(
            &self.folder(&format!("hanging-{number}")),
            ModelFile::dense_of(1, 2, 128).bytes(),
        )
    }

    /// A client that runs as root.
    pub(crate) fn client(&self, timeout: Duration) -> Client {
        client(&self.socket(), timeout)
    }

    fn open_socket(&self) -> Outcome<()> {
        open_to_all(&self.socket(), 0o666)
    }

    fn import(&self, model: &ModelFile, name: &str) -> Outcome<()> {
        let path = model.write_to(self.daemon.scratch(), "model.gguf");
        let params = ImportParams { name: Some(name.parse()?), ..ImportParams::new("model.gguf") };
        self.client(TIMEOUT).import(&params, fs::File::open(path)?, |_completed, _total| ())?;
        Ok(())
    }
}

/// A client that opens a connection for each request and has a time limit.
pub(crate) fn client(socket: &Path, timeout: Duration) -> Client {
    let socket = socket.to_path_buf();
    Client::with_connector(Arc::new(move || UnixStream::connect(&socket))).with_timeout(timeout)
}

fn open_to_all(path: &Path, mode: u32) -> Outcome<()> {
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}
