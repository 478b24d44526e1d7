//! The text with the metrics.

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::pull::RunningKind;
use blobd_client::protocol::space::UsageKind;
use blobd_store::scrub::Cursor;
use blobd_store::{Payer, Pool};
use tokio::time::timeout;

use crate::audit::{AuditStatus, ByClass};
use crate::metrics::{ConditionReading, GroupReading, Permits, Reading, SizeReading};
use crate::ops::{self, OpError};
use crate::permits::PermitPool;
use crate::state::{Daemon, Turn, WorkLimits};

/// How long a response waits for readings of the disk and for the count of sizes. After that it has the earlier values.
const READ_LIMIT: Duration = Duration::from_millis(500);

/// The text of all metrics. Counts the sizes again if it is time to; see [`crate::metrics::Metrics::begin_sizes`].
pub(crate) async fn scrape(daemon: &Arc<Daemon>, turn: Turn) -> Result<String, ErrorBody> {
    within_limit(daemon, &daemon.work.sizes, count_sizes).await;
    // After the sizes: they make the used bytes known.
    let condition = |daemon: &Daemon| daemon.metrics.update_condition(|| condition(daemon));
    within_limit(daemon, &daemon.work.condition, condition).await;
    let write = |daemon: &Daemon| {
        daemon.metrics.text(&reading(daemon)).map_err(|error| OpError::Internal(error.to_string()))
    };
    daemon.blocking(turn, write).await.map_err(|error| error.body())
}

/// Lets `read` continue in the background if it takes longer. Reads nothing while an earlier reading continues: a disk
/// that does not respond blocks one thread, not one for each request.
async fn within_limit(
    daemon: &Arc<Daemon>,
    readings: &PermitPool,
    read: impl FnOnce(&Daemon) + Send + 'static,
) {
    let Ok(turn) = readings.try_acquire(rustix::process::geteuid().as_raw()) else { return };
    let read = move |daemon: &Daemon| {
        read(daemon);
        Ok(())
    };
    let _earlier_values_if_it_takes_longer = timeout(READ_LIMIT, daemon.blocking(turn.into(), read)).await;
}

/// Uses the file system's numbers, and counts nothing.
fn condition(daemon: &Daemon) -> ConditionReading {
    let status = daemon.store.ledger().space_status();
    let status =
        status.inspect_err(|error| tracing::debug!("metrics: the free space is unknown: {error}")).ok();
    ConditionReading {
        used: status.and_then(|status| status.used_bytes),
        quota: status.map(|status| status.quota_bytes.unwrap_or_default()),
        free: status.map(|status| status.free_bytes),
        min_free: status.map(|status| status.min_free_bytes),
        damaged_blobs: Some(daemon.store.content().known_damaged().len() as u64),
        verified: Cursor::load(&daemon.store).ended,
    }
}

fn reading(daemon: &Daemon) -> Reading {
    let registry = daemon.registry();
    let AuditStatus { dropped, omitted, not_forwarded, .. } = daemon.audit.status();
    let by_class =
        |counts: ByClass<u64>| counts.iter().map(|(class, count)| (class.name(), *count)).collect();
    let content = daemon.store.content();
    Reading {
        sessions: daemon.sessions.count(),
        running_pulls: daemon.running_pulls.count(|kind| kind == RunningKind::Pull),
        running_pushes: daemon.running_pulls.count(|kind| kind != RunningKind::Pull),
        permits: permits(daemon),
        is_writable: content.read_only_reason().is_none(),
        is_index_ready: content.index().catalog_now().is_some(),
        downloaded_bytes: registry.received_bytes(),
        registry: registry.failure_counts(),
        store: content.events(),
        lost_records: by_class(dropped),
        omitted_records: by_class(omitted),
        records_not_forwarded: not_forwarded,
        unavailable_lower_stores: content.unavailable_lower_stores(),
    }
}

