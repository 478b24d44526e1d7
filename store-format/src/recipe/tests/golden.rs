//! Recipes as each version wrote them. Every later version reads them as the same values.

use super::*;

const SPLIT: &str = include_str!("../golden/1-split.json");
const ARCHIVE: &str = include_str!("../golden/2-archive.json");
const PACKED: &str = include_str!("../golden/3-packed.json");
const WHOLE: &str = include_str!("../golden/4-whole.json");
/// The same four files in each later version.
const VERSION_5: [&str; 4] = [
    include_str!("../golden/5-split.json"),
    include_str!("../golden/5-archive.json"),
    include_str!("../golden/5-packed.json"),
    include_str!("../golden/5-whole.json"),
];
const VERSION_6: [&str; 4] = [
    include_str!("../golden/6-split.json"),
    include_str!("../golden/6-archive.json"),
    include_str!("../golden/6-packed.json"),
    include_str!("../golden/6-whole.json"),
];

const VERSION_7: &str = include_str!("../golden/7-split.json");

fn digest(text: &str) -> Digest {
    text.parse().unwrap()
}

/// The form of a piece before version 6.
fn piece_json(piece: &Piece) -> serde_json::Value {
    match piece {
        Piece::Blob { blob, offset, length } => {
            serde_json::json!({ "blob": blob, "offset": offset, "length": length })
        }
        Piece::Zeros { zeros } => serde_json::json!({ "zeros": zeros }),
        Piece::Literal { literal } => {
            let literal = literal::serialize(literal, serde_json::value::Serializer).unwrap();
            serde_json::json!({ "literal": literal })
        }
    }
}

/// A recipe of a version before 6, which must have the values that the JSON states.
fn parse(json: &str) -> Recipe {
    let recipe = Recipe::parse(json.as_bytes()).unwrap();
    let stated: serde_json::Value = serde_json::from_str(json).unwrap();
    assert_eq!(stated["file"], recipe.file().to_string());
    assert_eq!(stated["size"], recipe.size());
    assert_eq!(stated["pieces"], recipe.pieces().iter().map(piece_json).collect::<serde_json::Value>());
    assert_eq!(stated["tensors"], serde_json::to_value(recipe.tensors().iter().collect::<Vec<_>>()).unwrap());
    let outline = RecipeOutline::parse(json.as_bytes()).unwrap();
    assert_eq!((outline.file(), outline.size()), (recipe.file(), recipe.size()));
    assert!(outline.digests().iter().copied().eq(recipe.digests()));
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

/// A GGUF file without tensors is stored as a header blob; only its name shows that it was a GGUF file.
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

#[test]
fn every_version_reads_as_the_same_recipe_and_the_current_one_is_written() {
    for (index, earliest) in [SPLIT, ARCHIVE, PACKED, WHOLE].into_iter().enumerate() {
        let recipe = parse(earliest);
        assert_eq!(parse(VERSION_5[index]), recipe);
        let current = VERSION_6[index];
        assert_eq!(Recipe::parse(current.as_bytes()).unwrap(), recipe);
        let outline = RecipeOutline::parse(current.as_bytes()).unwrap();
        assert!(outline.digests().iter().copied().eq(recipe.digests()));
        assert_eq!(String::from_utf8(recipe.to_json()).unwrap(), current);
    }
}

/// Written only for files that an earlier blobd would misread.
#[test]
fn version_7_is_a_split_file_that_has_only_parts_of_some_blobs() {
    let recipe = Recipe::parse(VERSION_7.as_bytes()).unwrap();
    let (experts, header) = (Digest::of(b"experts"), Digest::of(b"header"));
    assert_eq!((recipe.header(), recipe.size()), (Some((header, 64)), 224));
    assert_eq!(*recipe.shared_blobs(), BTreeMap::from([(experts, 256)]));
    assert_eq!(recipe.pieces().last(), Some(&Piece::Blob { blob: experts, offset: 64, length: 128 }));
    assert_eq!(recipe.blob_sizes().get(&experts), Some(&256));
    assert_eq!(String::from_utf8(recipe.to_json()).unwrap(), VERSION_7);
    let outline = RecipeOutline::parse(VERSION_7.as_bytes()).unwrap();
    assert!(outline.digests().iter().copied().eq(recipe.digests()));
}

/// Each version had only the fields of its kind.
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
        (VERSION_5[0], "\"version\":5", "\"version\":6"),
        (VERSION_5[0], "\"pieces\"", "\"blobs\":[],\"pieces\""),
        (VERSION_6[0], "\"version\":6", "\"version\":5"),
        (VERSION_6[0], "\"version\":6", "\"version\":7"),
        (VERSION_7, "\"version\":7", "\"version\":6"),
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
