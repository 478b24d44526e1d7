//! Conversion between the 16-bit float types and `f32`, and from `f64` through `f32`.
//!
//! `f32` contains all values of both, so a value is rounded at most once: to nearest, ties to even.
//! Overflow gives infinity; NaN stays NaN.

pub(crate) fn f32_of_bf16(half: u16) -> f32 {
    f32::from_bits(u32::from(half) << 16)
}

pub(crate) fn bf16_of_f32(value: f32) -> u16 {
    const QUIET: u16 = 0x0040;
    let bits = value.to_bits();
    let upper = upper_half(bits);
    if value.is_nan() {
        // If only the lower half of the mantissa is set, truncation would give infinity.
        return upper | QUIET;
    }
    upper_half(bits.wrapping_add(0x7fff + u32::from(upper & 1)))
}

fn upper_half(bits: u32) -> u16 {
    let [_, _, low, high] = bits.to_le_bytes();
    u16::from_le_bytes([low, high])
}

fn lower_half(bits: u32) -> u16 {
    let [low, high, ..] = bits.to_le_bytes();
    u16::from_le_bytes([low, high])
}

/// Computes all cases and selects one without branches, so that the compiler can vectorise loops.
pub(crate) fn f32_of_f16(half: u16) -> f32 {
    /// The difference of the exponents' biases.
    const REBIASED: u32 = (127 - 15) << 23;
    /// 2^-14 as bits: the scale of numbers without an implicit leading bit.
    const SUBNORMAL: u32 = REBIASED + (1 << 23);
    let (sign, rest) = (u32::from(half >> 15) << 31, u32::from(half & 0x7fff));
    let shifted = rest << 13;
    let subnormal = (f32::from_bits(shifted.wrapping_add(SUBNORMAL)) - f32::from_bits(SUBNORMAL)).to_bits();
    let finite = if rest < 0x400 { subnormal } else { shifted.wrapping_add(REBIASED) };
    f32::from_bits(sign | if rest < 0x7c00 { finite } else { shifted | 0x7f80_0000 })
}

pub(crate) fn f16_of_f32(value: f32) -> u16 {
    const INFINITE: u16 = 0x7c00;
    const QUIET: u16 = 0x0200;
    let bits = value.to_bits();
    let sign = upper_half(bits) & 0x8000;
    let (exponent, mantissa) = ((bits >> 23) & 255, bits & 0x007f_ffff);
    let magnitude = match exponent {
        255 if mantissa != 0 => INFINITE | QUIET | lower_half(mantissa >> 13),
        143.. => INFINITE,
        // A carry out of the rounded mantissa correctly increments the exponent.
        113.. => lower_half(rounded(((exponent - 112) << 23) | mantissa, 13)),
        102.. => lower_half(rounded(mantissa | 0x0080_0000, 126 - exponent)),
        _ => 0,
    };
    sign | magnitude
}

/// Rounds toward zero, and sets the last bit of an inexact result. Rounding again to a type with at least two bits
/// fewer then gives the same result as rounding once, because no number becomes a tie.
pub(crate) fn f32_of_f64_to_odd(value: f64) -> f32 {
    #[expect(clippy::cast_possible_truncation, reason = "what is lost is looked at below")]
    let nearest = value as f32;
    let back = f64::from(nearest);
    if value.is_nan() || back == value {
        return nearest;
    }
    // The next smaller magnitude of a float is that of the next smaller integer; of infinity, the largest.
    let away_from_zero = u32::from(back.abs() > value.abs());
    f32::from_bits(nearest.to_bits().saturating_sub(away_from_zero) | 1)
}

/// `number / 2^shift`, rounded to nearest, ties to even; `shift` is 1 to 24.
fn rounded(number: u32, shift: u32) -> u32 {
    let (whole, half) = (number >> shift, 1_u32 << (shift - 1));
    let rest = number & ((half << 1) - 1);
    whole + u32::from(rest > half || (rest == half && whole & 1 == 1))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn known_numbers_of_half_precision() {
        for (value, half) in [
            (0.0, 0x0000),
            (-0.0, 0x8000),
            (1.0, 0x3c00),
            (-2.0, 0xc000),
            (65504.0, 0x7bff),
            (65519.9, 0x7bff),
            (65520.0, 0x7c00),
            (1e30, 0x7c00),
            (f32::INFINITY, 0x7c00),
            (f32::NEG_INFINITY, 0xfc00),
            (f32::NAN, 0x7e00),
            (6.103_515_6e-5, 0x0400),
            (5.960_464_5e-8, 0x0001),
            (2.980_232_2e-8, 0x0000),
            (2.980_232_6e-8, 0x0001),
            (1e-30, 0x0000),
            (1.000_488_3, 0x3c00),
            (1.001_464_8, 0x3c02),
        ] {
            assert_eq!(f16_of_f32(value), half, "{value}");
        }
        assert_eq!(f32_of_f16(0x3555).to_bits(), 0.333_251_95_f32.to_bits());
    }

    #[test]
    fn every_half_round_trips_through_f32() {
        for half in 0..=u16::MAX {
            for (wide, back) in
                [(f32_of_f16(half), f16_of_f32 as fn(f32) -> u16), (f32_of_bf16(half), bf16_of_f32)]
            {
                let again = back(wide);
                assert!(again == half || wide.is_nan() && again & 0x8000 == half & 0x8000, "{half:#x}");
            }
        }
        assert!(f32_of_f16(f16_of_f32(f32::NAN)).is_nan());
        // NaN with only the lowest mantissa bit set.
        assert!(f32_of_bf16(bf16_of_f32(f32::from_bits(0x7f80_0001))).is_nan());
        assert!(f32_of_f16(f16_of_f32(f32::from_bits(0xff80_0001))).is_nan());
    }

    #[test]
    fn bf16_ties_round_to_even() {
        let bf16 = |bits| bf16_of_f32(f32::from_bits(bits));
        assert_eq!([bf16(0x3f80_8000), bf16(0x3f81_8000)], [0x3f80, 0x3f82]);
        assert_eq!([bf16(0x3f80_8001), bf16(0x3f80_7fff)], [0x3f81, 0x3f80]);
        assert_eq!(bf16_of_f32(f32::MAX), 0x7f80, "too large is infinite");
    }

    proptest! {
        #[test]
        fn rounding_takes_the_nearest_half(value in -70_000.0_f32..70_000.0) {
            let half = f16_of_f32(value);
            let distance = |half: u16| (f64::from(f32_of_f16(half)) - f64::from(value)).abs();
            for neighbour in [half.wrapping_sub(1), half.wrapping_add(1)] {
                let both = f32_of_f16(half).is_finite() && f32_of_f16(neighbour).is_finite();
                prop_assert!(!both || distance(half) <= distance(neighbour));
            }
        }
    }
}
