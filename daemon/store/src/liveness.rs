//! What is alive: leases, what names need, and the collection of the rest.
//!
//! Collections and evictions take names away and remove records of them, so this part is above the names.

use std::sync::{Arc, OnceLock, TryLockError};

use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::content::Content;
use crate::leases::Leases;
use crate::ledger::Ledger;
use crate::lock;
use crate::names::Names;

pub(crate) mod admission;
pub(crate) mod charges;
mod claims;
mod deferred_deletion;
pub mod gc;
pub(crate) mod make_space;

/// What keeps data in a store, and what removes the rest.
#[derive(Debug)]
pub struct Liveness {
    content: Arc<Content>,
    ledger: Arc<Ledger>,
    names: Arc<Names>,
    leases: Leases,
    /// Held while blobs are deleted: one collection at a time.
    collections: Mutex<()>,
    deferred_deletion: deferred_deletion::DeferredDeletion,
    displaced: deferred_deletion::DisplacedData,
    space_maker: OnceLock<Box<dyn make_space::MakeSpace>>,
}

impl Liveness {
    pub(crate) fn new(content: Arc<Content>, ledger: Arc<Ledger>, names: Arc<Names>) -> Self {
        Self {
            content,
            ledger,
            names,
            leases: Leases::default(),
            collections: Mutex::default(),
            deferred_deletion: deferred_deletion::DeferredDeletion::default(),
            displaced: deferred_deletion::DisplacedData::default(),
            space_maker: OnceLock::new(),
        }
    }

    /// The blobs and recipes whose liveness this is.
    #[must_use]
    pub const fn content(&self) -> &Arc<Content> {
        &self.content
    }

    /// The space that they take.
    #[must_use]
    pub const fn ledger(&self) -> &Arc<Ledger> {
        &self.ledger
    }

    /// The names that keep them.
    #[must_use]
    pub const fn names(&self) -> &Arc<Names> {
        &self.names
    }

    /// The leases that protect the store's content from collection.
    #[must_use]
    pub const fn leases(&self) -> &Leases {
        &self.leases
    }

    /// Prevents other collections until the guard is dropped.
    pub fn lock_collections(&self) -> MutexGuard<'_, ()> {
        lock(&self.collections)
    }

    /// Like [`Self::lock_collections`]; `None` instead of waiting if a collection holds the lock.
    pub(crate) fn try_lock_collections(&self) -> Option<MutexGuard<'_, ()>> {
        match self.collections.try_lock() {
            Ok(guard) => Some(guard),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner()),
            Err(TryLockError::WouldBlock) => None,
        }
    }
}
