//! The compression function with the SHA extensions of x86-64.
//!
//! `sha256rnds2` does two rounds, takes 4 cycles and needs the result of the previous one, but a processor
//! can start one every 2 cycles (agner.org/optimize, instruction tables). So two independent chains are
//! written side by side, and the compiler interleaves their instructions.
//!
//! The instructions keep a state as two vectors, `ABEF` and `CDGH`, named for the words of FIPS 180-4 from
//! the highest lane to the lowest.

use std::arch::x86_64::{
    __m128i, _mm_add_epi32, _mm_alignr_epi8, _mm_extract_epi32, _mm_set_epi32, _mm_set_epi64x,
    _mm_sha256msg1_epu32, _mm_sha256msg2_epu32, _mm_sha256rnds2_epu32, _mm_shuffle_epi8, _mm_shuffle_epi32,
};

use crate::{Block, State};

/// FIPS 180-4, section 4.2.2.
const ROUND_CONSTANTS: [[u32; 4]; 16] = [
    [0x428a_2f98, 0x7137_4491, 0xb5c0_fbcf, 0xe9b5_dba5],
    [0x3956_c25b, 0x59f1_11f1, 0x923f_82a4, 0xab1c_5ed5],
    [0xd807_aa98, 0x1283_5b01, 0x2431_85be, 0x550c_7dc3],
    [0x72be_5d74, 0x80de_b1fe, 0x9bdc_06a7, 0xc19b_f174],
    [0xe49b_69c1, 0xefbe_4786, 0x0fc1_9dc6, 0x240c_a1cc],
    [0x2de9_2c6f, 0x4a74_84aa, 0x5cb0_a9dc, 0x76f9_88da],
    [0x983e_5152, 0xa831_c66d, 0xb003_27c8, 0xbf59_7fc7],
    [0xc6e0_0bf3, 0xd5a7_9147, 0x06ca_6351, 0x1429_2967],
    [0x27b7_0a85, 0x2e1b_2138, 0x4d2c_6dfc, 0x5338_0d13],
    [0x650a_7354, 0x766a_0abb, 0x81c2_c92e, 0x9272_2c85],
    [0xa2bf_e8a1, 0xa81a_664b, 0xc24b_8b70, 0xc76c_51a3],
    [0xd192_e819, 0xd699_0624, 0xf40e_3585, 0x106a_a070],
    [0x19a4_c116, 0x1e37_6c08, 0x2748_774c, 0x34b0_bcb5],
    [0x391c_0cb3, 0x4ed8_aa4a, 0x5b9c_ca4f, 0x682e_6ff3],
    [0x748f_82ee, 0x78a5_636f, 0x84c8_7814, 0x8cc7_0208],
    [0x90be_fffa, 0xa450_6ceb, 0xbef9_a3f7, 0xc671_78f2],
];

#[derive(Clone, Copy)]
struct Lane {
    abef: __m128i,
    cdgh: __m128i,
}

/// Repeats a block, which does four rounds, for each of the 16 groups of message words.
macro_rules! for_each_group {
    ($group:ident, $rounds:block) => {
        for_each_group!(@ $group, $rounds, 0 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15)
    };
    (@ $group:ident, $rounds:block, $($number:literal)*) => {
        $( { const $group: usize = $number; $rounds } )*
    };
}

/// Compresses the same blocks into both states, with one message schedule.
#[target_feature(enable = "sha,ssse3,sse4.1")]
pub(super) fn compress_same([first, second]: [&mut State; 2], blocks: &[Block]) {
    let (mut a, mut b) = (Lane::load(first), Lane::load(second));
    for block in blocks {
        let (a_before, b_before) = (a, b);
        let mut words = message(block);
        for_each_group!(GROUP, {
            let input = schedule::<GROUP>(&mut words);
            a.first_two_rounds(input);
            b.first_two_rounds(input);
            let input = upper_half(input);
            a.last_two_rounds(input);
            b.last_two_rounds(input);
        });
        (a, b) = (a.plus(a_before), b.plus(b_before));
    }
    a.store(first);
    b.store(second);
}

