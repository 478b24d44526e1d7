//! Conversion between the float types of weights.
//!
//! A value is rounded at most once: to nearest, ties to even. Overflow gives infinity; NaN stays NaN.

use crate::float::{bf16_of_f32, f16_of_f32, f32_of_bf16, f32_of_f16, f32_of_f64_to_odd};
use crate::float8::{f32_of_e4m3, f32_of_e4m3fnuz, f32_of_e5m2, f32_of_e5m2fnuz, f32_of_e8m0};
use blobd_store_format::safetensors::Dtype;

#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum ConvertError {
    #[error(
        "elements of {found} cannot be converted, only those of F64, F32, F16, BF16 and the types of 8 bits (F8)"
    )]
    Source { found: Dtype },
    #[error("elements cannot be converted to {found}, only to F64, F32, F16 and BF16")]
    Target { found: Dtype },
    #[error("{bytes} bytes are not a whole number of elements of {dtype}")]
    PartialElement { bytes: usize, dtype: Dtype },
}

/// Converts the elements of `bytes` from type `from` to type `to`.
///
/// `from` is `F64`, `F32`, `F16`, `BF16` or a float type of 8 bits; `to` is one of the first four.
pub fn convert(bytes: &[u8], from: Dtype, to: Dtype) -> Result<Vec<u8>, ConvertError> {
    match from {
        Dtype::F64 => write_f64(read::<8>(bytes, from)?.map(f64::from_le_bytes), to),
        Dtype::F32 => write(read::<4>(bytes, from)?.map(f32::from_le_bytes), to),
        Dtype::F16 => write(read::<2>(bytes, from)?.map(|half| f32_of_f16(u16::from_le_bytes(half))), to),
        Dtype::BF16 => write(read::<2>(bytes, from)?.map(|half| f32_of_bf16(u16::from_le_bytes(half))), to),
        Dtype::F8_E4M3 => write(bytes.iter().copied().map(f32_of_e4m3), to),
        Dtype::F8_E5M2 => write(bytes.iter().copied().map(f32_of_e5m2), to),
        Dtype::F8_E4M3FNUZ => write(bytes.iter().copied().map(f32_of_e4m3fnuz), to),
        Dtype::F8_E5M2FNUZ => write(bytes.iter().copied().map(f32_of_e5m2fnuz), to),
        Dtype::F8_E8M0 => write(bytes.iter().copied().map(f32_of_e8m0), to),
        found => Err(ConvertError::Source { found }),
    }
}

fn read<const N: usize>(bytes: &[u8], dtype: Dtype) -> Result<impl Iterator<Item = [u8; N]>, ConvertError> {
    match bytes.as_chunks::<N>() {
        (elements, []) => Ok(elements.iter().copied()),
        _ => Err(ConvertError::PartialElement { bytes: bytes.len(), dtype }),
    }
}

fn write(values: impl Iterator<Item = f32>, to: Dtype) -> Result<Vec<u8>, ConvertError> {
    match to {
        Dtype::F64 => Ok(values.flat_map(|value| f64::from(value).to_le_bytes()).collect()),
        Dtype::F32 => Ok(values.flat_map(f32::to_le_bytes).collect()),
        Dtype::F16 => Ok(values.flat_map(|value| f16_of_f32(value).to_le_bytes()).collect()),
        Dtype::BF16 => Ok(values.flat_map(|value| bf16_of_f32(value).to_le_bytes()).collect()),
        found => Err(ConvertError::Target { found }),
    }
}

