//! Disk space as the store's users see it: how much is free and used, and eviction when something does
//! not fit.

use super::gc::{LostModel, displaced_bytes, drop_displaced, evictable_bytes};
use super::space::{AvailableSpace, Eviction, Space, SpacePolicy, SpaceStatus};
use super::{Store, StoreError};

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

impl Store {
    /// Bytes free on the file system for a user without privileges.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        self.root.free_bytes()
    }

    /// The size of the file system in bytes.
    pub fn capacity_bytes(&self) -> Result<u64, StoreError> {
        self.root.capacity_bytes()
    }

    /// How much of the disk the store may use.
    #[must_use]
    pub fn space_policy(&self) -> SpacePolicy {
        self.space.policy()
    }

    /// Changes how much of the disk the store may use. Nothing is evicted at once.
    ///
    /// # Errors
    /// If the default for the free space is needed and the size of the file system cannot be read.
    pub fn set_space_policy(&self, policy: SpacePolicy) -> Result<(), StoreError> {
        self.space.set_policy(policy)
    }

    /// The bytes of the file system that the store leaves free: as configured, or by the size of the file system.
    #[must_use]
    pub fn min_free_bytes(&self) -> u64 {
        self.space.min_free_bytes()
    }

    /// Bytes on disk that the store uses, work in progress included.
    #[must_use]
    pub fn used_bytes(&self) -> u64 {
        self.space().used_bytes()
    }

    /// How many more bytes must become free before `bytes` fit; 0 if they fit.
    #[must_use]
    pub fn shortage(&self, bytes: u64) -> u64 {
        self.space().shortage(bytes)
    }

    /// What is known of the space without counting anything: only the file system is asked. Waits for no lock that is
    /// held during disk access.
    pub fn space_status(&self) -> Result<SpaceStatus, StoreError> {
        self.space.status()
    }

    /// The space that no transaction has been promised yet.
    pub fn available_space(&self) -> Result<AvailableSpace, StoreError> {
        self.space().available()
    }

    /// The size on disk of a file of `bytes`: whole blocks.
    #[must_use]
    pub const fn size_on_disk(&self, bytes: u64) -> u64 {
        self.space.on_disk(bytes)
    }

    /// Whether `bytes` fit now.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`] or [`StoreError::Quota`], whichever limit they exceed.
    pub fn check_fits(&self, bytes: u64) -> Result<(), StoreError> {
        self.space().check_fits(bytes)
    }

    /// Whether `bytes` could fit in an empty store on an empty disk.
    pub fn could_fit(&self, bytes: u64) -> Result<bool, StoreError> {
        self.space.could_fit(bytes)
    }

    /// Whether models may be evicted when something does not fit.
    #[must_use]
    pub fn can_make_space(&self) -> bool {
        self.space_policy().eviction != Eviction::Never
    }

    /// Sets what frees space when something does not fit. Only the first call has an effect.
    pub fn set_space_maker(&self, maker: Box<dyn MakeSpace>) {
        let _ = self.space_maker.set(maker);
    }

    pub(super) fn space(&self) -> &Space {
        if self.space.is_uncounted() {
            // Without a catalog the ledger itself inspects every file.
            let counted = self.catalog_now().map(|catalog| catalog.used_bytes());
            counted.into_iter().for_each(|bytes| self.space.count(bytes));
        }
        &self.space
    }

    /// Tries a step that needs disk space. If that is missing, has `bytes` freed and tries again;
    /// `bytes` may be more than this one step needs. `observer` is told of the models that are evicted.
    pub(super) fn with_space<T>(
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
        let shortage = self.shortage(bytes);
        // Without a shortage the disk has less space than the file system says: what helps is not known.
        if shortage > 0 {
            let displaced = displaced_bytes(self, None)?;
            let evictable = if self.can_make_space() { evictable_bytes(self)? } else { 0 };
            if displaced == 0 || displaced.saturating_add(evictable) < shortage {
                return Ok(false);
            }
        }
        let (dropped, _freed) = drop_displaced(self, None, &|| Ok(self.shortage(bytes) == 0))?;
        Ok(!dropped.is_empty())
    }
}
