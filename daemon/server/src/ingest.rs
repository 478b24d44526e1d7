//! Splits a model file, read from its start, into staged blobs and a recipe.

// Files of the store are accessed only through its root, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::collections::VecDeque;
use std::io::{self, Read};
use std::ops::Range;
use std::os::fd::BorrowedFd;

use blobd_model::facts::ModelFacts;
use blobd_store::{Assembler, Ingest, RangeSource, SharedBlobs, StoreError, give_back_memory};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::file_format::{FileOrigin, FormatError, ModelHeader, stream_header};
use blobd_store_format::file_layout::FileLayout;
use blobd_store_format::recipe::RecipeError;
use blobd_store_format::split::{SharedPart, SplitPlan};
use bytes::Bytes;

mod reflink;
mod space;

use space::admit;
pub(crate) use space::{announce, recipe_bytes};

/// A file to be ingested. Ranges are requested ahead, at most [`blobd_store::CHUNKS_IN_USE`] of at most
/// [`blobd_store::CHUNK_BYTES`], and received in that order.
pub trait FileSource: Send {
    /// Requests a range. If too many chunks are in use, waits until one is dropped.
    fn request(&mut self, range: Range<u64>) -> io::Result<()>;

    /// Waits for the range that was requested first. It is shorter if the file ends in it.
    fn receive(&mut self) -> io::Result<Bytes>;

    /// Whether each byte can be received only once. Ranges are then requested in order, without gaps.
    fn is_stream(&self) -> bool {
        false
    }

    /// Has an empty file share all blocks of this one (a reflink); false if that is not possible, so that this one has to
    /// be read. To be called when no range is requested.
    fn reflink_to(&mut self, _target: BorrowedFd<'_>) -> io::Result<bool> {
        Ok(false)
    }

    /// Fails if nobody waits for the file any more.
    fn check_wanted(&self) -> io::Result<()> {
        Ok(())
    }
}

/// The file to be ingested cannot be read. That is the fault of the file or of its file system, not of blobd.
#[derive(Debug, thiserror::Error)]
#[error("cannot be read: {0}")]
pub(crate) struct UnreadableFile(io::Error);

impl UnreadableFile {
    pub(crate) fn from_errno(errno: i32) -> Self {
        Self(io::Error::from_raw_os_error(errno))
    }

    fn find_in(error: &io::Error) -> Option<&Self> {
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
#[expect(missing_docs, reason = "the names of the fields say what they are")]
pub struct IngestedFile {
    pub digest: Digest,
    pub size: u64,
    /// From its header; the defaults if it is stored whole.
    pub facts: ModelFacts,
    /// The content of a small file that is stored whole.
    pub small: Option<Bytes>,
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
    begin_file(source, (size, Accepted::KnownFormats), progress)?.ingest(ingest, &mut SharedBlobs::default())
}

/// Which files are taken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Accepted {
    /// Those whose format is known, which are split.
    KnownFormats,
    /// Any file. One whose format is not known is stored whole.
    Any,
}

/// Reads the header of a model file of this size, as [`ingest_file`] does before the rest.
pub(crate) fn begin_file<'f>(
    source: &'f mut dyn FileSource,
    (size, accepted): (u64, Accepted),
    progress: &'f mut dyn FnMut(u64, u64),
) -> Result<BegunFile<'f>, IngestError> {
    let mut content = Content::new(source, size, progress);
    let begun = read_header(&mut content).and_then(|header| {
        let layout = header.file_layout(size)?;
        Ok(Some((header, layout)))
    });
    let split = match begun {
        Err(IngestError::Format(_)) if accepted == Accepted::Any => None,
        begun => begun?,
    };
    content.header = split.as_ref().map(|(header, _)| KnownHeader::new(&**header));
    content.is_begun = true;
    content.start = std::mem::take(&mut content.received).into();
    content.known = content.start.len() as u64;
    Ok(BegunFile { content, split, shared_parts: Vec::new() })
}

pub(crate) struct BegunFile<'f> {
    content: Content<'f>,
    /// `None` if the file is stored whole.
    split: Option<(Box<dyn ModelHeader>, FileLayout)>,
    shared_parts: Vec<SharedPart>,
}

