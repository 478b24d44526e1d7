//! Dequantisation, compared with numbers that PyPI's `gguf` computed, and with numbers computed by hand.
//!
//! `tests/quants.py` compares it with `gguf` itself on random blocks.

use proptest::prelude::*;

use super::*;
use blobd_store_format::digest::Digest;

/// For a block from [`sample_block`]: the bits of elements 0, 1, 17 and the last, and the start of the
/// SHA-256 of all elements, little-endian. Then the start of the SHA-256 of the elements of
/// [`random_blocks`]. Computed by PyPI's gguf 0.19.0 with numpy; the last five, which it does not convert, by
/// numpy from the formulas of `docs/FORMATS.md`.
const EXPECTED: [(&str, [u32; 4], &str, &str); 28] = [
    ("Q4_0", [0x3ec48c00, 0xbec48c00, 0x3de0a000, 0x3ec48c00], "70c80d21346282de", "532bdd1b7aeac7ca"),
    ("Q4_1", [0x3d35a800, 0x3f4fe680, 0x3e55e200, 0x3e1dba00], "2c1ec478ef1219e0", "743054e46b5850ac"),
    ("Q5_0", [0x3f1a6e00, 0x3e8c6400, 0xbf368200, 0xbec48c00], "404dbc820b7849c0", "fa82420e489cda4d"),
    ("Q5_1", [0x3fca3940, 0x3e1dba00, 0x3f921140, 0x3e55e200], "41ea7d1a6dd1d82d", "01017de282a7402b"),
    ("Q8_0", [0x40a6b6c0, 0xc0a6b6c0, 0x402bfa80, 0xc03a0480], "1334e401856508e3", "8bc65c65efc2bf6b"),
    ("Q2_K", [0x409a2400, 0x41673600, 0xc6b9a06b, 0xc82e4200], "b846511204b1fd8b", "5dd7180d6388384a"),
    ("Q3_K", [0xbc9ac600, 0xbd682900, 0x3e0e7640, 0x3df2b680], "8a2be1d23b8ef291", "db382d862bfa0603"),
    ("Q4_K", [0x41613638, 0x41f196fc, 0x41f196fc, 0x40af78d0], "a4836111dada52b2", "08af785d7304ae96"),
    ("Q5_K", [0x4264480e, 0x429262ff, 0x429262ff, 0x40dd1950], "070a1bc0520d0f2e", "493c99da8073659b"),
    ("Q6_K", [0x442af118, 0xc4d1cacc, 0x43ff6630, 0x43b513a0], "6adec09f000f27fc", "ab1232e7f17b9b44"),
    ("IQ1_S", [0x3edd1d80, 0x3edd1d80, 0x3edd1d80, 0x3e136900], "8b2e53c95b9fc4e4", "de808b2c07006bd1"),
    ("IQ1_M", [0x4635dac0, 0x4635dac0, 0xc412f400, 0xc5809580], "980de08b16d30bec", "91b8087f51cf263a"),
    ("IQ2_XXS", [0xbf1a6e00, 0xc04f83d0, 0x3ff14be0, 0xbf368200], "3e18ce86320b20d9", "3c8e113c6baeb5d5"),
    ("IQ2_XS", [0x41123424, 0x41123424, 0xbf039dc0, 0x40b337a8], "93353f9efbdc54e3", "ac23ad0f427e169a"),
    ("IQ2_S", [0xc0248530, 0xbf529600, 0x3fa17300, 0x3f998d60], "371f846e219bc1de", "179580dd0c16a6ef"),
    ("IQ3_XXS", [0xc0952a40, 0xc0952a40, 0xc1063fa0, 0xbe8c6400], "ee9a35cf3fe8bc61", "76699981baffb381"),
    ("IQ3_S", [0xc0ece8c0, 0xc0839dc0, 0x3f529600, 0x3fbd8700], "929e9138fb5e83f6", "b5220ea8af1bef04"),
    ("IQ4_NL", [0x40c64d40, 0xc0b68200, 0x3faf7d00, 0x40c64d40], "f81f427488335e37", "dc21d7b48d5459fc"),
    ("IQ4_XS", [0x4280a7a4, 0xc27264a8, 0xc20284f8, 0x40c80e80], "fe7b2a00f15fe34c", "73d8151118c516c9"),
    ("TQ1_0", [0xbfe82000, 0xbfe82000, 0x3fe82000, 0x00000000], "a70f114b915925bd", "c35e30ab96164ce9"),
    ("TQ2_0", [0x00000000, 0x45f8a000, 0x45f8a000, 0xc578a000], "f1a460af42f9729c", "a39a5dc9d281f2fb"),
    ("MXFP4", [0x82c00000, 0x83c00000, 0x03400000, 0x83c00000], "7dc05c75fc518c27", "402c324112d00a22"),
    ("NVFP4", [0x3ba00000, 0xbd700000, 0x40040000, 0xbe900000], "b6ba374d70fb829a", "7324c797b0976096"),
    (
        "MXFP4_OLLAMA",
        [0x82c00000, 0x02800000, 0x03400000, 0x83c00000],
        "2c727d4c9858eb12",
        "ed3f232af93fc68d",
    ),
    ("Q8_1", [0xbf529600, 0x408aa2c0, 0xc0aa3940, 0xc05d1d80], "84c45d682605fbf7", "97ca347c22b891f6"),
    ("Q8_K", [0x23513855, 0xa489bc8d, 0x24a91e9a, 0x24a5a1ee], "a9a00b736ed57333", "01b265c052b51f5e"),
    ("Q1_0", [0x3d60a000, 0x3d60a000, 0xbd60a000, 0x3d60a000], "7813bc342b057249", "54c1b2b79dc04e5c"),
    ("Q2_0", [0x3de0a000, 0x3de0a000, 0x3d60a000, 0x3de0a000], "d8ace1793f5dfcc7", "fca2cd5aa0d757c0"),
];