fn permits(daemon: &Daemon) -> Vec<Permits> {
    let limits = &daemon.limits;
    let WorkLimits {
        imports,
        arriving_imports,
        edits,
        requested_imports,
        file_readers,
        pulls,
        pushes,
        plans,
        inspections,
        surveys,
        verifications,
        scrapes,
        served_reads,
        // The daemon uses these itself; no request waits for them.
        sizes: _,
        condition: _,
        fetches: _,
    } = &daemon.work;
    let pools: [(&'static str, &PermitPool); 22] = [
        ("http_connections", &limits.requesting),
        ("lasting_connections", &limits.lasting),
        ("disk_work", &limits.disk),
        ("memory_bytes", &limits.memory),
        ("small_memory_bytes", &limits.small_memory),
        ("opening_descriptors", &limits.opening),
        ("descriptors_in_flight", &limits.in_flight),
        ("imports", imports),
        ("arriving_imports", arriving_imports),
        ("edits", edits),
        ("requested_imports", requested_imports),
        ("file_readers", file_readers),
        ("pulls", pulls),
        ("pushes", pushes),
        ("pull_plans", plans),
        ("inspections", inspections),
        ("surveys", surveys),
        ("verifications", verifications),
        ("scrapes", scrapes),
        ("served_reads", served_reads),
        ("health_checks", &limits.health.turns),
        ("log_followers", &limits.log_followers),
    ];
    let permits = |(pool, permits): (&'static str, &PermitPool)| {
        // Units of memory are KiB; those of Prometheus have no prefixes.
        let unit = if pool.ends_with("_bytes") { 1 << 10 } else { 1 };
        Permits {
            pool,
            in_use: permits.in_use().saturating_mul(unit),
            waiting: permits.waiting(),
            total: permits.total().saturating_mul(unit),
        }
    };
    pools.map(permits).into()
}

/// Reads the disk; slow for a store with many models.
fn count_sizes(daemon: &Daemon) {
    let Some(count) = daemon.metrics.begin_sizes(Instant::now()) else { return };
    match sizes(daemon) {
        Ok(sizes) => sizes.iter().for_each(|sizes| count.set(sizes)),
        Err(error) => tracing::debug!("metrics: the sizes are not counted: {error}"),
    }
    // Afterwards it is known which damaged blobs a lower store has.
    let _damaged = daemon.store.content().damaged();
}

/// `None` while the index is built.
fn sizes(daemon: &Daemon) -> Result<Option<SizeReading>, OpError> {
    if daemon.store.content().index().catalog_unless_building()?.is_none() {
        return Ok(None);
    }
    // The ledger keeps the sum, which is then known although the store is damaged.
    let _used_bytes = daemon.store.ledger().used_bytes();
    let usage = ops::usage(&daemon.store, &*daemon.last_opened)?;
    let mut parts: Vec<(&'static str, u64)> = KINDS.iter().map(|(_, name)| (*name, 0)).collect();
    for row in &usage.rows {
        let part = KINDS.iter().position(|(kind, _)| *kind == row.kind);
        if let Some((_, bytes)) = part.and_then(|part| parts.get_mut(part)) {
            *bytes = bytes.saturating_add(row.bytes);
        }
    }
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64();
    Ok(Some(SizeReading { parts, usage, groups: groups(daemon)?, seconds }))
}

fn groups(daemon: &Daemon) -> Result<Vec<GroupReading>, OpError> {
    let group = |pool: &Pool| {
        let charged = daemon.store.liveness().charged_bytes_of(&Payer::Pool(pool.clone()))?;
        Ok(GroupReading { name: pool.name.clone(), charged, quota: pool.hard_bytes.unwrap_or_default() })
    };
    daemon.store.ledger().pools().iter().map(group).collect()
}

/// The names of `df`'s rows, as in its JSON, except that `unique` is what only one model needs.
const KINDS: [(UsageKind, &str); 14] = [
    (UsageKind::Model, "unique"),
    (UsageKind::Shared, "shared"),
    (UsageKind::InUse, "in_use"),
    (UsageKind::Download, "download"),
    (UsageKind::Staging, "staging"),
    (UsageKind::Trash, "trash"),
    (UsageKind::Quarantine, "quarantine"),
    (UsageKind::Unneeded, "unneeded"),
    (UsageKind::Records, "records"),
    (UsageKind::Index, "index"),
    (UsageKind::Audit, "audit"),
    (UsageKind::Reserve, "reserve"),
    (UsageKind::Directories, "directories"),
    (UsageKind::Other, "other"),
];
