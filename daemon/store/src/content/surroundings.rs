//! What the machine provides to the store, for `doctor`. Nothing here changes anything.

use std::path::{Path, PathBuf};
use std::time::SystemTime;

use blobd_store_format::layout;
use rustix::fs::{Access, AtFlags, StatVfsMountFlags, StatxFlags, accessat, statx};

use crate::content::Content;
use crate::filesystem::set_direct;
use crate::root::{Directory, FileStatus};
use crate::{StoreError, StoreOwner};

/// How many more files the file system can have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Inodes {
    pub total: u64,
    /// Those that are left for users without privileges.
    pub free: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ownership {
    pub owner: StoreOwner,
    pub files: u64,
    pub foreign: u64,
    /// The first of these.
    pub examples: Vec<ForeignOwner>,
    /// Those that belong to the owner, but to a group that no file of the store should have.
    pub wrong_groups: WrongGroups,
}

/// Files and directories with a group that is neither the one of `store.json`, nor of the store's directory, nor the
/// one in which this process creates files. Modes give rights to the group of a file, and quotas of file systems count
/// it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct WrongGroups {
    pub files: u64,
    pub writable: u64,
    /// The first of these, or else the first of all.
    pub example: Option<ForeignGroup>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignGroup {
    pub path: PathBuf,
    pub gid: u32,
    pub mode: u32,
}

/// A file or directory that belongs to another user than the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ForeignOwner {
    /// The path in the store; `.` is its directory.
    pub path: PathBuf,
    pub uid: u32,
}

impl Content {
    /// The limit of files; `None` on file systems that have none, such as btrfs.
    pub fn inodes(&self) -> Option<Inodes> {
        let stat = rustix::fs::fstatvfs(self.root.directory_file()).ok()?;
        (stat.f_files > 0).then_some(Inodes { total: stat.f_files, free: stat.f_favail })
    }

    /// The mount that the store is on; `None` before Linux 5.8.
    #[expect(clippy::disallowed_methods, reason = "a file of the kernel, not of the store")]
    pub fn mount(&self) -> Option<Mount> {
        find_mount(self.mount_id()?, &std::fs::read_to_string("/proc/self/mountinfo").ok()?)
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
    pub fn has_direct_io(&self) -> Option<bool> {
        const LARGEST_ALIGNMENT: usize = 1 << 20;
        let file = self.root.find_file(Path::new(layout::STORE_FILE)).ok()??;
        Some(set_direct(&file, LARGEST_ALIGNMENT).is_some())
    }

    /// Inspects the owner of every file and directory. A directory that cannot be read belongs to another user, and is
    /// counted.
    pub fn ownership(&self) -> Result<Ownership, StoreError> {
        let (owner, wrong_groups) = (self.owner(), WrongGroups::default());
        let mut found = Ownership { owner, files: 1, foreign: 0, examples: Vec::new(), wrong_groups };
        let directory = self.root_status()?.group();
        let groups =
            [owner.gid, directory, if owner.is_own() { StoreOwner::for_process().gid } else { owner.gid }];
        if !self.owner_can_use_directory() {
            found.note_foreign(PathBuf::from("."), self.root_status()?.owner());
        }
        let mut directories = vec![(PathBuf::new(), self.root.existing_directory("")?)];
        while let Some((path, directory)) = directories.pop() {
            found.inspect(&path, &directory, &groups, &mut directories)?;
        }
        Ok(found)
    }

    /// Whether the owner can create files in the store's directory, which may be the mount point of a volume.
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
    pub fn newest_change(&self) -> Option<SystemTime> {
        let directories = [layout::BLOBS, layout::MANIFESTS].into_iter();
        directories.filter_map(|name| Some(self.root.status(Path::new(name)).ok()??.modified())).max()
    }

    /// The largest number of blobs that one stored file needs, if known. Reads every recipe if there is no index yet.
    pub fn most_blobs_of_a_file(&self) -> Option<u64> {
        self.index.catalog_unless_building().ok().flatten().map(|catalog| catalog.most_needs())
    }
}

impl Ownership {
    const MAX_EXAMPLES: usize = 3;

    fn note_foreign(&mut self, path: PathBuf, uid: u32) {
        self.foreign += 1;
        if self.examples.len() < Self::MAX_EXAMPLES {
            self.examples.push(ForeignOwner { path, uid });
        }
    }

