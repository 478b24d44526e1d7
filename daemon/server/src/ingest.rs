//! Splits a model file, read from its start, into staged blobs and a recipe.

// Files of the store are accessed only through its root, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::collections::{BTreeMap, VecDeque};
use std::io;
use std::ops::Range;
use std::sync::Arc;

use blobd_model::facts::ModelFacts;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::{FileOrigin, FormatError, HeaderReader, ModelHeader, Progress};
use blobd_store_format::recipe::RecipeError;
use blobd_store_format::split::SplitPlan;
use bytes::Bytes;

use blobd_store::{Assembler, Ingest, RangeSource, StoreError};

mod stored_parts;

use stored_parts::find_stored;

/// A file to be ingested. Ranges are requested ahead, at most [`blobd_store::CHUNKS_IN_USE`] of at most
/// [`blobd_store::CHUNK_BYTES`], and received in that order.
pub trait FileSource: Send {
    /// Requests a range. If too many chunks are in use, waits until one is dropped.
    fn request(&mut self, range: Range<u64>) -> io::Result<()>;

    /// Waits for the range that was requested first. It is shorter if the file ends in it.
    fn receive(&mut self) -> io::Result<Bytes>;
}

/// The file to be ingested cannot be read. That is the fault of the file or of its file system, not of blobd.
#[derive(Debug, thiserror::Error)]
#[error("cannot be read: {0}")]
pub(crate) struct UnreadableFile(io::Error);

impl UnreadableFile {
    pub(crate) fn from_errno(errno: i32) -> Self {
        Self(io::Error::from_raw_os_error(errno))
    }

    fn of(error: &io::Error) -> Option<&Self> {
        error.get_ref()?.downcast_ref()
    }

    fn advice(&self) -> &'static str {
        match self.0.kind() {
            io::ErrorKind::Interrupted | io::ErrorKind::WouldBlock => {
                "its file system interrupts every read: copy the file to another file system and import the copy"
            }
            _ => {
                "its disk or file system fails: the kernel's log (`dmesg`) may say why; copy the file to another disk, \
                 and import the copy if that works"
            }
        }
    }
}

impl From<UnreadableFile> for io::Error {
    fn from(unreadable: UnreadableFile) -> Self {
        Self::new(unreadable.0.kind(), unreadable)
    }
}

/// A file whose blobs and recipe have been added to an ingest.
#[derive(Clone, Debug)]
pub struct IngestedFile {
    /// The SHA-256 of the whole file.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
    /// The facts from its header.
    pub facts: ModelFacts,
}

/// Reads a model file of `size` bytes and adds its blobs and its recipe to the ingest. `progress` receives the number
/// of bytes read so far, and how many will be read.
///
/// If there is no space for the whole file, it is read twice: the first time to find out which parts are stored, so that
/// space is needed only for the others.
///
/// # Errors
/// [`IngestError`]; then the ingest must be dropped.
pub fn ingest_file(
    ingest: &mut Ingest,
    source: &mut dyn FileSource,
    size: u64,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<IngestedFile, IngestError> {
    begin_file(source, size, progress)?.ingest(ingest)
}

/// Reads the header of a model file of `size` bytes, as [`ingest_file`] does before the rest.
///
/// # Errors
/// [`IngestError`]
pub(crate) fn begin_file<'f>(
    source: &'f mut dyn FileSource,
    size: u64,
    progress: &'f mut dyn FnMut(u64, u64),
) -> Result<BegunFile<'f>, IngestError> {
    let mut content = Content::new(source, size, progress);
    let header = Arc::from(read_header(&mut content)?);
    content.header = Some(Arc::clone(&header));
    Ok(BegunFile { content, header })
}

/// A file of which the header was read.
pub(crate) struct BegunFile<'f> {
    content: Content<'f>,
    header: Arc<dyn ModelHeader>,
}

