//! Recipes of every kind and version, and what is refused.

use proptest::prelude::*;

use super::RecipeOutline;
use super::*;

mod golden;

fn blob_piece(blob: Digest, offset: u64, length: u64) -> Piece {
    Piece::Blob { blob, offset, length }
}

fn tensor(name: &str, digest: Digest, offset: u64, size: u64) -> TensorEntry<'_> {
    let (name, type_name, shape) = (name.into(), "F32".into(), vec![size / 4].into());
    TensorEntry { name, type_name, shape, digest, offset, size, experts: None }
}

fn split(file: Digest, pieces: Vec<Piece>, tensors: Vec<TensorEntry<'_>>) -> Result<Recipe, RecipeError> {
    Recipe::new(file, TensorFormat::Gguf, pieces, tensors)
}

fn sample() -> Recipe {
    let (header, weights) = (Digest::of(b"header"), Digest::of(b"weights"));
    let pieces = vec![
        blob_piece(header, 0, 6),
        Piece::Zeros { zeros: 26 },
        blob_piece(weights, 0, 64),
        Piece::Literal { literal: vec![0xff, 0, 1] },
    ];
    split(Digest::of(b"file"), pieces, vec![tensor("t", weights, 0, 64)]).unwrap()
}

fn member(path: &str, offset: u64, size: u64, tensors: u64) -> Member {
    let format = (tensors > 0).then_some(TensorFormat::Gguf);
    Member { path: path.to_owned(), offset, size, digest: Digest::of(path.as_bytes()), format, tensors }
}

/// An archive of 100 bytes: a header of 10, a file of 40 with a tensor of 30, one of 5, and zeros.
fn archive_with(members: Vec<Member>) -> Result<Recipe, RecipeError> {
    let (header, weights) = (Digest::of(b"header"), Digest::of(b"weights"));
    let pieces = vec![
        Piece::Literal { literal: vec![1; 10] },
        blob_piece(header, 0, 10),
        blob_piece(weights, 0, 30),
        Piece::Literal { literal: b"text, 5".to_vec() },
        Piece::Zeros { zeros: 43 },
    ];
    Recipe::for_archive(Digest::of(b"archive"), pieces, vec![tensor("t", weights, 0, 30)], members)
}

fn archive() -> Recipe {
    archive_with(vec![member("m.gguf", 10, 40, 1), member("a.txt", 52, 5, 0)]).unwrap()
}

fn packed() -> Recipe {
    Recipe::for_packed(Digest::of(b"packed"), 5, Compression::Gzip, archive()).unwrap()
}

fn whole() -> Recipe {
    Recipe::for_whole_file(Digest::of(b"a file"), 6).unwrap()
}

/// Parses the JSON form of a recipe with one change and a correct check.
fn parse_changed(recipe: &Recipe, from: &str, to: &str) -> Result<Recipe, RecipeError> {
    let json = String::from_utf8(recipe.to_json()).unwrap();
    let changed = json.replacen(from, to, 1);
    assert_ne!(changed, json, "{from} is not in {json}");
    assert!(Recipe::parse(changed.as_bytes()).is_err(), "{to} was accepted without a check");
    let body = changed.split(",\"check\"").next().unwrap();
    let sealed = seal(format!("{body}}}").into_bytes());
    let recipe = Recipe::parse(&sealed);
    assert!(!matches!(recipe, Err(RecipeError::Check { .. })), "{to}");
    assert!(recipe.is_err() || RecipeOutline::parse(&sealed).is_ok(), "{to}");
    recipe
}

#[test]
fn padding_is_limited() {
    let of = |zeros: &[u64]| {
        let pieces = zeros.iter().map(|zeros| Piece::Zeros { zeros: *zeros }).collect();
        split(Digest::of(b"a file"), pieces, Vec::new())
    };
    let most = Recipe::MAX_LITERAL_BYTES;
    assert!(of(&[most]).is_ok());
    assert!(matches!(of(&[8, most + 1]), Err(RecipeError::Padding { index: 1, .. })));
    let count = usize::try_from(Recipe::MAX_LITERALS_BYTES / most).unwrap();
    assert!(of(&vec![most; count]).is_ok());
    assert!(matches!(of(&vec![most; count + 1]), Err(RecipeError::Padding { .. })));
}

