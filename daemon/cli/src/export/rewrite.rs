//! Exports that write other files with the same tensors.

use std::io::{self, BufWriter, Write};

use blobd_client::model::OpenModel;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_model::quant::swap_bytes;
use blobd_model::rewrite::{
    RewriteError, RewriteOptions, RewritePiece, RewritePlan, RewriteSource, RewrittenFile, Sharding,
};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::file_paths::distinct;
use blobd_store_format::gguf::{ByteOrder, GgmlType, GgufError};
use blobd_store_format::size::parse_size;
use clap::{Args, ValueEnum};

use crate::progress::Bar;
use crate::source_file::SourceFile;

/// Options that make other files than the original.
#[derive(Debug, Args)]
pub(super) struct RewriteArgs {
    /// Write a GGUF file with this alignment in bytes, a power of two; llama.cpp maps files from 32 on
    #[arg(long, value_name = "N")]
    alignment: Option<u32>,
    /// Write a GGUF file with this byte order
    #[arg(long, value_name = "ORDER")]
    endian: Option<Endian>,
    /// Write the shards of a model as one GGUF file
    #[arg(long, conflicts_with = "split_max_size")]
    merge: bool,
    /// Write GGUF shards with at most this size of tensors each, such as 2GiB or 500M; a larger tensor has a shard of
    /// its own
    #[arg(long, value_name = "SIZE", value_parser = parse_size)]
    split_max_size: Option<u64>,
}

#[derive(Clone, Copy, Debug, ValueEnum)]
enum Endian {
    Little,
    Big,
}

impl RewriteArgs {
    /// `None` if the original file is requested.
    pub(super) fn options(&self) -> Option<RewriteOptions> {
        let byte_order = self.endian.map(|endian| match endian {
            Endian::Little => ByteOrder::Little,
            Endian::Big => ByteOrder::Big,
        });
        let sharding = match self.split_max_size {
            Some(max_bytes) => Sharding::Split { max_bytes },
            None if self.merge => Sharding::Merge,
            None => Sharding::Keep,
        };
        let options = RewriteOptions { alignment: self.alignment, byte_order, sharding };
        (options != RewriteOptions::default()).then_some(options)
    }
}

/// The files of an open model, and what is to be written.
pub(super) struct Rewriting<'m> {
    sources: Vec<SourceFile<'m>>,
    /// The number of each source among the model's layers.
    layers: Vec<usize>,
    plan: RewritePlan,
}

impl<'m> Rewriting<'m> {
    pub(super) fn of(model: &'m OpenModel, options: &RewriteOptions) -> Result<Self, ErrorBody> {
        let mut sources = Vec::new();
        let mut headers = Vec::new();
        // A file that the manifest names several times is one source.
        let layers = distinct(model.layers().iter().map(|layer| ("", layer.digest)));
        for layer in layers.iter().copied() {
            let mut source = SourceFile::open(model, layer)?;
            let header = source.read_header()?;
            let checked = RewriteSource::new(header, source.size());
            headers.push(checked.map_err(|error| invalid(model, &error))?);
            sources.push(source);
        }
        let plan = RewritePlan::new(&headers, options);
        Ok(Self { sources, layers, plan: plan.map_err(|error| refused(model, &error))? })
    }

    pub(super) fn layers(&self) -> &[usize] {
        &self.layers
    }

    pub(super) fn files(&self) -> &[RewrittenFile] {
        self.plan.files()
    }

    /// Writes the file with this index, and returns its digest.
    pub(super) fn write(
        &mut self,
        index: usize,
        out: impl Write,
        name: &str,
        bar: &Bar,
    ) -> Result<Digest, ErrorBody> {
        const BUFFER_BYTES: usize = 1 << 20;
        let Self { sources, plan, .. } = self;
        let Some(file) = plan.files().get(index) else { return Ok(Digest::of(b"")) };
        let (size, out) = (file.size(), BufWriter::with_capacity(BUFFER_BYTES, out));
        let mut out = Output { out, hasher: Hasher::new(), written: 0, size, name, bar };
        out.write(file.header())?;
        for piece in file.pieces() {
            match *piece {
                RewritePiece::Zeros { length } => out.zeros(length)?,
                RewritePiece::Tensor { source, offset, size, swapped } => {
                    if let Some(source) = sources.get_mut(source) {
                        copy(source, offset, size, swapped, &mut out)?;
                    }
                }
            }
        }
        out.finish()
    }

