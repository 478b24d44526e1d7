//! What a user sees while a pull or an import runs, recorded with times.

use std::fs;
use std::io::{BufRead as _, BufReader};
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use blobd_store_format::gguf::GgmlType;
use blobd_tests::command::Blobd;
use blobd_tests::model::ModelFile;
use blobd_tests::programs;
use blobd_tests::registry::{FakeRegistry, Fault};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::terminal::{Frame, Terminal, screen_after};
use rustix::process::{Pid, Signal, kill_process};

use super::pull::registry_with;

/// A command on a terminal, from its start to its end.
struct Recording {
    started: Instant,
    frames: Vec<Frame>,
    /// The longest time that a thread of this process was late meanwhile.
    largest_delay: Duration,
    /// The longest time that `blobd --version` took before and after.
    trivial_command: Duration,
}

/// Measures how late a thread wakes up, until it is stopped: a busy machine delays the recorded command as much.
struct DelayMeter {
    stop: Arc<AtomicBool>,
    thread: JoinHandle<Duration>,
}

impl DelayMeter {
    fn start() -> Self {
        const PAUSE: Duration = Duration::from_millis(10);
        let stop = Arc::<AtomicBool>::default();
        let stopped = Arc::clone(&stop);
        let measure = move || {
            let mut largest = Duration::ZERO;
            while !stopped.load(Ordering::Relaxed) {
                let before = Instant::now();
                thread::sleep(PAUSE);
                largest = largest.max(before.elapsed().saturating_sub(PAUSE));
            }
            largest
        };
        Self { stop, thread: thread::spawn(measure) }
    }

    fn largest(self) -> Duration {
        self.stop.store(true, Ordering::Relaxed);
        self.thread.join().unwrap()
    }
}

/// How long a command takes that does nothing.
fn trivial_command() -> Duration {
    let time = |_| {
        let before = Instant::now();
        assert!(Command::new(programs::blobd()).arg("--version").output().unwrap().status.success());
        before.elapsed()
    };
    (0..3).map(time).max().unwrap()
}

fn record(blobd: &Blobd, arguments: &[&str]) -> Recording {
    let before = trivial_command();
    let (meter, terminal) = (DelayMeter::start(), Terminal::new(24, 100));
    let mut command = blobd.command();
    command.args(arguments).env("TERM", "xterm");
    command.stdout(terminal.another()).stderr(terminal.another());
    let started = Instant::now();
    let mut child = command.spawn().unwrap();
    drop(command);
    assert!(child.wait().unwrap().success());
    let (frames, largest_delay) = (terminal.frames(), meter.largest());
    Recording { started, frames, largest_delay, trivial_command: before.max(trivial_command()) }
}

impl Recording {
    fn check_first_sign_of_life(&self) {
        // 300 ms on an idle machine, where `--version` takes less than 10 ms even without optimization.
        let limit = Duration::from_millis(300).max(self.trivial_command * 30) + self.largest_delay;
        let first = self.frames.first().expect("something is shown").at - self.started;
        assert!(first <= limit, "{first:?}, at most {limit:?}");
    }

    fn check_no_frame_is_older_than_a_second(&self) {
        let limit = Duration::from_secs(1) + self.largest_delay * 2;
        let gaps = self.frames.windows(2).map(|pair| (pair[1].at - pair[0].at, &pair[0].text));
        let longest = gaps.max_by_key(|(gap, _)| *gap);
        assert!(longest.as_ref().is_none_or(|(gap, _)| *gap <= limit), "{longest:?}, at most {limit:?}");
    }

    fn written(&self) -> String {
        self.frames.iter().map(|frame| frame.text.as_str()).collect()
    }

    /// Only the result is left.
    fn check_screen_at_the_end(&self, start: &str) {
        let screen = screen_after(&self.written());
        assert_eq!(screen.len(), 1, "{screen:?}");
        assert!(screen[0].starts_with(start), "{screen:?}");
    }

    fn check_some_line_has(&self, parts: &[&str]) {
        let written = self.written();
        let has = |line: &str| parts.iter().all(|part| line.contains(part));
        assert!(written.split(['\r', '\n']).any(has), "{parts:?}: {written}");
    }
}

/// The seconds that a line of progress says are left: its last word, and perhaps the one before.
fn seconds_left(text: &str) -> Option<u64> {
    let line = text.trim_end().rsplit(['\r', '\n']).next()?;
    let speed = line.rfind("iB/s")?;
    let words = line.get(speed + 4..)?.split_whitespace();
    let second = |word: &str| {
        let (number, unit) = word.split_at_checked(word.len().checked_sub(1)?)?;
        Some(number.parse::<u64>().ok()? * if unit == "m" { 60 } else { 1 })
    };
    let seconds: Vec<u64> = words.map(second).collect::<Option<_>>()?;
    (!seconds.is_empty()).then(|| seconds.iter().sum())
}

