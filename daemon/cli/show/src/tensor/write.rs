//! Writes a whole tensor: its raw bytes, or a numpy file.
//!
//! Source of the numpy header: numpy's `NEP 1` and `numpy/lib/format.py`, version 1.0.

use std::io::{self, Write};
use std::path::Path;

use blobd_cli_common::output::DataOutput;
use blobd_cli_common::output_file::{Existing, Target, TemporaryName, write_error};
use blobd_cli_common::{file_error, internal};
use blobd_client::process::on_end;
use blobd_model::quant::{ElementType, Values};
use blobd_store_format::gguf::GgmlType;
use blobd_store_format::safetensors::Dtype;

use super::quant_error;
use super::source::{StoredTensor, parts};
use crate::ErrorBody;

#[derive(Debug)]
pub(super) struct Content<'t> {
    tensor: &'t StoredTensor,
    npy: Option<Npy>,
}

#[derive(Debug)]
struct Npy {
    header: Vec<u8>,
    /// The type that is converted; that of unpacked numbers is `F32`.
    element_type: ElementType,
}

impl<'t> Content<'t> {
    pub(super) const fn raw(tensor: &'t StoredTensor) -> Self {
        Self { tensor, npy: None }
    }

    pub(super) fn npy(tensor: &'t StoredTensor) -> Result<Self, ErrorBody> {
        let element_type =
            if tensor.packed()?.is_some() { GgmlType::F32.into() } else { tensor.element_type()? };
        let header = npy_header(numpy_type(element_type), &tensor.numpy_shape());
        Ok(Self { tensor, npy: Some(Npy { header, element_type }) })
    }

    pub(super) fn size(&self) -> u64 {
        match &self.npy {
            None => self.tensor.bytes.len() as u64,
            Some(Npy { header, element_type }) => {
                let numbers = self.tensor.elements().saturating_mul(item_bytes(*element_type));
                numbers.saturating_add(header.len() as u64)
            }
        }
    }

    fn write(&self, mut out: impl Write, name: &str) -> Result<(), ErrorBody> {
        let failed = |error: io::Error| file_error(name, &error);
        let Some(Npy { header, element_type }) = &self.npy else {
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
        let converts = numpy_type(*element_type) == "<f4" && *element_type != GgmlType::F32.into();
        for piece in self.tensor.pieces()? {
            let piece = piece?;
            let converted;
            let bytes = if converts {
                converted = self.float32(*element_type, &piece)?;
                &converted
            } else {
                &*piece
            };
            out.write_all(bytes).map_err(failed)?;
        }
        out.flush().map_err(failed)
    }

    /// The numbers of a type that numpy lacks.
    fn float32(&self, element_type: ElementType, piece: &[u8]) -> Result<Vec<u8>, ErrorBody> {
        match element_type.values(piece) {
            Ok(Values::F32(numbers)) => Ok(numbers.iter().flat_map(|number| number.to_le_bytes()).collect()),
            Ok(_) => Err(internal(format!("type {}: is one of numpy's", self.tensor.type_name))),
            Err(error) => Err(quant_error(&self.tensor.name, &error)),
        }
    }
}

pub(super) fn to_stdout(content: &Content<'_>) -> Result<(), ErrorBody> {
    let mut out = DataOutput::lock();
    let written = content.write(&mut out, "standard output");
    out.result(written)
}

pub(super) fn to_file(content: &Content<'_>, path: &Path, existing: Existing) -> Result<(), ErrorBody> {
    let name = path.display().to_string();
    let temporary = TemporaryName::default();
    let removed = temporary.clone();
    on_end(move || removed.remove_and_block()).map_err(internal)?;
    let target = Target::create(path, content.size(), existing, &temporary);
    let target = target.map_err(|error| write_error(path, &error))?;
    content.write(target.file(), &name)?;
    target.publish().map_err(|error| write_error(path, &error))
}

/// Numpy's name for the numbers that a tensor of this type is written as: `float32` for quantised types, `BF16` and
/// the smaller floats, which numpy lacks.
const fn numpy_type(element_type: ElementType) -> &'static str {
    match element_type {
        ElementType::Ggml(GgmlType::F16) => "<f2",
        ElementType::Ggml(GgmlType::F64) => "<f8",
        ElementType::Ggml(GgmlType::I8) => "|i1",
        ElementType::Ggml(GgmlType::I16) => "<i2",
        ElementType::Ggml(GgmlType::I32) => "<i4",
        ElementType::Ggml(GgmlType::I64) => "<i8",
        ElementType::Safetensors(Dtype::Bool) => "|b1",
        ElementType::Safetensors(Dtype::U8) => "|u1",
        ElementType::Safetensors(Dtype::U16) => "<u2",
        ElementType::Safetensors(Dtype::U32) => "<u4",
        ElementType::Safetensors(Dtype::U64) => "<u8",
        ElementType::Safetensors(Dtype::C64) => "<c8",
        _ => "<f4",
    }
}

/// The size of an element of the numpy type, which ends its name.
fn item_bytes(element_type: ElementType) -> u64 {
    numpy_type(element_type).get(2..).and_then(|size| size.parse().ok()).unwrap_or_default()
}

/// The header of an array in C order, with the slowest dimension first.
fn npy_header(numpy_type: &str, shape: &[u64]) -> Vec<u8> {
    const MAGIC: &[u8] = b"\x93NUMPY\x01\x00";
    const ALIGNMENT: usize = 64;
    let lengths: String = shape.iter().map(|length| format!("{length}, ")).collect();
    let mut text =
        format!("{{'descr': '{numpy_type}', 'fortran_order': False, 'shape': ({}), }}", lengths.trim_end());
    let start = MAGIC.len() + size_of::<u16>();
    let end = (start + text.len() + 1).next_multiple_of(ALIGNMENT);
    text.extend(std::iter::repeat_n(' ', end - start - text.len() - 1));
    text.push('\n');
    // At most 1,024 dimensions of 20 digits: never saturates.
    let length = u16::try_from(text.len()).unwrap_or(u16::MAX);
    [MAGIC, &length.to_le_bytes(), text.as_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use blobd_store_format::tensor::Shape;

    use super::*;

    #[test]
    fn headers_are_python_and_end_at_a_multiple_of_64() {
        let text = |shape: &[u64]| {
            let header = npy_header("<f4", shape);
            assert_eq!(header.len() % 64, 0);
            assert_eq!(header.last(), Some(&b'\n'));
            assert_eq!(usize::from(u16::from_le_bytes([header[8], header[9]])), header.len() - 10);
            String::from_utf8(header[10..].to_vec()).unwrap().trim_end().to_owned()
        };
        assert_eq!(text(&[2, 3]), "{'descr': '<f4', 'fortran_order': False, 'shape': (2, 3,), }");
        assert_eq!(text(&[7]), "{'descr': '<f4', 'fortran_order': False, 'shape': (7,), }");
        assert_eq!(text(&[]), "{'descr': '<f4', 'fortran_order': False, 'shape': (), }");
        assert_eq!(text(&[u64::MAX; 4]).len(), 142);
        let longest = Shape::MAX_DIMENSIONS;
        assert_eq!(text(&vec![u64::MAX; longest]).matches(&u64::MAX.to_string()).count(), longest);
    }
}
