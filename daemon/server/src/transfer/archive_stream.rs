//! Receives an archive as one stream: each file in it is split and stored while it arrives.
//!
//! For compressed archives, and for servers that ignore range requests. A transfer that ends early starts the archive
//! again. Of a compressed archive only the content is stored.

use std::collections::VecDeque;
use std::io::{self, Read as _};
use std::ops::Range;

use blobd_model::facts::ModelFacts;
use blobd_registry::Decoder;
use blobd_store::{Assembler, Ingest, PartialFile, RangeSource};
use blobd_store_format::archive::{TarReader, layout};
use blobd_store_format::descriptor::{Compression, Descriptor};
use blobd_store_format::digest::Hasher;
use blobd_store_format::file_format::{HeaderReader, MAX_HEADER_BYTES, ModelHeader, Progress};
use blobd_store_format::file_layout::{ArchiveFile, FileLayout};
use blobd_store_format::recipe::Recipe;
use blobd_store_format::split::SplitPlan;

use super::download::Download;
use super::{Job, Received, TransferError, TransferGuard, Transfers};
use crate::ingest::{announce, recipe_bytes};

/// The most bytes between two files, which are in memory until the next file is known. A file's headers have some
/// kilobytes.
const MAX_GAP_BYTES: u64 = 16 << 20;
/// How much is read at once while the header of a file is parsed.
const HEADER_STEP_BYTES: u64 = 64 << 10;
/// Headers up to this size are not counted.
const UNCOUNTED_HEADER_BYTES: u64 = 256 << 10;
/// How many times as long as the file its content may be. Compression saves a third of weights; but a few bytes can unpack
/// to a terabyte, for which other models would be evicted.
const MAX_EXPANSION: u64 = 64;
/// The content of a small file may be longer.
const MIN_CONTENT_LIMIT: u64 = 64 << 20;

impl Transfers {
    /// Transfers an archive into the ingest. Another transfer cannot continue it.
    pub(super) fn receive_stream(
        &self,
        guard: &TransferGuard,
        ingest: &mut Ingest,
        job: &Job<'_>,
        compression: Option<Compression>,
    ) -> Result<Received, TransferError> {
        let mut downloaded_bytes = 0;
        job.as_stream.set();
        let mut receive = || {
            let mut attempt = |_received: &mut u64| {
                let download = Download::begin(self, guard, job)?;
                let content = Content::open(download, job.file.size(), compression)?;
                let mut archive = ArchiveStream::new(ingest, content, job);
                let stored = archive.store();
                downloaded_bytes += archive.content.decoder.source().arrived_bytes;
                stored.and_then(|()| archive.finish(job))
            };
            job.restarted(|| job.retried(&mut attempt))
        };
        let received = match receive() {
            Err(error @ TransferError::StreamDigest { .. }) => {
                tracing::warn!("{}: {error}; downloading it again", job.file.label());
                receive()
            }
            received => received,
        };
        let (recipe, facts) = received.map_err(|error| match error {
            TransferError::Incomplete | TransferError::Unwanted => TransferError::StreamEnded,
            error => error,
        })?;
        let digest = job.file.digest().unwrap_or_else(|| job.file.identity());
        let size = job.file.size();
        ingest.add_recipe(recipe);
        // The entry in `partial/` keeps the file until the model is complete.
        let partial = PartialFile::open(ingest.store(), digest, size)?;
        let partial = job.about.iter().fold(partial, |partial, about| partial.about(about.clone()));
        drop(partial.follow(SplitPlan::whole(size), ingest.staging())?);
        ingest.note_partial(digest);
        ingest.publish()?;
        let file = Descriptor { media_type: job.file.media_type().clone(), digest, size };
        Ok(Received {
            file,
            facts,
            downloaded_bytes,
            resumed_bytes: 0,
            reused_bytes: 0,
            indexed_bytes: 0,
            corrected: None,
        })
    }
}

struct ArchiveStream<'s> {
    job: &'s Job<'s>,
    ingest: &'s mut Ingest,
    content: Content<'s>,
    gap: Vec<u8>,
    /// The recipes of all files and gaps so far.
    parts: Vec<Recipe>,
    file_count: usize,
    facts: Vec<ModelFacts>,
    literal_bytes: u64,
    header_bytes: u64,
}

/// The first bytes of a file in the archive, and its header; `None` if its format is unknown.
struct Start {
    bytes: Vec<u8>,
    header: Option<Box<dyn ModelHeader>>,
}

impl<'s> ArchiveStream<'s> {
    const fn new(ingest: &'s mut Ingest, content: Content<'s>, job: &'s Job<'s>) -> Self {
        Self {
            job,
            ingest,
            content,
            gap: Vec::new(),
            parts: Vec::new(),
            file_count: 0,
            facts: Vec::new(),
            literal_bytes: 0,
            header_bytes: 0,
        }
    }

