//! Progress on standard error: bars on a terminal, otherwise a line every ten seconds.

use std::io::{self, IsTerminal as _};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use self::lines::{Lines, State};
use crate::output::{human_bytes, print_message_unbroken, printable};

mod lines;
mod many;

pub use many::Bars;

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

#[derive(Debug)]
struct Shown {
    bar: ProgressBar,
    state: State,
}

/// The progress of one piece of work. It is hidden with `--json` and `--quiet`.
#[derive(Debug)]
pub struct Bar {
    bar: ProgressBar,
    progress: Progress,
    id: u64,
    /// Bytes that were complete before the transfer started.
    start_bytes: u64,
}

impl Progress {
    /// Shows nothing if `quiet`.
    pub fn new(quiet: bool) -> Self {
        // A terminal without cursor movements, such as `dumb`, has lines.
        let has_bars = io::stderr().is_terminal() && !ProgressDrawTarget::stderr().is_hidden();
        Self(Arc::new(Shared { quiet, has_bars, current: Arc::default(), lines: Mutex::new(None) }))
    }

    /// A bar for a transfer of `total` bytes.
    pub fn bar(&self, label: &str, total: u64) -> Bar {
        self.start(label, total, self.0.has_bars && !self.0.quiet)
    }

    /// For work whose amount is unknown: lines, but no bar.
    pub fn unmeasured(&self, label: &str) -> Bar {
        self.start(label, 0, false)
    }

    fn start(&self, label: &str, total: u64, shows_bar: bool) -> Bar {
        let target = if shows_bar { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        // Hidden until its style is set.
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        bar.set_message(printable(label));
        let id = lock(&self.0.current).begin(&bar);
        self.start_lines();
        let bar = Bar { bar, progress: self.clone(), id, start_bytes: 0 };
        bar.set_template(Template::Transferring);
        bar.bar.set_draw_target(target);
        bar
    }

    fn start_lines(&self) {
        let mut lines = lock(&self.0.lines);
        if lines.is_none() && !self.0.quiet && !self.0.has_bars {
            let current = Arc::clone(&self.0.current);
            *lines = Lines::start(move || lock(&current).shown.as_ref().map(Shown::state));
        }
    }

    fn change(&self, id: u64, change: impl FnOnce(&mut Shown)) {
        let mut current = lock(&self.0.current);
        if let Some(shown) = current.shown.as_mut().filter(|shown| shown.state.id == id) {
            change(shown);
        }
    }
}

impl Current {
    fn begin(&mut self, bar: &ProgressBar) -> u64 {
        self.count = self.count.saturating_add(1);
        let (id, label, since) = (self.count, bar.message(), Instant::now());
        let state = State { id, label, status: None, start: 0, done: 0, total: 0, since };
        self.shown = Some(Shown { bar: bar.clone(), state });
        id
    }
}

impl Shown {
    fn state(&self) -> State {
        let (done, total) = (self.bar.position(), self.bar.length().unwrap_or_default());
        State { done, total, ..self.state.clone() }
    }
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

    fn set_template(&self, template: Template) {
        template.apply_to(&self.bar);
    }

    /// Shows only the total, until the first call of [`Self::set`] or [`Self::begin_at`].
    pub fn wait(&self) {
        self.set_template(Template::Waiting);
        self.bar.tick();
    }

    /// Shows this text in place of the bar, until [`Self::resume`].
    pub fn interrupt(&self, status: &str) {
        let status = printable(status);
        self.bar.set_message(status.clone());
        self.progress.change(self.id, |shown| shown.state.status = Some(status));
        let has_total = self.bar.length() != Some(0);
        self.set_template(if has_total { Template::Interrupted } else { Template::Message });
        self.bar.tick();
    }

    /// Continues after an interruption.
    pub fn resume(&self, label: &str) {
        self.bar.set_message(printable(label));
        self.progress.change(self.id, |shown| shown.state.status = None);
        self.set_template(Template::Transferring);
    }

    /// Shows that `completed` of `total` bytes are done.
    pub fn set(&self, completed: u64, total: u64) {
        // Setting the length redraws the bar, so it is set only if it has changed.
        if self.bar.length() != Some(total) {
            self.bar.set_length(total);
        }
        self.bar.set_position(completed);
    }

