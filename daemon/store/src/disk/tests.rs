//! Tests of the disk: failed syncs, reservations, renames, owners.

use super::*;

/// A disk whose syncs fail.
#[derive(Debug)]
struct Broken;

impl Disk for Broken {
    fn sync_file(&self, _path: &Path, _file: &File) -> io::Result<()> {
        Err(Errno::IO.into())
    }
    fn sync_dir(&self, _path: &Path, _directory: &File) -> io::Result<()> {
        Err(Errno::IO.into())
    }
    fn sync_file_system(&self, _directory: &File) -> io::Result<()> {
        Err(Errno::IO.into())
    }
}

fn disk_in(folder: &tempfile::TempDir, disk: impl Disk + 'static) -> GuardedDisk {
    GuardedDisk::new(Arc::new(disk), Root::open(folder.path()).unwrap())
}

/// A disk that notes which directories are synced.
#[derive(Debug, Default)]
struct SyncedDirs(Arc<Mutex<Vec<PathBuf>>>);

impl Disk for SyncedDirs {
    fn sync_dir(&self, path: &Path, directory: &File) -> io::Result<()> {
        crate::lock(&self.0).push(path.to_owned());
        KernelDisk.sync_dir(path, directory)
    }
}

#[test]
fn every_sync_reaches_the_kernel() {
    // It refuses to sync what was opened without access.
    let opened = rustix::fs::open("/", OFlags::PATH | OFlags::CLOEXEC, Mode::empty());
    let (directory, path) = (File::from(opened.unwrap()), Path::new(""));
    for synced in [
        KernelDisk.sync_file(path, &directory),
        KernelDisk.sync_dir(path, &directory),
        KernelDisk.sync_file_system(&directory),
    ] {
        assert_eq!(Errno::from_io_error(&synced.unwrap_err()), Some(Errno::BADF));
    }
}

#[test]
fn names_of_directories_are_made_durable_once_even_if_they_exist() {
    let folder = tempfile::tempdir().unwrap();
    std::fs::create_dir(folder.path().join("a")).unwrap();
    let synced = Arc::default();
    let disk = disk_in(&folder, SyncedDirs(Arc::clone(&synced)));
    let made = |expected: &[&str]| {
        disk.create_dir_all(Path::new("a/b")).unwrap();
        let synced = std::mem::take(&mut *crate::lock(&synced));
        assert_eq!(synced, expected.iter().map(PathBuf::from).collect::<Vec<_>>());
    };
    made(&["", "a"]);
    made(&[]);
    std::fs::remove_dir(folder.path().join("a/b")).unwrap();
    made(&["a"]);
    assert!(folder.path().join("a/b").is_dir());
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
    assert_eq!(FileStatus::from_file(&file).unwrap().allocated_bytes(), 0);
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

fn mode_of(folder: &tempfile::TempDir, name: &str) -> u32 {
    use std::os::unix::fs::PermissionsExt as _;
    folder.path().join(name).metadata().unwrap().permissions().mode() & 0o7777
}

fn content_of(folder: &tempfile::TempDir, name: &str) -> Vec<u8> {
    std::fs::read(folder.path().join(name)).unwrap()
}

#[test]
fn requested_modes_are_set_with_any_umask() {
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, KernelDisk);
    for mode in [0o600, 0o644, 0o666, 0o444] {
        let name = format!("{mode:o}");
        disk.create_file(Path::new(&name), mode).unwrap();
        assert_eq!(mode_of(&folder, &name), mode, "{name}");
    }
    disk.create_dir(Path::new("d")).unwrap();
    assert_eq!(mode_of(&folder, "d"), 0o755);
    let file = disk.set_mode_of(Path::new("600"), 0o640).unwrap();
    assert_eq!((mode_of(&folder, "600"), file.metadata().unwrap().len()), (0o640, 0));
    disk.set_mode(Path::new("600"), &file, 0o604).unwrap();
    assert_eq!(mode_of(&folder, "600"), 0o604);
}

#[test]
fn directory_that_exists_is_created_and_a_file_in_its_place_is_not() {
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, KernelDisk);
    disk.create_dir(Path::new("d")).unwrap();
    disk.create_dir(Path::new("d")).unwrap();
    let error = disk.create_dir(Path::new("absent/d")).unwrap_err();
    assert!(matches!(error, StoreError::Io { action: "create directory", .. }), "{error}");
    std::fs::write(folder.path().join("f"), "").unwrap();
    assert!(disk.create_dir_all(Path::new("f/d")).is_err());
    disk.create_dir_all(Path::new("d/e/f")).unwrap();
    assert!(folder.path().join("d/e/f").is_dir());
}

#[test]
fn small_file_is_replaced_whole_even_if_an_earlier_attempt_left_something() {
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, KernelDisk);
    let (new, target) = (Path::new("new"), Path::new("f"));
    std::fs::write(folder.path().join("new"), "a longer text that was left").unwrap();
    for content in ["first", "2nd"] {
        disk.replace_file(new, target, content.as_bytes(), 0o644).unwrap();
        assert_eq!((content_of(&folder, "f"), mode_of(&folder, "f")), (content.into(), 0o644));
        assert_eq!(names(&folder), ["f"]);
    }
    disk.write_file(new, b"third", 0o600).unwrap();
    assert_eq!((content_of(&folder, "new"), mode_of(&folder, "new")), (b"third".to_vec(), 0o600));
}