    fn store(&mut self) -> Result<(), TransferError> {
        let mut reader = TarReader::new(self.content.size.unwrap_or(u64::MAX));
        while let Some(wanted) = reader.wanted() {
            let Some(bytes) = self.read_wanted(&wanted)? else {
                reader.end_at(self.content.position)?;
                break;
            };
            reader.push(bytes)?;
            if let Some(file) = reader.files().get(self.file_count).cloned() {
                let gap = std::mem::take(&mut self.gap);
                self.store_gap(gap, 0)?;
                self.store_file(file)?;
            }
        }
        let rest = match self.content.size {
            Some(size) => size.saturating_sub(self.content.position),
            None => self.read_to_end().map(|()| 0)?,
        };
        let gap = std::mem::take(&mut self.gap);
        self.store_gap(gap, rest)
    }

    /// Reads a range between two files, which starts at the position or after it; `None` if the archive ends earlier.
    fn read_wanted(&mut self, wanted: &Range<u64>) -> Result<Option<&[u8]>, TransferError> {
        let count = wanted.end.saturating_sub(self.content.position);
        if count.saturating_add(self.gap.len() as u64) > MAX_GAP_BYTES {
            return Err(TransferError::ArchiveGap { limit: MAX_GAP_BYTES });
        }
        if self.content.read(count, &mut self.gap)? < count {
            return Ok(None);
        }
        let length = usize::try_from(wanted.end.saturating_sub(wanted.start)).unwrap_or(usize::MAX);
        let start = self.gap.len().saturating_sub(length);
        Ok(self.gap.get(start..))
    }

    fn read_to_end(&mut self) -> Result<(), TransferError> {
        let most = MAX_GAP_BYTES.saturating_sub(self.gap.len() as u64);
        self.content.read(most.saturating_add(1), &mut self.gap)?;
        match self.gap.len() as u64 {
            0..=MAX_GAP_BYTES => Ok(()),
            _ => Err(TransferError::ArchiveGap { limit: MAX_GAP_BYTES }),
        }
    }

    /// Stores bytes that belong to no file: `start`, and `rest` more.
    fn store_gap(&mut self, start: Vec<u8>, rest: u64) -> Result<(), TransferError> {
        let size = rest.saturating_add(start.len() as u64);
        if size == 0 {
            return Ok(());
        }
        self.store_part(layout(size, Vec::new()), start)
    }

    fn store_file(&mut self, file: ArchiveFile) -> Result<(), TransferError> {
        let Start { bytes, header } = self.read_header(&file)?;
        let own_layout = header.as_ref().map(|header| header.file_layout(file.size)).transpose()?;
        self.facts.extend(header.map(|header| ModelFacts::from_header(&*header)));
        let alone = ArchiveFile { offset: 0, ..file };
        self.file_count += 1;
        self.store_part(layout(alone.size, vec![(alone, own_layout)]), bytes)
    }

    fn read_header(&mut self, file: &ArchiveFile) -> Result<Start, TransferError> {
        let (mut reader, mut bytes) = (HeaderReader::new(), Vec::new());
        let mut is_counted = false;
        loop {
            let read = bytes.len();
            // The stream cannot start again for a header, so the memory for the longest one is waited for at once.
            if !is_counted && read as u64 >= UNCOUNTED_HEADER_BYTES {
                self.job.wait_for_longest_header()?;
                is_counted = true;
            }
            let left = file.size.saturating_sub(read as u64);
            self.content.read_exact(left.min(HEADER_STEP_BYTES), &mut bytes)?;
            match reader.push(bytes.get(read..).unwrap_or_default()) {
                Err(error) if error.is_unknown_format() => return Ok(Start { bytes, header: None }),
                Ok(progress) if progress != Progress::Done && bytes.len() as u64 != file.size => {}
                progress => {
                    progress?;
                    break;
                }
            }
        }
        match reader.finish() {
            Err(error) if error.is_unknown_format() => Ok(Start { bytes, header: None }),
            header => {
                let header = header?;
                self.admit_header(header.size())?;
                Ok(Start { bytes, header: Some(header) })
            }
        }
    }

    /// Limits the tensors of all files together, which are kept in memory.
    fn admit_header(&mut self, bytes: u64) -> Result<(), TransferError> {
        self.header_bytes = self.header_bytes.saturating_add(bytes);
        if self.header_bytes > MAX_HEADER_BYTES {
            return Err(TransferError::ArchiveHeaders { limit: MAX_HEADER_BYTES });
        }
        Ok(())
    }

    /// Stores the next part of the archive, of which `start` has been read: one file, or bytes between files.
    fn store_part(&mut self, layout: FileLayout, start: Vec<u8>) -> Result<(), TransferError> {
        let rest = layout.file_size().saturating_sub(start.len() as u64);
        self.content.admit(rest)?;
        let plan = SplitPlan::for_part(layout, self.literal_bytes);
        self.literal_bytes = self.literal_bytes.saturating_add(plan.literal_bytes());
        let sizes = plan.blobs().iter().map(|blob| blob.size);
        announce(self.ingest, &plan, sizes.clone());
        self.ingest.expect_record(recipe_bytes(&plan));
        self.ingest.admit(sizes)?;
        let assembler = Assembler::new(self.ingest.staging(), plan);
        let (job, requested) = (self.job, VecDeque::new());
        let mut source = Part { job, start, taken: 0, content: &mut self.content, requested };
        let stored = assembler.store_in_order(&mut source, self.ingest);
        let stored = match stored {
            Ok(stored) => stored,
            Err(error) => {
                // The archive may be received again in this transaction.
                assembler.discard()?;
                self.ingest.staging().return_promises();
                return Err(error);
            }
        };
        let own = [stored.digest];
        let members = own.get(..assembler.plan().members().len()).unwrap_or_default();
        self.parts.extend(assembler.into_recipe(stored, members)?);
        Ok(())
    }

