//! The size on disk of the store's directory besides blobs and recipes, by purpose: one pass over everything except the
//! content of `blobs/` and `recipes/`, which the index counts.
//!
//! The sum, with the blobs and recipes, is what `du` reports for the store: allocated blocks, of directories too, and
//! each file once, however many names it has.

use std::collections::{BTreeMap, HashSet};
use std::ffi::OsString;
use std::path::{Path, PathBuf};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use tracing_mutex::stdsync::Mutex;

use crate::content::Content;
use crate::content::directories::RECORDS;
use crate::content::name_tree::{NameTree, VisitedFiles};
use crate::root::{Directory, Entry, FileStatus, Stamp};
use crate::{FileSystem, StoreError, lock};

/// The most paths of foreign files that are kept, to name them.
const MAX_FOREIGN_PATHS: usize = 3;
/// Directories that are nested deeper are not entered.
const MAX_LEVELS: usize = 64;

/// Bytes on disk, by purpose.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct OtherFiles {
    /// Manifests, origins, histories of names, pins, and the files that describe the store.
    pub records: u64,
    pub index: u64,
    pub audit: u64,
    pub reserve: u64,
    pub directories: u64,
    pub quarantine: u64,
    /// The records of models in the trash, by their names.
    pub trash: BTreeMap<Digest, u64>,
    /// Transactions in progress, and what dead ones have left, by the names of their directories.
    pub staging: BTreeMap<OsString, u64>,
    /// Unfinished downloads, by the digest of their files.
    pub downloads: BTreeMap<Digest, u64>,
    pub foreign: u64,
    /// The paths of a few of these, relative to the store.
    pub foreign_paths: Vec<PathBuf>,
}

impl OtherFiles {
    pub fn total(&self) -> u64 {
        // Without `..`, so that no purpose is forgotten.
        let Self {
            records,
            index,
            audit,
            reserve,
            directories,
            quarantine,
            foreign,
            trash,
            staging,
            downloads,
            foreign_paths: _,
        } = self;
        let single = [records, index, audit, reserve, directories, quarantine, foreign];
        sum(single.into_iter().chain(trash.values()).chain(staging.values()).chain(downloads.values()))
    }

    pub fn trash_bytes(&self) -> u64 {
        sum(self.trash.values())
    }

    pub fn staging_bytes(&self) -> u64 {
        sum(self.staging.values())
    }
}

fn sum<'b>(bytes: impl IntoIterator<Item = &'b u64>) -> u64 {
    bytes.into_iter().copied().fold(0, u64::saturating_add)
}

impl Content {
    /// Counts everything in the store's directory but blobs and recipes. `counted` has device and inode of files that
    /// are counted elsewhere, as [`StoreIndex::recheck_sizes`](crate::index::StoreIndex::recheck_sizes) returns them;
    /// `manifests` is what a list of all tags has found. Directories that cannot be read count as empty.
    pub fn other_files(
        &self,
        counted: HashSet<(u64, u64)>,
        manifests: &VisitedFiles,
    ) -> Result<OtherFiles, StoreError> {
        let (file_system, found) = (self.file_system, OtherFiles::default());
        let (pins, record_sizes) = (&self.pins, &self.record_sizes);
        let mut tally = Tally { file_system, manifests, pins, record_sizes, counted, found };
        tally.root(&self.root.existing_directory("")?)?;
        for path in self.index.foreign_entries()? {
            if let Some(parent) = path.parent()
                && let Some(name) = path.file_name()
                && let Some(directory) = self.root.find_directory(parent)?
                && let Some(status) = directory.status(name)?
            {
                tally.foreign(&directory, Path::new(name), &status, path.clone());
            }
        }
        Ok(tally.found)
    }
}

/// The bytes on disk of directories that have only records, with the stamp that each had before it was counted.
#[derive(Debug, Default)]
pub(super) struct RecordSizes(Mutex<BTreeMap<String, (Stamp, u64)>>);

impl RecordSizes {
    fn find(&self, directory: &str, stamp: Stamp) -> Option<u64> {
        lock(&self.0).get(directory).filter(|(of, _)| *of == stamp).map(|(_, bytes)| *bytes)
    }
}

struct Tally<'c> {
    file_system: FileSystem,
    manifests: &'c VisitedFiles,
    pins: &'c NameTree,
    record_sizes: &'c RecordSizes,
    /// Device and inode of the files with several names that were counted.
    counted: HashSet<(u64, u64)>,
    found: OtherFiles,
}

