//! A daemon whose store stands on a read-only one.

use std::fs::{self, File, Permissions};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_tests::command::{Blobd, Run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256_of;
use blobd_tests::store_dir::snapshot;
use blobd_tests::temp_dirs::disk_directory;
use serde_json::Value as Json;
use tempfile::TempDir;

/// The daemon, its store in `upper/`, and the lower store in `lower/`.
pub(super) struct Site {
    pub(super) daemon: TestDaemon,
    kind: Kind,
    folder: TempDir,
}

/// What the lower store is.
enum Kind {
    /// An ext4 image on a loop device, mounted read-only in the daemon's own mount namespace.
    Mount,
    /// A directory without write permissions, where mounting is not possible.
    Directory,
}

impl Site {
    /// Has `fill` make the lower store in an empty directory, and starts the daemon above it.
    pub(super) fn start(fill: impl FnOnce(&Path)) -> Self {
        let folder = disk_directory();
        let (lower, config) = (folder.path().join("lower"), folder.path().join("config.toml"));
        fill(&lower);
        let kind = match make_image(folder.path()) {
            true => Kind::Mount,
            false => Kind::Directory,
        };
        let settings =
            format!("lower = [{:?}]\n[scrub]\nrate_bytes_per_second = 0\n", lower.to_str().unwrap());
        fs::write(&config, settings).unwrap();
        let mount = match kind {
            Kind::Mount => format!("{} && ", mount_command(folder.path())),
            Kind::Directory => {
                set_modes(&lower, 0o555);
                String::new()
            }
        };
        let script = format!("{mount}exec setpriv --pdeathsig KILL \"$@\"");
        let namespace: &[&str] = if matches!(kind, Kind::Mount) { &["unshare", "--mount"] } else { &[] };
        let wrapper = [namespace, &["sh", "-c", &script, "sh"]].concat();
        let daemon = TestDaemon::start_at_under(&wrapper, &folder.path().join("upper"), Some(&config));
        Self { daemon, kind, folder }
    }

    /// A lower store with one model, `site`.
    pub(super) fn with(model: &ModelFile) -> Self {
        Self::start(|lower| import_into(lower, model, "site"))
    }

    /// The directory of the lower store.
    pub(super) fn lower(&self) -> PathBuf {
        self.folder.path().join("lower")
    }

    /// The directory of the store itself.
    pub(super) fn upper(&self) -> PathBuf {
        self.folder.path().join("upper")
    }

    pub(super) fn line(&self, line: &str) -> Run {
        self.daemon.command().line(line)
    }

    pub(super) fn json(&self, line: &str) -> Json {
        self.line(line).succeeds().json()
    }

    pub(super) fn export(&self, name: &str) -> Vec<u8> {
        self.line(&format!("export {name} -o -")).succeeds().stdout
    }

    pub(super) fn import(&self, model: &ModelFile, name: &str) -> Run {
        let path = model.write_to(self.daemon.scratch(), "model.gguf");
        self.daemon.command().run(["import", path.to_str().unwrap(), "--name", name, "--json"])
    }

    /// Everything in the lower store, for a comparison.
    pub(super) fn content(&self) -> String {
        match self.kind {
            Kind::Mount => sha256_of(&mut File::open(self.folder.path().join("image")).unwrap()),
            Kind::Directory => format!("{:?}", snapshot(&self.lower())),
        }
    }

    /// Unmounts the lower store: an empty directory takes its place.
    pub(super) fn unmount(&self) {
        match self.kind {
            Kind::Mount => self.in_namespace(&format!("umount --lazy {}", self.lower().display())),
            Kind::Directory => {
                fs::rename(self.lower(), self.folder.path().join("away")).unwrap();
                fs::create_dir(self.lower()).unwrap();
            }
        }
    }

    /// Mounts it again.
    pub(super) fn mount(&self) {
        match self.kind {
            Kind::Mount => self.in_namespace(&mount_command(self.folder.path())),
            Kind::Directory => {
                fs::remove_dir(self.lower()).unwrap();
                fs::rename(self.folder.path().join("away"), self.lower()).unwrap();
            }
        }
    }

    fn in_namespace(&self, script: &str) {
        let mut command = Command::new("nsenter");
        command.arg("--mount").arg(format!("--target={}", self.daemon.pid())).args(["sh", "-c", script]);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{script}: {output:?}");
    }
}

impl Drop for Site {
    fn drop(&mut self) {
        // Else its files could not be deleted.
        if matches!(self.kind, Kind::Directory) {
            set_modes(self.folder.path(), 0o755);
        }
    }
}

/// Imports a model into a store without a daemon, which makes the store.
pub(super) fn import_into(root: &Path, model: &ModelFile, name: &str) {
    let folder = tempfile::tempdir().unwrap();
    let path = model.write_to(folder.path(), "model.gguf");
    Blobd::at_root(root).run(["import", path.to_str().unwrap(), "--name", name]).succeeds();
}

fn mount_command(folder: &Path) -> String {
    let folder = folder.display();
    format!("mount -o loop,ro {folder}/image {folder}/lower")
}

/// Makes an image of the file system in `lower/`, and leaves an empty directory there. False if that is not possible
/// here.
fn make_image(folder: &Path) -> bool {
    let (lower, image) = (folder.join("lower"), folder.join("image"));
    File::create(&image).unwrap().set_len(32 << 20).unwrap();
    let made = Command::new("mkfs.ext4").args(["-q", "-d"]).args([&lower, &image]).output();
    let mounts = || {
        let script = format!("{} && test -e {}/store.json", mount_command(folder), lower.display());
        Command::new("unshare").args(["--mount", "sh", "-c", &script]).output()
    };
    let works =
        made.is_ok_and(|made| made.status.success()) && mounts().is_ok_and(|run| run.status.success());
    match works {
        true => {
            fs::remove_dir_all(&lower).unwrap();
            fs::create_dir(&lower).unwrap();
        }
        false => println!("a directory in place of a mount: ext4 on a loop device is not available here"),
    }
    works
}

/// Sets the mode of every directory below and including `path`, those below first.
fn set_modes(path: &Path, mode: u32) {
    // Readable first, so that it can be listed.
    let _ = fs::set_permissions(path, Permissions::from_mode(0o755));
    for entry in fs::read_dir(path).into_iter().flatten().flatten() {
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            set_modes(&entry.path(), mode);
        }
    }
    let _ = fs::set_permissions(path, Permissions::from_mode(mode));
}
