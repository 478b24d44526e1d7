//! What the machine provides to the store, for `doctor`. Nothing here changes anything.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use blobd_store_format::layout;
use rustix::fs::{Access, AtFlags, StatVfsMountFlags, StatxFlags, accessat, statx};

use crate::content::Content;
use crate::direct::set_direct;
use crate::root::{Directory, FileStatus};
use crate::{StoreError, StoreOwner};

mod mount;

pub use mount::Mount;

/// How many more files the file system can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inodes {
    /// The limit.
    pub total: u64,
    /// Those that are left for users without privileges.
    pub free: u64,
}

/// Whom the files of the store belong to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ownership {
    /// The store's owner.
    pub owner: StoreOwner,
    /// How many files and directories there are.
    pub files: u64,
    /// How many of them belong to another user.
    pub foreign: u64,
    /// The first of these.
    pub examples: Vec<ForeignOwner>,
    /// Those that belong to the owner, but to a group that no file of the store should have.
    pub wrong_groups: WrongGroups,
}

/// Files and directories with a group that is neither the one of `store.json`, nor of the store's directory, nor the one
/// in which this process creates files. Modes give rights to the group of a file, and quotas of file systems count it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WrongGroups {
    /// How many.
    pub files: u64,
    /// How many of them the group may write.
    pub writable: u64,
    /// The first of these, or else the first of all.
    pub example: Option<ForeignGroup>,
}

/// A file or directory with a wrong group.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignGroup {
    /// The path in the store.
    pub path: PathBuf,
    /// The group id.
    pub gid: u32,
    /// Its permissions.
    pub mode: u32,
}

/// A file or directory that belongs to another user than the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignOwner {
    /// The path in the store; `.` is its directory.
    pub path: PathBuf,
    /// The user id of its owner.
    pub uid: u32,
}

impl Content {
    /// The limit of files; `None` on file systems that have none, such as btrfs.
    #[must_use]
    pub fn inodes(&self) -> Option<Inodes> {
        let stat = rustix::fs::fstatvfs(self.root.directory_file()).ok()?;
        (stat.f_files > 0).then_some(Inodes { total: stat.f_files, free: stat.f_favail })
    }

    /// The mount that the store is on; `None` before Linux 5.8.
    #[must_use]
    #[expect(clippy::disallowed_methods, reason = "a file of the kernel, not of the store")]
    pub fn mount(&self) -> Option<Mount> {
        mount::mount(self.mount_id()?, &std::fs::read_to_string("/proc/self/mountinfo").ok()?)
    }

    /// Whether the file system has become read-only, or was mounted so.
    pub(crate) fn mount_is_read_only(&self) -> bool {
        let stat = rustix::fs::fstatvfs(self.root.directory_file());
        stat.is_ok_and(|stat| stat.f_flag.contains(StatVfsMountFlags::RDONLY))
            || self.mount().is_some_and(|mount| mount.is_read_only())
    }

    fn mount_id(&self) -> Option<u64> {
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

    /// Inspects the owner of every file and directory.
    ///
    /// # Errors
    /// [`StoreError::Io`] if the store's directory cannot be listed. A directory below it that cannot be read belongs
    /// to another user, and is counted.
    pub fn ownership(&self) -> Result<Ownership, StoreError> {
        let (owner, wrong_groups) = (self.owner(), WrongGroups::default());
        let mut found = Ownership { owner, files: 1, foreign: 0, examples: Vec::new(), wrong_groups };
        let directory = self.root_status()?.group();
        let groups =
            [owner.gid, directory, if owner.is_own() { StoreOwner::of_process().gid } else { owner.gid }];
        if !self.owner_can_use_directory() {
            found.note_foreign(PathBuf::from("."), self.root_status()?.owner());
        }
        let mut directories = vec![(PathBuf::new(), self.root.existing_directory("")?)];
        while let Some((path, directory)) = directories.pop() {
            found.inspect(&path, &directory, &groups, &mut directories)?;
        }
        Ok(found)
    }

    /// Whether the store's directory is the owner's, or one of another user in which the owner can create files, such
    /// as the mount point of a volume.
    fn owner_can_use_directory(&self) -> bool {
        let owner = self.owner();
        let Ok(status) = self.root_status() else { return false };
        let may_write =
            || accessat(self.root.directory_file(), ".", Access::WRITE_OK, AtFlags::empty()).is_ok();
        // The kernel answers only for the user of this process.
        let is_writable = |status: FileStatus| match status.permissions() & 0o022 {
            0o020 => status.group() == owner.gid,
            others => others != 0,
        };
        status.owner() == owner.uid || if owner.is_own() { may_write() } else { is_writable(status) }
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
        self.index.catalog_unless_building().ok().flatten().map(|catalog| catalog.most_needs())
    }
}

impl Ownership {
    /// The most examples that are kept.
    const MAX_EXAMPLES: usize = 3;

    fn note_foreign(&mut self, path: PathBuf, uid: u32) {
        self.foreign += 1;
        if self.examples.len() < Self::MAX_EXAMPLES {
            self.examples.push(ForeignOwner { path, uid });
        }
    }

    /// Inspects the entries of a directory, and adds the directories among them to those that are still to be
    /// inspected.
    fn inspect(
        &mut self,
        path: &Path,
        directory: &Directory,
        groups: &[u32],
        next: &mut Vec<(PathBuf, Directory)>,
    ) -> Result<(), StoreError> {
        for entry in directory.entries()? {
            let entry = entry?;
            let path = path.join(&entry.name);
            // It may have been removed meanwhile.
            let Some(status) = directory.status(&entry.name)? else { continue };
            self.files += 1;
            if status.owner() != self.owner.uid {
                self.note_foreign(path.clone(), status.owner());
            } else if !groups.contains(&status.group()) {
                self.wrong_groups.note(&path, status);
            }
            if status.is_dir()
                && path.components().count() <= MAX_LEVELS
                && let Ok(Some(below)) = directory.find_directory(&entry.name)
            {
                next.push((path, below));
            }
        }
        Ok(())
    }
}

impl WrongGroups {
    fn note(&mut self, path: &Path, status: FileStatus) {
        const GROUP_WRITE: u32 = 0o020;
        let (gid, mode) = (status.group(), status.permissions());
        let is_writable = mode & GROUP_WRITE != 0;
        if self.example.is_none() || is_writable && self.writable == 0 {
            self.example = Some(ForeignGroup { path: path.to_path_buf(), gid, mode });
        }
        self.files += 1;
        self.writable += u64::from(is_writable);
    }
}

/// The store's own directories are not nested this deep; what is below deeper ones is not inspected.
const MAX_LEVELS: usize = 32;

#[cfg(test)]
mod tests {
    use super::WrongGroups;
    use crate::testing::new_store;

    #[test]
    fn new_store_is_on_a_mount_and_belongs_to_one_user() {
        let (_folder, store) = new_store();
        assert!(store.content().mount_id().is_none_or(|id| id > 0));
        let found = store.content().ownership().unwrap();
        assert_eq!((found.foreign, found.examples.as_slice()), (0, [].as_slice()));
        assert_eq!(found.wrong_groups, WrongGroups::default());
        assert!(found.files > 6, "its directories and files: {}", found.files);
        assert!(store.content().inodes().is_none_or(|inodes| inodes.free <= inodes.total));
        assert!(store.content().newest_change().is_some());
        assert!(store.content().has_direct_io().is_some());
    }
}