impl BegunFile<'_> {
    /// The header; `None` if the file is stored whole.
    pub(crate) fn header(&self) -> Option<&dyn ModelHeader> {
        self.split.as_ref().map(|(header, _)| &**header)
    }

    /// The same file with shared blobs: other files hold the remaining parts of the blobs of these tensors.
    pub(crate) fn sharing(self, parts: &[SharedPart]) -> Self {
        Self { shared_parts: parts.to_vec(), ..self }
    }

    /// Adds the file. `shared` has the blobs that several files have parts of. If this file has a part of one, its recipe is
    /// made later, by [`SharedBlobs::into_recipes`].
    pub(crate) fn ingest(
        self,
        ingest: &mut Ingest,
        shared: &mut SharedBlobs,
    ) -> Result<IngestedFile, IngestError> {
        let Self { mut content, split, shared_parts } = self;
        let size = content.size;
        if split.is_none() && size <= SMALL_BYTES {
            return ingest_small(ingest, content);
        }
        let (facts, plan) = match split {
            None => (ModelFacts::default(), SplitPlan::whole(size)),
            Some((header, layout)) => {
                let facts = ModelFacts::from_header(&*header);
                // The plan needs the layout alone.
                drop_header(header);
                (facts, SplitPlan::sharing(layout, &shared_parts))
            }
        };
        let stored = admit(ingest, &plan, &mut content)?;
        ingest.expect_blobs(plan.blobs().len().saturating_sub(stored.len()) as u64);
        let reused_bytes = stored.keys().filter_map(|blob| plan.blobs().get(*blob)).map(|blob| blob.size);
        ingest.note_reused(reused_bytes.fold(0, u64::saturating_add));
        let is_shared = plan.blobs().iter().any(|blob| blob.shared_group().is_some());
        let may_reflink = plan.is_whole() && stored.is_empty();
        let assembler = Assembler::new(ingest.staging(), plan).continuing(shared);
        stored.into_iter().for_each(|(blob, digest)| assembler.take_stored(blob, digest));
        let file = match may_reflink && content.reflink(&assembler)? {
            true => content.hash_reflink(&assembler, ingest),
            false => assembler.store_in_order(&mut content, ingest),
        };
        let file = file.map_err(|error| difference(ingest, error))?;
        let digest = file.digest;
        match is_shared {
            true => assembler.leave_shared(file, shared),
            false => {
                assembler.into_recipe(file, &[])?.into_iter().for_each(|recipe| ingest.add_recipe(recipe));
            }
        }
        Ok(IngestedFile { digest, size, facts, small: None })
    }
}

/// Returns to the system what was freed of a header, or of what is made of it, with this many tensors. They have small
/// allocations for each tensor, whose pages stay with the daemon otherwise.
pub(crate) fn give_back_memory_of(tensor_count: u64) {
    const MANY_TENSORS: u64 = 16 << 10;
    if tensor_count >= MANY_TENSORS {
        give_back_memory();
    }
}

pub(crate) fn drop_header(header: Box<dyn ModelHeader>) {
    let tensor_count = header.tensor_count();
    drop(header);
    give_back_memory_of(tensor_count);
}

/// Files up to this size that are stored whole are read into memory: most of a folder's are, and the store has many of them
/// already. To share the blocks of one of these takes as long as to copy them.
const SMALL_BYTES: u64 = 256 << 10;

fn ingest_small(ingest: &mut Ingest, mut content: Content<'_>) -> Result<IngestedFile, IngestError> {
    let size = content.size;
    let mut bytes = Bytes::new();
    if size > 0 {
        content.request(0..size)?;
        // A copy, so that its slot of the memory that is shared with the process that reads is free.
        bytes = Bytes::copy_from_slice(&content.receive()?);
    }
    ingest.staging().expect_instead(size, []);
    ingest.admit(std::iter::once(size))?;
    let digest = ingest.add_bytes(&bytes)?;
    Ok(IngestedFile { digest, size, facts: ModelFacts::default(), small: Some(bytes) })
}

