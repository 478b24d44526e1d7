//! Quarantine: damaged blobs, put aside under a name that nothing uses.
//!
//! A damaged blob is renamed, never changed or shortened: clients may have it mapped, and whoever
//! looks for the cause wants it as it was found. What is in `quarantine/` is the administrator's;
//! nothing here or in [`crate::gc`] deletes it. That the models which need such a blob lack it now
//! is remembered as long as the store is open, and read from `quarantine/` when it is opened.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::io::{self, Read};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::layout;

use super::place::Place;
use super::root::{FileStatus, Root};
use super::{FileReader, Store, StoreError, lock};

/// The blobs that are known not to be there as they should.
#[derive(Debug, Default)]
pub(super) struct DamagedBlobs {
    /// Held for changes in memory alone.
    known: Mutex<BTreeMap<Digest, Fate>>,
    /// Held while a blob is moved to quarantine, and while the record of a blob that is back is removed.
    /// No other operation takes it.
    moving: Mutex<()>,
}

/// Why a blob is not there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Fate {
    /// It was put aside, or is about to be.
    Quarantined,
    /// Somebody else took it away.
    Missing,
}

impl DamagedBlobs {
    /// What `quarantine/` says. Names of another form are not blobd's. If it cannot be read, a blob that
    /// was put aside is taken for lost, and nothing is collected.
    pub(super) fn load(root: &Root) -> Self {
        let copies = copies_in(root).unwrap_or_else(|error| {
            tracing::warn!("{error}");
            Vec::new()
        });
        let quarantined = copies.into_iter().map(|(digest, _)| (digest, Fate::Quarantined));
        Self { known: Mutex::new(quarantined.collect()), moving: Mutex::default() }
    }
}

impl Store {
    /// Puts a blob aside that was found damaged when `seen` was under its name. Answers with its
    /// new place; with nothing if that file is gone from there, because it was collected or a
    /// good one has replaced it.
    pub(crate) fn quarantine(&self, digest: Digest, seen: &FileStatus) -> Result<Option<Place>, StoreError> {
        self.create_directories(Path::new(layout::QUARANTINE))?;
        let _change = self.begin_change();
        let moved = self.move_aside(digest, seen)?;
        if moved.is_some() {
            self.note_blob_removed(digest, self.file_system.bytes_on_disk(seen));
            self.disk().sync_dir(Path::new(layout::QUARANTINE))?;
            self.disk().sync_dir(Path::new(layout::BLOBS))?;
        }
        Ok(moved.map(|place| self.root.full(place)))
    }

    /// Reads a blob and puts it aside if it is not what its name says. Answers with its new place.
    ///
    /// # Errors
    /// [`StoreError::Io`] when it cannot be read, or not moved; it is still in its place then.
    pub fn set_aside_if_damaged(&self, digest: Digest) -> Result<Option<Place>, StoreError> {
        let mut file = match self.open_blob(digest, 0) {
            Err(StoreError::MissingBlob { .. }) => return Ok(None),
            opened => opened?,
        };
        let path = || self.root.full(layout::blob(digest));
        let seen = FileStatus::of(&file).map_err(StoreError::io("inspect", path()))?;
        let found = digest_of(&mut file).map_err(StoreError::io("read", path()))?;
        if found == digest { Ok(None) } else { self.quarantine(digest, &seen) }
    }

    /// The record comes before the move: a collection that misses the blob must find it there, or it would
    /// take the model for one that has lost a recipe.
    fn move_aside(&self, digest: Digest, seen: &FileStatus) -> Result<Option<PathBuf>, StoreError> {
        let _alone = lock(&self.damaged.moving);
        // With the time of change: a file system may give the inode's number to the next file.
        let id = |file: &FileStatus| (file.identity(), file.status_changed());
        if self.blob_status(digest)?.as_ref().map(id) != Some(id(seen)) {
            return Ok(None);
        }
        let before = lock(&self.damaged.known).insert(digest, Fate::Quarantined);
        let moved = self.rename_aside(digest);
        if moved.is_err() {
            let mut known = lock(&self.damaged.known);
            match before {
                Some(fate) => known.insert(digest, fate),
                None => known.remove(&digest),
            };
        }
        moved.map(Some)
    }

    fn rename_aside(&self, digest: Digest) -> Result<PathBuf, StoreError> {
        let blob = layout::blob(digest);
        let mut time = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        let mut target = layout::quarantined(digest, time);
        while !self.disk().publish(&blob, &target)? {
            // It was put aside within this very second before.
            time = time.saturating_add(1);
            target = layout::quarantined(digest, time);
        }
        Ok(target)
    }

    /// Remembers that a blob which a model needs is not there.
    pub fn note_missing(&self, digest: Digest) {
        lock(&self.damaged.known).entry(digest).or_insert(Fate::Missing);
    }

    /// Every blob that is known to be damaged or missing, whether a model needs it or not. Takes
    /// no time if there is none, otherwise a look at each: a blob that was published again is not
    /// among them.
    #[must_use]
    pub fn damaged(&self) -> BTreeSet<Digest> {
        let known: Vec<_> = lock(&self.damaged.known).keys().copied().collect();
        let (there, damaged): (BTreeSet<_>, _) = known.into_iter().partition(|digest| self.has_blob(*digest));
        if !there.is_empty() {
            let _alone = lock(&self.damaged.moving);
            let there: BTreeSet<_> = there.into_iter().filter(|digest| self.has_blob(*digest)).collect();
            lock(&self.damaged.known).retain(|digest, _| !there.contains(digest));
        }
        damaged
    }

