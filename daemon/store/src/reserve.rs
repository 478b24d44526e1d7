//! The reserve: a file of zeros that takes room for the day when there is none, so that removing
//! and collecting, which need a little for the file system's own books, work on a full disk.

use std::path::Path;

use blobd_store_format::layout;

use super::root::FileStatus;
use super::{Store, StoreError};

/// As large as the reserve gets.
const MAX_BYTES: u64 = 16 << 20;
/// The share of the file system that it takes at the most.
const SHARE: u64 = 256;

impl Store {
    /// Does something that frees space; on a full disk it may use the reserve, which is made
    /// again after it if there is room.
    pub fn with_reserve<T>(&self, work: impl FnOnce() -> T) -> T {
        if self.root.free_bytes().is_ok_and(|free| free < MAX_BYTES) {
            self.give_up_reserve();
        }
        let done = work();
        self.make_reserve();
        done
    }

    /// Makes the reserve unless it is there or there is no room for it.
    pub fn make_reserve(&self) {
        // One that a power cut has emptied takes no room, and so keeps none.
        let takes_room = self.reserve_status().is_some_and(|reserve| reserve.allocated_bytes() > 0);
        if takes_room || self.read_only_reason().is_some() {
            return;
        }
        if let Err(error) = self.try_make_reserve() {
            tracing::debug!("{error}; there is no reserve");
        }
    }

    /// How large the reserve is, if there is one.
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
