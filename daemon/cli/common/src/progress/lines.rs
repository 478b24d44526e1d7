//! Progress as lines of text, for logs and pipes.

use std::env;
use std::io::{self, Write as _};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

/// The seconds before the first line and between two; 0 for no lines.
const INTERVAL_VARIABLE: &str = "BLOBD_PROGRESS_INTERVAL";
const DEFAULT_INTERVAL: Duration = Duration::from_secs(10);
/// The first line comes sooner, so that a log shows at once that something is done.
const FIRST_AFTER: Duration = Duration::from_millis(800);

/// Prints a line soon after the start and then at regular intervals until it is dropped. Short work prints none.
#[derive(Debug)]
pub(super) struct Lines {
    /// Dropped to stop the thread.
    stop: Option<Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Lines {
    /// `None` if the user wants no lines. Nothing is printed while `text` returns nothing.
    pub(super) fn start(text: impl Fn() -> Option<String> + Send + 'static) -> Option<Self> {
        let (first, interval) = times(env::var(INTERVAL_VARIABLE).ok().as_deref())?;
        let (stop, stopped) = channel();
        let run = move || {
            let mut next = first;
            while stopped.recv_timeout(next) == Err(RecvTimeoutError::Timeout) {
                next = interval;
                if let Some(text) = text() {
                    // Progress that nobody can read is not a failure.
                    let _ = writeln!(io::stderr(), "{text}");
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

/// The times before the first line and between two. `None` for no lines.
fn times(seconds: Option<&str>) -> Option<(Duration, Duration)> {
    let seconds = seconds.and_then(|text| text.trim().parse::<f64>().ok());
    match seconds.map(Duration::try_from_secs_f64) {
        Some(Ok(interval)) => Some((interval, interval)).filter(|_| !interval.is_zero()),
        _ => Some((FIRST_AFTER, DEFAULT_INTERVAL)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn interval_is_ten_seconds_unless_the_user_sets_it() {
        for text in [None, Some(""), Some("x"), Some("-1"), Some("1e999")] {
            assert_eq!(times(text), Some((FIRST_AFTER, DEFAULT_INTERVAL)), "{text:?}");
        }
        let half = Duration::from_millis(500);
        assert_eq!(times(Some("0.5")), Some((half, half)));
        assert_eq!(times(Some("0")), None);
    }
}
