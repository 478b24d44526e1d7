//! The protocol on the daemon's Unix socket, used by client and daemon.
//!
//! Requests are HTTP/1.1 with JSON. Open and import upgrade their connection to frames, which can
//! have descriptors attached. `docs/PROTOCOL.md` is the specification.

pub mod access;
pub mod accounts;
pub mod audit;
pub mod chosen;
pub mod configuration;
pub mod connection;
pub mod corrected;
pub mod edit;
pub mod error;
pub mod event;
pub mod fit;
pub mod frame;
pub mod heads;
pub mod health;
pub mod history;
pub mod lost_model;
pub mod lower_store;
pub mod model_tensor;
pub mod params;
pub mod policy;
pub mod promote;
pub mod pull_plan;
pub mod pulls;
pub mod request;
pub mod request_id;
pub mod response;
pub mod route;
pub mod space;
pub mod upkeep;

/// The protocol's version, as in the response to `Route::Version`.
pub const VERSION: u32 = 1;

/// The value of the `Upgrade` header that switches from HTTP to frames.
pub const UPGRADE: &str = "blobd-fd/1";

/// The most layers in a response to an open: its head lists all of them in one frame. Most models have
/// about ten; models with one layer per tensor have up to 2,000.
pub const MAX_OPEN_LAYERS: usize = 4096;

/// The most descriptors in one batch; the client acknowledges each batch. The kernel limits the
/// descriptors in flight per sending user, and a client that never reads must not use up the
/// daemon's limit.
pub const MAX_FDS_PER_BATCH: usize = 64;
