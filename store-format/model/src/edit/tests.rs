use proptest::prelude::*;

use super::*;
use blobd_store_format::gguf::GgufWriter;
use blobd_store_format::gguf::generate::file;

fn set(key: &str, value_type: Option<&str>, text: &str) -> KeyEdit {
    let value_type = value_type.map(|name| name.parse().unwrap());
    KeyEdit { key: key.to_owned(), change: Change::Set { value_type, text: text.to_owned() } }
}

fn unset(key: &str) -> KeyEdit {
    KeyEdit { key: key.to_owned(), change: Change::Unset }
}

fn header(entries: &[(&str, Value)]) -> Header {
    let mut writer = GgufWriter::new();
    for (key, value) in entries {
        writer.metadata(key, value.clone()).unwrap();
    }
    Header::parse(&writer.header().unwrap()).unwrap()
}

/// The value and type that a new key gets.
fn inferred(text: &str) -> Value {
    let edited = EditedHeader::new(&header(&[]), &[set("new", None, text)]).unwrap();
    edited.header.value("new").unwrap().to_value()
}

/// The value that a key of this type gets.
fn typed(value_type: &str, text: &str) -> Result<Value, EditError> {
    let edited = EditedHeader::new(&header(&[]), &[set("new", Some(value_type), text)])?;
    Ok(edited.header.value("new").unwrap().to_value())
}

proptest! {
    #[test]
    fn only_the_edited_keys_differ(sample in file(), new in "[a-z]{1,9}", place in any::<prop::sample::Index>()) {
        let before = Header::parse(&sample.file).unwrap();
        let editable: Vec<&String> =
            sample.metadata.iter().map(|(key, _)| key).filter(|key| *key != ALIGNMENT_KEY).collect();
        let mut edits = vec![set(&new, None, "text")];
        edits.extend((!editable.is_empty()).then(|| unset(editable[place.index(editable.len())])));
        let edited = EditedHeader::new(&before, &edits).unwrap();
        let after = &edited.header.clone();
        let kept = |header: &Header| -> Vec<(Vec<u8>, Vec<u8>)> {
            let owned = header.raw_metadata().map(|(key, value)| (key.to_vec(), value.to_vec()));
            owned.filter(|(key, _)| edits.iter().all(|edit| edit.key.as_bytes() != key)).collect()
        };
        prop_assert_eq!(kept(&before), kept(after));
        prop_assert_eq!(after.raw_tensors(), before.raw_tensors());
        prop_assert_eq!(after.byte_order(), before.byte_order());
        prop_assert_eq!(after.alignment(), before.alignment());
        prop_assert_eq!(after.value(&new).unwrap().as_str(), Some("text"));
        prop_assert_eq!(edited.changed.len(), edits.len());
        // The new header fits before the old data section.
        let data = &sample.file[usize::try_from(before.data_offset()).unwrap()..];
        let padded = edited.header.into_padded();
        let file = [&padded, data].concat();
        prop_assert_eq!(padded.len() as u64, after.data_offset());
        let layout = |header: &Header, file: &[u8]| header.file_layout(file.len() as u64).unwrap();
        let (old, new) = (layout(&before, &sample.file), layout(after, &file));
        prop_assert_eq!(old.tensors(), new.tensors());
    }

    #[test]
    fn edit_without_changes_gives_the_same_header(sample in file()) {
        let before = Header::parse(&sample.file).unwrap();
        let edited = EditedHeader::new(&before, &[]).unwrap();
        prop_assert_eq!(edited.header.bytes(), before.bytes());
    }
}

#[test]
fn new_key_gets_the_type_that_its_text_looks_like() {
    for (text, value) in [
        ("true", Value::Bool(true)),
        ("7", Value::U32(7)),
        ("-7", Value::I32(-7)),
        ("4294967296", Value::I64(1 << 32)),
        ("-2147483649", Value::I64(-2_147_483_649)),
        ("18446744073709551615", Value::U64(u64::MAX)),
        ("0.5", Value::F32(0.5)),
        ("-1e-3", Value::F32(-0.001)),
        ("1e60", Value::from("1e60")),
        ("nan", Value::from("nan")),
        ("[1,2]", Value::from("[1,2]")),
        ("1.2.3", Value::from("1.2.3")),
        ("", Value::from("")),
    ] {
        assert_eq!(inferred(text), value, "{text:?}");
    }
}

