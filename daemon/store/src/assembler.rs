//! Assembles a file in the store: turns ranges of its bytes into blobs with digests.
//!
//! An [`Assembler`] follows a [`SplitPlan`], which may leave the file in one piece. Every byte is written once, to the
//! file that becomes its blob, in ranges of any order and from any thread. The digests of the file and of its blobs are
//! computed in one pass from the start of the file (`hash`). Imports, pulls and repairs differ in where the ranges come
//! from.
//!
//! The files are in `staging/` and removed with the transaction, or in `partial/` ([`PartialFile`]), where a later
//! transaction finds what has arrived.

use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use blobd_sha256::Sha256;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::{Recipe, RecipeError};
use blobd_store_format::split::{BlobContent, Part, PlannedBlob, SplitPlan, Target};
use tracing_mutex::stdsync::Mutex;

use crate::bounded_read::read_exact;
use crate::ledger::accounting::Reservation;
use crate::seal::StagedBlob;
use crate::{Staging, Store, StoreError, lock};

mod direct_writer;
mod hash;
mod partial;
mod pipeline;
mod reflink;
mod second_copy;
mod shared;
#[cfg(test)]
mod tests;

pub use hash::BlobSink;
pub use partial::PartialFile;
pub use pipeline::{CHUNKS_IN_USE, RangeSource};
pub use second_copy::{Difference, Differences};
pub use shared::SharedBlobs;

use direct_writer::DirectWriter;
use hash::BlobHash;
use partial::PartialDirectory;
use second_copy::FirstCopy;

use crate::content::downloads::extents::Extents;

/// A file that is being assembled.
#[derive(Debug)]
pub struct Assembler {
    staging: Staging,
    plan: SplitPlan,
    /// `None` if the files are in `staging/`.
    partial: Option<PartialDirectory>,
    /// Held while a blob's file is created and space is reserved for it, which may take long, so that two writers of a
    /// blob do not both create it. Readers do not need it.
    creating: Mutex<()>,
    direct: DirectWriter,
    /// Held only for changes in memory.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    arrived: Extents,
    /// Planned blobs that are read from the store.
    stored: BTreeMap<usize, Digest>,
    /// The complete copy that what arrives is compared with and replaces, if its digest is wrong.
    first: Option<FirstCopy>,
    /// Planned blobs that have a file here.
    files: BTreeMap<usize, PathBuf>,
    /// The space reserved for files in `staging/`.
    reservations: BTreeMap<usize, Reservation>,
    /// What is hashed of shared blobs: before this file is hashed, and after it.
    hashes: BTreeMap<usize, BlobHash>,
}

/// The digests of an assembled file.
#[derive(Clone, Debug)]
pub struct HashedFile {
    /// The SHA-256 of the whole file.
    pub digest: Digest,
    /// The digests of the planned blobs, in order; `None` for one that lacks parts of other files.
    blobs: Vec<Option<Digest>>,
    /// The bytes that belong to no blob.
    literals: Vec<Vec<u8>>,
}

impl HashedFile {
    /// The digests of the planned blobs that are complete, in order.
    pub fn blobs(&self) -> Vec<Digest> {
        self.blobs.iter().copied().flatten().collect()
    }

    fn digest_of(&self, blob: usize) -> Option<Digest> {
        self.blobs.get(blob).copied().flatten()
    }

    fn recipe(self, plan: SplitPlan, members: &[Digest]) -> Result<Recipe, RecipeError> {
        let blobs: Vec<Digest> = self.blobs.into_iter().flatten().collect();
        plan.archive_recipe(self.digest, &blobs, self.literals, members)
    }
}

/// A file of this size costs more than the hash of its bytes.
const SMALL_BLOB_BYTES: u64 = 64 << 10;

/// Where bytes of the file are that have arrived, and their offset there.
enum Source {
    File(PathBuf, u64),
    Stored(Digest, u64),
}

impl Assembler {
    /// Assembles a file by `plan` in the transaction's directory.
    pub fn new(staging: Staging, plan: SplitPlan) -> Self {
        Self::in_directory(staging, plan, None)
    }

