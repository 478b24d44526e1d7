//! The integration tests: one binary, one module per area.
#![allow(clippy::unwrap_used, clippy::expect_used)]

mod conformance;
mod hostile;
mod layouts;
mod life;
mod open;
mod sources;
mod zero_copy;
