//! What a daemon says about itself to monitoring: `Route::Metrics` and `Route::Health`, on the socket and on a port
//! of loopback.

// A request takes a thread only with its user's turn, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

mod health;
mod listener;
mod scrape;

pub(crate) use health::health;
pub(crate) use listener::MetricsServer;
pub(crate) use scrape::scrape;

/// The content type of Prometheus's text format.
pub(crate) const TEXT_FORMAT: &str = "text/plain; version=0.0.4; charset=utf-8";
