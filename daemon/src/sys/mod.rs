//! Kernel calls that no safe crate wraps; the daemon's only `unsafe`.

mod lease;
mod memory;
mod rights;
mod stdio;
mod writeback;

pub(crate) use lease::is_in_use;
pub(crate) use memory::{give_back_memory, limit_heaps};
pub(crate) use rights::{set_takes_descriptors, unreceived_bytes};
pub(crate) use stdio::take_standard_descriptors;
pub(crate) use writeback::start_writeback;
