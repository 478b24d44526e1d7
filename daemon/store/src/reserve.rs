//! The reserve: a file of zeros whose space is released on a full disk, so that removal and collection
//! work. They need a little space for the file system's metadata.

use std::path::Path;
use std::sync::atomic::Ordering;

use blobd_store_format::layout;

use super::root::FileStatus;
use super::{Store, StoreError};

/// The most bytes of the reserve.
const MAX_BYTES: u64 = 16 << 20;
/// More than the manifest of a name, its history and the directories above them take on disk.
const NAME_BYTES: u64 = 1 << 20;
/// The reserve is at most this fraction (one in so many) of the file system.
const SHARE: u64 = 256;

impl Store {
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
    pub(super) fn has_space_for_record(&self, length: u64) -> bool {
        const LEFT_BYTES: u64 = 64 << 10;
        let needed = self.size_on_disk(length).saturating_add(LEFT_BYTES);
        self.root.free_bytes().is_ok_and(|free| free >= needed)
    }

    fn with_reserve_below<T>(&self, free_bytes: u64, work: impl FnOnce() -> T) -> T {
        if self.reserve_bytes().is_some() {
            self.wants_reserve.store(true, Ordering::Relaxed);
        }
        if self.root.free_bytes().is_ok_and(|free| free < free_bytes) {
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
        if has_blocks || self.refuses_changes() {
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
        let found = self.root.status(Path::new(layout::RESERVE_FILE)).ok().flatten();
        found.filter(FileStatus::is_file)
    }

    fn try_make_reserve(&self) -> Result<(), StoreError> {
        let path = Path::new(layout::RESERVE_FILE);
        let bytes = MAX_BYTES.min(self.root.capacity_bytes()? / SHARE);
        if self.root.free_bytes()? < bytes.saturating_mul(4) {
            return Ok(());
        }
        self.disk().remove_file(path)?;
        let file = self.disk().create_file(path, 0o600)?;
        self.disk().reserve(path, &file, bytes).inspect_err(|_| self.give_up_reserve())
    }

    fn give_up_reserve(&self) {
        if let Err(error) = self.disk().remove_file(Path::new(layout::RESERVE_FILE)) {
            tracing::warn!("{error}");
        }
    }
}