    fn in_directory(staging: Staging, plan: SplitPlan, partial: Option<PartialDirectory>) -> Self {
        let (creating, direct, state) = (Mutex::default(), DirectWriter::default(), Mutex::default());
        Self { staging, plan, partial, creating, direct, state }
    }

    /// How the file is split.
    pub const fn plan(&self) -> &SplitPlan {
        &self.plan
    }

    /// Writes bytes of the file to their final position. Bytes that have arrived before are not replaced: they may have
    /// been hashed already.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let gaps = lock(&self.state).arrived.gaps(offset..offset.saturating_add(bytes.len() as u64));
        for gap in gaps {
            // Within `bytes`, whose length is a `usize`.
            let within = |place: u64| usize::try_from(place.saturating_sub(offset)).unwrap_or(usize::MAX);
            self.write_new(gap.start, bytes.get(within(gap.start)..within(gap.end)).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Replaces bytes that have arrived. The file must not be hashed at the same time.
    pub fn replace(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        lock(&self.state).arrived.remove(offset..offset.saturating_add(bytes.len() as u64));
        self.write(offset, bytes)
    }

    fn write_new(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let end = offset.saturating_add(bytes.len() as u64);
        if self.is_second_copy() {
            self.replace_first_copy(offset, bytes)?;
        } else {
            self.write_all(offset, bytes)?;
        }
        if let Some(partial) = &self.partial {
            partial.note_arrived(offset, bytes)?;
        }
        lock(&self.state).arrived.insert(offset..end);
        Ok(())
    }

    fn write_all(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let mut position = offset;
        for part in self.parts(offset, bytes)? {
            self.write_part(position, &part)?;
            position = position.saturating_add(part.bytes.len() as u64);
        }
        Ok(())
    }

    /// Writes the next bytes of a file that is stored in order, without those of small blobs, which the hasher writes.
    fn write_all_but_small(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let mut position = offset;
        for part in self.parts(offset, bytes)? {
            let end = position.saturating_add(part.bytes.len() as u64);
            match self.is_small(&part) {
                true => lock(&self.state).arrived.insert(position..end),
                false => self.write(position, part.bytes)?,
            }
            position = end;
        }
        Ok(())
    }

    /// Whether these bytes are a whole blob that is worth less than a file.
    fn is_small(&self, part: &Part<'_>) -> bool {
        let Target::Blob { blob, offset_in_blob: 0 } = part.target else { return false };
        let Some(planned) = self.plan.blobs().get(blob) else { return false };
        let is_whole = planned.size == part.bytes.len() as u64;
        is_whole && planned.size <= SMALL_BLOB_BYTES && self.is_own(blob, planned)
    }

    /// Whether a blob is neither in the store, nor the file itself, nor shared with other files, nor in `partial/`.
    fn is_own(&self, blob: usize, planned: &PlannedBlob) -> bool {
        let is_part = !matches!(planned.content, BlobContent::File | BlobContent::SharedGroup { .. });
        is_part && self.partial.is_none() && self.stored_blob(blob).is_none()
    }

    fn write_part(&self, offset_in_file: u64, part: &Part<'_>) -> Result<(), StoreError> {
        match (part.target, &self.partial) {
            (Target::Blob { blob, offset_in_blob }, _) => {
                if let Some(digest) = self.stored_blob(blob) {
                    return self.compare_stored(digest, offset_in_blob, part.bytes);
                }
                let (path, file) = self.file_of(blob)?;
                let disk = self.staging.disk();
                if !self.takes_space_when_written() {
                    let direct = self.write_direct(&path, part.bytes, offset_in_blob)?;
                    let rest = part.bytes.get(direct..).filter(|rest| !rest.is_empty());
                    let offset = offset_in_blob.saturating_add(direct as u64);
                    return rest.map_or(Ok(()), |rest| disk.write_at(&path, &file, rest, offset));
                }
                let write = || disk.write_at(&path, &file, part.bytes, offset_in_blob);
                let length = part.bytes.len() as u64;
                let growth = lock(&self.state).reservations.get(&blob).map_or(0, |own| own.growth(length));
                let growth = self.staging.take_space(growth, write)?;
                lock(&self.state).reservations.entry(blob).and_modify(|own| own.add(growth, length));
                Ok(())
            }
            (Target::Literal { .. }, Some(partial)) => partial.write_literal(offset_in_file, part.bytes),
            // The hasher collects them.
            (Target::Literal { .. }, None) => Ok(()),
        }
    }

    fn stored_blob(&self, blob: usize) -> Option<Digest> {
        lock(&self.state).stored.get(&blob).copied()
    }

    /// Whatever the file's digest turns out to be, the recipe must rebuild it, so the bytes must be those of the blob.
    fn compare_stored(&self, digest: Digest, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let mut stored = vec![0; bytes.len()];
        self.read_stored(digest, offset, &mut stored)?;
        if stored == bytes { Ok(()) } else { Err(StoreError::BlobDiffers { digest }) }
    }

    /// Writes large pieces of files in `staging/` past the page cache; returns how many bytes that were. Downloads are
    /// read back to be hashed.
    fn write_direct(&self, path: &Path, bytes: &[u8], offset: u64) -> Result<usize, StoreError> {
        match self.partial {
            Some(_) => Ok(0),
            None => self.direct.write(self.staging.disk(), path, bytes, offset),
        }
    }

    /// Fills `buffer` with bytes of the file that have arrived or are in the store.
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        let targets = self.parts(offset, buffer)?.into_iter().map(|part| (part.target, part.bytes.len()));
        let mut done = 0;
        for (target, length) in targets.collect::<Vec<_>>() {
            let part = buffer.get_mut(done..done + length).unwrap_or_default();
            match self.source(target, offset.saturating_add(done as u64))? {
                Source::Stored(digest, offset) => self.read_stored(digest, offset, part)?,
                Source::File(path, offset) => {
                    let root = &self.store().content.root;
                    let file = root.open_file(&path)?;
                    read_exact(&file, part, offset).map_err(root.failure("read", &path))?;
                }
            }
            done += length;
        }
        Ok(())
    }

    /// Fills `buffer` from a blob of the store, or of a lower one.
    fn read_stored(&self, digest: Digest, offset: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        let end = offset.saturating_add(buffer.len() as u64);
        let (file, root) = self.store().content.find_blob(digest, end)?;
        read_exact(&file, buffer, offset).map_err(root.failure("read", &layout::blob(digest)))
    }

    /// The ranges that have not arrived, in order.
    pub fn missing(&self) -> Vec<Range<u64>> {
        lock(&self.state).arrived.gaps(0..self.plan.file_size())
    }

    /// The end of the run of readable bytes that starts at `offset`.
    pub fn end_of_run(&self, offset: u64) -> u64 {
        lock(&self.state).arrived.end_of_run(offset)
    }

    /// The number of bytes that have arrived or are read from the store.
    pub fn arrived_bytes(&self) -> u64 {
        lock(&self.state).arrived.total()
    }

    /// Whether no byte of a planned blob has arrived.
    pub fn is_untouched(&self, blob: usize) -> bool {
        let state = lock(&self.state);
        !state.files.contains_key(&blob) && !state.stored.contains_key(&blob)
    }

    /// Reads a planned blob from the store, where it has this digest, from now on. Of a file in `staging/`, its bytes
    /// are compared with the blob instead of written. The caller has leased it.
    pub fn take_stored(&self, blob: usize, digest: Digest) {
        let mut state = lock(&self.state);
        state.stored.insert(blob, digest);
        for range in self.ranges(blob) {
            state.arrived.insert(range);
        }
    }

    /// Undoes [`Self::take_stored`]: the blob has to be downloaded.
    pub fn forget_stored(&self, blob: usize) {
        let mut state = lock(&self.state);
        if state.stored.remove(&blob).is_some() {
            for range in self.ranges(blob) {
                state.arrived.remove(range);
            }
        }
    }

    /// What has arrived of a planned blob has to be downloaded again. The file must not be hashed at the same time.
    pub fn forget_arrived(&self, blob: usize) {
        let mut state = lock(&self.state);
        for range in self.ranges(blob) {
            state.arrived.remove(range);
        }
    }

    /// Bytes between tensors that have been written have to be downloaded. The file must not be hashed at the same time.
    pub fn forget_literal(&self, range: Range<u64>) {
        lock(&self.state).arrived.remove(range);
    }

    /// The planned blobs that are read from the store.
    pub fn stored(&self) -> BTreeMap<usize, Digest> {
        lock(&self.state).stored.clone()
    }

    /// Records the digests of planned blobs in a download's journal, before their files get their final names. So a
    /// crash in between loses nothing.
    pub fn note_digests(&self, digests: &[Digest]) -> Result<(), StoreError> {
        self.partial.as_ref().map_or(Ok(()), |partial| partial.note_digests(digests))
    }

    /// Removes the files of the blobs that are not complete, of a file in `staging/` that is received again.
    pub fn discard(self) -> Result<(), StoreError> {
        let state = lock(&self.state);
        for path in state.reservations.keys().filter_map(|blob| state.files.get(blob)) {
            self.direct.close(path);
            self.staging.written().forget(path);
            self.staging.disk().remove_file(path)?;
        }
        Ok(())
    }

    /// The recipe of a file that was split; `None` for a single blob. `members` are the digests of the files in an
    /// archive.
    pub fn into_recipe(self, file: HashedFile, members: &[Digest]) -> Result<Option<Recipe>, RecipeError> {
        if self.plan.is_whole() { Ok(None) } else { file.recipe(self.plan, members).map(Some) }
    }

    /// As [`into_recipe`](Self::into_recipe), of a file that others still read here: copies the plan.
    pub fn recipe(&self, file: HashedFile, members: &[Digest]) -> Result<Option<Recipe>, RecipeError> {
        if self.plan.is_whole() { Ok(None) } else { file.recipe(self.plan.clone(), members).map(Some) }
    }

    /// The blob in a file that is completely written and hashed.
    fn staged_blob(&self, blob: usize, digest: Digest) -> Result<StagedBlob, StoreError> {
        let size = self.plan.blobs().get(blob).map_or(0, |planned| planned.size);
        let begun = lock(&self.state).files.get(&blob).cloned();
        // A closed file is not opened again, because open and closed files are synced differently.
        let path = begun.map_or_else(|| self.file_of(blob).map(|(path, _empty)| path), Ok)?;
        if self.partial.is_none() {
            self.direct.close(&path);
            self.staging.written().complete(&path);
        }
        let reservation = lock(&self.state).reservations.remove(&blob);
        let of_partial = || {
            let bytes = self.store().ledger.space().on_disk(size);
            Reservation::for_partial(&self.store().ledger, bytes, Arc::clone(self.staging.transaction()))
        };
        let reservation = reservation.unwrap_or_else(of_partial);
        Ok(StagedBlob { path, digest, size, reservation })
    }

    fn parts<'b>(&self, offset: u64, bytes: &'b [u8]) -> Result<Vec<Part<'b>>, StoreError> {
        self.plan.parts(offset, bytes).map_err(|_too_long| StoreError::FileSize {
            found: offset.saturating_add(bytes.len() as u64),
            expected: self.plan.file_size(),
        })
    }

    /// Where bytes are that are at `offset_in_file`.
    fn source(&self, target: Target, offset_in_file: u64) -> Result<Source, StoreError> {
        match (target, &self.partial) {
            (Target::Blob { blob, offset_in_blob }, _) => match self.stored_blob(blob) {
                Some(digest) => Ok(Source::Stored(digest, offset_in_blob)),
                None => Ok(Source::File(self.path_of(blob)?, offset_in_blob)),
            },
            (Target::Literal { .. }, Some(partial)) => {
                Ok(Source::File(partial.literals_path(), offset_in_file))
            }
            (Target::Literal { .. }, None) => Err(self.not_arrived()),
        }
    }

    fn path_of(&self, blob: usize) -> Result<PathBuf, StoreError> {
        // Not in one expression, which would keep the lock that `not_arrived` takes.
        let path = lock(&self.state).files.get(&blob).cloned();
        path.ok_or_else(|| self.not_arrived())
    }

    fn not_arrived(&self) -> StoreError {
        StoreError::FileSize { found: self.arrived_bytes(), expected: self.plan.file_size() }
    }

    /// The file of a planned blob, for writing. Space is reserved for a new one.
    fn file_of(&self, blob: usize) -> Result<(PathBuf, Arc<File>), StoreError> {
        if let Some(begun) = self.open_file_of(blob)? {
            return Ok(begun);
        }
        let _guard = lock(&self.creating);
        if let Some(begun) = self.open_file_of(blob)? {
            return Ok(begun);
        }
        let path = match &self.partial {
            Some(partial) => partial.path_of(blob),
            None => self.staging.next_path(),
        };
        let size = self.plan.blobs().get(blob).map_or(0, |planned| planned.size);
        let (file, reservation) = self.create(&path, size)?;
        let mut state = lock(&self.state);
        match &self.partial {
            Some(_) => reservation.stays_in_partial(),
            None => drop(state.reservations.insert(blob, reservation)),
        }
        state.files.insert(blob, path.clone());
        Ok((path, file))
    }

    fn open_file_of(&self, blob: usize) -> Result<Option<(PathBuf, Arc<File>)>, StoreError> {
        let Some(path) = lock(&self.state).files.get(&blob).cloned() else { return Ok(None) };
        let file = self.staging.written().writer(&path)?;
        Ok(Some((path, file)))
    }

    fn create(&self, path: &Path, size: u64) -> Result<(Arc<File>, Reservation), StoreError> {
        let disk = self.staging.disk();
        if self.partial.is_some() {
            disk.remove_file(path)?;
        }
        let file = disk.create_file(path, 0o600)?;
        let size = if self.takes_space_when_written() { 0 } else { size };
        let reserve = || if size == 0 { Ok(()) } else { disk.reserve(path, &file, size) };
        let reservation = self.staging.reserve_space(size, reserve).inspect_err(|_| {
            // The file is empty and recorded nowhere.
            let _ = disk.remove_file(path);
        })?;
        Ok((self.staging.written().add(path, file)?, reservation))
    }

    /// Hashing would wait for a slow allocation. A download would not, because the network is slower.
    fn takes_space_when_written(&self) -> bool {
        self.partial.is_none() && self.store().content.file_system().allocates_slowly()
    }

    /// The ranges of the file that a planned blob has; none in `staging/`.
    fn ranges(&self, blob: usize) -> impl Iterator<Item = Range<u64>> {
        self.partial.iter().flat_map(move |partial| partial.ranges(&self.plan, blob))
    }

    fn store(&self) -> &Arc<Store> {
        self.staging.store()
    }
}

