//! The tables of metrics that are set when the metrics are read.

use std::fs;

use blobd_client::protocol::space::DiskUsage;
use blobd_registry::FailureCounts;
use blobd_store::StoreEvents;
use prometheus::Error;
use rustix::param::{clock_ticks_per_second, page_size};
use rustix::process::{Resource, getrlimit};

use super::register::{Register, Row, Table, as_float, counter, counter_by, gauge, gauge_by, known};

/// The state of the daemon, and totals that its parts count themselves. Read without delay and without disk access.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Reading {
    pub(crate) sessions: usize,
    pub(crate) running_pulls: usize,
    pub(crate) running_pushes: usize,
    pub(crate) permits: Vec<Permits>,
    pub(crate) is_writable: bool,
    pub(crate) is_index_ready: bool,
    pub(crate) downloaded_bytes: u64,
    pub(crate) registry: FailureCounts,
    pub(crate) store: StoreEvents,
    /// Records of the audit log that were lost and omitted, by class.
    pub(crate) lost_records: Vec<(&'static str, u64)>,
    pub(crate) omitted_records: Vec<(&'static str, u64)>,
    pub(crate) records_not_forwarded: u64,
    pub(crate) unavailable_lower_stores: usize,
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

impl Reading {
    fn of_pools(&self, number: fn(&Permits) -> usize) -> Vec<(&str, f64)> {
        self.permits.iter().map(|permits| (permits.pool, as_float(number(permits) as u64))).collect()
    }
}

fn labelled<'v>(values: impl IntoIterator<Item = &'v (&'static str, u64)>) -> Vec<(&'v str, f64)> {
    values.into_iter().map(|(label, value)| (*label, as_float(*value))).collect()
}

const READING: &[Row<Reading>] = &[
    gauge("blobd_sessions", "Models that clients have open.", |reading| known(reading.sessions as u64)),
    gauge("blobd_pulls_running", "Pulls in progress, waiting ones included.", |reading| {
        known(reading.running_pulls as u64)
    }),
    gauge("blobd_pushes_running", "Pushes and transfers in progress, waiting ones included.", |reading| {
        known(reading.running_pushes as u64)
    }),
    gauge_by(
        &["pool"],
        "blobd_permits_in_use",
        "Units that requests hold, by pool; see docs/METRICS.md for the pools.",
        |reading| reading.of_pools(|permits| permits.in_use),
    ),
    gauge_by(
        &["pool"],
        "blobd_permits_waiting",
        "Requests that wait for units, of their user's share or of all, by pool.",
        |reading| reading.of_pools(|permits| permits.waiting),
    ),
    gauge_by(
        &["pool"],
        "blobd_permits_limit",
        "Units above which requests wait, unless their user holds none, by pool.",
        |reading| reading.of_pools(|permits| permits.total),
    ),
    gauge("blobd_store_writable", "1 if the store can be changed, 0 if it is read-only.", |reading| {
        known(u64::from(reading.is_writable))
    }),
    gauge("blobd_index_ready", "1 if the index is complete, 0 while it is loaded or rebuilt.", |reading| {
        known(u64::from(reading.is_index_ready))
    }),
    gauge(
        "blobd_lower_stores_unavailable",
        "Lower stores that could not be used when they were last searched; their models are hidden.",
        |reading| known(reading.unavailable_lower_stores as u64),
    ),
    counter("blobd_downloaded_bytes_total", "Bytes of model files received from registries.", |reading| {
        known(reading.downloaded_bytes)
    }),
    counter(
        "blobd_download_retries_total",
        "Requests to registries that were repeated after a failure.",
        |reading| known(reading.registry.retries),
    ),
    counter(
        "blobd_download_stalls_total",
        "Connections to registries that were given up because they delivered nothing or far less than others.",
        |reading| known(reading.registry.stalls),
    ),
    counter(
        "blobd_download_digest_mismatches_total",
        "Downloaded files that did not have their digest and were downloaded again.",
        |reading| known(reading.registry.wrong_files),
    ),
    counter(
        "blobd_gc_runs_total",
        "Collections: by gc, rm and eviction, and in the background.",
        |reading| known(reading.store.collections),
    ),
    counter("blobd_gc_freed_bytes_total", "Disk space that collections have freed.", |reading| {
        known(reading.store.freed_bytes)
    }),
    counter("blobd_evictions_total", "Models that were evicted.", |reading| {
        known(reading.store.evicted_models)
    }),
    counter("blobd_evicted_bytes_total", "Disk space that evictions have freed.", |reading| {
        known(reading.store.evicted_bytes)
    }),
    counter(
        "blobd_verify_failures_total",
        "Blobs that did not have their digest and were moved to quarantine.",
        |reading| known(reading.store.damaged_blobs),
    ),
    counter(
        "blobd_verified_bytes_total",
        "Bytes read to compare blobs with their digests, by verify and in the background.",
        |reading| known(reading.store.checked_bytes),
    ),
    counter(
        "blobd_index_rebuilds_total",
        "How often the index was built from the files of the store, or compared with all of them.",
        |reading| known(reading.store.index_rebuilds),
    ),
    counter_by(
        &["class"],
        "blobd_audit_records_lost_total",
        "Records that the audit log lacks because its disk was full, failed or was too slow, by class.",
        |reading| labelled(&reading.lost_records),
    ),
    counter_by(
        &["class"],
        "blobd_audit_records_omitted_total",
        "Records that the audit log counts and does not list, because one user caused too many, by class.",
        |reading| labelled(&reading.omitted_records),
    ),
    counter(
        "blobd_audit_records_not_forwarded_total",
        "Records that could not be sent to the journal.",
        |reading| known(reading.records_not_forwarded),
    ),
];

/// What alerts need most. It is read without counting over the index, so that it is also right when the store is damaged and
/// cannot be counted. `None` for what is not known.
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

const CONDITION: &[Row<ConditionReading>] = &[
    gauge(
        "blobd_used_bytes",
        "Disk space that counts against the quota, work in progress included.",
        |condition| known(condition.used),
    ),
    gauge(
        "blobd_quota_bytes",
        "The most disk space that the store may use; 0 without a quota.",
        |condition| known(condition.quota),
    ),
    gauge("blobd_free_bytes", "Free space on the file system of the store.", |condition| {
        known(condition.free)
    }),
    gauge("blobd_min_free_bytes", "Free space that blobd leaves on the file system.", |condition| {
        known(condition.min_free)
    }),
    gauge("blobd_damaged_blobs", "Blobs known to be damaged or missing.", |condition| {
        known(condition.damaged_blobs)
    }),
    gauge(
        "blobd_scrub_success_timestamp_seconds",
        "When the last verification of all blobs in the background ended, since unix epoch in seconds.",
        |condition| known(condition.verified),
    ),
];

/// Sizes of the store, which are counted over its index from time to time.
#[derive(Clone, Debug, Default)]
pub(crate) struct SizeReading {
    /// The parts of the store's directory, by kind; their sum is what it takes on disk.
    pub(crate) parts: Vec<(&'static str, u64)>,
    pub(crate) usage: DiskUsage,
    /// The groups whose members have a quota together.
    pub(crate) groups: Vec<GroupReading>,
    /// When they were counted, in Unix seconds.
    pub(crate) seconds: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupReading {
    /// As in the configuration.
    pub(crate) name: String,
    pub(crate) charged: u64,
    /// 0 without a hard limit.
    pub(crate) quota: u64,
}

impl SizeReading {
    fn of_groups(&self, bytes: fn(&GroupReading) -> u64) -> Vec<(&str, f64)> {
        self.groups.iter().map(|group| (&*group.name, as_float(bytes(group)))).collect()
    }
}

const SIZES: &[Row<SizeReading>] = &[
    gauge("blobd_logical_bytes", "Sum of the sizes of the models, each counted once.", |sizes| {
        known(sizes.usage.logical_bytes)
    }),
    gauge("blobd_stored_bytes", "Disk space of the blobs and recipes that models need.", |sizes| {
        known(sizes.usage.stored_bytes)
    }),
    gauge("blobd_saved_bytes", "Disk space saved because models share blobs.", |sizes| {
        known(sizes.usage.saved_bytes)
    }),
    gauge("blobd_reclaimable_bytes", "Disk space that blobd gc would free.", |sizes| {
        known(sizes.usage.reclaimable_bytes)
    }),
    gauge("blobd_blobs", "Number of blobs.", |sizes| known(sizes.usage.blob_count)),
    gauge("blobd_models", "Number of names of models.", |sizes| known(sizes.usage.models.len() as u64)),
    gauge_by(
        &["kind"],
        "blobd_disk_bytes",
        "What the store's directory takes on disk, by kind as in the rows of blobd df.",
        |sizes| labelled(&sizes.parts),
    ),
    gauge_by(
        &["group"],
        "blobd_group_charged_bytes",
        "Disk space that is charged to the members of a group.",
        |sizes| sizes.of_groups(|group| group.charged),
    ),
    gauge_by(
        &["group"],
        "blobd_group_quota_bytes",
        "The most that may be charged to the members of a group together; 0 without a hard limit.",
        |sizes| sizes.of_groups(|group| group.quota),
    ),
    gauge(
        "blobd_sizes_timestamp_seconds",
        "When the sizes were counted, since unix epoch in seconds.",
        |sizes| vec![("", sizes.seconds)],
    ),
];

const PROCESS: &[Row<Process>] = &[
    counter("process_cpu_seconds_total", "Total user and system CPU time spent in seconds.", |process| {
        vec![("", process.cpu_seconds)]
    }),
    gauge("process_resident_memory_bytes", "Resident memory size in bytes.", |process| {
        known(process.resident_bytes)
    }),
    gauge("process_virtual_memory_bytes", "Virtual memory size in bytes.", |process| {
        known(process.virtual_bytes)
    }),
    gauge("process_open_fds", "Number of open file descriptors.", |process| known(process.open_files)),
    gauge("process_max_fds", "Maximum number of open file descriptors.", |process| known(process.max_files)),
    gauge(
        "process_start_time_seconds",
        "Start time of the process since unix epoch in seconds.",
        |process| vec![("", process.start_seconds)],
    ),
];

/// The metrics that are set for every response.
pub(super) struct Readings {
    daemon: Table<Reading>,
    process: Table<Process>,
}

impl Readings {
    pub(super) fn new(register: &mut Register) -> Result<Self, Error> {
        let build = register.gauges(
            ("blobd_build_info", "Always 1; the labels are the version of blobd and of its protocol."),
            &["version", "protocol"],
        )?;
        let protocol = blobd_client::protocol::VERSION.to_string();
        build.with_label_values(&[env!("CARGO_PKG_VERSION"), &protocol]).set(1);
        Ok(Self { daemon: Table::new(register, READING)?, process: Table::new(register, PROCESS)? })
    }

    pub(super) fn set(&self, reading: &Reading) {
        self.daemon.set(reading);
        if let Some(process) = Process::read() {
            self.process.set(&process);
        }
    }
}

pub(super) fn condition(register: &mut Register) -> Result<Table<ConditionReading>, Error> {
    Table::new(register, CONDITION)
}

pub(super) fn sizes(register: &mut Register) -> Result<Table<SizeReading>, Error> {
    Table::new(register, SIZES)
}

/// This process as the kernel sees it.
#[derive(Clone, Copy, Debug, PartialEq)]
struct Process {
    cpu_seconds: f64,
    resident_bytes: u64,
    virtual_bytes: u64,
    open_files: u64,
    max_files: u64,
    /// Since 1970.
    start_seconds: f64,
}

impl Process {
    /// `None` without `/proc`.
    fn read() -> Option<Self> {
        let stat = fs::read_to_string("/proc/self/stat").ok()?;
        let boot = boot_seconds(&fs::read_to_string("/proc/stat").ok()?)?;
        let ticks = as_float(clock_ticks_per_second().max(1));
        let Fields { cpu_ticks, start_ticks, virtual_bytes, resident_pages } = Fields::parse(&stat)?;
        Some(Self {
            cpu_seconds: as_float(cpu_ticks) / ticks,
            resident_bytes: resident_pages.saturating_mul(page_size() as u64),
            virtual_bytes,
            // One of them is that of the directory itself.
            open_files: (fs::read_dir("/proc/self/fd").ok()?.count() as u64).saturating_sub(1),
            max_files: getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX),
            start_seconds: as_float(boot) + as_float(start_ticks) / ticks,
        })
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Fields {
    cpu_ticks: u64,
    start_ticks: u64,
    virtual_bytes: u64,
    resident_pages: u64,
}

impl Fields {
    /// Parses `/proc/self/stat`, see proc_pid_stat(5). The second field is the name in parentheses, which may contain
    /// spaces.
    fn parse(stat: &str) -> Option<Self> {
        let (_, rest) = stat.rsplit_once(')')?;
        let fields: Vec<&str> = rest.split_whitespace().collect();
        // The third field of the file is the first one here.
        let number = |field: usize| fields.get(field.checked_sub(3)?)?.parse::<u64>().ok();
        Some(Self {
            cpu_ticks: number(14)?.saturating_add(number(15)?),
            start_ticks: number(22)?,
            virtual_bytes: number(23)?,
            resident_pages: number(24)?,
        })
    }
}

fn boot_seconds(stat: &str) -> Option<u64> {
    stat.lines().find_map(|line| line.strip_prefix("btime "))?.trim().parse().ok()
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    #[test]
    fn fields_are_counted_after_a_name_with_spaces_and_parentheses() {
        let stat =
            "7 (a) b) S 1 2 3 4 5 6 7 8 9 10 100 20 0 0 20 0 5 0 4242 1000000 300 18446744073709551615";
        let fields = Fields::parse(stat).unwrap();
        let expected =
            Fields { cpu_ticks: 120, start_ticks: 4242, virtual_bytes: 1_000_000, resident_pages: 300 };
        assert_eq!(fields, expected);
        assert_eq!(Fields::parse("7 (a) S 1 2"), None);
    }

    #[test]
    fn this_process_runs_has_memory_and_has_started_before_now() {
        let process = Process::read().unwrap();
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64();
        assert!(process.start_seconds <= now + 1.0 && process.start_seconds > now - 1e6, "{process:?}");
        assert!(process.resident_bytes > 1 << 20 && process.virtual_bytes > process.resident_bytes);
        assert!(process.open_files >= 3 && process.max_files >= process.open_files, "{process:?}");
    }
}
