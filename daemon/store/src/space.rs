//! The ledger of disk space: checks whether data fits before any of it is written.
//!
//! A transaction is first promised the least that it will certainly write. Then each new file takes its own length,
//! which the file system allocates before anything is written; where that is slow, each write takes the length of its
//! bytes. Bytes that are promised or taken are not available to other transactions, so an admitted transaction does not
//! run out of space because of others in the same store.

use std::path::Path;
use std::sync::{PoisonError, TryLockError};
use std::time::Duration;

use blobd_store_format::layout;
use tracing_mutex::stdsync::{Condvar, Mutex, MutexGuard, RwLock};

use crate::root::Root;
use crate::{StoreError, lock};

/// How much of the disk the store may use. Percentages are of the quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpacePolicy {
    /// The most bytes that the store may use; unlimited if absent.
    pub quota_bytes: Option<u64>,
    /// Bytes of the file system to leave free; if absent, a default by its size.
    pub min_free_bytes: Option<u64>,
    /// Eviction starts above this percentage …
    pub high_percent: u8,
    /// … and stops below this one.
    pub low_percent: u8,
    /// Which models may be evicted.
    pub eviction: Eviction,
    /// How long a model whose name another model has taken stays in the trash. Not at all if this is zero.
    pub keep_displaced: Duration,
}

/// Which models may be evicted to free space.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Eviction {
    /// None: data that does not fit is refused.
    #[default]
    Never,
    /// Models that can be pulled again from their origin.
    Pullable,
    /// Also imported models, which cannot be recovered.
    All,
}

impl Eviction {
    /// The name in the configuration.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Never => "never",
            Self::Pullable => "pullable",
            Self::All => "all",
        }
    }
}

impl Default for SpacePolicy {
    fn default() -> Self {
        Self {
            quota_bytes: None,
            min_free_bytes: None,
            high_percent: 95,
            low_percent: 85,
            eviction: Eviction::Never,
            keep_displaced: Duration::from_secs(7 * 86400),
        }
    }
}

impl SpacePolicy {
    fn share_of_quota(&self, percent: u8) -> Option<u64> {
        let quota = u128::from(self.quota_bytes?);
        u64::try_from(quota * u128::from(percent) / 100).ok()
    }

    /// Models are evicted if more bytes than this are used.
    pub fn high_bytes(&self) -> Option<u64> {
        self.share_of_quota(self.high_percent)
    }

    /// Eviction stops when no more bytes than this are used.
    pub fn low_bytes(&self) -> Option<u64> {
        self.share_of_quota(self.low_percent)
    }
}

/// Leaves free 2 % of the file system, at most 1 GiB.
fn default_min_free(capacity: u64) -> u64 {
    (capacity / 50).min(1 << 30)
}

/// The space that the store may still take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AvailableSpace {
    /// Bytes on disk.
    pub bytes: u64,
    /// Whether the quota limits them, and not the free space of the file system.
    pub is_limited_by_quota: bool,
}

/// The limits, and what is known of their use without counting anything.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpaceStatus {
    pub free_bytes: u64,
    pub min_free_bytes: u64,
    pub quota_bytes: Option<u64>,
    /// Bytes that the store uses; `None` until they were counted.
    pub used_bytes: Option<u64>,
    /// Whether nothing more can be stored.
    pub is_full: bool,
}

#[derive(Debug)]
pub(crate) struct Space {
    root: Root,
    limits: RwLock<Limits>,
    block_bytes: u64,
    ledger: Mutex<Ledger>,
    /// What the ledger said when it was last not locked. Never locked during disk access.
    known: Mutex<Known>,
    /// Notified when the file system has finished or refused an allocation.
    reserved: Condvar,
}

/// What the store may use.
#[derive(Clone, Copy, Debug)]
struct Limits {
    policy: SpacePolicy,
    /// As configured, or by the size of the file system.
    min_free_bytes: u64,
}

