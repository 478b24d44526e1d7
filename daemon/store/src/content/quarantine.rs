//! Quarantine: damaged blobs, moved to a directory that nothing reads from.
//!
//! A damaged blob is renamed, never changed or truncated: clients may have it mapped, and its content helps to find the
//! cause. Files in `quarantine/` are deleted at the administrator's request only. The store keeps in memory which blobs
//! are damaged, and reads that from `quarantine/` when it is opened. When the last copy of a blob that is still damaged
//! is deleted, an empty file is left in its place, so that the blob stays known as damaged.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use tracing_mutex::stdsync::Mutex;

use crate::bounded_read::digest_of;
use crate::content::Content;
use crate::error::DisplayPath;
use crate::node::Node;
use crate::root::{FileStatus, Root};
use crate::{FileReader, StoreError, lock};

#[derive(Debug, Default)]
pub(crate) struct DamagedBlobs {
    /// Not held during disk access.
    known: Mutex<BTreeMap<Digest, MissingReason>>,
    /// Those that a lower store had in the last [`Content::damaged`].
    in_lower: Mutex<BTreeSet<Digest>>,
    /// Held while a blob is moved to quarantine, and while the entry of a restored blob is removed.
    moving: Mutex<()>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum MissingReason {
    /// It was moved to quarantine, or is about to be.
    Quarantined,
    /// It was not removed by blobd.
    Missing,
}

/// A damaged blob that is kept for the administrator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QuarantinedBlob {
    pub digest: Digest,
    /// When it was quarantined, in seconds since 1970.
    pub time: u64,
    pub bytes: u64,
    /// Whether it is an empty file: what remains of a deleted copy.
    is_marker: bool,
}

impl DamagedBlobs {
    /// Reads `quarantine/`. If that fails, quarantined blobs count as missing, and nothing is collected.
    pub(crate) fn load(root: &Root) -> Self {
        let copies = copies_in(root).unwrap_or_else(|error| {
            tracing::warn!("{error}");
            Vec::new()
        });
        let quarantined = copies.into_iter().map(|(digest, _)| (digest, MissingReason::Quarantined));
        Self { known: Mutex::new(quarantined.collect()), ..Self::default() }
    }
}

impl Content {
    /// Moves a damaged blob to quarantine; returns its new path. `seen` is the status of the damaged file: if the blob
    /// is another file by now, or was collected, returns `None`. After an error, the blob is in its old place or the
    /// move is not durable.
    pub(crate) fn quarantine(
        &self,
        digest: Digest,
        seen: &FileStatus,
    ) -> Result<Option<DisplayPath>, StoreError> {
        self.create_directories(Path::new(layout::QUARANTINE))?;
        let _change = self.index.begin_change();
        let moved = self.quarantine_if_same(digest, seen)?;
        if moved.is_some() {
            lock(&self.counts).damaged_blobs += 1;
            self.note_removed(Node::Blob(digest), self.file_system.bytes_on_disk(seen));
            self.disk.sync_dir(Path::new(layout::QUARANTINE))?;
            self.disk.sync_dir(Path::new(layout::BLOBS))?;
        }
        Ok(moved.map(|place| self.root.full(place)))
    }

    /// Reads a blob and moves it to quarantine if its digest is wrong; returns its new path.
    pub fn quarantine_if_damaged(&self, digest: Digest) -> Result<Option<DisplayPath>, StoreError> {
        let mut file = match self.open_own_blob(digest, 0) {
            Err(StoreError::MissingBlob { .. }) => return Ok(None),
            opened => opened?,
        };
        let path = || self.root.full(layout::blob(digest));
        let seen = FileStatus::from_file(&file).map_err(StoreError::io("inspect", path()))?;
        let found = digest_of(&mut file).map_err(StoreError::io("read", path()))?;
        if found == digest { Ok(None) } else { self.quarantine(digest, &seen) }
    }

    /// The entry in memory comes first: a collection that misses it would assume that the model has lost a recipe.
    fn quarantine_if_same(&self, digest: Digest, seen: &FileStatus) -> Result<Option<PathBuf>, StoreError> {
        let _alone = lock(&self.damaged.moving);
        // The change time is compared, too, since a file system may reuse the inode number.
        let id = |file: &FileStatus| (file.identity(), file.status_changed());
        if self.blob_status(digest)?.as_ref().map(id) != Some(id(seen)) {
            return Ok(None);
        }
        let before = lock(&self.damaged.known).insert(digest, MissingReason::Quarantined);
        let moved = self.rename_to_quarantine(digest);
        if moved.is_err() {
            let mut known = lock(&self.damaged.known);
            match before {
                Some(reason) => known.insert(digest, reason),
                None => known.remove(&digest),
            };
        }
        moved.map(Some)
    }

