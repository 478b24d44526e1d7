//! What may still be stored: disk space, reservations of transactions, and what is charged to users.

use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use blobd_store_format::layout;
use tracing_mutex::stdsync::Mutex;

use crate::content::Content;
use crate::root::FileStatus;
use crate::space::Space;
use crate::{AvailableSpace, Eviction, SpacePolicy, SpaceStatus, StoreError};

pub(crate) mod accounting;
pub(crate) mod charge_limit;
pub(crate) mod totals;
pub(crate) mod transactions;

/// The space that a store uses and has promised, and the users who are charged for it.
#[derive(Debug)]
pub struct Ledger {
    content: Arc<Content>,
    pub(crate) transactions: transactions::Transactions,
    /// The quotas of groups.
    pools: Mutex<Arc<[charge_limit::Pool]>>,
    pub(crate) totals: totals::Totals,
    /// Whether this process has found or requested the reserve.
    wants_reserve: AtomicBool,
}

impl Ledger {
    pub(crate) fn new(content: Arc<Content>) -> Self {
        Self {
            content,
            transactions: transactions::Transactions::default(),
            pools: Mutex::new(Arc::new([])),
            totals: totals::Totals::default(),
            wants_reserve: AtomicBool::new(false),
        }
    }
}

const MAX_BYTES: u64 = 16 << 20;
/// More than the manifest of a name, its history and the directories above them take on disk.
const NAME_BYTES: u64 = 1 << 20;
/// The reserve is at most one part in this many of the file system.
const SHARE: u64 = 256;

impl Ledger {
    /// Runs `work`, which frees space. On a full disk, releases the reserve for it, and creates it again afterwards.
    pub fn with_reserve<T>(&self, work: impl FnOnce() -> T) -> T {
        self.with_reserve_below(MAX_BYTES, work)
    }

    /// Runs `work`, which sets a name: its records take a few blocks. Releases the reserve only if there is hardly
    /// more, because data that is stored afterwards could fill what was released.
    pub fn with_reserve_for_name<T>(&self, work: impl FnOnce() -> T) -> T {
        self.with_reserve_below(NAME_BYTES, work)
    }

    /// Whether a record of a name fits on a disk that is otherwise full, and leaves a little for removals.
    pub(crate) fn has_space_for_record(&self, length: u64) -> bool {
        const LEFT_BYTES: u64 = 64 << 10;
        let needed = self.size_on_disk(length).saturating_add(LEFT_BYTES);
        self.content.root.free_bytes().is_ok_and(|free| free >= needed)
    }

    fn with_reserve_below<T>(&self, free_bytes: u64, work: impl FnOnce() -> T) -> T {
        if self.reserve_bytes().is_some() {
            self.wants_reserve.store(true, Ordering::Relaxed);
        }
        if self.content.root.free_bytes().is_ok_and(|free| free < free_bytes) {
            self.give_up_reserve();
        }
        let done = work();
        if self.wants_reserve.load(Ordering::Relaxed) || self.used_bytes() > 0 {
            self.make_reserve();
        }
        done
    }

    /// Creates the reserve unless it exists or there is no space for it.
    pub fn make_reserve(&self) {
        self.wants_reserve.store(true, Ordering::Relaxed);
        // A power cut may have left a file without allocated blocks, which reserves nothing.
        let has_blocks = self.reserve_status().is_some_and(|reserve| reserve.allocated_bytes() > 0);
        if has_blocks || self.content.refuses_changes() {
            return;
        }
        if let Err(error) = self.try_make_reserve() {
            tracing::debug!("{error}; there is no reserve");
        }
    }

    pub fn reserve_bytes(&self) -> Option<u64> {
        self.reserve_status().map(|reserve| reserve.len())
    }

    fn reserve_status(&self) -> Option<FileStatus> {
        let found = self.content.root.status(Path::new(layout::RESERVE_FILE)).ok().flatten();
        found.filter(FileStatus::is_file)
    }

    fn try_make_reserve(&self) -> Result<(), StoreError> {
        let path = Path::new(layout::RESERVE_FILE);
        let bytes = MAX_BYTES.min(self.content.root.capacity_bytes()? / SHARE);
        if self.content.root.free_bytes()? < bytes.saturating_mul(4) {
            return Ok(());
        }
        self.content.disk.remove_file(path)?;
        let file = self.content.disk.create_file(path, 0o600)?;
        self.content.disk.reserve(path, &file, bytes).inspect_err(|_| self.give_up_reserve())
    }

