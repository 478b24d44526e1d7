//! The demo's temporary directory, and commands that run in it.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_client::Client;
use blobd_fixtures::registry::FakeRegistry;
use blobd_store_format::digest::Digest;
use tempfile::TempDir;
use tokio::runtime::{Builder, Runtime};
use tokio::signal::unix::{SignalKind, signal};

use super::DemoError;
use super::screen;

#[derive(Debug)]
pub(super) struct Sandbox {
    binary: PathBuf,
    directory: TempDir,
    interrupted: Arc<AtomicBool>,
    /// Runs the signal handlers.
    _runtime: Runtime,
}

impl Sandbox {
    /// Creates the directory. From now on Ctrl-C ends the demo at its next step, so that everything is removed.
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

    pub(super) fn directory(&self) -> &Path {
        self.directory.path()
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.directory.path().join(name)
    }

    pub(super) fn socket(&self) -> PathBuf {
        self.path("blobd.sock")
    }

    /// Starts a registry in this process, and configures it as the mirror of Ollama's.
    pub(super) fn start_registry(&self) -> Result<FakeRegistry, DemoError> {
        let registry = FakeRegistry::start().map_err(DemoError::io("registry"))?;
        registry.keep_connections();
        let config = format!("[mirrors]\n\"registry.ollama.ai\" = \"{}\"\n", registry.url());
        let path = self.path(CONFIG);
        std::fs::write(&path, config).map_err(DemoError::at(&path))?;
        Ok(registry)
    }

    pub(super) fn command(&self, arguments: &[&str]) -> Command {
        let mut command = Command::new(&self.binary);
        command
            .args(arguments)
            .current_dir(self.directory())
            .env("BLOBD_ROOT", self.path("store"))
            .env("BLOBD_SOCKET", self.socket())
            .env("BLOBD_CONFIG", self.path(CONFIG))
            // The demo explains each command itself; a terminal still has bars.
            .env("BLOBD_PROGRESS_INTERVAL", "0")
            .stdin(Stdio::null());
        command
    }

    pub(super) fn run(&self, arguments: &[&str]) -> Result<(), DemoError> {
        self.check_interrupted()?;
        let line = format!("blobd {}", arguments.join(" "));
        screen::command(&line)?;
        // Progress bars and errors appear directly on the terminal.
        let output = self.command(arguments).stderr(Stdio::inherit()).output();
        let output = output.map_err(DemoError::io(line.as_str()))?;
        screen::output(&String::from_utf8_lossy(&output.stdout))?;
        if output.status.success() {
            return Ok(());
        }
        self.check_interrupted()?;
        Err(DemoError::Command { command: line, status: output.status })
    }

    pub(super) fn client(&self) -> Result<Client, DemoError> {
        Ok(Client::connect(self.socket())?)
    }

    pub(super) fn check_interrupted(&self) -> Result<(), DemoError> {
        match self.interrupted.load(Ordering::Relaxed) {
            true => Err(DemoError::Interrupted),
            false => Ok(()),
        }
    }
}

pub(super) fn digest_of_file(path: &Path) -> Result<Digest, DemoError> {
    std::fs::read(path).map(|bytes| Digest::of(&bytes)).map_err(DemoError::at(path))
}

/// The terminal also sends Ctrl-C to the demo's commands, which are in the same process group.
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