/// A blob that is being written in order. Its digest is known at the end.
#[derive(Debug)]
pub struct BlobWriter {
    assembler: Assembler,
    hash: Sha256,
    written: u64,
}

impl Staging {
    /// Starts a blob of `size` bytes that is written in order.
    pub fn stage(&self, size: u64) -> BlobWriter {
        let assembler = Assembler::new(self.clone(), SplitPlan::whole(size));
        BlobWriter { assembler, hash: Sha256::new(), written: 0 }
    }
}

impl BlobWriter {
    /// Writes and hashes the next bytes. Fails as [`Assembler::write`] does.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.assembler.write(self.written, bytes)?;
        self.hash.update(bytes);
        self.written = self.written.saturating_add(bytes.len() as u64);
        Ok(())
    }

    /// Removes what was written.
    pub(crate) fn discard(self) -> Result<(), StoreError> {
        self.assembler.discard()
    }

    /// Ends the blob; [`StoreError::FileSize`] if bytes are missing.
    pub fn finish(self) -> Result<StagedBlob, StoreError> {
        let expected = self.assembler.plan().file_size();
        if self.written != expected {
            return Err(StoreError::FileSize { found: self.written, expected });
        }
        self.assembler.staged_blob(0, Digest::from_bytes(self.hash.finish()))
    }
}
