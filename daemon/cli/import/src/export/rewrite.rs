//! Exports that write other files with the same tensors.

use std::io::{self, Read as _, Write};
use std::ops::Range;

use blobd_cli_common::progress::Bar;
use blobd_cli_common::source_file::{SourceFile, has_safetensors};
use blobd_cli_common::{file_error, internal};
use blobd_client::model::OpenModel;
use blobd_model::quant::swap_bytes;
use blobd_model::rewrite::{
    RewriteError, RewriteOptions, RewritePiece, RewritePlan, RewriteSource, RewrittenFile, Sharding,
};
use blobd_store_format::file_paths::distinct;
use blobd_store_format::gguf::{ByteOrder, GgmlType, GgufError};
use blobd_store_format::size::parse_size;
use clap::{Args, ValueEnum};

use super::outputs::HashingWriter;
use crate::{Digest, ErrorBody, ErrorCode};

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

pub(super) struct Rewriting<'m> {
    sources: Vec<SourceFile<'m>>,
    /// The number of each source among the model's layers.
    layers: Vec<usize>,
    plan: RewritePlan,
}

impl<'m> Rewriting<'m> {
    pub(super) fn new(model: &'m OpenModel, options: &RewriteOptions) -> Result<Self, ErrorBody> {
        if has_safetensors(model) {
            let error = "wrong format: expected a model of GGUF files, found one with safetensors files";
            let hint = "its files are written as they are without --merge, --split-max-size, --alignment and --endian";
            return Err(invalid(model, &error).with_hint(hint));
        }
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

    /// Returns the digest of the file.
    pub(super) fn write(
        &mut self,
        index: usize,
        out: impl Write,
        name: &str,
        bar: &Bar,
    ) -> Result<Digest, ErrorBody> {
        let failed = |error: io::Error| file_error(name, &error);
        let Self { sources, plan, .. } = self;
        let Some(file) = plan.files().get(index) else { return Ok(Digest::of(b"")) };
        let mut out = HashingWriter::new(out, file.size(), bar);
        out.write_all(file.header()).map_err(failed)?;
        for piece in file.pieces() {
            match *piece {
                RewritePiece::Zeros { length } => {
                    io::copy(&mut io::repeat(0).take(length), &mut out).map_err(failed)?;
                }
                RewritePiece::Tensor { source, offset, size, swapped } => {
                    if let Some(source) = sources.get_mut(source) {
                        copy(source, offset..offset.saturating_add(size), swapped, &mut out, failed)?;
                    }
                }
            }
        }
        out.finish().map_err(failed)
    }

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

/// Copies in chunks of whole blocks if bytes are swapped.
fn copy(
    source: &mut SourceFile<'_>,
    range: Range<u64>,
    swapped: Option<GgmlType>,
    out: &mut impl Write,
    failed: impl Fn(io::Error) -> ErrorBody,
) -> Result<(), ErrorBody> {
    const CHUNK_BYTES: u64 = 4 << 20;
    let block_bytes = swapped.and_then(GgmlType::block).map_or(1, |(_elements, bytes)| bytes.max(1));
    let step = CHUNK_BYTES.saturating_sub(CHUNK_BYTES % block_bytes).max(block_bytes);
    let mut buffer = Vec::new();
    let mut offset = range.start;
    while offset < range.end {
        let length = step.min(range.end.saturating_sub(offset));
        buffer.resize(usize::try_from(length).unwrap_or_default(), 0);
        source.read(offset, &mut buffer)?;
        if let Some(ggml_type) = swapped {
            // The plan has only types that can be swapped.
            swap_bytes(ggml_type, &mut buffer).map_err(internal)?;
        }
        out.write_all(&buffer).map_err(&failed)?;
        offset = offset.saturating_add(length);
    }
    Ok(())
}
