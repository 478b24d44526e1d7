//! Kernel calls that no safe crate wraps; the daemon's only `unsafe`.

mod writeback;

pub(crate) use writeback::start_writeback;
