//! With both resolvers: links are not followed, opening does not block, and types are checked.

use std::fs;
use std::os::unix::fs::{PermissionsExt as _, symlink};
use std::os::unix::net::UnixListener;
use std::time::Instant;

use rustix::fs::{CWD, FileType, mkfifoat};
use tempfile::TempDir;

use super::*;
use crate::disk::{Change, Disk as _, GuardedDisk, KernelDisk};
use crate::owner::StoreOwner;

/// A root with some files, and a directory next to it that must not be accessed.
struct TestRoot {
    folder: TempDir,
    root: Root,
}

impl TestRoot {
    fn new(resolver: Resolver) -> Self {
        let folder = tempfile::tempdir().unwrap();
        for directory in ["store/d/e", "outside"] {
            fs::create_dir_all(folder.path().join(directory)).unwrap();
        }
        fs::write(folder.path().join("store/d/e/f"), "inside").unwrap();
        fs::write(folder.path().join("outside/secret"), "secret").unwrap();
        let root = Root::open(folder.path().join("store")).unwrap();
        let Inner { place, directory, .. } = &*root.0;
        let (place, directory) = (place.clone(), directory.try_clone().unwrap());
        Self {
            folder,
            root: Root(Arc::new(Inner { place, directory, owner: StoreOwner::for_process(), resolver })),
        }
    }

    fn full(&self, name: &str) -> PathBuf {
        self.root.full(name).path().to_path_buf()
    }

    fn outside(&self, name: &str) -> PathBuf {
        self.folder.path().join("outside").join(name)
    }

    fn disk(&self) -> GuardedDisk {
        GuardedDisk::new(Arc::new(KernelDisk), self.root.clone())
    }
}

fn each(test: impl Fn(&TestRoot)) {
    for resolver in [Resolver::Openat2, Resolver::Walk] {
        test(&TestRoot::new(resolver));
    }
}

fn found(error: &StoreError) -> &str {
    match error {
        StoreError::UnexpectedFile { found, .. } => found,
        other => panic!("{other}"),
    }
}

#[test]
fn files_and_directories_are_found_by_relative_paths() {
    each(|place| {
        let root = &place.root;
        assert_eq!(root.read_limited(Path::new("d/e/f"), 100).unwrap().unwrap(), b"inside");
        assert_eq!(root.read_limited(Path::new("d/e/f"), 3).unwrap().unwrap(), b"insi", "the excess shows");
        assert!(root.find_file(Path::new("d/x/f")).unwrap().is_none());
        assert!(root.find_directory(Path::new("x")).unwrap().is_none());
        assert_eq!(root.status(Path::new("d/e/f")).unwrap().unwrap().len(), 6);
        let entries = root.find_directory(Path::new("d")).unwrap().unwrap();
        let entries: Vec<_> = entries.entries().unwrap().map(Result::unwrap).collect();
        assert_eq!(entries.len(), 1);
        assert!(entries[0].name == "e" && entries[0].is_dir());
    });
}

#[test]
fn no_link_is_followed_in_any_component() {
    each(|place| {
        symlink(place.outside("secret"), place.full("d/link")).unwrap();
        symlink("e/f", place.full("d/inner")).unwrap();
        symlink("nowhere", place.full("d/dangling")).unwrap();
        symlink(place.outside(""), place.full("dir")).unwrap();
        let root = &place.root;
        for name in ["d/link", "d/inner", "d/dangling", "dir", "dir/secret"] {
            let path = Path::new(name);
            let error = root.open_file(path).unwrap_err();
            assert_eq!(found(&error), "symbolic link", "{name}");
            assert!(root.find_file(path).is_err(), "{name} is not missing");
        }
        assert_eq!(root.status(Path::new("d/dangling")).unwrap().unwrap().kind(), FileType::Symlink);
        assert_eq!(found(&root.status(Path::new("dir/secret")).unwrap_err()), "symbolic link");
        assert!(root.find_directory(Path::new("dir")).is_err());
        let disk = place.disk();
        for name in ["dir/new", "d/link"] {
            disk.create_file(Path::new(name), 0o600).unwrap_err();
            disk.open_or_create(Path::new(name), 0o600).unwrap_err();
        }
        disk.create_dir_all(Path::new("dir/new")).unwrap_err();
        disk.remove_file(Path::new("dir/secret")).unwrap_err();
        disk.rename(Path::new("d/e/f"), Path::new("dir/f")).unwrap_err();
        assert_eq!(fs::read_dir(place.outside("")).unwrap().count(), 1);
    });
}

