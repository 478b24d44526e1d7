//! A cache of what `ls` and `df` report about each tag, so that they need not read every manifest each
//! time.
//!
//! Each entry is kept with the inode, size and times of its file or directory. Every call compares them
//! with the current ones, so manual changes are seen. A file or directory that was changed within the
//! last clock tick is read again, because another change may have happened in the same tick.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::Path;
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;

use super::root::{Directory, FileStatus};
use super::tags::reference_of;
use super::{Store, StoreError, lock};

/// A tag and what it points to.
#[derive(Clone, Debug)]
pub struct TagSummary {
    /// The tag.
    pub reference: Reference,
    /// When it was last set.
    pub modified: SystemTime,
    /// Its manifest, or why that is unusable.
    pub manifest: Result<ManifestSummary, String>,
    /// The model's origin, if recorded.
    pub origin: Option<String>,
}

/// What is kept of a manifest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestSummary {
    /// The manifest's own digest.
    pub digest: Digest,
    /// The sum of its files' sizes in bytes.
    pub size: u64,
    /// Its files, each once.
    pub files: Box<[Digest]>,
}

/// The lock is held while tags are read from disk. Only listing all tags takes it, and a caller that
/// waits for it needs the same data.
#[derive(Debug, Default)]
pub(super) struct Summaries(Mutex<KnownDirectory>);

/// `manifests/` or a directory below it.
#[derive(Debug, Default)]
struct KnownDirectory {
    stamp: Option<Stamp>,
    directories: BTreeMap<OsString, Self>,
    tags: BTreeMap<OsString, Tag>,
}

#[derive(Debug, Default)]
struct Tag {
    stamp: Option<Stamp>,
    summary: Option<Arc<TagSummary>>,
}

/// Inode, length, and modification and change time, each in seconds and nanoseconds since 1970.
type Stamp = (u64, u64, [i64; 4]);

/// Directories between `manifests/` and a tag.
const DEPTH: usize = 3;
/// No file system has a longer clock tick; some older ones have two seconds.
const TICK: Duration = Duration::from_secs(2);

impl Store {
    /// Every tag with its manifest's summary, in order. Tags that are removed meanwhile are left out.
    pub fn summaries(&self) -> Result<Vec<Arc<TagSummary>>, StoreError> {
        let mut found = Vec::new();
        let manifests = self.existing_directory(layout::MANIFESTS)?;
        lock(&self.summaries.0).read(self, &manifests, Path::new(""), &mut found)?;
        found.sort_by(|a, b| a.reference.cmp(&b.reference));
        Ok(found)
    }

    fn summary(&self, reference: &Reference, modified: SystemTime) -> Result<TagSummary, StoreError> {
        let manifest = match self.manifest(reference) {
            Ok(manifest) => Ok(ManifestSummary {
                digest: manifest.digest(),
                size: manifest.size(),
                files: manifest.digests().into_iter().collect(),
            }),
            Err(error @ (StoreError::Manifest { .. } | StoreError::UnexpectedFile { .. })) => {
                Err(error.to_string())
            }
            Err(error) => return Err(error),
        };
        let origin = manifest.as_ref().ok().and_then(|manifest| self.origin(manifest.digest));
        Ok(TagSummary { reference: reference.clone(), modified, manifest, origin })
    }
}

impl KnownDirectory {
    /// Updates the entry of an open directory at `place` below `manifests/`, and adds its tags to
    /// `found`.
    fn read(
        &mut self,
        store: &Store,
        directory: &Directory,
        place: &Path,
        found: &mut Vec<Arc<TagSummary>>,
    ) -> Result<(), StoreError> {
        let stamp = settled_stamp(&directory.own_status()?);
        if self.stamp.is_none() || self.stamp != stamp {
            self.stamp = stamp;
            self.list(directory, place.components().count())?;
        }
        for (name, known) in &mut self.directories {
            if let Some(below) = directory.find_directory(name)? {
                known.read(store, &below, &place.join(name), found)?;
            }
        }
        for (name, tag) in &mut self.tags {
            if let Some(status) = directory.status(name)? {
                found.extend(tag.read(store, &status, &place.join(name))?);
            }
        }
        Ok(())
    }

    /// Replaces the names by those in the directory; keeps the entries of names that still exist.
    fn list(&mut self, directory: &Directory, depth: usize) -> Result<(), StoreError> {
        let (mut directories, mut tags) = (BTreeMap::new(), BTreeMap::new());
        for entry in directory.entries()? {
            let entry = entry?;
            if entry.is_dir() && depth < DEPTH {
                let known = self.directories.remove(&entry.name).unwrap_or_default();
                directories.insert(entry.name, known);
            } else if depth == DEPTH {
                let known = self.tags.remove(&entry.name).unwrap_or_default();
                tags.insert(entry.name, known);
            }
        }
        (self.directories, self.tags) = (directories, tags);
        Ok(())
    }
}

impl Tag {
    /// The summary of the tag at `place`; `None` if it was removed or is no tag.
    fn read(
        &mut self,
        store: &Store,
        status: &FileStatus,
        place: &Path,
    ) -> Result<Option<Arc<TagSummary>>, StoreError> {
        let stamp = settled_stamp(status);
        let is_known = self.stamp.is_some() && self.stamp == stamp;
        if let Some(known) = self.summary.as_ref().filter(|_| is_known) {
            // An origin may have been recorded since; a recorded one does not change.
            if known.origin.is_some() || !known.has_origin(store) {
                return Ok(Some(Arc::clone(known)));
            }
        }
        let Some(reference) = reference_of(place) else { return Ok(None) };
        match store.summary(&reference, status.modified()) {
            Ok(summary) => {
                let summary = Arc::new(summary);
                (self.stamp, self.summary) = (stamp, Some(Arc::clone(&summary)));
                Ok(Some(summary))
            }
            Err(StoreError::NoSuchModel { .. }) => Ok(None),
            Err(error) => Err(error),
        }
    }
}

impl TagSummary {
    fn has_origin(&self, store: &Store) -> bool {
        self.manifest.as_ref().is_ok_and(|manifest| store.origin(manifest.digest).is_some())
    }
}

/// The stamp of a file; `None` if it changed so recently that the stamp would not show another change.
fn settled_stamp(status: &FileStatus) -> Option<Stamp> {
    let (content, changed) = (status.content_changed(), status.status_changed());
    let since = Duration::new(u64::try_from(changed.0).ok()?, u32::try_from(changed.1).ok()?);
    let age = SystemTime::UNIX_EPOCH.elapsed().ok()?.checked_sub(since)?;
    let ((_device, inode), times) = (status.identity(), [content.0, content.1, changed.0, changed.1]);
    (age > TICK).then_some((inode, status.len(), times))
}
