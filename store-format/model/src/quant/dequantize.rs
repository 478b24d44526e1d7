//! Converts blocks to numbers.

use super::block::BlockLayout;
use super::{QuantError, decode, whole_blocks};
use crate::float::{f32_of_bf16, f32_of_f16};
use blobd_store_format::gguf::GgmlType;

/// A multiple of every type's block length. As `f32`, a piece takes 256 KiB, which fits a processor's cache.
pub(super) const PIECE_ELEMENTS: usize = 1 << 16;

/// The number of elements in `bytes`.
pub fn element_count(ggml_type: GgmlType, bytes: &[u8]) -> Result<usize, QuantError> {
    let layout = BlockLayout::for_type(ggml_type).ok_or(QuantError::UnknownType { ggml_type })?;
    let blocks = bytes.len() / whole_blocks(&layout, bytes.len())?;
    // Saturation is unreachable: no vector can be that long.
    let elements = usize::try_from(layout.elements()).unwrap_or(usize::MAX);
    Ok(blocks.saturating_mul(elements))
}

/// The bytes of a piece of a tensor, if it has whole blocks.
pub(super) fn piece_bytes(ggml_type: GgmlType, bytes: &[u8]) -> Result<usize, QuantError> {
    let layout = BlockLayout::for_type(ggml_type).ok_or(QuantError::UnknownType { ggml_type })?;
    whole_blocks(&layout, bytes.len())?;
    let size = PIECE_ELEMENTS as u64 / layout.elements() * layout.bytes();
    Ok(usize::try_from(size).unwrap_or(usize::MAX))
}

/// Converts any whole number of blocks of little-endian data to `f32`.
///
/// The results equal those of PyPI's `gguf` bit for bit (NaN for NaN) for the types that it converts. `F64`,
/// `I32` and `I64` are rounded to the nearest `f32`; [`Values`] has their exact numbers.
///
/// # Errors
/// [`QuantError`] for a removed or unknown type, when the bytes are not whole blocks, and when `out` has
/// another length than [`element_count`] says. `out` is unchanged then.
///
/// ```
/// use blobd_store_format::gguf::GgmlType;
/// use blobd_model::quant::dequantize;
///
/// let block: Vec<u8> = [0x00, 0x38].into_iter().chain(0..32).collect(); // the scale is 0.5
/// let mut values = [0.0; 32];
/// dequantize(GgmlType::Q8_0, &block, &mut values)?;
/// assert_eq!(values[..4], [0.0, 0.5, 1.0, 1.5]);
/// # Ok::<(), blobd_model::quant::QuantError>(())
/// ```
pub fn dequantize(ggml_type: GgmlType, bytes: &[u8], out: &mut [f32]) -> Result<(), QuantError> {
    let expected = element_count(ggml_type, bytes)?;
    if out.len() != expected {
        return Err(QuantError::OutputLength { found: out.len(), expected });
    }
    match ggml_type {
        GgmlType::F64 | GgmlType::I8 | GgmlType::I16 | GgmlType::I32 | GgmlType::I64 => {
            plain_numbers(ggml_type, bytes, out);
        }
        _ => blocks(ggml_type, bytes, out),
    }
    Ok(())
}

/// The numbers of a tensor, without loss.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub enum Values {
    /// The numbers of quantised types, `F32` and the smaller floats.
    F32(Vec<f32>),
    /// The numbers of `F64`.
    F64(Vec<f64>),
    /// The numbers of integer types, and 0 and 1 of `BOOL`.
    I64(Vec<i64>),
    /// The numbers of `U64`.
    U64(Vec<u64>),
    /// The real and the imaginary part of each number of `C64`.
    Complex(Vec<[f32; 2]>),
}

impl Values {
    /// Converts any whole number of blocks of little-endian data.
    pub fn from_bytes(ggml_type: GgmlType, bytes: &[u8]) -> Result<Self, QuantError> {
        let count = element_count(ggml_type, bytes)?;
        Ok(match ggml_type {
            GgmlType::F64 => Self::F64(elements(bytes, f64::from_le_bytes).collect()),
            GgmlType::I8 => Self::I64(elements(bytes, i8::from_le_bytes).map(i64::from).collect()),
            GgmlType::I16 => Self::I64(elements(bytes, i16::from_le_bytes).map(i64::from).collect()),
            GgmlType::I32 => Self::I64(elements(bytes, i32::from_le_bytes).map(i64::from).collect()),
            GgmlType::I64 => Self::I64(elements(bytes, i64::from_le_bytes).collect()),
            _ => {
                let mut out = vec![0.0; count];
                blocks(ggml_type, bytes, &mut out);
                Self::F32(out)
            }
        })
    }

    pub const fn len(&self) -> usize {
        match self {
            Self::F32(values) => values.len(),
            Self::F64(values) => values.len(),
            Self::I64(values) => values.len(),
            Self::U64(values) => values.len(),
            Self::Complex(values) => values.len(),
        }
    }