#[test]
fn no_path_leads_out_of_the_root() {
    each(|place| {
        let absolute = place.outside("secret");
        for path in [Path::new("../outside/secret"), Path::new("d/../../outside/secret"), &absolute] {
            assert!(place.root.open_file(path).is_err(), "{}", path.display());
        }
    });
}

#[test]
fn irregular_file_is_refused_without_blocking() {
    each(|place| {
        mkfifoat(CWD, place.full("fifo"), Mode::from_raw_mode(0o600)).unwrap();
        let _listener = UnixListener::bind(place.full("socket")).unwrap();
        let began = Instant::now();
        for (name, kind) in [("fifo", "FIFO"), ("socket", "socket"), ("d", "directory")] {
            let path = Path::new(name);
            assert_eq!(found(&place.root.open_file(path).unwrap_err()), kind);
            assert!(place.disk().open_or_create(path, 0o600).is_err(), "{name}");
        }
        assert_eq!(found(&place.root.open_file(Path::new("fifo/x")).unwrap_err()), "FIFO");
        assert!(began.elapsed().as_secs() < 10);
    });
}

#[test]
fn file_with_another_name_is_not_changed() {
    each(|place| {
        fs::hard_link(place.outside("secret"), place.full("d/hard")).unwrap();
        let path = Path::new("d/hard");
        for change in [Change::Content, Change::Mode] {
            KernelDisk.open_file(&place.root, path, change).unwrap_err();
        }
        assert_eq!(found(&place.disk().open_file(path).unwrap_err()), "file with 2 names");
        assert_eq!(found(&place.disk().set_mode_of(path, 0o777).unwrap_err()), "file with 2 names");
        assert_ne!(fs::metadata(place.outside("secret")).unwrap().permissions().mode() & 0o777, 0o777);
        place.disk().remove_file(path).unwrap();
        assert_eq!(fs::read(place.outside("secret")).unwrap(), b"secret");
    });
}

#[test]
fn tree_is_removed_without_the_targets_of_its_links() {
    each(|place| {
        symlink(place.outside(""), place.full("d/dir")).unwrap();
        symlink(place.outside("secret"), place.full("d/e/link")).unwrap();
        mkfifoat(CWD, place.full("d/e/fifo"), Mode::from_raw_mode(0o600)).unwrap();
        place.disk().remove_tree(Path::new("d")).unwrap();
        assert!(!place.full("d").exists());
        assert_eq!(fs::read(place.outside("secret")).unwrap(), b"secret");
        place.disk().remove_tree(Path::new("d")).unwrap();
    });
}

#[test]
fn tree_that_is_a_link_is_not_entered() {
    each(|place| {
        symlink(place.outside(""), place.full("t")).unwrap();
        place.disk().remove_tree(Path::new("t")).unwrap_err();
        assert_eq!(place.root.tree_bytes(Path::new("t")), 0);
        assert!(place.outside("secret").exists());
    });
}

#[test]
fn created_file_replaces_no_other() {
    each(|place| {
        let path = Path::new("d/e/f");
        place.disk().create_file(path, 0o600).unwrap_err();
        assert_eq!(fs::read(place.full("d/e/f")).unwrap(), b"inside");
    });
}

#[test]
fn blob_with_a_short_kernel_lease_is_opened_after_it() {
    let place = TestRoot::new(Resolver::Openat2);
    let directory = place.root.try_open_directory(Path::new("d/e")).unwrap();
    let tries = std::cell::Cell::new(0);
    let opened = retry_while_leased(|| {
        tries.set(tries.get() + 1);
        if tries.get() < 3 { Err(Errno::WOULDBLOCK) } else { openat(&directory, "f", FILE, Mode::empty()) }
    });
    assert!(opened.is_ok() && tries.get() == 3);
    let (file, status) = open_blob_in(&directory, "f").unwrap();
    assert_eq!(status.len(), 6);
    let flags = rustix::fs::fcntl_getfl(&file).unwrap();
    assert!(!flags.contains(OFlags::NONBLOCK), "{flags:?}");
}