#[test]
fn json_form_reads_back_as_the_same_recipe() {
    let recipe = sample();
    assert_eq!((recipe.size(), recipe.format()), (99, Some(TensorFormat::Gguf)));
    assert_eq!(recipe.header(), Some((Digest::of(b"header"), 6)));
    assert_eq!(recipe.digests().len(), 2);
    for (recipe, start) in [
        (recipe, r#"{"version":6,"kind":"split","format":"gguf","file":"sha256:"#),
        (archive(), r#"{"version":6,"kind":"archive","file":"sha256:"#),
        (packed(), r#"{"version":6,"kind":"packed","file":"sha256:"#),
        (whole(), r#"{"version":6,"kind":"whole","file":"sha256:"#),
    ] {
        let json = String::from_utf8(recipe.to_json()).unwrap();
        assert!(json.starts_with(start), "{json}");
        assert_eq!(Recipe::parse(json.as_bytes()).unwrap(), recipe);
        let outline = RecipeOutline::parse(json.as_bytes()).unwrap();
        assert_eq!((outline.file(), outline.size()), (recipe.file(), recipe.size()));
    }
}

#[test]
fn wrong_size_version_or_field_is_refused() {
    for (from, to) in [
        ("\"size\":99", "\"size\":98"),
        ("\"version\":6", "\"version\":6,\"extra\":1"),
        ("\"zeros\":26", "\"zeros\":0"),
        ("\"zeros\":26", "\"zeros\":18446744073709551615"),
        ("\"zeros\":26", "\"zeros\":-26"),
        ("\"zeros\":26", "\"zeros\":26,\"literal\":\"AA==\""),
        ("\"zeros\":26", "\"zeros\":26,\"more\":1"),
        ("/wAB", "/wA"),
        ("\"offset\":0,\"length\":64", "\"offset\":0"),
        ("\"offset\":0,\"size\":64", "\"offset\":1,\"size\":64"),
        ("\"offset\":0,\"size\":64", "\"offset\":18446744073709551615,\"size\":64"),
        ("\"format\":\"gguf\",", ""),
        ("\"gguf\"", "\"ggml\""),
        ("\"split\"", "\"cut\""),
    ] {
        assert!(parse_changed(&sample(), from, to).is_err(), "{to} was accepted");
    }
}

#[test]
fn fields_of_another_kind_are_refused() {
    let unpacked =
        format!(r#""unpacked":{{"compression":"gzip","digest":"{}","size":99}},"#, Digest::of(b""));
    for (recipe, from, to) in [
        (sample(), "\"split\"", "\"archive\""),
        (sample(), "\"split\"", "\"whole\""),
        (sample(), "\"split\"", "\"packed\""),
        (sample(), "\"kind\":\"split\",", ""),
        (sample(), "\"format\":\"gguf\",", ""),
        (sample(), "\"pieces\"", &*format!("{unpacked}\"pieces\"")),
        (sample(), "\"pieces\"", "\"members\":[],\"pieces\""),
        (sample(), "\"pieces\"", "\"whole\":true,\"pieces\""),
        (archive(), "\"archive\"", "\"split\""),
        (archive(), "\"archive\"", "\"packed\""),
        (archive(), "\"pieces\"", &*format!("{unpacked}\"pieces\"")),
        (archive(), "\"kind\":\"archive\"", "\"kind\":\"archive\",\"format\":\"gguf\""),
        (packed(), "\"packed\"", "\"archive\""),
        (packed(), "\"packed\"", "\"whole\""),
        (whole(), "\"whole\"", "\"archive\""),
        (whole(), "\"whole\"", "\"split\",\"format\":\"gguf\",\"whole\":true"),
    ] {
        let error = parse_changed(&recipe, from, to).unwrap_err();
        assert!(matches!(error, RecipeError::Fields { version: 6, .. }), "{to}: {error}");
    }
}

/// The number of an early version stands for the kind, so such a recipe has no field `kind`.
#[test]
fn earlier_version_with_a_kind_is_refused() {
    for recipe in [sample(), archive(), packed(), whole()] {
        for version in (1..=Recipe::VERSION).filter(|version| *version != 6) {
            let error =
                parse_changed(&recipe, "\"version\":6", &format!("\"version\":{version}")).unwrap_err();
            assert!(matches!(error, RecipeError::Fields { .. }), "{version}: {error}");
        }
    }
}

#[test]
fn later_version_is_named_even_if_its_fields_are_unknown() {
    for to in ["\"version\":8", "\"version\":8,\"new\":[{\"blob\":1}]", "\"version\":4294967295,\"whole\":7"]
    {
        let error = parse_changed(&sample(), "\"version\":6", to).unwrap_err();
        assert!(matches!(error, RecipeError::Version { found: 8.. }), "{to}: {error}");
        assert!(error.to_string().contains("this blobd reads 1 to 7; upgrade blobd"), "{error}");
    }
    let error = parse_changed(&sample(), "\"version\":6", "\"version\":0").unwrap_err();
    assert!(matches!(error, RecipeError::Version { found: 0 }), "{error}");
}

#[test]
fn any_changed_byte_is_detected() {
    for recipe in [sample(), archive(), packed(), whole()] {
        let json = recipe.to_json();
        for index in 0..json.len() - 1 {
            let mut changed = json.clone();
            changed[index] ^= 1;
            assert!(Recipe::parse(&changed).is_err(), "byte {index}");
            assert!(RecipeOutline::parse(&changed).is_err(), "byte {index}");
        }
    }
    let renamed = String::from_utf8(sample().to_json()).unwrap().replace("\"t\"", "\"u\"");
    let error = Recipe::parse(renamed.as_bytes()).unwrap_err();
    assert!(matches!(error, RecipeError::Check { .. }), "{error}");
}

#[test]
fn segment_that_wraps_around_is_refused() {
    let piece = blob_piece(Digest::of(b"x"), u64::MAX, 2);
    let error = split(Digest::of(b"f"), vec![piece], vec![]).unwrap_err();
    assert!(matches!(error, RecipeError::Piece { index: 0 }), "{error}");
}

#[test]
fn tensor_in_a_foreign_blob_is_refused() {
    let recipe = sample();
    let foreign = tensor("t", Digest::of(b"elsewhere"), 0, 64);
    let error = split(recipe.file(), recipe.pieces().to_vec(), vec![foreign]).unwrap_err();
    assert!(matches!(error, RecipeError::Tensor { .. }), "{error}");
}

#[test]
fn tensor_without_elements_needs_no_blob() {
    let recipe = sample();
    let empty = tensor("t", Digest::of(b""), 0, 0);
    let recipe = split(recipe.file(), recipe.pieces().to_vec(), vec![empty]).unwrap();
    assert!(!recipe.digests().contains(&Digest::of(b"")));
}

#[test]
fn experts_must_fill_their_tensor() {
    let recipe = sample();
    let mut stack = recipe.tensors().get(0).unwrap();
    for (count, stride, accepted) in [(4, 16, true), (3, 16, false), (u64::MAX, 16, false)] {
        stack.experts = Some(Experts { count, stride });
        let result = split(recipe.file(), recipe.pieces().to_vec(), vec![stack.clone()]);
        assert_eq!(result.is_ok(), accepted, "{count} experts of {stride} bytes");
    }
}

#[test]
fn pieces_and_tensors_name_blobs_by_their_numbers_in_the_list() {
    let recipe = sample();
    let [header, weights] = [b"header".as_slice(), b"weights"].map(Digest::of);
    let json = String::from_utf8(recipe.to_json()).unwrap();
    assert!(json.contains(&format!(r#""blobs":["{header}","{weights}"],"pieces":[{{"blob":0,"#)), "{json}");
    let unknown = RecipeError::UnknownBlob { number: 2, count: 2 }.to_string();
    let later = |change: &str| format!("recipe: {change}");
    let by_digest = RecipeError::BlobId.to_string();
    for (from, to, expected) in [
        ("\"blob\":1,\"offset\":0,\"length\"", "\"blob\":2,\"offset\":0,\"length\"", unknown.clone()),
        ("\"blob\":1,\"offset\":0,\"size\"", "\"blob\":2,\"offset\":0,\"size\"", unknown.clone()),
        ("\"blob\":0", "\"blob\":1", later("a blob of its list is in no piece")),
        ("\"blob\":0", &*format!("\"blob\":\"{header}\""), by_digest.clone()),
        (
            "\"blob\":1,\"offset\":0,\"size\"",
            &*format!("\"digest\":\"{weights}\",\"offset\":0,\"size\""),
            by_digest.clone(),
        ),
        ("\"size\":64", &*format!("\"size\":64,\"digest\":\"{weights}\""), by_digest.clone()),
        (
            "\"blob\":1,\"offset\":0,\"size\"",
            "\"offset\":0,\"size\"",
            later("tensor \"t\": bytes 0+64 are not in a blob of this file"),
        ),
    ] {
        let error = parse_changed(&recipe, from, to).unwrap_err();
        assert_eq!(error.to_string(), expected, "{to}");
    }
    for to in [
        "\"blob\":-1",
        "\"blob\":0.5",
        "\"blob\":\"sha256:00\"",
        "\"blob\":null",
        "\"blob\":18446744073709551615",
    ] {
        assert!(parse_changed(&recipe, "\"blob\":0", to).is_err(), "{to}");
    }
    let error = parse_changed(&recipe, "\"blob\":0", "\"blob\":-1").unwrap_err().to_string();
    assert!(error.contains("expected the number of a blob, or its digest"), "{error}");
}

#[test]
fn recipe_with_the_most_tensors_and_the_longest_names_is_read() {
    // Next to its name and its shape, which are in the header too, a tensor takes less than 400 bytes.
    let tensors = crate::safetensors::Header::MAX_TENSORS as u64 * 400;
    let longest = crate::safetensors::Header::MAX_BYTES + tensors;
    assert_eq!(Recipe::MAX_BYTES.max(longest), Recipe::MAX_BYTES);
}

/// The names and shapes of Qwen3-30B-A3B, whose experts are separate tensors.
#[test]
fn recipe_of_18_867_tensors_is_shorter_than_4_mib() {
    let (mut pieces, mut tensors) = (Vec::new(), Vec::new());
    let mut add = |name: String, shape: [u64; 2], digest: Digest, offset: u64| {
        let size = shape[0] * shape[1] * 2;
        pieces.push(blob_piece(digest, offset, size));
        tensors.push(TensorEntry {
            name: name.into(),
            type_name: "BF16".into(),
            shape: shape.to_vec().into(),
            digest,
            offset,
            size,
            experts: None,
        });
    };
    for layer in 0..48_u64 {
        for (projection, shape) in [("down", [2048, 768]), ("gate", [768, 2048]), ("up", [768, 2048])] {
            let group = Digest::of(format!("{layer}{projection}").as_bytes());
            for expert in 0..128 {
                let name = format!("model.layers.{layer}.mlp.experts.{expert}.{projection}_proj.weight");
                add(name, shape, group, expert * 768 * 2048 * 2);
            }
        }
        for part in [
            "input_layernorm",
            "mlp.gate",
            "post_attention_layernorm",
            "self_attn.k_norm",
            "self_attn.k_proj",
            "self_attn.o_proj",
            "self_attn.q_norm",
            "self_attn.q_proj",
            "self_attn.v_proj",
        ] {
            let name = format!("model.layers.{layer}.{part}.weight");
            add(name.clone(), [128, 2048], Digest::of(name.as_bytes()), 0);
        }
    }
    for name in ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"] {
        add(name.to_owned(), [151_936, 2048], Digest::of(name.as_bytes()), 0);
    }
    assert_eq!(tensors.len(), 18_867);
    let recipe = Recipe::new(Digest::of(b"file"), TensorFormat::Safetensors, pieces, tensors).unwrap();
    let json = recipe.to_json();
    assert!(json.len() < 4 << 20, "{} bytes", json.len());
    assert_eq!(Recipe::parse(&json).unwrap(), recipe);
}

/// safetensors has elements of 4 and 6 bits, ranges at any offset, and names of any text.
#[test]
fn tensors_have_any_name_size_and_place() {
    let blob = Digest::of(b"odd");
    let names = [
        "".to_owned(),
        "\0".to_owned(),
        "a\u{1b}[2J\n\"\\".to_owned(),
        "größe/../x".to_owned(),
        "n".repeat(70_000),
    ];
    let tensors = names.iter().map(|name| TensorEntry {
        type_name: "F6_E2M3".into(),
        shape: vec![2, 2].into(),
        ..tensor(name, blob, 5, 3)
    });
    let tensors: Vec<_> = tensors.collect();
    let pieces = vec![blob_piece(blob, 0, 8)];
    let of = |tensors| Recipe::new(Digest::of(b"file"), TensorFormat::Safetensors, pieces.clone(), tensors);
    let recipe = of(tensors.clone()).unwrap();
    let again = Recipe::parse(recipe.to_json()).unwrap();
    assert_eq!(again, recipe);
    assert_eq!(again.format(), Some(TensorFormat::Safetensors));
    assert!(again.tensors().names().eq(&names));
    for name in &names {
        let twice = [tensors.clone(), vec![tensor(name, blob, 5, 3)]].concat();
        assert!(matches!(of(twice), Err(RecipeError::DuplicateTensor { .. })), "{name:?}");
    }
}

#[test]
fn files_of_an_archive_have_recipes_of_their_own() {
    let recipe = archive();
    assert_eq!((recipe.header(), recipe.format()), (None, None), "it is no header that begins the archive");
    let weights = recipe.member_recipe(0).unwrap();
    assert_eq!((weights.size(), weights.tensors().len()), (40, 1));
    assert_eq!(
        (weights.header(), weights.format()),
        (Some((Digest::of(b"header"), 10)), Some(TensorFormat::Gguf))
    );
    let text = recipe.member_recipe(1).unwrap();
    assert_eq!(text.pieces().to_vec(), [Piece::Literal { literal: b"xt, 5".to_vec() }]);
    assert_eq!((text.header(), text.format()), (None, None));
    assert!(recipe.member_recipe(2).is_err());
}

#[test]
fn files_that_are_not_in_the_archive_are_refused() {
    let nameless = Member { format: None, ..member("m", 10, 40, 1) };
    for members in [
        vec![],
        vec![nameless],
        vec![member("m", 10, 40, 0)],
        vec![member("m", 10, 29, 1)],
        vec![member("m", 10, 40, 2)],
        vec![member("m", 10, 91, 1)],
        vec![member("m", u64::MAX, 1, 1)],
        vec![member("../m", 10, 40, 1)],
        vec![member("m", 10, 40, 1), member("n", 49, 5, 0)],
        vec![member("m", 10, 40, 1), member("n", 52, 0, 0)],
        vec![member("m", 10, 40, u64::MAX), member("n", 52, 5, 2)],
    ] {
        assert!(archive_with(members.clone()).is_err(), "{members:?}");
    }
}

/// The parts of an archive that arrives as one stream.
#[test]
fn joined_parts_are_the_archive() {
    let whole = archive();
    let none = TensorEntries::default();
    let part = |pieces: &[Piece], tensors: &TensorEntries, members| {
        Recipe::for_archive(Digest::of(b"part"), pieces.to_vec(), tensors.clone(), members).unwrap()
    };
    let pieces = whole.pieces();
    let parts = vec![
        part(&pieces[..1], &none, vec![]),
        part(&pieces[1..3], whole.tensors(), vec![member("m.gguf", 0, 40, 1)]),
        part(&[Piece::Literal { literal: b"te".to_vec() }], &none, vec![]),
        part(&[Piece::Literal { literal: b"xt, 5".to_vec() }], &none, vec![member("a.txt", 0, 5, 0)]),
        part(&pieces[4..], &none, vec![]),
    ];
    let joined = Recipe::joined(whole.file(), parts).unwrap();
    assert_eq!(joined.members(), whole.members());
    assert_eq!(joined.size(), whole.size());
    assert_eq!(joined.member_recipe(1).unwrap(), whole.member_recipe(1).unwrap());
}

#[test]
fn recipe_of_a_compressed_file_has_the_digests_and_sizes_of_both() {
    let recipe = packed();
    assert_eq!((recipe.file(), recipe.size()), (Digest::of(b"packed"), 5));
    let unpacked = Unpacked { compression: Compression::Gzip, digest: Digest::of(b"archive"), size: 100 };
    assert_eq!(recipe.unpacked(), Some(unpacked));
    assert_eq!(recipe.member_recipe(0).unwrap(), archive().member_recipe(0).unwrap());
    for (from, to) in [
        ("\"size\":100", "\"size\":101"),
        ("\"gzip\"", "\"bzip2\""),
        ("\"path\":\"m.gguf\"", "\"path\":\"../m\""),
    ] {
        assert!(parse_changed(&recipe, from, to).is_err(), "{to}");
    }
    for archive in [sample(), packed(), whole(), Recipe::joined(Digest::of(b""), Vec::new()).unwrap()] {
        let error = Recipe::for_packed(Digest::of(b"packed"), 5, Compression::Zstd, archive).unwrap_err();
        assert!(matches!(error, RecipeError::Packed), "{error}");
    }
}

#[test]
fn recipe_of_a_whole_file_names_its_blob_alone() {
    let (recipe, file) = (whole(), Digest::of(b"a file"));
    assert_eq!(*recipe.kind(), RecipeKind::Whole);
    assert_eq!(recipe.blob_sizes().into_iter().collect::<Vec<_>>(), [(file, 6)]);
    assert_eq!(recipe.header(), None);
    let empty = Recipe::for_whole_file(Digest::of(b""), 0).unwrap();
    assert_eq!(Recipe::parse(empty.to_json()).unwrap(), empty);
    assert!(empty.blob_sizes().is_empty());
    let (blobs, other) = (format!("[\"{file}\"]"), format!("[\"{}\"]", Digest::of(b"tensor")));
    assert!(matches!(parse_changed(&recipe, &blobs, &other), Err(RecipeError::Whole)));
    let offset = parse_changed(&recipe, "\"offset\":0", "\"offset\":1");
    assert!(matches!(offset, Err(RecipeError::Whole)), "{offset:?}");
    let entry = r#"{"name":"t","type":"F32","shape":[1],"blob":0,"offset":0,"size":4}"#;
    let tensors = parse_changed(&recipe, "\"tensors\":[]", &format!("\"tensors\":[{entry}]"));
    assert!(matches!(tensors, Err(RecipeError::Whole)), "{tensors:?}");
}

/// A GGUF file without tensors is stored as one blob too, but its recipe records its format.
#[test]
fn file_of_one_blob_is_stored_whole_only_if_its_recipe_says_so() {
    let file = Digest::of(b"a header");
    let recipe = split(file, vec![blob_piece(file, 0, 8)], Vec::new()).unwrap();
    assert!(recipe.is_one_blob());
    let again = Recipe::parse(recipe.to_json()).unwrap();
    assert_eq!(*again.kind(), RecipeKind::Split { format: Some(TensorFormat::Gguf) });
}

/// The recipe of any file with these tensors, whose blobs have at least 99 bytes.
fn pieces_and_tensors() -> impl Strategy<Value = (Vec<Piece>, TensorEntries)> {
    let piece = prop_oneof![
        (0u8..9, 0u64..99, 99u64..150)
            .prop_map(|(blob, offset, length)| { blob_piece(Digest::of(&[blob]), offset, length) }),
        (1u64..99).prop_map(|zeros| Piece::Zeros { zeros }),
        prop::collection::vec(any::<u8>(), 1..9).prop_map(|literal| Piece::Literal { literal }),
    ];
    let entry =
        (any::<String>(), any::<String>(), prop::collection::vec(any::<u64>(), 0..5), 0u64..50, 0u64..49);
    (prop::collection::vec(piece, 1..20), prop::collection::vec(entry, 0..9)).prop_map(|(pieces, entries)| {
        let blobs: Vec<Digest> = blob_sizes(pieces.iter().map(Piece::source)).into_keys().collect();
        let tensors =
            entries.into_iter().enumerate().filter_map(|(index, (name, type_name, shape, offset, size))| {
                let digest = *blobs.get(index % blobs.len().max(1))?;
                let experts = (size % 2 == 0).then_some(Experts { count: 2, stride: size / 2 });
                let name = format!("{index}{name}");
                let (name, type_name, shape) = (name.into(), type_name.into(), shape.into());
                Some(TensorEntry { name, type_name, shape, digest, offset, size, experts })
            });
        let tensors = tensors.collect();
        (pieces, tensors)
    })
}

fn any_recipe() -> impl Strategy<Value = Recipe> {
    let formats = [TensorFormat::Gguf, TensorFormat::Safetensors];
    let parts = prop::collection::vec((pieces_and_tensors(), any::<bool>(), "[a-z]{1,9}"), 0..4);
    (parts, prop::sample::select(formats.to_vec()), 0..4_u8, any::<u64>()).prop_map(
        |(parts, format, kind, size)| {
            let file = Digest::of(&[kind]);
            if kind == 0 {
                return Recipe::for_whole_file(file, size).unwrap();
            }
            if let (1, Some(((pieces, tensors), ..))) = (kind, parts.first().cloned()) {
                return Recipe::new(file, format, pieces, tensors).unwrap();
            }
            let part = |((pieces, tensors), has_file, path): ((Vec<Piece>, TensorEntries), bool, String)| {
                let size = pieces.iter().map(Piece::length).sum();
                let count = tensors.len() as u64;
                let member = Member { format: Some(format), ..member(&path, 0, size, count) };
                let (members, tensors) =
                    if has_file { (vec![member], tensors) } else { (vec![], TensorEntries::default()) };
                Recipe::for_archive(file, pieces, tensors, members).unwrap()
            };
            let archive = Recipe::joined(file, parts.into_iter().map(part).collect()).unwrap();
            match Recipe::for_packed(file, size, Compression::Zstd, archive.clone()) {
                Ok(packed) if kind == 3 => packed,
                _ => archive,
            }
        },
    )
}

proptest! {
    #[test]
    fn recipe_of_any_kind_reads_back_from_its_json(recipe in any_recipe()) {
        let json = recipe.to_json();
        prop_assert_eq!(&Recipe::parse(&json).unwrap(), &recipe);
        let outline = RecipeOutline::parse(&json).unwrap();
        prop_assert_eq!((outline.file(), outline.size()), (recipe.file(), recipe.size()));
        prop_assert!(outline.digests().iter().copied().eq(recipe.digests()));
        for index in 0..recipe.members().len() {
            let own = recipe.member_recipe(index).unwrap();
            prop_assert_eq!(own.size(), recipe.members()[index].size);
        }
    }
}

#[test]
fn shared_blobs_must_be_named_by_pieces_and_reach_to_their_ends() {
    let weights = Digest::of(b"weights");
    let shared = |blob, size| sample().sharing(BTreeMap::from([(blob, size)]));
    let recipe = shared(weights, 640).unwrap();
    assert_eq!(recipe.blob_sizes().get(&weights), Some(&640));
    assert_eq!(Recipe::parse(recipe.to_json()).unwrap(), recipe);
    assert_ne!(recipe, sample());
    assert!(matches!(shared(weights, 63), Err(RecipeError::Shared { size: 63, .. })));
    assert!(matches!(shared(Digest::of(b"foreign"), 64), Err(RecipeError::Shared { .. })));
    assert!(matches!(archive().sharing(BTreeMap::from([(weights, 640)])), Err(RecipeError::SharedKind)));
    assert_eq!(sample().sharing(BTreeMap::new()).unwrap(), sample());
    let unknown = parse_changed(&recipe, r#"{"blob":1,"size":640}"#, r#"{"blob":2,"size":640}"#);
    assert!(matches!(unknown, Err(RecipeError::UnknownBlob { number: 2, count: 2 })), "{unknown:?}");
}
