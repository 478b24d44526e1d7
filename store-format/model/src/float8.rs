//! The float types of 8 bits and fewer, converted to `f32`, which contains all their values.
//!
//! Sources: OCP 8-bit Floating Point Specification (E4M3, E5M2), OCP Microscaling Formats Specification
//! 1.0 (E2M1, E2M3, E3M2, E8M0), and for the `FNUZ` types "8-bit Numerical Formats for Deep Neural Networks",
//! <https://arxiv.org/abs/2206.02915>. `FNUZ` stands for finite, NaN, unsigned zero: there is no infinity, and the
//! code of negative zero is the only NaN.

use crate::float::f32_of_f16;

/// This type has no infinity; the largest magnitude of either sign is NaN.
pub(crate) fn f32_of_e4m3(code: u8) -> f32 {
    if code & 0x7f == 0x7f { f32::NAN } else { finite(code, 3, 7) }
}

/// The code is the upper half of an `f16`.
pub(crate) fn f32_of_e5m2(code: u8) -> f32 {
    f32_of_f16(u16::from(code) << 8)
}

pub(crate) fn f32_of_e4m3fnuz(code: u8) -> f32 {
    if code == FNUZ_NAN { f32::NAN } else { finite(code, 3, 8) }
}

pub(crate) fn f32_of_e5m2fnuz(code: u8) -> f32 {
    if code == FNUZ_NAN { f32::NAN } else { finite(code, 2, 16) }
}

/// Four bits: a sign, two bits of exponent and one of mantissa. The upper bits of the code are ignored.
pub(crate) fn f32_of_e2m1(code: u8) -> f32 {
    const MAGNITUDES: [f32; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
    let magnitude = MAGNITUDES.get(usize::from(code & 7)).copied().unwrap_or_default();
    if code & 8 == 0 { magnitude } else { -magnitude }
}

/// Six bits: a sign, two bits of exponent and three of mantissa. The upper bits of the code are ignored.
pub(crate) fn f32_of_e2m3(code: u8) -> f32 {
    finite(of_six_bits(code), 3, 1)
}

/// Six bits: a sign, three bits of exponent and two of mantissa. The upper bits of the code are ignored.
pub(crate) fn f32_of_e3m2(code: u8) -> f32 {
    finite(of_six_bits(code), 2, 3)
}

/// The code with its sign in the uppermost bit.
const fn of_six_bits(code: u8) -> u8 {
    ((code & 0x20) << 2) | (code & 0x1f)
}

/// A power of two, 2^(code - 127), without sign; the largest code is NaN.
pub(crate) fn f32_of_e8m0(code: u8) -> f32 {
    match code {
        // 2^-127 is subnormal.
        0 => f32::from_bits(0x0040_0000),
        255 => f32::NAN,
        _ => power_of_two(u32::from(code)),
    }
}

const FNUZ_NAN: u8 = 0x80;

/// The value of a code of a sign, an exponent with this bias, and a mantissa of `mantissa_bits`.
fn finite(code: u8, mantissa_bits: u32, bias: u32) -> f32 {
    let sign = u32::from(code >> 7) << 31;
    let magnitude = u32::from(code & 0x7f) << (23 - mantissa_bits);
    // Exponent and mantissa are placed as in an `f32`, but with another bias, which the product corrects exactly, even
    // for subnormal numbers.
    f32::from_bits(sign | magnitude) * power_of_two(127 + (127 - bias))
}

/// 2^(exponent - 127); `exponent` is 1 to 254.
const fn power_of_two(exponent: u32) -> f32 {
    f32::from_bits(exponent << 23)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The value of a code by the definition of such types; `None` stands for NaN.
    struct Definition {
        mantissa_bits: i32,
        bias: i32,
        value_of: fn(u8) -> f32,
        infinities: &'static [u8],
        nans: &'static [u8],
    }

    const DEFINITIONS: [Definition; 4] = [
        Definition { mantissa_bits: 3, bias: 7, value_of: f32_of_e4m3, infinities: &[], nans: &[0x7f, 0xff] },
        Definition {
            mantissa_bits: 2,
            bias: 15,
            value_of: f32_of_e5m2,
            infinities: &[0x7c, 0xfc],
            nans: &[0x7d, 0x7e, 0x7f, 0xfd, 0xfe, 0xff],
        },
        Definition { mantissa_bits: 3, bias: 8, value_of: f32_of_e4m3fnuz, infinities: &[], nans: &[0x80] },
        Definition { mantissa_bits: 2, bias: 16, value_of: f32_of_e5m2fnuz, infinities: &[], nans: &[0x80] },
    ];

    #[test]
    fn every_code_has_the_value_of_its_definition() {
        for Definition { mantissa_bits, bias, value_of, infinities, nans } in DEFINITIONS {
            for code in 0..=u8::MAX {
                let found = value_of(code);
                let sign = if code >= 0x80 { -1.0 } else { 1.0 };
                if nans.contains(&code) {
                    assert!(found.is_nan(), "{code:#x}: {found}");
                    continue;
                }
                let expected = if infinities.contains(&code) {
                    sign * f64::INFINITY
                } else {
                    let steps = f64::from(1 << mantissa_bits);
                    let exponent = i32::from(code & 0x7f) >> mantissa_bits;
                    let fraction = f64::from(i32::from(code) % (1 << mantissa_bits)) / steps;
                    match exponent {
                        0 => sign * fraction * 2_f64.powi(1 - bias),
                        _ => sign * (1.0 + fraction) * 2_f64.powi(exponent - bias),
                    }
                };
                assert_eq!(f64::from(found).to_bits(), expected.to_bits(), "{code:#x} of bias {bias}");
            }
        }
    }

    /// The largest, the smallest normal and the smallest number, as the specifications list them.
    #[test]
    fn limits_are_those_of_the_specifications() {
        let values = |value_of: fn(u8) -> f32, codes: [u8; 3]| codes.map(value_of);
        assert_eq!(values(f32_of_e4m3, [0x7e, 0x08, 0x01]), [448.0, 0.015_625, 0.001_953_125]);
        assert_eq!(values(f32_of_e5m2, [0x7b, 0x04, 0x01]), [57_344.0, 6.103_515_6e-5, 1.525_878_9e-5]);
        assert_eq!(values(f32_of_e4m3fnuz, [0x7f, 0x08, 0x01]), [240.0, 0.007_812_5, 0.000_976_562_5]);
        assert_eq!(values(f32_of_e5m2fnuz, [0x7f, 0x04, 0x01]), [57_344.0, 3.051_757_8e-5, 7.629_394_5e-6]);
        assert_eq!(values(f32_of_e8m0, [0, 127, 254]), [5.877_472e-39, 1.0, 1.701_411_8e38]);
    }

    #[test]
    fn every_scale_is_a_power_of_two() {
        for code in 0..=254 {
            let expected = 2_f64.powi(i32::from(code) - 127);
            assert_eq!(f64::from(f32_of_e8m0(code)).to_bits(), expected.to_bits(), "{code}");
        }
        assert!(f32_of_e8m0(255).is_nan());
    }
}
