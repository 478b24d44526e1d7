//! The mount: reading a model as a file, compared with an ordinary file with the same bytes.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blobd_tests::model::{Dimensions, ModelFile};

use crate::Setup;
use crate::measure::{Daemon, Outcome, Series, digest_of, gib, mib, run as run_command, timed};
use crate::plain_map;

/// The read size of engines and `cat`.
const READ_BYTES: usize = 1 << 20;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let directory = tempfile::tempdir_in(&setup.disk)?;
    let (file, copy) = (directory.path().join("model.gguf"), directory.path().join("copy.gguf"));
    let dimensions = Dimensions { block_count: setup.blocks, ..Dimensions::LLAMA3_8B };
    let size = ModelFile::llama("bench", dimensions).write_file(&file)?;
    let daemon = Daemon::start(&setup.blobd, &setup.disk)?;
    daemon.import(&file)?;
    run_command(Command::new("cp").arg(&file).arg(&copy))?;
    std::fs::remove_file(&file)?;
    rustix::fs::sync();
    let mount = Mounted::start(setup, &daemon, &directory.path().join("mount"))?;
    let mounted = mount.directory.join("bench/latest.gguf");
    println!("\nmount: a model of {:.2} GiB as a file, against an ordinary file", gib(size));
    if digest_of(&mounted)? != digest_of(&copy)? {
        return Err("the mounted file is not the original".into());
    }
    for (name, floor, start, read) in [
        ("cold read", 0.7, Start::Cold, read_all as fn(&Path) -> Outcome<u64>),
        ("cold mmap", 0.7, Start::Cold, sum_map),
        ("warm read", 0.9, Start::Warm, read_all),
        ("warm mmap, every byte", 0.9, Start::Warm, sum_map),
        ("  in pages of 4 KiB: read", 0.9, Start::WarmInPages, read_all),
        ("  in pages of 4 KiB: mmap", 0.9, Start::WarmInPages, sum_map),
    ] {
        let (mut plain, mut ours) = (Series::default(), Series::default());
        for _ in 0..setup.rounds {
            start.prepare(&copy)?;
            plain.push(timed(|| read(&copy))?.0);
            start.prepare(&mounted)?;
            ours.push(timed(|| read(&mounted))?.0);
        }
        let speed = |series: &Series| gib(size) / series.seconds();
        println!(
            "  {name:<25} file {:5.2} GiB/s, mount {:5.2} GiB/s, ratio {:4.2} (floor {floor})",
            speed(&plain),
            speed(&ours),
            ours.ratio(&plain)
        );
    }
    cached_twice(&daemon, &mounted, size)?;
    println!("  peak RSS of the mount      {:8.1} MiB", mib(mount.peak_rss_bytes()?));
    Ok(())
}

/// The state of the page cache before a file is read.
#[derive(Clone, Copy)]
enum Start {
    /// Empty.
    Cold,
    /// The file as the kernel caches it by default: ordinary files in large folios if the file system
    /// supports them (ext4 since Linux 6.16), FUSE files page by page.
    Warm,
    /// The file page by page, as earlier kernels cache it.
    WarmInPages,
}

impl Start {
    fn prepare(self, path: &Path) -> Outcome<()> {
        match self {
            Self::Cold => drop_caches(),
            Self::Warm => read_all(path).map(drop),
            Self::WarmInPages => cache_in_pages(path),
        }
    }
}

/// Reads page by page without read-ahead, which creates large folios.
fn cache_in_pages(path: &Path) -> Outcome<()> {
    const PAGE_BYTES: usize = 4096;
    let file = File::open(path)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::DontNeed)?;
    rustix::fs::fadvise(&file, 0, None, rustix::fs::Advice::Random)?;
    let (mut offset, mut page) = (0, [0; PAGE_BYTES]);
    loop {
        match file.read_at(&mut page, offset)? {
            0 => return Ok(()),
            count => offset += count as u64,
        }
    }
}

/// Prints how much of the blobs is cached in addition to the file after a cold read.
fn cached_twice(daemon: &Daemon, mounted: &Path, size: u64) -> Outcome<()> {
    drop_caches()?;
    read_all(mounted)?;
    let cached = daemon.cached_blob_bytes()?;
    println!("  blobs cached after a cold read of {:.0} MiB: {:.1} MiB", mib(size), mib(cached));
    Ok(())
}

fn read_all(path: &Path) -> Outcome<u64> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; READ_BYTES];
    let mut sum = 0;
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(sum),
            count => sum += count as u64,
        }
    }
}

/// Reads every byte of a map, as a program that computes with them does.
fn sum_map(path: &Path) -> Outcome<u64> {
    let map = plain_map::map(path)?;
    let words = map.chunks_exact(8).map(|word| word.try_into().map_or(0, u64::from_le_bytes));
    Ok(std::hint::black_box(words.fold(0, u64::wrapping_add)))
}

fn drop_caches() -> Outcome<()> {
    rustix::fs::sync();
    std::fs::write("/proc/sys/vm/drop_caches", "1")
        .map_err(|error| format!("/proc/sys/vm/drop_caches: {error}; a cold read needs root").into())
}

/// `blobd mount`, ended when it is dropped.
struct Mounted {
    child: Child,
    directory: PathBuf,
}

impl Mounted {
    fn start(setup: &Setup, daemon: &Daemon, directory: &Path) -> Outcome<Self> {
        std::fs::create_dir(directory)?;
        let child = Command::new(&setup.blobd)
            .arg("--socket")
            .arg(daemon.socket())
            .arg("mount")
            .arg(directory)
            .stdout(Stdio::null())
            .spawn()?;
        let mounted = Self { child, directory: directory.to_path_buf() };
        let deadline = Instant::now() + Duration::from_secs(10);
        while !directory.join("ollama").is_dir() {
            if Instant::now() > deadline {
                return Err("the mount does not appear".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(mounted)
    }

    fn peak_rss_bytes(&self) -> Outcome<u64> {
        crate::measure::peak_rss_bytes(self.child.id())
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // It unmounts on SIGTERM. If that fails, its directory stays, and the failure is visible.
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
    }
}
