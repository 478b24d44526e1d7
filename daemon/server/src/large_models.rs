//! Counts the memory of each large model once, however many requests use it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, PoisonError, Weak};

use blobd_store_format::digest::Digest;
use tokio::sync::MutexGuard;
use tracing_mutex::stdsync::Mutex;

use crate::permits::Permit;

#[derive(Debug, Default)]
pub(crate) struct LargeModels(Mutex<BTreeMap<Digest, Weak<Counted>>>);

/// The memory of one model, counted for the user of the first request.
#[derive(Debug)]
struct Counted {
    _memory: Permit,
    has_response: AtomicBool,
    /// Held while one request reads the model and builds its tables.
    turn: tokio::sync::Mutex<()>,
}

/// Permits reading a model. The memory counts as used until this is dropped.
#[derive(Clone, Debug, Default)]
pub(crate) struct ReadPermit(Option<Arc<Counted>>);

#[derive(Debug)]
pub(crate) struct CountedResponse(Arc<Counted>);

impl Drop for CountedResponse {
    fn drop(&mut self) {
        self.0.has_response.store(false, Ordering::Release);
    }
}

/// The count of the memory of a response: its own, or as part of its model.
#[derive(Debug)]
pub(crate) enum ResponseMemory {
    Own { _permit: Permit },
    WithModel { _response: CountedResponse },
}

impl ReadPermit {
    /// Counts one response with the model until the result is dropped; `None` if there is one already, or if the model is not
    /// counted.
    pub(crate) fn claim_response(&self) -> Option<CountedResponse> {
        let counted = self.0.as_ref()?;
        let is_first = !counted.has_response.swap(true, Ordering::AcqRel);
        is_first.then(|| CountedResponse(Arc::clone(counted)))
    }

    /// Waits until no other request reads the same model. Later requests then find it in the cache.
    pub(crate) async fn turn(&self) -> Option<MutexGuard<'_, ()>> {
        match &self.0 {
            Some(counted) => Some(counted.turn.lock().await),
            None => None,
        }
    }
}

impl LargeModels {
    /// The permit of a model that another request already counted.
    pub(crate) fn find(&self, manifest: Digest) -> Option<ReadPermit> {
        let counted = self.lock().get(&manifest).and_then(Weak::upgrade);
        counted.map(|counted| ReadPermit(Some(counted)))
    }

    /// Counts a model, or releases `memory` if another request has counted the model meanwhile.
    pub(crate) fn count(&self, manifest: Digest, memory: Permit) -> ReadPermit {
        let mut models = self.lock();
        models.retain(|_, counted| counted.strong_count() > 0);
        let known = models.get(&manifest).and_then(Weak::upgrade);
        let counted = known.unwrap_or_else(|| {
            let counted = Arc::new(Counted {
                _memory: memory,
                has_response: AtomicBool::new(false),
                turn: tokio::sync::Mutex::new(()),
            });
            models.insert(manifest, Arc::downgrade(&counted));
            counted
        });
        ReadPermit(Some(counted))
    }

    fn lock(&self) -> tracing_mutex::stdsync::MutexGuard<'_, BTreeMap<Digest, Weak<Counted>>> {
        // Each change is complete before anything can panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
