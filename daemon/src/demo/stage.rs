//! Where the demo plays: a temporary directory, and commands that run in it.

use std::fs::File;
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_client::Client;
use blobd_fixtures::registry::FakeRegistry;
use blobd_store_format::digest::{Digest, Hasher};
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use super::error::DemoError;
use super::screen;

/// A directory that goes when this is dropped.
#[derive(Debug)]
pub(super) struct Stage {
    binary: PathBuf,
    directory: TempDir,
    interrupted: Arc<AtomicBool>,
    /// Watches the signals.
    _runtime: Runtime,
}

impl Stage {
    /// Makes the directory. From now on Ctrl-C ends the play at the next step, so that everything
    /// is cleaned up.
    pub(super) fn set_up() -> Result<Self, DemoError> {
        let binary = std::env::current_exe().map_err(DemoError::io("this program's own path"))?;
        let runtime = Builder::new_multi_thread().worker_threads(1).enable_all().build();
        let runtime = runtime.map_err(DemoError::io("runtime"))?;
        let interrupted = Arc::new(AtomicBool::new(false));
        runtime.block_on(watch_signals(Arc::clone(&interrupted))).map_err(DemoError::io("signals"))?;
        let directory = tempfile::Builder::new().prefix("blobd-demo-").tempdir();
        let directory = directory.map_err(DemoError::io("temporary directory"))?;
        Ok(Self { binary, directory, interrupted, _runtime: runtime })
    }

    /// The directory.
    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    /// A file in the directory.
    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    /// The daemon's socket.
    pub(super) fn socket(&self) -> PathBuf {
        self.path("blobd.sock")
    }

    /// Starts a registry in this process and tells the daemon-to-be to use it for Ollama's.
    pub(super) fn start_registry(&self) -> Result<FakeRegistry, DemoError> {
        let registry = FakeRegistry::start().map_err(DemoError::io("registry"))?;
        registry.keep_connections();
        let config = format!("[mirrors]\n\"registry.ollama.ai\" = \"{}\"\n", registry.url());
        let path = self.path(CONFIG);
        std::fs::write(&path, config).map_err(DemoError::at(&path))?;
        Ok(registry)
    }

    /// A blobd command of this very binary, with the demo's store instead of the user's.
    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .args(arguments)
            .current_dir(self.directory())
            .env("BLOBD_ROOT", self.path("store"))
            .env("BLOBD_SOCKET", self.socket())
            .env("BLOBD_CONFIG", self.path(CONFIG))
            .stdin(Stdio::null());
        command
    }

    /// Shows a command line, runs it, and shows what it prints.
    pub(super) fn run(&self, arguments: &[&str]) -> Result<(), DemoError> {
        self.check_interrupted()?;
        let line = format!("blobd {}", arguments.join(" "));
        screen::command(&line)?;
        // Progress bars and errors go straight to the terminal.
        let output = self.command(arguments).stderr(Stdio::inherit()).output();
        let output = output.map_err(DemoError::io(line.as_str()))?;
        screen::output(&String::from_utf8_lossy(&output.stdout))?;
        if output.status.success() {
            return Ok(());
        }
        self.check_interrupted()?;
        Err(DemoError::Command { command: line, status: output.status })
    }

    /// A client of the demo's daemon.
    pub(super) fn client(&self) -> Result<Client, DemoError> {
        Ok(Client::connect(self.socket())?)
    }

    /// Fails once somebody has pressed Ctrl-C.
    pub(super) fn check_interrupted(&self) -> Result<(), DemoError> {
        match self.interrupted.load(Ordering::Relaxed) {
            true => Err(DemoError::Interrupted),
            false => Ok(()),
        }
    }
}

/// The SHA-256 of a file on disk.
pub(super) fn digest_of_file(path: &Path) -> Result<Digest, DemoError> {
    let read = || -> io::Result<Digest> {
        let mut file = File::open(path)?;
        let mut hasher = Hasher::new();
        let mut chunk = vec![0; 1 << 20];
        loop {
            match file.read(&mut chunk)? {
                0 => return Ok(hasher.finish()),
                count => hasher.update(chunk.get(..count).unwrap_or_default()),
            }
        }
    };
    read().map_err(DemoError::at(path))
}

/// Ctrl-C reaches the commands by itself: they are in the same process group.
async fn watch_signals(interrupted: Arc<AtomicBool>) -> io::Result<()> {
    for kind in [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()] {
        let mut signals = signal(kind)?;
        let interrupted = Arc::clone(&interrupted);
        tokio::spawn(async move {
            while signals.recv().await.is_some() {
                interrupted.store(true, Ordering::Relaxed);
            }
        });
    }
    Ok(())
}

const CONFIG: &str = "config.toml";
