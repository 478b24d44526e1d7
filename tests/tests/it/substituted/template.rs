//! A store with every kind of entry, which is copied for each case.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::{self, Blobd};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::store_dir::{names, snapshot};
use blobd_tests::temp_dirs::tmpfs_directory;
use tempfile::TempDir;

use super::user::User;

const MODEL: &str = "application/vnd.ollama.image.model";

/// Two models that share tensors, one of them pinned; a third in the trash; an unfinished download; and all
/// other files of a store.
#[derive(Debug)]
pub(super) struct Template {
    folder: TempDir,
    registry: FakeRegistry,
}

/// The full name of a model; its registry is unreachable for a repair.
pub(super) fn name_of(model: &str) -> String {
    format!("127.0.0.1:1/library/{model}:latest")
}

impl Template {
    pub(super) fn make(user: User) -> Self {
        let mut daemon = TestDaemon::start();
        let folder = tmpfs_directory();
        fs::set_permissions(folder.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
        for (name, model) in ["a", "b", "c"].into_iter().zip(1..) {
            let path = file(model).write_to(daemon.scratch(), &format!("{name}.gguf"));
            let name = name_of(name);
            let words = ["import".as_ref(), path.as_os_str(), "--name".as_ref(), name.as_ref()];
            daemon.command().run(words).succeeds();
        }
        daemon.command().run(["pin", &name_of("b")]).succeeds();
        daemon.command().run(["rm", &name_of("c"), "--keep", "30d"]).succeeds();
        let template = Self { folder, registry: begin_download(&daemon.command()) };
        daemon.stop();
        copy(daemon.root(), &template.store());
        template.add_rare_entries();
        user.own(&template.store());
        template
    }

    /// The store's directory.
    pub(super) fn store(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    /// A model that can be pulled.
    pub(super) fn pullable(&self) -> String {
        self.registry.name("library/e:latest")
    }

    /// A file that is not in the store, but shares most tensors with stored ones.
    pub(super) fn further(directory: &Path) -> PathBuf {
        file(9).write_to(directory, "n.gguf")
    }

    /// Every entry, relative to the store, but only a few blobs.
    pub(super) fn entries(&self) -> Vec<PathBuf> {
        const BLOBS: usize = 2;
        let store = self.store();
        let all = snapshot(&store).into_keys().filter(|path| *path != store);
        let relative = all.map(|path| path.strip_prefix(&store).unwrap().to_path_buf());
        let mut blobs = 0;
        let is_wanted = |path: &PathBuf| {
            let is_blob = path.starts_with("blobs/") && path.components().count() == 2;
            blobs += usize::from(is_blob);
            !is_blob || blobs <= BLOBS
        };
        relative.filter(is_wanted).collect()
    }

    /// A copy, with the same owners.
    pub(super) fn copy_to(&self, target: &Path) {
        copy(&self.store(), target);
    }

    /// Adds staged files of a killed command, a quarantined blob, and the scrubber's position.
    fn add_rare_entries(&self) {
        let store = self.store();
        let write = |path: &str, content: &[u8]| {
            let path = store.join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, content).unwrap();
        };
        write("staging/4711-0/0", b"half a tensor");
        write(&format!("quarantine/sha256-{}.1700000000", "ab".repeat(32)), b"damaged");
        if !store.join("scrub.json").exists() {
            write("scrub.json", b"{}");
        }
        // Emptied, because its content does not matter and copying it hundreds of times takes long.
        write("reserve", b"");
        write("index/CLEAN.new", b"{}");
        assert!(!names(&store.join("partial")).is_empty() && !names(&store.join("trash")).is_empty());
    }
}

/// A file of few small tensors, of which all but one are the same in all files.
fn file(number: u64) -> ModelFile {
    let mut file = ModelFile::empty();
    file.add_noise(1, "token_embd.weight", GgmlType::Q8_0, &[32, 64]);
    file.add_noise(1, "blk.0.attn_norm.weight", GgmlType::F32, &[32]);
    file.add_noise(number, "output.weight", GgmlType::Q8_0, &[32, 64]);
    file
}

/// Creates an unfinished download. The registry has another model that can be pulled.
fn begin_download(blobd: &Blobd) -> FakeRegistry {
    let registry = FakeRegistry::start().unwrap();
    let model = ModelFile::dense_of(5, 2, 256).bytes();
    registry.add_model("library/d:latest", b"{}", &[(MODEL, &model)]).unwrap();
    registry.add_fault("/cdn/", 1, Fault::CutAfter(model.len() / 2));
    registry.add_fault("/cdn/", usize::MAX, Fault::Status(404));
    let run = blobd.run(["pull", &registry.name("library/d:latest")]);
    assert_ne!(run.code, 0, "the download is cut off: {}", run.stderr);
    registry.clear_faults();
    registry.add_model("library/e:latest", b"{}", &[(MODEL, &file(5).bytes())]).unwrap();
    registry
}

fn copy(from: &Path, to: &Path) {
    let run = command::run(Command::new("cp").arg("-a").arg(from).arg(to));
    assert_eq!(run.code, 0, "{}", run.stderr);
}
