//! The daemon under attack, and the directories of those who take part.

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
use blobd_tests::places::fast_folder;

use crate::{ATTACKER_UID, DAEMON_UID, Outcome, WITNESS_UID};

/// The model that the witness opens.
pub(crate) const MODEL: &str = "witness/model";

/// How long the first import may take.
const PATIENCE: Duration = Duration::from_secs(30);

/// A daemon of many users, with a user of its own.
pub(crate) struct Arena {
    pub(crate) daemon: TestDaemon,
    mounts: AtomicU32,
}

impl Arena {
    /// Starts a daemon to which every user may connect, as the members of the group `blobd` may to the
    /// system's, and gives it one model.
    ///
    /// # Errors
    /// When the machine does not do its part.
    pub(crate) fn start() -> Outcome<Self> {
        let folder = fast_folder();
        chown(folder.path(), Some(DAEMON_UID), Some(DAEMON_UID))?;
        let config = folder.path().join("config.toml");
        fs::write(&config, "single_user = false\n[space]\nquota = \"4 GiB\"\n")?;
        open_to_all(&config, 0o644)?;
        let (uid, gid) = (format!("--reuid={DAEMON_UID}"), format!("--regid={DAEMON_UID}"));
        let config = format!("BLOBD_CONFIG={}", config.display());
        // It ends with this program, even if that is killed.
        let wrapper =
            ["setpriv", "--pdeathsig=KILL", &uid, &gid, "--clear-groups", "--", "env", config.as_str()];
        let arena = Self { daemon: TestDaemon::start_under(&wrapper, folder), mounts: AtomicU32::new(0) };
        open_to_all(arena.daemon.scratch(), 0o755)?;
        arena.open_socket()?;
        for (name, uid) in [("witness", WITNESS_UID), ("attacker", ATTACKER_UID)] {
            let folder = arena.folder(name);
            fs::create_dir(&folder)?;
            chown(&folder, Some(uid), Some(uid))?;
        }
        arena.import(&ModelFile::dense(1), MODEL)?;
        Ok(arena)
    }

    /// Kills the daemon and starts it anew on its store.
    ///
    /// # Errors
    /// When its socket cannot be opened to all.
    pub(crate) fn restart(&mut self) -> Outcome<()> {
        self.daemon.kill_if_running();
        self.daemon.restart();
        self.open_socket()
    }

    /// A directory for the files of one who takes part.
    pub(crate) fn folder(&self, name: &str) -> PathBuf {
        self.daemon.scratch().join(name)
    }

    /// Where the daemon listens.
    pub(crate) fn socket(&self) -> PathBuf {
        self.daemon.socket()
    }

    /// Mounts files that hang; they are mounted until they are dropped.
    pub(crate) fn mount_hanging_files(&self) -> Option<HangingFiles> {
        let number = self.mounts.fetch_add(1, Ordering::Relaxed);
        // More than is answered before they hang.
        HangingFiles::mount(
            &self.folder(&format!("hanging-{number}")),
            ModelFile::dense_of(1, 2, 128).bytes(),
        )
    }

    /// A client of root.
    pub(crate) fn client(&self, patience: Duration) -> Client {
        client(&self.socket(), patience)
    }

    fn open_socket(&self) -> Outcome<()> {
        open_to_all(&self.socket(), 0o666)
    }

    fn import(&self, model: &ModelFile, name: &str) -> Outcome<()> {
        let path = model.write_to(self.daemon.scratch(), "model.gguf");
        let params = ImportParams { file_name: "model.gguf".to_owned(), name: Some(name.parse()?) };
        self.client(PATIENCE).import(&params, fs::File::open(path)?, |_completed, _total| ())?;
        Ok(())
    }
}

/// A client that connects for each request and does not wait for ever.
pub(crate) fn client(socket: &Path, patience: Duration) -> Client {
    let socket = socket.to_path_buf();
    Client::with_connector(Arc::new(move || UnixStream::connect(&socket))).with_timeout(patience)
}

fn open_to_all(path: &Path, mode: u32) -> Outcome<()> {
    Ok(fs::set_permissions(path, fs::Permissions::from_mode(mode))?)
}
