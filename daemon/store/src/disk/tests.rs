//! Tests of the disk: failed syncs, reservations, renames, owners.

use super::*;

/// A disk whose syncs fail.
#[derive(Debug)]
struct Broken;

impl Disk for Broken {
    fn create_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
        KernelDisk.create_dir(root, path)
    }
    fn create_file(&self, root: &Root, path: &Path, mode: u32) -> io::Result<File> {
        KernelDisk.create_file(root, path, mode)
    }
    fn open_file(&self, root: &Root, path: &Path, change: Change) -> io::Result<File> {
        KernelDisk.open_file(root, path, change)
    }
    fn reserve(&self, path: &Path, file: &File, size: u64) -> io::Result<()> {
        KernelDisk.reserve(path, file, size)
    }
    fn write_at(&self, path: &Path, file: &File, bytes: &[u8], offset: u64) -> io::Result<()> {
        KernelDisk.write_at(path, file, bytes, offset)
    }
    fn set_mode(&self, path: &Path, file: &File, mode: u32) -> io::Result<()> {
        KernelDisk.set_mode(path, file, mode)
    }
    fn sync_file(&self, _path: &Path, _file: &File) -> io::Result<()> {
        Err(rustix::io::Errno::IO.into())
    }
    fn sync_dir(&self, _path: &Path, _directory: &File) -> io::Result<()> {
        Err(rustix::io::Errno::IO.into())
    }
    fn sync_file_system(&self, _directory: &File) -> io::Result<()> {
        Err(rustix::io::Errno::IO.into())
    }
    fn rename(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        KernelDisk.rename(root, from, to)
    }
    fn publish(&self, root: &Root, from: &Path, to: &Path) -> io::Result<()> {
        KernelDisk.publish(root, from, to)
    }
    fn remove_file(&self, root: &Root, path: &Path) -> io::Result<()> {
        KernelDisk.remove_file(root, path)
    }
    fn remove_dir(&self, root: &Root, path: &Path) -> io::Result<()> {
        KernelDisk.remove_dir(root, path)
    }
}

fn disk_in(folder: &tempfile::TempDir, disk: impl Disk + 'static) -> GuardedDisk {
    GuardedDisk::new(Arc::new(disk), Root::open(folder.path()).unwrap())
}

#[test]
fn failed_sync_ends_all_changes_and_is_remembered() {
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, Broken);
    let path = Path::new("f");
    let file = disk.create_file(path, 0o600).unwrap();
    assert!(matches!(disk.sync_file(path, &file), Err(StoreError::Io { action: "sync", .. })));
    assert!(disk.failure().unwrap().contains("cannot sync"), "{:?}", disk.failure());
    for refused in [disk.sync_dir(Path::new("")), disk.rename(path, Path::new("g"))] {
        assert!(matches!(refused, Err(StoreError::ReadOnly { .. })));
    }
    assert!(folder.path().join("f").exists());
}

#[test]
fn only_disk_failures_end_all_changes() {
    for errno in [Errno::MFILE, Errno::NFILE, Errno::NOMEM, Errno::NOENT, Errno::ACCESS] {
        assert!(!is_disk_failure(&errno.into()), "{errno}");
    }
    assert!(is_disk_failure(&Errno::IO.into()));
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, Broken);
    disk.sync_dir(Path::new("absent")).unwrap_err();
    assert_eq!(disk.failure(), None);
}

#[test]
fn failed_reservation_allocates_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::open(folder.path()).unwrap();
    let path = Path::new("f");
    let file = KernelDisk.create_file(&root, path, 0o600).unwrap();
    let error = KernelDisk.reserve(path, &file, 1 << 60).unwrap_err();
    assert!(super::super::error::is_no_space(&error) || error.kind() == io::ErrorKind::FileTooLarge);
    assert_eq!(FileStatus::of(&file).unwrap().allocated_bytes(), 0);
}

fn names(folder: &tempfile::TempDir) -> Vec<String> {
    let mut names: Vec<_> = std::fs::read_dir(folder.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn link_and_unlink_renames_and_replaces_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let root = Root::open(folder.path()).unwrap();
    let rename = |from: &'static str, to: &'static str| {
        let (from_dir, from) = root.parent_of(Path::new(from)).unwrap();
        let (to_dir, to) = root.parent_of(Path::new(to)).unwrap();
        link_and_unlink((&from_dir, from), (&to_dir, to))
    };
    std::fs::write(folder.path().join("a"), "a").unwrap();
    rename("a", "b").unwrap();
    assert_eq!(names(&folder), ["b"]);
    std::fs::write(folder.path().join("a"), "another").unwrap();
    assert_eq!(rename("a", "b").unwrap_err().kind(), io::ErrorKind::AlreadyExists);
    assert_eq!(std::fs::read(folder.path().join("b")).unwrap(), b"a");
    assert_eq!(names(&folder), ["a", "b"]);
    assert_eq!(rename("absent", "c").unwrap_err().kind(), io::ErrorKind::NotFound);
}

#[test]
fn new_directory_keeps_the_group_bit_that_it_inherits() {
    use std::os::unix::fs::PermissionsExt as _;
    let folder = tempfile::tempdir().unwrap();
    std::fs::set_permissions(folder.path(), std::fs::Permissions::from_mode(0o2700)).unwrap();
    let root = Root::open(folder.path()).unwrap();
    KernelDisk.create_dir(&root, Path::new("d")).unwrap();
    KernelDisk.create_dir(&root, Path::new("d/e")).unwrap();
    for path in ["d", "d/e"] {
        let mode = folder.path().join(path).metadata().unwrap().permissions().mode();
        assert_eq!(mode & 0o7777, 0o2755, "{path}");
    }
}
