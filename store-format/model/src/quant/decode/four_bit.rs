//! The types whose 4-bit quants select one of 16 values.

use super::{half, nibbles, split};

/// Source: `kvalues_iq4nl` of ggml.
const K4: [f32; 16] = [
    -127.0, -104.0, -83.0, -65.0, -49.0, -35.0, -22.0, -10.0, 1.0, 13.0, 25.0, 38.0, 53.0, 69.0, 89.0, 113.0,
];

/// Twice the values of the E2M1 format, without a negative zero. Source: `kvalues_mxfp4` of ggml.
const E2M1: [f32; 16] =
    [0.0, 1.0, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 0.0, -1.0, -2.0, -3.0, -4.0, -6.0, -8.0, -12.0];

pub(in crate::quant) fn iq4_nl(block: &[u8; 18], out: &mut [f32; 32]) {
    let (d, qs): (_, &[u8; 16]) = split(block);
    let values = scaled(half(*d), K4);
    nibbles(qs, out, |q| value_of(&values, q));
}

pub(in crate::quant) fn iq4_xs(block: &[u8; 136], out: &mut [f32; 256]) {
    let [d0, d1, upper0, upper1, rest @ ..] = block;
    let (lower, qs): (&[u8; 4], &[u8; 128]) = split(rest);
    let (d, mut upper) = (half([*d0, *d1]), u16::from_le_bytes([*upper0, *upper1]));
    let lower = lower.iter().flat_map(|byte| [byte & 15, byte >> 4]);
    for ((part, qs), lower) in out.as_chunks_mut::<32>().0.iter_mut().zip(qs.as_chunks::<16>().0).zip(lower) {
        let scale = u16::from(lower) | ((upper & 3) << 4);
        upper >>= 2;
        let values = scaled(d * (f32::from(scale) - 32.0), K4);
        nibbles(qs, part, |q| value_of(&values, q));
    }
}

pub(in crate::quant) fn mxfp4(block: &[u8; 17], out: &mut [f32; 32]) {
    let [exponent, qs @ ..] = block;
    let values = scaled(half_power_of_two(*exponent), E2M1);
    nibbles(qs, out, |q| value_of(&values, q));
}

/// Ollama's variant, with type ID 4: neighbouring elements share a byte.
pub(in crate::quant) fn mxfp4_ollama(block: &[u8; 17], out: &mut [f32; 32]) {
    let [exponent, qs @ ..] = block;
    let values = scaled(half_power_of_two(*exponent), E2M1);
    for (pair, byte) in out.as_chunks_mut().0.iter_mut().zip(qs) {
        *pair = [value_of(&values, byte & 15), value_of(&values, byte >> 4)];
    }
}

pub(in crate::quant) fn nvfp4(block: &[u8; 36], out: &mut [f32; 64]) {
    let (scales, qs): (&[u8; 4], &[u8; 32]) = split(block);
    let parts = out.as_chunks_mut::<16>().0.iter_mut().zip(qs.as_chunks::<8>().0);
    for ((part, qs), scale) in parts.zip(scales) {
        let values = scaled(half_of_ue4m3(*scale), E2M1);
        nibbles(qs, part, |q| value_of(&values, q));
    }
}

fn scaled(d: f32, values: [f32; 16]) -> [f32; 16] {
    values.map(|value| d * value)
}

fn value_of(values: &[f32; 16], q: u8) -> f32 {
    values[usize::from(q & 15)]
}

/// 2^(exponent - 127) / 2. The two smallest are subnormal.
fn half_power_of_two(exponent: u8) -> f32 {
    f32::from_bits(match exponent {
        0 | 1 => 0x0020_0000 << exponent,
        _ => u32::from(exponent - 1) << 23,
    })
}

/// Half of a number with 4 bits of exponent and 3 of mantissa. 0x7f is NaN in the format, and 0 in ggml;
/// the upper bit is ignored otherwise.
fn half_of_ue4m3(bits: u8) -> f32 {
    /// 2^-9: the smallest positive number.
    const STEP: f32 = 1.0 / 512.0;
    let (exponent, mantissa) = ((bits >> 3) & 15, f32::from(bits & 7));
    let value = match exponent {
        _ if bits == 0x7f => 0.0,
        0 => mantissa * STEP,
        _ => (1.0 + mantissa / 8.0) * f32::from_bits((u32::from(exponent) + 127 - 7) << 23),
    };
    value * 0.5
}
