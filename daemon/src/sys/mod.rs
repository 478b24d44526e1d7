//! Kernel calls that no safe crate wraps; the daemon's only `unsafe`.

mod lease;
mod memory;
mod stdio;
mod writeback;

pub(crate) use lease::is_in_use;
pub(crate) use memory::give_back_memory;
pub(crate) use stdio::take_standard_descriptors;
pub(crate) use writeback::start_writeback;
