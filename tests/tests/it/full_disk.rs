//! A disk without a free byte, on each supported file system: models can be listed, served and removed, by
//! commands and by a daemon that is started on it.

use std::fs::{self, File};
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{Blobd, Run, run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::ModelFile;
use blobd_tests::temp_dirs::disk_directory;
use tempfile::TempDir;

/// Name, command that creates the file system, and the size of its image. XFS has a minimum size.
type Kind = (&'static str, &'static [&'static str], u64);
const KINDS: [Kind; 3] = [
    ("ext4", &["mkfs.ext4", "-q", "-m", "0"], 48 << 20),
    ("xfs", &["mkfs.xfs", "-q"], 320 << 20),
    ("btrfs", &["mkfs.btrfs", "-q"], 160 << 20),
];
/// Fills the disk in large steps, then block by block, then with files that fit into their inodes.
const FILL: &str = "cd \"$0\"; dd if=/dev/zero of=fill bs=1M; dd if=/dev/zero of=more bs=4k; sync
    for i in $(seq 500); do echo x > small$i || break; done; dd if=/dev/zero of=last bs=512; sync; true";

/// An image of a file system that is the root of a store. Each program mounts it in its own namespace, so
/// that a failed test leaves no mount.
struct Image {
    folder: TempDir,
}

impl Image {
    /// Prints the reason and returns `None` if it is not available here.
    fn make((kind, mkfs, size): Kind) -> Option<Self> {
        let image = Self { folder: disk_directory() };
        let path = image.folder.path().join("image");
        File::create(&path).unwrap().set_len(size).unwrap();
        fs::create_dir(image.folder.path().join("store")).unwrap();
        let made = Command::new(mkfs[0]).args(&mkfs[1..]).arg(&path).output();
        let is_made = made.is_ok_and(|made| made.status.success());
        if !is_made || image.shell("rm -rf \"$0/lost+found\"").code != 0 {
            skipped(format_args!("{kind} on a loop device is not available here"));
            return None;
        }
        Some(image)
    }

    fn wrapper(&self) -> [String; 6] {
        let folder = self.folder.path().to_str().unwrap();
        let script = format!("mount -o loop {folder}/image \"$0\" && exec \"$@\"");
        ["unshare".into(), "--mount".into(), "sh".into(), "-c".into(), script, format!("{folder}/store")]
    }

    fn run(&self, arguments: &[&str]) -> Run {
        let wrapper = self.wrapper();
        let mut command = Command::new(&wrapper[0]);
        command.args(&wrapper[1..]).args(arguments);
        Blobd::at_root(&self.folder.path().join("store")).prepare(&mut command);
        run(&mut command)
    }

    fn shell(&self, script: &str) -> Run {
        let store = self.folder.path().join("store");
        self.run(&["sh", "-c", script, store.to_str().unwrap()])
    }

    fn blobd(&self, line: &str) -> Run {
        let program = blobd_tests::programs::blobd();
        let words = std::iter::once(program.to_str().unwrap()).chain(line.split_whitespace());
        self.run(&words.collect::<Vec<_>>())
    }

    fn import(&self, seed: u64, name: &str) {
        let path = ModelFile::dense_of(seed, 4, 192).write_to(self.folder.path(), &format!("{name}.gguf"));
        self.blobd(&format!("import --name {name} {}", path.display())).succeeds();
    }
}

#[test]
fn commands_list_and_empty_a_full_disk_of_each_kind() {
    for kind in KINDS {
        let Some(image) = Image::make(kind) else { continue };
        image.import(1, "a");
        image.import(2, "b");
        image.shell(FILL).succeeds();
        for line in ["ls", "show a", "gc --dry-run", "df", "verify a"] {
            image.blobd(line).succeeds();
        }
        for line in ["rm a --json", "rm b --json"] {
            let freed = image.blobd(line).succeeds().json()["freed_bytes"].as_u64().unwrap();
            assert!(freed >= 100 << 10, "{}: {line}: {freed}", kind.0);
        }
        image.blobd("gc").succeeds();
    }
}

#[test]
fn daemon_starts_on_a_full_disk_of_each_kind_and_serves_and_removes() {
    for kind in KINDS {
        let Some(image) = Image::make(kind) else { continue };
        image.import(1, "a");
        image.import(2, "b");
        image.shell(FILL).succeeds();
        let wrapper = image.wrapper();
        let daemon = TestDaemon::start_under(&wrapper.each_ref().map(String::as_str), image.folder);
        assert_eq!(daemon.client().models().unwrap().models.len(), 2, "{}", kind.0);
        let exported = daemon.command().line("export b -o -").succeeds().stdout;
        assert!(exported == ModelFile::dense_of(2, 4, 192).bytes(), "{}", kind.0);
        daemon.command().line("rm a").succeeds();
        daemon.command().line("gc").succeeds();
    }
}
