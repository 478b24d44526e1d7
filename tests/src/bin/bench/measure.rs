//! Medians, ratios and processes.

use std::error::Error;
use std::fs::File;
use std::io::Read as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use blobd_client::client::Client;
use blobd_sha256::{Sha256, update_both};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::gguf::{HeaderParser, Progress};

pub(crate) type Outcome<T> = Result<T, Box<dyn Error>>;

/// Times of one measurement, one per round.
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

    /// The median over all rounds of `numerator`'s time divided by this series' time in the same round.
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

/// The costs of one operation in each round: wall time, and processor time in user code and in the kernel.
#[derive(Clone, Debug, Default)]
pub(crate) struct Costs {
    pub(crate) wall: Series,
    user: Series,
    system: Series,
    pub(crate) processor: Series,
}

impl Costs {
    /// Measures `work`, which waits for its child processes. Processor time of this process counts, too.
    pub(crate) fn measure(&mut self, work: impl FnOnce() -> Outcome<()>) -> Outcome<()> {
        let before = processor_times("self")?;
        self.wall.push(timed(work)?.0);
        let after = processor_times("self")?;
        let spent = |place: usize| -> Duration {
            let of = |times: &[Duration; 4]| times.iter().skip(place).step_by(2).sum::<Duration>();
            of(&after).saturating_sub(of(&before))
        };
        self.user.push(spent(0));
        self.system.push(spent(1));
        self.processor.push(spent(0) + spent(1));
        Ok(())
    }

    /// Prints the medians: `1.59 s    0.73 GiB/s  (user 1.02 s, system 0.60 s)`.
    pub(crate) fn print(&self, what: &str, size: u64) {
        let (wall, user, system) = (self.wall.seconds(), self.user.seconds(), self.system.seconds());
        let speed = gib(size) / wall;
        println!("  {what:<25} {wall:8.2} s  {speed:6.2} GiB/s  (user {user:.2} s, system {system:.2} s)");
    }
}

pub(crate) fn timed<T>(work: impl FnOnce() -> Outcome<T>) -> Outcome<(Duration, T)> {
    let start = Instant::now();
    let done = work()?;
    Ok((start.elapsed(), done))
}

/// Runs a command; its output is only used in the error.
pub(crate) fn run(command: &mut Command) -> Outcome<()> {
    let output = command.output()?;
    if output.status.success() {
        return Ok(());
    }
    Err(format!("{command:?}: {}: {}", output.status, String::from_utf8_lossy(&output.stderr)).into())
}

/// Processor time of all children that this process has waited for.
pub(crate) fn processor_time_of_children() -> Outcome<Duration> {
    Ok(processor_times("self")?.iter().skip(2).sum())
}

