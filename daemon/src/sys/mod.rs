//! System calls without a safe wrapper: the only `unsafe` code in this crate.

mod memory;
mod rights;
mod stdio;

pub(crate) use memory::limit_heaps;
pub(crate) use rights::{set_takes_descriptors, unreceived_bytes};
pub(crate) use stdio::take_standard_descriptors;
