//! Intake: a file that arrives in order becomes staged blobs.
//!
//! The bytes pass once. The thread that reads them hashes the whole file; a second one hashes
//! and writes the parts, so that both digests of every byte cost the time of one on two cores.
//! Between them travel four buffers of [`CHUNK_BYTES`], which bounds the memory whatever the
//! file's size. Import and pull differ only in where the bytes come from.

use std::io::{self, Cursor, Read};
use std::sync::mpsc;
use std::thread;

use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::gguf::{GgufError, Header, HeaderParser, Progress};
use blobd_store_format::recipe::RecipeError;
use blobd_store_format::split::{SplitError, SplitPlan};

use crate::store::{Ingest, StoreError};

mod facts;
mod stager;

pub use facts::ModelFacts;
use stager::Stager;

/// How much is read and written at once. Writes of this size and alignment let the page cache
/// build 2 MiB folios, which makes the first touch of a mapped blob ten times cheaper.
pub const CHUNK_BYTES: usize = 4 << 20;

/// Enough for the reader to stay ahead while the writer waits for the disk.
const CHUNK_COUNT: usize = 4;

/// A file that has been taken in; its blobs and its recipe are part of the ingest.
#[derive(Clone, Debug)]
pub struct TakenFile {
    /// The SHA-256 of the whole file.
    pub digest: Digest,
    /// Its length in bytes.
    pub size: u64,
    /// What its header says, if it is a GGUF file.
    pub facts: Option<ModelFacts>,
}