/// Explains why a part of the file differs from the stored blob whose digest it had: one of the two has changed.
fn difference(ingest: &Ingest, error: IngestError) -> IngestError {
    let IngestError::Store(StoreError::BlobDiffers { digest }) = error else { return error };
    match ingest.store().content().quarantine_if_damaged(digest) {
        Ok(Some(_place)) => StoreError::MissingBlob { digest }.into(),
        Ok(None) => IngestError::Changed,
        Err(error) => error.into(),
    }
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
    /// Only for a file whose digest is known before it is read.
    #[error("wrong digest: expected {expected}, found {found}; the store that it comes from is damaged")]
    WrongDigest { expected: Digest, found: Digest },
    #[error("part of a model: expected all {count} shards, found {found}")]
    Shard { count: u64, found: usize },
    #[error("{0}")]
    Recipe(#[from] RecipeError),
    #[error("{0}")]
    Store(#[from] StoreError),
}

impl IngestError {
    pub(crate) fn is_unreadable_file(&self) -> bool {
        matches!(self, Self::Source(error) if UnreadableFile::find_in(error).is_some())
    }

    pub(crate) fn advice(&self) -> Option<&'static str> {
        match self {
            Self::Format(error) => Some(error.advice(FileOrigin::Disk)),
            Self::DownloadedFormat(error) => Some(error.advice(FileOrigin::Download)),
            Self::Shard { .. } => Some(
                "import all shards together: `blobd import` finds the others in the folder of the one that it is given",
            ),
            Self::Truncated { .. } => {
                Some("a program has shortened it: import it again when no program writes to it")
            }
            Self::WrongDigest { .. } => {
                Some("pull the model again, here or with the program that the store belongs to")
            }
            Self::Source(error) => UnreadableFile::find_in(error).map(UnreadableFile::advice),
            Self::Changed | Self::Recipe(_) | Self::Store(_) => None,
        }
    }
}

fn read_header(file: &mut Content<'_>) -> Result<Box<dyn ModelHeader>, IngestError> {
    let mut start = HeaderStream {
        file,
        at: 0,
        received: Bytes::new(),
        step: HeaderStream::FIRST_STEP_BYTES,
        failed: None,
    };
    let header = stream_header(&mut start);
    match start.failed {
        Some(error) => Err(error),
        None => Ok(header.map_err(IngestError::Source)??),
    }
}

/// The start of a file. It is read in small steps, so that an invalid header is refused early.
struct HeaderStream<'s, 'c> {
    file: &'s mut Content<'c>,
    /// How much of the file was received.
    at: u64,
    /// The part of it that was not read.
    received: Bytes,
    step: u64,
    failed: Option<IngestError>,
}

impl HeaderStream<'_, '_> {
    const FIRST_STEP_BYTES: u64 = 64 << 10;
    const LAST_STEP_BYTES: u64 = 1 << 20;

    fn receive(&mut self) -> Result<Bytes, IngestError> {
        let end = self.file.size.min(self.at.saturating_add(self.step));
        let range = self.at..end;
        (self.at, self.step) = (end, Self::LAST_STEP_BYTES.min(self.step.saturating_mul(2)));
        if range.is_empty() {
            return Ok(Bytes::new());
        }
        self.file.request(range)?;
        self.file.receive()
    }
}

impl Read for HeaderStream<'_, '_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if self.received.is_empty() {
            self.received = self.receive().map_err(|error| {
                self.failed = Some(error);
                io::Error::other("the file cannot be read")
            })?;
        }
        let count = buffer.len().min(self.received.len());
        self.received.split_to(count).as_ref().read(buffer)
    }
}

/// A file of a known size. Once its header was read, its first bytes must stay the same.
struct Content<'c> {
    source: &'c mut dyn FileSource,
    size: u64,
    requested: VecDeque<Range<u64>>,
    /// Whether the header was read.
    is_begun: bool,
    /// The header that the first bytes must still be.
    header: Option<KnownHeader>,
    progress: &'c mut dyn FnMut(u64, u64),
    is_stream: bool,
    /// What was received of a stream until its header was complete.
    received: Vec<u8>,
    /// The same afterwards; it is received again. Empty when all of it was.
    start: Bytes,
    /// How long that is.
    known: u64,
    /// Whether bytes are read only to be compared with the store.
    is_comparing: bool,
    compared: u64,
    to_compare: u64,
}

