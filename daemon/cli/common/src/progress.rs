//! Progress on standard error: bars on a terminal, otherwise a line soon after the start and then every ten seconds.

use std::fmt;
use std::io::{self, IsTerminal as _};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use blobd_client::protocol::event::{ImportProgress, Phase, State};
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressState, ProgressStyle};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use self::lines::Lines;
use self::view::View;
use crate::output::printable;

mod lines;
mod many;
mod meter;
mod view;

pub use many::{Bars, ItemBar};

/// The progress of one command, which shows one bar after the other. Lines appear at regular intervals from the start
/// of the command, independent of the bars.
#[derive(Clone, Debug)]
pub struct Progress(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    quiet: bool,
    has_bars: bool,
    current: Arc<Mutex<Current>>,
    /// Set with the first bar, if there are no bars on a terminal.
    lines: Mutex<Option<Lines>>,
}

#[derive(Debug, Default)]
struct Current {
    count: u64,
    shown: Option<Shown>,
}

/// A piece of work and its bar.
#[derive(Clone, Debug)]
struct Shown {
    bar: ProgressBar,
    view: Arc<Mutex<View>>,
}

/// The progress of one piece of work. It is hidden with `--json` and `--quiet`. Nothing of it stays on the screen.
#[derive(Debug)]
pub struct Bar {
    shown: Shown,
    progress: Progress,
}

/// A terminal shows at least this often that the command is alive.
const TICK_INTERVAL: Duration = Duration::from_millis(200);

impl Progress {
    /// Shows nothing if `quiet`.
    pub fn new(quiet: bool) -> Self {
        // A terminal without cursor movements, such as `dumb`, has lines.
        let has_bars = io::stderr().is_terminal() && !ProgressDrawTarget::stderr().is_hidden();
        Self(Arc::new(Shared { quiet, has_bars, current: Arc::default(), lines: Mutex::new(None) }))
    }

    /// A bar for `total` bytes, or for work whose amount is unknown if that is 0.
    pub fn bar(&self, label: &str, total: u64) -> Bar {
        let id = lock(&self.0.current).next_id();
        let shown = Shown::new(id, label, total);
        lock(&self.0.current).shown = Some(shown.clone());
        self.start_lines();
        if self.0.has_bars && !self.0.quiet {
            shown.draw_on(ProgressDrawTarget::stderr());
        }
        Bar { shown, progress: self.clone() }
    }

    fn start_lines(&self) {
        let mut lines = lock(&self.0.lines);
        if lines.is_none() && !self.0.quiet && !self.0.has_bars {
            let current = Arc::clone(&self.0.current);
            let text = |shown: &Shown| lock(&shown.view).text(Instant::now());
            *lines = Lines::start(move || lock(&current).shown.as_ref().map(text));
        }
    }
}

impl Current {
    fn next_id(&mut self) -> u64 {
        self.count = self.count.saturating_add(1);
        self.count
    }
}

impl Shown {
    /// Not on the screen yet.
    fn new(id: u64, label: &str, total: u64) -> Self {
        let view = View::new(id, printable(label), total, Instant::now());
        let view = Arc::new(Mutex::new(view));
        let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden());
        let drawn = Arc::clone(&view);
        let line = move |_: &ProgressState, writer: &mut dyn fmt::Write| {
            // A line that cannot be formatted is not shown.
            let _ = writer.write_str(&lock(&drawn).line(columns(), Instant::now()));
        };
        if let Ok(style) = ProgressStyle::with_template("{line}") {
            bar.set_style(style.with_key("line", line));
        }
        Self { bar, view }
    }

    fn draw_on(&self, target: ProgressDrawTarget) {
        self.bar.set_draw_target(target);
        self.bar.tick();
        self.bar.enable_steady_tick(TICK_INTERVAL);
    }

    fn change(&self, change: impl FnOnce(&mut View, Instant)) {
        change(&mut lock(&self.view), Instant::now());
        // Draws, unless that was done a moment ago.
        self.bar.set_position(lock(&self.view).done());
    }
}

