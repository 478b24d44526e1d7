//! SHA-256 of two streams of bytes in one pass.
//!
//! One SHA-256 computation spends most of its time waiting for the previous round. A second, independent
//! one fills the gaps: on x86-64 with the SHA extensions, two cost 1.0 to 1.3 times as much as one (`just
//! bench hash` measures it). So the digest of a file and the digests of its parts are computed in one pass,
//! and stored blobs are verified two at a time. Without the SHA extensions, and for bytes of one stream
//! alone, `sha2` is used.
//!
//! ```
//! use blobd_sha256::{Sha256, update_both};
//!
//! let (mut file, mut part) = (Sha256::new(), Sha256::new());
//! file.update(b"header");
//! update_both(&mut file, b"tensor", &mut part, b"tensor");
//!
//! let mut alone = Sha256::new();
//! alone.update(b"headertensor");
//! assert_eq!(file.finish(), alone.finish());
//! ```

use sha2::block_api::compress256;

mod lanes;

const BLOCK_BYTES: usize = 64;
/// The last block ends with the message's length in bits.
const LENGTH_BYTES: usize = 8;

type State = [u32; 8];
type Block = [u8; BLOCK_BYTES];

/// FIPS 180-4, section 5.3.3.
const INITIAL_STATE: State =
    [0x6a09_e667, 0xbb67_ae85, 0x3c6e_f372, 0xa54f_f53a, 0x510e_527f, 0x9b05_688c, 0x1f83_d9ab, 0x5be0_cd19];

/// A SHA-256 computation over bytes that are added in pieces.
#[derive(Clone, Debug)]
pub struct Sha256 {
    state: State,
    /// An incomplete block.
    block: Block,
    /// The number of bytes in `block`, fewer than a block has.
    filled: usize,
    /// The number of bytes added.
    length: u64,
}

impl Default for Sha256 {
    fn default() -> Self {
        Self { state: INITIAL_STATE, block: [0; BLOCK_BYTES], filled: 0, length: 0 }
    }
}

impl Sha256 {
    /// Starts a computation.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Adds the next bytes.
    pub fn update(&mut self, bytes: &[u8]) {
        let (blocks, rest) = self.fill_block(bytes).as_chunks();
        compress256(&mut self.state, blocks);
        self.length = self.length.wrapping_add((blocks.len() * BLOCK_BYTES) as u64);
        self.fill_block_with(rest);
    }

    /// The digest of all bytes.
    #[must_use]
    pub fn finish(mut self) -> [u8; 32] {
        // The standard is for less than 2^64 bits; no input has 2^61 bytes.
        let bits = self.length.wrapping_mul(8);
        let zeros = [0; BLOCK_BYTES];
        self.fill_block_with(&[0x80]);
        if self.filled > BLOCK_BYTES - LENGTH_BYTES {
            self.fill_block_with(zeros.get(self.filled..).unwrap_or_default());
        }
        self.fill_block_with(zeros.get(self.filled..BLOCK_BYTES - LENGTH_BYTES).unwrap_or_default());
        self.fill_block_with(&bits.to_be_bytes());
        let mut digest = [0; 32];
        for (bytes, word) in digest.as_chunks_mut().0.iter_mut().zip(self.state) {
            *bytes = word.to_be_bytes();
        }
        digest
    }

    /// Adds to the incomplete block, if there is one; returns the bytes after it.
    fn fill_block<'b>(&mut self, bytes: &'b [u8]) -> &'b [u8] {
        if self.filled == 0 {
            return bytes;
        }
        let (head, rest) = bytes.split_at(bytes.len().min(BLOCK_BYTES - self.filled));
        self.fill_block_with(head);
        rest
    }

    /// Adds bytes to the current block, which must have space for them.
    fn fill_block_with(&mut self, bytes: &[u8]) {
        let end = self.filled + bytes.len();
        if let Some(free) = self.block.get_mut(self.filled..end) {
            free.copy_from_slice(bytes);
        }
        self.filled = end;
        self.length = self.length.wrapping_add(bytes.len() as u64);
        if self.filled == BLOCK_BYTES {
            compress256(&mut self.state, &[self.block]);
            self.filled = 0;
        }
    }

    /// Counts `count` blocks that another function has compressed; returns the bytes after them.
    fn skip_blocks<'b>(&mut self, bytes: &'b [u8], count: usize) -> &'b [u8] {
        self.length = self.length.wrapping_add((count * BLOCK_BYTES) as u64);
        bytes.get(count * BLOCK_BYTES..).unwrap_or_default()
    }
}

