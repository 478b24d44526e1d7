//! Decodes quantised tensors with separate scales.
//!
//! A row is packed into numbers of 32 bits, the first element in the lowest bits. `int4` and `int8` are unsigned
//! codes: an element is code × scale + bias. `nvfp4` and `mxfp4` are E2M1 codes and `mxfp8` E4M3 codes: an
//! element is its value × scale, and for `nvfp4` also × the global scale, if there is one. The scales of `nvfp4`
//! are E4M3, those of `mxfp4` and `mxfp8` E8M0; those of `int4` and `int8` are ordinary floats.
//!
//! Source: MLX's `quantize`, with the modes `affine`, `nvfp4`, `mxfp4` and `mxfp8`.

use std::ops::Range;

use super::Quantization;
use crate::convert::convert;
use crate::float8::{f32_of_e2m1, f32_of_e4m3, f32_of_e8m0};
use blobd_store_format::safetensors::Dtype;

/// A quantised tensor with its parts.
#[derive(Clone, Copy, Debug)]
pub struct PackedTensor<'b> {
    elements: &'b [u8],
    scales: Part<'b>,
    biases: Option<Part<'b>>,
    global_scale: f32,
    code: Code,
    group_size: u64,
}

/// The scales or biases of a tensor.
#[derive(Clone, Copy, Debug)]
pub struct Part<'b> {
    pub bytes: &'b [u8],
    pub dtype: Dtype,
}

/// The meaning of a type's codes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Code {
    Int4,
    Int8,
    NvFp4,
    MxFp4,
    MxFp8,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum UnpackError {
    #[error("quantisation {name}: its numbers are not known")]
    UnknownType { name: String },
    #[error(
        "the tensor has {elements} elements in groups of {group_size}, which needs {expected} {what}, found {found}"
    )]
    Count { elements: u64, group_size: u64, what: &'static str, expected: u64, found: u64 },
    #[error("its {what} have type {}, which has no known numbers", dtype.name())]
    PartType { what: &'static str, dtype: Dtype },
}

impl<'b> PackedTensor<'b> {
    /// Checks that the parts belong together.
    pub fn new(
        quantization: &Quantization,
        elements: &'b [u8],
        scales: Part<'b>,
        biases: Option<Part<'b>>,
        global_scale: Option<f32>,
    ) -> Result<Self, UnpackError> {
        let code = Code::for_quantization(quantization)?;
        let group_size = u64::from(quantization.group_size.unwrap_or_default());
        let packed =
            Self { elements, scales, biases, global_scale: global_scale.unwrap_or(1.0), code, group_size };
        let expected = packed.len().checked_div(group_size).unwrap_or(0);
        for (what, part) in [("scales", Some(scales)), ("biases", biases)] {
            let Some(part) = part else { continue };
            let is_float = part.dtype.is_float() && part.dtype.bits() >= 8;
            if !(is_float || what == "scales" && part.dtype == Dtype::U8 && code.has_byte_scales()) {
                return Err(UnpackError::PartType { what, dtype: part.dtype });
            }
            let found = part.count();
            if group_size == 0 || found != expected || !packed.len().is_multiple_of(group_size) {
                let elements = packed.len();
                return Err(UnpackError::Count { elements, group_size, what, expected, found });
            }
        }
        Ok(packed)
    }

    pub const fn len(&self) -> u64 {
        let bytes = self.elements.len() as u64;
        match self.code.bits() {
            4 => bytes.saturating_mul(2),
            _ => bytes,
        }
    }

    pub const fn is_empty(&self) -> bool {
        self.elements.is_empty()
    }

    /// The elements in this range of positions, in the order of the file. The range is cut at the end of the tensor.
    pub fn unpack(&self, range: Range<u64>) -> Vec<f32> {
        (range.start..range.end.min(self.len())).map_while(|place| self.element(place)).collect()
    }

    fn element(&self, place: u64) -> Option<f32> {
        let group = place.checked_div(self.group_size)?;
        let scale = self.scale(group)? * self.global_scale;
        let value = self.code.value(self.code_at(place)?);
        match &self.biases {
            Some(biases) => Some(value * scale + biases.number(group)?),
            None => Some(value * scale),
        }
    }

    fn code_at(&self, place: u64) -> Option<u8> {
        let byte = |place: u64| self.elements.get(usize::try_from(place).ok()?).copied();
        match self.code.bits() {
            4 => byte(place / 2).map(|byte| if place.is_multiple_of(2) { byte & 0x0f } else { byte >> 4 }),
            _ => byte(place),
        }
    }

    fn scale(&self, group: u64) -> Option<f32> {
        let byte = || self.scales.bytes.get(usize::try_from(group).ok()?).copied();
        match (self.code, self.scales.dtype) {
            // Ollama stores both kinds of byte scales as `U8`.
            (Code::NvFp4, Dtype::U8 | Dtype::F8_E4M3) => byte().map(f32_of_e4m3),
            (Code::MxFp4 | Code::MxFp8, Dtype::U8 | Dtype::F8_E8M0) => byte().map(f32_of_e8m0),
            _ => self.scales.number(group),
        }
    }
}

impl Part<'_> {
    fn count(&self) -> u64 {
        (self.bytes.len() as u64).saturating_mul(8).checked_div(self.dtype.bits()).unwrap_or(0)
    }

    fn number(&self, place: u64) -> Option<f32> {
        let size = self.dtype.bits() / 8;
        let start = usize::try_from(place.checked_mul(size)?).ok()?;
        let bytes = self.bytes.get(start..start.checked_add(usize::try_from(size).ok()?)?)?;
        let converted = convert(bytes, self.dtype, Dtype::F32).ok()?;
        converted.as_slice().try_into().ok().map(f32::from_le_bytes)
    }
}

