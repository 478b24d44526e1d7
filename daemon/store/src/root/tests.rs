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
struct Place {
    folder: TempDir,
    root: Root,
}

impl Place {
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
            root: Root(Arc::new(Inner { place, directory, owner: StoreOwner::of_process(), resolver })),
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

fn each(test: impl Fn(&Place)) {
    for resolver in [Resolver::Openat2, Resolver::Walk] {
        test(&Place::new(resolver));
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
    let place = Place::new(Resolver::Openat2);
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
