//! The type of a tensor's elements: a ggml type, or an element type of safetensors.
//!
//! Sources of the values are those of [`crate::float8`], and for the types of 4 and 6 bits the OCP Microscaling
//! Formats Specification 1.0. No specification says how elements of 6 bits share bytes: blobd takes the first element
//! from the lowest bits, as PyTorch does for those of 4 bits (`float4_e2m1fn_x2`), and AMD's processors for those of 6.

use blobd_store_format::gguf::GgmlType;
use blobd_store_format::safetensors::Dtype;
use blobd_store_format::tensor::TensorFormat;

use super::block::BlockLayout;
use super::dequantize::{PIECE_ELEMENTS, element_count, elements, piece_bytes};
use super::{QuantError, Values};
use crate::float8::{
    f32_of_e2m1, f32_of_e2m3, f32_of_e3m2, f32_of_e4m3, f32_of_e4m3fnuz, f32_of_e5m2, f32_of_e5m2fnuz,
    f32_of_e8m0,
};

/// The type of a tensor's elements in either format.
///
/// ```
/// use blobd_model::quant::{ElementType, Values};
/// use blobd_store_format::tensor::TensorFormat;
///
/// let fp8 = ElementType::from_name(TensorFormat::Safetensors, "F8_E4M3").unwrap();
/// assert_eq!(fp8.values(&[0x38, 0xc0, 0x7e])?, Values::F32(vec![1.0, -2.0, 448.0]));
/// assert_eq!(ElementType::from_name(TensorFormat::Gguf, "F8_E4M3"), None);
/// # Ok::<(), blobd_model::quant::QuantError>(())
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ElementType {
    /// Also the eight types of safetensors that are ggml types too, such as `BF16`.
    Ggml(GgmlType),
    /// One of the other fourteen.
    Safetensors(Dtype),
}

impl From<GgmlType> for ElementType {
    fn from(ggml_type: GgmlType) -> Self {
        Self::Ggml(ggml_type)
    }
}

impl From<Dtype> for ElementType {
    fn from(dtype: Dtype) -> Self {
        Self::Ggml(match dtype {
            Dtype::F64 => GgmlType::F64,
            Dtype::F32 => GgmlType::F32,
            Dtype::F16 => GgmlType::F16,
            Dtype::BF16 => GgmlType::BF16,
            Dtype::I64 => GgmlType::I64,
            Dtype::I32 => GgmlType::I32,
            Dtype::I16 => GgmlType::I16,
            Dtype::I8 => GgmlType::I8,
            other => return Self::Safetensors(other),
        })
    }
}

impl ElementType {
    /// The type that a file of this format names so; `None` if it is unknown.
    pub fn from_name(format: TensorFormat, name: &str) -> Option<Self> {
        match format {
            TensorFormat::Safetensors => Dtype::from_name(name).map(Self::from),
            _ => GgmlType::from_name(name).map(Self::from),
        }
    }

    /// The elements and the bytes of the smallest unit that can be converted; `None` if the type has no known numbers.
    pub fn block(self) -> Option<(u64, u64)> {
        match self {
            Self::Ggml(ggml_type) => {
                BlockLayout::for_type(ggml_type).map(|layout| (layout.elements(), layout.bytes()))
            }
            Self::Safetensors(dtype) => Some(match dtype.bits() {
                4 => (2, 1),
                6 => (4, 3),
                bits => (1, bits / 8),
            }),
        }
    }

    /// The number of elements in `bytes`.
    pub fn element_count(self, bytes: &[u8]) -> Result<usize, QuantError> {
        match self {
            Self::Ggml(ggml_type) => element_count(ggml_type, bytes),
            Self::Safetensors(dtype) => {
                let (elements, size) = self.sizes(dtype, bytes)?;
                Ok((bytes.len() / size).saturating_mul(elements))
            }
        }
    }

    /// Cuts a tensor into pieces of whole blocks. For every type, a piece has 65,536 elements, and the last piece may
    /// have fewer.
    pub fn pieces(self, bytes: &[u8]) -> Result<impl Iterator<Item = &[u8]>, QuantError> {
        let size = match self {
            Self::Ggml(ggml_type) => piece_bytes(ggml_type, bytes)?,
            Self::Safetensors(dtype) => {
                let (elements, size) = self.sizes(dtype, bytes)?;
                PIECE_ELEMENTS / elements * size
            }
        };
        Ok(bytes.chunks(size))
    }

