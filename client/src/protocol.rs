//! The protocol on the daemon's Unix socket, used by client and daemon.
//!
//! Requests are HTTP/1.1 with JSON. Open and import upgrade their connection to frames, which can
//! have descriptors attached. `docs/PROTOCOL.md` is the specification.

pub mod access;
pub mod audit;
pub mod connection;
pub mod error;
pub mod event;
pub mod fit;
pub mod frame;
pub mod lists;
pub mod naming;
pub mod params;
pub mod pull;
pub mod push;
pub mod request;
pub mod request_id;
pub mod response;
pub mod route;
pub mod signatures;
pub mod space;
pub mod upkeep;

/// The protocol's version, as in the response to `Route::Version`.
pub const VERSION: u32 = 1;

/// A value of a model's metadata, abridged: a long array is `{"type":…,"count":…,"first":[…]}`, a long text
/// `{"type":"string","bytes":…}`, and bytes that are not UTF-8 `{"base64":…}`.
pub type MetadataValue = serde_json::Value;

/// A time in the form of RFC 3339, in UTC, such as `2026-11-23T15:31:42Z`. It may have fractions of a second.
pub type Time = String;

/// The value of the `Upgrade` header that switches from HTTP to frames.
pub const UPGRADE: &str = "blobd-fd/1";

/// The most layers in a response to an open: its head lists all of them in one frame. Most models have
/// about ten; models with one layer per tensor have up to 2,000.
pub const MAX_OPEN_LAYERS: usize = 4096;

/// The most descriptors in one batch; the client acknowledges each batch. The kernel limits the
/// descriptors in flight per sending user, and a client that never reads must not use up the
/// daemon's limit.
pub const MAX_FDS_PER_BATCH: usize = 64;

/// The most files of an import whose descriptors the daemon requests at a time, so that neither side has the files of
/// a large folder open at once.
pub const MAX_WANTED_FILES: usize = 16;