#[test]
fn directory_that_is_removed_while_it_is_listed_has_no_more_entries() {
    each(|place| {
        let parent = place.root.find_directory(Path::new("d")).unwrap().unwrap();
        let listed = parent.find_directory("e").unwrap().unwrap();
        let names = |directory: &Directory| {
            let mut names = Vec::new();
            let add = |entry: Entry| {
                names.push(entry.name);
                Ok(())
            };
            directory.each_entry(add).unwrap();
            names
        };
        assert_eq!(names(&listed), ["f"]);
        assert_eq!(names(&listed), ["f"], "from the start again");
        fs::remove_dir_all(place.full("d/e")).unwrap();
        assert!(names(&listed).is_empty());
    });
}

#[test]
fn entries_of_an_open_directory_are_found_and_their_links_not_followed() {
    each(|place| {
        symlink(place.outside("secret"), place.full("d/link")).unwrap();
        symlink(place.outside(""), place.full("d/dir")).unwrap();
        fs::write(place.full("d/f"), vec![7; 5000]).unwrap();
        let directory = place.root.find_directory(Path::new("d")).unwrap().unwrap();
        assert_eq!(directory.own_status().unwrap().kind(), FileType::Directory);
        assert_eq!(directory.status("f").unwrap().unwrap().len(), 5000);
        assert_eq!(directory.status("link").unwrap().unwrap().kind(), FileType::Symlink);
        assert!(directory.status("absent").unwrap().is_none());
        assert_eq!(directory.find_entry("f").unwrap().unwrap().metadata().unwrap().len(), 5000);
        assert!(directory.find_entry("absent").unwrap().is_none());
        assert!(directory.find_entry("link").is_err() && directory.find_directory("dir").is_err());
        let below = directory.find_directory("e").unwrap().unwrap();
        assert_eq!(below.place, place.root.full("d/e"));
        assert!(directory.find_directory("absent").unwrap().is_none());
        let Err(StoreError::Io { action, path, .. }) = directory.find_directory("f").map(drop) else {
            panic!()
        };
        assert_eq!((action, path), (OPEN_DIRECTORY, place.root.full("d/f")));
        let mut names = directory.parsed_names(|name| (name != "f").then(|| name.to_owned())).unwrap();
        names.sort();
        assert_eq!(names, ["dir", "e", "link"]);
        assert!(!directory.is_empty());
        directory.remove_file("link").unwrap();
        assert!(fs::symlink_metadata(place.full("d/link")).is_err() && place.outside("secret").exists());
        assert!(directory.remove_file("link").is_err());
        below.remove_file("f").unwrap();
        assert!(below.is_empty());
    });
}

#[test]
fn bytes_of_a_tree_are_those_of_its_files_and_links_down_to_a_limit() {
    use std::os::unix::fs::MetadataExt as _;
    let bytes = |path: &Path| fs::symlink_metadata(path).unwrap().blocks() * 512;
    each(|place| {
        let tree = |path: &str| place.root.tree_bytes(Path::new(path));
        fs::write(place.full("d/f"), vec![7; 9000]).unwrap();
        symlink("f".repeat(200), place.full("d/e/link")).unwrap();
        let files = ["d/f", "d/e/f", "d/e/link"].map(|path| bytes(&place.full(path)));
        assert_eq!(tree("d"), files.iter().sum::<u64>());
        assert_eq!((tree("absent"), tree("d/f")), (0, 0));
        let allocated = |path: &str| place.root.allocated_bytes(Path::new(path)).unwrap();
        assert_eq!((allocated("d/f"), allocated("absent")), (files[0], 0));
        let deep = |levels: usize| place.full("t").join("d/".repeat(levels));
        fs::create_dir_all(deep(40)).unwrap();
        let empty = tree("t");
        fs::write(deep(32).join("f"), vec![7; 9000]).unwrap();
        assert_eq!(tree("t") - empty, bytes(&deep(32).join("f")));
        fs::write(deep(33).join("f"), vec![7; 9000]).unwrap();
        assert_eq!(tree("t") - empty, bytes(&deep(32).join("f")), "it is nested too deep");
    });
}

