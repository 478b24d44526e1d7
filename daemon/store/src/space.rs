//! The ledger of the disk: whether something fits, before a byte of it is written.
//!
//! A transaction first has the least that it will certainly write promised to it; then each file
//! takes its own length when it is begun, which the file system sets aside at once. What a
//! promise or a file has is not promised to anyone else, so whoever was admitted does not fail
//! for want of room because of others in the same store.

use std::path::Path;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

use blobd_store_format::layout;

use super::StoreError;
use super::root::Root;

/// How much of the disk the store may take. Percentages are of the quota.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SpacePolicy {
    /// The most the store may take on disk, in bytes; only the disk limits it if absent.
    pub quota_bytes: Option<u64>,
    /// What others are left of the file system, in bytes; a default by its size if absent.
    pub min_free_bytes: Option<u64>,
    /// Eviction begins above this share of the quota …
    pub high_percent: u8,
    /// … and ends below this one.
    pub low_percent: u8,
    /// Which models eviction may take.
    pub eviction: Eviction,
}

/// Which models may be evicted to make room.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Eviction {
    /// None: what does not fit is refused.
    #[default]
    Never,
    /// Those that can be pulled again from where they came from.
    Pullable,
    /// Imported ones too, which are lost with it.
    All,
}

impl Eviction {
    /// The policy's name, as in the configuration.
    #[must_use]
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
        }
    }
}

impl SpacePolicy {
    /// How many bytes are above or below a share of the quota.
    fn share(&self, percent: u8) -> Option<u64> {
        let quota = u128::from(self.quota_bytes?);
        u64::try_from(quota * u128::from(percent) / 100).ok()
    }

    /// Above this, models are evicted.
    #[must_use]
    pub fn high_bytes(&self) -> Option<u64> {
        self.share(self.high_percent)
    }

    /// Down to this.
    #[must_use]
    pub fn low_bytes(&self) -> Option<u64> {
        self.share(self.low_percent)
    }
}

/// What is left to others by default: the smaller of a fiftieth of the file system and 1 GiB.
fn default_min_free(capacity: u64) -> u64 {
    (capacity / 50).min(1 << 30)
}

/// The store's books.
#[derive(Debug)]
pub(crate) struct Space {
    root: Root,
    policy: SpacePolicy,
    min_free_bytes: u64,
    block_bytes: u64,
    ledger: Mutex<Ledger>,
    /// Rung when the file system has set something aside, or has not.
    reserved: Condvar,
}

#[derive(Debug, Default)]
struct Ledger {
    /// What files in `staging/` take.
    staged: u64,
    /// What transactions were promised and have not taken yet.
    promised: u64,
    /// What the file system is asked to set aside at this moment.
    reserving: u64,
    /// What blobs, recipes, manifests and what is kept beside those take; counted when it is first
    /// asked for, then kept up to date.
    stored: Option<u64>,
    /// What resumable downloads take; counted again when it has changed.
    partial: Option<u64>,
}

impl Space {
    pub(crate) fn new(root: Root, policy: SpacePolicy) -> Result<Self, StoreError> {
        let by_size = || root.capacity_bytes().map(default_min_free);
        let min_free_bytes = policy.min_free_bytes.map_or_else(by_size, Ok)?;
        let block_bytes = root.block_bytes()?;
        Ok(Self {
            root,
            policy,
            min_free_bytes,
            block_bytes,
            ledger: Mutex::default(),
            reserved: Condvar::new(),
        })
    }

    pub(crate) const fn policy(&self) -> &SpacePolicy {
        &self.policy
    }

    /// What a file of `bytes` will take on disk: whole blocks.
    pub(crate) const fn on_disk(&self, bytes: u64) -> u64 {
        match bytes.checked_next_multiple_of(self.block_bytes) {
            Some(rounded) => rounded,
            None => u64::MAX,
        }
    }

    /// Promises `bytes` to a transaction.
    ///
    /// # Errors
    /// [`StoreError::NoRoom`], [`StoreError::Quota`].
    pub(crate) fn promise(&self, bytes: u64) -> Result<(), StoreError> {
        let mut ledger = self.lock_settled(bytes);
        self.check(&mut ledger, bytes)?;
        ledger.promised = ledger.promised.saturating_add(bytes);
        Ok(())
    }

    /// Gives back what was promised and not taken.
    pub(crate) fn release_promise(&self, bytes: u64) {
        let mut ledger = self.lock();
        ledger.promised = ledger.promised.saturating_sub(bytes);
    }