    /// Converts any whole number of blocks of little-endian data, without loss.
    pub fn values(self, bytes: &[u8]) -> Result<Values, QuantError> {
        match self {
            Self::Ggml(ggml_type) => Values::from_bytes(ggml_type, bytes),
            Self::Safetensors(dtype) => {
                self.sizes(dtype, bytes)?;
                Ok(values(dtype, bytes))
            }
        }
    }

    /// The elements and bytes of a block, if `bytes` are whole blocks.
    fn sizes(self, dtype: Dtype, bytes: &[u8]) -> Result<(usize, usize), QuantError> {
        let block = self.block().and_then(|(elements, size)| {
            Some((usize::try_from(elements).ok()?, usize::try_from(size).ok()?))
        });
        let partial = QuantError::PartialElement { dtype, found: bytes.len() };
        block.filter(|(_, size)| bytes.len().is_multiple_of(*size)).ok_or(partial)
    }
}

fn values(dtype: Dtype, bytes: &[u8]) -> Values {
    let codes = |value: fn(u8) -> f32| Values::F32(bytes.iter().copied().map(value).collect());
    match dtype {
        Dtype::Bool | Dtype::U8 => Values::I64(bytes.iter().copied().map(i64::from).collect()),
        Dtype::U16 => Values::I64(elements(bytes, u16::from_le_bytes).map(i64::from).collect()),
        Dtype::U32 => Values::I64(elements(bytes, u32::from_le_bytes).map(i64::from).collect()),
        Dtype::U64 => Values::U64(elements(bytes, u64::from_le_bytes).collect()),
        Dtype::C64 => Values::Complex(elements(bytes, complex).collect()),
        Dtype::F4 => {
            Values::F32(bytes.iter().flat_map(|byte| [byte & 15, byte >> 4]).map(f32_of_e2m1).collect())
        }
        Dtype::F6_E2M3 => Values::F32(six_bits(bytes).map(f32_of_e2m3).collect()),
        Dtype::F6_E3M2 => Values::F32(six_bits(bytes).map(f32_of_e3m2).collect()),
        Dtype::F8_E4M3 => codes(f32_of_e4m3),
        Dtype::F8_E5M2 => codes(f32_of_e5m2),
        Dtype::F8_E4M3FNUZ => codes(f32_of_e4m3fnuz),
        Dtype::F8_E5M2FNUZ => codes(f32_of_e5m2fnuz),
        Dtype::F8_E8M0 => codes(f32_of_e8m0),
        // Unreachable: the others are ggml types, and a test covers all.
        _ => Values::F32(Vec::new()),
    }
}

fn complex(bytes: [u8; 8]) -> [f32; 2] {
    let [a, b, c, d, e, f, g, h] = bytes;
    [f32::from_le_bytes([a, b, c, d]), f32::from_le_bytes([e, f, g, h])]
}