impl Limits {
    fn new(root: &Root, policy: SpacePolicy) -> Result<Self, StoreError> {
        let by_size = || root.capacity_bytes().map(default_min_free);
        let min_free_bytes = policy.min_free_bytes.map_or_else(by_size, Ok)?;
        Ok(Self { policy, min_free_bytes })
    }
}

#[derive(Debug, Default)]
struct Ledger {
    /// Bytes of files in `staging/`.
    staged: u64,
    /// Bytes promised to transactions that they have not taken yet.
    promised: u64,
    /// Bytes that the file system is allocating now.
    reserving: u64,
    /// Bytes of blobs, recipes and records; counted when first needed, then kept up to date.
    stored: Option<u64>,
    /// Bytes of resumable downloads; `None` until counted again after a change.
    partial: Option<u64>,
    /// Bytes of resumable downloads and of quarantine at the last count of them.
    last_partial: u64,
    last_quarantine: u64,
}

impl Ledger {
    /// What it says without a new count.
    fn known(&self) -> Known {
        let Self { staged, promised, reserving, stored, partial, last_partial, last_quarantine } = *self;
        let others = [staged, reserving, last_quarantine, partial.unwrap_or(last_partial)];
        let used = stored.map(|stored| others.into_iter().fold(stored, u64::saturating_add));
        Known { used, promised, reserving }
    }
}

/// Bytes as in the ledger.
#[derive(Clone, Copy, Debug, Default)]
struct Known {
    used: Option<u64>,
    promised: u64,
    reserving: u64,
}

impl Space {
    pub(crate) fn new(root: Root, policy: SpacePolicy) -> Result<Self, StoreError> {
        let limits = RwLock::new(Limits::new(&root, policy)?);
        let block_bytes = root.block_bytes()?;
        Ok(Self {
            root,
            limits,
            block_bytes,
            ledger: Mutex::default(),
            known: Mutex::default(),
            reserved: Condvar::new(),
        })
    }

    pub(crate) fn policy(&self) -> SpacePolicy {
        self.limits().policy
    }

    pub(crate) fn set_policy(&self, policy: SpacePolicy) -> Result<(), StoreError> {
        let limits = Limits::new(&self.root, policy)?;
        *self.limits.write().unwrap_or_else(PoisonError::into_inner) = limits;
        Ok(())
    }

    pub(crate) fn min_free_bytes(&self) -> u64 {
        self.limits().min_free_bytes
    }

    fn limits(&self) -> Limits {
        *self.limits.read().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) const fn on_disk(&self, bytes: u64) -> u64 {
        match bytes.checked_next_multiple_of(self.block_bytes) {
            Some(rounded) => rounded,
            None => u64::MAX,
        }
    }

    pub(crate) fn promise(&self, bytes: u64) -> Result<(), StoreError> {
        let mut ledger = self.lock_settled(bytes);
        self.check(&mut ledger, bytes)?;
        ledger.promised = ledger.promised.saturating_add(bytes);
        Ok(())
    }

    pub(crate) fn release_promise(&self, bytes: u64) {
        let mut ledger = self.lock();
        ledger.promised = ledger.promised.saturating_sub(bytes);
    }

    /// Takes space for a file of `bytes`, `promised` of which are promised to its transaction. `reserve` allocates
    /// them, which may take long: the ledger is not locked meanwhile, and counts them as taken.
    pub(crate) fn take(
        &self,
        bytes: u64,
        promised: u64,
        reserve: impl FnOnce() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        {
            // The promised bytes are already subtracted from the free space.
            let mut ledger = self.lock_settled(bytes.saturating_sub(promised));
            ledger.promised = ledger.promised.saturating_sub(promised);
            if let Err(error) = self.check(&mut ledger, bytes) {
                ledger.promised = ledger.promised.saturating_add(promised);
                return Err(error);
            }
            ledger.reserving = ledger.reserving.saturating_add(bytes);
        }
        let reserved = reserve();
        let mut ledger = self.lock();
        ledger.reserving = ledger.reserving.saturating_sub(bytes);
        match reserved {
            Ok(()) => ledger.staged = ledger.staged.saturating_add(bytes),
            Err(_) => ledger.promised = ledger.promised.saturating_add(promised),
        }
        self.reserved.notify_all();
        reserved
    }

