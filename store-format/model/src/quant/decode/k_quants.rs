//! The types with super-blocks of 256 elements and a scale for each part.

use super::{half, nibbles, split};

pub(in crate::quant) fn q2_k(block: &[u8; 84], out: &mut [f32; 256]) {
    let (scales, rest): (&[u8; 16], &[u8; 68]) = split(block);
    let (qs, factors): (&[u8; 64], &[u8; 4]) = split(rest);
    let (d, dmin) = both_halves(factors);
    let mut quants = [0; 256];
    two_bits(qs, &mut quants);
    for (slot, q) in out.iter_mut().zip(quants) {
        *slot = f32::from(q);
    }
    for (part, scale) in out.as_chunks_mut::<16>().0.iter_mut().zip(scales) {
        let (dl, ml) = (d * f32::from(scale & 15), dmin * f32::from(scale >> 4));
        part.iter_mut().for_each(|slot| *slot = dl * *slot - ml);
    }
}

pub(in crate::quant) fn q3_k(block: &[u8; 110], out: &mut [f32; 256]) {
    let (masks, rest): (&[u8; 32], &[u8; 78]) = split(block);
    let (qs, rest): (&[u8; 64], &[u8; 14]) = split(rest);
    let (scales, d): (&[u8; 12], &[u8; 2]) = split(rest);
    let d = half(*d);
    let mut quants = [0; 256];
    two_bits(qs, &mut quants);
    // The third bit of the quants is inverted: 4 is subtracted where it is not set.
    for (bit, row) in quants.as_chunks_mut::<32>().0.iter_mut().enumerate() {
        for (q, mask) in row.iter_mut().zip(masks) {
            *q |= ((mask >> bit) & 1) << 2;
        }
    }
    for (slot, q) in out.iter_mut().zip(quants) {
        *slot = f32::from(q) - 4.0;
    }
    for (part, scale) in out.as_chunks_mut::<16>().0.iter_mut().zip(six_bit_scales(scales)) {
        let dl = d * (f32::from(scale) - 32.0);
        part.iter_mut().for_each(|slot| *slot *= dl);
    }
}

pub(in crate::quant) fn q4_k(block: &[u8; 144], out: &mut [f32; 256]) {
    let (head, qs): (&[u8; 16], &[u8; 128]) = split(block);
    let factors = scales_and_minimums(head);
    let mut quants = [0; 256];
    for (row, qs) in quants.as_chunks_mut::<64>().0.iter_mut().zip(qs.as_chunks::<32>().0) {
        nibbles(qs, row, |q| q);
    }
    let parts = out.as_chunks_mut::<32>().0.iter_mut().zip(quants.as_chunks::<32>().0);
    for ((part, quants), (d, m)) in parts.zip(factors) {
        for (slot, q) in part.iter_mut().zip(quants) {
            *slot = d * f32::from(*q) - m;
        }
    }
}

pub(in crate::quant) fn q5_k(block: &[u8; 176], out: &mut [f32; 256]) {
    let (head, rest): (&[u8; 16], &[u8; 160]) = split(block);
    let (fifth, qs): (&[u8; 32], &[u8; 128]) = split(rest);
    let factors = scales_and_minimums(head);
    let mut quants = [0; 256];
    for (row, qs) in quants.as_chunks_mut::<64>().0.iter_mut().zip(qs.as_chunks::<32>().0) {
        nibbles(qs, row, |q| q);
    }
    let parts = out.as_chunks_mut::<32>().0.iter_mut().zip(quants.as_chunks::<32>().0);
    for (bit, ((part, quants), (d, m))) in parts.zip(factors).enumerate() {
        for ((slot, q), fifth) in part.iter_mut().zip(quants).zip(fifth) {
            *slot = d * f32::from(q | (((fifth >> bit) & 1) << 4)) - m;
        }
    }
}

