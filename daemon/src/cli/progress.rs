//! Progress bars: on standard error, and only on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::output::printable;
use crate::size::human_bytes;

/// A bar that shows nothing when standard error is no terminal or JSON was asked for.
pub(crate) struct Bar {
    bar: ProgressBar,
    /// What was there when it began.
    begun_bytes: u64,
}

/// What is done, of how much, how fast, and how much longer.
const MOVING: &str =
    "{msg:24!} {wide_bar} {binary_bytes:>11} / {binary_total_bytes:<11} {binary_bytes_per_sec:>13} {eta:>4}";
/// Nothing is known yet but how much it will be.
const WAITING: &str = "{msg:24!} {binary_total_bytes:>11}";
/// A remark instead of the speed.
const NOTED: &str = "{msg:24!} {wide_bar} {binary_bytes:>11} / {binary_total_bytes:<11} {prefix:>18!}";

impl Bar {
    /// A bar for `total` bytes, labelled with what is happening.
    pub(crate) fn new(label: &str, total: u64, quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        // Nothing is drawn before it looks as it should.
        let bar = ProgressBar::with_draw_target(Some(total), ProgressDrawTarget::hidden());
        let bar = Self { bar, begun_bytes: 0 };
        bar.bar.set_message(printable(label));
        bar.look_like(MOVING);
        bar.bar.set_draw_target(target);
        bar
    }

    fn look_like(&self, template: &str) {
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.bar.set_style(style.progress_chars("██ "));
        }
    }

    /// Shows that there is something to do, until it is known how far it is.
    pub(crate) fn wait(&self) {
        self.look_like(WAITING);
        self.bar.tick();
    }

    /// How far it is.
    pub(crate) fn set(&self, completed: u64, total: u64) {
        // What is set is drawn, and nothing that was not so must be.
        if self.bar.length() != Some(total) {
            self.bar.set_length(total);
        }
        self.bar.set_position(completed);
    }

    /// Begins in the middle: what was there already says nothing about the speed.
    pub(crate) fn begin_at(&mut self, completed: u64, total: u64) {
        self.begun_bytes = completed;
        self.set(completed, total);
        // The estimate takes note of the position only when it is drawn.
        self.bar.tick();
        self.bar.reset_eta();
        self.look_like(MOVING);
        self.bar.tick();
    }

    /// Shows a remark where the speed was.
    pub(crate) fn note(&self, remark: &str) {
        self.bar.set_prefix(remark.to_owned());
        self.look_like(NOTED);
        self.bar.tick();
    }

    #[cfg(test)]
    pub(crate) fn position(&self) -> u64 {
        self.bar.position()
    }

    /// Leaves the bar as it is, with the speed of the whole unless there is a remark.
    pub(crate) fn keep(self) {
        let came_bytes = self.bar.position().saturating_sub(self.begun_bytes);
        if self.bar.prefix().is_empty() && came_bytes > 0 {
            let milliseconds = u64::try_from(self.bar.elapsed().as_millis()).unwrap_or(u64::MAX).max(1);
            let speed = human_bytes(came_bytes.saturating_mul(1000) / milliseconds);
            self.note(&format!("{speed}/s"));
        }
        self.bar.abandon();
    }

    /// Takes the bar off the screen.
    pub(crate) fn clear(self) {
        self.bar.finish_and_clear();
    }
}
