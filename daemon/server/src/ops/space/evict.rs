//! `evict`: frees space by policy, or reports what it would remove. It collects unneeded data before it removes any model.

use std::fmt;
use std::sync::{Arc, PoisonError, Weak};
use std::time::Duration;

use blobd_client::protocol::naming::{self, Spared};
use blobd_client::protocol::upkeep::{Eviction, EvictionPlan};
use blobd_store::gc::{self, LostModel};
use blobd_store::index::ModelUse;
use blobd_store::{EvictionObserver, MakeSpace, Store, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::Mutex;

use super::lost_models::lost_model;
use crate::ops::{OpError, rfc3339};
use crate::requester::Requester;
use crate::verb_log;

/// Returns when and by whom a model was last opened, if known.
pub type LastOpened = dyn Fn(&Reference, Digest) -> Option<ModelUse> + Send + Sync;

/// Records an evicted model and the reason: `space` or `quota`.
pub type EvictionReport = dyn Fn(&str, &naming::LostModel) + Send + Sync;

/// Evicts models when space is needed, if the policy allows.
pub struct Evictor {
    store: Weak<Store>,
    last_opened: Arc<LastOpened>,
    report: Box<EvictionReport>,
    /// Serializes evictions: two at a time would choose the same models.
    running: Mutex<()>,
}

impl fmt::Debug for Evictor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Evictor").finish_non_exhaustive()
    }
}

impl Evictor {
    /// An evictor for a store, to be given to [`blobd_store::Liveness::set_space_maker`].
    pub fn new(store: &Arc<Store>, last_opened: Arc<LastOpened>, report: Box<EvictionReport>) -> Self {
        Self { store: Arc::downgrade(store), last_opened, report, running: Mutex::default() }
    }
}

impl MakeSpace for Evictor {
    fn make_space(&self, bytes: u64, observer: Option<&dyn EvictionObserver>) -> Result<bool, StoreError> {
        /// Blobs may be in use only briefly, for instance by a commit or a verification.
        const RETRY_DELAYS: [Duration; 3] =
            [Duration::ZERO, Duration::from_millis(100), Duration::from_millis(300)];
        let Some(store) = self.store.upgrade() else { return Ok(false) };
        if store.ledger().space_policy().eviction == blobd_store::Eviction::Never {
            return Ok(false);
        }
        let _running = self.running.lock().unwrap_or_else(PoisonError::into_inner);
        for delay in RETRY_DELAYS {
            std::thread::sleep(delay);
            if self.try_to_make_space(&store, bytes, observer)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

impl Evictor {
    fn try_to_make_space(
        &self,
        store: &Store,
        bytes: u64,
        observer: Option<&dyn EvictionObserver>,
    ) -> Result<bool, StoreError> {
        if store.ledger().shortage(bytes) == 0 {
            // Another request has just freed enough.
            return Ok(true);
        }
        gc::collect(store.liveness())?;
        let needed = store.ledger().shortage(bytes);
        if needed == 0 {
            return Ok(true);
        }
        // Preferably down to the low watermark, so that the next eviction is later.
        let goals = [needed.max(excess(store, bytes)), needed];
        let report = |model: &LostModel| {
            let lost = lost_model(model.clone());
            (self.report)("space", &lost);
            match observer {
                Some(observer) => observer.evicted(model),
                None => verb_log::evicted(Requester::own(), "space", &lost),
            }
        };
        let freed = gc::evict(store.liveness(), &plan(store, &*self.last_opened, &goals)?, &report)?;
        Ok(freed > 0 || store.ledger().shortage(bytes) == 0)
    }
}

/// How much to free to reach the low watermark, if the store plus `bytes` is above the high one.
fn excess(store: &Store, bytes: u64) -> u64 {
    let policy = store.ledger().space_policy();
    let (Some(high), Some(low)) = (policy.high_bytes(), policy.low_bytes()) else { return 0 };
    let used = store.ledger().used_bytes().saturating_add(bytes);
    if used > high { used.saturating_sub(low) } else { 0 }
}

/// Evicts down to the low watermark if the store is above the high one. Returns the bytes freed.
pub fn evict_excess(
    store: &Store,
    last_opened: &LastOpened,
    report: &EvictionReport,
) -> Result<u64, StoreError> {
    if store.ledger().space_policy().eviction == blobd_store::Eviction::Never || excess(store, 0) == 0 {
        return Ok(0);
    }
    let low = store.ledger().space_policy().low_bytes().unwrap_or(u64::MAX);
    let garbage_bytes = gc::collect(store.liveness())?;
    let is_low = || Ok(store.ledger().used_bytes() <= low);
    let displaced_bytes = if is_low()? { 0 } else { gc::drop_displaced(store.liveness(), None, &is_low)?.1 };
    let garbage_bytes = garbage_bytes.saturating_add(displaced_bytes);
    let needed = store.ledger().used_bytes().saturating_sub(low);
    let report = |model: &LostModel| {
        let lost = lost_model(model.clone());
        report("quota", &lost);
        verb_log::evicted(Requester::own(), "quota", &lost);
    };
    let evicted_bytes = gc::evict(store.liveness(), &plan(store, last_opened, &[needed])?, &report)?;
    Ok(garbage_bytes.saturating_add(evicted_bytes))
}

fn plan(store: &Store, last_opened: &LastOpened, goals: &[u64]) -> Result<gc::EvictionPlan, StoreError> {
    gc::plan_eviction(store.liveness(), goals, &|model, manifest| Some(last_opened(model, manifest)?.at))
}

/// Plans how to free `bytes`, by default down to the low watermark: unneeded files first, then models.
pub fn eviction_plan(
    store: &Store,
    last_opened: &LastOpened,
    bytes: Option<u64>,
) -> Result<EvictionPlan, OpError> {
    let needed_bytes = bytes.unwrap_or_else(|| excess(store, 0));
    let garbage_bytes = if needed_bytes == 0 { 0 } else { gc::plan(store.liveness())?.freed_bytes() };
    let goal = needed_bytes.saturating_sub(garbage_bytes);
    let plan = plan(store, last_opened, &[goal])?;
    let evicted = plan.victims.iter().map(|victim| Eviction {
        name: victim.reference.short(),
        freed_bytes: victim.freed_bytes,
        last_used: rfc3339(victim.last_used),
        origin: store.names().name_origin(&victim.reference, victim.manifest).origin,
    });
    let spared = plan
        .spared
        .iter()
        .map(|(reference, reason)| Spared { name: reference.short(), reason: (*reason).to_owned() });
    Ok(EvictionPlan {
        policy: store.ledger().space_policy().eviction.name().to_owned(),
        used_bytes: store.ledger().used_bytes(),
        quota_bytes: store.ledger().space_policy().quota_bytes,
        needed_bytes,
        garbage_bytes,
        freed_bytes: garbage_bytes.saturating_add(plan.freed_bytes),
        evicted: evicted.collect(),
        spared: spared.collect(),
    })
}
