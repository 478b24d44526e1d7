//! A whole tensor as a file.

use std::io::{self, Write};
use std::path::Path;

use blobd_client::process::on_end;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_model::quant::{dequantize, element_count};
use blobd_store_format::gguf::GgmlType;

use super::source::{StoredTensor, parts};
use super::{npy, quant_error};
use crate::file_error;
use crate::output::DataOutput;
use crate::output_file::{Existing, TemporaryName};
use crate::target::{Target, write_error};

/// What is written.
#[derive(Debug)]
pub(super) struct Content<'t> {
    tensor: &'t StoredTensor,
    /// For numpy; otherwise the raw bytes.
    npy: Option<Npy>,
}

#[derive(Debug)]
struct Npy {
    header: Vec<u8>,
    /// The type that is converted; that of unpacked numbers is `F32`.
    ggml_type: GgmlType,
}

impl<'t> Content<'t> {
    pub(super) const fn raw(tensor: &'t StoredTensor) -> Self {
        Self { tensor, npy: None }
    }

    pub(super) fn npy(tensor: &'t StoredTensor) -> Result<Self, ErrorBody> {
        let ggml_type = if tensor.packed()?.is_some() { GgmlType::F32 } else { tensor.ggml_type()? };
        let header = npy::header(npy::numpy_type(ggml_type), &tensor.numpy_shape());
        Ok(Self { tensor, npy: Some(Npy { header, ggml_type }) })
    }

    pub(super) fn size(&self) -> u64 {
        match &self.npy {
            None => self.tensor.bytes.len() as u64,
            Some(Npy { header, ggml_type }) => {
                let numbers = self.tensor.elements().saturating_mul(npy::item_bytes(*ggml_type));
                numbers.saturating_add(header.len() as u64)
            }
        }
    }

    fn write(&self, mut out: impl Write, name: &str) -> Result<(), ErrorBody> {
        let failed = |error: io::Error| file_error(name, &error);
        let Some(Npy { header, ggml_type }) = &self.npy else {
            return out.write_all(&self.tensor.bytes).and_then(|()| out.flush()).map_err(failed);
        };
        out.write_all(header).map_err(failed)?;
        if let Some(packed) = self.tensor.packed()? {
            for range in parts(packed.len()) {
                let numbers = packed.unpack(range);
                let bytes: Vec<u8> = numbers.iter().flat_map(|number| number.to_le_bytes()).collect();
                out.write_all(&bytes).map_err(failed)?;
            }
            return out.flush().map_err(failed);
        }
        let converts = npy::numpy_type(*ggml_type) == "<f4" && *ggml_type != GgmlType::F32;
        for piece in self.tensor.pieces()? {
            let piece = piece?;
            let converted;
            let bytes = if converts {
                converted = self.float32(*ggml_type, &piece)?;
                &converted
            } else {
                &*piece
            };
            out.write_all(bytes).map_err(failed)?;
        }
        out.flush().map_err(failed)
    }

    fn float32(&self, ggml_type: GgmlType, piece: &[u8]) -> Result<Vec<u8>, ErrorBody> {
        let failed = |error| quant_error(&self.tensor.name, &error);
        let mut numbers = vec![0.0; element_count(ggml_type, piece).map_err(failed)?];
        dequantize(ggml_type, piece, &mut numbers).map_err(failed)?;
        Ok(numbers.iter().flat_map(|number| number.to_le_bytes()).collect())
    }
}

pub(super) fn to_stdout(content: &Content<'_>) -> Result<(), ErrorBody> {
    let mut out = DataOutput::new();
    let written = content.write(&mut out, "standard output");
    out.result(written)
}

/// Writes a file that gets its name when it is complete.
pub(super) fn to_file(content: &Content<'_>, path: &Path, existing: Existing) -> Result<(), ErrorBody> {
    let name = path.display().to_string();
    let temporary = TemporaryName::default();
    let removed = temporary.clone();
    on_end(move || removed.remove_and_block()).map_err(|error| ErrorBody::new(ErrorCode::Internal, error))?;
    let target = Target::create(path, content.size(), existing, &temporary);
    let target = target.map_err(|error| write_error(path, &error))?;
    content.write(target.file(), &name)?;
    target.publish().map_err(|error| write_error(path, &error))
}
