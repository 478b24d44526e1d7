//! Progress on standard error: bars on a terminal, otherwise a line every ten seconds.

use std::io::{self, IsTerminal as _};
use std::sync::{Arc, PoisonError};
use std::time::Instant;

use blobd_store_format::size::human_bytes;
use blobd_store_format::text::printable;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use self::lines::{Lines, State};
use self::template::Template;
use crate::output::print_message_unbroken;

mod lines;
mod template;

/// The progress of one command, which shows one bar after the other. The lines appear at regular intervals from the
/// start of the command on, whatever the bar.
#[derive(Clone, Debug)]
pub(crate) struct Progress(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    quiet: bool,
    /// Whether standard error is a terminal that can show bars.
    has_bars: bool,
    current: Arc<Mutex<Current>>,
    /// Set with the first bar, if there are no bars on a terminal.
    lines: Mutex<Option<Lines>>,
}

/// The state that the lines show.
#[derive(Debug, Default)]
struct Current {
    /// How many bars there were.
    count: u64,
    shown: Option<Shown>,
}

#[derive(Debug)]
struct Shown {
    id: u64,
    bar: ProgressBar,
    label: String,
    /// The reason for a wait.
    status: Option<String>,
    start_bytes: u64,
    since: Instant,
}

/// The progress of one piece of work. It shows nothing with `--json` and `--quiet`.
#[derive(Debug)]
pub(crate) struct Bar {
    bar: ProgressBar,
    progress: Progress,
    id: u64,
    /// Bytes that were complete before the transfer started.
    start_bytes: u64,
}

impl Progress {
    pub(crate) fn new(quiet: bool) -> Self {
        // A terminal without cursor movements, such as `dumb`, has lines.
        let has_bars = io::stderr().is_terminal() && !ProgressDrawTarget::stderr().is_hidden();
        Self(Arc::new(Shared { quiet, has_bars, current: Arc::default(), lines: Mutex::new(None) }))
    }

    /// The bar of the next piece of work.
    pub(crate) fn bar(&self, label: &str, total: u64) -> Bar {
        self.start(label, total, self.0.has_bars && !self.0.quiet)
    }

    /// The same for work whose amount is unknown. It has lines, but no bar.
    pub(crate) fn unmeasured(&self, label: &str) -> Bar {
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

    /// Changes what the lines show, if that is the bar with this ID.
    fn change(&self, id: u64, change: impl FnOnce(&mut Shown)) {
        let mut current = lock(&self.0.current);
        if let Some(shown) = current.shown.as_mut().filter(|shown| shown.id == id) {
            change(shown);
        }
    }
}

impl Current {
    /// Returns the ID of the bar, which is shown from now on.
    fn begin(&mut self, bar: &ProgressBar) -> u64 {
        self.count = self.count.saturating_add(1);
        let (id, label, bar) = (self.count, bar.message(), bar.clone());
        self.shown = Some(Shown { id, bar, label, status: None, start_bytes: 0, since: Instant::now() });
        id
    }
}

impl Shown {
    fn state(&self) -> State {
        State {
            id: self.id,
            label: self.label.clone(),
            status: self.status.clone(),
            start: self.start_bytes,
            done: self.bar.position(),
            total: self.bar.length().unwrap_or_default(),
            since: self.since,
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // Each change is complete before anything can panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Bar {
    /// The bar of a command that shows only one.
    pub(crate) fn new(label: &str, total: u64, quiet: bool) -> Self {
        Progress::new(quiet).bar(label, total)
    }

    fn set_template(&self, template: Template) {
        if let Ok(style) = ProgressStyle::with_template(template.text()) {
            self.bar.set_style(style.progress_chars("██ "));
        }
    }

    /// Shows only the total, until the first call of [`Self::set`] or [`Self::begin_at`].
    pub(crate) fn wait(&self) {
        self.set_template(Template::Waiting);
        self.bar.tick();
    }

    /// Shows this text in place of the bar, until [`Self::resume`].
    pub(crate) fn interrupt(&self, status: &str) {
        let status = printable(status);
        self.bar.set_message(status.clone());
        self.progress.change(self.id, |shown| shown.status = Some(status));
        let has_total = self.bar.length() != Some(0);
        self.set_template(if has_total { Template::Interrupted } else { Template::Message });
        self.bar.tick();
    }

    pub(crate) fn resume(&self, label: &str) {
        self.bar.set_message(printable(label));
        self.progress.change(self.id, |shown| shown.status = None);
        self.set_template(Template::Transferring);
    }

    pub(crate) fn set(&self, completed: u64, total: u64) {
        // Setting the length redraws the bar, so it is set only if it has changed.
        if self.bar.length() != Some(total) {
            self.bar.set_length(total);
        }
        self.bar.set_position(completed);
    }

    /// Starts at `completed` bytes, which do not count for the speed.
    pub(crate) fn begin_at(&mut self, completed: u64, total: u64) {
        self.start_bytes = completed;
        self.progress.change(self.id, |shown| shown.start_bytes = completed);
        self.set(completed, total);
        // The speed estimate reads the position only when the bar is drawn.
        self.bar.tick();
        self.bar.reset_eta();
        self.set_template(Template::Transferring);
        self.bar.tick();
    }

    /// Shows a note in place of the speed.
    pub(crate) fn note(&self, note: &str) {
        self.bar.set_prefix(note.to_owned());
        self.set_template(Template::Noted);
        self.bar.tick();
    }

    #[cfg(test)]
    pub(crate) fn position(&self) -> u64 {
        self.bar.position()
    }

    /// Leaves the bar on the screen, with the average speed unless it has a note.
    pub(crate) fn keep(self) {
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

    pub(crate) fn clear(self) {
        self.bar.finish_and_clear();
    }
}

impl Drop for Bar {
    /// The lines show nothing until the next bar.
    fn drop(&mut self) {
        let mut current = lock(&self.progress.0.current);
        if current.shown.as_ref().is_some_and(|shown| shown.id == self.id) {
            current.shown = None;
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
