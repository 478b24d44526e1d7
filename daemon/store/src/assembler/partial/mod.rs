//! Downloads that can be resumed: `partial/sha256-…/`, one directory for each file.
//!
//! What arrives goes straight into the files that become the blobs, so each byte is written once.
//! The journal beside them says which bytes those are. Nothing here is durable and nothing has to
//! be: after a crash of the daemon all of it is still there, and after one of the machine what the
//! journal claims is compared with what the disk has. Whatever it says, a file is committed only
//! when all its bytes have its digest.
//!
//! As long as a file has its directory here, what the store has of it is not collected.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, SystemTime};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::split::{BlobPlaces, Segment, SplitPlan};

use super::Assembler;
use crate::{Staging, Store, StoreError};

mod extents;
mod journal;
mod recover;

pub(super) use extents::Extents;
use journal::Record;
use recover::{Claims, Session};

/// A download's directory. One transfer has it at a time, which the caller sees to.
#[derive(Debug)]
pub struct PartialFile {
    store: Arc<Store>,
    file: Digest,
    size: u64,
    directory: PathBuf,
    /// What earlier sessions have written.
    records: Vec<Record>,
}

impl PartialFile {
    /// What there is of a file of `size` bytes, if anything.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn open(store: &Arc<Store>, file: Digest, size: u64) -> Result<Self, StoreError> {
        let directory = layout::partial(file);
        let journal = store.root.read_limited(&directory.join(JOURNAL), MAX_JOURNAL_BYTES)?;
        let found = journal.map_or_else(Vec::new, |journal| journal::parse(&journal, file, size));
        Ok(Self { store: Arc::clone(store), file, size, directory, records: found })
    }

    /// The first bytes of the file, as many as have arrived in one run, but at most `limit`: the
    /// header, from which the plan is made. None that have arrived before this boot of the machine,
    /// which may be lost: with another plan all the rest would be.
    #[must_use]
    pub fn head(&self, limit: u64) -> Vec<u8> {
        let certain = self.claimed(Some(recover::boot_id()));
        let length = usize::try_from(certain.end_of_run(0).min(limit)).unwrap_or_default();
        let mut head = vec![0; length];
        // In every plan the file begins with its first blob.
        let Ok(file) = self.store.root.open_file(&self.path_of(0)) else { return Vec::new() };
        let read = file.metadata().and_then(|metadata| {
            head.truncate(usize::try_from(metadata.len()).unwrap_or_default().min(length));
            file.read_exact_at(&mut head, 0)
        });
        if read.is_ok() { head } else { Vec::new() }
    }

    /// How much the journal says has come.
    #[must_use]
    pub fn claimed_bytes(&self) -> u64 {
        self.claimed(None).total()
    }

    /// Whether a planned blob has a file here.
    #[must_use]
    pub fn has_begun(&self, blob: usize) -> bool {
        self.store.root.status(&self.path_of(blob)).is_ok_and(|status| status.is_some())
    }

    /// What has arrived by the journal; only since a boot if one is given.
    fn claimed(&self, since: Option<[u8; 16]>) -> Extents {
        let (mut arrived, mut counts) = (Extents::default(), since.is_none());
        for record in &self.records {
            match *record {
                Record::Session { boot, .. } => counts = since.is_none_or(|since| since == boot),
                Record::Arrived { offset, length, .. } if counts => {
                    arrived.insert(offset..offset.saturating_add(u64::from(length)));
                }
                Record::Arrived { .. } | Record::Stored { .. } => {}
            }
        }
        arrived
    }

    /// Goes on by this plan. What has arrived by another one is given up, and so is what the disk
    /// does not have as the journal says.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn follow(self, plan: SplitPlan, staging: Staging) -> Result<Assembler, StoreError> {
        let session = Session::by(&plan);
        let claims = Claims::of(&self.records, &session);
        let partial = PartialDirectory::create(self, BlobPlaces::of(&plan))?;
        if claims.is_empty() {
            partial.begin_anew(&staging)?;
        }
        let assembler = Assembler::in_directory(staging, plan, Some(partial));
        if let Some(partial) = &assembler.partial {
            assembler.recover(partial, &claims)?;
            partial.append(session.record())?;
        }
        Ok(assembler)
    }

    fn path_of(&self, blob: usize) -> PathBuf {
        self.directory.join(blob.to_string())
    }
}

