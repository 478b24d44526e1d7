//! A directory with a store, files and a registry, in which commands are run.

use std::fs;
use std::path::{Path, PathBuf};

use blobd_tests::command::{self, Blobd, Run};
use blobd_tests::model::ModelFile;
use blobd_tests::registry::FakeRegistry;
use blobd_tests::temp_dirs::tmpfs_directory;
use tempfile::TempDir;

/// The media type of weights.
const WEIGHTS: &str = "application/vnd.ollama.image.model";

pub(super) struct Fixture {
    folder: TempDir,
    pub(super) blobd: Blobd,
}

impl Fixture {
    pub(super) fn new() -> Self {
        let folder = tmpfs_directory();
        let blobd = Blobd::at_root(&folder.path().join("store"));
        Self { folder, blobd }
    }

    pub(super) fn root(&self) -> PathBuf {
        self.path("store")
    }

    pub(super) fn path(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    /// Runs a command in the directory.
    pub(super) fn run(&self, words: &[&str]) -> Run {
        self.run_by(&self.blobd, words)
    }

    pub(super) fn run_by(&self, blobd: &Blobd, words: &[&str]) -> Run {
        let mut command = blobd.command();
        command::run(command.args(words).current_dir(self.folder.path()))
    }

    /// The same with a variable of the environment.
    pub(super) fn run_with(&self, variable: &str, value: &str, words: &[&str]) -> Run {
        let mut command = self.blobd.command();
        command::run(command.env(variable, value).args(words).current_dir(self.folder.path()))
    }

    pub(super) fn write(&self, name: &str, content: impl AsRef<[u8]>) -> PathBuf {
        let path = self.path(name);
        fs::write(&path, content).unwrap();
        path
    }

    /// Imports models with these names.
    pub(super) fn with_models(&self, names: &[&str]) -> &Self {
        for (seed, name) in (1..).zip(names) {
            let path = ModelFile::dense(seed).write_to(self.folder.path(), "imported.gguf");
            self.blobd.run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
        }
        self
    }

    /// Runs a command with this configuration.
    pub(super) fn configured(&self, config: &str, words: &[&str]) -> Run {
        let path = self.write("config.toml", config);
        self.run_by(&self.blobd.clone().configured_by(&path), words)
    }
}

/// A registry with one model, and the model's name there.
pub(super) fn registry() -> (FakeRegistry, String) {
    let registry = FakeRegistry::start().unwrap();
    registry.add_model("library/m:latest", b"{}", &[(WEIGHTS, &ModelFile::dense(1).bytes())]).unwrap();
    let name = registry.name("library/m:latest");
    (registry, name)
}

/// All files below a directory.
pub(super) fn files_below(directory: &Path) -> Vec<PathBuf> {
    let mut found = Vec::new();
    let mut directories = vec![directory.to_path_buf()];
    while let Some(directory) = directories.pop() {
        for entry in fs::read_dir(directory).unwrap().flatten() {
            let path = entry.path();
            if path.is_dir() { directories.push(path) } else { found.push(path) }
        }
    }
    found
}