    fn rename_to_quarantine(&self, digest: Digest) -> Result<PathBuf, StoreError> {
        let blob = layout::blob(digest);
        let mut time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut target = layout::quarantined(digest, time);
        while !self.disk.publish(&blob, &target)? {
            // A copy was quarantined in the same second.
            time = time.saturating_add(1);
            target = layout::quarantined(digest, time);
        }
        Ok(target)
    }

    pub fn note_missing(&self, digest: Digest) {
        lock(&self.damaged.known).entry(digest).or_insert(MissingReason::Missing);
    }

    /// Every blob known to be damaged or missing, whether a model needs it or not, unless it was published again.
    pub fn damaged(&self) -> BTreeSet<Digest> {
        // A model can use the copy in a lower store.
        let is_in_lower = |digest: &Digest| self.lower_blob_size(*digest).is_some();
        let (in_lower, damaged) = self.damaged_here().into_iter().partition(is_in_lower);
        *lock(&self.damaged.in_lower) = in_lower;
        damaged
    }

    /// Like [`Self::damaged`], but trusts its last result on copies in lower stores: waits for none of them.
    pub fn known_damaged(&self) -> BTreeSet<Digest> {
        let mut damaged = self.damaged_here();
        let in_lower = lock(&self.damaged.in_lower);
        damaged.retain(|digest| !in_lower.contains(digest));
        damaged
    }

    fn damaged_here(&self) -> BTreeSet<Digest> {
        let known: Vec<_> = lock(&self.damaged.known).keys().copied().collect();
        let (there, damaged): (BTreeSet<_>, _) =
            known.into_iter().partition(|digest| self.has_own_blob(*digest));
        if !there.is_empty() {
            let _alone = lock(&self.damaged.moving);
            let there: BTreeSet<_> = there.into_iter().filter(|digest| self.has_own_blob(*digest)).collect();
            lock(&self.damaged.known).retain(|digest, _| !there.contains(digest));
        }
        damaged
    }

    pub fn has_own_blob(&self, digest: Digest) -> bool {
        matches!(self.own_blob_size(digest), Ok(Some(_)))
    }

    /// Whether a missing blob is in quarantine. If so, the file was stored as a blob and no recipe is lost.
    pub fn is_quarantined(&self, digest: Digest) -> bool {
        lock(&self.damaged.known).get(&digest) == Some(&MissingReason::Quarantined)
    }

    /// The Unix times (seconds) when copies of a blob were quarantined, newest first.
    pub fn quarantined_copies(&self, digest: Digest) -> Result<Vec<u64>, StoreError> {
        let copies = self.quarantined_blobs()?.into_iter();
        Ok(copies.filter(|copy| copy.digest == digest).map(|copy| copy.time).collect())
    }

    /// All quarantined copies, the latest first.
    pub fn quarantined_blobs(&self) -> Result<Vec<QuarantinedBlob>, StoreError> {
        self.quarantine_entries(false)
    }

    pub fn quarantine_markers(&self) -> Result<Vec<QuarantinedBlob>, StoreError> {
        self.quarantine_entries(true)
    }

    /// Deletes a quarantined copy; [`Self::sync_quarantine`] makes that durable. `becomes_marker` must be true if the
    /// blob is still damaged and this is its last copy: otherwise the damage would be unknown after the next start, and
    /// a collection would take the missing file for one that had a recipe.
    pub fn delete_quarantined(&self, copy: &QuarantinedBlob, becomes_marker: bool) -> Result<(), StoreError> {
        let path = layout::quarantined(copy.digest, copy.time);
        let _alone = lock(&self.damaged.moving);
        if self.root.status(&path)?.is_some_and(|status| status.is_dir()) {
            self.disk.remove_tree(&path)?;
        } else if !becomes_marker {
            self.disk.remove_file(&path)?;
        }
        match becomes_marker {
            true => self.write_marker(&path),
            false => {
                lock(&self.damaged.known).retain(|digest, reason| {
                    *digest != copy.digest
                        || *reason != MissingReason::Quarantined
                        || self.has_quarantined(*digest)
                });
                Ok(())
            }
        }
    }

    /// Puts an empty file in the place of a copy. The ledger counts the quarantine by itself.
    fn write_marker(&self, path: &Path) -> Result<(), StoreError> {
        self.create_directories(Path::new(layout::STAGING))?;
        let name = self.new_staging_name();
        let temporary = Path::new(layout::STAGING).join(&name);
        let written = self.disk.replace_file(&temporary, path, b"", 0o444);
        self.release_staging_name(&name);
        written
    }

