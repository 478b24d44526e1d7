//! What `ls` and `df` say about each tag, without reading ten thousand manifests each time.
//!
//! What was read is kept with the inode, size and times of the file it came from, and what was
//! listed with those of the directory; each call asks the kernel for them anew, so a change by
//! hand is seen. A file or directory that was changed in the very last moment is not believed to
//! be unchanged: another change may have fallen into the same tick of the clock.

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, Metadata};
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;

use super::error::optional;
use super::{Store, StoreError, lock};

/// A tag and what it points to.
#[derive(Clone, Debug)]
pub struct TagSummary {
    /// The tag.
    pub reference: Reference,
    /// When it was last set.
    pub modified: SystemTime,
    /// What it points to, or what is wrong with that.
    pub manifest: Result<ManifestSummary, String>,
    /// Where the model came from, if that is on record.
    pub origin: Option<String>,
}

/// A manifest in short.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestSummary {
    /// The manifest's own digest.
    pub digest: Digest,
    /// What its files add up to in bytes.
    pub size: u64,
    /// Its files, each once.
    pub files: Box<[Digest]>,
}

/// What has been read so far.
#[derive(Debug, Default)]
pub(super) struct Summaries(Mutex<Directory>);

/// A directory below `manifests/`, or that itself.
#[derive(Debug, Default)]
struct Directory {
    stamp: Option<Stamp>,
    directories: BTreeMap<OsString, Self>,
    tags: BTreeMap<OsString, Tag>,
}

#[derive(Debug, Default)]
struct Tag {
    stamp: Option<Stamp>,
    summary: Option<Arc<TagSummary>>,
}

/// Inode, length, modification and change: the times in seconds and nanoseconds since 1970.
type Stamp = (u64, u64, [i64; 4]);

/// Directories between `manifests/` and a tag.
const DEPTH: usize = 3;
/// No clock that a file system goes by has longer ticks; those of the older ones have two seconds.
const TICK: Duration = Duration::from_secs(2);

impl Store {
    /// Every tag with what it points to, in order. Those that vanish meanwhile are left out.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn summaries(&self) -> Result<Vec<Arc<TagSummary>>, StoreError> {
        let mut found = Vec::new();
        let mut path = self.path(layout::MANIFESTS);
        lock(&self.summaries.0).read(self, &mut path, 0, &mut found)?;
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
            Err(error @ StoreError::Manifest { .. }) => Err(error.to_string()),
            Err(error) => return Err(error),
        };
        let origin = manifest.as_ref().ok().and_then(|manifest| self.origin(manifest.digest));
        Ok(TagSummary { reference: reference.clone(), modified, manifest, origin })
    }
}

impl Directory {
    /// Brings the directory at `path` up to date and adds what is below it to `found`.
    fn read(
        &mut self,
        store: &Store,
        path: &mut PathBuf,
        depth: usize,
        found: &mut Vec<Arc<TagSummary>>,
    ) -> Result<(), StoreError> {
        let Some(metadata) = optional(fs::metadata(&*path), "inspect", path)? else { return Ok(()) };
        if self.stamp.is_none() || self.stamp != settled_stamp(&metadata) {
            self.stamp = settled_stamp(&metadata);
            self.list(path, depth)?;
        }
        for (name, directory) in &mut self.directories {
            path.push(name);
            let read = directory.read(store, path, depth + 1, found);
            path.pop();
            read?;
        }
        for (name, tag) in &mut self.tags {
            path.push(name);
            let read = tag.read(store, path);
            path.pop();
            found.extend(read?);
        }
        Ok(())
    }

    /// Takes over the names that there are; what is known of those that stay, stays known.
    fn list(&mut self, path: &Path, depth: usize) -> Result<(), StoreError> {
        let (mut directories, mut tags) = (BTreeMap::new(), BTreeMap::new());
        let Some(listing) = optional(fs::read_dir(path), "list", path)? else {
            *self = Self::default();
            return Ok(());
        };
        for entry in listing {
            let entry = entry.map_err(StoreError::io("list", path))?;
            let (name, kind) = (entry.file_name(), entry.file_type());
            let kind = kind.map_err(StoreError::io("list", path))?;
            let is_dir = kind.is_dir() || kind.is_symlink() && entry.path().is_dir();
            if is_dir && depth < DEPTH {
                let known = self.directories.remove(&name).unwrap_or_default();
                directories.insert(name, known);
            } else if !is_dir && depth == DEPTH {
                let known = self.tags.remove(&name).unwrap_or_default();
                tags.insert(name, known);
            }
        }
        (self.directories, self.tags) = (directories, tags);
        Ok(())
    }
}

impl Tag {
    /// What the tag at `path` points to; nothing if it has vanished or is no tag.
    fn read(&mut self, store: &Store, path: &Path) -> Result<Option<Arc<TagSummary>>, StoreError> {
        let Some(metadata) = optional(fs::metadata(path), "inspect", path)? else { return Ok(None) };
        let stamp = settled_stamp(&metadata);
        let is_known = self.stamp.is_some() && self.stamp == stamp;
        if let Some(known) = self.summary.as_ref().filter(|_| is_known) {
            // A record of the origin may have come since, but none changes.
            if known.origin.is_some() || !known.has_origin(store) {
                return Ok(Some(Arc::clone(known)));
            }
        }
        let Some(reference) = reference_of(path) else { return Ok(None) };
        let modified = metadata.modified().map_err(StoreError::io("inspect", path))?;
        match store.summary(&reference, modified) {
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
        self.manifest.as_ref().is_ok_and(|manifest| store.path(layout::origin(manifest.digest)).exists())
    }
}

/// The last four parts of a path.
fn reference_of(path: &Path) -> Option<Reference> {
    let mut parts = path.iter().rev().map(|part| part.to_str());
    let mut next = || parts.next().flatten();
    let (tag, model, namespace, host) = (next()?, next()?, next()?, next()?);
    Reference::from_parts(host, namespace, model, tag).ok()
}

/// What tells whether a file has changed, unless it is so new that this would not tell.
fn settled_stamp(metadata: &Metadata) -> Option<Stamp> {
    let changed =
        Duration::new(u64::try_from(metadata.ctime()).ok()?, u32::try_from(metadata.ctime_nsec()).ok()?);
    let age = SystemTime::UNIX_EPOCH.elapsed().ok()?.checked_sub(changed)?;
    let times = [metadata.mtime(), metadata.mtime_nsec(), metadata.ctime(), metadata.ctime_nsec()];
    (age > TICK).then_some((metadata.ino(), metadata.len(), times))
}