/// A process's times in user code and in the kernel, then the same for the children that it has waited for.
fn processor_times(process: &str) -> Outcome<[Duration; 4]> {
    const TICKS_PER_SECOND: u64 = 100;
    let stat = std::fs::read_to_string(format!("/proc/{process}/stat"))?;
    // The name is in parentheses and may contain any character; 11 fields stand between it and the times.
    let (_, fields) = stat.rsplit_once(") ").ok_or("no name")?;
    let mut times = [Duration::ZERO; 4];
    for (time, ticks) in times.iter_mut().zip(fields.split(' ').skip(11)) {
        *time = Duration::from_millis(ticks.parse::<u64>()? * (1000 / TICKS_PER_SECOND));
    }
    Ok(times)
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

/// The digest of a file and of everything after its first `header_bytes`, in one pass on one core: the
/// hashing that storing a split file needs.
pub(crate) fn digests_of_file_and_part(path: &Path, header_bytes: u64) -> Outcome<[[u8; 32]; 2]> {
    let mut file = File::open(path)?;
    let mut buffer = vec![0; usize::try_from(header_bytes)?];
    let (mut whole, mut part) = (Sha256::new(), Sha256::new());
    file.read_exact(&mut buffer)?;
    whole.update(&buffer);
    buffer.resize(1 << 20, 0);
    loop {
        let read = file.read(&mut buffer)?;
        if read == 0 {
            return Ok([whole.finish(), part.finish()]);
        }
        let bytes = buffer.get(..read).unwrap_or_default();
        update_both(&mut whole, bytes, &mut part, bytes);
    }
}

/// The length of a GGUF file's header with padding.
pub(crate) fn header_bytes(path: &Path) -> Outcome<u64> {
    let (mut file, mut parser, mut step) = (File::open(path)?, HeaderParser::new(), vec![0; 1 << 16]);
    loop {
        let read = file.read(&mut step)?;
        if parser.push(step.get(..read).unwrap_or_default())? == Progress::Done || read == 0 {
            return Ok(parser.finish()?.data_offset());
        }
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

/// The peak memory of a process in bytes.
pub(crate) fn peak_rss_bytes(pid: u32) -> Outcome<u64> {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status"))?;
    let line = status.lines().find_map(|line| line.strip_prefix("VmHWM:")).ok_or("no VmHWM")?;
    Ok(line.trim().trim_end_matches(" kB").parse::<u64>()? * 1024)
}

/// A daemon with its own store, killed when dropped.
pub(crate) struct Daemon {
    child: Child,
    socket: PathBuf,
    directory: tempfile::TempDir,
}

impl Daemon {
    pub(crate) fn start(blobd: &Path, on: &Path) -> Outcome<Self> {
        Self::start_with(blobd, on, None)
    }

    pub(crate) fn start_with(blobd: &Path, on: &Path, config: Option<&Path>) -> Outcome<Self> {
        let directory = tempfile::tempdir_in(on)?;
        let socket = directory.path().join("sock");
        let mut command = Command::new(blobd);
        command.args(["serve", "--root"]).arg(directory.path().join("store")).arg("--socket").arg(&socket);
        if let Some(config) = config {
            command.arg("--config").arg(config);
        }
        let child = command.stderr(Stdio::null()).spawn()?;
        let daemon = Self { child, socket, directory };
        let deadline = Instant::now() + Duration::from_secs(10);
        while daemon.client().is_err() {
            if Instant::now() > deadline {
                return Err("the daemon does not respond".into());
            }
            std::thread::sleep(Duration::from_millis(5));
        }
        Ok(daemon)
    }

    pub(crate) fn client(&self) -> Outcome<Client> {
        Ok(Client::connect(&self.socket)?)
    }

    pub(crate) fn import(&self, file: &Path) -> Outcome<blobd_client::protocol::pull::Imported> {
        let params = blobd_client::protocol::request::ImportParams {
            name: Some("bench".parse()?),
            ..blobd_client::protocol::request::ImportParams::new("bench.gguf")
        };
        Ok(self.client()?.import(&params, File::open(file)?, |_completed, _total| ())?)
    }

    /// Pulls a model as a user does, in a child process.
    pub(crate) fn pull(&self, blobd: &Path, name: &str) -> Outcome<()> {
        run(Command::new(blobd).arg("--socket").arg(&self.socket).args(["pull", name]))
    }

    /// Kills it and keeps its store.
    pub(crate) fn kill(&mut self) -> Outcome<()> {
        self.child.kill()?;
        self.child.wait()?;
        Ok(())
    }

    /// Processor time of all its threads.
    pub(crate) fn processor_time(&self) -> Outcome<Duration> {
        Ok(processor_times(&self.child.id().to_string())?.iter().take(2).sum())
    }

    /// Its peak memory in bytes.
    pub(crate) fn peak_rss_bytes(&self) -> Outcome<u64> {
        peak_rss_bytes(self.child.id())
    }

    /// The path of its socket.
    pub(crate) fn socket(&self) -> &Path {
        &self.socket
    }

    /// The size of its blobs in the page cache.
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
        // It may have died already, which was reported then.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
