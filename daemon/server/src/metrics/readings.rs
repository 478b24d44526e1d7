//! What is read from the daemon's parts when the metrics are read. Takes no time and no disk access.

use prometheus::{Counter, Error, Gauge, IntCounter, IntCounterVec};

use super::process::Process;
use super::register::{Register, UintGauge, UintGauges};

/// The state of the daemon, and totals that its parts count themselves.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) sessions: usize,
    pub(crate) running_pulls: usize,
    pub(crate) permits: Vec<Permits>,
    pub(crate) is_writable: bool,
    pub(crate) is_index_ready: bool,
    pub(crate) downloaded_bytes: u64,
    pub(crate) retries: u64,
    pub(crate) stalls: u64,
    pub(crate) wrong_files: u64,
    pub(crate) collections: u64,
    pub(crate) freed_bytes: u64,
    pub(crate) evicted_models: u64,
    pub(crate) evicted_bytes: u64,
    pub(crate) damaged_blobs: u64,
    pub(crate) checked_bytes: u64,
    pub(crate) index_rebuilds: u64,
    pub(crate) audit: AuditReading,
    pub(crate) unavailable_lower_stores: usize,
}

/// Records of the audit log, in total and by class.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct AuditReading {
    pub(crate) lost: Vec<(&'static str, u64)>,
    pub(crate) omitted: Vec<(&'static str, u64)>,
    pub(crate) not_forwarded: u64,
}

/// The use of one pool of permits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Permits {
    /// One of a fixed list.
    pub(crate) pool: &'static str,
    pub(crate) in_use: usize,
    /// Requests.
    pub(crate) waiting: usize,
    pub(crate) total: usize,
}

#[derive(Debug)]
pub(super) struct Readings {
    sessions: UintGauge,
    running_pulls: UintGauge,
    permits: PermitGauges,
    process: ProcessGauges,
    is_writable: UintGauge,
    is_index_ready: UintGauge,
    downloaded_bytes: IntCounter,
    retries: IntCounter,
    stalls: IntCounter,
    wrong_files: IntCounter,
    collections: IntCounter,
    freed_bytes: IntCounter,
    evicted_models: IntCounter,
    evicted_bytes: IntCounter,
    damaged_blobs: IntCounter,
    checked_bytes: IntCounter,
    index_rebuilds: IntCounter,
    audit: AuditCounters,
    unavailable_lower_stores: UintGauge,
}

impl Readings {
    pub(super) fn new(register: &mut Register) -> Result<Self, Error> {
        let build = register.gauges(
            ("blobd_build_info", "Always 1; the labels are the version of blobd and of its protocol."),
            &["version", "protocol"],
        )?;
        let protocol = blobd_client::protocol::VERSION.to_string();
        build.with_label_values(&[env!("CARGO_PKG_VERSION"), &protocol]).set(1);
        Ok(Self {
            sessions: register.gauge(("blobd_sessions", "Models that clients have open."))?,
            running_pulls: register.gauge(("blobd_pulls_running", "Pulls in progress, waiting ones included."))?,
            permits: PermitGauges::new(register)?,
            process: ProcessGauges::new(register)?,
            is_writable: register
                .gauge(("blobd_store_writable", "1 if the store can be changed, 0 if it is read-only."))?,
            is_index_ready: register
                .gauge(("blobd_index_ready", "1 if the index is complete, 0 while it is loaded or rebuilt."))?,
            downloaded_bytes: register
                .counter(("blobd_downloaded_bytes_total", "Bytes of model files received from registries."))?,
            retries: register.counter((
                "blobd_download_retries_total",
                "Requests to registries that were repeated after a failure.",
            ))?,
            stalls: register.counter((
                "blobd_download_stalls_total",
                "Connections to registries that were given up because they delivered nothing or far less than others.",
            ))?,
            wrong_files: register.counter((
                "blobd_download_digest_mismatches_total",
                "Downloaded files that did not have their digest and were downloaded again.",
            ))?,
            collections: register
                .counter(("blobd_gc_runs_total", "Collections: by gc, rm and eviction, and in the background."))?,
            freed_bytes: register
                .counter(("blobd_gc_freed_bytes_total", "Disk space that collections have freed."))?,
            evicted_models: register.counter(("blobd_evictions_total", "Models that were evicted."))?,
            evicted_bytes: register
                .counter(("blobd_evicted_bytes_total", "Disk space that evictions have freed."))?,
            damaged_blobs: register.counter((
                "blobd_verify_failures_total",
                "Blobs that did not have their digest and were moved to quarantine.",
            ))?,
            checked_bytes: register.counter((
                "blobd_verified_bytes_total",
                "Bytes read to compare blobs with their digests, by verify and in the background.",
            ))?,
            index_rebuilds: register.counter((
                "blobd_index_rebuilds_total",
                "How often the index was built from the files of the store, or compared with all of them.",
            ))?,
            audit: AuditCounters::new(register)?,
            unavailable_lower_stores: register.gauge((
                "blobd_lower_stores_unavailable",
                "Lower stores that could not be used when they were last searched; their models are hidden.",
            ))?,
        })
    }

