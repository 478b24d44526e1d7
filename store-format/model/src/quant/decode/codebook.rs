//! The types whose quants are indices into a codebook.
//!
//! The codebooks are included at compile time from `docs/codebooks`, which `docs/FORMATS.md` describes. A line is an
//! entry: one digit for each of its 4 or 8 neighbouring elements. The digit selects one of a few values. Every index is a
//! byte, or is masked or composed to as many bits as the table has, so it is within the table.

use super::{half, split, spread};

pub(in crate::quant) fn iq2_xxs(block: &[u8; 66], out: &mut [f32; 256]) {
    let (d, parts): (_, &[u8; 64]) = split(block);
    let d = half(*d);
    for (out, part) in out.as_chunks_mut::<32>().0.iter_mut().zip(parts.as_chunks::<8>().0) {
        let (entries, signs): (&[u8; 4], &[u8; 4]) = split(part);
        let signs = u32::from_le_bytes(*signs);
        let db = d * (0.5 + upper_nibble(signs)) * 0.25;
        for (number, (eight, q)) in out.as_chunks_mut().0.iter_mut().zip(entries).enumerate() {
            signed(eight, &IQ2_XXS[usize::from(*q)], db, even_signs(signs >> (7 * number)));
        }
    }
}

pub(in crate::quant) fn iq2_xs(block: &[u8; 74], out: &mut [f32; 256]) {
    let (d, rest): (_, &[u8; 72]) = split(block);
    let (qs, scales): (&[u8; 64], &[u8; 8]) = split(rest);
    let d = half(*d);
    let scales = scales.iter().flat_map(|byte| [byte & 15, byte >> 4]);
    for ((out, qs), scale) in out.as_chunks_mut::<16>().0.iter_mut().zip(qs.as_chunks::<4>().0).zip(scales) {
        let db = d * (0.5 + f32::from(scale)) * 0.25;
        for (eight, q) in out.as_chunks_mut().0.iter_mut().zip(qs.as_chunks().0) {
            let q = u16::from_le_bytes(*q);
            signed(eight, &IQ2_XS[usize::from(q & 511)], db, even_signs((q >> 9).into()));
        }
    }
}

pub(in crate::quant) fn iq2_s(block: &[u8; 82], out: &mut [f32; 256]) {
    let (d, rest): (_, &[u8; 80]) = split(block);
    let (qs, rest): (&[u8; 32], &[u8; 48]) = split(rest);
    let (signs, rest): (&[u8; 32], &[u8; 16]) = split(rest);
    let (high, scales): (&[u8; 8], &[u8; 8]) = split(rest);
    let d = half(*d);
    let parts = qs.as_chunks::<4>().0.iter().zip(signs.as_chunks::<4>().0).zip(high.iter().zip(scales));
    for (out, ((qs, signs), (high, scale))) in out.as_chunks_mut::<32>().0.iter_mut().zip(parts) {
        let db = [scale & 15, scale >> 4].map(|scale| d * (0.5 + f32::from(scale)) * 0.25);
        for (number, eight) in out.as_chunks_mut().0.iter_mut().enumerate() {
            let q = u16::from(qs[number & 3]) | ((u16::from(*high) >> (2 * number)) & 3) << 8;
            signed(eight, &IQ2_S[usize::from(q)], db[(number >> 1) & 1], signs[number & 3]);
        }
    }
}

pub(in crate::quant) fn iq3_xxs(block: &[u8; 98], out: &mut [f32; 256]) {
    let (d, rest): (_, &[u8; 96]) = split(block);
    let (qs, signs): (&[u8; 64], &[u8; 32]) = split(rest);
    let d = half(*d);
    let parts = qs.as_chunks::<8>().0.iter().zip(signs.as_chunks().0);
    for (out, (qs, signs)) in out.as_chunks_mut::<32>().0.iter_mut().zip(parts) {
        let signs = u32::from_le_bytes(*signs);
        let db = d * (0.5 + upper_nibble(signs)) * 0.5;
        for (number, (eight, pair)) in out.as_chunks_mut().0.iter_mut().zip(qs.as_chunks().0).enumerate() {
            let entries = pair.map(|q| &IQ3_XXS[usize::from(q)]);
            signed(eight, &joined(entries), db, even_signs(signs >> (7 * number)));
        }
    }
}

pub(in crate::quant) fn iq3_s(block: &[u8; 110], out: &mut [f32; 256]) {
    let (d, rest): (_, &[u8; 108]) = split(block);
    let (qs, rest): (&[u8; 64], &[u8; 44]) = split(rest);
    let (high, rest): (&[u8; 8], &[u8; 36]) = split(rest);
    let (signs, scales): (&[u8; 32], &[u8; 4]) = split(rest);
    let d = half(*d);
    let scales = scales.iter().flat_map(|byte| [byte & 15, byte >> 4]);
    let parts = qs.as_chunks::<8>().0.iter().zip(signs.as_chunks::<4>().0).zip(high.iter().zip(scales));
    for (out, ((qs, signs), (high, scale))) in out.as_chunks_mut::<32>().0.iter_mut().zip(parts) {
        let (db, mut high) = (d * f32::from(1 + 2 * scale), u16::from(*high));
        let pairs = qs.as_chunks::<2>().0.iter().zip(signs);
        for (eight, ([first, second], signs)) in out.as_chunks_mut().0.iter_mut().zip(pairs) {
            let first = u16::from(*first) | ((high & 1) << 8);
            let second = u16::from(*second) | ((high & 2) << 7);
            high >>= 2;
            let entries = [first, second].map(|q| &IQ3_S[usize::from(q & 511)]);
            signed(eight, &joined(entries), db, *signs);
        }
    }
}

