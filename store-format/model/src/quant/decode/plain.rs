//! The types without codebooks of several elements and without the nested scales of the K types: the first ones with
//! blocks of 32, those whose 4 bits select one of 16 values, and those of one or two bits or a ternary digit.

use super::{half, nibbles, split, spread};

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

pub(in crate::quant) fn q4_0(block: &[u8; 18], out: &mut [f32; 32]) {
    let (d, qs): (_, &[u8; 16]) = split(block);
    let d = half(*d);
    nibbles(qs, out, |q| d * (f32::from(q) - 8.0));
}

pub(in crate::quant) fn q4_1(block: &[u8; 20], out: &mut [f32; 32]) {
    let [d0, d1, m0, m1, qs @ ..] = block;
    let (d, m) = (half([*d0, *d1]), half([*m0, *m1]));
    nibbles(qs, out, |q| d * f32::from(q) + m);
}

pub(in crate::quant) fn q5_0(block: &[u8; 22], out: &mut [f32; 32]) {
    let [d0, d1, rest @ ..] = block;
    let d = half([*d0, *d1]);
    five_bits(rest, out, |q| d * (f32::from(q) - 16.0));
}

pub(in crate::quant) fn q5_1(block: &[u8; 24], out: &mut [f32; 32]) {
    let [d0, d1, m0, m1, rest @ ..] = block;
    let (d, m) = (half([*d0, *d1]), half([*m0, *m1]));
    five_bits(rest, out, |q| d * f32::from(q) + m);
}

pub(in crate::quant) fn q8_0(block: &[u8; 34], out: &mut [f32; 32]) {
    let (d, qs): (_, &[u8; 32]) = split(block);
    signed_bytes(half(*d), qs, out);
}

/// The second field is the scale times the sum of the quants, for dot products, and not a minimum.
pub(in crate::quant) fn q8_1(block: &[u8; 36], out: &mut [f32; 32]) {
    let [d0, d1, _, _, qs @ ..] = block;
    signed_bytes(half([*d0, *d1]), qs, out);
}

fn signed_bytes(d: f32, qs: &[u8; 32], out: &mut [f32; 32]) {
    for (slot, q) in out.iter_mut().zip(qs) {
        *slot = f32::from(q.cast_signed()) * d;
    }
}

/// Unpacks the fifth bits of all elements, followed by 32 nibbles.
fn five_bits(bytes: &[u8; 20], out: &mut [f32; 32], value: impl Fn(u8) -> f32) {
    let (fifth, qs): (&[u8; 4], &[u8; 16]) = split(bytes);
    let mut quants = [0; 32];
    nibbles(qs, &mut quants, |q| q);
    for (eight, byte) in quants.as_chunks_mut::<8>().0.iter_mut().zip(fifth) {
        for (q, high) in eight.iter_mut().zip(spread(*byte)) {
            *q |= high >> 3;
        }
    }
    for (slot, q) in out.iter_mut().zip(quants) {
        *slot = value(q);
    }
}

pub(in crate::quant) fn q1_0(block: &[u8; 18], out: &mut [f32; 128]) {
    let (d, qs): (_, &[u8; 16]) = split(block);
    let d = half(*d);
    for (eight, byte) in out.as_chunks_mut::<8>().0.iter_mut().zip(qs) {
        for (bit, slot) in eight.iter_mut().enumerate() {
            *slot = if byte & (1 << bit) == 0 { -d } else { d };
        }
    }
}

pub(in crate::quant) fn q2_0(block: &[u8; 18], out: &mut [f32; 64]) {
    let (d, qs): (_, &[u8; 16]) = split(block);
    let d = half(*d);
    for (four, byte) in out.as_chunks_mut::<4>().0.iter_mut().zip(qs) {
        *four = [byte & 3, (byte >> 2) & 3, (byte >> 4) & 3, byte >> 6].map(|q| d * (f32::from(q) - 1.0));
    }
}

pub(in crate::quant) fn tq1_0(block: &[u8; 54], out: &mut [f32; 256]) {
    let (qs, rest): (&[u8; 48], &[u8; 6]) = split(block);
    let (qh, d): (&[u8; 4], &[u8; 2]) = split(rest);
    let d = half(*d);
    let (first, second): (&[u8; 32], &[u8; 16]) = split(qs);
    let (first_out, rest) = out.split_at_mut(160);
    let (second_out, last_out) = rest.split_at_mut(80);
    ternary_digits(first, d, first_out);
    ternary_digits(second, d, second_out);
    ternary_digits(qh, d, last_out);
}

/// Unpacks the first digits of all bytes, then the second digits, until `out` is full. A byte is a fraction of 256: its
/// first digit is the integral part of three times the fraction.
fn ternary_digits<const BYTES: usize>(bytes: &[u8; BYTES], d: f32, out: &mut [f32]) {
    let mut fractions = *bytes;
    for row in out.as_chunks_mut::<BYTES>().0 {
        for (slot, fraction) in row.iter_mut().zip(&mut fractions) {
            let digit = (u16::from(*fraction) * 3) >> 8;
            *slot = d * (f32::from(digit) - 1.0);
            *fraction = fraction.wrapping_mul(3);
        }
    }
}

pub(in crate::quant) fn tq2_0(block: &[u8; 66], out: &mut [f32; 256]) {
    let (qs, d): (&[u8; 64], &[u8; 2]) = split(block);
    let d = half(*d);
    for (rows, qs) in out.as_chunks_mut::<128>().0.iter_mut().zip(qs.as_chunks::<32>().0) {
        for (number, row) in rows.as_chunks_mut::<32>().0.iter_mut().enumerate() {
            for (slot, q) in row.iter_mut().zip(qs) {
                *slot = d * (f32::from((q >> (2 * number)) & 3) - 1.0);
            }
        }
    }
}
