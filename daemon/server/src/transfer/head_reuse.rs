//! Reuses the head of a similar stored file where samples of it agree.
//!
//! Most of a head is the vocabulary, which models of one family share. Parts whose samples differ are downloaded. As with
//! reused tensors ([`super::tensor_reuse`]), the digest of the whole file decides: if it is wrong, the whole head is
//! downloaded.

use blobd_registry::RegistryError;
use blobd_store::Store;
use blobd_store_format::file_format::{HeaderReader, MAX_HEADER_BYTES, ModelHeader, Progress};
use blobd_store_format::recipe::Recipe;

use super::{Job, TransferError};

/// How much longer than the similar head the head may be, such as by a chat template.
const MAX_GROWTH_BYTES: usize = 1 << 20;

/// A complete head; some of its parts were only compared.
#[derive(Debug)]
pub(super) struct ReusedHead {
    pub(super) header: Box<dyn ModelHeader>,
    /// The file's first bytes, at least as long as the header.
    pub(super) bytes: Vec<u8>,
    pub(super) fetched: u64,
}

/// A smaller head is downloaded by at most two requests.
const MIN_HEAD_BYTES: u64 = 128 << 10;
/// How much is downloaded at once where the two heads differ.
const BLOCK_BYTES: usize = 2 << 10;
/// How much is compared at the end of a stretch, and searched for after a difference.
const SAMPLE_BYTES: usize = 64;
/// The length of the first stretch that is compared only by its end; it doubles with each one that agrees.
const MIN_STRETCH_BYTES: usize = 4 << 10;
/// After this many different blocks in a row, the heads are not similar.
const MAX_DIFFERENT_BLOCKS: usize = 16;

/// Composes the head of a file from that of a similar file; `None` if it is too different or the registry fails.
pub(super) fn reuse_head(
    job: &Job<'_>,
    store: &Store,
    similar: &Recipe,
) -> Result<Option<ReusedHead>, TransferError> {
    let Some((blob, size)) = similar.header().filter(|(_, size)| *size >= MIN_HEAD_BYTES) else {
        return Ok(None);
    };
    let most = usize::try_from(size).unwrap_or(usize::MAX).saturating_add(MAX_GROWTH_BYTES);
    job.count_header(most)?;
    let Some(known) = store.content().read_blob(blob, MAX_HEADER_BYTES)? else { return Ok(None) };
    let reused = job.wait_for(HeadMatcher::new(job, &known).run())?;
    Ok(reused.unwrap_or_else(|error| {
        tracing::debug!("head not reused: {error}");
        None
    }))
}

struct HeadMatcher<'g> {
    job: &'g Job<'g>,
    known: &'g [u8],
    /// Where the next byte of the file is expected in it.
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
        let mut different = 0;
        while !self.is_complete {
            let Some(block) = self.fetch(self.bytes.len(), BLOCK_BYTES).await? else { return Ok(None) };
            if block.is_empty() || !self.push(&block) {
                return Ok(None);
            }
            if self.find(&block) {
                different = 0;
                if !self.copy_stretches().await? {
                    return Ok(None);
                }
            } else {
                different += 1;
                self.position += block.len();
            }
            if different > MAX_DIFFERENT_BLOCKS {
                return Ok(None);
            }
        }
        let Self { bytes, fetched, reader, .. } = self;
        Ok(reader.finish().ok().map(|header| ReusedHead { header, bytes, fetched }))
    }

    /// Copies stretches of the similar head as long as their ends agree. False if the result is not a valid head.
    async fn copy_stretches(&mut self) -> Result<bool, RegistryError> {
        let mut length = MIN_STRETCH_BYTES;
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
            } else if length > MIN_STRETCH_BYTES {
                length = (length / 4).max(MIN_STRETCH_BYTES);
            } else {
                return Ok(true);
            }
        }
        Ok(true)
    }

    /// Searches for the end of a block in the similar head, first at the expected position.
    fn find(&mut self, block: &[u8]) -> bool {
        /// Covers the difference in length between two chat templates.
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

    /// Appends bytes to the head; false if it is no longer valid, or longer than was counted.
    fn push(&mut self, bytes: &[u8]) -> bool {
        let length = self.bytes.len().saturating_add(bytes.len());
        if length > self.known.len().saturating_add(MAX_GROWTH_BYTES) {
            return false;
        }
        self.bytes.extend_from_slice(bytes);
        let progress = self.reader.push(bytes);
        self.is_complete = matches!(progress, Ok(Progress::Done));
        progress.is_ok()
    }

    /// Downloads bytes of the file; fewer at its end, and `None` from a server without ranges.
    async fn fetch(&mut self, offset: usize, length: usize) -> Result<Option<Vec<u8>>, RegistryError> {
        let size = self.job.file.size();
        let end = (offset as u64).saturating_add(length as u64).min(size);
        if offset as u64 >= end {
            return Ok(Some(Vec::new()));
        }
        let part = self.job.registry.open_part(self.job.file, offset as u64..end);
        let mut stream = self.job.silence.until(part).await?;
        if stream.is_whole() {
            return Ok(None);
        }
        let bytes = self.job.rest_of(&mut stream).await?;
        self.fetched = self.fetched.saturating_add(bytes.len() as u64);
        Ok(Some(bytes))
    }
}