    pub fn sync_quarantine(&self) -> Result<(), StoreError> {
        match self.root.status(Path::new(layout::QUARANTINE))? {
            Some(_) => self.disk.sync_dir(Path::new(layout::QUARANTINE)),
            None => Ok(()),
        }
    }

    /// Whether a copy or a marker of a blob is there; true if that cannot be read.
    fn has_quarantined(&self, digest: Digest) -> bool {
        copies_in(&self.root).map_or(true, |copies| copies.iter().any(|(copy, _)| *copy == digest))
    }

    /// The copies or the markers, the latest first.
    fn quarantine_entries(&self, are_markers: bool) -> Result<Vec<QuarantinedBlob>, StoreError> {
        let Some(directory) = self.root.find_directory(Path::new(layout::QUARANTINE))? else {
            return Ok(Vec::new());
        };
        let mut blobs = Vec::new();
        for (digest, time) in copies_in(&self.root)? {
            let name = layout::quarantined(digest, time);
            // The administrator may delete it at any moment.
            if let Some(name) = name.file_name()
                && let Some(status) = directory.status(name)?
            {
                let (bytes, is_marker) =
                    (self.file_system.bytes_on_disk(&status), status.is_file() && status.len() == 0);
                blobs.push(QuarantinedBlob { digest, time, bytes, is_marker });
            }
        }
        blobs.retain(|blob: &QuarantinedBlob| blob.is_marker == are_markers);
        blobs.sort_by(|a, b| (b.time, a.digest).cmp(&(a.time, b.digest)));
        Ok(blobs)
    }

    pub fn open_quarantined(
        &self,
        digest: Digest,
        time: u64,
        size: u64,
    ) -> Result<FileReader<'_>, StoreError> {
        let file = self.root.open_file(&layout::quarantined(digest, time))?;
        Ok(FileReader::for_open_file(self, digest, size, file))
    }
}