impl BegunFile<'_> {
    pub(crate) fn header(&self) -> &dyn ModelHeader {
        &*self.header
    }

    /// Reads the rest, see [`ingest_file`].
    pub(crate) fn ingest(self, ingest: &mut Ingest) -> Result<IngestedFile, IngestError> {
        let Self { mut content, header } = self;
        let size = content.size;
        let plan = SplitPlan::new(header.file_layout(size)?);
        let facts = ModelFacts::from_header(&*header);
        let stored = admit(ingest, &plan, &mut content)?;
        let reused_bytes = stored.keys().filter_map(|blob| plan.blobs().get(*blob)).map(|blob| blob.size);
        ingest.note_reused(reused_bytes.fold(0, u64::saturating_add));
        let assembler = Assembler::new(ingest.staging(), plan);
        stored.into_iter().for_each(|(blob, digest)| assembler.take_stored(blob, digest));
        let file = assembler.store_in_order(&mut content, &mut |blob| ingest.add_blob(blob).map(drop));
        let file = file.map_err(|error| difference(ingest, error))?;
        let digest = file.digest;
        assembler.recipe(file, &[])?.into_iter().for_each(|recipe| ingest.add_recipe(recipe));
        Ok(IngestedFile { digest, size, facts })
    }
}

/// Has space promised for the file. If it does not fit as a whole, finds the parts that are stored and has space promised
/// for the others; returns the digests of the stored ones.
fn admit(
    ingest: &Ingest,
    plan: &SplitPlan,
    content: &mut Content<'_>,
) -> Result<BTreeMap<usize, Digest>, IngestError> {
    let sizes = plan.blobs().iter().map(|blob| blob.size);
    ingest.expect_record(recipe_bytes(plan));
    if ingest.admit_now(sizes.clone())? {
        announce(ingest, plan, sizes);
        return Ok(BTreeMap::new());
    }
    // Before the file is read to be compared.
    ingest.reserve_certainly_new(sizes.clone())?;
    let stored = find_stored(ingest, plan, content)?;
    let new = sizes.enumerate().filter(|(blob, _)| !stored.contains_key(blob)).map(|(_, size)| size);
    announce(ingest, plan, new.clone());
    ingest.admit_all(new)?;
    Ok(stored)
}

/// A part of the file differs from the stored blob whose digest it had: one of them has changed.
fn difference(ingest: &Ingest, error: IngestError) -> IngestError {
    let IngestError::Store(StoreError::BlobDiffers { digest }) = error else { return error };
    match ingest.store().content().quarantine_if_damaged(digest) {
        Ok(Some(_place)) => StoreError::MissingBlob { digest }.into(),
        Ok(None) => IngestError::Changed,
        Err(error) => error.into(),
    }
}

/// Replaces the announced size of the whole file by the sizes of the blobs that may have to be stored and an estimate
/// of the recipe's.
pub(crate) fn announce(ingest: &Ingest, plan: &SplitPlan, blobs: impl Iterator<Item = u64>) {
    ingest.staging().expect_instead(plan.file_size(), blobs.chain([recipe_bytes(plan)]));
}

/// An estimate of the length of the recipe.
pub(crate) fn recipe_bytes(plan: &SplitPlan) -> u64 {
    /// A generous estimate, with the tensor's pieces.
    const RECIPE_BYTES_PER_TENSOR: u64 = 512;
    RECIPE_BYTES_PER_TENSOR.saturating_mul(plan.tensors().len() as u64)
}

