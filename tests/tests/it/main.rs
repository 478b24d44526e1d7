//! The integration tests: one binary, one module per area.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod architecture;
mod commands;
mod concurrent;
mod conformance;
mod crash;
mod disk_faults;
mod gc_model;
mod hostile;
mod http;
mod layouts;
mod life;
mod locking;
mod no_space;
mod open;
mod peers;
mod pull;
mod reference_model;
mod sources;
mod zero_copy;