/// The width of the terminal; 0 if it has none.
fn columns() -> usize {
    rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| size.ws_col).into()
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete before anything can panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bar {
    /// For a command that shows only one bar.
    pub fn new(label: &str, total: u64, quiet: bool) -> Self {
        Progress::new(quiet).bar(label, total)
    }

    /// Shows this text instead of amounts until the next change.
    pub fn wait(&self, status: &str) {
        let status = printable(status);
        self.shown.change(|view, now| view.wait(&status, now));
    }

    /// Shows that `completed` of `total` bytes are done.
    pub fn set(&self, completed: u64, total: u64) {
        self.shown.change(|view, now| view.set(completed, total, now));
    }

    /// Starts at `completed` bytes, which do not count towards the speed.
    pub fn begin_at(&self, completed: u64, total: u64) {
        self.shown.change(|view, now| view.begin_at(completed, total, now));
    }

    /// Shows a phase that follows the last byte; `total` is 0 if its amount is unknown.
    pub fn enter(&self, phase: Phase, (done, total): (u64, u64)) {
        self.shown.change(|view, now| view.enter(phase_name(phase), (done, total), now));
    }

    /// Shows how far an import is.
    pub fn show(&self, progress: &ImportProgress) {
        self.shown.change(|view, now| view.show_import(progress, now));
    }

    /// Shows the speed that the daemon has measured instead of the one that is measured here.
    pub fn set_speed(&self, bytes_per_second: Option<u64>) {
        self.shown.change(|view, _now| view.set_speed(bytes_per_second));
    }

    /// The bytes that are shown as done.
    #[cfg(any(test, feature = "testing"))]
    pub fn position(&self) -> u64 {
        lock(&self.shown.view).done()
    }

    /// Removes the bar from the screen.
    pub fn clear(self) {
        drop(self);
    }
}

impl Drop for Bar {
    /// The lines show nothing until the next bar.
    fn drop(&mut self) {
        let id = lock(&self.shown.view).id;
        let mut current = lock(&self.progress.0.current);
        if current.shown.as_ref().is_some_and(|shown| lock(&shown.view).id == id) {
            current.shown = None;
        }
        drop(current);
        self.shown.bar.finish_and_clear();
    }
}

/// What a phase is called while a user waits for it.
pub fn phase_name(phase: Phase) -> &'static str {
    match phase {
        Phase::Resolving => "asking the registry",
        Phase::Receiving => "downloading",
        Phase::Sending => "sending",
        Phase::Reading => "reading",
        Phase::Hashing => "verifying",
        Phase::Writing => "writing",
        Phase::Syncing => "syncing",
        Phase::Committing => "committing",
        Phase::Repairing => "repairing",
        _ => "working",
    }
}

impl View {
    /// Shows how far an import is.
    fn show_import(&mut self, progress: &ImportProgress, now: Instant) {
        match (progress.state, progress.phase) {
            (State::Queued, _) => self.wait("waiting for other imports and edits to end", now),
            (_, Some(phase)) if progress.total > 0 && progress.completed >= progress.total => {
                self.note(progress.completed, progress.total, now);
                let counts = progress.phase_completed.zip(progress.phase_total).unwrap_or_default();
                self.enter(phase_name(phase), counts, now);
            }
            _ if progress.total == 0 => self.wait("reading", now),
            _ => self.set(progress.completed, progress.total, now),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_show_the_newest_bar_and_what_it_waits_for() {
        let progress = Progress::new(true);
        let shown = || lock(&progress.0.current).shown.as_ref().map(|it| lock(&it.view).text(Instant::now()));
        let first = progress.bar("a", 10);
        first.begin_at(4, 10);
        first.wait("waiting for a host");
        assert_eq!(shown().unwrap(), "a: 4 B of 10 B (40%); waiting for a host");
        first.set(4, 10);
        assert!(shown().unwrap().starts_with("a: 4 B of 10 B (40%), no progress"));
        let second = progress.bar("b", 20);
        drop(first);
        assert!(shown().unwrap().starts_with("b: "));
        second.clear();
        assert_eq!(shown(), None);
    }

    #[test]
    fn import_of_many_tensors_shows_how_many_are_written_when_all_is_read() {
        let start = Instant::now();
        let mut view = View::new(1, "many.gguf".to_owned(), 0, start);
        let (completed, total) = (17, 17);
        let read =
            ImportProgress { completed, total, phase: Some(Phase::Hashing), ..ImportProgress::default() };
        let (phase_completed, phase_total) = (Some(25_000), Some(100_000));
        let phase = Some(Phase::Writing);
        let writing = ImportProgress { phase, phase_completed, phase_total, ..read };
        view.show_import(&ImportProgress { completed: 3, ..read }, start);
        assert_eq!(view.text(start), "many.gguf: 3 B of 17 B (17%), 2.93 KiB/s, 0s left");
        view.show_import(&writing, start);
        assert_eq!(view.text(start), "many.gguf: writing, 25%");
        let (second, phase_completed) = (start + Duration::from_secs(1), Some(50_000));
        view.show_import(&ImportProgress { phase_completed, ..writing }, second);
        assert_eq!(view.text(second), "many.gguf: writing, 50%, 2s left");
        view.show_import(&ImportProgress { phase: Some(Phase::Syncing), ..read }, start);
        assert_eq!(view.text(start), "many.gguf: syncing");
        view.show_import(&ImportProgress { state: State::Queued, ..ImportProgress::default() }, start);
        assert!(view.text(start).ends_with("; waiting for other imports and edits to end"));
    }
}
