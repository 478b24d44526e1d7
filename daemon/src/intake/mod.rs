//! Intake: a file that arrives in order becomes staged blobs.
//!
//! The bytes pass once, through three threads: one reads and hashes the whole file, one writes
//! its parts, one hashes them. Six buffers of [`CHUNK_BYTES`] travel between them, which bounds
//! the memory whatever the file's size. Import and pull differ only in where the bytes come from.

// Files of the store are reached through its root alone, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::io::{self, Cursor, Read};

use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::{GgufError, Header, HeaderParser, Progress};
use blobd_store_format::recipe::RecipeError;
use blobd_store_format::split::{SplitError, SplitPlan};

use blobd_store::{Ingest, StoreError};

mod facts;
mod pipeline;

pub use facts::{ModelFacts, Shard};

/// How much is read and written at once. Writes of this size and alignment let the page cache
/// build 2 MiB folios, which makes the first touch of a mapped blob ten times cheaper.
pub const CHUNK_BYTES: usize = 4 << 20;

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
    announce(ingest, &plan, plan.blobs().iter().map(|blob| blob.size));
    ingest.admit(plan.blobs().iter().map(|blob| blob.size))?;
    let facts = ModelFacts::of(&header);
    let mut source = Cursor::new(header.bytes()).chain(Cursor::new(surplus)).chain(source);
    let parts = pipeline::split(ingest, &mut source, &plan, progress)?;
    ingest.add_recipe(plan.recipe(parts.file, &parts.blobs, parts.literals)?);
    Ok(TakenFile { digest: parts.file, size, facts: Some(facts) })
}

/// The file itself was announced when the transaction began; now its parts are known, and that
/// blobs of these sizes may have to be stored.
pub(crate) fn announce(ingest: &Ingest, plan: &SplitPlan, blobs: impl Iterator<Item = u64>) {
    /// What a tensor takes of a recipe, with its pieces, and generously.
    const RECIPE_BYTES_PER_TENSOR: u64 = 512;
    let recipe = RECIPE_BYTES_PER_TENSOR.saturating_mul(plan.tensors().len() as u64);
    ingest.staging().expect_instead(plan.file_size(), blobs.chain([recipe]));
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
    ingest.admit([size].into_iter())?;
    let mut writer = ingest.staging().stage(size)?;
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
            Ok(0) => {
                return Err(IntakeError::Truncated { found: range.start + filled as u64, expected: size });
            }
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(IntakeError::Source(error)),
        }
    }
    Ok(wanted)
}

#[cfg(test)]
mod tests;