    /// Locks the ledger for a check of `needed_bytes`. Bytes that are being allocated may be counted twice, in the
    /// ledger and by the file system. If they make the check fail, waits for the allocation.
    fn lock_settled(&self, needed_bytes: u64) -> MutexGuard<'_, Ledger> {
        let is_short = |ledger: &Ledger| self.free(ledger).is_ok_and(|free| free < needed_bytes);
        let may_count_twice = |ledger: &mut Ledger| ledger.reserving > 0 && is_short(ledger);
        let settled = self.reserved.wait_while(self.lock(), may_count_twice);
        settled.unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether a quota requires the stored bytes, which have not been counted yet.
    pub(crate) fn is_uncounted(&self) -> bool {
        self.policy().quota_bytes.is_some() && self.lock().stored.is_none()
    }

    /// Sets the bytes of blobs and recipes, as counted by the caller.
    pub(crate) fn count(&self, bytes: u64) {
        let records = || bytes.saturating_add(self.records());
        self.lock().stored.get_or_insert_with(records);
    }

    /// Subtracts a staged file of `bytes` that was removed.
    pub(crate) fn unstage(&self, bytes: u64) {
        let mut ledger = self.lock();
        ledger.staged = ledger.staged.saturating_sub(bytes);
    }

    /// A staged file was published and uses `stored` bytes. One step, so that it is never counted twice or not at all.
    pub(crate) fn stored(&self, staged: u64, stored: u64) {
        let mut ledger = self.lock();
        ledger.staged = ledger.staged.saturating_sub(staged);
        if let Some(sum) = &mut ledger.stored {
            *sum = sum.saturating_add(stored);
        }
    }

    pub(crate) fn stays_in_partial(&self, bytes: u64) {
        let mut ledger = self.lock();
        ledger.staged = ledger.staged.saturating_sub(bytes);
        if let Some(partial) = &mut ledger.partial {
            *partial = partial.saturating_add(bytes);
        }
    }

    /// A file in `partial/` of `bytes` was published and uses `stored` bytes on disk.
    pub(crate) fn stored_from_partial(&self, bytes: u64, stored: u64) {
        self.stored(0, stored);
        if let Some(partial) = &mut self.lock().partial {
            *partial = partial.saturating_sub(bytes);
        }
    }

    /// Files in `partial/` have changed in another way.
    pub(crate) fn recount_partial(&self) {
        self.lock().partial = None;
    }

    /// A blob, recipe or record of `bytes` on disk was removed.
    pub(crate) fn freed(&self, bytes: u64) {
        if let Some(stored) = &mut self.lock().stored {
            *stored = stored.saturating_sub(bytes);
        }
    }

    pub(crate) fn used_bytes(&self) -> u64 {
        self.used(&mut self.lock())
    }

    pub(crate) fn shortage(&self, bytes: u64) -> u64 {
        let mut ledger = self.lock_settled(bytes);
        let on_disk = self.free(&ledger).map_or(0, |free| bytes.saturating_sub(free));
        let of_quota = self.policy().quota_bytes.map_or(0, |quota| {
            self.used(&mut ledger).saturating_add(ledger.promised).saturating_add(bytes).saturating_sub(quota)
        });
        on_disk.max(of_quota)
    }

    /// Counts nothing, and does not wait for the ledger, which is locked while all files are counted.
    pub(crate) fn status(&self) -> Result<SpaceStatus, StoreError> {
        let Limits { policy: SpacePolicy { quota_bytes, .. }, min_free_bytes } = self.limits();
        let Known { used, promised, reserving } = self.known();
        let free_bytes = self.root.free_bytes()?;
        let taken = promised.saturating_add(reserving).saturating_add(min_free_bytes);
        let has_reached = |quota| used.is_some_and(|used| used.saturating_add(promised) >= quota);
        let is_full = free_bytes <= taken || quota_bytes.is_some_and(has_reached);
        Ok(SpaceStatus { free_bytes, min_free_bytes, quota_bytes, used_bytes: used, is_full })
    }