/// The directory of a download in progress, which notes what arrives.
#[derive(Debug)]
pub(super) struct PartialDirectory {
    home: PartialFile,
    places: BlobPlaces,
    journal: File,
    end_of_journal: AtomicU64,
}

impl PartialDirectory {
    fn create(home: PartialFile, places: BlobPlaces) -> Result<Self, StoreError> {
        let disk = home.store.disk();
        home.store.create_directories(Path::new(layout::PARTIAL))?;
        disk.create_dir(&home.directory)?;
        let path = home.directory.join(JOURNAL);
        let journal = disk.open_or_create(&path, 0o600)?;
        let end_of_journal = (journal::HEAD_BYTES + home.records.len() * journal::RECORD_BYTES) as u64;
        // A torn record may have sound ones behind it, which are none of what follows.
        journal.set_len(end_of_journal).map_err(home.store.root.failure("shorten", &path))?;
        Ok(Self { home, places, journal, end_of_journal: AtomicU64::new(end_of_journal) })
    }

    /// Where a planned blob has its file.
    pub(super) fn path_of(&self, blob: usize) -> PathBuf {
        self.home.path_of(blob)
    }

    /// Where bytes are that belong to no blob, at their offsets in the file.
    pub(super) fn literals_path(&self) -> PathBuf {
        self.home.directory.join(LITERALS)
    }

    pub(super) fn write_literal(&self, offset_in_file: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let (disk, path) = (self.home.store.disk(), self.literals_path());
        let file = disk.open_or_create(&path, 0o600)?;
        disk.write_at(&path, &file, bytes, offset_in_file)
    }

    /// Where a planned blob's bytes are in the file.
    pub(super) fn ranges(&self, plan: &SplitPlan, blob: usize) -> impl Iterator<Item = Range<u64>> {
        let range =
            |segment: &Segment| segment.offset_in_file..segment.offset_in_file.saturating_add(segment.length);
        self.places.segments(plan, blob).map(range)
    }

    /// Notes that bytes of the file have been written.
    pub(super) fn note_arrived(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.append(Record::Arrived { offset, length, crc: crc32fast::hash(bytes) })
    }

    pub(super) fn note_digests(&self, digests: &[Digest]) -> Result<(), StoreError> {
        for (blob, digest) in digests.iter().enumerate() {
            let blob = u32::try_from(blob).unwrap_or(u32::MAX);
            self.append(Record::Stored { blob, digest: *digest })?;
        }
        Ok(())
    }

    /// Writes a record behind the others. A place that stays empty because its write fails ends the
    /// journal there for the next session, which then fetches more again than it would have to.
    fn append(&self, record: Record) -> Result<(), StoreError> {
        let place = self.end_of_journal.fetch_add(journal::RECORD_BYTES as u64, Ordering::Relaxed);
        let path = self.home.directory.join(JOURNAL);
        self.home.store.disk().write_at(&path, &self.journal, &record.encode(), place)
    }

