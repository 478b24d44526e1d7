//! The integration tests: one binary, one module per area.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod commands;
mod conformance;
mod hostile;
mod http;
mod layouts;
mod life;
mod locking;
mod no_space;
mod open;
mod peers;
mod pull;
mod sources;
mod zero_copy;