    fn give_up_reserve(&self) {
        if let Err(error) = self.content.disk.remove_file(Path::new(layout::RESERVE_FILE)) {
            tracing::warn!("{error}");
        }
    }

    /// Bytes free on the file system for a user without privileges.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        self.content.root.free_bytes()
    }

    pub fn space_policy(&self) -> SpacePolicy {
        self.content.space.policy()
    }

    /// Changes how much of the disk the store may use. Nothing is evicted at once.
    pub fn set_space_policy(&self, policy: SpacePolicy) -> Result<(), StoreError> {
        self.content.space.set_policy(policy)
    }

    /// The bytes of the file system that the store leaves free: as configured, or by the size of the file system.
    pub fn min_free_bytes(&self) -> u64 {
        self.content.space.min_free_bytes()
    }

    /// Bytes on disk that the store uses, work in progress included.
    pub fn used_bytes(&self) -> u64 {
        self.space().used_bytes()
    }

    /// How many more bytes must become free before `bytes` fit; 0 if they fit.
    pub fn shortage(&self, bytes: u64) -> u64 {
        self.space().shortage(bytes)
    }

    /// The space as known, without counting anything. Waits for no lock that is held during disk access.
    pub fn space_status(&self) -> Result<SpaceStatus, StoreError> {
        self.content.space.status()
    }

    /// The space that no transaction has been promised yet.
    pub fn available_space(&self) -> Result<AvailableSpace, StoreError> {
        self.space().available()
    }

    /// The size on disk of a file of `bytes`: whole blocks.
    pub fn size_on_disk(&self, bytes: u64) -> u64 {
        self.content.space.on_disk(bytes)
    }

    /// Whether `bytes` fit now.
    pub fn check_fits(&self, bytes: u64) -> Result<(), StoreError> {
        self.space().check_fits(bytes)
    }

    /// Whether `bytes` could fit in an empty store on an empty disk.
    pub fn could_fit(&self, bytes: u64) -> Result<bool, StoreError> {
        self.content.space.could_fit(bytes)
    }

    pub fn can_make_space(&self) -> bool {
        self.space_policy().eviction != Eviction::Never
    }

    pub(crate) fn space(&self) -> &Space {
        if self.content.space.is_uncounted() {
            // Without a catalog the ledger itself inspects every file.
            let counted = self.content.index().catalog_now().map(|catalog| catalog.used_bytes());
            counted.into_iter().for_each(|bytes| self.content.space.count(bytes));
        }
        &self.content.space
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::new_store;

    #[test]
    fn reserve_is_made_once_and_not_in_a_store_that_refuses_changes() {
        let (_folder, store) = new_store();
        let path = Path::new(layout::RESERVE_FILE);
        store.ledger.make_reserve();
        let bytes = store.ledger.reserve_bytes().unwrap();
        assert!((1..=MAX_BYTES).contains(&bytes), "{bytes}");
        let first = store.content.root.open_file(path).unwrap();
        store.ledger.make_reserve();
        assert_eq!(FileStatus::from_file(&first).unwrap().links(), 1, "it was replaced");
        store.content.disk.remove_file(path).unwrap();
        assert_eq!(store.ledger.reserve_bytes(), None);
        store.content.disk.refuse_changes("a test");
        store.ledger.make_reserve();
        assert_eq!(store.ledger.reserve_bytes(), None);
    }

    #[test]
    fn transaction_has_its_user_until_it_ends() {
        let (_folder, store) = new_store();
        store.ledger.begin_transaction("a");
        assert_eq!(store.ledger.user_of_transaction("a"), None);
        store.ledger.set_user_of_transaction("a", 1001);
        assert_eq!(store.ledger.user_of_transaction("a"), Some(1001));
        assert_eq!(store.ledger.user_of_transaction("b"), None);
        store.ledger.end_transaction("a");
        assert_eq!(store.ledger.user_of_transaction("a"), None);
    }

    #[test]
    fn space_can_be_made_if_models_may_be_evicted() {
        let (_folder, store) = new_store();
        for (eviction, can_make_space) in
            [(Eviction::Never, false), (Eviction::Pullable, true), (Eviction::All, true)]
        {
            store.ledger.set_space_policy(SpacePolicy { eviction, ..SpacePolicy::default() }).unwrap();
            assert_eq!(store.ledger.can_make_space(), can_make_space, "{eviction:?}");
        }
    }

    #[test]
    fn reserve_is_released_only_while_space_is_short_and_made_again_afterwards() {
        let (_folder, store) = new_store();
        let reserve = || store.content.root.open_file(Path::new(layout::RESERVE_FILE)).ok();
        let seen = store.ledger.with_reserve_below(u64::MAX, || reserve().is_some());
        assert!(!seen && reserve().is_none(), "nothing is stored, so none is wanted");
        store.ledger.make_reserve();
        let before = reserve().unwrap();
        assert!(store.ledger.with_reserve_below(0, || reserve().is_some()));
        assert_eq!(FileStatus::from_file(&before).unwrap().links(), 1, "there is enough space");
        assert!(!store.ledger.with_reserve_below(u64::MAX, || reserve().is_some()));
        assert_eq!(FileStatus::from_file(&before).unwrap().links(), 0);
        let expected = MAX_BYTES.min(store.content.root.capacity_bytes().unwrap() / SHARE);
        assert_eq!(store.ledger.reserve_bytes(), Some(expected));
        assert_eq!(store.ledger.with_reserve(|| store.ledger.reserve_bytes()), Some(expected));
        assert_eq!(store.ledger.with_reserve_for_name(|| store.ledger.reserve_bytes()), Some(expected));
    }

    #[test]
    fn store_with_content_gets_a_reserve_when_space_is_freed() {
        let (_folder, store, _digest) = crate::testing::store_with(b"weights");
        assert_eq!(store.ledger.reserve_bytes(), None);
        assert_eq!(store.ledger.with_reserve(|| 7), 7);
        assert!(store.ledger.reserve_bytes().is_some());
    }

    #[test]
    fn reserve_without_blocks_is_made_again_and_a_special_file_is_not_a_reserve() {
        let (_folder, store) = new_store();
        let path = store.path(layout::RESERVE_FILE);
        std::fs::File::create(&path).unwrap().set_len(MAX_BYTES).unwrap();
        assert_eq!(store.ledger.reserve_bytes(), Some(MAX_BYTES));
        store.ledger.make_reserve();
        let allocated = store.content.root.allocated_bytes(Path::new(layout::RESERVE_FILE)).unwrap();
        assert_eq!(
            Some(allocated),
            store.ledger.reserve_bytes().map(|bytes| store.ledger.size_on_disk(bytes))
        );
        std::fs::remove_file(&path).unwrap();
        std::fs::create_dir(&path).unwrap();
        assert_eq!(store.ledger.reserve_bytes(), None);
    }

    #[test]
    fn limits_of_the_policy_are_those_of_the_ledger() {
        let (_folder, store) = new_store();
        let policy = SpacePolicy {
            quota_bytes: Some(1 << 20),
            min_free_bytes: Some(12_345),
            ..SpacePolicy::default()
        };
        store.ledger.set_space_policy(policy).unwrap();
        assert_eq!((store.ledger.space_policy(), store.ledger.min_free_bytes()), (policy, 12_345));
        store.ledger.check_fits(1 << 20).unwrap();
        assert!(matches!(store.ledger.check_fits((1 << 20) + 1), Err(StoreError::Quota { .. })));
        assert!(store.ledger.could_fit(1 << 20).unwrap() && !store.ledger.could_fit((1 << 20) + 1).unwrap());
        assert_eq!((store.ledger.shortage(1 << 20), store.ledger.shortage((1 << 20) + 3)), (0, 3));
        let available = AvailableSpace { bytes: 1 << 20, is_limited_by_quota: true };
        assert_eq!(store.ledger.available_space().unwrap(), available);
        let block = store.content.root.block_bytes().unwrap();
        assert_eq!(
            [0, 1, block, block + 1].map(|bytes| store.ledger.size_on_disk(bytes)),
            [0, block, block, 2 * block]
        );
        let free = store.ledger.free_bytes().unwrap();
        assert!((1 << 20..=store.content.root.capacity_bytes().unwrap()).contains(&free), "{free}");
        assert!(store.ledger.has_space_for_record(1) && !store.ledger.has_space_for_record(u64::MAX));
        assert_eq!(store.ledger.space_status().unwrap().quota_bytes, Some(1 << 20));
    }
}
