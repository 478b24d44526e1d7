//! Progress bars: on standard error, and only on a terminal.

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

/// A bar that shows nothing when standard error is no terminal or JSON was asked for.
pub(crate) struct Bar(ProgressBar);

impl Bar {
    /// A bar for `total` bytes, labelled with what is happening.
    pub(crate) fn new(label: &str, total: u64, quiet: bool) -> Self {
        const TEMPLATE: &str = "{msg:24!} {wide_bar} {binary_bytes:>11} / {binary_total_bytes:<11} {binary_bytes_per_sec:>13} {eta:>4}";
        let target = if quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(total), target);
        if let Ok(style) = ProgressStyle::with_template(TEMPLATE) {
            bar.set_style(style.progress_chars("██ "));
        }
        bar.set_message(super::output::printable(label));
        Self(bar)
    }

    /// How far it is.
    pub(crate) fn set(&self, completed: u64, total: u64) {
        self.0.set_length(total);
        self.0.set_position(completed);
    }

    /// Begins in the middle: what was there already says nothing about the speed.
    pub(crate) fn begin_at(&self, completed: u64, total: u64) {
        self.set(completed, total);
        // The estimate takes note of the position only when it is drawn.
        self.0.tick();
        self.0.reset_eta();
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