pub(in crate::quant) fn iq1_s(block: &[u8; 50], out: &mut [f32; 256]) {
    let (d, rest): (_, &[u8; 48]) = split(block);
    let (qs, high): (&[u8; 32], &[u8; 16]) = split(rest);
    let d = half(*d);
    let parts = qs.as_chunks::<4>().0.iter().zip(high.as_chunks().0);
    for (out, (qs, high)) in out.as_chunks_mut::<32>().0.iter_mut().zip(parts) {
        let high = u16::from_le_bytes(*high);
        let dl = d * f32::from(2 * ((high >> 12) & 7) + 1);
        let delta = delta(high & 0x8000 != 0);
        for (number, (eight, q)) in out.as_chunks_mut().0.iter_mut().zip(qs).enumerate() {
            shifted(eight, u16::from(*q) | ((high >> (3 * number)) & 7) << 8, dl, delta);
        }
    }
}

pub(in crate::quant) fn iq1_m(block: &[u8; 56], out: &mut [f32; 256]) {
    let (qs, rest): (&[u8; 32], &[u8; 24]) = split(block);
    let (high, scales): (&[u8; 16], &[u8; 8]) = split(rest);
    let mut words = [0_u16; 4];
    for (word, bytes) in words.iter_mut().zip(scales.as_chunks().0) {
        *word = u16::from_le_bytes(*bytes);
    }
    // Each of the four words contains a nibble of the block's scale above four 3-bit scales.
    let [a, b, c, e] = words.map(|word| word & 0xf000);
    let d = half(((a >> 12) | (b >> 8) | (c >> 4) | e).to_le_bytes());
    let scales = words.iter().flat_map(|word| [word & 7, (word >> 3) & 7, (word >> 6) & 7, (word >> 9) & 7]);
    let parts = qs.as_chunks::<2>().0.iter().zip(high).zip(scales);
    for (out, ((qs, high), scale)) in out.as_chunks_mut::<16>().0.iter_mut().zip(parts) {
        let dl = d * f32::from(2 * scale + 1);
        let nibbles = [high & 15, high >> 4];
        for ((eight, q), high) in out.as_chunks_mut().0.iter_mut().zip(qs).zip(nibbles) {
            shifted(eight, u16::from(*q) | (u16::from(high) & 7) << 8, dl, delta(high & 8 != 0));
        }
    }
}

/// The uppermost four bits, which are a scale.
fn upper_nibble(signs: u32) -> f32 {
    let [.., upper] = signs.to_le_bytes();
    f32::from(upper >> 4)
}

/// The lowest seven bits, and an eighth such that the number of ones is even.
fn even_signs(signs: u32) -> u8 {
    let [lower, ..] = signs.to_le_bytes();
    let seven = lower & 0x7f;
    if seven.count_ones() & 1 == 0 { seven } else { seven | 0x80 }
}

fn joined([first, second]: [&[i8; 4]; 2]) -> [i8; 8] {
    let ([a, b, c, d], [e, f, g, h]) = (*first, *second);
    [a, b, c, d, e, f, g, h]
}

/// `scale * entry`, negated where a bit of `signs` is set.
fn signed(out: &mut [f32; 8], entry: &[i8; 8], scale: f32, signs: u8) {
    for ((slot, value), sign) in out.iter_mut().zip(entry).zip(spread(signs)) {
        let product = scale * f32::from(*value);
        *slot = f32::from_bits(product.to_bits() ^ (u32::from(sign) << 24));
    }
}

/// `scale * (entry + delta)` for the entry at an 11-bit index of the codebook.
fn shifted(out: &mut [f32; 8], q: u16, scale: f32, delta: f32) {
    let entry = &IQ1_S[usize::from(q & 2047)];
    for (slot, value) in out.iter_mut().zip(entry) {
        *slot = scale * (f32::from(*value) + delta);
    }
}

const fn delta(is_negative: bool) -> f32 {
    if is_negative { -0.125 } else { 0.125 }
}

/// The content of a codebook's file.
macro_rules! text {
    ($name:literal) => {
        include_bytes!(concat!("../../../../../docs/codebooks/", $name, ".txt"))
    };
}

static IQ2_XXS: [[i8; 8]; 256] = parsed(text!("iq2_xxs"), &[8, 25, 43]);
static IQ2_XS: [[i8; 8]; 512] = parsed(text!("iq2_xs"), &[8, 25, 43]);
static IQ2_S: [[i8; 8]; 1024] = parsed(text!("iq2_s"), &[8, 25, 43]);
static IQ3_XXS: [[i8; 4]; 256] = parsed(text!("iq3_xxs"), &[4, 12, 20, 28, 36, 44, 52, 62]);
static IQ3_S: [[i8; 4]; 512] = parsed(text!("iq3_s"), &[1, 3, 5, 7, 9, 11, 13, 15]);
/// `IQ1_M` uses this codebook too.
static IQ1_S: [[i8; 8]; 2048] = parsed(text!("iq1_s"), &[-1, 0, 1]);

/// Parses a file of `N` lines of `ELEMENTS` digits. Another number of lines, or a digit without a value, is a compile
/// error.
const fn parsed<const ELEMENTS: usize, const N: usize>(text: &[u8], values: &[i8]) -> [[i8; ELEMENTS]; N] {
    assert!(text.len() == N * (ELEMENTS + 1));
    let mut entries = [[0; ELEMENTS]; N];
    let mut entry = 0;
    while entry < N {
        let line = entry * (ELEMENTS + 1);
        let mut element = 0;
        while element < ELEMENTS {
            entries[entry][element] = values[(text[line + element] - b'0') as usize];
            element += 1;
        }
        assert!(text[line + ELEMENTS] == b'\n');
        entry += 1;
    }
    entries
}