    /// Starts at `completed` bytes, which do not count towards the speed.
    pub fn begin_at(&mut self, completed: u64, total: u64) {
        self.start_bytes = completed;
        self.progress.change(self.id, |shown| shown.state.start = completed);
        self.set(completed, total);
        // The speed estimate reads the position only when the bar is drawn.
        self.bar.tick();
        self.bar.reset_eta();
        self.set_template(Template::Transferring);
        self.bar.tick();
    }

    /// Shows a note in place of the speed.
    pub fn note(&self, note: &str) {
        self.bar.set_prefix(note.to_owned());
        self.set_template(Template::Noted);
        self.bar.tick();
    }

    /// The bytes that are shown as done.
    #[cfg(any(test, feature = "testing"))]
    pub fn position(&self) -> u64 {
        self.bar.position()
    }

    /// Leaves the bar on the screen, with the average speed unless it has a note.
    pub fn keep(self) {
        if self.bar.is_hidden() {
            return;
        }
        let new_bytes = self.bar.position().saturating_sub(self.start_bytes);
        if self.bar.prefix().is_empty() && new_bytes > 0 {
            let milliseconds = u64::try_from(self.bar.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
            let speed = human_bytes(new_bytes.saturating_mul(1000) / milliseconds);
            self.note(&format!("{speed}/s"));
        }
        self.bar.abandon();
        // The bar fills its line and leaves the cursor at its end, where not every terminal wraps.
        print_message_unbroken("\n");
    }

    /// Removes the bar from the screen.
    pub fn clear(self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Bar {
    /// The lines show nothing until the next bar.
    fn drop(&mut self) {
        let mut current = lock(&self.progress.0.current);
        if current.shown.as_ref().is_some_and(|shown| shown.state.id == self.id) {
            current.shown = None;
        }
    }
}

/// The layout of a bar, which must fit one line of the terminal.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Template {
    Transferring,
    /// Only the total, while it is unknown how much is done.
    Waiting,
    /// A note instead of the speed.
    Noted,
    /// The reason for a wait, shown instead of the bar.
    Interrupted,
    Message,
}

/// Enough columns for the wide layout with a short bar.
const WIDE_COLUMNS: u16 = 78;

impl Template {
    fn apply_to(self, bar: &ProgressBar) {
        if let Ok(style) = ProgressStyle::with_template(self.text()) {
            bar.set_style(style.progress_chars("██ "));
        }
    }

    fn text(self) -> &'static str {
        // The width may change while the bar is shown; the next change of the layout adapts to it.
        let columns = rustix::termios::tcgetwinsize(io::stderr()).map_or(80, |size| size.ws_col);
        self.text_for(columns)
    }

    const fn text_for(self, columns: u16) -> &'static str {
        let is_wide = columns == 0 || columns >= WIDE_COLUMNS;
        match self {
            Self::Transferring if is_wide => {
                "{msg:24!} {wide_bar} {binary_bytes:>11} / {binary_total_bytes:<11} {binary_bytes_per_sec:>13} {eta:>4}"
            }
            Self::Transferring => "{wide_msg} {percent:>3}% {binary_bytes_per_sec:>13} {eta:>4}",
            Self::Waiting if is_wide => "{msg:24!} {binary_total_bytes:>11}",
            Self::Waiting => "{wide_msg} {binary_total_bytes:>11}",
            Self::Noted if is_wide => {
                "{msg:24!} {wide_bar} {binary_bytes:>11} / {binary_total_bytes:<11} {prefix:>18!}"
            }
            Self::Noted => "{wide_msg} {percent:>3}% {prefix:>18!}",
            Self::Interrupted if is_wide => "{msg:52!} {binary_bytes:>11} / {binary_total_bytes:<11}",
            Self::Interrupted => "{wide_msg} {percent:>3}%",
            Self::Message => "{wide_msg}",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_show_the_newest_bar_and_what_it_waits_for() {
        let progress = Progress::new(true);
        let shown = || lock(&progress.0.current).shown.as_ref().map(Shown::state);
        let mut first = progress.bar("a", 10);
        first.begin_at(4, 10);
        first.interrupt("waiting for a host");
        let state = shown().unwrap();
        assert_eq!((state.label.as_str(), state.start, state.done, state.total), ("a", 4, 4, 10));
        assert_eq!(state.status.as_deref(), Some("waiting for a host"));
        first.resume("a");
        assert_eq!(shown().unwrap().status, None);
        let second = progress.bar("b", 20);
        drop(first);
        assert_eq!(shown().unwrap().label, "b");
        second.clear();
        assert_eq!(shown(), None);
    }
}