    /// Takes room for a file of `bytes`, `promised` of which are promised to its transaction.
    /// `reserve` has the file system set them aside, which may take long; the books are open to others
    /// meanwhile, and the bytes are spoken for.
    ///
    /// # Errors
    /// [`StoreError::NoRoom`], [`StoreError::Quota`], those of `reserve`.
    pub(crate) fn take(
        &self,
        bytes: u64,
        promised: u64,
        reserve: impl FnOnce() -> Result<(), StoreError>,
    ) -> Result<(), StoreError> {
        {
            // What was promised is spoken for already.
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

    /// The books, for who needs so much of the file system. What is being set aside may count twice
    /// until it is, here and there; so if that matters, they are those of afterwards.
    fn lock_settled(&self, needed_bytes: u64) -> MutexGuard<'_, Ledger> {
        let is_short = |ledger: &Ledger| self.free(ledger).is_ok_and(|free| free < needed_bytes);
        let may_count_twice = |ledger: &mut Ledger| ledger.reserving > 0 && is_short(ledger);
        let settled = self.reserved.wait_while(self.lock(), may_count_twice);
        settled.unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it has still to be counted what is stored, because a quota asks for it.
    pub(crate) fn is_uncounted(&self) -> bool {
        self.policy.quota_bytes.is_some() && self.lock().stored.is_none()
    }

    /// Enters what blobs and recipes take, counted by somebody else.
    pub(crate) fn count(&self, bytes: u64) {
        let records = || bytes.saturating_add(self.records());
        self.lock().stored.get_or_insert_with(records);
    }

    /// A staged file of `bytes` is gone.
    pub(crate) fn unstage(&self, bytes: u64) {
        let mut ledger = self.lock();
        ledger.staged = ledger.staged.saturating_sub(bytes);
    }

    /// A staged file of `staged` bytes has its final name and takes `stored` bytes on disk. In one
    /// step, so that it never counts twice or not at all.
    pub(crate) fn stored(&self, staged: u64, stored: u64) {
        let mut ledger = self.lock();
        ledger.staged = ledger.staged.saturating_sub(staged);
        if let Some(sum) = &mut ledger.stored {
            *sum = sum.saturating_add(stored);
        }
    }

    /// A staged file of `bytes` lies in `partial/`.
    pub(crate) fn stays_in_partial(&self, bytes: u64) {
        let mut ledger = self.lock();
        ledger.staged = ledger.staged.saturating_sub(bytes);
        if let Some(partial) = &mut ledger.partial {
            *partial = partial.saturating_add(bytes);
        }
    }

    /// A file in `partial/` of `bytes` has its final name and takes `stored` bytes on disk.
    pub(crate) fn stored_from_partial(&self, bytes: u64, stored: u64) {
        self.stored(0, stored);
        if let Some(partial) = &mut self.lock().partial {
            *partial = partial.saturating_sub(bytes);
        }
    }

    /// What lies in `partial/` has changed otherwise.
    pub(crate) fn recount_partial(&self) {
        self.lock().partial = None;
    }

    /// A blob, recipe or record is gone that took `bytes` on disk.
    pub(crate) fn freed(&self, bytes: u64) {
        if let Some(stored) = &mut self.lock().stored {
            *stored = stored.saturating_sub(bytes);
        }
    }

    /// What the store takes on disk, work in progress included.
    pub(crate) fn used_bytes(&self) -> u64 {
        self.used(&mut self.lock())
    }

    /// How much more than there is a need of `bytes` takes; 0 if it fits.
    pub(crate) fn shortage(&self, bytes: u64) -> u64 {
        let mut ledger = self.lock_settled(bytes);
        let on_disk = self.free(&ledger).map_or(0, |free| bytes.saturating_sub(free));
        let of_quota = self.policy.quota_bytes.map_or(0, |quota| {
            self.used(&mut ledger).saturating_add(ledger.promised).saturating_add(bytes).saturating_sub(quota)
        });
        on_disk.max(of_quota)
    }

    fn check(&self, ledger: &mut Ledger, needed_bytes: u64) -> Result<(), StoreError> {
        let free_bytes = self.free(ledger)?;
        if needed_bytes > free_bytes {
            return Err(StoreError::NoRoom { root: self.root.place(), needed_bytes, free_bytes });
        }
        let Some(quota_bytes) = self.policy.quota_bytes else { return Ok(()) };
        let used_bytes = self.used(ledger).saturating_add(ledger.promised);
        if needed_bytes > quota_bytes.saturating_sub(used_bytes) {
            let root = self.root.place();
            return Err(StoreError::Quota { root, needed_bytes, used_bytes, quota_bytes });
        }
        Ok(())
    }

    /// What may be taken of the file system.
    fn free(&self, ledger: &Ledger) -> Result<u64, StoreError> {
        let spoken_for = ledger.promised.saturating_add(ledger.reserving).saturating_add(self.min_free_bytes);
        Ok(self.root.free_bytes()?.saturating_sub(spoken_for))
    }

    fn used(&self, ledger: &mut Ledger) -> u64 {
        let count = || self.bytes([layout::BLOBS, layout::RECIPES]).saturating_add(self.records());
        let stored = *ledger.stored.get_or_insert_with(count);
        // Few files, if any: counted each time.
        let beside = self.bytes([layout::QUARANTINE]);
        let partial = *ledger.partial.get_or_insert_with(|| self.bytes([layout::PARTIAL]));
        let beside = beside.saturating_add(partial);
        stored.saturating_add(ledger.staged).saturating_add(ledger.reserving).saturating_add(beside)
    }

    /// What manifests and what is kept beside them take. Each is small, but whoever may pull may
    /// have many.
    fn records(&self) -> u64 {
        self.bytes([layout::MANIFESTS, layout::ORIGINS]).saturating_add(self.bytes([layout::TRASH]))
    }

    fn bytes<const N: usize>(&self, directories: [&str; N]) -> u64 {
        directories
            .map(|directory| self.root.tree_bytes(Path::new(directory)))
            .into_iter()
            .fold(0, u64::saturating_add)
    }

    fn lock(&self) -> MutexGuard<'_, Ledger> {
        // Every change of the books is complete before anything could panic.
        self.ledger.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn space(quota: u64) -> (tempfile::TempDir, Space) {
        let folder = tempfile::tempdir().unwrap();
        let policy =
            SpacePolicy { quota_bytes: Some(quota), min_free_bytes: Some(0), ..SpacePolicy::default() };
        let space = Space::new(Root::open(folder.path()).unwrap(), policy).unwrap();
        (folder, space)
    }

    #[test]
    fn what_is_promised_or_taken_is_not_given_twice() {
        let (_folder, space) = space(100);
        space.promise(60).unwrap();
        let error = space.promise(41).unwrap_err();
        assert!(matches!(error, StoreError::Quota { needed_bytes: 41, used_bytes: 60, .. }), "{error}");
        space.take(50, 50, || Ok(())).unwrap();
        assert_eq!(space.used_bytes(), 50);
        assert!(space.promise(41).is_err());
        space.release_promise(10);
        space.promise(41).unwrap();
    }

    #[test]
    fn room_comes_back_when_a_file_could_not_be_reserved_or_is_gone() {
        let (folder, space) = space(100);
        let full = || Err(StoreError::NoRoom { root: folder.path().into(), needed_bytes: 1, free_bytes: 0 });
        space.promise(100).unwrap();
        space.take(100, 100, full).unwrap_err();
        space.take(100, 100, || Ok(())).unwrap();
        space.stored(100, 30);
        assert_eq!(space.shortage(100), 30);
        space.freed(30);
        assert_eq!(space.shortage(100), 0);
    }

    #[test]
    fn books_are_open_while_the_file_system_sets_something_aside() {
        let (_folder, space) = space(100);
        space.promise(60).unwrap();
        let reserve = || {
            assert_eq!(space.used_bytes(), 60);
            assert!(space.promise(41).is_err(), "it is spoken for");
            space.promise(40)
        };
        space.take(60, 60, reserve).unwrap();
        assert_eq!(space.used_bytes(), 60);
        space.release_promise(40);
        assert_eq!(space.shortage(40), 0);
    }

    #[test]
    fn nobody_is_refused_for_what_counts_twice_for_a_moment() {
        let (folder, _) = space(0);
        let root = Root::open(folder.path()).unwrap();
        let free = root.free_bytes().unwrap();
        let policy = SpacePolicy { min_free_bytes: Some(free / 2), ..SpacePolicy::default() };
        let space = Space::new(root, policy).unwrap();
        let asked = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            let reserve = || {
                scope.spawn(|| {
                    asked.store(true, std::sync::atomic::Ordering::SeqCst);
                    space.promise(free / 4).unwrap();
                });
                while !asked.load(std::sync::atomic::Ordering::SeqCst) {
                    std::thread::yield_now();
                }
                std::thread::sleep(std::time::Duration::from_millis(20));
                Ok(())
            };
            // The file system gives nothing away here, so that afterwards there is room again.
            space.take(free / 3, 0, reserve).unwrap();
        });
    }

    #[test]
    fn some_of_the_file_system_is_left_to_others() {
        let folder = tempfile::tempdir().unwrap();
        let free = Root::open(folder.path()).unwrap().free_bytes().unwrap();
        let policy = SpacePolicy { min_free_bytes: Some(free), ..SpacePolicy::default() };
        let space = Space::new(Root::open(folder.path()).unwrap(), policy).unwrap();
        assert!(matches!(space.promise(1 << 40), Err(StoreError::NoRoom { .. })));
        assert_eq!(default_min_free(1 << 20), (1 << 20) / 50);
        assert_eq!(default_min_free(1 << 50), 1 << 30);
    }
}