/// A store whose downloads use one connection, so that a slow server has a steady speed.
fn one_connection(folder: &std::path::Path) -> Blobd {
    let config = folder.join("config.toml");
    fs::write(&config, "[transfer]\nmax_connections = 1\n").unwrap();
    Blobd::at_root(&folder.join("store")).configured_by(&config)
}

#[test]
fn pull_from_a_slow_server_shows_life_and_when_it_will_end() {
    let folder = tmpfs_directory();
    let registry = registry_with(&ModelFile::dense_of(1, 2, 512));
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(20_000, Duration::from_millis(25)));
    let name = registry.name("library/tiny:latest");
    let recording = record(&one_connection(folder.path()), &["pull", &name]);
    let end = recording.frames.last().unwrap().at;
    assert!(end - recording.started > Duration::from_secs(14), "the server is slow");
    recording.check_first_sign_of_life();
    recording.check_no_frame_is_older_than_a_second();
    recording.check_screen_at_the_end(name.trim_start_matches("http://"));
    recording.check_some_line_has(&["connecting"]);
    recording.check_some_line_has(&[" / 14.2 MiB", "iB/s"]);
    let (ten, three) = (Duration::from_secs(10), Duration::from_secs(3));
    let is_between = |frame: &&Frame| frame.at - recording.started >= ten && end - frame.at >= three;
    let errors = recording.frames.iter().filter(is_between).filter_map(|frame| {
        let (said, real) = (seconds_left(&frame.text)?.max(1) as f64, (end - frame.at).as_secs_f64());
        Some((said / real).max(real / said))
    });
    let mut errors: Vec<f64> = errors.collect();
    errors.sort_by(f64::total_cmp);
    assert!(!errors.is_empty(), "{}", recording.written());
    // One frame may be drawn in the middle of a pause of the machine.
    let usual = errors[errors.len() * 9 / 10];
    assert!(usual < 2.0, "{errors:?}");
}

/// A file with this many small tensors.
fn many_tensors(count: usize) -> ModelFile {
    let mut model = ModelFile::dense(1);
    for number in 0..count {
        model.add_noise(1, &format!("filler.{number}.weight"), GgmlType::F32, &[32]);
    }
    model
}

#[test]
fn import_of_many_tensors_shows_life_until_its_end() {
    let folder = tmpfs_directory();
    let file = folder.path().join("many.gguf");
    fs::write(&file, many_tensors(20_000).bytes()).unwrap();
    let blobd = Blobd::at_root(&folder.path().join("store"));
    let recording = record(&blobd, &["import", file.to_str().unwrap()]);
    recording.check_first_sign_of_life();
    recording.check_no_frame_is_older_than_a_second();
    recording.check_screen_at_the_end("many:latest ");
    recording.check_some_line_has(&["many.gguf", "writing ", "%"]);
}

#[test]
fn log_of_a_pull_begins_within_a_second_and_names_the_model() {
    let folder = tmpfs_directory();
    let registry = registry_with(&ModelFile::dense_of(1, 2, 512));
    registry.add_fault("/cdn/", usize::MAX, Fault::Slow(10_000, Duration::from_millis(20)));
    let name = registry.name("library/tiny:latest");
    let (meter, trivial) = (DelayMeter::start(), trivial_command());
    let mut command = one_connection(folder.path()).command();
    command.args(["pull", &name]).env_remove("BLOBD_PROGRESS_INTERVAL").stdout(Stdio::null());
    let started = Instant::now();
    let mut pull = command.spawn().unwrap();
    let first = BufReader::new(pull.stderr.take().unwrap()).lines().next().unwrap().unwrap();
    let (waited, limit) = (started.elapsed(), Duration::from_secs(1) + trivial * 30 + meter.largest() * 2);
    pull.kill().unwrap();
    pull.wait().unwrap();
    assert!(waited < limit, "{waited:?}, at most {limit:?}: {first}");
    assert!(first.starts_with(&name), "{first}");
}

#[test]
fn ctrl_c_before_the_first_byte_does_not_promise_that_data_is_kept() {
    let folder = tmpfs_directory();
    let registry = FakeRegistry::start().unwrap();
    registry.add_fault("/v2/", usize::MAX, Fault::StallAfter(0, Duration::from_secs(600)));
    let mut command = Command::new("env");
    Blobd::at_root(&folder.path().join("store")).prepare(&mut command);
    command.args(["--default-signal=INT".as_ref(), programs::blobd().as_os_str()]);
    command.args(["pull", &registry.name("library/tiny:latest")]).env("BLOBD_PROGRESS_INTERVAL", "0.1");
    let mut pull = command.spawn().unwrap();
    let mut lines = BufReader::new(pull.stderr.take().unwrap()).lines().map(Result::unwrap);
    assert!(lines.any(|line| line.contains("pulling manifest")), "it asks the registry");
    kill_process(Pid::from_child(&pull), Signal::INT).unwrap();
    let last = lines.last().unwrap();
    assert_eq!(pull.wait().unwrap().code(), Some(130));
    assert!(last.contains("stopped; nothing was received; the same command starts the download"), "{last}");
    assert!(!last.contains("kept"), "{last}");
}
