//! Downloads that can be resumed: `partial/sha256-…/`, one directory for each file.
//!
//! Bytes that arrive are written directly to the files that become the blobs, so each byte is written once. The journal
//! beside them records which bytes have arrived. Nothing here is durable or has to be: after a crash of the daemon all
//! of it still exists, and after a crash of the machine the journal is compared with the data on disk. In any case a
//! file is committed only when all its bytes have its digest.
//!
//! While a file has a directory here, its stored blobs and recipe are not collected.

use std::collections::BTreeSet;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::split::{BlobPlaces, Segment, SplitPlan};

use super::Assembler;
use super::second_copy::Difference;
use crate::bounded_read::read_exact;
use crate::{Staging, Store, StoreError};

mod recover;

use recover::Claims;

use crate::content::downloads::journal::{self, Record, Session};
use crate::content::downloads::{BytesFrom, DownloadAbout, JOURNAL, claimed, journal_in};

/// The directory of a download. The caller makes sure that only one transfer uses it at a time.
#[derive(Debug)]
pub struct PartialFile {
    store: Arc<Store>,
    file: Digest,
    size: u64,
    directory: PathBuf,
    /// The records of earlier sessions.
    records: Vec<Record>,
    about: Option<DownloadAbout>,
    /// The digest of what has arrived, if that is a complete copy and wrong, so that a second one is needed.
    wrong: Option<Digest>,
}

impl PartialFile {
    /// Opens the unfinished download of a file of `size` bytes; empty if there is none.
    pub fn open(store: &Arc<Store>, file: Digest, size: u64) -> Result<Self, StoreError> {
        let directory = layout::partial(file);
        let journal = journal_in(&store.content.root, &directory)?;
        let found = journal.map_or_else(Vec::new, |journal| journal::parse(&journal, file, size));
        Ok(Self { store: Arc::clone(store), file, size, directory, records: found, about: None, wrong: None })
    }

    #[must_use]
    pub fn about(mut self, about: DownloadAbout) -> Self {
        self.about = Some(about);
        self
    }

    /// Has a second copy of the file received over the first, which is complete and has the digest `wrong`. The first
    /// is compared with it. Without effect if a second copy has been begun already.
    #[must_use]
    pub fn receive_again(mut self, wrong: Digest) -> Self {
        self.wrong = Some(wrong);
        self
    }

    /// The digest of the first copy, if a second one has been begun.
    pub fn first_copy(&self) -> Option<Digest> {
        self.records.iter().rev().find_map(|record| match record {
            Record::SecondCopy { first } => Some(*first),
            _ => None,
        })
    }

    /// The first bytes of the file, as many as have arrived in one run, but at most `limit`. They contain the header,
    /// from which the plan is made. Bytes from before this boot are left out: they may be lost, and a plan made from
    /// wrong bytes would discard all the rest.
    pub fn head(&self, limit: u64) -> Vec<u8> {
        let trusted = claimed(&self.records, Some(recover::boot_id()));
        let length = usize::try_from(trusted.end_of_run(0).min(limit)).unwrap_or_default();
        let mut head = vec![0; length];
        // Every plan begins with the first blob.
        let Ok(file) = self.store.content.root.open_file(&self.path_of(0)) else { return Vec::new() };
        let read = file.metadata().and_then(|metadata| {
            head.truncate(usize::try_from(metadata.len()).unwrap_or_default().min(length));
            read_exact(&file, &mut head, 0)
        });
        if read.is_ok() { head } else { Vec::new() }
    }

    pub fn claimed_bytes(&self) -> u64 {
        claimed(&self.records, None).total()
    }

    /// The same download as if nothing had arrived: what has arrived will be discarded.
    #[must_use]
    pub fn discarded(self) -> Self {
        Self { records: Vec::new(), ..self }
    }

    /// Whether a planned blob has a file here that is continued.
    pub fn has_begun(&self, blob: usize) -> bool {
        let exists =
            || self.store.content.root.status(&self.path_of(blob)).is_ok_and(|status| status.is_some());
        !self.records.is_empty() && exists()
    }

    /// Continues the download by this plan. Discards bytes of another plan, and those that differ from the journal.
    pub fn follow(self, plan: SplitPlan, staging: Staging) -> Result<Assembler, StoreError> {
        let session = Session::for_plan(&plan);
        let mut claims = Claims::from_records(&self.records, &session);
        // Without anything of a first copy there is nothing to compare.
        let wrong = self.wrong.filter(|_| !claims.is_empty() && !claims.is_of_second_copy());
        if let Some(wrong) = wrong {
            claims = claims.into_first_copy(wrong);
        }
        self.store.liveness.adopt_download(staging.transaction(), self.file)?;
        let partial = PartialDirectory::create(self, BlobPlaces::new(&plan))?;
        if claims.is_empty() {
            partial.reset(&staging)?;
        }
        partial.record_pull(claims.is_empty())?;
        let assembler = Assembler::in_directory(staging, plan, Some(partial));
        if let Some(partial) = &assembler.partial {
            assembler.recover(partial, &claims)?;
            partial.append(Record::Session(session))?;
            if let Some(first) = wrong {
                partial.append(Record::SecondCopy { first })?;
            }
        }
        Ok(assembler)
    }

    fn path_of(&self, blob: usize) -> PathBuf {
        self.directory.join(blob.to_string())
    }
}