    pub(super) fn set(&self, reading: &Reading) {
        self.sessions.set(reading.sessions as u64);
        self.running_pulls.set(reading.running_pulls as u64);
        reading.permits.iter().for_each(|permits| self.permits.set(permits));
        self.is_writable.set(reading.is_writable.into());
        self.is_index_ready.set(reading.is_index_ready.into());
        self.unavailable_lower_stores.set(reading.unavailable_lower_stores as u64);
        for (counter, total) in [
            (&self.downloaded_bytes, reading.downloaded_bytes),
            (&self.retries, reading.retries),
            (&self.stalls, reading.stalls),
            (&self.wrong_files, reading.wrong_files),
            (&self.collections, reading.collections),
            (&self.freed_bytes, reading.freed_bytes),
            (&self.evicted_models, reading.evicted_models),
            (&self.evicted_bytes, reading.evicted_bytes),
            (&self.damaged_blobs, reading.damaged_blobs),
            (&self.checked_bytes, reading.checked_bytes),
            (&self.index_rebuilds, reading.index_rebuilds),
            (&self.audit.not_forwarded, reading.audit.not_forwarded),
        ] {
            // A reading that was taken earlier may come later.
            counter.inc_by(total.saturating_sub(counter.get()));
        }
        self.audit.set_by_class(&reading.audit);
        if let Some(process) = Process::read() {
            self.process.set(&process);
        }
    }
}

#[derive(Debug)]
struct AuditCounters {
    lost: IntCounterVec,
    omitted: IntCounterVec,
    not_forwarded: IntCounter,
}

impl AuditCounters {
    fn new(register: &mut Register) -> Result<Self, Error> {
        Ok(Self {
            lost: register.counters(
                (
                    "blobd_audit_records_lost_total",
                    "Records that the audit log lacks because its disk was full, failed or was too slow, by class.",
                ),
                &["class"],
            )?,
            omitted: register.counters(
                (
                    "blobd_audit_records_omitted_total",
                    "Records that the audit log counts and does not list, because one user caused too many, by class.",
                ),
                &["class"],
            )?,
            not_forwarded: register.counter((
                "blobd_audit_records_not_forwarded_total",
                "Records that could not be sent to the journal.",
            ))?,
        })
    }

    fn set_by_class(&self, reading: &AuditReading) {
        for (counters, by_class) in [(&self.lost, &reading.lost), (&self.omitted, &reading.omitted)] {
            for (class, total) in by_class {
                let counter = counters.with_label_values(&[class]);
                // A reading that was taken earlier may come later.
                counter.inc_by(total.saturating_sub(counter.get()));
            }
        }
    }
}

/// By pool.
#[derive(Debug)]
struct PermitGauges {
    in_use: UintGauges,
    waiting: UintGauges,
    limit: UintGauges,
}

impl PermitGauges {
    fn new(register: &mut Register) -> Result<Self, Error> {
        let mut gauges = |name, help| register.gauges((name, help), &["pool"]);
        Ok(Self {
            in_use: gauges(
                "blobd_permits_in_use",
                "Units that requests hold, by pool; see docs/METRICS.md for the pools.",
            )?,
            waiting: gauges(
                "blobd_permits_waiting",
                "Requests that wait for units, of their user's share or of all, by pool.",
            )?,
            limit: gauges(
                "blobd_permits_limit",
                "Units above which requests wait, unless their user holds none, by pool.",
            )?,
        })
    }

    fn set(&self, permits: &Permits) {
        let Permits { pool, in_use, waiting, total } = *permits;
        for (gauges, value) in [(&self.in_use, in_use), (&self.waiting, waiting), (&self.limit, total)] {
            gauges.with_label_values(&[pool]).set(value as u64);
        }
    }
}

#[derive(Debug)]
struct ProcessGauges {
    cpu_seconds: Counter,
    resident_bytes: UintGauge,
    virtual_bytes: UintGauge,
    open_files: UintGauge,
    max_files: UintGauge,
    start_seconds: Gauge,
}

impl ProcessGauges {
    fn new(register: &mut Register) -> Result<Self, Error> {
        Ok(Self {
            cpu_seconds: register.seconds_counter((
                "process_cpu_seconds_total",
                "Total user and system CPU time spent in seconds.",
            ))?,
            resident_bytes: register
                .gauge(("process_resident_memory_bytes", "Resident memory size in bytes."))?,
            virtual_bytes: register
                .gauge(("process_virtual_memory_bytes", "Virtual memory size in bytes."))?,
            open_files: register.gauge(("process_open_fds", "Number of open file descriptors."))?,
            max_files: register.gauge(("process_max_fds", "Maximum number of open file descriptors."))?,
            start_seconds: register.time_gauge((
                "process_start_time_seconds",
                "Start time of the process since unix epoch in seconds.",
            ))?,
        })
    }

    fn set(&self, process: &Process) {
        self.cpu_seconds.inc_by((process.cpu_seconds - self.cpu_seconds.get()).max(0.0));
        self.resident_bytes.set(process.resident_bytes);
        self.virtual_bytes.set(process.virtual_bytes);
        self.open_files.set(process.open_files);
        self.max_files.set(process.max_files);
        self.start_seconds.set(process.start_seconds);
    }
}