    /// The recipe of the archive, if the digest of the received file is the expected one.
    fn finish(self, job: &Job<'_>) -> Result<(Recipe, Vec<ModelFacts>), TransferError> {
        let Content { decoder, compression, hasher, .. } = self.content;
        let found = decoder.into_source().finish()?;
        if let Some(expected) = job.file.digest().filter(|expected| *expected != found) {
            return Err(TransferError::StreamDigest { found, expected });
        }
        let Some(compression) = compression else {
            return Ok((Recipe::joined(found, self.parts)?, self.facts));
        };
        if self.file_count == 0 {
            return Err(TransferError::EmptyArchive);
        }
        let archive = Recipe::joined(hasher.finish(), self.parts)?;
        Ok((Recipe::for_packed(found, job.file.size(), compression, archive)?, self.facts))
    }
}

/// The unpacked bytes of an archive, read from front to back.
struct Content<'s> {
    decoder: Decoder<Download<'s>>,
    compression: Option<Compression>,
    position: u64,
    /// Known if the archive is not compressed.
    size: Option<u64>,
    limit: u64,
    hasher: Hasher,
}

impl<'s> Content<'s> {
    fn open(
        download: Download<'s>,
        file_size: u64,
        compression: Option<Compression>,
    ) -> Result<Self, TransferError> {
        let decoder = Decoder::new(download, compression)
            .map_err(|error| TransferError::Compression { reason: error.to_string() })?;
        let size = compression.is_none().then_some(file_size);
        let limit = size.unwrap_or_else(|| file_size.saturating_mul(MAX_EXPANSION).max(MIN_CONTENT_LIMIT));
        Ok(Self { decoder, compression, position: 0, size, limit, hasher: Hasher::new() })
    }

    /// Refuses content that is too long, before it is read.
    const fn admit(&self, more: u64) -> Result<(), TransferError> {
        if self.position.saturating_add(more) > self.limit {
            return Err(TransferError::ArchiveTooLarge { limit: self.limit });
        }
        Ok(())
    }

    /// Appends the next bytes, fewer at the end; returns how many.
    fn read(&mut self, count: u64, bytes: &mut Vec<u8>) -> Result<u64, TransferError> {
        let before = bytes.len();
        let read = self.decoder.by_ref().take(count).read_to_end(bytes);
        let read = read.map_err(|error| self.failure(&error))? as u64;
        self.position = self.position.saturating_add(read);
        if self.compression.is_some() {
            self.hasher.update(bytes.get(before..).unwrap_or_default());
        }
        self.admit(0)?;
        Ok(read)
    }

    fn read_exact(&mut self, count: u64, bytes: &mut Vec<u8>) -> Result<(), TransferError> {
        match self.read(count, bytes)? {
            read if read == count => Ok(()),
            _ => Err(TransferError::ArchiveEnds { position: self.position }),
        }
    }

    fn failure(&mut self, error: &io::Error) -> TransferError {
        let of_download = self.decoder.source().failure.take();
        of_download.unwrap_or_else(|| TransferError::Compression { reason: error.to_string() })
    }
}

/// A part of an archive that is stored while it is read.
struct Part<'p, 's> {
    job: &'s Job<'s>,
    /// Its first bytes, which have been read already, and how many of them have been passed on.
    start: Vec<u8>,
    taken: usize,
    content: &'p mut Content<'s>,
    requested: VecDeque<u64>,
}

impl RangeSource for Part<'_, '_> {
    type Chunk = Vec<u8>;
    type Error = TransferError;

    fn request(&mut self, range: Range<u64>) -> Result<(), TransferError> {
        self.requested.push_back(range.end.saturating_sub(range.start));
        Ok(())
    }

    fn receive(&mut self) -> Result<Vec<u8>, TransferError> {
        let length = self.requested.pop_front().unwrap_or_default();
        let known = self.start.get(self.taken..).unwrap_or_default();
        let known = known.get(..usize::try_from(length).unwrap_or(usize::MAX)).unwrap_or(known);
        let mut chunk = known.to_vec();
        self.taken = self.taken.saturating_add(chunk.len());
        if self.taken >= self.start.len() {
            (self.start, self.taken) = (Vec::new(), 0);
            self.job.release_headers();
        }
        self.content.read_exact(length.saturating_sub(chunk.len() as u64), &mut chunk)?;
        Ok(chunk)
    }
}
