//! Kernel calls that no safe crate wraps; the daemon's only `unsafe`.

mod memory;
mod rights;
mod stdio;

pub(crate) use memory::limit_heaps;
pub(crate) use rights::{set_takes_descriptors, unreceived_bytes};
pub(crate) use stdio::take_standard_descriptors;
