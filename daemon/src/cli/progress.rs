//! Progress bars: on standard error, and only on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar that shows nothing when standard error is no terminal or JSON was asked for.
pub(crate) struct Bar(ProgressBar);

/// What is done, of how much, how fast, and how much longer.
const MOVING: &str =
    "{msg:24!} {wide_bar} {binary_bytes:>11} / {binary_total_bytes:<11} {binary_bytes_per_sec:>13} {eta:>4}";
/// Nothing is known yet but how much it will be.
const WAITING: &str = "{msg:24!} {binary_total_bytes:>11}";
/// A remark instead of the speed.
const NOTED: &str = "{msg:24!} {wide_bar} {binary_bytes:>11} / {binary_total_bytes:<11} {prefix:>25!}";

impl Bar {
    /// A bar for `total` bytes, labelled with what is happening.
    pub(crate) fn new(label: &str, total: u64, quiet: bool) -> Self {
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = Self(ProgressBar::with_draw_target(Some(total), target));
        bar.0.set_message(super::output::printable(label));
        bar.look_like(MOVING);
        bar
    }

    fn look_like(&self, template: &str) {
        if let Ok(style) = ProgressStyle::with_template(template) {
            self.0.set_style(style.progress_chars("██ "));
        }
    }

    /// Shows that there is something to do, until it is known how far it is.
    pub(crate) fn wait(&self) {
        self.look_like(WAITING);
        self.0.tick();
    }

    /// How far it is.
    pub(crate) fn set(&self, completed: u64, total: u64) {
        // What is set is drawn, and nothing that was not so must be.
        if self.0.length() != Some(total) {
            self.0.set_length(total);
        }
        self.0.set_position(completed);
    }

    /// Begins in the middle: what was there already says nothing about the speed.
    pub(crate) fn begin_at(&self, completed: u64, total: u64) {
        self.set(completed, total);
        self.look_like(MOVING);
        // The estimate takes note of the position only when it is drawn.
        self.0.tick();
        self.0.reset_eta();
    }

    /// Shows a remark where the speed was.
    pub(crate) fn note(&self, remark: &str) {
        self.0.set_prefix(remark.to_owned());
        self.look_like(NOTED);
        self.0.tick();
    }

    #[cfg(test)]
    pub(crate) fn position(&self) -> u64 {
        self.0.position()
    }

    /// Leaves the bar as it is.
    pub(crate) fn keep(self) {
        self.0.abandon();
    }

    /// Takes the bar off the screen.
    pub(crate) fn clear(self) {
        self.0.finish_and_clear();
    }
}
