//! The reserve: a file of zeros whose space is released on a full disk, so that removal and collection
//! work. They need a little space for the file system's metadata.

use crate::AvailableSpace;
use crate::Eviction;
use crate::SpacePolicy;
use crate::SpaceStatus;
use crate::space::Space;
use std::path::Path;
use std::sync::atomic::Ordering;

use blobd_store_format::layout;

use crate::StoreError;
use crate::ledger::Ledger;
use crate::root::FileStatus;

/// The most bytes of the reserve.
const MAX_BYTES: u64 = 16 << 20;
/// More than the manifest of a name, its history and the directories above them take on disk.
const NAME_BYTES: u64 = 1 << 20;
/// The reserve is at most this fraction (one in so many) of the file system.
const SHARE: u64 = 256;

impl Ledger {
    /// Runs `work`, which frees space. On a full disk, releases the reserve first. Afterwards the
    /// reserve is created again if there is space, unless nothing was ever stored here.
    pub fn with_reserve<T>(&self, work: impl FnOnce() -> T) -> T {
        self.with_reserve_below(MAX_BYTES, work)
    }

    /// Runs `work`, which sets a name: its records take a few blocks. Releases the reserve only if there is hardly more,
    /// because data that is stored afterwards could fill what was released.
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

    /// The size of the reserve in bytes, if there is one.
    #[must_use]
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
        self.content.disk().remove_file(path)?;
        let file = self.content.disk().create_file(path, 0o600)?;
        self.content.disk().reserve(path, &file, bytes).inspect_err(|_| self.give_up_reserve())
    }

    fn give_up_reserve(&self) {
        if let Err(error) = self.content.disk().remove_file(Path::new(layout::RESERVE_FILE)) {
            tracing::warn!("{error}");
        }
    }

    /// Bytes free on the file system for a user without privileges.
    pub fn free_bytes(&self) -> Result<u64, StoreError> {
        self.content.root.free_bytes()
    }

    /// The size of the file system in bytes.
    pub fn capacity_bytes(&self) -> Result<u64, StoreError> {
        self.content.root.capacity_bytes()
    }

    /// How much of the disk the store may use.
    #[must_use]
    pub fn space_policy(&self) -> SpacePolicy {
        self.content.space.policy()
    }

    /// Changes how much of the disk the store may use. Nothing is evicted at once.
    ///
    /// # Errors
    /// If the default for the free space is needed and the size of the file system cannot be read.
    pub fn set_space_policy(&self, policy: SpacePolicy) -> Result<(), StoreError> {
        self.content.space.set_policy(policy)
    }

    /// The bytes of the file system that the store leaves free: as configured, or by the size of the file system.
    #[must_use]
    pub fn min_free_bytes(&self) -> u64 {
        self.content.space.min_free_bytes()
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
        self.content.space.status()
    }

    /// The space that no transaction has been promised yet.
    pub fn available_space(&self) -> Result<AvailableSpace, StoreError> {
        self.space().available()
    }

    /// The size on disk of a file of `bytes`: whole blocks.
    #[must_use]
    pub fn size_on_disk(&self, bytes: u64) -> u64 {
        self.content.space.on_disk(bytes)
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
        self.content.space.could_fit(bytes)
    }

    /// Whether models may be evicted when something does not fit.
    #[must_use]
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