/// Four codes in three bytes, the first in the lowest bits.
fn six_bits(bytes: &[u8]) -> impl Iterator<Item = u8> {
    elements(bytes, |[a, b, c]: [u8; 3]| {
        [a & 63, (a >> 6) | ((b & 15) << 2), (b >> 4) | ((c & 3) << 4), c >> 2]
    })
    .flatten()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The values of every code of the small floats, as computed by PyPI's `ml_dtypes`: the upper halves of the `f32`
    /// numbers, whose lower halves are 0.
    const ML_DTYPES: &str = include_str!("element_type/ml_dtypes.txt");

    fn of_ml_dtypes(name: &str) -> Vec<Option<u32>> {
        let lines = ML_DTYPES.lines().skip_while(|line| *line != name).skip(1);
        let lines = lines.take_while(|line| line.len() > 16);
        let words = lines.flat_map(str::split_whitespace);
        words.map(|word| u32::from_str_radix(word, 16).ok().map(|upper| upper << 16)).collect()
    }

    /// All codes of a type, packed as in a file.
    fn all_codes(dtype: Dtype) -> Vec<u8> {
        match dtype.bits() {
            4 => (0..8).map(|pair| (pair * 2) | ((pair * 2 + 1) << 4)).collect(),
            6 => (0..16_u32)
                .flat_map(|four| {
                    let bits = (0..4).fold(0_u32, |bits, place| bits | ((four * 4 + place) << (6 * place)));
                    bits.to_le_bytes()[..3].to_vec()
                })
                .collect(),
            _ => (0..=255).collect(),
        }
    }

    #[test]
    fn small_floats_have_the_values_of_ml_dtypes() {
        for dtype in [
            Dtype::F4,
            Dtype::F6_E2M3,
            Dtype::F6_E3M2,
            Dtype::F8_E4M3,
            Dtype::F8_E5M2,
            Dtype::F8_E4M3FNUZ,
            Dtype::F8_E5M2FNUZ,
            Dtype::F8_E8M0,
        ] {
            let expected = of_ml_dtypes(dtype.name());
            let Values::F32(found) = ElementType::from(dtype).values(&all_codes(dtype)).unwrap() else {
                panic!("{dtype}: no floats");
            };
            assert_eq!((expected.len(), found.len()), (1 << dtype.bits(), 1 << dtype.bits()), "{dtype}");
            for (code, (expected, found)) in expected.iter().zip(&found).enumerate() {
                let found = (!found.is_nan()).then_some(found.to_bits());
                assert_eq!(found, *expected, "{dtype} {code:#x}");
            }
        }
    }

    #[test]
    fn integers_and_complex_numbers_are_exact() {
        let values = |dtype: Dtype, bytes: &[u8]| ElementType::from(dtype).values(bytes).unwrap();
        assert_eq!(values(Dtype::Bool, &[0, 1]), Values::I64(vec![0, 1]));
        assert_eq!(values(Dtype::U8, &[0, 255]), Values::I64(vec![0, 255]));
        assert_eq!(values(Dtype::U16, &[1, 0, 255, 255]), Values::I64(vec![1, 65_535]));
        assert_eq!(values(Dtype::U32, &[255; 4]), Values::I64(vec![4_294_967_295]));
        assert_eq!(values(Dtype::U64, &[255; 8]), Values::U64(vec![u64::MAX]));
        let parts = [1.5_f32.to_le_bytes(), (-2.0_f32).to_le_bytes()].concat();
        assert_eq!(values(Dtype::C64, &parts), Values::Complex(vec![[1.5, -2.0]]));
        let mut numbers = Vec::new();
        values(Dtype::C64, &parts).append_to(&mut numbers);
        assert_eq!(numbers, [1.5, -2.0], "both parts");
    }

    #[test]
    fn every_type_has_numbers_and_pieces_of_whole_blocks() {
        for name in
            ("BOOL F4 F6_E2M3 F6_E3M2 U8 I8 F8_E5M2 F8_E4M3 F8_E8M0 F8_E4M3FNUZ F8_E5M2FNUZ I16 U16 F16 BF16 \
                      I32 U32 F32 C64 F64 I64 U64")
                .split(' ')
        {
            let element_type = ElementType::from_name(TensorFormat::Safetensors, name).unwrap();
            let (elements, size) = element_type.block().unwrap();
            let blocks = 70_000 / usize::try_from(elements).unwrap();
            let bytes = vec![0; blocks * usize::try_from(size).unwrap()];
            assert_eq!(element_type.element_count(&bytes), Ok(70_000), "{name}");
            let lengths: Vec<usize> = element_type
                .pieces(&bytes)
                .unwrap()
                .map(|piece| element_type.values(piece).unwrap().len())
                .collect();
            assert_eq!(lengths, [65_536, 4_464], "{name}");
        }
    }

    #[test]
    fn partial_elements_and_types_of_the_other_format_are_refused() {
        for (dtype, found) in [(Dtype::F6_E2M3, 4), (Dtype::U16, 3), (Dtype::C64, 4), (Dtype::U64, 9)] {
            let element_type = ElementType::from(dtype);
            let error = QuantError::PartialElement { dtype, found };
            assert_eq!(element_type.values(&vec![0; found]), Err(error.clone()));
            assert_eq!(element_type.element_count(&vec![0; found]), Err(error.clone()));
            assert_eq!(element_type.pieces(&vec![0; found]).err(), Some(error));
        }
        assert_eq!(ElementType::from_name(TensorFormat::Gguf, "U8"), None);
        assert_eq!(ElementType::from_name(TensorFormat::Safetensors, "Q8_0"), None);
    }
}