fn sample_block(size: u64) -> Vec<u8> {
    (0..size).map(|i| ((i * i * 7 + i * 31 + 5) % 256).try_into().unwrap()).collect()
}

fn numbers(ggml_type: GgmlType, bytes: &[u8]) -> Vec<f32> {
    let mut out = vec![f32::NAN; element_count(ggml_type, bytes).unwrap()];
    dequantize(ggml_type, bytes, &mut out).unwrap();
    out
}

/// A block that starts with this half-precision number.
fn scaled_block(scale: u16, rest: impl IntoIterator<Item = u8>) -> Vec<u8> {
    scale.to_le_bytes().into_iter().chain(rest).collect()
}

const ONE: u16 = 0x3c00;
const TWO: u16 = 0x4000;

/// The start of the SHA-256 of numbers. All NaNs are treated as equal.
fn digest(numbers: &[f32]) -> String {
    let bits = |value: &f32| if value.is_nan() { 0x7fc0_0000 } else { value.to_bits() };
    let bytes: Vec<u8> = numbers.iter().flat_map(|value| bits(value).to_le_bytes()).collect();
    Digest::of(&bytes).to_hex()[..16].to_owned()
}

/// Enough pseudo-random blocks to use every entry of every codebook: the upper bytes of a linear congruential generator
/// with the constants of Knuth's MMIX.
fn random_blocks(block_bytes: u64) -> Vec<u8> {
    const BLOCKS: u64 = 1024;
    let mut state = 1_u64;
    let next = |_| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        state.to_be_bytes()[0]
    };
    (0..BLOCKS * block_bytes).map(next).collect()
}

#[test]
fn sample_blocks_give_the_numbers_of_gguf() {
    for (name, [first, second, eighteenth, last], expected, _) in EXPECTED {
        let ggml_type = GgmlType::from_name(name).unwrap();
        let layout = BlockLayout::for_type(ggml_type).unwrap();
        let found = numbers(ggml_type, &sample_block(layout.bytes()));
        let bits: Vec<_> = found.iter().map(|value| value.to_bits()).collect();
        assert_eq!(
            [bits[0], bits[1], bits[17], bits[bits.len() - 1]],
            [first, second, eighteenth, last],
            "{name}"
        );
        assert_eq!(digest(&found), expected, "{name}");
    }
}