    /// Inspects the entries of a directory, and adds its subdirectories to `next`.
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

/// A line of `/proc/self/mountinfo`.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Mount {
    /// The directory at which it is mounted.
    pub point: String,
    /// The options of the mount and of its file system, separated by commas.
    pub options: String,
    /// The device, or what its file system names instead.
    pub source: String,
}

impl Mount {
    pub fn has(&self, option: &str) -> bool {
        self.options.split(',').any(|found| found == option)
    }

    /// Whether nothing can be changed on it. After an I/O error, ext4 keeps `rw` since Linux 6.14, and adds an option.
    pub fn is_read_only(&self) -> bool {
        ["ro", "emergency_ro", "shutdown"].iter().any(|option| self.has(option))
    }
}

/// The mount with this number; `None` if there is no such line. The format is in `proc_pid_mountinfo(5)`.
fn find_mount(id: u64, mountinfo: &str) -> Option<Mount> {
    let id = id.to_string();
    let line = mountinfo.lines().find(|line| line.split(' ').next() == Some(&id))?;
    let (of_mount, of_file_system) = line.split_once(" - ")?;
    let mut of_mount = of_mount.split(' ').skip(4);
    let (point, options) = (of_mount.next()?, of_mount.next()?);
    let mut of_file_system = of_file_system.split(' ').skip(1);
    let (source, more) = (of_file_system.next()?, of_file_system.next().unwrap_or_default());
    Some(Mount { point: unescaped(point), options: format!("{options},{more}"), source: unescaped(source) })
}

/// The kernel writes a space as `\040`, and likewise tab, newline and backslash.
fn unescaped(path: &str) -> String {
    const ESCAPES: [(&str, &str); 4] = [("\\040", " "), ("\\011", "\t"), ("\\012", "\n"), ("\\134", "\\")];
    ESCAPES.iter().fold(path.to_owned(), |path, (escape, character)| path.replace(escape, character))
}

#[cfg(test)]
mod tests {
    use super::{WrongGroups, *};
    use crate::testing::new_store;

    #[test]
    fn new_store_is_on_a_mount_and_belongs_to_one_user() {
        let (_folder, store) = new_store();
        assert!(store.content.mount_id().is_none_or(|id| id > 0));
        let found = store.content.ownership().unwrap();
        assert_eq!((found.foreign, found.examples.as_slice()), (0, [].as_slice()));
        assert_eq!(found.wrong_groups, WrongGroups::default());
        assert!(found.files > 6, "its directories and files: {}", found.files);
        assert!(store.content.inodes().is_none_or(|inodes| inodes.free <= inodes.total));
        assert!(store.content.newest_change().is_some());
        assert!(store.content.has_direct_io().is_some());
    }

    #[test]
    fn files_of_wrong_groups_are_counted_and_a_writable_one_is_the_example() {
        use std::os::unix::fs::PermissionsExt as _;
        let mut found = WrongGroups::default();
        for (path, mode) in [("a", 0o640), ("b", 0o660), ("c", 0o664), ("d", 0o604)] {
            let file = tempfile::tempfile().unwrap();
            file.set_permissions(std::fs::Permissions::from_mode(mode)).unwrap();
            found.note(Path::new(path), FileStatus::from_file(&file).unwrap());
        }
        assert_eq!((found.files, found.writable), (4, 2));
        let example = found.example.unwrap();
        assert_eq!((example.path.as_path(), example.mode), (Path::new("b"), 0o660));
    }

    const LINES: &str = "\
22 1 8:1 / / rw,relatime shared:1 - ext4 /dev/sda1 rw,errors=remount-ro
31 22 0:28 / /srv/my\\040models ro,noatime - nfs4 server:/models rw,sync,vers=4.2
32 22 broken line
";

    #[test]
    fn mount_is_found_by_its_number() {
        let root = find_mount(22, LINES).unwrap();
        assert_eq!((root.point.as_str(), root.source.as_str()), ("/", "/dev/sda1"));
        assert!(root.has("rw") && root.has("errors=remount-ro") && !root.has("ro"));
        let models = find_mount(31, LINES).unwrap();
        assert_eq!(models.point, "/srv/my models");
        assert!(models.has("ro") && models.has("sync"));
        assert_eq!([2, 32, 99].map(|id| find_mount(id, LINES)), [None, None, None]);
    }
    #[test]
    fn mount_that_the_kernel_made_read_only_is_recognised() {
        let options = |options: &str| Mount {
            options: options.to_owned(),
            point: "/srv".to_owned(),
            source: "/dev/sdb".to_owned(),
        };
        for read_only in ["ro,noatime", "rw,ro,errors=remount-ro", "rw,relatime,emergency_ro", "rw,shutdown"]
        {
            assert!(options(read_only).is_read_only(), "{read_only}");
        }
        assert!(!options("rw,relatime,errors=remount-ro").is_read_only());
    }

