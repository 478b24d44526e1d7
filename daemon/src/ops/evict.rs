//! Making room: who asks for it, how much, and what people are told about it. What nothing needs is
//! collected before any model goes.

use std::fmt;
use std::sync::{Arc, Mutex, PoisonError, Weak};
use std::time::{Duration, SystemTime};

use blobd_client::protocol::upkeep::{Eviction, EvictionPlan, Spared};
use blobd_store::gc;
use blobd_store::{MakeSpace, Store, StoreError};
use blobd_store_format::reference::Reference;

use super::{OpError, rfc3339};

/// Tells when a model was last opened, if that is known.
pub type LastOpened = dyn Fn(&Reference) -> Option<SystemTime> + Send + Sync;

/// Evicts models when something does not fit, if the policy allows.
pub struct Evictor {
    store: Weak<Store>,
    last_opened: Arc<LastOpened>,
    /// One at a time: two would choose the same models, and one of them would find them gone.
    alone: Mutex<()>,
}

impl fmt::Debug for Evictor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Evictor").finish_non_exhaustive()
    }
}

impl Evictor {
    /// An evictor for a store, to be given to [`Store::set_space_maker`].
    #[must_use]
    pub fn new(store: &Arc<Store>, last_opened: Arc<LastOpened>) -> Self {
        Self { store: Arc::downgrade(store), last_opened, alone: Mutex::default() }
    }
}

impl MakeSpace for Evictor {
    fn make_space(&self, bytes: u64) -> Result<bool, StoreError> {
        let Some(store) = self.store.upgrade() else { return Ok(false) };
        if store.space_policy().eviction == blobd_store::Eviction::Never {
            return Ok(false);
        }
        let _alone = self.alone.lock().unwrap_or_else(PoisonError::into_inner);
        for patience in PATIENCE {
            std::thread::sleep(patience);
            if self.try_to_make_space(&store, bytes)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}

/// What looks in use may be so for a moment only: a commit about to return, a blob being verified.
const PATIENCE: [Duration; 3] = [Duration::ZERO, Duration::from_millis(100), Duration::from_millis(300)];

impl Evictor {
    fn try_to_make_space(&self, store: &Store, bytes: u64) -> Result<bool, StoreError> {
        if store.shortage(bytes) == 0 {
            // Somebody else has just made enough.
            return Ok(true);
        }
        // No model goes for what nobody needs.
        gc::collect(store)?;
        let needed = store.shortage(bytes);
        if needed == 0 {
            return Ok(true);
        }
        // To the low watermark at best, so that it lasts a while.
        let goals = [needed.max(excess(store, bytes)), needed];
        let freed = evict(store, &*self.last_opened, &goals)?;
        Ok(freed > 0 || store.shortage(bytes) == 0)
    }
}

/// What has to go for the store to be at its low watermark, if with `bytes` more it is above the
/// high one.
fn excess(store: &Store, bytes: u64) -> u64 {
    let policy = store.space_policy();
    let (Some(high), Some(low)) = (policy.high_bytes(), policy.low_bytes()) else { return 0 };
    let used = store.used_bytes().saturating_add(bytes);
    if used > high { used.saturating_sub(low) } else { 0 }
}

/// Comes down to the low watermark if the store is above the high one; returns what that freed.
///
/// # Errors
/// [`StoreError`].
pub fn evict_excess(store: &Store, last_opened: &LastOpened) -> Result<u64, StoreError> {
    if store.space_policy().eviction == blobd_store::Eviction::Never || excess(store, 0) == 0 {
        return Ok(0);
    }
    let low = store.space_policy().low_bytes().unwrap_or(u64::MAX);
    let garbage_bytes = gc::collect(store)?.freed_bytes();
    let needed = store.used_bytes().saturating_sub(low);
    Ok(garbage_bytes.saturating_add(evict(store, last_opened, &[needed])?))
}

/// What is left to free by models, once what nothing needs is gone.
fn evict(store: &Store, last_opened: &LastOpened, goals: &[u64]) -> Result<u64, StoreError> {
    gc::evict(store, &gc::plan_eviction(store, goals, &|model| last_opened(model))?)
}

/// What would go to free `bytes`, or to come down to the low watermark if that is not said: what
/// nothing needs first, models for the rest.
///
/// # Errors
/// [`StoreError`].
pub fn eviction_plan(
    store: &Store,
    last_opened: &LastOpened,
    bytes: Option<u64>,
) -> Result<EvictionPlan, OpError> {
    let needed_bytes = bytes.unwrap_or_else(|| excess(store, 0));
    let garbage_bytes = if needed_bytes == 0 { 0 } else { gc::plan(store)?.freed_bytes() };
    let goal = needed_bytes.saturating_sub(garbage_bytes);
    let plan = gc::plan_eviction(store, &[goal], &|model| last_opened(model))?;
    let evicted = plan.victims.iter().map(|victim| Eviction {
        name: victim.reference.short(),
        freed_bytes: victim.freed_bytes,
        last_used: rfc3339(victim.last_used),
        origin: store.origin(victim.manifest),
    });
    let spared = plan
        .spared
        .iter()
        .map(|(reference, reason)| Spared { name: reference.short(), reason: (*reason).to_owned() });
    Ok(EvictionPlan {
        policy: store.space_policy().eviction.name().to_owned(),
        used_bytes: store.used_bytes(),
        quota_bytes: store.space_policy().quota_bytes,
        needed_bytes,
        garbage_bytes,
        freed_bytes: garbage_bytes.saturating_add(plan.freed_bytes),
        evicted: evicted.collect(),
        spared: spared.collect(),
    })
}
