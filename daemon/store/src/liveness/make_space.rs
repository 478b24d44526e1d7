//! Disk space as the store's users see it: how much is free and used, and eviction when something does
//! not fit.

use crate::StoreError;
use crate::liveness::Liveness;
use crate::liveness::gc::{LostModel, displaced_bytes, drop_displaced, evictable_bytes};

/// Frees disk space when something does not fit.
pub trait MakeSpace: std::fmt::Debug + Send + Sync {
    /// Tries to free `bytes`, all or nothing; returns whether to try the failed step again. Reports each model
    /// that it evicts to `observer`, if there is one.
    fn make_space(&self, bytes: u64, observer: Option<&dyn EvictionObserver>) -> Result<bool, StoreError>;
}

/// Is told of evicted models, and how far a transaction is.
pub trait EvictionObserver: std::fmt::Debug + Send + Sync {
    /// Called after the model was evicted, and what only it needed deleted.
    fn evicted(&self, model: &LostModel);

    /// Called when all content of the transaction is durable, before the model gets its manifest and its name.
    fn content_is_durable(&self) {}
}

impl Liveness {
    /// Sets what frees space when something does not fit. Only the first call has an effect.
    pub fn set_space_maker(&self, maker: Box<dyn MakeSpace>) {
        let _ = self.space_maker.set(maker);
    }

    /// Tries a step that needs disk space. If that is missing, has `bytes` freed and tries again;
    /// `bytes` may be more than this one step needs. `observer` is told of the models that are evicted.
    pub(crate) fn with_space<T>(
        &self,
        bytes: u64,
        observer: Option<&dyn EvictionObserver>,
        attempt: impl Fn() -> Result<T, StoreError>,
    ) -> Result<T, StoreError> {
        /// Other transactions may take the freed space first, so several tries may be needed.
        const MAX_TRIES: usize = 16;
        let mut tries = 0;
        loop {
            let refused = match attempt() {
                Err(error) if error.is_no_space() => error,
                other => return other,
            };
            if self.drop_displaced_for(bytes)? {
                continue;
            }
            let made = match self.space_maker.get() {
                Some(maker) if tries < MAX_TRIES => maker.make_space(bytes, observer)?,
                _ => false,
            };
            // The attempt may have collected garbage, so that less is missing now.
            if !made && !self.drop_displaced_for(bytes)? {
                return Err(refused.needing(bytes));
            }
            tries += 1;
        }
    }

    /// What other models have replaced must not keep anything out, whether eviction is on or not. But nothing is deleted
    /// if that cannot make `bytes` fit. Returns whether anything was deleted.
    fn drop_displaced_for(&self, bytes: u64) -> Result<bool, StoreError> {
        let shortage = self.ledger.shortage(bytes);
        // Without a shortage the disk has less space than the file system says: what helps is not known.
        if shortage > 0 {
            let displaced = displaced_bytes(self, None)?;
            let evictable = if self.ledger.can_make_space() { evictable_bytes(self)? } else { 0 };
            if displaced == 0 || displaced.saturating_add(evictable) < shortage {
                return Ok(false);
            }
        }
        let (dropped, _freed) = drop_displaced(self, None, &|| Ok(self.ledger.shortage(bytes) == 0))?;
        Ok(!dropped.is_empty())
    }
}