#[test]
fn random_blocks_give_the_numbers_of_gguf() {
    for (name, _, _, expected) in EXPECTED {
        let ggml_type = GgmlType::from_name(name).unwrap();
        let layout = BlockLayout::for_type(ggml_type).unwrap();
        assert_eq!(digest(&numbers(ggml_type, &random_blocks(layout.bytes()))), expected, "{name}");
    }
}

#[test]
fn every_type_with_blocks_of_several_elements_has_a_sample() {
    let quantised = BlockLayout::all().filter(|layout| layout.elements() > 1);
    let mut names: Vec<_> = quantised.map(|layout| layout.ggml_type().name().into_owned()).collect();
    let mut sampled: Vec<_> = EXPECTED.iter().map(|(name, ..)| (*name).to_owned()).collect();
    names.sort_unstable();
    sampled.sort_unstable();
    assert_eq!(names, sampled);
}

#[test]
fn plain_numbers_are_their_own_values() {
    assert_eq!(numbers(GgmlType::F32, &(-1.5_f32).to_le_bytes()), [-1.5]);
    assert_eq!(numbers(GgmlType::F16, &[0x00, 0xc1]), [-2.5]);
    assert_eq!(numbers(GgmlType::BF16, &[0x20, 0xc0]), [-2.5]);
    assert_eq!(numbers(GgmlType::F64, &0.1_f64.to_le_bytes()), [0.1]);
    assert_eq!(numbers(GgmlType::I8, &[0xff, 0x80]), [-1.0, -128.0]);
    assert_eq!(numbers(GgmlType::I16, &(-300_i16).to_le_bytes()), [-300.0]);
    assert_eq!(numbers(GgmlType::I32, &16_777_217_i32.to_le_bytes()), [16_777_216.0]);
    assert_eq!(numbers(GgmlType::I64, &i64::MIN.to_le_bytes()), [-9.223_372e18]);
}

#[test]
fn values_of_wide_types_are_exact() {
    let integers = [i64::MAX.to_le_bytes(), (-1_i64).to_le_bytes()].concat();
    assert_eq!(Values::from_bytes(GgmlType::I64, &integers), Ok(Values::I64(vec![i64::MAX, -1])));
    assert_eq!(
        Values::from_bytes(GgmlType::I32, &16_777_217_i32.to_le_bytes()),
        Ok(Values::I64(vec![16_777_217]))
    );
    assert_eq!(Values::from_bytes(GgmlType::I16, &[0, 128]), Ok(Values::I64(vec![-32768])));
    assert_eq!(Values::from_bytes(GgmlType::I8, &[255]), Ok(Values::I64(vec![-1])));
    assert_eq!(Values::from_bytes(GgmlType::F64, &0.1_f64.to_le_bytes()), Ok(Values::F64(vec![0.1])));
    let halves = Values::from_bytes(GgmlType::F16, &[0x00, 0xc1, 0x00, 0x3c]).unwrap();
    assert_eq!((&halves, halves.len()), (&Values::F32(vec![-2.5, 1.0]), 2));
    let mut all = Vec::new();
    for values in [halves, Values::I64(vec![-7]), Values::F64(vec![0.1])] {
        values.append_to(&mut all);
    }
    assert_eq!(all, [-2.5, 1.0, -7.0, 0.1]);
    assert!(Values::from_bytes(GgmlType::Q4_K, &[]).unwrap().is_empty());
}

#[test]
fn quants_of_four_and_five_bits_have_offsets_or_minimums() {
    let nibbles = || (0..16).map(|i| i | ((15 - i) << 4));
    let q4_0 = numbers(GgmlType::Q4_0, &scaled_block(TWO, nibbles()));
    assert_eq!((q4_0[0], q4_0[15], q4_0[16], q4_0[31]), (-16.0, 14.0, 14.0, -16.0));
    let q4_1 = numbers(GgmlType::Q4_1, &scaled_block(TWO, ONE.to_le_bytes().into_iter().chain(nibbles())));
    assert_eq!((q4_1[0], q4_1[15], q4_1[16]), (1.0, 31.0, 31.0));
    // The fifth bit is set for elements 0 and 31.
    let fifth = [1, 0, 0, 0x80];
    let q5_0 = numbers(GgmlType::Q5_0, &scaled_block(ONE, fifth.into_iter().chain(nibbles())));
    assert_eq!((q5_0[0], q5_0[1], q5_0[31]), (0.0, -15.0, 0.0));
    let q5_1 = ONE.to_le_bytes().into_iter().chain(fifth).chain(nibbles());
    let q5_1 = numbers(GgmlType::Q5_1, &scaled_block(ONE, q5_1));
    assert_eq!((q5_1[0], q5_1[1], q5_1[31]), (17.0, 2.0, 17.0));
}

