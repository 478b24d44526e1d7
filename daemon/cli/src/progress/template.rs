//! The layout of progress bars, which must fit one line of the terminal.

use std::io;

/// What a bar shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Template {
    /// Bytes done, total, speed and remaining time.
    Transferring,
    /// Only the total, while it is unknown how much is done.
    Waiting,
    /// A note instead of the speed.
    Noted,
    /// What is waited for in place of the bar.
    Interrupted,
    /// The message alone.
    Message,
}

/// The columns that the wide layout takes without its bar, and some columns of that.
const WIDE_COLUMNS: u16 = 78;

impl Template {
    pub(super) fn text(self) -> &'static str {
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
