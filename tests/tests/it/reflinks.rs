//! Imports on file systems that can share blocks between files: a file that is stored whole takes no space of its own.

use std::fs::{self, File};
use std::io::{BufRead as _, BufReader};
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;

use blobd_fixtures::skipped::skipped;
use blobd_tests::command::{Blobd, Run, run};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::folders::{ModelFolder, safetensors};
use blobd_tests::hanging::{Hang, HangingFiles};
use blobd_tests::model::noise;
use blobd_tests::programs;
use blobd_tests::store_dir::staged;
use blobd_tests::temp_dirs::{disk_directory, tmpfs_directory};
use blobd_tests::wait::eventually;
use rustix::fs::{statvfs, syncfs};
use tempfile::TempDir;

/// The name of a file system, and the command that makes it.
type Kind = (&'static str, &'static [&'static str]);
const XFS: Kind = ("xfs", &["mkfs.xfs", "-q", "-m", "reflink=1"]);
const BTRFS: Kind = ("btrfs", &["mkfs.btrfs", "-q"]);

const IMAGE_BYTES: u64 = 700 << 20;
const WEIGHTS: &str = "weights.bin";
const WEIGHTS_BYTES: usize = 100_000_000;
/// What everything else takes: records, the store's reserve, metadata of the file system.
const OTHER_BYTES: u64 = 16 << 20;

/// A file system in an image, mounted in a namespace of its own, which ends with this value or this process.
struct Disk {
    folder: TempDir,
    holder: Child,
}

impl Disk {
    /// `None`, with the reason printed, if such a file system cannot be mounted here.
    fn mount((kind, mkfs): Kind) -> Option<Self> {
        let folder = disk_directory();
        let image = folder.path().join("image");
        File::create(&image).unwrap().set_len(IMAGE_BYTES).unwrap();
        fs::create_dir(folder.path().join("disk")).unwrap();
        let made = Command::new(mkfs[0]).args(&mkfs[1..]).arg(&image).output();
        // Ends when this process closes its standard input.
        let hold = "mount -o loop \"$0/image\" \"$0/disk\" && echo mounted && exec cat";
        let mut holder = Command::new("unshare")
            .args(["--mount", "sh", "-c", hold])
            .arg(folder.path())
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .ok()?;
        let mut line = String::new();
        let output = holder.stdout.take().unwrap();
        let is_made = made.is_ok_and(|made| made.status.success());
        let is_mounted = is_made && BufReader::new(output).read_line(&mut line).is_ok_and(|read| read > 0);
        let disk = Self { folder, holder };
        if !is_mounted {
            skipped(format_args!("{kind} on a loop device is not available here"));
            return None;
        }
        let entered = Command::new("nsenter").arg(disk.namespace()).args(["--", "true"]).status();
        if !entered.is_ok_and(|status| status.success()) {
            skipped("nsenter is missing");
            return None;
        }
        Some(disk)
    }

    fn namespace(&self) -> String {
        format!("--mount=/proc/{}/ns/mnt", self.holder.id())
    }

    /// Where programs in the namespace find the disk.
    fn path(&self) -> PathBuf {
        self.folder.path().join("disk")
    }

    /// Where this process finds it.
    fn seen(&self) -> PathBuf {
        let path = self.path();
        Path::new(&format!("/proc/{}/root", self.holder.id())).join(path.strip_prefix("/").unwrap())
    }

    /// Commands that open the store on the disk themselves.
    fn own_store(&self) -> Blobd {
        Blobd::at_root(&self.path().join("store"))
    }

    fn daemon(&self) -> TestDaemon {
        let namespace = self.namespace();
        TestDaemon::start_at_under(&["nsenter", &namespace, "--"], &self.path().join("store"), None)
    }

    fn command(&self, place: &Blobd, words: &[&str]) -> Command {
        let mut command = Command::new("nsenter");
        command.arg(self.namespace()).arg("--").arg(programs::blobd()).args(words);
        place.prepare(&mut command);
        command
    }

    fn run(&self, place: &Blobd, words: &[&str]) -> Run {
        run(&mut self.command(place, words))
    }

    /// Imports a folder of the disk under its name.
    fn import(&self, place: &Blobd, name: &str, options: &[&str]) {
        let folder = self.path().join(name);
        let words = ["import", "--name", name, "--include", "*", folder.to_str().unwrap()];
        self.run(place, &[&words, options].concat()).succeeds();
    }

    /// Asserts that the model's weights are these, and that nothing in the store is damaged.
    fn check(&self, place: &Blobd, name: &str, weights: &[u8]) {
        let out = format!("{name}-out/");
        self.run(place, &["export", name, "-o", self.path().join(&out).to_str().unwrap()]).succeeds();
        assert!(fs::read(self.seen().join(&out).join(WEIGHTS)).unwrap() == weights, "{name}: other bytes");
        fs::remove_dir_all(self.seen().join(out)).unwrap();
        self.run(place, &["verify"]).succeeds();
    }

    fn free_bytes(&self) -> u64 {
        syncfs(File::open(self.seen()).unwrap()).unwrap();
        self.free_bytes_now()
    }

    fn free_bytes_now(&self) -> u64 {
        let stat = statvfs(self.seen()).unwrap();
        stat.f_bfree * stat.f_frsize
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        drop(self.holder.stdin.take());
        let _ = self.holder.wait();
    }
}

/// Bytes that no file system compresses or finds twice.
fn weights(seed: u64, length: usize) -> Vec<u8> {
    let mut bytes = noise(seed, "weights", 1 << 20).repeat(length.div_ceil(1 << 20));
    bytes.truncate(length);
    for (number, block) in bytes.chunks_exact_mut(4096).enumerate() {
        block[..8].copy_from_slice(&number.to_le_bytes());
    }
    bytes
}

/// Writes a model with a file that is stored whole.
fn write_model(folder: &Path, weights: &[u8]) {
    let mut model = ModelFolder::default();
    model.add("model.safetensors", safetensors(&[(1, "a")]));
    model.add("config.json", "{}");
    model.write_to(folder);
    fs::write(folder.join(WEIGHTS), weights).unwrap();
}

#[test]
fn file_stored_whole_shares_its_blocks_and_survives_changes_of_its_source() {
    for kind in [XFS, BTRFS] {
        let Some(disk) = Disk::mount(kind) else { continue };
        let daemon = disk.daemon();
        for (seed, name) in [(1, "served"), (2, "embedded")] {
            let (folder, weights) = (disk.seen().join(name), weights(seed, WEIGHTS_BYTES));
            write_model(&folder, &weights);
            let before = disk.free_bytes();
            let place = match seed {
                1 => daemon.command(),
                _ => Blobd::at_root(&disk.path().join("store-2")),
            };
            disk.import(&place, name, &[]);
            let taken = before.saturating_sub(disk.free_bytes());
            assert!(taken < OTHER_BYTES, "{}: {name}: {taken} bytes", kind.0);
            let source = File::options().write(true).open(folder.join(WEIGHTS)).unwrap();
            source.write_all_at(&vec![0; WEIGHTS_BYTES], 0).unwrap();
            disk.check(&place, name, &weights);
            fs::remove_dir_all(&folder).unwrap();
            disk.check(&place, name, &weights);
        }
    }
}

#[test]
fn file_whose_blocks_cannot_be_shared_is_copied() {
    const BYTES: usize = 20 << 20;
    for kind in [XFS, BTRFS] {
        let Some(disk) = Disk::mount(kind) else { continue };
        let place = disk.own_store();
        let elsewhere = weights(1, BYTES);
        let folder = disk.folder.path().join("elsewhere");
        write_model(&folder, &elsewhere);
        let before = disk.free_bytes();
        let words = ["import", "--name", "elsewhere", "--include", "*", folder.to_str().unwrap()];
        disk.run(&place, &words).succeeds();
        assert!(disk.free_bytes() + BYTES as u64 <= before, "{}: its blocks are shared", kind.0);
        disk.check(&place, "elsewhere", &elsewhere);

        let (folder, refused) = (disk.seen().join("refused"), weights(2, BYTES));
        write_model(&folder, &[]);
        // btrfs shares no blocks between files with and without checksums.
        let changed = Command::new("chattr").arg("+C").arg(folder.join(WEIGHTS)).output();
        fs::write(folder.join(WEIGHTS), &refused).unwrap();
        let before = disk.free_bytes();
        disk.import(&place, "refused", &[]);
        if changed.is_ok_and(|changed| changed.status.success()) && kind == BTRFS {
            assert!(disk.free_bytes() + BYTES as u64 <= before, "its blocks are shared");
        }
        disk.check(&place, "refused", &refused);
    }
}

#[test]
fn file_with_holes_keeps_them() {
    for kind in [XFS, BTRFS] {
        let Some(disk) = Disk::mount(kind) else { continue };
        let (place, folder) = (disk.own_store(), disk.seen().join("holes"));
        let mut bytes = weights(1, 1 << 20);
        write_model(&folder, &bytes);
        bytes.resize(WEIGHTS_BYTES, 0);
        File::options()
            .write(true)
            .open(folder.join(WEIGHTS))
            .unwrap()
            .set_len(WEIGHTS_BYTES as u64)
            .unwrap();
        let before = disk.free_bytes();
        disk.import(&place, "holes", &[]);
        let taken = before.saturating_sub(disk.free_bytes());
        assert!(taken < OTHER_BYTES, "{}: {taken} bytes", kind.0);
        disk.check(&place, "holes", &bytes);
    }
}

/// On XFS, a transaction reserves the space for an instant.
#[test]
fn moved_file_needs_no_space_for_a_copy_at_any_time() {
    let Some(disk) = Disk::mount(BTRFS) else { return };
    let (place, folder) = (disk.own_store(), disk.seen().join("moved"));
    let weights = weights(1, WEIGHTS_BYTES);
    write_model(&folder, &weights);
    let (before, is_over) = (disk.free_bytes(), AtomicBool::new(false));
    let least = thread::scope(|scope| {
        let sample = || {
            let mut least = before;
            while !is_over.load(Ordering::Relaxed) {
                least = least.min(disk.free_bytes_now());
                thread::yield_now();
            }
            least
        };
        let sampler = scope.spawn(sample);
        disk.import(&place, "moved", &["--move"]);
        is_over.store(true, Ordering::Relaxed);
        sampler.join().unwrap()
    });
    assert!(before - least < OTHER_BYTES, "{} bytes", before - least);
    assert!(!folder.join(WEIGHTS).exists());
    disk.check(&place, "moved", &weights);
}

/// A write whose bytes come from a page that hangs keeps its file locked, and so does whoever wants to share the file's blocks.
#[test]
fn file_that_is_locked_for_ever_hangs_only_its_own_import() {
    const WRITE: &str = "import mmap, os, sys
file = open(sys.argv[1], 'rb')
pages = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
os.pwrite(os.open(sys.argv[2], os.O_WRONLY), memoryview(pages)[512 << 10:], 0)";
    // XFS locks a file while it is read, too, so its import hangs earlier.
    let Some(disk) = Disk::mount(BTRFS) else { return };
    let hanging = tmpfs_directory();
    let Some(files) = HangingFiles::mount(hanging.path(), weights(3, 1 << 20)) else { return };
    if fs::read("/proc/self/stack").is_err() {
        skipped("this kernel does not show what a process waits for");
        return;
    }
    let daemon = disk.daemon();
    let weights = weights(1, 2 << 20);
    ["locked", "free"].iter().for_each(|name| write_model(&disk.seen().join(name), &weights));
    let mut writer = Command::new("python3");
    writer.args(["-c", WRITE]).arg(files.path(Hang::Read)).arg(disk.seen().join("locked").join(WEIGHTS));
    let Ok(mut writer) = writer.spawn() else {
        skipped("python3 is missing");
        return;
    };
    eventually("the writer hangs", || files.waiting() > 0 || writer.try_wait().unwrap().is_some());
    let place = daemon.command();
    let folder = disk.path().join("locked");
    let words = ["import", "--name", "locked", "--include", "*", folder.to_str().unwrap()];
    let mut import = disk.command(&place, &words).spawn().unwrap();
    let reader = |pid: &str| {
        let read = |name: &str| fs::read_to_string(format!("/proc/{pid}/{name}")).unwrap_or_default();
        read("cmdline").contains("client-file") && read("stack").contains("remap_file_range")
    };
    let is_waiting =
        || fs::read_dir("/proc").unwrap().any(|entry| reader(&entry.unwrap().file_name().to_string_lossy()));
    eventually("the blocks are requested", is_waiting);
    import.kill().unwrap();
    import.wait().unwrap();
    eventually("nothing is staged", || staged(&disk.seen().join("store")).is_empty());
    assert!(is_waiting(), "the process still waits");
    disk.import(&place, "free", &[]);
    disk.check(&place, "free", &weights);
    files.unblock();
    writer.wait().unwrap();
    eventually("the process ends", || !is_waiting());
}