    fn known(&self) -> Known {
        let now = match self.ledger.try_lock() {
            Ok(ledger) => Some(ledger.known()),
            Err(TryLockError::Poisoned(poisoned)) => Some(poisoned.into_inner().known()),
            Err(TryLockError::WouldBlock) => None,
        };
        let mut known = lock(&self.known);
        *known = now.unwrap_or(*known);
        *known
    }

    pub(crate) fn available(&self) -> Result<AvailableSpace, StoreError> {
        let mut ledger = self.lock();
        let of_disk = self.free(&ledger)?;
        let used = self.used(&mut ledger).saturating_add(ledger.promised);
        let of_quota = self.policy().quota_bytes.map_or(u64::MAX, |quota| quota.saturating_sub(used));
        Ok(AvailableSpace { bytes: of_disk.min(of_quota), is_limited_by_quota: of_quota < of_disk })
    }

    /// Whether `bytes` fit now. The error names the limit that they exceed.
    pub(crate) fn check_fits(&self, bytes: u64) -> Result<(), StoreError> {
        self.check(&mut self.lock_settled(bytes), bytes)
    }

    pub(crate) fn could_fit(&self, bytes: u64) -> Result<bool, StoreError> {
        let of_disk = self.root.capacity_bytes()?;
        Ok(bytes <= self.policy().quota_bytes.map_or(of_disk, |quota| quota.min(of_disk)))
    }

    fn check(&self, ledger: &mut Ledger, needed_bytes: u64) -> Result<(), StoreError> {
        let available_bytes = self.free(ledger)?;
        if needed_bytes > available_bytes {
            let (root, free_bytes) = (self.root.place(), self.root.free_bytes()?);
            let min_free_bytes = self.min_free_bytes();
            return Err(StoreError::NoSpace {
                root,
                needed_bytes,
                available_bytes,
                free_bytes,
                min_free_bytes,
            });
        }
        let Some(quota_bytes) = self.policy().quota_bytes else { return Ok(()) };
        let used_bytes = self.used(ledger).saturating_add(ledger.promised);
        if needed_bytes > quota_bytes.saturating_sub(used_bytes) {
            let root = self.root.place();
            return Err(StoreError::Quota { root, needed_bytes, used_bytes, quota_bytes });
        }
        Ok(())
    }

    fn free(&self, ledger: &Ledger) -> Result<u64, StoreError> {
        let taken = ledger.promised.saturating_add(ledger.reserving).saturating_add(self.min_free_bytes());
        Ok(self.root.free_bytes()?.saturating_sub(taken))
    }

    fn used(&self, ledger: &mut Ledger) -> u64 {
        let count = || self.bytes([layout::BLOBS, layout::RECIPES]).saturating_add(self.records());
        let stored = *ledger.stored.get_or_insert_with(count);
        // Quarantine has few files, so they are counted each time.
        let quarantine = self.bytes([layout::QUARANTINE]);
        let partial = *ledger.partial.get_or_insert_with(|| self.bytes([layout::PARTIAL]));
        (ledger.last_partial, ledger.last_quarantine) = (partial, quarantine);
        let others = [ledger.staged, ledger.reserving, quarantine, partial];
        others.into_iter().fold(stored, u64::saturating_add)
    }

    /// Bytes of records. Each file is small, but a client that may pull can create many.
    fn records(&self) -> u64 {
        self.bytes([layout::MANIFESTS, layout::ORIGINS, layout::SIGNATURES, layout::HISTORY, layout::TRASH])
    }

    fn bytes<const N: usize>(&self, directories: [&str; N]) -> u64 {
        directories
            .map(|directory| self.root.tree_bytes(Path::new(directory)))
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        lock(&self.ledger)
    }
}

#[cfg(test)]
mod tests;
