//! One function per type, which decodes one block.
//!
//! Every number is computed by the same `f32` operations in the same order as in PyPI's `gguf`, so that the
//! results are equal bit for bit, except for the payloads of NaN. Rust never contracts a multiplication and
//! an addition into one operation.

mod codebook;
mod k_quants;
mod plain;

pub(super) use self::codebook::{iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs};
pub(super) use self::k_quants::{q2_k, q3_k, q4_k, q5_k, q6_k, q8_k};
pub(super) use self::plain::{
    iq4_nl, iq4_xs, mxfp4, mxfp4_ollama, nvfp4, q1_0, q2_0, q4_0, q4_1, q5_0, q5_1, q8_0, q8_1, tq1_0, tq2_0,
};
use crate::float::f32_of_f16;

fn half(bytes: [u8; 2]) -> f32 {
    f32_of_f16(u16::from_le_bytes(bytes))
}

/// Splits `N` bytes into the first `A` and the last `B`; `A + B == N` is checked at compile time.
fn split<const N: usize, const A: usize, const B: usize>(bytes: &[u8; N]) -> (&[u8; A], &[u8; B]) {
    const { assert!(A + B == N) };
    match (bytes.first_chunk(), bytes.last_chunk()) {
        (Some(first), Some(last)) => (first, last),
        _ => (&[0; A], &[0; B]), // never: both are parts of the array
    }
}

/// Unpacks the low nibbles of all bytes, then the high nibbles.
fn nibbles<const BYTES: usize, T>(qs: &[u8; BYTES], out: &mut [T], value: impl Fn(u8) -> T) {
    let (low, high) = out.split_at_mut(BYTES.min(out.len()));
    for (slot, q) in low.iter_mut().zip(qs) {
        *slot = value(q & 15);
    }
    for (slot, q) in high.iter_mut().zip(qs) {
        *slot = value(q >> 4);
    }
}

/// Spreads the bits of a byte over eight bytes, the lowest first: each becomes the uppermost bit of its byte.
const fn spread(bits: u8) -> [u8; 8] {
    let each = (bits as u64 * 0x0101_0101_0101_0101) & 0x8040_2010_0804_0201;
    // Every byte is 0 or a power of two: adding 0x7f sets its uppermost bit if it is not 0, without a carry.
    ((each + 0x7f7f_7f7f_7f7f_7f7f) & 0x8080_8080_8080_8080).to_le_bytes()
}
