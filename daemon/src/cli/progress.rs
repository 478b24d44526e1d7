//! Progress on standard error: bars on a terminal, otherwise a line every ten seconds.

use std::io::{self, IsTerminal as _};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use self::lines::{Lines, State};
use crate::output::printable;
use crate::size::human_bytes;

mod lines;

/// The progress of one piece of work. It shows nothing with `--json` and `--quiet`.
pub(crate) struct Bar {
    bar: ProgressBar,
    /// Set if standard error is not a terminal.
    _lines: Option<Lines>,
    /// Bytes that were complete before the transfer started.
    start_bytes: u64,
}

/// Bytes done, total, speed and remaining time.
const TRANSFERRING: &str =
    "{msg:24!} {wide_bar} {binary_bytes:>11} / {binary_total_bytes:<11} {binary_bytes_per_sec:>13} {eta:>4}";
/// Only the total, while it is unknown how much is done.
const WAITING: &str = "{msg:24!} {binary_total_bytes:>11}";
/// A note instead of the speed.
const NOTED: &str = "{msg:24!} {wide_bar} {binary_bytes:>11} / {binary_total_bytes:<11} {prefix:>18!}";

/// What is waited for in place of the bar.
const SILENT: &str = "{msg:52!} {binary_bytes:>11} / {binary_total_bytes:<11}";

impl Bar {
    pub(crate) fn new(label: &str, total: u64, quiet: bool) -> Self {
        let is_terminal = io::stderr().is_terminal();
        let shows_bar = is_terminal && !quiet;
        let target = if shows_bar { ProgressDrawTarget::stderr() } else { ProgressDrawTarget::hidden() };
        // Hidden until its style is set.
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        bar.set_message(printable(label));
        let lines = if is_terminal || quiet { None } else { lines_of(&bar) };
        let bar = Self { bar, _lines: lines, start_bytes: 0 };
        bar.set_template(TRANSFERRING);
        bar.bar.set_draw_target(target);
        bar
    }

    /// Work whose amount is unknown. It has lines, but no bar.
    pub(crate) fn unmeasured(label: &str, quiet: bool) -> Self {
        Self::new(label, 0, quiet || io::stderr().is_terminal())
    }

    fn set_template(&self, template: &str) {
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style.progress_chars("██ "));
        }
    }

    /// Shows only the total, until the first call of [`Self::set`] or [`Self::begin_at`].
    pub(crate) fn wait(&self) {
        self.set_template(WAITING);
        self.bar.tick();
    }

    /// Shows what is waited for, until [`Self::resume`].
    pub(crate) fn interrupt(&self, status: &str) {
        self.bar.set_message(printable(status));
        self.set_template(if self.bar.length() == Some(0) { "{msg}" } else { SILENT });
        self.bar.tick();
    }

    pub(crate) fn resume(&self, label: &str) {
        self.bar.set_message(printable(label));
        self.set_template(TRANSFERRING);
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
        self.set(completed, total);
        // The speed estimate reads the position only when the bar is drawn.
        self.bar.tick();
        self.bar.reset_eta();
        self.set_template(TRANSFERRING);
        self.bar.tick();
    }

    /// Shows a note in place of the speed.
    pub(crate) fn note(&self, note: &str) {
        self.bar.set_prefix(note.to_owned());
        self.set_template(NOTED);
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
    }

    pub(crate) fn clear(self) {
        self.bar.finish_and_clear();
    }
}

fn lines_of(bar: &ProgressBar) -> Option<Lines> {
    let bar = bar.clone();
    let state =
        move || State { label: bar.message(), done: bar.position(), total: bar.length().unwrap_or_default() };
    Lines::start(state)
}
