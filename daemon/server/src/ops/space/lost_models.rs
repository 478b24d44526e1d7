//! Reports of models that were removed, evicted or replaced.

use std::sync::{Arc, PoisonError};

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
    events: Option<Sender<PullProgress>>,
    models: Mutex<Vec<LostModel>>,
}

impl Evictions {
    /// Each eviction is sent to `events` at once.
    pub(crate) fn new(
        requester: Requester,
        cause: String,
        events: Option<Sender<PullProgress>>,
    ) -> Arc<Self> {
        Arc::new(Self { requester, cause, events, models: Mutex::default() })
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
        if let Some(events) = &self.events {
            let status = format!("evicted {}", model.name);
            let evicted = vec![model.clone()];
            send_progress(events, PullProgress { status, evicted, ..PullProgress::default() });
        }
        self.models.lock().unwrap_or_else(PoisonError::into_inner).push(model);
    }

    fn content_is_durable(&self) {
        if let Some(events) = &self.events {
            send_progress(events, PullProgress::working("writing manifest", Phase::Committing));
        }
    }
}
