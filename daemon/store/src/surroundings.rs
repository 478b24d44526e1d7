//! What the machine provides to the store, for `doctor`. Nothing here changes anything.

use std::path::Path;
use std::time::SystemTime;

use blobd_store_format::layout;
use rustix::fs::{AtFlags, StatxFlags, statx};

use super::Store;
use super::direct::set_direct;
use super::directories::RECORDS;

/// How many more files the file system can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inodes {
    /// The limit.
    pub total: u64,
    /// Those that are left for users without privileges.
    pub free: u64,
}

/// A file or directory of the store, and its owner.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owned {
    /// The path in the store.
    pub name: &'static str,
    /// The user id of its owner.
    pub uid: u32,
}

impl Store {
    /// The limit of files; `None` on file systems that have none, such as btrfs.
    #[must_use]
    pub fn inodes(&self) -> Option<Inodes> {
        let stat = rustix::fs::fstatvfs(self.root.directory_file()).ok()?;
        (stat.f_files > 0).then_some(Inodes { total: stat.f_files, free: stat.f_favail })
    }

    /// The number of the mount that the store is on, as in `/proc/self/mountinfo`; `None` before Linux 5.8.
    #[must_use]
    pub fn mount_id(&self) -> Option<u64> {
        let found = statx(self.root.directory_file(), "", AtFlags::EMPTY_PATH, StatxFlags::MNT_ID).ok()?;
        (found.stx_mask & StatxFlags::MNT_ID.bits() != 0).then_some(found.stx_mnt_id)
    }

    /// Whether files can be read past the page cache; `None` if no file can be opened.
    #[must_use]
    pub fn has_direct_io(&self) -> Option<bool> {
        const LARGEST_ALIGNMENT: usize = 1 << 20;
        let file = self.root.find_file(Path::new(layout::STORE_FILE)).ok()??;
        Some(set_direct(&file, LARGEST_ALIGNMENT).is_some())
    }

    /// The directories and main files that another user owns than the root directory. Files in the directories are
    /// not inspected.
    #[must_use]
    pub fn owned_by_others(&self) -> Vec<Owned> {
        const OTHERS: [&str; 4] = [layout::BLOBS, layout::RECIPES, layout::STORE_FILE, layout::LOCK_FILE];
        let Ok(owner) = self.root_status().map(|status| status.owner()) else { return Vec::new() };
        let all = RECORDS.into_iter().chain(OTHERS);
        let owned = all.filter_map(|name| {
            let uid = self.root.status(Path::new(name)).ok()??.owner();
            Some(Owned { name, uid })
        });
        owned.filter(|owned| owned.uid != owner).collect()
    }

    /// When a name in `blobs/` or `manifests/` was last changed.
    #[must_use]
    pub fn newest_change(&self) -> Option<SystemTime> {
        let directories = [layout::BLOBS, layout::MANIFESTS].into_iter();
        directories.filter_map(|name| Some(self.root.status(Path::new(name)).ok()??.modified())).max()
    }

    /// The largest number of blobs that one stored file needs; `None` if the index is being built or cannot be. Reads
    /// every recipe if there is no index yet.
    #[must_use]
    pub fn most_blobs_of_a_file(&self) -> Option<u64> {
        self.catalog_unless_building().ok().flatten().map(|catalog| catalog.most_needs())
    }
}

#[cfg(test)]
mod tests {
    use crate::testing::new_store;

    #[test]
    fn new_store_is_on_a_mount_and_belongs_to_one_user() {
        let (_folder, store) = new_store();
        assert!(store.mount_id().is_none_or(|id| id > 0));
        assert_eq!(store.owned_by_others(), []);
        assert!(store.inodes().is_none_or(|inodes| inodes.free <= inodes.total));
        assert!(store.newest_change().is_some());
        assert!(store.has_direct_io().is_some());
    }
}
