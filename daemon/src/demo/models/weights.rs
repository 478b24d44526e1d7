//! Pseudo-random weights: fast, seekable, and the same on every machine.

use std::io::{self, Write};

use blobd_store_format::gguf::GgmlType;

/// The weights of one tensor, or of a stack of which the tensor is a part.
///
/// The numbers are SplitMix64's, whose n-th value needs no value before it: an expert's bytes can
/// be had without those of the experts before it.
#[derive(Clone, Copy, Debug)]
pub(super) struct Stream {
    key: u64,
    /// Which word comes next.
    position: u64,
    is_float: bool,
}

impl Stream {
    /// The weights of `name` from `start` on: a multiple of 8, as all sizes of expert tensors are.
    pub(super) fn new(seed: u64, name: &str, ggml_type: GgmlType, start: u64) -> Self {
        debug_assert!(start.is_multiple_of(WORD_BYTES));
        // FNV-1a, so that names which differ in one digit have nothing in common.
        let start_of_hash = 0xcbf2_9ce4_8422_2325 ^ mix(seed ^ (u64::from(ggml_type.id()) << 32));
        let hash = name
            .bytes()
            .fold(start_of_hash, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3));
        Self { key: mix(hash), position: start / WORD_BYTES, is_float: ggml_type == GgmlType::F32 }
    }

    /// Writes the next `length` bytes.
    pub(super) fn copy_to(mut self, length: u64, out: &mut impl Write) -> io::Result<()> {
        let capacity = usize::try_from(length).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        let mut chunk = vec![0; capacity.next_multiple_of(8)];
        let mut left = length;
        while left > 0 {
            self.fill(&mut chunk);
            let portion = usize::try_from(left).unwrap_or(usize::MAX).min(chunk.len());
            out.write_all(chunk.get(..portion).unwrap_or_default())?;
            left -= portion as u64;
        }
        Ok(())
    }

    /// Fills a buffer of whole words.
    fn fill(&mut self, buffer: &mut [u8]) {
        for word in buffer.chunks_exact_mut(8) {
            let value = mix(self.key.wrapping_add(self.position.wrapping_mul(GAMMA)));
            // Two floats from 1 up to 2: what the scales of a norm look like.
            let value = if self.is_float { ((value >> 9) & MANTISSAS) | ONES } else { value };
            word.copy_from_slice(&value.to_le_bytes());
            self.position = self.position.wrapping_add(1);
        }
    }
}

/// SplitMix64's output function.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

const WORD_BYTES: u64 = 8;
/// SplitMix64's step: 2^64 divided by the golden ratio.
const GAMMA: u64 = 0x9e37_79b9_7f4a_7c15;
/// The mantissas of two floats.
const MANTISSAS: u64 = 0x007f_ffff_007f_ffff;
/// Two times 1.0, whose mantissa is 0.
const ONES: u64 = 0x3f80_0000_3f80_0000;
/// How much is made and written at once.
const CHUNK_BYTES: usize = 1 << 20;