/// Compresses as many blocks into each state as the shorter slice has.
#[target_feature(enable = "sha,ssse3,sse4.1")]
pub(super) fn compress_different([first, second]: [&mut State; 2], [a_blocks, b_blocks]: [&[Block]; 2]) {
    let (mut a, mut b) = (Lane::load(first), Lane::load(second));
    for (a_block, b_block) in a_blocks.iter().zip(b_blocks) {
        let (a_before, b_before) = (a, b);
        let (mut a_words, mut b_words) = (message(a_block), message(b_block));
        for_each_group!(GROUP, {
            let (a_input, b_input) = (schedule::<GROUP>(&mut a_words), schedule::<GROUP>(&mut b_words));
            a.first_two_rounds(a_input);
            b.first_two_rounds(b_input);
            a.last_two_rounds(upper_half(a_input));
            b.last_two_rounds(upper_half(b_input));
        });
        (a, b) = (a.plus(a_before), b.plus(b_before));
    }
    a.store(first);
    b.store(second);
}

impl Lane {
    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn load([a, b, c, d, e, f, g, h]: &State) -> Self {
        Self { abef: words(*f, *e, *b, *a), cdgh: words(*h, *g, *d, *c) }
    }

    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn store(self, state: &mut State) {
        let Self { abef, cdgh } = self;
        let word = i32::cast_unsigned;
        *state = [
            word(_mm_extract_epi32::<3>(abef)),
            word(_mm_extract_epi32::<2>(abef)),
            word(_mm_extract_epi32::<3>(cdgh)),
            word(_mm_extract_epi32::<2>(cdgh)),
            word(_mm_extract_epi32::<1>(abef)),
            word(_mm_extract_epi32::<0>(abef)),
            word(_mm_extract_epi32::<1>(cdgh)),
            word(_mm_extract_epi32::<0>(cdgh)),
        ];
    }

    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn first_two_rounds(&mut self, input: __m128i) {
        self.cdgh = _mm_sha256rnds2_epu32(self.cdgh, self.abef, input);
    }

    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn last_two_rounds(&mut self, input: __m128i) {
        self.abef = _mm_sha256rnds2_epu32(self.abef, self.cdgh, input);
    }

    #[inline]
    #[target_feature(enable = "sha,ssse3,sse4.1")]
    fn plus(self, other: Self) -> Self {
        Self { abef: _mm_add_epi32(self.abef, other.abef), cdgh: _mm_add_epi32(self.cdgh, other.cdgh) }
    }
}

/// Four words, the first in the lowest lane.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn words(first: u32, second: u32, third: u32, fourth: u32) -> __m128i {
    let word = u32::cast_signed;
    _mm_set_epi32(word(fourth), word(third), word(second), word(first))
}

/// The sixteen big-endian words of a block. The compiler combines the two halves into one load.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn message(block: &Block) -> [__m128i; 4] {
    let big_endian = _mm_set_epi64x(0x0c0d_0e0f_0809_0a0b, 0x0405_0607_0001_0203);
    let mut halves = block.as_chunks().0.iter().map(|half| i64::from_le_bytes(*half));
    let mut half = || halves.next().unwrap_or_default();
    [(); 4].map(|()| {
        let (low, high) = (half(), half());
        _mm_shuffle_epi8(_mm_set_epi64x(high, low), big_endian)
    })
}

/// The next four words of the message schedule, with their constants added. From the fifth group on they
/// are computed from the previous sixteen words and replace the oldest four.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn schedule<const GROUP: usize>(words: &mut [__m128i; 4]) -> __m128i {
    if GROUP >= 4 {
        let [oldest, second, third, newest] = [0, 1, 2, 3].map(|age| words[(GROUP + age) % 4]);
        let sum = _mm_add_epi32(_mm_sha256msg1_epu32(oldest, second), _mm_alignr_epi8::<4>(newest, third));
        words[GROUP % 4] = _mm_sha256msg2_epu32(sum, newest);
    }
    let [first, second, third, fourth] = ROUND_CONSTANTS[GROUP];
    _mm_add_epi32(words[GROUP % 4], self::words(first, second, third, fourth))
}

/// Moves the inputs of the last two of four rounds to where the instruction reads them.
#[inline]
#[target_feature(enable = "sha,ssse3,sse4.1")]
fn upper_half(input: __m128i) -> __m128i {
    _mm_shuffle_epi32::<0x0e>(input)
}
