//! Digests are equal to those of `sha2` for all lengths, phases and cuts.

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
