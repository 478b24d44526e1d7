//! What is alive: leases, what names need, and the collection of the rest.
//!
//! Collections and evictions remove names and their records, so this part uses the names.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, OnceLock, TryLockError};

use blobd_store_format::digest::Digest;
use gc::{LostModel, displaced_bytes, drop_displaced, evictable_bytes};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::content::Content;
use crate::index::{Claim, ClaimKind};
use crate::leases::Leases;
use crate::ledger::Ledger;
use crate::names::Names;
use crate::node::Node;
use crate::{StoreError, lock};

pub(crate) mod admission;
pub(crate) mod charges;
mod claims;
pub mod gc;

/// What keeps data in a store, and what removes the rest.
#[derive(Debug)]
pub struct Liveness {
    pub(crate) content: Arc<Content>,
    pub(crate) ledger: Arc<Ledger>,
    pub(crate) names: Arc<Names>,
    leases: Leases,
    /// Held while blobs are deleted: one collection at a time.
    collections: Mutex<()>,
    /// Blobs and recipes that no tag is likely to need, but that could not be collected yet, such as those of a removed
    /// model that is still open. Only a hint: the collection checks whether anything needs them.
    condemned: Mutex<BTreeSet<Digest>>,
    /// Who is charged for what displaced models leave until it is collected. Lost when the process ends, like
    /// `condemned`.
    displaced: Mutex<BTreeMap<Node, u32>>,
    space_maker: OnceLock<Box<dyn MakeSpace>>,
}

impl Liveness {
    pub(crate) fn new(content: Arc<Content>, ledger: Arc<Ledger>, names: Arc<Names>) -> Self {
        Self {
            content,
            ledger,
            names,
            leases: Leases::default(),
            collections: Mutex::default(),
            condemned: Mutex::default(),
            displaced: Mutex::default(),
            space_maker: OnceLock::new(),
        }
    }

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

    /// Queues digests to be collected if nothing needs them: see [`crate::liveness::gc::collect_condemned`].
    pub fn condemn(&self, digests: impl IntoIterator<Item = Digest>) {
        lock(&self.condemned).extend(digests);
    }

    pub fn has_condemned(&self) -> bool {
        !lock(&self.condemned).is_empty()
    }

    pub(crate) fn is_condemned(&self, digest: Digest) -> bool {
        lock(&self.condemned).contains(&digest)
    }

    pub(crate) fn take_condemned(&self) -> BTreeSet<Digest> {
        std::mem::take(&mut *lock(&self.condemned))
    }

    /// Charges what a name kept before to the user who gave the name to another model, unless something else keeps it.
    pub fn charge_displaced(&self, uid: u32, nodes: impl IntoIterator<Item = Node>) {
        lock(&self.displaced).extend(nodes.into_iter().map(|node| (node, uid)));
        self.ledger.note_charges_changed();
    }

    pub(crate) fn claims_of_displaced(&self) -> Vec<Claim> {
        let is_stored = |node: Node| self.content.bytes_on_disk(node).is_ok_and(|bytes| bytes.is_some());
        let known = lock(&self.displaced).clone();
        let (stored, deleted): (BTreeMap<Node, u32>, BTreeMap<Node, u32>) =
            known.into_iter().partition(|(node, _)| is_stored(*node));
        let mut of_users: BTreeMap<u32, Vec<Node>> = BTreeMap::new();
        stored.into_iter().for_each(|(node, uid)| of_users.entry(uid).or_default().push(node));
        lock(&self.displaced).retain(|node, _| !deleted.contains_key(node));
        let claim = |(uid, roots)| Claim { kind: ClaimKind::Displaced, since: 0, uid: Some(uid), roots };
        of_users.into_iter().map(claim).collect()
    }

    /// Removes the unfinished downloads of these files, except those that another lease protects.
    pub fn forget_partials(&self, files: impl IntoIterator<Item = Digest>) {
        for file in files.into_iter().filter(|file| !self.leases().is_leased(*file)) {
            if let Err(error) = self.ledger.remove_partial(file) {
                tracing::warn!("{error}; `blobd gc` removes it after a week");
            }
        }
    }
}

pub trait MakeSpace: std::fmt::Debug + Send + Sync {
    /// Tries to free `bytes`, all or nothing; returns whether to try again. Reports evicted models to `observer`.
    fn make_space(&self, bytes: u64, observer: Option<&dyn EvictionObserver>) -> Result<bool, StoreError>;
}

/// Is told of evicted models, and how far a transaction is.
pub trait EvictionObserver: std::fmt::Debug + Send + Sync {
    /// Called after the model was evicted, and what only it needed deleted.
    fn evicted(&self, model: &LostModel);

    /// Called when all content of the transaction is durable, before the model gets its manifest and its name.
    fn content_is_durable(&self) {}

    /// Called for each blob that is written, or that turns out to be stored, with how many are to come in all.
    fn blob_is_stored(&self, _done: u64, _expected: u64) {}
}

impl Liveness {
    /// Sets what frees space when something does not fit. Only the first call has an effect.
    pub fn set_space_maker(&self, maker: Box<dyn MakeSpace>) {
        let _ = self.space_maker.set(maker);
    }

    /// Tries a step that needs disk space. If that is missing, has `bytes` freed and tries again; `bytes` may be more
    /// than this one step needs. `observer` is told of the models that are evicted.
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

    /// Deletes displaced models from the trash to make `bytes` fit, even if eviction is off, but none if that would
    /// not be enough. Returns whether anything was deleted.
    fn drop_displaced_for(&self, bytes: u64) -> Result<bool, StoreError> {
        let shortage = self.ledger.shortage(bytes);
        // Without a shortage, the disk has less space than the file system reports, and it is unknown what
        // would help.
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

#[cfg(test)]
mod tests;
