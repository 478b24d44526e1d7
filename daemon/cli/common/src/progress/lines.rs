//! Progress as lines of text, for logs and pipes.

use std::env;
use std::io::{self, Write as _};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crate::output::human_bytes;

/// The seconds between two lines; 0 for no lines.
const INTERVAL_VARIABLE: &str = "BLOBD_PROGRESS_INTERVAL";
const DEFAULT_INTERVAL: Duration = Duration::from_secs(10);

/// Prints a line at regular intervals until it is dropped. Work that takes less time than one interval prints
/// none.
#[derive(Debug)]
pub(super) struct Lines {
    /// Dropped to stop the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct State {
    /// Unique for each piece of work.
    pub(super) id: u64,
    pub(super) label: String,
    pub(super) status: Option<String>,
    /// The bytes that were done when the work began.
    pub(super) start: u64,
    pub(super) done: u64,
    /// 0 if unknown.
    pub(super) total: u64,
    pub(super) since: Instant,
}

impl Lines {
    /// `None` if the user wants no lines. Prints no line while there is no state.
    pub(super) fn start(state: impl Fn() -> Option<State> + Send + 'static) -> Option<Self> {
        let interval = interval(env::var(INTERVAL_VARIABLE).ok().as_deref())?;
        let (stop, stopped) = channel();
        let run = move || {
            let mut meter = Meter::default();
            while stopped.recv_timeout(interval) == Err(RecvTimeoutError::Timeout) {
                if let Some(state) = state() {
                    // Progress that nobody can read is not a failure.
                    let _ = writeln!(io::stderr(), "{}", meter.line(&state, Instant::now()));
                }
            }
        };
        // Without a thread no progress is shown, but the work is done.
        let thread = thread::Builder::new().name("progress".to_owned()).spawn(run).ok()?;
        Some(Self { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Lines {
    fn drop(&mut self) {
        drop(self.stop.take());
        // No line appears after the result.
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

fn interval(seconds: Option<&str>) -> Option<Duration> {
    let seconds = seconds.and_then(|text| text.trim().parse::<f64>().ok());
    match seconds.map(Duration::try_from_secs_f64) {
        Some(Ok(interval)) => Some(interval).filter(|interval| !interval.is_zero()),
        _ => Some(DEFAULT_INTERVAL),
    }
}

#[derive(Debug, Default)]
struct Meter {
    last: Option<Measured>,
}

#[derive(Clone, Copy, Debug)]
struct Measured {
    id: u64,
    done: u64,
    at: Instant,
    /// When bytes were last added.
    moved: Instant,
}

impl Meter {
    fn line(&mut self, state: &State, now: Instant) -> String {
        let State { id, label, done, total, .. } = state;
        let last = self.last.filter(|last| last.id == *id);
        let last =
            last.unwrap_or(Measured { id: *id, done: state.start, at: state.since, moved: state.since });
        let moved = if *done == last.done { last.moved } else { now };
        self.last = Some(Measured { id: *id, done: *done, at: now, moved });
        let amount = match (*done, *total) {
            (0, 0) => label.clone(),
            (done, 0) => format!("{label}: {}", human_bytes(done)),
            (done, total) => {
                format!(
                    "{label}: {} of {} ({}%)",
                    human_bytes(done),
                    human_bytes(total),
                    percent(done, total)
                )
            }
        };
        if let Some(status) = &state.status {
            return format!("{amount}; {status}");
        }
        let milliseconds =
            u64::try_from(now.saturating_duration_since(last.at).as_millis()).unwrap_or(u64::MAX).max(1);
        let speed = done.saturating_sub(last.done).saturating_mul(1000) / milliseconds;
        if speed == 0 {
            return format!(
                "{amount}, no progress for {}",
                time(now.saturating_duration_since(moved).as_secs())
            );
        }
        let left = total.saturating_sub(*done) / speed;
        let left = if *total > 0 { format!(", {} left", time(left)) } else { String::new() };
        format!("{amount}, {}/s{left}", human_bytes(speed))
    }
}

fn percent(done: u64, total: u64) -> u128 {
    u128::from(done.min(total)) * 100 / u128::from(total.max(1))
}

/// Two units at most: `42s`, `1m 17s`, `3h 20m`, `2d 5h`.
fn time(seconds: u64) -> String {
    const UNITS: [(u64, &str); 4] = [(86_400, "d"), (3600, "h"), (60, "m"), (1, "s")];
    let first = UNITS.iter().position(|(unit, _)| seconds >= *unit).unwrap_or(UNITS.len() - 1);
    let parts = UNITS.iter().enumerate().skip(first).take(2).map(|(index, (unit, name))| {
        let above = index.checked_sub(1).and_then(|larger| UNITS.get(larger)).map(|(larger, _)| *larger);
        let count = above.filter(|_| index > first).map_or(seconds, |larger| seconds % larger) / unit;
        format!("{count}{name}")
    });
    parts.collect::<Vec<_>>().join(" ")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn state(since: Instant, done: u64, total: u64) -> State {
        State { id: 1, label: "pulling a".to_owned(), status: None, start: 0, done, total, since }
    }

    #[test]
    fn line_says_what_how_much_how_fast_and_how_long() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut meter = Meter::default();
        let line = meter.line(&state(start, 100 << 20, 1 << 30), after(10));
        assert_eq!(line, "pulling a: 100 MiB of 1.00 GiB (9%), 10.0 MiB/s, 1m 32s left");
        let line = meter.line(&state(start, 600 << 20, 1 << 30), after(20));
        assert_eq!(line, "pulling a: 600 MiB of 1.00 GiB (58%), 50.0 MiB/s, 8s left");
        assert_eq!(
            meter.line(&state(start, 600 << 20, 1 << 30), after(50)),
            "pulling a: 600 MiB of 1.00 GiB (58%), no progress for 30s"
        );
        let line = Meter::default().line(&state(start, 0, 0), after(70));
        assert_eq!(line, "pulling a, no progress for 1m 10s");
        let line = Meter::default().line(&state(start, 2048, 0), after(1));
        assert_eq!(line, "pulling a: 2.00 KiB, 2.00 KiB/s", "the total is unknown");
    }

    #[test]
    fn speed_of_the_next_file_does_not_include_what_was_there_or_the_file_before() {
        let start = Instant::now();
        let after = |seconds| start + Duration::from_secs(seconds);
        let mut meter = Meter::default();
        meter.line(&state(start, 900 << 20, 1 << 30), after(10));
        let next = State { id: 2, start: 20 << 20, ..state(after(15), 70 << 20, 120 << 20) };
        assert_eq!(meter.line(&next, after(20)), "pulling a: 70.0 MiB of 120 MiB (58%), 10.0 MiB/s, 5s left");
    }

    #[test]
    fn line_says_what_is_waited_for() {
        let start = Instant::now();
        let status = Some("waiting for example.org: no data for 12 s".to_owned());
        let waiting = State { status, ..state(start, 600 << 20, 1 << 30) };
        assert_eq!(
            Meter::default().line(&waiting, start + Duration::from_secs(10)),
            "pulling a: 600 MiB of 1.00 GiB (58%); waiting for example.org: no data for 12 s"
        );
    }

    #[test]
    fn time_has_two_units_at_most() {
        let texts = [0, 59, 60, 3599, 3600, 12_000, 86_400, 190_000].map(time);
        assert_eq!(texts, ["0s", "59s", "1m 0s", "59m 59s", "1h 0m", "3h 20m", "1d 0h", "2d 4h"]);
    }

    #[test]
    fn interval_is_ten_seconds_unless_the_user_sets_it() {
        for text in [None, Some(""), Some("x"), Some("-1"), Some("1e999")] {
            assert_eq!(interval(text), Some(DEFAULT_INTERVAL), "{text:?}");
        }
        assert_eq!(interval(Some("0.5")), Some(Duration::from_millis(500)));
        assert_eq!(interval(Some("0")), None);
    }
}