    /// Empties the directory and begins a journal.
    fn begin_anew(&self, staging: &Staging) -> Result<(), StoreError> {
        let (disk, directory) = (self.home.store.disk(), &self.home.directory);
        if let Some(listed) = self.home.store.root.find_directory(directory)? {
            for entry in listed.entries()? {
                let path = directory.join(entry?.name);
                if !path.ends_with(JOURNAL) {
                    staging.written().forget(&path);
                    disk.remove_file(&path)?;
                }
            }
        }
        self.home.store.space().recount_partial();
        let path = directory.join(JOURNAL);
        self.journal.set_len(0).map_err(self.home.store.root.failure("shorten", &path))?;
        disk.write_at(&path, &self.journal, &journal::head(self.home.file, self.home.size), 0)?;
        self.end_of_journal.store(journal::HEAD_BYTES as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl Store {
    /// The files that have something here.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn partial_files(&self) -> Result<Vec<Digest>, StoreError> {
        let Some(directory) = self.root.find_directory(Path::new(layout::PARTIAL))? else {
            return Ok(Vec::new());
        };
        let mut files = Vec::new();
        for entry in directory.entries()? {
            // What has another name is none of blobd's.
            files.extend(entry?.name.to_str().and_then(layout::parse_blob_name));
        }
        Ok(files)
    }

    /// The same, with what it takes on disk and when it was last added
    /// to.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn partials(&self) -> Result<Vec<PartialDownload>, StoreError> {
        let described = self.partial_files()?.into_iter().map(|file| {
            let directory = layout::partial(file);
            let changed = |path: &Path| Some(self.root.status(path).ok()??.modified());
            let last_used = changed(&directory.join(JOURNAL)).or_else(|| changed(&directory));
            Ok(PartialDownload { file, bytes: self.partial_bytes(&directory)?, last_used })
        });
        described.collect()
    }

    /// Removes what has arrived of a file; says how much that took on disk.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn remove_partial(&self, file: Digest) -> Result<u64, StoreError> {
        let directory = layout::partial(file);
        let bytes = self.partial_bytes(&directory)?;
        if self.root.status(&directory)?.is_some() {
            self.disk().remove_tree(&directory)?;
            self.space().recount_partial();
        }
        Ok(bytes)
    }

    /// What a download takes on disk. Its directory is freed with it.
    fn partial_bytes(&self, directory: &Path) -> Result<u64, StoreError> {
        let own = self.root.allocated_bytes(directory)?;
        Ok(self.root.tree_bytes(directory).saturating_add(own))
    }

    /// What downloads have left of these files is of no more use to whoever has had them pinned; it
    /// goes, unless somebody else is at it.
    pub fn forget_partials(&self, files: impl IntoIterator<Item = Digest>) {
        for file in files.into_iter().filter(|file| !self.leases().is_pinned(*file)) {
            if let Err(error) = self.remove_partial(file) {
                tracing::warn!("{error}; `blobd gc` removes it when a week has passed");
            }
        }
    }

    /// The blobs that downloads have brought to their final places: their files may be no part of
    /// any model yet.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn blobs_of_partial(&self, file: Digest) -> Result<BTreeSet<Digest>, StoreError> {
        let path = layout::partial(file).join(JOURNAL);
        let journal = self.root.read_limited(&path, MAX_JOURNAL_BYTES)?;
        Ok(journal.map(|journal| journal::stored(&journal, file).into_iter().collect()).unwrap_or_default())
    }
}

/// A download that can be resumed, or a file of a model that is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialDownload {
    /// The file's digest.
    pub file: Digest,
    /// What has arrived takes so much on disk.
    pub bytes: u64,
    /// When the last of it arrived, if the file system knows.
    pub last_used: Option<SystemTime>,
}

impl PartialDownload {
    /// Whether nobody has gone on with it for a week. One from the future may have been added to a
    /// moment ago.
    #[must_use]
    pub(crate) fn is_abandoned(&self, now: SystemTime) -> bool {
        const KEPT: Duration = Duration::from_secs(7 * 24 * 60 * 60);
        self.last_used.is_some_and(|last| now.duration_since(last).is_ok_and(|age| age > KEPT))
    }
}

const JOURNAL: &str = "journal";
/// Five million records: what is read of a file that somebody has put in a journal's place.
const MAX_JOURNAL_BYTES: u64 = 256 << 20;
/// Padding and the like, at its offset in the file.
const LITERALS: &str = "literals";

#[cfg(test)]
mod tests;
