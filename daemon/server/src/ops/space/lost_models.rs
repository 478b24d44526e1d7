//! Reports of models that were removed, evicted or replaced.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use blobd_client::protocol::event::{Phase, Progress as _};
use blobd_client::protocol::naming::{Kept, LostModel};
use blobd_client::protocol::pull::PullProgress;
use blobd_store::gc::{self, KeptBytes, Untagged};
use blobd_store::{Committed, EvictionObserver, Ingest, Store};
use tokio::sync::mpsc::Sender;
use tracing_mutex::stdsync::Mutex;

use crate::ops::{rfc3339, send_progress};
use crate::requester::Requester;
use crate::verb_log;

/// Reports the model that the commit has displaced, if any.
///
/// If the trash does not keep it and the requester has a quota, what only that model needed is deleted at once, or else
/// charged to the requester until it is: otherwise new versions of one name could fill the disk.
pub(crate) fn displaced(store: &Store, requester: Requester, committed: Committed) -> Vec<LostModel> {
    let Some(displaced) = committed.displaced else { return Vec::new() };
    let kept_until = displaced.kept_until;
    let untagged = [displaced.untagged(store.liveness())];
    let account = match (kept_until, requester.limits(store).is_empty()) {
        (None, false) => collect_displaced(store, requester.uid(), &untagged),
        _ => gc::LossReport::new(store.liveness(), &untagged, &[]),
    };
    let kept_until = kept_until.map(rfc3339);
    let lost = account.models.into_iter().map(lost_model);
    lost.map(|lost| LostModel { kept_until: kept_until.clone(), ..lost }).collect()
}

fn collect_displaced(store: &Store, uid: u32, untagged: &[Untagged]) -> gc::LossReport {
    let nodes = untagged.iter().flat_map(|model| model.nodes.iter().copied());
    store.liveness().charge_displaced(uid, nodes);
    let (account, deleted) = gc::free(store.liveness(), untagged);
    if let Err(error) = deleted {
        tracing::warn!("{error}; what the name kept before stays, and is charged to uid {uid}");
    }
    account
}

pub(super) fn lost_model(model: gc::LostModel) -> LostModel {
    LostModel {
        name: model.reference.short(),
        digest: model.manifest,
        size: model.size,
        freed_bytes: model.freed_bytes,
        reclaimable_bytes: model.reclaimable_bytes,
        kept: model.kept.into_iter().map(kept).collect(),
        kept_until: None,
    }
}

pub(super) fn kept(kept: KeptBytes) -> Kept {
    Kept { bytes: kept.bytes, by: kept.by }
}

/// Collects and logs the models that are evicted for one transaction.
#[derive(Debug)]
pub(crate) struct Evictions {
    requester: Requester,
    /// The work that needs the space, such as `pull of llama3:8b`.
    cause: String,
    reports_to: ReportsTo,
    models: Mutex<Vec<LostModel>>,
}

/// Who is told how far the transaction is.
#[derive(Debug)]
pub(crate) enum ReportsTo {
    Nobody,
    /// A pull, with the time of the last line about stored blobs.
    Pull(Sender<PullProgress>, Mutex<Option<Instant>>),
    Import(Arc<StoredBlobs>),
}

impl ReportsTo {
    pub(crate) fn pull(events: Sender<PullProgress>) -> Self {
        Self::Pull(events, Mutex::default())
    }
}

/// How many blobs an import has stored, for another thread that reports it.
#[derive(Debug, Default)]
pub struct StoredBlobs {
    done: AtomicU64,
    expected: AtomicU64,
    are_durable: AtomicBool,
}

impl StoredBlobs {
    /// How many blobs are stored, and how many will be.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.expected.load(Ordering::Relaxed))
    }

    /// Whether all content is durable, and only the name is missing.
    #[must_use]
    pub fn are_durable(&self) -> bool {
        self.are_durable.load(Ordering::Relaxed)
    }
}

impl Evictions {
    pub(crate) fn new(requester: Requester, cause: String, reports_to: ReportsTo) -> Arc<Self> {
        Arc::new(Self { requester, cause, reports_to, models: Mutex::default() })
    }

    /// Collects the evictions for this transaction here.
    pub(crate) fn observe(self: &Arc<Self>, ingest: Ingest) -> Ingest {
        ingest.report_evictions_to(Arc::<Self>::clone(self))
    }

    pub(crate) fn take(&self) -> Vec<LostModel> {
        std::mem::take(&mut self.models.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

impl EvictionObserver for Evictions {
    fn evicted(&self, model: &gc::LostModel) {
        let model = lost_model(model.clone());
        verb_log::evicted(self.requester, &self.cause, &model);
        if let ReportsTo::Pull(events, _) = &self.reports_to {
            let status = format!("evicted {}", model.name);
            let evicted = vec![model.clone()];
            send_progress(events, PullProgress { status, evicted, ..PullProgress::default() });
        }
        self.models.lock().unwrap_or_else(PoisonError::into_inner).push(model);
    }

    fn content_is_durable(&self) {
        match &self.reports_to {
            ReportsTo::Nobody => {}
            ReportsTo::Pull(events, _) => {
                send_progress(events, PullProgress::working("writing manifest", Phase::Committing));
            }
            ReportsTo::Import(stored) => stored.are_durable.store(true, Ordering::Relaxed),
        }
    }

    fn blob_is_stored(&self, done: u64, expected: u64) {
        match &self.reports_to {
            ReportsTo::Nobody => {}
            ReportsTo::Pull(events, last) => send_stored(events, last, (done, expected)),
            ReportsTo::Import(stored) => {
                stored.done.store(done, Ordering::Relaxed);
                stored.expected.store(expected, Ordering::Relaxed);
            }
        }
    }
}

/// Sends how many blobs of a file are stored, unless that was sent a moment ago.
fn send_stored(events: &Sender<PullProgress>, last: &Mutex<Option<Instant>>, (done, expected): (u64, u64)) {
    const INTERVAL: Duration = Duration::from_millis(100);
    let mut last = last.lock().unwrap_or_else(PoisonError::into_inner);
    if done < expected && last.is_some_and(|last| last.elapsed() < INTERVAL) {
        return;
    }
    *last = Some(Instant::now());
    let progress = PullProgress::working("storing tensors", Phase::Writing);
    let (phase_completed, phase_total) = (Some(done), Some(expected));
    send_progress(events, PullProgress { phase_completed, phase_total, ..progress });
}
