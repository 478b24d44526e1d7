//! Reuses the head of a similar file that is stored, as far as samples of it agree.
//!
//! Most of a head is the vocabulary, and models of one family share it. The parts whose samples differ
//! are fetched. As with reused tensors ([`super::tensor_reuse`]), the digest of the whole file decides: if
//! it is not the expected one, the whole head is fetched.

use blobd_registry::RegistryError;
use blobd_store::Store;
use blobd_store_format::file_format::{HeaderReader, MAX_HEADER_BYTES, ModelHeader, Progress};
use blobd_store_format::recipe::Recipe;

use super::{Job, TransferError};

/// A whole head, some of which was only compared.
#[derive(Debug)]
pub(super) struct ReusedHead {
    pub(super) header: Box<dyn ModelHeader>,
    /// The file's first bytes, at least as many as the header has.
    pub(super) bytes: Vec<u8>,
    /// How many came over the network.
    pub(super) fetched: u64,
}

/// A smaller head is fetched by two requests at most.
const WORTH_BYTES: u64 = 128 << 10;
/// What is fetched where the two differ.
const BLOCK_BYTES: usize = 2 << 10;
/// What is compared at the end of a stretch, and looked for where they part.
const SAMPLE_BYTES: usize = 64;
/// The first stretch that is compared by its end alone; each that agrees doubles the next.
const LEAST_STRETCH_BYTES: usize = 4 << 10;
/// So many blocks in a row that are not the relative's, and it is none.
const MAX_STRANGE_BLOCKS: usize = 16;

/// Composes the head of a file from that of a relative; `None` when it is too different.
///
/// # Errors
/// [`TransferError`] when the relative cannot be read. When the registry fails, nothing is reused.
pub(super) fn reuse_head(
    job: &Job<'_>,
    store: &Store,
    relative: &Recipe,
) -> Result<Option<ReusedHead>, TransferError> {
    let Some((blob, _size)) = relative.header().filter(|(_, size)| *size >= WORTH_BYTES) else {
        return Ok(None);
    };
    let Some(known) = store.read_blob(blob, MAX_HEADER_BYTES)? else { return Ok(None) };
    let guess = job.wait_for(HeadMatcher::new(job, &known).run())?;
    Ok(guess.unwrap_or_else(|error| {
        tracing::debug!("head not reused: {error}");
        None
    }))
}

struct HeadMatcher<'g> {
    job: &'g Job<'g>,
    /// The relative's head.
    known: &'g [u8],
    /// Where in it the next byte of the file should be.
    position: usize,
    bytes: Vec<u8>,
    reader: HeaderReader,
    is_complete: bool,
    fetched: u64,
}

impl<'g> HeadMatcher<'g> {
    fn new(job: &'g Job<'g>, known: &'g [u8]) -> Self {
        let reader = HeaderReader::new();
        Self { job, known, position: 0, bytes: Vec::new(), reader, is_complete: false, fetched: 0 }
    }

    async fn run(mut self) -> Result<Option<ReusedHead>, RegistryError> {
        let mut strange = 0;
        while !self.is_complete {
            let Some(block) = self.fetch(self.bytes.len(), BLOCK_BYTES).await? else { return Ok(None) };
            if block.is_empty() || !self.push(&block) {
                return Ok(None);
            }
            if self.find(&block) {
                strange = 0;
                if !self.take_stretches().await? {
                    return Ok(None);
                }
            } else {
                strange += 1;
                self.position += block.len();
            }
            if strange > MAX_STRANGE_BLOCKS {
                return Ok(None);
            }
        }
        let Self { bytes, fetched, reader, .. } = self;
        Ok(reader.finish().ok().map(|header| ReusedHead { header, bytes, fetched }))
    }

    /// Takes stretches of the relative's head as long as their ends agree. False when what comes
    /// of it is no head.
    async fn take_stretches(&mut self) -> Result<bool, RegistryError> {
        let mut length = LEAST_STRETCH_BYTES;
        while !self.is_complete {
            let left = self.known.len().saturating_sub(self.position);
            length = length.min(left);
            let Some(stretch) = self.known.get(self.position..self.position + length) else {
                return Ok(true);
            };
            if length < SAMPLE_BYTES {
                return Ok(true);
            }
            let sample_at = self.bytes.len() + length - SAMPLE_BYTES;
            let sample = self.fetch(sample_at, SAMPLE_BYTES).await?;
            if sample.is_some_and(|sample| stretch.ends_with(&sample) && sample.len() == SAMPLE_BYTES) {
                if !self.push(stretch) {
                    return Ok(false);
                }
                self.position += length;
                length = length.saturating_mul(2);
            } else if length > LEAST_STRETCH_BYTES {
                length = (length / 4).max(LEAST_STRETCH_BYTES);
            } else {
                return Ok(true);
            }
        }
        Ok(true)
    }

    /// Looks for the end of a block in the relative's head, first where it should be.
    fn find(&mut self, block: &[u8]) -> bool {
        /// A chat template may be so much longer.
        const WINDOW_BYTES: usize = 64 << 10;
        let Some(end) = block.len().checked_sub(SAMPLE_BYTES).and_then(|start| block.get(start..)) else {
            return false;
        };
        let expected = self.position + block.len();
        let at =
            |place: usize| place.checked_sub(SAMPLE_BYTES).and_then(|start| self.known.get(start..place));
        let mut places =
            (0..WINDOW_BYTES).flat_map(|by| [expected.checked_add(by), expected.checked_sub(by)]);
        let found = places.find_map(|place| place.filter(|place| at(*place) == Some(end)));
        if let Some(place) = found {
            self.position = place;
        }
        found.is_some()
    }

    /// Adds bytes to the head; false when it cannot be one any more.
    fn push(&mut self, bytes: &[u8]) -> bool {
        self.bytes.extend_from_slice(bytes);
        let progress = self.reader.push(bytes);
        self.is_complete = matches!(progress, Ok(Progress::Done));
        progress.is_ok()
    }

    /// Bytes of the file; fewer at its end, and none from a server without ranges.
    async fn fetch(&mut self, offset: usize, length: usize) -> Result<Option<Vec<u8>>, RegistryError> {
        let size = self.job.file.size();
        let end = (offset as u64).saturating_add(length as u64).min(size);
        if offset as u64 >= end {
            return Ok(Some(Vec::new()));
        }
        let mut stream = self.job.registry.open_part(self.job.file, offset as u64..end).await?;
        if stream.is_whole() {
            return Ok(None);
        }
        let mut bytes = Vec::new();
        while let Some(more) = self.job.next_of(&mut stream).await? {
            bytes.extend_from_slice(&more);
        }
        self.fetched = self.fetched.saturating_add(bytes.len() as u64);
        Ok(Some(bytes))
    }
}
