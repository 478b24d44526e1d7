//! The large models that requests use: the memory of each is counted once, however many requests use it.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError, Weak};

use blobd_store_format::digest::Digest;
use tokio::sync::MutexGuard;

use crate::permits::Permit;

/// The large models that requests use now.
#[derive(Debug, Default)]
pub(crate) struct LargeModels(Mutex<BTreeMap<Digest, Weak<Counted>>>);

/// The memory of one model, counted for the user whose request came first.
#[derive(Debug)]
struct Counted {
    _memory: Permit,
    /// Held while one request reads the model and puts its tables together.
    turn: tokio::sync::Mutex<()>,
}

/// A model that may be read. The memory counts as used until this is dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadPermit(Option<Arc<Counted>>);

impl ReadPermit {
    /// Whether the model is large, and what is made of it counted with it.
    pub(crate) const fn is_counted(&self) -> bool {
        self.0.is_some()
    }

    /// Waits until no other request reads the same model. Whoever comes after the first finds what that
    /// has read.
    pub(crate) async fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        match &self.0 {
            Some(counted) => Some(counted.turn.lock().await),
            None => None,
        }
    }
}

impl LargeModels {
    /// A model that a request has counted.
    pub(crate) fn find(&self, manifest: Digest) -> Option<ReadPermit> {
        let counted = self.lock().get(&manifest).and_then(Weak::upgrade);
        counted.map(|counted| ReadPermit(Some(counted)))
    }

    /// Counts a model, or releases the memory if another request has counted it meanwhile.
    pub(crate) fn count(&self, manifest: Digest, memory: Permit) -> ReadPermit {
        let mut models = self.lock();
        models.retain(|_, counted| counted.strong_count() > 0);
        let known = models.get(&manifest).and_then(Weak::upgrade);
        let counted = known.unwrap_or_else(|| {
            let counted = Arc::new(Counted { _memory: memory, turn: tokio::sync::Mutex::new(()) });
            models.insert(manifest, Arc::downgrade(&counted));
            counted
        });
        ReadPermit(Some(counted))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, BTreeMap<Digest, Weak<Counted>>> {
        // Every change is complete before anything could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