impl<'c> Content<'c> {
    fn new(source: &'c mut dyn FileSource, size: u64, progress: &'c mut dyn FnMut(u64, u64)) -> Self {
        let (requested, is_begun, header) = (VecDeque::new(), false, None);
        let (is_comparing, compared, to_compare) = (false, 0, 0);
        Self {
            is_stream: source.is_stream(),
            source,
            size,
            requested,
            is_begun,
            header,
            progress,
            received: Vec::new(),
            start: Bytes::new(),
            known: 0,
            is_comparing,
            compared,
            to_compare,
        }
    }

    /// Receives the next range, of which a stream may have given the first bytes already.
    fn receive_range(&mut self, range: &Range<u64>) -> io::Result<Bytes> {
        let known = range_of(&self.start, range);
        if range.end >= self.start.len() as u64 {
            self.start = Bytes::new();
        }
        if known.len() as u64 == range.end.saturating_sub(range.start) && !known.is_empty() {
            return Ok(known);
        }
        let bytes = self.source.receive()?;
        if self.is_stream && !self.is_begun {
            self.received.extend_from_slice(&bytes);
        }
        Ok(if known.is_empty() { bytes } else { [known, bytes].concat().into() })
    }

    fn report(&mut self, range: &Range<u64>) {
        if self.is_comparing {
            self.compared = self.compared.saturating_add(range.end.saturating_sub(range.start));
        }
        let stored = if self.is_comparing { 0 } else { range.end };
        (self.progress)(self.compared.saturating_add(stored), self.to_compare.saturating_add(self.size));
    }
}

/// The bytes of a range that are among the first bytes of a file.
fn range_of(start: &Bytes, range: &Range<u64>) -> Bytes {
    let place = |offset: u64| usize::try_from(offset).unwrap_or(usize::MAX).min(start.len());
    start.slice(place(range.start)..place(range.end))
}

/// A header that was parsed. Its digest replaces its bytes, which may be 100 MB.
struct KnownHeader {
    digest: Digest,
    size: u64,
    /// What was read of it again.
    hash: Hasher,
    hashed: u64,
}

impl KnownHeader {
    fn new(header: &dyn ModelHeader) -> Self {
        Self { digest: header.digest(), size: header.size(), hash: Hasher::new(), hashed: 0 }
    }

    /// Refuses bytes of the file with which the header ends and is not what it was. Who reads a header again reads it in
    /// order, from its start.
    fn check(&mut self, offset: u64, bytes: &[u8]) -> Result<(), IngestError> {
        if offset == 0 {
            (self.hash, self.hashed) = (Hasher::new(), 0);
        }
        if offset != self.hashed || offset >= self.size {
            return Ok(());
        }
        let left = usize::try_from(self.size.saturating_sub(offset)).unwrap_or(usize::MAX);
        let part = bytes.get(..left).unwrap_or(bytes);
        self.hash.update(part);
        self.hashed = self.hashed.saturating_add(part.len() as u64);
        let is_whole = self.hashed == self.size;
        let is_same = !is_whole || std::mem::take(&mut self.hash).finish() == self.digest;
        if is_same { Ok(()) } else { Err(IngestError::Changed) }
    }
}

impl RangeSource for Content<'_> {
    type Chunk = Bytes;
    type Error = IngestError;

    fn request(&mut self, range: Range<u64>) -> Result<(), IngestError> {
        self.requested.push_back(range.clone());
        let start = range.start.max(self.known);
        if start >= range.end && self.known > 0 {
            return Ok(());
        }
        self.source.request(start..range.end).map_err(IngestError::Source)
    }

    fn receive(&mut self) -> Result<Bytes, IngestError> {
        let range = self.requested.pop_front().unwrap_or_default();
        let bytes = self.receive_range(&range).map_err(IngestError::Source)?;
        let found = range.start.saturating_add(bytes.len() as u64);
        if found != range.end {
            return Err(IngestError::Truncated { found, expected: self.size });
        }
        if let Some(header) = &mut self.header {
            header.check(range.start, &bytes)?;
        }
        if self.is_begun {
            self.report(&range);
        }
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests;
