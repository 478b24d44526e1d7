//! Conversion between the three float types of weights.
//!
//! Conversion goes through `F32`, which contains all values of the other two, so a value is rounded
//! at most once: to nearest, ties to even. Overflow gives infinity; NaN stays NaN.

use super::Dtype;
use crate::float::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16};

/// Converts the elements of `bytes` from type `from` to type `to`.
///
/// `None` if one of the types is not [convertible](Dtype::is_convertible), or if `bytes` is not a
/// whole number of elements.
#[must_use]
pub fn convert(bytes: &[u8], from: Dtype, to: Dtype) -> Option<Vec<u8>> {
    match from {
        Dtype::F32 => write(read::<4>(bytes)?.map(f32::from_le_bytes), to),
        Dtype::F16 => write(read::<2>(bytes)?.map(|half| f32_of_f16(u16::from_le_bytes(half))), to),
        Dtype::BF16 => write(read::<2>(bytes)?.map(|half| f32_of_bf16(u16::from_le_bytes(half))), to),
        _ => None,
    }
}

fn read<const N: usize>(bytes: &[u8]) -> Option<impl Iterator<Item = [u8; N]>> {
    let (elements, rest) = bytes.as_chunks::<N>();
    rest.is_empty().then(|| elements.iter().copied())
}

fn write(values: impl Iterator<Item = f32>, to: Dtype) -> Option<Vec<u8>> {
    match to {
        Dtype::F32 => Some(values.flat_map(f32::to_le_bytes).collect()),
        Dtype::F16 => Some(values.flat_map(|value| f16_of_f32(value).to_le_bytes()).collect()),
        Dtype::BF16 => Some(values.flat_map(|value| bf16_of_f32(value).to_le_bytes()).collect()),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn other_types_and_broken_elements_are_refused() {
        assert_eq!(convert(&[0; 4], Dtype::U32, Dtype::F32), None);
        assert_eq!(convert(&[0; 4], Dtype::F32, Dtype::F64), None);
        assert_eq!(convert(&[0; 3], Dtype::F16, Dtype::F32), None);
        assert_eq!(convert(&[], Dtype::F16, Dtype::F32), Some(vec![]));
        assert_eq!(convert(&[0x80, 0x3f], Dtype::BF16, Dtype::F16), Some(vec![0x00, 0x3c]));
    }
}