fn copies_in(root: &Root) -> Result<Vec<(Digest, u64)>, StoreError> {
    root.parsed_names(layout::QUARANTINE, layout::parse_quarantined_name)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::Store;
    use crate::testing::{add_blobs, store_with};

    fn quarantine(store: &Store, digest: Digest) -> Option<DisplayPath> {
        let seen = store.content.blob_status(digest).unwrap().unwrap();
        store.content.quarantine(digest, &seen).unwrap()
    }

    #[test]
    fn quarantined_blob_keeps_its_bytes_under_another_name() {
        let (_folder, store, digest) = store_with(b"weights");
        assert!(store.content.damaged().is_empty());
        let place = quarantine(&store, digest).unwrap();
        assert_eq!(fs::read(place.path()).unwrap(), b"weights");
        assert_eq!(store.content.blob_size(digest).unwrap(), None);
        assert_eq!(store.content.damaged(), [digest].into());
        let [time] = store.content.quarantined_copies(digest).unwrap().try_into().unwrap();
        assert_eq!(store.path(layout::quarantined(digest, time)), place.path());
    }

    #[test]
    fn damage_is_known_until_the_last_copy_of_the_blob_is_deleted() {
        let (_folder, store, digest) = store_with(b"weights");
        let other = add_blobs(&store, [b"other"])[0];
        quarantine(&store, digest).unwrap();
        quarantine(&store, other).unwrap();
        add_blobs(&store, [b"weights"]);
        quarantine(&store, digest).unwrap();
        let copies = store.content.quarantined_blobs().unwrap();
        let [first, last] = copies.iter().filter(|copy| copy.digest == digest).collect::<Vec<_>>()[..] else {
            panic!("{copies:?}");
        };
        store.content.delete_quarantined(first, false).unwrap();
        assert_eq!(store.content.damaged(), [digest, other].into());
        store.content.delete_quarantined(last, false).unwrap();
        assert_eq!(store.content.damaged(), [other].into());
    }

    #[test]
    fn damage_is_known_after_a_restart_until_the_blob_is_restored() {
        let (folder, store, digest) = store_with(b"weights");
        quarantine(&store, digest).unwrap();
        fs::write(store.path("quarantine/notes.txt"), "of the administrator").unwrap();
        drop(store);
        let store = Arc::new(Store::open(folder.path().join("store")).unwrap());
        assert_eq!(store.content.damaged(), [digest].into());
        assert!(store.content.is_quarantined(digest));
        add_blobs(&store, [b"weights"]);
        assert!(store.content.damaged().is_empty());
        assert_eq!(store.content.quarantined_copies(digest).unwrap().len(), 1, "it is the administrator's");
    }

    #[test]
    fn blob_can_be_quarantined_twice_within_a_second() {
        let (_folder, store, digest) = store_with(b"weights");
        let first = quarantine(&store, digest).unwrap();
        add_blobs(&store, [b"weights"]);
        assert_ne!(quarantine(&store, digest).unwrap(), first);
        assert_eq!(store.content.quarantined_copies(digest).unwrap().len(), 2);
        let listed = store.content.quarantined_blobs().unwrap();
        assert!(listed.len() == 2 && listed[0].time > listed[1].time && listed[0].bytes > 0, "{listed:?}");
    }

    #[test]
    fn blob_that_replaced_the_damaged_one_is_not_moved() {
        let (_folder, store, digest) = store_with(b"weights");
        let seen = store.content.blob_status(digest).unwrap().unwrap();
        // Kept open, so that its inode is not reused.
        let _mapped = store.content.open_blob(digest, 0).unwrap();
        fs::remove_file(store.path(layout::blob(digest))).unwrap();
        assert_eq!(store.content.quarantine(digest, &seen).unwrap(), None);
        add_blobs(&store, [b"weights"]);
        assert_eq!(store.content.quarantine(digest, &seen).unwrap(), None);
        assert!(store.content.blob_size(digest).unwrap().is_some() && store.content.damaged().is_empty());
    }

    #[test]
    fn deleted_copy_of_a_damaged_blob_leaves_a_marker_that_outlives_the_process() {
        let (folder, store, digest) = store_with(b"weights");
        quarantine(&store, digest).unwrap();
        let [copy] = store.content.quarantined_blobs().unwrap().try_into().unwrap();
        store.content.delete_quarantined(&copy, true).unwrap();
        store.content.sync_quarantine().unwrap();
        drop(store);
        let store = Arc::new(Store::open(folder.path().join("store")).unwrap());
        assert!(store.content.is_quarantined(digest) && store.content.damaged() == [digest].into());
        assert!(
            store.content.quarantined_blobs().unwrap().is_empty()
                && store.content.quarantined_copies(digest).unwrap().is_empty()
        );
        let [marker] = store.content.quarantine_markers().unwrap().try_into().unwrap();
        store.content.delete_quarantined(&marker, false).unwrap();
        assert!(!store.content.is_quarantined(digest) && store.content.damaged().is_empty());
        assert!(fs::read_dir(store.path(layout::QUARANTINE)).unwrap().next().is_none());
    }

    #[test]
    fn whatever_was_quarantined_can_be_deleted() {
        let (_folder, store, digest) = store_with(b"weights");
        let blob = store.path(layout::blob(digest));
        fs::remove_file(&blob).unwrap();
        fs::create_dir(&blob).unwrap();
        fs::write(blob.join("inside"), "x").unwrap();
        quarantine(&store, digest).unwrap();
        let [copy] = store.content.quarantined_blobs().unwrap().try_into().unwrap();
        store.content.delete_quarantined(&copy, false).unwrap();
        assert!(store.content.quarantined_blobs().unwrap().is_empty());
    }

    #[test]
    fn lower_stores_are_searched_only_for_the_full_list_of_damage() {
        let (lower_folder, lower, digest) = store_with(b"weights");
        drop(lower);
        let (folder, lower_path) = (tempfile::tempdir().unwrap(), lower_folder.path().join("store"));
        let options = crate::StoreOptions { lower: vec![lower_path.clone()], ..Default::default() };
        let store = Store::open_with(folder.path().join("store"), options).unwrap();
        store.content.note_missing(digest);
        assert_eq!(store.content.known_damaged(), [digest].into(), "not searched for yet");
        assert!(store.content.damaged().is_empty() && store.content.known_damaged().is_empty());
        fs::rename(&lower_path, lower_path.with_extension("away")).unwrap();
        assert_eq!(
            (store.content.known_damaged().len(), store.content.unavailable_lower_stores()),
            (0, 0),
            "not searched"
        );
        assert_eq!(store.content.damaged(), [digest].into());
        assert_eq!(store.content.known_damaged(), [digest].into());
    }

    #[test]
    fn missing_blob_does_not_count_as_quarantined() {
        let (_folder, store, _) = store_with(b"weights");
        let missing = Digest::of(b"something else");
        store.content.note_missing(missing);
        assert_eq!(store.content.damaged(), [missing].into());
        assert!(!store.content.is_quarantined(missing));
    }
}
