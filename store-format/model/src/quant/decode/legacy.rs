//! The types with blocks of 32 and one scale.

use super::{half, nibbles, split, spread};

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