#[test]
fn second_field_of_q8_1_is_not_a_minimum() {
    let block = scaled_block(TWO, ONE.to_le_bytes().into_iter().chain([255; 32]));
    assert_eq!(numbers(GgmlType::Q8_1, &block), [-2.0; 32]);
}

#[test]
fn scale_of_q8_k_has_32_bits() {
    let block: Vec<u8> = 0.1_f32.to_le_bytes().into_iter().chain([128; 256]).chain([9; 32]).collect();
    assert_eq!(numbers(GgmlType::Q8_K, &block), [0.1 * -128.0; 256]);
}

#[test]
fn ollamas_mxfp4_has_neighbours_in_one_byte() {
    // Exponent 128 is a scale of 2; the formula multiplies half of it by doubled values.
    let block: Vec<u8> = [128].into_iter().chain((0..16).map(|i| i | ((15 - i) << 4))).collect();
    let (ollama, ggml) = (numbers(GgmlType::MXFP4_OLLAMA, &block), numbers(GgmlType::MXFP4, &block));
    assert_eq!(ollama[..6], [0.0, -12.0, 1.0, -8.0, 2.0, -6.0]);
    assert_eq!(ggml[..4], [0.0, 1.0, 2.0, 3.0]);
    assert_eq!(ggml[16..20], [-12.0, -8.0, -6.0, -4.0]);
}

#[test]
fn extreme_exponents_of_mxfp4_are_powers_of_two() {
    let scale = |exponent: u8| numbers(GgmlType::MXFP4, &[[exponent].as_slice(), &[0x11; 16]].concat())[0];
    assert_eq!(scale(0).to_bits(), 1 << 21, "2^-128 is not a normal number");
    assert_eq!(scale(1), f32::MIN_POSITIVE / 2.0);
    assert_eq!(scale(2), f32::MIN_POSITIVE);
    assert_eq!(scale(255), 2.0_f32.powi(127));
}

#[test]
fn scales_of_nvfp4_ignore_the_sign_and_have_one_zero_more() {
    let scale = |bits: u8| numbers(GgmlType::NVFP4, &[[bits; 4].as_slice(), &[0x22; 32]].concat())[0];
    assert_eq!([scale(0x38), scale(0xb8)], [1.0, 1.0]);
    assert_eq!([scale(0x7f), scale(0xff), scale(0x7e)], [0.0, 480.0, 448.0]);
    assert_eq!([scale(0x00), scale(0x01), scale(0x80)], [0.0, 1.0 / 512.0, 0.0]);
}

#[test]
fn ternary_types_give_three_values() {
    assert_eq!(numbers(GgmlType::Q1_0, &scaled_block(TWO, [0b1; 16]))[..3], [2.0, -2.0, -2.0]);
    assert_eq!(numbers(GgmlType::Q2_0, &scaled_block(TWO, [0b1110_0100; 16]))[..4], [-2.0, 0.0, 2.0, 4.0]);
    // 243 values of five ternary digits are spread over 256: the digits of 2/3 are 2, 0, 0, 0, 0.
    let block = [&[171; 52][..], &ONE.to_le_bytes()].concat();
    let tq1_0 = numbers(GgmlType::TQ1_0, &block);
    assert_eq!((tq1_0[0], tq1_0[32], tq1_0[160], tq1_0[240], tq1_0[244]), (1.0, -1.0, 1.0, 1.0, -1.0));
}