/// Adds the next bytes to two computations. Both slices may be the same. Fastest when they have the same
/// length; the rest of the longer one is added alone.
pub fn update_both(first: &mut Sha256, first_bytes: &[u8], second: &mut Sha256, second_bytes: &[u8]) {
    let (first_bytes, second_bytes) = (first.fill_block(first_bytes), second.fill_block(second_bytes));
    let (first_blocks, second_blocks) = (first_bytes.as_chunks().0, second_bytes.as_chunks().0);
    let count = first_blocks.len().min(second_blocks.len());
    let common = [first_blocks, second_blocks].map(|blocks| blocks.get(..count).unwrap_or_default());
    lanes::compress_both([&mut first.state, &mut second.state], common);
    let first_rest = first.skip_blocks(first_bytes, count);
    let second_rest = second.skip_blocks(second_bytes, count);
    first.update(first_rest);
    second.update(second_rest);
}

/// Whether this processor computes two digests in one pass faster than one after the other.
#[must_use]
pub fn has_lanes() -> bool {
    lanes::are_available()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use sha2::Digest as _;

    use super::*;

    fn reference(bytes: &[u8]) -> [u8; 32] {
        sha2::Sha256::digest(bytes).into()
    }

    fn noise(length: usize, seed: u8) -> Vec<u8> {
        (0..length).map(|place| ((place * 31 % 251) ^ (place >> 9)).to_le_bytes()[0] ^ seed).collect()
    }

    #[test]
    fn every_length_around_a_block_has_the_digest_of_the_reference() {
        let bytes = noise(200, 0);
        for length in 0..=bytes.len() {
            let mut alone = Sha256::new();
            alone.update(&bytes[..length]);
            assert_eq!(alone.finish(), reference(&bytes[..length]), "{length} bytes");
        }
    }

    #[test]
    fn two_in_one_pass_match_the_reference_at_every_pair_of_phases() {
        let bytes = noise(1000, 0);
        for first_phase in 0..BLOCK_BYTES {
            for second_phase in 0..BLOCK_BYTES {
                let (mut first, mut second) = (Sha256::new(), Sha256::new());
                first.update(&bytes[..first_phase]);
                second.update(&bytes[..second_phase]);
                update_both(&mut first, &bytes, &mut second, &bytes);
                assert_eq!(first.finish(), reference(&[&bytes[..first_phase], &bytes].concat()));
                assert_eq!(second.finish(), reference(&[&bytes[..second_phase], &bytes].concat()));
            }
        }
    }

    /// Two messages, and where they are cut into pieces that are added in one pass.
    fn messages() -> impl Strategy<Value = (Vec<u8>, Vec<u8>, Vec<(usize, usize)>)> {
        let message = prop::collection::vec(any::<u8>(), 0..700);
        (message.clone(), message, prop::collection::vec((0usize..300, 0usize..300), 0..8))
    }

    proptest! {
        #[test]
        fn pieces_of_two_messages_have_the_digests_of_the_whole((a, b, cuts) in messages()) {
            let (mut first, mut second) = (Sha256::new(), Sha256::new());
            let (mut a_rest, mut b_rest) = (&a[..], &b[..]);
            for (a_cut, b_cut) in cuts {
                let (a_piece, a_later) = a_rest.split_at(a_cut.min(a_rest.len()));
                let (b_piece, b_later) = b_rest.split_at(b_cut.min(b_rest.len()));
                update_both(&mut first, a_piece, &mut second, b_piece);
                (a_rest, b_rest) = (a_later, b_later);
            }
            update_both(&mut first, a_rest, &mut second, b_rest);
            prop_assert_eq!(first.finish(), reference(&a));
            prop_assert_eq!(second.finish(), reference(&b));
        }

        #[test]
        fn file_and_its_part_match_the_reference(
            before in 0usize..200, length in 0usize..5000, seed in any::<u8>(),
        ) {
            let bytes = noise(before + length, seed);
            let (mut file, mut part) = (Sha256::new(), Sha256::new());
            file.update(&bytes[..before]);
            update_both(&mut file, &bytes[before..], &mut part, &bytes[before..]);
            prop_assert_eq!(file.finish(), reference(&bytes));
            prop_assert_eq!(part.finish(), reference(&bytes[before..]));
        }
    }
}