impl Tally<'_> {
    fn root(&mut self, root: &Directory) -> Result<(), StoreError> {
        self.found.directories = root.own_status()?.allocated_bytes();
        each(root, |name, status| match (name.to_str(), status.is_dir()) {
            (Some(layout::BLOBS | layout::RECIPES), true) => self.found.directories += self.own(status),
            (Some(directory), true) if RECORDS.contains(&directory) => {
                let own = self.own(status);
                let Some(below) = root.find_directory(directory).ok().flatten() else { return };
                if directory == layout::INDEX {
                    self.found.index += own + self.tree(&below, MAX_LEVELS);
                } else {
                    self.found.directories += own;
                    self.known(directory, &below);
                }
            }
            (Some(layout::RESERVE_FILE), false) => self.found.reserve += self.own(status),
            (Some(file), false) if FILES.contains(&file) => self.found.records += self.own(status),
            _ => self.foreign(root, name, status, name.to_path_buf()),
        })
    }

    /// Counts the content of one of blobd's directories. What cannot be listed counts nothing.
    fn known(&mut self, name: &str, directory: &Directory) {
        let path = Path::new(name);
        // The errors are those of a directory that has just disappeared, or cannot be read.
        let _ = match name {
            layout::MANIFESTS => {
                self.tags(self.manifests, directory, path);
                Ok(())
            }
            layout::PINS => self.pins.files(directory).map(|pins| self.tags(&pins, directory, path)),
            layout::ORIGINS | layout::SIGNATURES | layout::HISTORY => self.records(name, directory),
            layout::TRASH => each(directory, |name, status| match record(name) {
                Some(record) if status.is_file() => {
                    let bytes = self.own(status);
                    self.found.trash.insert(record, bytes);
                }
                _ => self.foreign(directory, name, status, path.join(name)),
            }),
            layout::PARTIAL => {
                each(directory, |name, status| match name.to_str().and_then(layout::parse_blob_name) {
                    Some(file) if status.is_dir() => {
                        let bytes = self.all(directory, name, status);
                        self.found.downloads.insert(file, bytes);
                    }
                    _ => self.foreign(directory, name, status, path.join(name)),
                })
            }
            layout::AUDIT => {
                self.found.audit += self.tree(directory, MAX_LEVELS);
                Ok(())
            }
            layout::STAGING => each(directory, |name, status| {
                let bytes = self.all(directory, name, status);
                self.found.staging.insert(name.as_os_str().to_owned(), bytes);
            }),
            _ => {
                self.found.quarantine += self.tree(directory, MAX_LEVELS);
                Ok(())
            }
        };
    }

    /// Counts a directory of records. It is counted again only if it has changed: records are replaced, not written to.
    fn records(&mut self, name: &str, directory: &Directory) -> Result<(), StoreError> {
        // Taken before the directory is listed: a change in between is seen the next time.
        let stamp = directory.own_status()?.settled_stamp();
        if let Some(bytes) = stamp.and_then(|stamp| self.record_sizes.find(name, stamp)) {
            self.found.records += bytes;
            return Ok(());
        }
        let (mut bytes, mut are_all_plain) = (0_u64, true);
        each(directory, |file, status| {
            let is_record = record(file).is_some() && status.is_file();
            are_all_plain &= is_record && status.links() == 1;
            if is_record {
                bytes = bytes.saturating_add(self.own(status));
            } else {
                self.foreign(directory, file, status, Path::new(name).join(file));
            }
        })?;
        self.found.records += bytes;
        if let Some(stamp) = stamp.filter(|_| are_all_plain) {
            lock(&self.record_sizes.0).insert(name.to_owned(), (stamp, bytes));
        }
        Ok(())
    }

    /// Counts a tree with a file per tag.
    fn tags(&mut self, files: &VisitedFiles, directory: &Directory, path: &Path) {
        self.found.directories += files.directories.iter().map(|status| self.own(status)).sum::<u64>();
        self.found.records += files.tags.iter().map(|status| self.own(status)).sum::<u64>();
        for (file, status) in &files.foreign {
            self.foreign(directory, file, status, path.join(file));
        }
    }

    fn foreign(&mut self, parent: &Directory, name: &Path, status: &FileStatus, path: PathBuf) {
        self.found.foreign += self.all(parent, name, status);
        if self.found.foreign_paths.len() < MAX_FOREIGN_PATHS {
            self.found.foreign_paths.push(path);
        }
    }

    fn all(&mut self, parent: &Directory, name: &Path, status: &FileStatus) -> u64 {
        let below = if status.is_dir() { parent.find_directory(name).ok().flatten() } else { None };
        let below = below.map_or(0, |directory| self.tree(&directory, MAX_LEVELS));
        self.own(status).saturating_add(below)
    }

    /// All that is below a directory. The size of a directory that cannot be read still counts.
    fn tree(&mut self, directory: &Directory, levels: usize) -> u64 {
        let mut bytes = 0_u64;
        let _ = each(directory, |name, status| {
            bytes = bytes.saturating_add(self.own(status));
            if status.is_dir()
                && levels > 1
                && let Ok(Some(below)) = directory.find_directory(name)
            {
                bytes = bytes.saturating_add(self.tree(&below, levels - 1));
            }
        });
        bytes
    }

    /// The size of a file or a directory itself on disk; nothing for another name of a file that was counted.
    fn own(&mut self, status: &FileStatus) -> u64 {
        if status.is_dir() {
            return status.allocated_bytes();
        }
        if status.links() > 1 && !self.counted.insert(status.identity()) {
            return 0;
        }
        if status.is_file() { self.file_system.bytes_on_disk(status) } else { status.allocated_bytes() }
    }
}

/// Files in the root, with their temporary names.
const FILES: [&str; 5] =
    [layout::STORE_FILE, layout::LOCK_FILE, layout::SCRUB_FILE, "store.json.new", "scrub.json.new"];

fn record(name: &Path) -> Option<Digest> {
    name.to_str().and_then(layout::parse_recipe_name)
}

fn each(directory: &Directory, mut visit: impl FnMut(&Path, &FileStatus)) -> Result<(), StoreError> {
    directory.each_entry(|Entry { name, .. }| {
        if let Some(status) = directory.status(&name)? {
            visit(Path::new(&name), &status);
        }
        Ok(())
    })
}

#[cfg(test)]
mod tests;