#[test]
fn errors_name_the_path_and_what_is_wrong_with_it() {
    each(|place| {
        let root = &place.root;
        let expected = |error: StoreError| match error {
            StoreError::UnexpectedFile { path, found, expected } => (path, found, expected),
            other => panic!("{other}"),
        };
        // The first component of the wrong type is named.
        let below = expected(root.open_file(Path::new("d/e/f/g/h")).unwrap_err());
        assert_eq!(below, (root.full("d/e/f"), "regular file".to_owned(), "directory"));
        let directory = expected(root.find_directory(Path::new("d/e/f")).unwrap_err());
        assert_eq!(directory, (root.full("d/e/f"), "regular file".to_owned(), "directory"));
        let file = expected(root.open_file(Path::new("d/e")).unwrap_err());
        assert_eq!(file, (root.full("d/e"), "directory".to_owned(), "regular file"));
        let unexpected = expected(root.unexpected_file("d", FileType::Fifo));
        assert_eq!(unexpected, (root.full("d"), "FIFO".to_owned(), "regular file"));
        let missing = root.existing_directory("d/x").unwrap_err();
        assert!(
            matches!(&missing, StoreError::MissingDirectory { path } if *path == root.full("d/x")),
            "{missing}"
        );
        let absent = root.open_file(Path::new("d/x")).unwrap_err();
        let StoreError::Io { action: "open", path, source } = absent else { panic!("{absent}") };
        assert_eq!((path, source.kind()), (root.full("d/x"), io::ErrorKind::NotFound));
        let failure = |errno: Errno| root.failure("write", Path::new("d/e/f"))(errno.into());
        assert!(matches!(failure(Errno::NOSPC), StoreError::Io { action: "write", .. }), "there are inodes");
        assert!(
            matches!(failure(Errno::LOOP), StoreError::Io { action: "write", .. }),
            "every component is right"
        );
        assert_eq!(root.full(""), root.place());
        assert_eq!(root.full("d").path(), root.place().path().join("d"));
    });
}

#[test]
fn record_is_too_long_from_one_byte_more_than_the_limit() {
    each(|place| {
        let path = Path::new("d/e/f");
        let file = place.root.open_file(path).unwrap();
        assert_eq!(Root::excessive_length(&file, 6), None);
        assert_eq!(Root::excessive_length(&file, 5), Some(6));
        for (limit, read) in [(6, &b"inside"[..]), (5, b"inside"), (4, b"insid"), (0, b"i")] {
            assert_eq!(place.root.read_opened(&file, path, limit).unwrap(), read, "{limit}");
            assert_eq!(place.root.read_limited(path, limit).unwrap().unwrap(), read, "{limit}");
        }
        assert_eq!(place.root.read_limited(Path::new("d/x"), 6).unwrap(), None);
        let parsed = place.root.parsed_names("d", |name| Some(name.len())).unwrap();
        assert_eq!((parsed, place.root.parsed_names("x", |_| Some(1)).unwrap()), (vec![1], vec![]));
    });
}

#[test]
fn space_is_that_of_the_file_system() {
    each(|place| {
        let stat = rustix::fs::statvfs(place.full("")).unwrap();
        assert_eq!(place.root.block_bytes().unwrap(), stat.f_frsize);
        assert_eq!(place.root.capacity_bytes().unwrap(), stat.f_blocks * stat.f_frsize);
        let free = place.root.free_bytes().unwrap();
        assert!((1 << 20..=stat.f_blocks * stat.f_frsize).contains(&free), "{free}");
        assert!(!place.root.has_no_inodes());
    });
}

#[test]
fn mode_of_a_directory_is_set_and_not_that_of_a_file_or_a_link() {
    each(|place| {
        symlink(place.outside(""), place.full("dir")).unwrap();
        let mode = |path: &Path| fs::metadata(path).unwrap().permissions().mode() & 0o7777;
        let before = mode(&place.outside(""));
        place.root.set_directory_mode(Path::new("d/e"), 0o700).unwrap();
        assert_eq!(mode(&place.full("d/e")), 0o700);
        for path in ["d/e/f", "dir", "absent"] {
            assert!(place.root.set_directory_mode(Path::new(path), 0o777).is_err(), "{path}");
        }
        assert_eq!(mode(&place.outside("")), before);
    });
}

#[test]
fn root_must_be_a_directory_and_has_the_owner_of_its_files() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("f"), "").unwrap();
    for path in ["f", "absent"] {
        let error = Root::open(folder.path().join(path)).unwrap_err();
        assert!(matches!(error, StoreError::Io { action: OPEN_DIRECTORY, .. }), "{error}");
    }
    symlink(folder.path(), folder.path().join("link")).unwrap();
    let root = Root::open(folder.path().join("link")).unwrap();
    assert_eq!(root.owner(), StoreOwner::for_process());
}

#[test]
fn only_a_file_system_that_limits_its_inodes_runs_out_of_them() {
    for (inodes, available, expected) in [(0, 0, false), (100, 0, true), (100, 1, false), (1, 0, true)] {
        assert_eq!(are_exhausted(inodes, available), expected, "{available} of {inodes}");
    }
}
