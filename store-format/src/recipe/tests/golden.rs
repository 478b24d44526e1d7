//! Recipes that earlier versions wrote: they are read for ever, as the same values.

use super::*;

const SPLIT: &str = include_str!("../golden/1-split.json");
const ARCHIVE: &str = include_str!("../golden/2-archive.json");
const PACKED: &str = include_str!("../golden/3-packed.json");
const WHOLE: &str = include_str!("../golden/4-whole.json");

fn digest(text: &str) -> Digest {
    text.parse().unwrap()
}

/// A recipe, which must have the values that the JSON states.
fn parse(json: &str) -> Recipe {
    let recipe = Recipe::parse(json.as_bytes()).unwrap();
    let stated: serde_json::Value = serde_json::from_str(json).unwrap();
    assert_eq!(stated["file"], recipe.file().to_string());
    assert_eq!(stated["size"], recipe.size());
    assert_eq!(stated["pieces"], serde_json::to_value(recipe.pieces().to_vec()).unwrap());
    assert_eq!(stated["tensors"], serde_json::to_value(recipe.tensors()).unwrap());
    let outline = RecipeOutline::parse(json.as_bytes()).unwrap();
    assert_eq!((outline.file(), outline.size()), (recipe.file(), recipe.size()));
    assert!(outline.digests().iter().copied().eq(recipe.digests()));
    // In the current form it is the same value.
    let json = recipe.to_json();
    assert!(json.starts_with(b"{\"version\":5,"));
    assert_eq!(Recipe::parse(&json).unwrap(), recipe);
    recipe
}

#[test]
fn version_1_is_a_split_gguf_file() {
    let recipe = parse(SPLIT);
    assert_eq!(*recipe.kind(), RecipeKind::Split { format: Some(TensorFormat::Gguf) });
    let header = digest("sha256:b4d3d81739dbf2025e4b06bad6fcfef312b72f3a4c24d010ef764cbb15c7332e");
    assert_eq!(recipe.header(), Some((header, 576)));
    assert_eq!((recipe.tensors().len(), recipe.pieces().len()), (8, 6));
    let packed = recipe.tensors().iter().filter(|tensor| tensor.offset > 0).count();
    assert_eq!(packed, 3, "the second experts of three groups");
}

#[test]
fn version_2_is_an_archive() {
    let recipe = parse(ARCHIVE);
    let RecipeKind::Archive { members } = recipe.kind() else { panic!("{:?}", recipe.kind()) };
    let known: Vec<_> = members
        .iter()
        .map(|member| (&*member.path, member.offset, member.size, member.format, member.tensors))
        .collect();
    let expected = [
        ("README.md", 512, 6, None, 0),
        ("m/tiny.gguf", 1536, 64_160, Some(TensorFormat::Gguf), 21),
        ("m/noise.bin", 66_560, 104, None, 0),
    ];
    assert_eq!(known, expected);
    let weights = recipe.member_recipe(1).unwrap();
    assert_eq!((weights.tensors(), weights.size()), (recipe.tensors(), 64_160));
    assert!(weights.header().is_some() && recipe.header().is_none());
}

/// A GGUF file without tensors has its header in a blob; whether it was one, its name says.
#[test]
fn file_without_tensors_in_an_earlier_archive_has_the_format_of_its_name() {
    let renamed = ARCHIVE.replace("m/noise.bin", "m/VOCAB.gguf");
    let sealed = seal(format!("{}}}", renamed.split(",\"check\"").next().unwrap()).into_bytes());
    let formats: Vec<_> =
        Recipe::parse(&sealed).unwrap().members().iter().map(|member| member.format).collect();
    assert_eq!(formats, [None, Some(TensorFormat::Gguf), Some(TensorFormat::Gguf)]);
}

#[test]
fn version_3_is_a_compressed_archive() {
    let recipe = parse(PACKED);
    let archive = parse(ARCHIVE);
    assert!(matches!(recipe.kind(), RecipeKind::Packed(_)));
    let unpacked = Unpacked { compression: Compression::Gzip, digest: archive.file(), size: archive.size() };
    assert_eq!(recipe.unpacked(), Some(unpacked));
    assert_eq!((recipe.size(), recipe.members()), (63_697, archive.members()));
    assert_eq!((recipe.pieces(), recipe.tensors()), (archive.pieces(), archive.tensors()));
}

#[test]
fn version_4_is_a_whole_file() {
    let file = digest("sha256:7cce124054932555a082661dd4401ed06c4a6c4b76c9d2e8b325911af2403009");
    assert_eq!(parse(WHOLE), Recipe::for_whole_file(file, 263).unwrap());
}

/// Each version had the fields of its kind alone.
#[test]
fn earlier_version_with_the_fields_of_another_is_refused() {
    for (json, from, to) in [
        (SPLIT, "\"version\":1", "\"version\":2"),
        (SPLIT, "\"version\":1", "\"version\":3"),
        (SPLIT, "\"version\":1", "\"version\":4"),
        (SPLIT, "\"version\":1", "\"version\":5"),
        (SPLIT, "\"version\":1", "\"version\":1,\"kind\":\"split\""),
        (SPLIT, "\"version\":1", "\"version\":1,\"format\":\"gguf\""),
        (SPLIT, "\"version\":1", "\"version\":1,\"whole\":true"),
        (ARCHIVE, "\"version\":2", "\"version\":1"),
        (ARCHIVE, "\"version\":2", "\"version\":3"),
        (ARCHIVE, "\"version\":2", "\"version\":5"),
        (PACKED, "\"version\":3", "\"version\":2"),
        (PACKED, "\"version\":3", "\"version\":1"),
        (WHOLE, "\"version\":4", "\"version\":1"),
        (WHOLE, "\"version\":4,", "\"version\":5,\"kind\":\"whole\","),
        (WHOLE, "\"whole\":true,", ""),
    ] {
        let changed = json.replacen(from, to, 1);
        assert_ne!(changed, json, "{from}");
        let body = changed.split(",\"check\"").next().unwrap();
        let sealed = seal(format!("{body}}}").into_bytes());
        for error in [Recipe::parse(&sealed).err(), RecipeOutline::parse(&sealed).err()] {
            assert!(matches!(error, Some(RecipeError::Fields { .. })), "{to}: {error:?}");
        }
    }
}
