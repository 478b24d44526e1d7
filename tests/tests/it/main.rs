//! The integration tests: one binary, one module per area.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod architecture;
mod commands;
mod concurrent;
mod conformance;
mod eviction;
mod gc_model;
mod hostile;
mod http;
mod layouts;
mod life;
mod locking;
mod no_space;
mod open;
mod operations;
mod owner;
mod peers;
mod pull;
mod reference_model;
mod sources;
mod space;
mod together;
mod trash;
mod verify;
mod zero_copy;