#[test]
fn existing_key_keeps_its_type_and_place_unless_another_type_is_given() {
    let before = header(&[("a", Value::U8(1)), ("b", Value::from(vec![1_i16])), ("c", Value::F64(1.0))]);
    let edits = [set("b", None, "[-2, 3]"), set("a", None, "200"), set("c", Some("string"), "x")];
    let edited = EditedHeader::new(&before, &edits).unwrap();
    let values: Vec<_> = edited.header.metadata().map(|(key, value)| (key, value.to_value())).collect();
    let expected =
        [(&b"a"[..], Value::U8(200)), (b"b", Value::from(vec![-2_i16, 3])), (b"c", Value::from("x"))];
    assert_eq!(values, expected);
    assert_eq!(edited.changed, ["b", "a", "c"]);
    let error = EditedHeader::new(&before, &[set("a", None, "256")]).unwrap_err();
    assert_eq!(error.to_string(), r#"metadata key "a": "256" is not a value of type uint8"#);
    assert!(EditedHeader::new(&before, &[set("a", None, "1")]).unwrap().changed.is_empty());
}

#[test]
fn arrays_are_json() {
    for (value_type, text, value) in [
        ("array<string>", r#"["a", "\u00e9", ""]"#, Value::from(vec!["a", "é", ""])),
        ("array<uint64>", "[18446744073709551615]", Value::from(vec![u64::MAX])),
        ("array<float32>", "[0.1, 1, \"Infinity\"]", Value::from(vec![0.1_f32, 1.0, f32::INFINITY])),
        ("array<bool>", "[true,false]", Value::from(vec![true, false])),
        ("array<int8>", "[]", Value::from(Vec::<i8>::new())),
    ] {
        assert_eq!(typed(value_type, text), Ok(value), "{text}");
    }
    for (value_type, text) in [
        ("array<string>", "[1]"),
        ("array<uint8>", "[256]"),
        ("array<uint8>", "[\"1\"]"),
        ("array<uint8>", "[1.0]"),
        ("array<bool>", "[1]"),
        ("array<string>", "a"),
        ("array<string>", "[[\"a\"]]"),
        ("array<float32>", "[1e60]"),
        ("bool", "1"),
        ("float64", "1e999"),
        ("uint32", "-1"),
        ("int16", "1.0"),
    ] {
        assert!(matches!(typed(value_type, text), Err(EditError::Value { .. })), "{value_type} {text}");
    }
    assert!(matches!(typed("float32", "NaN"), Ok(Value::F32(value)) if value.is_nan()));
    for name in ["", "u32", "array", "array<array>", "array<array<string>>", "array<string"] {
        assert!(name.parse::<EditType>().is_err(), "{name}");
    }
}

#[test]
fn keys_that_describe_the_file_or_its_tensors_are_refused() {
    let before = header(&[("general.architecture", Value::from("llama"))]);
    for key in [
        "split.no",
        "split.anything",
        "general.alignment",
        "general.architecture",
        "llama.block_count",
        "llama.embedding_length",
    ] {
        for edit in [set(key, None, "1"), unset(key)] {
            let error = EditedHeader::new(&before, &[edit]).unwrap_err();
            assert!(matches!(error, EditError::Reserved { .. }), "{error}");
        }
    }
    EditedHeader::new(&before, &[set("qwen2.block_count", None, "1")]).unwrap();
    assert!(matches!(EditedHeader::new(&before, &[set("", None, "1")]), Err(EditError::Gguf(_))));
    let twice = EditedHeader::new(&before, &[set("a", None, "1"), unset("a")]).unwrap_err();
    assert_eq!(twice, EditError::Twice { key: "a".to_owned() });
}

#[test]
fn removal_of_a_key_that_is_not_there_changes_nothing_and_is_reported() {
    let before = header(&[("a", Value::from(1_u32))]);
    let edited = EditedHeader::new(&before, &[unset("absent"), unset("a")]).unwrap();
    assert_eq!((edited.changed, edited.absent), (vec!["a".to_owned()], vec!["absent".to_owned()]));
    let unchanged = EditedHeader::new(&before, &[unset("absent")]).unwrap();
    assert_eq!(unchanged.header.bytes(), before.bytes());
}

#[test]
fn number_of_tokens_cannot_change() {
    let before = header(&[
        ("tokenizer.ggml.tokens", Value::from(vec!["a", "b"])),
        ("tokenizer.ggml.scores", Value::from(vec![0.0_f32, 1.0])),
    ]);
    EditedHeader::new(&before, &[set("tokenizer.ggml.tokens", None, r#"["c","d"]"#)]).unwrap();
    EditedHeader::new(&before, &[unset("tokenizer.ggml.scores")]).unwrap();
    for edit in [
        set("tokenizer.ggml.tokens", None, r#"["c"]"#),
        set("tokenizer.ggml.scores", None, "[1,2,3]"),
        set("tokenizer.ggml.token_type", Some("array<int32>"), "[1]"),
        set("tokenizer.ggml.token_type", None, "1"),
        unset("tokenizer.ggml.tokens"),
    ] {
        let error = EditedHeader::new(&before, std::slice::from_ref(&edit)).unwrap_err();
        assert!(matches!(error, EditError::Tokens { expected: 2, .. }), "{edit:?}: {error}");
    }
}

#[test]
fn header_that_would_be_too_long_is_refused() {
    let text = "x".repeat(usize::try_from(Header::MAX_BYTES).unwrap());
    assert!(matches!(EditedHeader::new(&header(&[]), &[set("a", None, &text)]), Err(EditError::Gguf(_))));
}
