//! The disk usage of a store, read from the file system.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io::ErrorKind;
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use blobd_tests::filler::free_bytes;

use super::location::StoreLocation;

/// The directories in which a collection frees bytes.
pub(super) const COLLECTED: [&str; 5] = ["blobs/", "recipes/", "trash/", "staging/", "partial/"];
/// The directories in which a removal frees bytes.
pub(super) const REMOVED: [&str; 2] = ["blobs/", "recipes/"];

/// A consistent snapshot of the disk usage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct DiskSnapshot {
    /// The allocated bytes of each file and subdirectory, by path below the root; without the index, which
    /// the daemon may write at any time.
    pub(super) files: BTreeMap<String, u64>,
    /// The allocated bytes of the index and of the directories in the root.
    beside: u64,
    /// The free bytes, if the store has its own file system.
    free: Option<u64>,
}

impl DiskSnapshot {
    /// Waits until the free and the allocated bytes add up: a file that was removed or replaced occupies its
    /// blocks until every program has closed it.
    pub(super) fn of(location: &StoreLocation) -> Self {
        const LIMIT: Duration = Duration::from_secs(10);
        let started = Instant::now();
        loop {
            let before = Self::look(&location.root);
            let free = location.capacity.map(|_| free_bytes(&location.root));
            let adds_up = free.is_none_or(|free| Some(free + before.all()) == location.capacity);
            if (adds_up || started.elapsed() > LIMIT) && Self::look(&location.root) == before {
                return Self { free, ..before };
            }
        }
    }

    /// The allocated bytes below these directories.
    pub(super) fn taken_in(&self, directories: &[&str]) -> u64 {
        let is_in = |path: &str| directories.iter().any(|directory| path.starts_with(directory));
        self.files.iter().filter(|(path, _)| is_in(path)).map(|(_, bytes)| bytes).sum()
    }

    /// The names of blobs and recipes.
    pub(super) fn content(&self) -> BTreeSet<String> {
        let is_named =
            |path: &str, directory| path.strip_prefix(directory)?.strip_prefix("sha256-").map(drop);
        let is_content = |path: &&String| REMOVED.iter().any(|top| is_named(path, *top).is_some());
        self.files.keys().filter(is_content).cloned().collect()
    }

    /// The paths below a directory, without its name.
    pub(super) fn names(&self, directory: &str) -> Vec<String> {
        let names = self.files.keys().filter_map(|path| path.strip_prefix(directory));
        names.map(ToString::to_string).collect()
    }

    /// Asserts that `said` bytes have been freed in `directories` since `before`, and that the free space of
    /// the file system has changed by exactly the change of all allocated bytes.
    pub(super) fn check_freed(&self, before: &Self, directories: &[&str], said: u64) {
        let seen = i128::from(before.taken_in(directories)) - i128::from(self.taken_in(directories));
        assert_eq!(
            i128::from(said),
            seen,
            "bytes said and seen to be freed: {:#?}",
            self.differences(before)
        );
        if let (Some(free_before), Some(free)) = (before.free, self.free) {
            let visible = i128::from(free) - i128::from(free_before);
            let gone = i128::from(before.all()) - i128::from(self.all());
            assert_eq!(visible, gone, "bytes that the file system has got: {:#?}", self.differences(before));
        }
    }

    fn all(&self) -> u64 {
        self.files.values().sum::<u64>() + self.beside
    }

    /// Changed paths with their allocated bytes before and after.
    fn differences(&self, before: &Self) -> Vec<(String, Option<u64>, Option<u64>)> {
        let paths: BTreeSet<&String> = before.files.keys().chain(self.files.keys()).collect();
        let taken = |path: &String| (before.files.get(path).copied(), self.files.get(path).copied());
        let entries = paths.into_iter().map(|path| (path.clone(), taken(path)));
        entries.filter(|(_, (then, now))| then != now).map(|(path, (then, now))| (path, then, now)).collect()
    }

    fn look(root: &Path) -> Self {
        let (mut files, mut beside) = (BTreeMap::new(), 0);
        let mut unvisited = vec![String::new()];
        while let Some(directory) = unvisited.pop() {
            for entry in fs::read_dir(root.join(&directory)).into_iter().flatten().flatten() {
                let path = format!("{directory}{}", entry.file_name().to_string_lossy());
                let status = match entry.metadata() {
                    Err(error) if error.kind() == ErrorKind::NotFound => continue,
                    status => status.unwrap(),
                };
                let bytes = status.blocks() * 512;
                if directory.is_empty() && status.is_dir() || path.starts_with("index") {
                    beside += bytes;
                } else {
                    files.insert(path.clone(), bytes);
                }
                if status.is_dir() {
                    unvisited.push(path + "/");
                }
            }
        }
        Self { files, beside, free: None }
    }
}