    fn has_blob(&self, digest: Digest) -> bool {
        matches!(self.blob_size(digest), Ok(Some(_)))
    }

    /// Whether a blob that is not there was put aside. Then it was a blob, and the file of this
    /// digest had no recipe that could be lost.
    pub fn is_quarantined(&self, digest: Digest) -> bool {
        lock(&self.damaged.known).get(&digest) == Some(&Fate::Quarantined)
    }

    /// When the copies of a blob were put aside, in Unix seconds, the newest first.
    pub fn quarantined_copies(&self, digest: Digest) -> Result<Vec<u64>, StoreError> {
        let mut times: Vec<u64> = copies_in(&self.root)?
            .into_iter()
            .filter_map(|(quarantined, time)| (quarantined == digest).then_some(time))
            .collect();
        times.sort_unstable_by(|a, b| b.cmp(a));
        Ok(times)
    }

    /// Opens such a copy of a blob of `size` bytes for reading.
    ///
    /// # Errors
    /// [`StoreError::UnexpectedFile`], [`StoreError::Io`].
    pub fn open_quarantined(
        &self,
        digest: Digest,
        time: u64,
        size: u64,
    ) -> Result<FileReader<'_>, StoreError> {
        let file = self.root.open_file(&layout::quarantined(digest, time))?;
        Ok(FileReader::of_opened(self, digest, size, file))
    }
}

fn digest_of(file: &mut File) -> io::Result<Digest> {
    let (mut hasher, mut buffer) = (Hasher::new(), vec![0; 1 << 20]);
    loop {
        match file.read(&mut buffer)? {
            0 => return Ok(hasher.finish()),
            count => hasher.update(buffer.get(..count).unwrap_or_default()),
        }
    }
}

/// The digests and Unix times of what was put aside.
fn copies_in(root: &Root) -> Result<Vec<(Digest, u64)>, StoreError> {
    let Some(quarantine) = root.find_directory(Path::new(layout::QUARANTINE))? else {
        return Ok(Vec::new());
    };
    let mut copies = Vec::new();
    for entry in quarantine.entries()? {
        let name = entry?.name;
        copies.extend(name.to_str().and_then(layout::parse_quarantined_name));
    }
    Ok(copies)
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::sync::Arc;

    use super::*;
    use crate::testing::{add_blobs, store_with};

    fn quarantine(store: &Store, digest: Digest) -> Option<Place> {
        let seen = store.blob_status(digest).unwrap().unwrap();
        store.quarantine(digest, &seen).unwrap()
    }

    #[test]
    fn quarantined_blob_keeps_its_bytes_under_another_name() {
        let (_folder, store, digest) = store_with(b"weights");
        assert!(store.damaged().is_empty());
        let place = quarantine(&store, digest).unwrap();
        assert_eq!(fs::read(place.path()).unwrap(), b"weights");
        assert_eq!(store.blob_size(digest).unwrap(), None);
        assert_eq!(store.damaged(), [digest].into());
        let [time] = store.quarantined_copies(digest).unwrap().try_into().unwrap();
        assert_eq!(store.path(layout::quarantined(digest, time)), place.path());
    }

    #[test]
    fn damage_is_known_after_a_restart_until_the_blob_is_there_again() {
        let (folder, store, digest) = store_with(b"weights");
        quarantine(&store, digest).unwrap();
        fs::write(store.path("quarantine/notes.txt"), "of the administrator").unwrap();
        drop(store);
        let store = Arc::new(Store::open(folder.path().join("store")).unwrap());
        assert_eq!(store.damaged(), [digest].into());
        assert!(store.is_quarantined(digest));
        add_blobs(&store, [b"weights"]);
        assert!(store.damaged().is_empty());
        assert_eq!(store.quarantined_copies(digest).unwrap().len(), 1, "it is the administrator's");
    }

    #[test]
    fn blob_can_be_put_aside_twice_within_a_second() {
        let (_folder, store, digest) = store_with(b"weights");
        let first = quarantine(&store, digest).unwrap();
        add_blobs(&store, [b"weights"]);
        assert_ne!(quarantine(&store, digest).unwrap(), first);
        assert_eq!(store.quarantined_copies(digest).unwrap().len(), 2);
    }

    #[test]
    fn blob_that_took_the_place_of_the_damaged_one_stays() {
        let (_folder, store, digest) = store_with(b"weights");
        let seen = store.blob_status(digest).unwrap().unwrap();
        // Kept open, so that its inode is not given to the next file.
        let _mapped = store.open_blob(digest, 0).unwrap();
        fs::remove_file(store.path(layout::blob(digest))).unwrap();
        assert_eq!(store.quarantine(digest, &seen).unwrap(), None);
        add_blobs(&store, [b"weights"]);
        assert_eq!(store.quarantine(digest, &seen).unwrap(), None);
        assert!(store.blob_size(digest).unwrap().is_some() && store.damaged().is_empty());
    }

    #[test]
    fn missing_blob_is_no_quarantined_one() {
        let (_folder, store, _) = store_with(b"weights");
        let missing = Digest::of(b"something else");
        store.note_missing(missing);
        assert_eq!(store.damaged(), [missing].into());
        assert!(!store.is_quarantined(missing));
    }
}
