//! Recipes.
//!
//! Invariant: any bytes are refused or make a recipe whose pieces are not empty and add up to its
//! size (or to that of its content, if the file is packed), whose tensors lie in blobs that the pieces name and
//! have names of their own in their file, which reads back from its own JSON, and whose outline names the same
//! blobs; each file of an archive has a recipe with its size and its tensors; and if the file is cut in two at any
//! offset, the sizes of both parts add up to its size.
#![no_main]

use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::{Piece, Recipe, RecipeKind, RecipeOutline, TensorEntries, seal};
use blobd_store_format::stored_file::Source;
use libfuzzer_sys::fuzz_target;

fuzz_target!(|bytes: &[u8]| {
    // As it is, and with a correct checksum, which a fuzzer would not find.
    let body = bytes.split(|byte| *byte == b'\n').next().unwrap_or_default();
    let end = body.windows(8).rposition(|part| part == b",\"check\"").unwrap_or(body.len());
    let sealed = seal([&body[..end], b"}"].concat());
    let Ok(recipe) = Recipe::parse(bytes).or_else(|_| Recipe::parse(&sealed)) else { return };
    let json = recipe.to_json();
    assert!(Recipe::parse(&json).is_ok_and(|again| again == recipe));
    let outline = RecipeOutline::parse(&json).expect("every recipe has an outline");
    assert!((outline.file(), outline.size()) == (recipe.file(), recipe.size()));
    assert!(outline.digests().iter().copied().eq(recipe.digests()));
    check_kind(&recipe);

    let sizes = recipe.blob_sizes();
    let mut sum = 0_u128;
    for piece in recipe.pieces().iter() {
        assert!(piece.length() > 0);
        sum += u128::from(piece.length());
        if let Piece::Blob { blob, offset, length } = piece {
            assert!(u128::from(*offset) + u128::from(*length) <= u128::from(sizes[blob]));
        }
    }
    let content_bytes = recipe.unpacked().map_or(recipe.size(), |unpacked| unpacked.size);
    assert_eq!(sum, u128::from(content_bytes));
    let seed = bytes.iter().fold(0_u64, |sum, byte| sum.wrapping_mul(0x0100_0000_01b3) ^ u64::from(*byte));
    let bound = seed.checked_rem(content_bytes).unwrap_or_default();
    for (range, length) in [(0..bound, bound), (bound..u64::MAX, content_bytes - bound)] {
        let mut sum = 0;
        for source in recipe.pieces().sources(range) {
            assert!(source.length() > 0);
            sum += source.length();
            if let Source::Blob { blob, offset, length } = source {
                assert!(u128::from(offset) + u128::from(length) <= u128::from(sizes[&blob]));
            }
        }
        assert_eq!(sum, length);
    }
    assert!(sizes.keys().copied().eq(recipe.digests()));
    for tensor in recipe.tensors().iter() {
        let end = u128::from(tensor.offset) + u128::from(tensor.size);
        match sizes.get(&tensor.digest) {
            Some(size) => assert!(end <= u128::from(*size)),
            None => assert!(tensor.size == 0 && tensor.digest == Digest::of(b"")),
        }
        if let Some(experts) = tensor.experts {
            assert_eq!(u128::from(experts.count) * u128::from(experts.stride), u128::from(tensor.size));
        }
    }
    if let Some((header, size)) = recipe.header() {
        assert!(size <= sizes[&header]);
    }
});

fn check_kind(recipe: &Recipe) {
    match recipe.kind() {
        RecipeKind::Split { format } => {
            assert!(format.is_some() && recipe.members().is_empty());
            check_names(recipe.tensors());
        }
        RecipeKind::Archive { .. } | RecipeKind::Packed(_) => {
            let mut count = 0;
            for (index, member) in recipe.members().iter().enumerate() {
                let own = recipe.member_recipe(index).expect("the file was checked");
                assert!(own.size() == member.size && own.tensors().len() as u64 == member.tensors);
                assert!(own.format() == member.format);
                check_names(own.tensors());
                count += own.tensors().len();
            }
            assert_eq!(count, recipe.tensors().len());
        }
        RecipeKind::Whole => assert!(recipe.tensors().is_empty() && recipe.pieces().len() <= 1),
    }
    assert_eq!(recipe.unpacked().is_some(), matches!(recipe.kind(), RecipeKind::Packed(_)));
}

fn check_names(tensors: &TensorEntries) {
    let names: std::collections::HashSet<_> = tensors.names().collect();
    assert_eq!(names.len(), tensors.len());
}