    /// Checks that the data that was read is that of the model.
    pub(super) fn verify(self) -> Result<(), ErrorBody> {
        self.sources.into_iter().try_for_each(SourceFile::verify)
    }
}

fn invalid(model: &OpenModel, error: &impl std::fmt::Display) -> ErrorBody {
    ErrorBody::new(ErrorCode::InvalidInput, format!("model {}: {error}", model.name()))
}

fn refused(model: &OpenModel, error: &RewriteError) -> ErrorBody {
    let body = invalid(model, error);
    match error {
        RewriteError::NotSharded => ErrorBody { code: ErrorCode::InvalidRequest, ..body }
            .with_hint("leave out --merge; without other options, the original file is written"),
        RewriteError::TooManyShards { .. } | RewriteError::Gguf(GgufError::Alignment { .. }) => {
            ErrorBody { code: ErrorCode::InvalidRequest, ..body }
        }
        _ => body,
    }
}

/// Copies a tensor, in chunks of whole blocks if its bytes are swapped.
fn copy(
    source: &mut SourceFile<'_>,
    offset: u64,
    size: u64,
    swapped: Option<GgmlType>,
    out: &mut Output<'_, impl Write>,
) -> Result<(), ErrorBody> {
    const CHUNK_BYTES: u64 = 4 << 20;
    let block_bytes = swapped.and_then(GgmlType::block).map_or(1, |(_elements, bytes)| bytes.max(1));
    let step = CHUNK_BYTES.saturating_sub(CHUNK_BYTES % block_bytes).min(size);
    let mut buffer = vec![0; usize::try_from(step).unwrap_or_default()];
    let mut done = 0;
    while done < size {
        let length = usize::try_from(size.saturating_sub(done)).unwrap_or(usize::MAX).min(buffer.len());
        let chunk = buffer.get_mut(..length).unwrap_or_default();
        source.read(offset.saturating_add(done), chunk)?;
        if let Some(ggml_type) = swapped {
            // The plan has only types that can be swapped.
            swap_bytes(ggml_type, chunk).map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
        }
        out.write(chunk)?;
        done = done.saturating_add(length as u64);
    }
    Ok(())
}

/// A file that is written and hashed.
struct Output<'o, W: Write> {
    out: BufWriter<W>,
    hasher: Hasher,
    written: u64,
    size: u64,
    name: &'o str,
    bar: &'o Bar,
}

impl<W: Write> Output<'_, W> {
    fn write(&mut self, bytes: &[u8]) -> Result<(), ErrorBody> {
        self.out.write_all(bytes).map_err(|error| self.failed(&error))?;
        self.hasher.update(bytes);
        self.written = self.written.saturating_add(bytes.len() as u64);
        self.bar.set(self.written, self.size);
        Ok(())
    }

    fn zeros(&mut self, mut length: u64) -> Result<(), ErrorBody> {
        const ZEROS: [u8; 4096] = [0; 4096];
        while length > 0 {
            let portion = ZEROS.get(..usize::try_from(length).unwrap_or(usize::MAX)).unwrap_or(&ZEROS);
            self.write(portion)?;
            length = length.saturating_sub(portion.len() as u64);
        }
        Ok(())
    }

    fn finish(mut self) -> Result<Digest, ErrorBody> {
        self.out.flush().map_err(|error| self.failed(&error))?;
        Ok(self.hasher.finish())
    }

    fn failed(&self, error: &io::Error) -> ErrorBody {
        crate::file_error(self.name, error)
    }
}
