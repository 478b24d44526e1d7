//! What alerts need most: free space, the quota and known damage. They are read without counting over the index, so that
//! they are also right when the store is damaged and cannot be counted.

use prometheus::Error;

use super::register::{OptionalGauge, Register};

/// `None` for what is not known.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ConditionReading {
    pub(crate) used: Option<u64>,
    /// 0 without a quota.
    pub(crate) quota: Option<u64>,
    pub(crate) free: Option<u64>,
    pub(crate) min_free: Option<u64>,
    pub(crate) damaged_blobs: Option<u64>,
    /// When the last complete pass of the scrubber ended, in Unix seconds.
    pub(crate) verified: Option<u64>,
}

#[derive(Debug)]
pub(super) struct Condition {
    used: OptionalGauge,
    quota: OptionalGauge,
    free: OptionalGauge,
    min_free: OptionalGauge,
    damaged_blobs: OptionalGauge,
    verified: OptionalGauge,
}

impl Condition {
    pub(super) fn new(register: &mut Register) -> Result<Self, Error> {
        let mut gauge = |name, help| register.optional_gauge((name, help));
        Ok(Self {
            used: gauge(
                "blobd_used_bytes",
                "Disk space that counts against the quota, work in progress included.",
            )?,
            quota: gauge(
                "blobd_quota_bytes",
                "The most disk space that the store may use; 0 without a quota.",
            )?,
            free: gauge("blobd_free_bytes", "Free space on the file system of the store.")?,
            min_free: gauge("blobd_min_free_bytes", "Free space that blobd leaves on the file system.")?,
            damaged_blobs: gauge("blobd_damaged_blobs", "Blobs known to be damaged or missing.")?,
            verified: gauge(
                "blobd_scrub_success_timestamp_seconds",
                "When the last verification of all blobs in the background ended, since unix epoch in seconds.",
            )?,
        })
    }

    pub(super) fn set(&self, reading: &ConditionReading) {
        let ConditionReading { used, quota, free, min_free, damaged_blobs, verified } = *reading;
        self.used.set(used);
        self.quota.set(quota);
        self.free.set(free);
        self.min_free.set(min_free);
        self.damaged_blobs.set(damaged_blobs);
        self.verified.set(verified);
    }
}