    pub const fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Appends the numbers as `f64`, of complex numbers both parts. Only integers above 2^53 are rounded.
    #[expect(clippy::cast_precision_loss, reason = "rounding is documented")]
    pub fn append_to(&self, out: &mut Vec<f64>) {
        match self {
            Self::F32(values) => out.extend(values.iter().copied().map(f64::from)),
            Self::F64(values) => out.extend(values),
            Self::I64(values) => out.extend(values.iter().map(|value| *value as f64)),
            Self::U64(values) => out.extend(values.iter().map(|value| *value as f64)),
            Self::Complex(values) => out.extend(values.iter().flatten().copied().map(f64::from)),
        }
    }
}

pub(super) fn elements<const N: usize, T>(
    bytes: &[u8],
    value: impl Fn([u8; N]) -> T,
) -> impl Iterator<Item = T> {
    bytes.as_chunks().0.iter().map(move |element| value(*element))
}

#[expect(clippy::cast_possible_truncation, clippy::cast_precision_loss, reason = "rounding is documented")]
fn plain_numbers(ggml_type: GgmlType, bytes: &[u8], out: &mut [f32]) {
    match ggml_type {
        GgmlType::F64 => each(bytes, out, |bytes| f64::from_le_bytes(*bytes) as f32),
        GgmlType::I8 => each(bytes, out, |bytes| i8::from_le_bytes(*bytes).into()),
        GgmlType::I16 => each(bytes, out, |bytes| i16::from_le_bytes(*bytes).into()),
        GgmlType::I32 => each(bytes, out, |bytes| i32::from_le_bytes(*bytes) as f32),
        _ => each(bytes, out, |bytes| i64::from_le_bytes(*bytes) as f32),
    }
}

fn blocks(ggml_type: GgmlType, bytes: &[u8], out: &mut [f32]) {
    match ggml_type {
        GgmlType::F32 => each(bytes, out, |bytes| f32::from_le_bytes(*bytes)),
        GgmlType::F16 => each(bytes, out, |bytes| f32_of_f16(u16::from_le_bytes(*bytes))),
        GgmlType::BF16 => each(bytes, out, |bytes| f32_of_bf16(u16::from_le_bytes(*bytes))),
        GgmlType::Q4_0 => run(bytes, out, decode::q4_0),
        GgmlType::Q4_1 => run(bytes, out, decode::q4_1),
        GgmlType::Q5_0 => run(bytes, out, decode::q5_0),
        GgmlType::Q5_1 => run(bytes, out, decode::q5_1),
        GgmlType::Q8_0 => run(bytes, out, decode::q8_0),
        GgmlType::Q8_1 => run(bytes, out, decode::q8_1),
        GgmlType::Q2_K => run(bytes, out, decode::q2_k),
        GgmlType::Q3_K => run(bytes, out, decode::q3_k),
        GgmlType::Q4_K => run(bytes, out, decode::q4_k),
        GgmlType::Q5_K => run(bytes, out, decode::q5_k),
        GgmlType::Q6_K => run(bytes, out, decode::q6_k),
        GgmlType::Q8_K => run(bytes, out, decode::q8_k),
        GgmlType::IQ2_XXS => run(bytes, out, decode::iq2_xxs),
        GgmlType::IQ2_XS => run(bytes, out, decode::iq2_xs),
        GgmlType::IQ2_S => run(bytes, out, decode::iq2_s),
        GgmlType::IQ3_XXS => run(bytes, out, decode::iq3_xxs),
        GgmlType::IQ3_S => run(bytes, out, decode::iq3_s),
        GgmlType::IQ1_S => run(bytes, out, decode::iq1_s),
        GgmlType::IQ1_M => run(bytes, out, decode::iq1_m),
        GgmlType::IQ4_NL => run(bytes, out, decode::iq4_nl),
        GgmlType::IQ4_XS => run(bytes, out, decode::iq4_xs),
        GgmlType::TQ1_0 => run(bytes, out, decode::tq1_0),
        GgmlType::TQ2_0 => run(bytes, out, decode::tq2_0),
        GgmlType::MXFP4 => run(bytes, out, decode::mxfp4),
        GgmlType::MXFP4_OLLAMA => run(bytes, out, decode::mxfp4_ollama),
        GgmlType::NVFP4 => run(bytes, out, decode::nvfp4),
        GgmlType::Q1_0 => run(bytes, out, decode::q1_0),
        GgmlType::Q2_0 => run(bytes, out, decode::q2_0),
        // Unreachable: callers refuse types without a layout, and a test covers all others.
        _ => {}
    }
}

fn each<const N: usize>(bytes: &[u8], out: &mut [f32], value: impl Fn(&[u8; N]) -> f32) {
    for (slot, element) in out.iter_mut().zip(bytes.as_chunks().0) {
        *slot = value(element);
    }
}

fn run<const BYTES: usize, const ELEMENTS: usize>(
    bytes: &[u8],
    out: &mut [f32],
    decode: impl Fn(&[u8; BYTES], &mut [f32; ELEMENTS]),
) {
    for (out, block) in out.as_chunks_mut().0.iter_mut().zip(bytes.as_chunks().0) {
        decode(block, out);
    }
}