    #[test]
    fn every_file_of_a_store_is_inspected() {
        let (_folder, store) = new_store();
        let mut paths = vec![store.path("")];
        let mut count = 0;
        while let Some(path) = paths.pop() {
            count += 1;
            paths.extend(std::fs::read_dir(path).into_iter().flatten().map(|entry| entry.unwrap().path()));
        }
        assert_eq!(store.content.ownership().unwrap().files, count);
        let deep = |levels: usize| store.path("blobs").join("d/".repeat(levels - 1));
        std::fs::create_dir_all(deep(MAX_LEVELS)).unwrap();
        let files = || store.content.ownership().unwrap().files;
        let before = files();
        std::fs::write(deep(MAX_LEVELS).join("f"), "").unwrap();
        assert_eq!(files(), before + 1);
        std::fs::create_dir(deep(MAX_LEVELS + 1)).unwrap();
        std::fs::write(deep(MAX_LEVELS + 1).join("f"), "").unwrap();
        assert_eq!(files(), before + 2, "it is nested too deep");
    }

    #[test]
    fn store_is_on_the_mount_of_its_directory_and_can_be_changed() {
        use std::os::fd::AsRawFd as _;
        let (_folder, store) = new_store();
        let directory = store.content.root.directory_file();
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", directory.as_raw_fd())).unwrap();
        let expected = info.lines().find_map(|line| line.strip_prefix("mnt_id:")?.trim().parse().ok());
        assert_eq!(store.content.mount_id(), expected);
        let mount = store.content.mount().unwrap();
        assert!(store.path("").starts_with(&mount.point), "{mount:?}");
        assert!(!mount.is_read_only() && !store.content.mount_is_read_only());
        assert_eq!(store.content.read_only_reason(), None);
        store.content.disk.refuse_changes("a test");
        assert_eq!(store.content.read_only_reason().as_deref(), Some("a test"));
    }

    #[test]
    fn limits_and_times_are_those_of_the_file_system() {
        use std::time::Duration;
        let (_folder, store) = new_store();
        let stat = rustix::fs::statvfs(store.path("")).unwrap();
        let total = store.content.inodes().map(|inodes| inodes.total);
        assert_eq!(total, Some(stat.f_files).filter(|files| *files > 0));
        let set = |name: &str, seconds| {
            let time = SystemTime::UNIX_EPOCH + Duration::from_secs(seconds);
            std::fs::File::open(store.path(name)).unwrap().set_modified(time).unwrap();
            time
        };
        let (first, second) = (set(layout::BLOBS, 1000), set(layout::MANIFESTS, 2000));
        assert_eq!(store.content.newest_change(), Some(second));
        set(layout::MANIFESTS, 500);
        assert_eq!(store.content.newest_change(), Some(first));
        let file = std::fs::File::open(store.path(layout::STORE_FILE)).unwrap();
        assert_eq!(store.content.has_direct_io(), Some(set_direct(&file, 1 << 20).is_some()));
        std::fs::remove_file(store.path(layout::STORE_FILE)).unwrap();
        assert_eq!(store.content.has_direct_io(), None);
    }

    #[test]
    fn most_blobs_of_a_file_are_those_of_the_largest_recipe() {
        let (_folder, store) = new_store();
        assert_eq!(store.content.most_blobs_of_a_file(), Some(0));
        for blobs in [&[&b"a"[..], b"b", b"c"][..], &[b"d"]] {
            let recipe = crate::testing::recipe_of(blobs);
            std::fs::write(store.path(layout::recipe(recipe.file())), recipe.to_json()).unwrap();
        }
        store.reindex().unwrap();
        assert_eq!(store.content.most_blobs_of_a_file(), Some(3));
        store.content.index().set_building(true);
        assert_eq!(store.content.most_blobs_of_a_file(), None);
    }

    #[test]
    fn escaped_characters_of_paths_are_restored() {
        assert_eq!(unescaped(r"/a\040b\011c\012d\134e"), "/a b\tc\nd\\e");
        assert_eq!(unescaped("/plain"), "/plain");
    }
}
