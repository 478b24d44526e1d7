//! Sizes of the store, which are counted over its index from time to time.

use prometheus::{Error, Gauge};

use super::register::{Register, UintGauge, UintGauges};

/// Sizes in bytes, and numbers.
#[derive(Clone, Debug, Default, PartialEq)]
pub(crate) struct SizeReading {
    /// The parts of the store's directory, by kind; their sum is what it takes on disk.
    pub(crate) parts: Vec<(&'static str, u64)>,
    pub(crate) logical: u64,
    pub(crate) stored: u64,
    pub(crate) saved: u64,
    pub(crate) reclaimable: u64,
    pub(crate) blobs: u64,
    pub(crate) models: u64,
    /// The groups whose members have a quota together.
    pub(crate) groups: Vec<GroupReading>,
    /// When it was determined, in seconds since 1970.
    pub(crate) seconds: f64,
}

/// What is charged to the members of a group.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupReading {
    /// As in the configuration.
    pub(crate) name: String,
    pub(crate) charged: u64,
    /// 0 without a hard limit.
    pub(crate) quota: u64,
}

#[derive(Debug)]
pub(super) struct Sizes {
    parts: UintGauges,
    logical: UintGauge,
    stored: UintGauge,
    saved: UintGauge,
    reclaimable: UintGauge,
    blobs: UintGauge,
    models: UintGauge,
    group_charged: UintGauges,
    group_quota: UintGauges,
    seconds: Gauge,
}

impl Sizes {
    pub(super) fn new(register: &mut Register) -> Result<Self, Error> {
        let mut gauge = |name, help| register.gauge((name, help));
        Ok(Self {
            logical: gauge("blobd_logical_bytes", "Sum of the sizes of all models.")?,
            stored: gauge("blobd_stored_bytes", "Disk space of blobs and recipes.")?,
            saved: gauge("blobd_saved_bytes", "Disk space saved because models share blobs.")?,
            reclaimable: gauge("blobd_reclaimable_bytes", "Disk space that blobd gc would free.")?,
            blobs: gauge("blobd_blobs", "Number of blobs.")?,
            models: gauge("blobd_models", "Number of names of models.")?,
            parts: register.gauges(
                (
                    "blobd_disk_bytes",
                    "What the store's directory takes on disk, by kind as in the rows of blobd df.",
                ),
                &["kind"],
            )?,
            group_charged: register.gauges(
                ("blobd_group_charged_bytes", "Disk space that is charged to the members of a group."),
                &["group"],
            )?,
            group_quota: register.gauges(
                (
                    "blobd_group_quota_bytes",
                    "The most that may be charged to the members of a group together; 0 without a hard limit.",
                ),
                &["group"],
            )?,
            seconds: register.time_gauge((
                "blobd_sizes_timestamp_seconds",
                "When the sizes were counted, since unix epoch in seconds.",
            ))?,
        })
    }

    pub(super) fn set(&self, sizes: &SizeReading) {
        for (kind, bytes) in &sizes.parts {
            self.parts.with_label_values(&[kind]).set(*bytes);
        }
        for (gauge, value) in [
            (&self.logical, sizes.logical),
            (&self.stored, sizes.stored),
            (&self.saved, sizes.saved),
            (&self.reclaimable, sizes.reclaimable),
            (&self.blobs, sizes.blobs),
            (&self.models, sizes.models),
        ] {
            gauge.set(value);
        }
        // A group may have lost its quota.
        self.group_charged.reset();
        self.group_quota.reset();
        for GroupReading { name, charged, quota } in &sizes.groups {
            self.group_charged.with_label_values(&[name]).set(*charged);
            self.group_quota.with_label_values(&[name]).set(*quota);
        }
        self.seconds.set(sizes.seconds);
    }
}
