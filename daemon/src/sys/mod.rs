//! Kernel calls that no safe crate wraps; the daemon's only `unsafe`.

mod lease;
mod writeback;

pub(crate) use lease::is_in_use;
pub(crate) use writeback::start_writeback;
