//! Splits a model file, read from its start, into staged blobs and a recipe.

// Files of the store are accessed only through its root, see `clippy.toml`.
#![cfg_attr(not(test), deny(clippy::disallowed_methods))]

use std::io::{self, Cursor, Read};

use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::{FormatError, HeaderReader, ModelHeader, Progress};
use blobd_store_format::model_facts::ModelFacts;
use blobd_store_format::recipe::RecipeError;
use blobd_store_format::split::SplitPlan;

use blobd_store::{Assembler, Ingest, StoreError};

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
/// of bytes read so far.
///
/// # Errors
/// [`IngestError`]; then the ingest must be dropped.
pub fn ingest_file(
    ingest: &mut Ingest,
    source: &mut (dyn Read + Send),
    size: u64,
    progress: &mut dyn FnMut(u64),
) -> Result<IngestedFile, IngestError> {
    let Head { header, surplus } = read_head(source, size)?;
    let plan = SplitPlan::new(header.file_layout(size)?);
    announce(ingest, &plan, plan.blobs().iter().map(|blob| blob.size));
    ingest.admit(plan.blobs().iter().map(|blob| blob.size))?;
    let facts = header.facts();
    let mut source = Cursor::new(header.bytes()).chain(Cursor::new(surplus)).chain(source);
    let mut read = |offset: u64, buffer: &mut [u8]| {
        let end = offset.saturating_add(buffer.len() as u64);
        fill(&mut source, buffer, offset, size)?;
        progress(end);
        Ok::<_, IngestError>(())
    };
    let assembler = Assembler::new(ingest.staging(), plan);
    let file = assembler.store_in_order(&mut read, &mut |blob| ingest.add_blob(blob).map(drop))?;
    let digest = file.digest;
    assembler.recipe(file)?.into_iter().for_each(|recipe| ingest.add_recipe(recipe));
    Ok(IngestedFile { digest, size, facts })
}

/// Replaces the announced size of the whole file by the sizes of the blobs that may have to be stored and an estimate
/// of the recipe's.
pub(crate) fn announce(ingest: &Ingest, plan: &SplitPlan, blobs: impl Iterator<Item = u64>) {
    /// A generous estimate, with the tensor's pieces.
    const RECIPE_BYTES_PER_TENSOR: u64 = 512;
    let recipe = RECIPE_BYTES_PER_TENSOR.saturating_mul(plan.tensors().len() as u64);
    ingest.staging().expect_instead(plan.file_size(), blobs.chain([recipe]));
}

/// Why a file was not ingested.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
#[expect(missing_docs, reason = "the messages say what the errors and their fields are")]
pub enum IngestError {
    #[error("{0}")]
    Source(io::Error),
    #[error("file ends at byte {found}, {expected} expected")]
    Truncated { found: u64, expected: u64 },
    /// Its format is unknown, or its header or its tensors are invalid.
    #[error("{0}")]
    Format(#[from] FormatError),
    #[error("is one of {count} shards; join them with `llama-gguf-split --merge` and import the result")]
    Shard { count: u64 },
    /// No valid recipe can be made for it.
    #[error("{0}")]
    Recipe(#[from] RecipeError),
    #[error("{0}")]
    Store(#[from] StoreError),
}

struct Head {
    header: Box<dyn ModelHeader>,
    /// The bytes read after the header.
    surplus: Vec<u8>,
}

/// Reads the header in small steps, so that an invalid one is refused early.
fn read_head(source: &mut dyn Read, size: u64) -> Result<Head, IngestError> {
    const STEP_BYTES: usize = 64 << 10;
    let mut reader = HeaderReader::new();
    let mut step = vec![0; STEP_BYTES];
    let mut read = 0;
    loop {
        let end = size.min(read + STEP_BYTES as u64);
        let length = usize::try_from(end - read).unwrap_or(STEP_BYTES);
        let bytes = step.get_mut(..length).unwrap_or_default();
        fill(source, bytes, read, size)?;
        let progress = reader.push(bytes)?;
        if progress == Progress::Done || end == size {
            let header = reader.finish()?;
            let in_step = (header.bytes().len() as u64).saturating_sub(read);
            let surplus = usize::try_from(in_step).ok().and_then(|start| bytes.get(start..));
            return Ok(Head { header, surplus: surplus.unwrap_or_default().to_vec() });
        }
        read = end;
    }
}

/// Fills `buffer` with the bytes at `offset` of a file of `size` bytes.
fn fill(source: &mut dyn Read, buffer: &mut [u8], offset: u64, size: u64) -> Result<(), IngestError> {
    let mut filled = 0;
    while let Some(rest) = buffer.get_mut(filled..).filter(|rest| !rest.is_empty()) {
        match source.read(rest) {
            Ok(0) => return Err(IngestError::Truncated { found: offset + filled as u64, expected: size }),
            Ok(read) => filled += read,
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Err(IngestError::Source(error)),
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