pub(in crate::quant) fn q6_k(block: &[u8; 210], out: &mut [f32; 256]) {
    let (low, rest): (&[u8; 128], &[u8; 82]) = split(block);
    let (high, rest): (&[u8; 64], &[u8; 18]) = split(rest);
    let (scales, d): (&[u8; 16], &[u8; 2]) = split(rest);
    let d = half(*d);
    let mut quants = [0; 256];
    for (row, low) in quants.as_chunks_mut::<128>().0.iter_mut().zip(low.as_chunks::<64>().0) {
        nibbles(low, row, |q| q);
    }
    let mut upper = [0; 256];
    two_bits(high, &mut upper);
    for (q, upper) in quants.iter_mut().zip(upper) {
        *q |= upper << 4;
    }
    for (slot, q) in out.iter_mut().zip(quants) {
        *slot = f32::from(q) - 32.0;
    }
    for (part, scale) in out.as_chunks_mut::<16>().0.iter_mut().zip(scales) {
        let dl = d * f32::from(scale.cast_signed());
        part.iter_mut().for_each(|slot| *slot *= dl);
    }
}

/// Ignores the sums at the end of the block, which are for dot products.
pub(in crate::quant) fn q8_k(block: &[u8; 292], out: &mut [f32; 256]) {
    let (d, rest): (_, &[u8; 288]) = split(block);
    let d = f32::from_le_bytes(*d);
    for (slot, q) in out.iter_mut().zip(rest) {
        *slot = d * f32::from(q.cast_signed());
    }
}

fn both_halves([a0, a1, b0, b1]: &[u8; 4]) -> (f32, f32) {
    (half([*a0, *a1]), half([*b0, *b1]))
}

/// Unpacks 2-bit quants: for each 32 bytes, first the lowest two bits of all bytes, then the next two, and so on.
fn two_bits<const BYTES: usize>(bytes: &[u8; BYTES], quants: &mut [u8]) {
    for (rows, bytes) in quants.as_chunks_mut::<128>().0.iter_mut().zip(bytes.as_chunks::<32>().0) {
        let [first, second, third, fourth] = rows.as_chunks_mut::<32>().0 else { continue };
        let low = first.iter_mut().zip(second);
        let high = third.iter_mut().zip(fourth);
        for (((first, second), (third, fourth)), byte) in low.zip(high).zip(bytes) {
            *first = byte & 3;
            *second = (byte >> 2) & 3;
            *third = (byte >> 4) & 3;
            *fourth = byte >> 6;
        }
    }
}

/// The 16 scales of `Q3_K`: four low bits in the first 8 bytes, two high bits in the last 4.
fn six_bit_scales(bytes: &[u8; 12]) -> [u8; 16] {
    let (low, high): (&[u8; 8], &[u8; 4]) = split(bytes);
    let mut scales = [0; 16];
    nibbles(low, &mut scales, |q| q);
    for (number, four) in scales.as_chunks_mut::<4>().0.iter_mut().enumerate() {
        for (scale, high) in four.iter_mut().zip(high) {
            *scale |= ((high >> (2 * number)) & 3) << 4;
        }
    }
    scales
}

/// The eight scales and minimums of `Q4_K` and `Q5_K`, multiplied by those of the block. They have six bits each; the
/// upper two bits of the last four of both are stored in the first bytes.
fn scales_and_minimums(head: &[u8; 16]) -> [(f32, f32); 8] {
    let (factors, packed): (&[u8; 4], &[u8; 12]) = split(head);
    let (d, dmin) = both_halves(factors);
    let (first, last): (&[u8; 8], &[u8; 4]) = split(packed);
    let (scales, minimums): (&[u8; 4], &[u8; 4]) = split(first);
    let mut out = [(0.0, 0.0); 8];
    let (low, high) = out.split_at_mut(4);
    for ((slot, scale), minimum) in low.iter_mut().zip(scales).zip(minimums) {
        *slot = (d * f32::from(scale & 63), dmin * f32::from(minimum & 63));
    }
    for (((slot, scale), minimum), last) in high.iter_mut().zip(scales).zip(minimums).zip(last) {
        let (scale, minimum) = ((last & 15) | ((scale >> 2) & 48), (last >> 4) | ((minimum >> 2) & 48));
        *slot = (d * f32::from(scale), dmin * f32::from(minimum));
    }
    out
}