fn write_f64(values: impl Iterator<Item = f64>, to: Dtype) -> Result<Vec<u8>, ConvertError> {
    match to {
        Dtype::F64 => Ok(values.flat_map(f64::to_le_bytes).collect()),
        #[expect(clippy::cast_possible_truncation, reason = "rounds to nearest, ties to even")]
        Dtype::F32 => Ok(values.flat_map(|value| (value as f32).to_le_bytes()).collect()),
        // After rounding to odd, the second rounding gives the same result as rounding once.
        _ => write(values.map(f32_of_f64_to_odd), to),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn types_without_a_conversion_are_refused_by_name() {
        for dtype in [Dtype::F4, Dtype::F6_E2M3, Dtype::F6_E3M2, Dtype::U32, Dtype::C64, Dtype::Bool] {
            assert_eq!(convert(&[0; 8], dtype, Dtype::F32), Err(ConvertError::Source { found: dtype }));
            assert_eq!(convert(&[0; 8], Dtype::F32, dtype), Err(ConvertError::Target { found: dtype }));
            assert_eq!(convert(&[0; 8], Dtype::F64, dtype), Err(ConvertError::Target { found: dtype }));
        }
        let text = ConvertError::Source { found: Dtype::F6_E2M3 }.to_string();
        assert!(text.starts_with("elements of F6_E2M3 cannot be converted"), "{text}");
    }

    #[test]
    fn part_of_an_element_is_refused() {
        for (dtype, bytes) in [(Dtype::F16, 3), (Dtype::BF16, 1), (Dtype::F32, 6), (Dtype::F64, 12)] {
            let error = convert(&vec![0; bytes], dtype, Dtype::F32).unwrap_err();
            assert_eq!(error, ConvertError::PartialElement { bytes, dtype });
        }
        assert_eq!(convert(&[], Dtype::F16, Dtype::F32), Ok(vec![]));
    }

    /// The number 1 in every type, as bytes.
    const ONE: [(Dtype, &[u8]); 9] = [
        (Dtype::F64, &[0, 0, 0, 0, 0, 0, 0xf0, 0x3f]),
        (Dtype::F32, &[0, 0, 0x80, 0x3f]),
        (Dtype::F16, &[0, 0x3c]),
        (Dtype::BF16, &[0x80, 0x3f]),
        (Dtype::F8_E4M3, &[0x38]),
        (Dtype::F8_E5M2, &[0x3c]),
        (Dtype::F8_E4M3FNUZ, &[0x40]),
        (Dtype::F8_E5M2FNUZ, &[0x40]),
        (Dtype::F8_E8M0, &[127]),
    ];

    #[test]
    fn every_type_is_converted_to_the_four_wide_types() {
        for (from, source) in ONE {
            for (to, expected) in &ONE[..4] {
                assert_eq!(convert(&source.repeat(3), from, *to), Ok(expected.repeat(3)), "{from} to {to}");
            }
        }
    }

    #[test]
    fn all_codes_of_8_bits_survive_a_conversion_through_bf16() {
        let codes: Vec<u8> = (0..=255).collect();
        for (from, _) in &ONE[4..] {
            let direct = convert(&codes, *from, Dtype::F64).unwrap();
            let narrow = convert(&codes, *from, Dtype::BF16).unwrap();
            assert_eq!(convert(&narrow, Dtype::BF16, Dtype::F64), Ok(direct), "{from}");
        }
    }

    /// Halves, ties between them, and their neighbours on both sides, as 64-bit floats.
    fn near_halves() -> impl Strategy<Value = f64> {
        (any::<u16>(), -2_i64..=2, any::<bool>()).prop_map(|(half, steps, tie)| {
            let (here, next) = (f64::from(f32_of_f16(half)), f64::from(f32_of_f16(half.wrapping_add(1))));
            let value = if tie && next.is_finite() { f64::midpoint(here, next) } else { here };
            if value.is_finite() {
                f64::from_bits(value.to_bits().saturating_add_signed(steps))
            } else {
                value
            }
        })
    }

    fn half_of(value: f64) -> u16 {
        let bytes = convert(&value.to_le_bytes(), Dtype::F64, Dtype::F16).unwrap();
        u16::from_le_bytes([bytes[0], bytes[1]])
    }

    #[test]
    fn wide_floats_are_rounded_once() {
        let tie = 1.0 + 1.0 / 2048.0;
        // As an f32, the sum would be the tie, which goes to even: down.
        assert_eq!([half_of(tie), half_of(tie + 1e-12), half_of(tie - 1e-12)], [0x3c00, 0x3c01, 0x3c00]);
        assert_eq!([half_of(1e300), half_of(-1e300), half_of(-1e-300)], [0x7c00, 0xfc00, 0x8000]);
        let single = |value: f64| convert(&value.to_le_bytes(), Dtype::F64, Dtype::F32).unwrap();
        assert_eq!(single(0.1), 0.1_f32.to_le_bytes());
        assert_eq!(single(1e300), f32::INFINITY.to_le_bytes());
    }

    proptest! {
        #[test]
        fn nearest_half_of_a_wide_float(value in near_halves()) {
            let half = half_of(value);
            let distance = |half: u16| (f64::from(f32_of_f16(half)) - value).abs();
            for neighbour in [half.wrapping_sub(1), half.wrapping_add(1)] {
                if f32_of_f16(half).is_finite() && f32_of_f16(neighbour).is_finite() {
                    let (near, far) = (distance(half), distance(neighbour));
                    prop_assert!(near < far || near == far && half & 1 == 0, "{value}: {half:#x}");
                }
            }
        }
    }
}
