//! When and by whom models were last used.

use std::collections::HashMap;
use std::time::{SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;

/// The last use of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ModelUse {
    /// When it was used.
    pub at: SystemTime,
    /// The user who used it, if that is recorded.
    pub uid: Option<u32>,
}

/// The last uses, by the digest of the manifest.
pub(super) type Uses = HashMap<Digest, LastUse>;

/// The last use of a model, as it is stored.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct LastUse {
    /// Seconds since 1970.
    pub(super) seconds: u64,
    pub(super) uid: Option<u32>,
}

/// The entry among the uses that says since when they are recorded. No manifest has this digest.
pub(super) const RECORDED_SINCE: Digest = Digest::from_bytes([0; 32]);

/// In seconds since 1970.
pub(super) fn now() -> u64 {
    UNIX_EPOCH.elapsed().unwrap_or_default().as_secs()
}