/// Takes in a GGUF file of `size` bytes and adds its blobs and its recipe to the ingest.
/// `progress` is told how many bytes have been read.
///
/// # Errors
/// [`IntakeError`]; the ingest is then only good to be dropped.
pub fn take_gguf(
    ingest: &mut Ingest,
    source: &mut (dyn Read + Send),
    size: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<TakenFile, IntakeError> {
    let Head { header, surplus } = read_head(source, size)?;
    let plan = SplitPlan::new(&header, size)?;
    let facts = ModelFacts::of(&header);
    let mut source = Cursor::new(header.bytes()).chain(Cursor::new(surplus)).chain(source);
    let (digest, parts) = split(ingest, &mut source, &plan, progress)?;
    ingest.add_recipe(plan.recipe(digest, &parts.blobs, parts.literals)?);
    Ok(TakenFile { digest, size, facts: Some(facts) })
}

/// Takes in a file of `size` bytes as one blob.
///
/// # Errors
/// [`IntakeError`]; the ingest is then only good to be dropped.
pub fn take_whole(
    ingest: &mut Ingest,
    source: &mut dyn Read,
    size: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<TakenFile, IntakeError> {
    let mut writer = ingest.stage(size)?;
    let mut buffer = vec![0; CHUNK_BYTES.min(usize::try_from(size).unwrap_or(CHUNK_BYTES))];
    let mut offset = 0;
    while offset < size {
        let end = size.min(offset + CHUNK_BYTES as u64);
        let chunk = fill(source, &mut buffer, offset..end, size)?;
        writer.write_at(offset, chunk)?;
        offset = end;
        progress(offset);
    }
    let digest = ingest.add_blob(writer.finish()?)?;
    Ok(TakenFile { digest, size, facts: None })
}

/// Why a file cannot be taken in.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum IntakeError {
    /// It could not be read.
    #[error("{0}")]
    Source(io::Error),
    /// It is shorter than announced.
    #[error("file ends at byte {found}, {expected} expected")]
    Truncated {
        /// Where it ends.
        found: u64,
        /// Where it should.
        expected: u64,
    },
    /// Its header is refused.
    #[error("{0}")]
    Gguf(#[from] GgufError),
    /// Its tensors are refused.
    #[error("{0}")]
    Split(#[from] SplitError),
    /// It is only a part of a model.
    #[error("is one of {count} shards; join them with `llama-gguf-split --merge` and import the result")]
    Shard {
        /// How many shards the model has.
        count: u64,
    },
    /// Its recipe is refused.
    #[error("{0}")]
    Recipe(#[from] RecipeError),
    /// The store failed.
    #[error("{0}")]
    Store(#[from] StoreError),
}

struct Head {
    header: Header,
    /// What was read beyond the header.
    surplus: Vec<u8>,
}

/// Reads in small steps, so that a refused header costs little.
fn read_head(source: &mut dyn Read, size: u64) -> Result<Head, IntakeError> {
    const STEP_BYTES: usize = 64 << 10;
    let mut parser = HeaderParser::new();
    let mut step = vec![0; STEP_BYTES];
    let mut read = 0;
    loop {
        let end = size.min(read + STEP_BYTES as u64);
        let bytes = fill(source, &mut step, read..end, size)?;
        let progress = parser.push(bytes)?;
        if progress == Progress::Done || end == size {
            let header = parser.finish()?;
            let in_step = (header.bytes().len() as u64).saturating_sub(read);
            let surplus = usize::try_from(in_step).ok().and_then(|start| bytes.get(start..));
            return Ok(Head { header, surplus: surplus.unwrap_or_default().to_vec() });
        }
        read = end;
    }
}

/// What the stager made of a file.
struct Parts {
    blobs: Vec<Digest>,
    literals: Vec<Vec<u8>>,
}

struct Chunk {
    buffer: Vec<u8>,
    length: usize,
}

/// Hashes the whole file on this thread while another one stages its parts.
fn split(
    ingest: &mut Ingest,
    source: &mut dyn Read,
    plan: &SplitPlan,
    progress: &mut dyn FnMut(u64),
) -> Result<(Digest, Parts), IntakeError> {
    thread::scope(|scope| {
        let (full, to_stage) = mpsc::sync_channel::<Chunk>(CHUNK_COUNT);
        let (staged, empty) = mpsc::channel();
        for _ in 0..CHUNK_COUNT {
            // The receiver lives in this very function.
            let _ = staged.send(vec![0; CHUNK_BYTES]);
        }
        let stager = scope.spawn(move || {
            let mut stager = Stager::new(ingest, plan);
            for Chunk { buffer, length } in to_stage {
                stager.push(buffer.get(..length).unwrap_or_default())?;
                // Fails at the end, when the reader has all it needs.
                let _ = staged.send(buffer);
            }
            stager.finish()
        });
        let read = read_chunks(source, plan, &full, &empty, progress);
        drop(full);
        let parts = stager.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic));
        match read {
            Err(error) => Err(error),
            // The stager has stopped early: it says why.
            Ok(None) => parts.and(Err(IntakeError::Truncated { found: 0, expected: plan.file_size() })),
            Ok(Some(digest)) => Ok((digest, parts?)),
        }
    })
}

/// Reads and hashes everything; `None` when the stager has given up.
fn read_chunks(
    source: &mut dyn Read,
    plan: &SplitPlan,
    full: &mpsc::SyncSender<Chunk>,
    empty: &mpsc::Receiver<Vec<u8>>,
    progress: &mut dyn FnMut(u64),
) -> Result<Option<Digest>, IntakeError> {
    let mut hasher = Hasher::new();
    let mut offset = 0;
    while offset < plan.file_size() {
        let Ok(mut buffer) = empty.recv() else { return Ok(None) };
        let end = plan.chunk_end(offset, CHUNK_BYTES as u64);
        let chunk = fill(source, &mut buffer, offset..end, plan.file_size())?;
        hasher.update(chunk);
        let length = chunk.len();
        if full.send(Chunk { buffer, length }).is_err() {
            return Ok(None);
        }
        offset = end;
        progress(offset);
    }
    Ok(Some(hasher.finish()))
}

/// Reads the bytes of `range` of a file of `size` bytes to the start of `buffer`.
fn fill<'b>(
    source: &mut dyn Read,
    buffer: &'b mut [u8],
    range: std::ops::Range<u64>,
    size: u64,
) -> Result<&'b [u8], IntakeError> {
    let length = usize::try_from(range.end - range.start).unwrap_or(usize::MAX).min(buffer.len());
    let (wanted, _) = buffer.split_at_mut(length);
    let mut filled = 0;
    while let Some(rest) = wanted.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match source.read(rest) {
            Ok(0) => return Err(IntakeError::Truncated { found: range.start + filled as u64, expected: size }),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(IntakeError::Source(error)),
        }
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests;