/// Why a file was not ingested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the errors and their fields are")]
pub enum IngestError {
    #[error("{0}")]
    Source(io::Error),
    #[error("file: too short: expected {expected} bytes, found {found}")]
    Truncated { found: u64, expected: u64 },
    #[error("changed while it was imported; import it again when no program writes to it")]
    Changed,
    /// Its format is unknown, or its header or its tensors are invalid.
    #[error("{0}")]
    Format(#[from] FormatError),
    /// As `Format`, for a file that is downloaded.
    #[error("{0}")]
    DownloadedFormat(FormatError),
    #[error("part of a model: expected a whole GGUF file, found one of {count} shards")]
    Shard { count: u64 },
    /// No valid recipe can be made for it.
    #[error("{0}")]
    Recipe(#[from] RecipeError),
    #[error("{0}")]
    Store(#[from] StoreError),
}

impl IngestError {
    /// Whether the file itself cannot be read.
    pub(crate) fn is_unreadable_file(&self) -> bool {
        matches!(self, Self::Source(error) if UnreadableFile::of(error).is_some())
    }

    /// What the user can do about the file.
    pub(crate) fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Format(error) => Some(error.advice(FileOrigin::Disk)),
            Self::DownloadedFormat(error) => Some(error.advice(FileOrigin::Download)),
            Self::Shard { .. } => Some(
                "join them with `llama-gguf-split --merge` and import the result; published shards can be pulled as they \
                 are",
            ),
            Self::Truncated { .. } => {
                Some("a program has shortened it: import it again when no program writes to it")
            }
            Self::Source(error) => UnreadableFile::of(error).map(UnreadableFile::advice),
            Self::Changed | Self::Recipe(_) | Self::Store(_) => None,
        }
    }
}

/// Reads the header in small steps, so that an invalid one is refused early.
fn read_header(file: &mut Content<'_>) -> Result<Box<dyn ModelHeader>, IngestError> {
    const FIRST_STEP_BYTES: u64 = 64 << 10;
    const LAST_STEP_BYTES: u64 = 1 << 20;
    let mut reader = HeaderReader::new();
    let (mut read, mut step) = (0, FIRST_STEP_BYTES);
    loop {
        let end = file.size.min(read + step);
        file.request(read..end)?;
        if reader.push(&file.receive()?)? == Progress::Done || end == file.size {
            return Ok(reader.finish()?);
        }
        (read, step) = (end, LAST_STEP_BYTES.min(step * 2));
    }
}

/// A file of a known size, whose first bytes must remain the header once that was read.
struct Content<'c> {
    source: &'c mut dyn FileSource,
    size: u64,
    requested: VecDeque<Range<u64>>,
    header: Option<Arc<dyn ModelHeader>>,
    /// Receives the bytes read and how many will be read.
    progress: &'c mut dyn FnMut(u64, u64),
    is_comparing: bool,
    /// The bytes that are read to be compared with the store.
    compared: u64,
    to_compare: u64,
}

impl<'c> Content<'c> {
    fn new(source: &'c mut dyn FileSource, size: u64, progress: &'c mut dyn FnMut(u64, u64)) -> Self {
        let (requested, header) = (VecDeque::new(), None);
        Self { source, size, requested, header, progress, is_comparing: false, compared: 0, to_compare: 0 }
    }

    /// What is read from now on is only compared with the store.
    fn begin_comparison(&mut self, bytes: u64) {
        (self.is_comparing, self.to_compare) = (true, bytes);
    }

    fn end_comparison(&mut self) {
        self.is_comparing = false;
    }

    fn report(&mut self, range: &Range<u64>) {
        if self.is_comparing {
            self.compared = self.compared.saturating_add(range.end.saturating_sub(range.start));
        }
        let stored = if self.is_comparing { 0 } else { range.end };
        (self.progress)(self.compared.saturating_add(stored), self.to_compare.saturating_add(self.size));
    }
}

impl RangeSource for Content<'_> {
    type Chunk = Bytes;
    type Error = IngestError;

    fn request(&mut self, range: Range<u64>) -> Result<(), IngestError> {
        self.requested.push_back(range.clone());
        self.source.request(range).map_err(IngestError::Source)
    }

    fn receive(&mut self) -> Result<Bytes, IngestError> {
        let range = self.requested.pop_front().unwrap_or_default();
        let bytes = self.source.receive().map_err(IngestError::Source)?;
        let found = range.start.saturating_add(bytes.len() as u64);
        if found != range.end {
            return Err(IngestError::Truncated { found, expected: self.size });
        }
        if let Some(header) = &self.header {
            let known = usize::try_from(range.start).ok().and_then(|start| header.bytes().get(start..));
            if known.unwrap_or_default().iter().zip(&bytes).any(|(before, now)| before != now) {
                return Err(IngestError::Changed);
            }
            self.report(&range);
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests;
