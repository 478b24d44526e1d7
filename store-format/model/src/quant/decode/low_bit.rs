//! The types of one bit, two bits and a ternary digit.

use super::{half, split};

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