/// The directory of a running download, which records what arrives.
#[derive(Debug)]
pub(super) struct PartialDirectory {
    download: PartialFile,
    places: BlobPlaces,
    journal: File,
    end_of_journal: AtomicU64,
}

impl PartialDirectory {
    fn create(download: PartialFile, places: BlobPlaces) -> Result<Self, StoreError> {
        let disk = &download.store.content.disk;
        download.store.content.create_directories(Path::new(layout::PARTIAL))?;
        disk.create_dir(&download.directory)?;
        let path = download.directory.join(JOURNAL);
        let journal = disk.open_or_create(&path, 0o600)?;
        let end_of_journal = (journal::HEAD_BYTES + download.records.len() * journal::RECORD_BYTES) as u64;
        // Valid records may follow a torn one, but they must not become part of the journal again.
        journal.set_len(end_of_journal).map_err(download.store.content.root.failure("shorten", &path))?;
        Ok(Self { download, places, journal, end_of_journal: AtomicU64::new(end_of_journal) })
    }

    pub(super) fn path_of(&self, blob: usize) -> PathBuf {
        self.download.path_of(blob)
    }

    /// The file for bytes that belong to no blob, at their offsets in the file.
    pub(super) fn literals_path(&self) -> PathBuf {
        self.download.directory.join(LITERALS)
    }

    pub(super) fn write_literal(&self, offset_in_file: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let (disk, path) = (&self.download.store.content.disk, self.literals_path());
        let file = disk.open_or_create(&path, 0o600)?;
        disk.write_at(&path, &file, bytes, offset_in_file)
    }

    pub(super) fn ranges(&self, plan: &SplitPlan, blob: usize) -> impl Iterator<Item = Range<u64>> {
        let range =
            |segment: &Segment| segment.offset_in_file..segment.offset_in_file.saturating_add(segment.length);
        self.places.segments(plan, blob).map(range)
    }

    pub(super) fn note_arrived(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.append(Record::Arrived { offset, length, crc: crc32fast::hash(bytes) })
    }

    /// Notes that a second copy differs from the first, before the first is replaced.
    pub(super) fn note_difference(&self, difference: &Difference) -> Result<(), StoreError> {
        let (offset, length) = (difference.range.start, saturated(difference.length()));
        self.append(Record::Differs { offset, length, bytes: saturated(difference.bytes) })
    }

    pub(super) fn note_digests(&self, digests: &[Digest]) -> Result<(), StoreError> {
        for (blob, digest) in digests.iter().enumerate() {
            let blob = u32::try_from(blob).unwrap_or(u32::MAX);
            self.append(Record::Stored { blob, digest: *digest })?;
        }
        Ok(())
    }

    /// If the write fails, the journal ends there for the next session, which then downloads more than necessary.
    fn append(&self, record: Record) -> Result<(), StoreError> {
        let place = self.end_of_journal.fetch_add(journal::RECORD_BYTES as u64, Ordering::Relaxed);
        let path = self.download.directory.join(JOURNAL);
        self.download.store.content.disk.write_at(&path, &self.journal, &record.encode(), place)
    }

    fn reset(&self, staging: &Staging) -> Result<(), StoreError> {
        let (disk, directory) = (&self.download.store.content.disk, &self.download.directory);
        if let Some(listed) = self.download.store.content.root.find_directory(directory)? {
            for entry in listed.entries()? {
                let path = directory.join(entry?.name);
                if !path.ends_with(JOURNAL) {
                    staging.written().forget(&path);
                    disk.remove_file(&path)?;
                }
            }
        }
        self.download.store.ledger.space().recount_partial();
        let path = directory.join(JOURNAL);
        self.journal.set_len(0).map_err(self.download.store.content.root.failure("shorten", &path))?;
        disk.write_at(&path, &self.journal, &journal::head(self.download.file, self.download.size), 0)?;
        self.end_of_journal.store(journal::HEAD_BYTES as u64, Ordering::Relaxed);
        Ok(())
    }
}

impl PartialDirectory {
    pub(super) fn record_pull(&self, is_new: bool) -> Result<(), StoreError> {
        let (store, file) = (&self.download.store, self.download.file);
        let Some(about) = &self.download.about else { return Ok(()) };
        let about = match is_new {
            true => about.clone(),
            false => about.clone().continuing(store.content.download_about(file)),
        };
        store.content.record_download(file, &about)
    }

    fn record_models(&self, models: BTreeSet<Digest>) -> Result<(), StoreError> {
        let (store, file) = (&self.download.store, self.download.file);
        // What is not known stays so.
        let Some(mut about) = store.content.download_about(file) else { return Ok(()) };
        let Some(bytes_from) = &mut about.bytes_from else { return Ok(()) };
        bytes_from.extend(models.into_iter().map(BytesFrom::Model));
        store.content.record_download(file, &about)
    }
}

impl Assembler {
    /// Records, for a download, that bytes of the stored models with these manifests are going to be used.
    pub fn note_models(&self, models: BTreeSet<Digest>) -> Result<(), StoreError> {
        match &self.partial {
            Some(partial) if !models.is_empty() => partial.record_models(models),
            _ => Ok(()),
        }
    }
}

fn saturated(number: u64) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// Bytes that belong to no blob, such as padding, at their offsets in the file.
const LITERALS: &str = "literals";

#[cfg(test)]
mod tests;
