//! Medians, ratios and processes.

use std::error::Error;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blobd_client::client::Client;
use blobd_store_format::digest::{Digest, Hasher};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// Times of one thing, one per round.
#[derive(Clone, Debug, Default)]
pub(crate) struct Series(Vec<Duration>);

impl Series {
    pub(crate) fn push(&mut self, time: Duration) {
        self.0.push(time);
    }

    /// The latest.
    pub(crate) fn last(&self) -> Duration {
        self.0.last().copied().unwrap_or_default()
    }

    /// The median.
    pub(crate) fn seconds(&self) -> f64 {
        self.quantile(0.5)
    }

    pub(crate) fn quantile(&self, part: f64) -> f64 {
        quantile(self.0.iter().map(Duration::as_secs_f64), part)
    }

    /// The median over rounds of `numerator`'s time of a round divided by this series' of it.
    pub(crate) fn ratio(&self, numerator: &Self) -> f64 {
        let rounds = numerator.0.iter().zip(&self.0);
        quantile(rounds.map(|(above, below)| above.as_secs_f64() / below.as_secs_f64()), 0.5)
    }
}

#[expect(clippy::cast_possible_truncation, clippy::cast_sign_loss, reason = "an index below the length")]
#[expect(clippy::cast_precision_loss, reason = "there are a few hundred values")]
fn quantile(values: impl Iterator<Item = f64>, part: f64) -> f64 {
    let mut values: Vec<f64> = values.collect();
    values.sort_by(f64::total_cmp);
    let index = (values.len() as f64 * part) as usize;
    values.get(index.min(values.len().saturating_sub(1))).copied().unwrap_or(f64::NAN)
}

pub(crate) fn timed<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<(Duration, T)> {
    let start = Instant::now();
    let done = work()?;
    Ok((start.elapsed(), done))
}

/// Runs a command to its end; its output is dropped unless it fails.
pub(crate) fn run(command: &mut Command) -> Outcome<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into())
}

/// Processor time of this process and of every child that it has waited for, threads included.
pub(crate) fn processor_time() -> Outcome<Duration> {
    ticks_of("self", 4)
}

/// The sum of the first so many of a process's times: in user code and in the kernel, then the
/// same of its children.
fn ticks_of(process: &str, times: usize) -> Outcome<Duration> {
    const TICKS_PER_SECOND: u64 = 100;
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name is in parentheses and may hold anything; 11 fields come between it and the times.
    let (_, fields) = stat.rsplit_once(") ").ok_or("no name")?;
    let times = fields.split(' ').skip(11).take(times).map(str::parse::<u64>);
    let ticks = times.sum::<Result<u64, _>>()?;
    Ok(Duration::from_millis(ticks * (1000 / TICKS_PER_SECOND)))
}

/// One pass over a file, on one core.
pub(crate) fn digest_of(path: &Path) -> Outcome<Digest> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; 1 << 20];
    let mut hasher = Hasher::new();
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok(hasher.finish());
        }
        hasher.update(buffer.get(..read).unwrap_or_default());
    }
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
pub(crate) fn gib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 30)
}

#[expect(clippy::cast_precision_loss, reason = "for people")]
pub(crate) fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The most memory a process has had at once, in bytes.
pub(crate) fn peak_rss_bytes(pid: u32) -> Outcome<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// A daemon with a store of its own, killed when it is dropped.
pub(crate) struct Daemon {
    child: Child,
    socket: PathBuf,
    directory: tempfile::TempDir,
}

impl Daemon {
    pub(crate) fn start(blobd: &Path, on: &Path) -> Outcome<Self> {
        let directory = tempfile::tempdir_in(on)?;
        let socket = directory.path().join("sock");
        let child = Command::new(blobd)
            .args(["serve", "--root"])
            .arg(directory.path().join("store"))
            .arg("--socket")
            .arg(&socket)
            .stderr(Stdio::null())
            .spawn()?;
        let daemon = Self { child, socket, directory };
        let deadline = Instant::now() + Duration::from_secs(10);
        while daemon.client().is_err() {
            if Instant::now() > deadline {
                return Err("the daemon does not answer".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(daemon)
    }

    pub(crate) fn client(&self) -> Outcome<Client> {
        Ok(Client::connect(&self.socket)?)
    }

    pub(crate) fn import(&self, file: &Path) -> Outcome<blobd_client::protocol::response::Imported> {
        let params = blobd_client::protocol::request::ImportParams {
            file_name: "bench.gguf".to_owned(),
            name: Some("bench".parse()?),
        };
        Ok(self.client()?.import(&params, File::open(file)?, |_completed, _total| ())?)
    }

    /// Pulls a model as a user does, in a process of its own.
    pub(crate) fn pull(&self, blobd: &Path, name: &str) -> Outcome<()> {
        run(Command::new(blobd).arg("--socket").arg(&self.socket).args(["pull", name]))
    }

    /// Ends it and keeps its store.
    pub(crate) fn kill(&mut self) -> Outcome<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Processor time of all its threads.
    pub(crate) fn processor_time(&self) -> Outcome<Duration> {
        ticks_of(&self.child.id().to_string(), 2)
    }

    /// The most memory it has had at once, in bytes.
    pub(crate) fn peak_rss_bytes(&self) -> Outcome<u64> {
        peak_rss_bytes(self.child.id())
    }

    /// Where it listens.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// How much of its blobs is in the page cache.
    pub(crate) fn cached_blob_bytes(&self) -> Outcome<u64> {
        let blobs = self.directory.path().join("store/blobs");
        let output = Command::new("fincore")
            .args(["--bytes", "--noheadings", "--output", "RES"])
            .args(std::fs::read_dir(blobs)?.map(|entry| Ok(entry?.path())).collect::<Outcome<Vec<_>>>()?)
            .output()?;
        String::from_utf8(output.stdout)?.split_whitespace().map(|bytes| Ok(bytes.parse::<u64>()?)).sum()
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        // It may have died already; the bench has reported that by then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
