//! System calls without a safe wrapper: the only `unsafe` code in this crate.

mod memory;
mod peer;
mod rights;
mod shared_memory;
mod stdio;

pub(crate) use memory::limit_heaps;
pub(crate) use peer::{peer_groups, peer_pidfd};
pub(crate) use rights::{set_takes_descriptors, unreceived_bytes};
pub(crate) use shared_memory::{map_shared, shared_memory};
pub(crate) use stdio::{take_first_passed_descriptor, take_standard_descriptors};
