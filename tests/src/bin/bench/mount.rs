//! The mount: reading a model as a file, against an ordinary file with the same bytes.

use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blobd::demo::models::{Dimensions, SyntheticModel};

use crate::Setup;
use crate::measure::{Daemon, Outcome, Series, digest_of, gib, mib, run as run_command, timed};
use crate::plain_map;

/// What engines and `cat` read at a time.
const READ_BYTES: usize = 1 << 20;

pub(crate) fn run(setup: &Setup) -> Outcome<()> {
    let directory = tempfile::tempdir_in(&setup.disk)?;
    let (file, copy) = (directory.path().join("model.gguf"), directory.path().join("copy.gguf"));
    let dimensions = Dimensions { block_count: setup.blocks, ..Dimensions::LLAMA3_8B };
    let size = SyntheticModel::llama("bench", dimensions).write_to(&file)?;
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
    for (name, limit, is_cold, read) in [
        ("cold read", 0.7, true, read_all as fn(&Path) -> Outcome<u64>),
        ("cold mmap", 0.7, true, sum_map),
        ("warm read", 0.9, false, read_all),
        ("warm mmap, every byte", 0.9, false, sum_map),
    ] {
        let (mut plain, mut ours) = (Series::default(), Series::default());
        for _ in 0..setup.rounds {
            for (path, series) in [(&copy, &mut plain), (&mounted, &mut ours)] {
                if is_cold {
                    drop_caches()?;
                } else {
                    read(path)?;
                }
                series.push(timed(|| read(path))?.0);
            }
        }
        let speed = |series: &Series| gib(size) / series.seconds();
        println!(
            "  {name:<22} file {:6.2} GiB/s, mount {:6.2} GiB/s, speed against the file {:5.2}  (floor {limit})",
            speed(&plain),
            speed(&ours),
            ours.ratio(&plain)
        );
    }
    cached_twice(&daemon, &mounted, size)?;
    println!("  peak RSS of the mount      {:8.1} MiB", mib(mount.peak_rss_bytes()?));
    Ok(())
}

/// How much more than the file itself is cached when it has been read.
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

/// Every byte, as a program that computes with them reads them.
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
                return Err("the mount does not come".into());
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
        // It unmounts when it is told to end; if not, its directory stays behind, which is seen.
        let pid = rustix::process::Pid::from_child(&self.child);
        let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        let _ = self.child.wait();
    }
}
