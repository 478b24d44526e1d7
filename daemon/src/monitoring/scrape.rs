//! `GET /v1/metrics`

use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::space::UsageKind;
use blobd_registry::Troubles;
use blobd_store::StoreEvents;
use tokio::task::spawn_blocking;
use tokio::time::timeout;

use crate::metrics::{Permits, Reading, SizeReading};
use crate::ops::{self, OpError};
use crate::permits::PermitPool;
use crate::state::{Daemon, WorkLimits};

/// How long a response waits for sizes that are being counted. After that it has the earlier ones.
const SIZES_WAIT: Duration = Duration::from_millis(500);

/// The text of all metrics. Counts the sizes again if it is time to; see [`crate::metrics::Metrics::begin_sizes`].
pub(crate) async fn scrape(daemon: &Arc<Daemon>) -> Result<String, ErrorBody> {
    if daemon.metrics.begin_sizes(Instant::now()) {
        let daemon = Arc::clone(daemon);
        let counting = spawn_blocking(move || count_sizes(&daemon));
        let _earlier_sizes_if_it_takes_longer = timeout(SIZES_WAIT, counting).await;
    }
    let write = |daemon: &Daemon| {
        daemon.metrics.text(&reading(daemon)).map_err(|error| OpError::Internal(error.to_string()))
    };
    daemon.blocking(write).await.map_err(|error| error.body())
}

fn reading(daemon: &Daemon) -> Reading {
    let StoreEvents {
        collections,
        freed_bytes,
        evicted_models,
        evicted_bytes,
        damaged_blobs,
        checked_bytes,
        index_rebuilds,
    } = daemon.store.events();
    let Troubles { retries, stalls, wrong_files } = daemon.registry().troubles();
    Reading {
        sessions: daemon.sessions.count(),
        running_pulls: daemon.running_pulls.count(),
        permits: permits(daemon),
        is_writable: daemon.store.read_only_reason().is_none(),
        is_index_ready: daemon.store.catalog_now().is_some(),
        downloaded_bytes: daemon.transfers.received_bytes(),
        retries,
        stalls,
        wrong_files,
        collections,
        freed_bytes,
        evicted_models,
        evicted_bytes,
        damaged_blobs,
        checked_bytes,
        index_rebuilds,
        lost_audit_records: daemon.audit.status().dropped,
        unavailable_lower_stores: daemon.store.unavailable_lower_stores(),
    }
}

fn permits(daemon: &Daemon) -> Vec<Permits> {
    let limits = &daemon.limits;
    let WorkLimits {
        imports,
        requested_imports,
        file_readers,
        pulls,
        plans,
        inspections,
        surveys,
        verifications,
        fetches: _,
    } = &daemon.work;
    let pools: [(&'static str, &PermitPool); 13] = [
        ("lasting_connections", &limits.lasting),
        ("disk_work", &limits.disk),
        ("memory_kib", &limits.memory),
        ("opening_descriptors", &limits.opening),
        ("descriptors_in_flight", &limits.in_flight),
        ("imports", imports),
        ("requested_imports", requested_imports),
        ("file_readers", file_readers),
        ("pulls", pulls),
        ("pull_plans", plans),
        ("inspections", inspections),
        ("surveys", surveys),
        ("verifications", verifications),
    ];
    pools.map(|(pool, permits)| Permits { pool, in_use: permits.in_use(), total: permits.total() }).into()
}

/// Reads the disk, and takes time for a store with many models.
fn count_sizes(daemon: &Daemon) {
    let begun = Instant::now();
    let sizes = sizes(daemon).unwrap_or_else(|error| {
        tracing::debug!("metrics: the sizes are not counted: {error}");
        None
    });
    daemon.metrics.set_sizes(begun, sizes.as_ref());
}

/// `None` while the index is built.
fn sizes(daemon: &Daemon) -> Result<Option<SizeReading>, OpError> {
    if daemon.store.catalog_unless_building()?.is_none() {
        return Ok(None);
    }
    let usage = ops::usage(&daemon.store, &*daemon.last_opened)?;
    let mut parts: Vec<(&'static str, u64)> = KINDS.iter().map(|(_, name)| (*name, 0)).collect();
    for row in &usage.rows {
        let part = KINDS.iter().position(|(kind, _)| *kind == row.kind);
        if let Some((_, bytes)) = part.and_then(|part| parts.get_mut(part)) {
            *bytes = bytes.saturating_add(row.bytes);
        }
    }
    Ok(Some(SizeReading {
        parts,
        logical: usage.logical_bytes,
        stored: usage.physical_bytes,
        saved: usage.saved_bytes,
        reclaimable: usage.reclaimable_bytes,
        used: usage.used_bytes,
        quota: usage.quota_bytes.unwrap_or_default(),
        free: usage.free_bytes,
        min_free: usage.min_free_bytes,
        blobs: usage.blob_count,
        models: usage.models.len() as u64,
        damaged_blobs: daemon.store.damaged().len() as u64,
        seconds: SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs_f64(),
    }))
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