impl Code {
    fn for_quantization(quantization: &Quantization) -> Result<Self, UnpackError> {
        let name = quantization.quant_type.clone().unwrap_or_default();
        Ok(match name.to_ascii_lowercase().as_str() {
            "int4" | "q4" | "fp4" => Self::Int4,
            "int8" | "q8" | "fp8" => Self::Int8,
            "nvfp4" => Self::NvFp4,
            "mxfp4" => Self::MxFp4,
            "mxfp8" => Self::MxFp8,
            _ => return Err(UnpackError::UnknownType { name }),
        })
    }

    const fn bits(self) -> u64 {
        match self {
            Self::Int8 | Self::MxFp8 => 8,
            Self::Int4 | Self::NvFp4 | Self::MxFp4 => 4,
        }
    }

    const fn has_byte_scales(self) -> bool {
        matches!(self, Self::NvFp4 | Self::MxFp4 | Self::MxFp8)
    }

    fn value(self, code: u8) -> f32 {
        match self {
            Self::Int4 | Self::Int8 => f32::from(code),
            Self::NvFp4 | Self::MxFp4 => f32_of_e2m1(code),
            Self::MxFp8 => f32_of_e4m3(code),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn quantization(name: &str, group_size: u32) -> Quantization {
        Quantization { quant_type: Some(name.to_owned()), group_size: Some(group_size) }
    }

    fn floats(numbers: &[f32]) -> Vec<u8> {
        numbers.iter().flat_map(|number| number.to_le_bytes()).collect()
    }

    #[test]
    fn integers_have_a_scale_and_a_bias_per_group() {
        let (scales, biases) = (floats(&[0.5, 2.0]), floats(&[-1.0, 0.25]));
        let part = |bytes| Part { bytes, dtype: Dtype::F32 };
        // The first element is in the lowest bits.
        let elements: Vec<u8> =
            [0x7654_3210_u32, 0xfedc_ba98].iter().flat_map(|word| word.to_le_bytes()).collect();
        let packed =
            PackedTensor::new(&quantization("INT4", 8), &elements, part(&scales), Some(part(&biases)), None);
        let packed = packed.unwrap();
        assert_eq!(packed.len(), 16);
        let first: Vec<f32> = (0..8).map(|code| code as f32 * 0.5 - 1.0).collect();
        let second: Vec<f32> = (8..16).map(|code| code as f32 * 2.0 + 0.25).collect();
        assert_eq!(packed.unpack(0..99), [first, second].concat());
        assert_eq!(packed.unpack(7..9), [2.5, 16.25]);
        let bytes =
            PackedTensor::new(&quantization("int8", 4), &elements, part(&scales), Some(part(&biases)), None);
        assert_eq!(
            bytes.unwrap().unpack(4..6),
            [f32::from(0x98_u8) * 2.0 + 0.25, f32::from(0xba_u8) * 2.0 + 0.25]
        );
    }

    #[test]
    fn float_codes_have_scales_of_one_byte() {
        let elements: Vec<u8> = (0..8).map(|pair| (pair * 2) | ((pair * 2 + 1) << 4)).collect();
        let e2m1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];
        let scale = |bytes| Part { bytes, dtype: Dtype::U8 };
        let nv = PackedTensor::new(&quantization("nvfp4", 16), &elements, scale(&[0x40]), None, Some(0.5))
            .unwrap();
        // E4M3: 0x40 is 2.
        assert_eq!(nv.unpack(0..16), e2m1.map(|value| value * 2.0 * 0.5));
        let doubled = [&elements[..], &elements].concat();
        let mx = PackedTensor::new(&quantization("mxfp4", 32), &doubled, scale(&[128]), None, None).unwrap();
        // E8M0: 128 is 2.
        assert_eq!(mx.unpack(16..32), e2m1.map(|value| value * 2.0));
        let eight =
            PackedTensor::new(&quantization("mxfp8", 32), &[0x38; 32], scale(&[126]), None, None).unwrap();
        assert_eq!(eight.unpack(0..32), [0.5; 32]);
    }

    #[test]
    fn parts_that_do_not_belong_to_the_tensor_are_refused() {
        let scales = floats(&[1.0; 4]);
        let new = |name: &str, size, elements: &[u8], dtype| {
            let scales = Part { bytes: &scales, dtype };
            PackedTensor::new(&quantization(name, size), elements, scales, None, None)
                .map(|packed| packed.len())
        };
        assert_eq!(new("int4", 8, &[0; 16], Dtype::F32), Ok(32));
        assert!(matches!(new("int5", 8, &[0; 16], Dtype::F32), Err(UnpackError::UnknownType { .. })));
        assert!(matches!(new("int4", 0, &[0; 16], Dtype::F32), Err(UnpackError::Count { .. })));
        let error = new("int4", 16, &[0; 16], Dtype::F32).unwrap_err();
        assert!(error.to_string().contains("needs 2 scales, found 4"), "{error}");
        assert!(matches!(new("int4", 7, &[0; 14], Dtype::F32), Ok(28)));
        assert!(matches!(new("int4", 8, &[0; 16], Dtype::U8), Err(UnpackError::PartType { .. })));
        assert!(matches!(new("int4", 8, &[0; 16], Dtype::I32), Err(UnpackError::PartType { .. })));
        assert!(new("int8", 8, &[], Dtype::F32).is_err());
    }
}