#[test]
fn infinite_and_undefined_scales_are_kept() {
    let infinite = numbers(GgmlType::Q8_0, &scaled_block(0x7c00, [0; 32]));
    assert!(infinite.iter().all(|value| value.is_nan()), "zero times infinity");
    let undefined = numbers(GgmlType::Q4_0, &scaled_block(0x7e00, [0; 16]));
    assert!(undefined.iter().all(|value| value.is_nan()));
    assert_eq!(numbers(GgmlType::Q4_0, &scaled_block(0xfc00, [0xff; 16])), [f32::NEG_INFINITY; 32]);
}

#[test]
fn several_blocks_are_converted_in_order() {
    for layout in BlockLayout::all() {
        let (ggml_type, block) = (layout.ggml_type(), sample_block(layout.bytes()));
        let other: Vec<u8> = block.iter().rev().copied().collect();
        let both = numbers(ggml_type, &[block.clone(), other.clone()].concat());
        let one_by_one = [numbers(ggml_type, &block), numbers(ggml_type, &other)].concat();
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&both), bits(&one_by_one), "{ggml_type}");
    }
}

#[test]
fn pieces_have_as_many_elements_for_every_type() {
    for layout in BlockLayout::all() {
        let (ggml_type, size) = (layout.ggml_type(), usize::try_from(layout.bytes()).unwrap());
        assert!(65_536_u64.is_multiple_of(layout.elements()), "{ggml_type}");
        let blocks = usize::try_from(65_536 / layout.elements()).unwrap();
        let tensor = vec![0; (blocks + 1) * size];
        let lengths: Vec<_> =
            ElementType::from(ggml_type).pieces(&tensor).unwrap().map(<[u8]>::len).collect();
        assert_eq!(lengths, [blocks * size, size], "{ggml_type}");
    }
    assert_eq!(ElementType::from(GgmlType::F32).pieces(&[]).unwrap().count(), 0);
    assert!(ElementType::from(GgmlType::F32).pieces(&[0; 3]).is_err());
    assert!(ElementType::from(GgmlType::from_id(77)).pieces(&[]).is_err());
}

#[test]
fn unknown_types_partial_blocks_and_wrong_lengths_are_refused() {
    let unknown = GgmlType::from_id(142);
    assert_eq!(dequantize(unknown, &[0; 18], &mut []), Err(QuantError::UnknownType { ggml_type: unknown }));
    assert_eq!(Values::from_bytes(unknown, &[]), Err(QuantError::UnknownType { ggml_type: unknown }));
    let partial = QuantError::PartialBlock { ggml_type: GgmlType::Q4_0, found: 17, block_bytes: 18 };
    assert_eq!(dequantize(GgmlType::Q4_0, &[0; 17], &mut [0.0; 32]), Err(partial.clone()));
    assert_eq!(Values::from_bytes(GgmlType::Q4_0, &[0; 17]), Err(partial));
    let mut out = [7.0; 31];
    let short = QuantError::OutputLength { found: 31, expected: 32 };
    assert_eq!(dequantize(GgmlType::Q4_0, &[0; 18], &mut out), Err(short));
    assert_eq!(out, [7.0; 31]);
}

proptest! {
    #[test]
    fn any_bytes_are_converted_or_refused(id in 0_u32..44, bytes in prop::collection::vec(any::<u8>(), 0..600)) {
        let ggml_type = GgmlType::from_id(id);
        let Ok(count) = element_count(ggml_type, &bytes) else { return Ok(()) };
        let mut out = vec![0.0; count];
        prop_assert_eq!(dequantize(ggml_type, &bytes, &mut out), Ok(()));
        prop_assert_eq!(Values::from_bytes(ggml_type, &bytes).map(|values| values.len()), Ok(count));
    }

    #[test]
    fn whole_blocks_of_any_type_are_converted(id in 0_u32..43, blocks in 0_usize..4, byte: u8) {
        let Some((elements, bytes)) = GgmlType::from_id(id).block() else { return Ok(()) };
        let tensor = vec![byte; blocks * usize::try_from(bytes).unwrap()];
        let expected = blocks * usize::try_from(elements).unwrap();
        prop_assert_eq!(element_count(GgmlType::from_id(id), &tensor), Ok(expected));
    }
}
