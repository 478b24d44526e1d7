//! The protocol on the daemon's Unix socket, used by both ends.
//!
//! HTTP/1.1 with JSON for everything that answers with text; after an upgrade, frames with
//! descriptors attached. `docs/PROTOCOL.md` is its specification; the types here are its words.

pub mod connection;
pub mod error;
pub mod frame;
pub mod request;
pub mod response;
pub mod upkeep;

/// The protocol's version, as `GET /v1/version` tells it.
pub const VERSION: u32 = 1;

/// What both ends write into the `Upgrade` header to switch from HTTP to frames.
pub const UPGRADE: &str = "blobd-fd/1";

/// The most layers of an open answer, whose head lists them all in one frame. Most models have about
/// ten; those with a layer for each tensor, up to 2,000.
pub const MAX_OPEN_LAYERS: usize = 4096;

/// The most descriptors that travel in one batch and wait for one acknowledgement. The kernel
/// counts descriptors in flight per sending user; a client that never reads must not be able to
/// use up the daemon's share.
pub const MAX_FDS_PER_BATCH: usize = 64;