#[test]
fn published_file_replaces_nothing_and_a_renamed_one_does() {
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, KernelDisk);
    let write = |name: &str, content: &str| std::fs::write(folder.path().join(name), content).unwrap();
    write("a", "a");
    assert!(disk.publish(Path::new("a"), Path::new("b")).unwrap());
    write("a", "another");
    assert!(!disk.publish(Path::new("a"), Path::new("b")).unwrap());
    assert_eq!((content_of(&folder, "a"), content_of(&folder, "b")), (b"another".to_vec(), b"a".to_vec()));
    disk.rename(Path::new("a"), Path::new("b")).unwrap();
    assert_eq!((names(&folder), content_of(&folder, "b")), (vec!["b".to_owned()], b"another".to_vec()));
    let error = disk.publish(Path::new("absent"), Path::new("c")).unwrap_err();
    assert!(matches!(error, StoreError::Io { action: "rename to", .. }), "{error}");
}

#[test]
fn removal_reports_what_was_freed_and_whether_there_was_anything() {
    use std::os::unix::fs::MetadataExt as _;
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, KernelDisk);
    std::fs::write(folder.path().join("f"), vec![7; 9000]).unwrap();
    let bytes = folder.path().join("f").metadata().unwrap().blocks() * 512;
    assert_eq!(disk.remove_file(Path::new("f")).unwrap(), Some(bytes));
    assert_eq!(disk.remove_file(Path::new("f")).unwrap(), None);
    std::fs::create_dir_all(folder.path().join("d/e")).unwrap();
    assert!(disk.remove_file(Path::new("d")).is_err(), "a directory is no file");
    assert!(!disk.remove_dir(Path::new("d")).unwrap(), "it is not empty");
    assert!(disk.remove_dir(Path::new("d/e")).unwrap() && disk.remove_dir(Path::new("d")).unwrap());
    assert!(!disk.remove_dir(Path::new("d")).unwrap());
}

#[test]
fn removed_directory_is_made_durable_again_when_it_is_created_again() {
    let folder = tempfile::tempdir().unwrap();
    let synced = Arc::default();
    let disk = disk_in(&folder, SyncedDirs(Arc::clone(&synced)));
    disk.create_dir_all(Path::new("a")).unwrap();
    disk.remove_dir(Path::new("a")).unwrap();
    std::fs::create_dir(folder.path().join("a")).unwrap();
    disk.create_dir_all(Path::new("a")).unwrap();
    assert_eq!(crate::lock(&synced).len(), 2);
}

#[test]
fn tree_is_removed_down_to_a_limit() {
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, KernelDisk);
    let make = |levels: usize| {
        let deepest = folder.path().join("t/".repeat(1 + levels));
        std::fs::create_dir_all(&deepest).unwrap();
        std::fs::write(deepest.join("f"), "").unwrap();
    };
    make(MAX_LEVELS);
    disk.remove_tree(Path::new("t")).unwrap();
    assert_eq!(names(&folder), [""; 0]);
    make(MAX_LEVELS + 1);
    assert!(disk.remove_tree(Path::new("t")).is_err(), "a directory this deep is treated as a file");
    assert_eq!(names(&folder), ["t"]);
}

#[test]
fn reservation_allocates_the_length_and_writes_go_to_their_place() {
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, KernelDisk);
    let path = Path::new("f");
    let file = disk.create_file(path, 0o600).unwrap();
    disk.reserve(path, &file, 100_000).unwrap();
    let status = FileStatus::from_file(&file).unwrap();
    assert!(status.len() == 100_000 && status.allocated_bytes() >= 100_000);
    let many = vec![7; WORTH_WRITEBACK_BYTES];
    disk.write_at(path, &file, &many, 10).unwrap();
    disk.write_at(path, &disk.open_file(path).unwrap(), b"few", 0).unwrap();
    let content = content_of(&folder, "f");
    assert_eq!(
        (&content[..3], &content[10..10 + many.len()], content.len()),
        (&b"few"[..], &many[..], 100_000)
    );
    disk.write_at(path, &disk.open_or_create(path, 0o600).unwrap(), b"two", 1).unwrap();
    assert_eq!(content_of(&folder, "f")[..4], *b"ftwo");
    disk.open_or_create(Path::new("g"), 0o640).unwrap();
    assert_eq!(mode_of(&folder, "g"), 0o640);
    assert!(disk.open_file(Path::new("absent")).is_err());
    assert!(disk.create_file(path, 0o600).is_err(), "it exists");
}

#[test]
fn first_reason_to_refuse_changes_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let disk = disk_in(&folder, Broken);
    assert_eq!(disk.failure(), None);
    disk.refuse_changes("first");
    disk.refuse_changes("second");
    assert_eq!(disk.failure(), Some("first"));
    let refused = disk.create_file(Path::new("f"), 0o600).unwrap_err();
    assert!(matches!(refused, StoreError::ReadOnly { reason } if reason == "first"));
    for (sync, path) in [(0, "f"), (1, "d"), (2, "d"), (3, "..")] {
        let disk = disk_in(&folder, Broken);
        std::fs::create_dir_all(folder.path().join("d")).unwrap();
        let directory = File::open(folder.path()).unwrap();
        let failed = match sync {
            0 => disk.sync_file(Path::new("f"), &directory),
            1 => disk.sync_dir(Path::new("d")),
            2 => disk.sync_file_system(&directory, Path::new("d")),
            _ => disk.sync_above_root(),
        };
        assert!(matches!(failed, Err(StoreError::Io { .. })));
        let reason = disk.failure().unwrap();
        assert!(reason.contains(path) && reason.ends_with("check the disk, then restart blobd"), "{reason}");
    }
}

#[test]
fn all_errors_of_a_failed_disk_are_known() {
    for errno in [Errno::IO, Errno::ROFS, Errno::SHUTDOWN, Errno::UCLEAN, Errno::NODEV] {
        assert!(is_disk_failure(&errno.into()), "{errno}");
    }
    assert!(!is_disk_failure(&io::ErrorKind::Other.into()));
}
