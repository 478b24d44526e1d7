//! Tests of the header parser, one case for each error.

use proptest::prelude::*;

use super::generate::{Sample, file};
use super::*;
use crate::tensor::TensorError;

/// A little-endian header built field by field, valid or not.
#[derive(Clone)]
struct Raw(Vec<u8>);

impl Raw {
    fn new(tensor_count: u64, key_count: u64) -> Self {
        Self(b"GGUF".to_vec()).u32(3).u64(tensor_count).u64(key_count)
    }

    fn bytes(mut self, bytes: &[u8]) -> Self {
        self.0.extend(bytes);
        self
    }

    fn u32(self, value: u32) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn u64(self, value: u64) -> Self {
        self.bytes(&value.to_le_bytes())
    }

    fn string(self, bytes: &[u8]) -> Self {
        self.u64(bytes.len() as u64).bytes(bytes)
    }

    /// A key and the type of its value.
    fn key(self, key: &str, value_type: u32) -> Self {
        self.string(key.as_bytes()).u32(value_type)
    }

    fn tensor(self, name: &[u8], dimensions: &[u64], ggml_type: u32, offset: u64) -> Self {
        let raw = self.string(name).u32(u32::try_from(dimensions.len()).unwrap());
        dimensions.iter().fold(raw, |raw, dimension| raw.u64(*dimension)).u32(ggml_type).u64(offset)
    }

    /// Asserts that the last byte, and no earlier one, causes an error; returns it.
    fn refused(&self) -> GgufError {
        let mut parser = HeaderParser::new();
        let (last, before) = self.0.split_last().unwrap();
        for (place, byte) in before.iter().enumerate() {
            assert_eq!(parser.push(&[*byte]), Ok(Progress::NeedMore), "at byte {place}");
        }
        let error = parser.push(&[*last]).unwrap_err();
        assert_eq!(parser.push(b"more"), Err(error.clone()), "a refusal is final");
        assert_eq!(Header::parse(&self.0), Err(error.clone()), "the size of the pieces matters");
        error
    }

    fn refused_tensor(&self) -> TensorError {
        match self.refused() {
            GgufError::Tensor { offset: 24, problem, .. } => problem,
            other => panic!("{other}"),
        }
    }

    fn accepted(&self) -> Header {
        Header::parse(&self.0).unwrap()
    }
}

/// Pushes a header in pieces of these sizes, repeated.
fn parse_in_pieces(bytes: &[u8], sizes: &[usize]) -> Result<Header, GgufError> {
    let (mut parser, mut rest) = (HeaderParser::new(), bytes);
    for size in sizes.iter().cycle() {
        let (piece, more) = rest.split_at((*size).min(rest.len()));
        if parser.push(piece)? == Progress::Done || more.is_empty() {
            break;
        }
        rest = more;
    }
    parser.finish()
}

fn assert_describes(header: &Header, sample: &Sample) {
    assert_eq!(header.byte_order(), sample.order);
    assert_eq!(header.version(), sample.version);
    assert_eq!(u64::from(header.alignment()), sample.alignment);
    assert_eq!(header.bytes(), &sample.file[..header.bytes().len()]);
    assert_eq!(header.data_offset() % sample.alignment, 0);
    assert_eq!(header.metadata().count(), sample.metadata.len());
    for ((key, value), (read_key, read_value)) in sample.metadata.iter().zip(header.metadata()) {
        assert_eq!(key.as_bytes(), read_key);
        assert_same(value, read_value);
        assert_same(value, header.value(key).unwrap());
    }
    assert_eq!(header.tensors().len(), sample.tensors.len());
    for (tensor, info) in sample.tensors.iter().zip(header.tensors()) {
        assert_eq!(info.name(), tensor.name);
        assert_eq!(info.ggml_type(), tensor.ggml_type);
        assert_eq!(info.shape().dimensions(), tensor.dimensions);
        assert_eq!(info.offset(), tensor.offset);
    }
}

/// Compares floats by their bits, so that NaN equals NaN.
fn assert_same(written: &Value, read: MetadataValue<'_>) {
    match (written, read) {
        (Value::F32(a), MetadataValue::F32(b)) => assert_eq!(a.to_bits(), b.to_bits()),
        (Value::F64(a), MetadataValue::F64(b)) => assert_eq!(a.to_bits(), b.to_bits()),
        (Value::Array(a), MetadataValue::Array(b)) => {
            assert_eq!((a.element_type(), a.values().len()), (b.element_type(), b.len()));
            assert_eq!(b.iter().count(), b.len());
            a.values().iter().zip(b.iter()).for_each(|(a, b)| assert_same(a, b));
        }
        (a, b) => assert_eq!(*a, b.to_value()),
    }
}

#[test]
fn architecture_is_the_text_of_its_key() {
    let architecture = |value: Value| {
        let mut writer = GgufWriter::new();
        writer.metadata("general.architecture", value).unwrap();
        Header::parse(&writer.header().unwrap()).unwrap().architecture().map(str::to_owned)
    };
    assert_eq!(architecture("llama".into()).as_deref(), Some("llama"));
    assert_eq!(architecture(7_u32.into()), None);
    assert_eq!(architecture(Value::String(vec![0xff])), None);
    assert_eq!(Raw::new(0, 0).accepted().architecture(), None);
}

proptest! {
    #[test]
    fn header_is_copied_field_by_field_in_either_byte_order(sample in file()) {
        let header = Header::parse(&sample.file).unwrap();
        for order in [ByteOrder::Little, ByteOrder::Big] {
            let mut out = Encoder::new(order);
            out.preamble(sample.version, sample.tensors.len(), sample.metadata.len());
            for (key, value) in header.raw_metadata() {
                out.string(key);
                out.copied_value(value, sample.order);
            }
            if order == sample.order {
                out.raw(header.raw_tensors());
            } else {
                for info in header.tensors() {
                    out.tensor(info.name(), info.ggml_type(), info.shape().dimensions(), info.offset());
                }
            }
            let copy = out.finish().unwrap();
            prop_assert!(order != sample.order || copy.bytes() == header.bytes());
            assert_describes(&copy, &Sample { order, file: copy.bytes().to_vec(), ..sample.clone() });
        }
    }

    #[test]
    fn valid_header_reads_the_same_in_any_pieces(
        sample in file(),
        sizes in prop::collection::vec(1..300_usize, 1..8),
    ) {
        let whole = Header::parse(&sample.file).unwrap();
        assert_describes(&whole, &sample);
        prop_assert_eq!(&parse_in_pieces(&sample.file, &sizes).unwrap(), &whole);
        prop_assert_eq!(&parse_in_pieces(&sample.file, &[1]).unwrap(), &whole);
    }

    #[test]
    fn every_cut_inside_the_header_is_reported(sample in file(), cut in any::<prop::sample::Index>()) {
        let header = Header::parse(&sample.file).unwrap();
        let cut = cut.index(header.bytes().len());
        let error = Header::parse(&sample.file[..cut]).unwrap_err();
        prop_assert!(matches!(error, GgufError::Ends { offset, .. } if offset == cut as u64), "{}", error);
    }

    #[test]
    fn damaged_headers_are_refused_or_read_but_never_panic(
        sample in file(),
        damage in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
    ) {
        let mut bytes = sample.file;
        for (place, byte) in damage {
            let place = place.index(bytes.len().min(4096));
            bytes[place] = byte;
        }
        if let Ok(header) = Header::parse(&bytes) {
            header.metadata().for_each(|(_, value)| drop(value.to_string()));
            prop_assert_eq!(header.tensors().count(), header.tensors().len());
            let _ = header.file_layout(bytes.len() as u64).map(crate::split::SplitPlan::new);
        }
    }
}

#[test]
fn empty_header_is_complete_at_its_24th_byte() {
    let header = Raw::new(0, 0).accepted();
    assert_eq!((header.bytes().len(), header.data_offset()), (24, 32));
    assert_eq!((header.alignment(), header.version()), (32, 3));
}

#[test]
fn bytes_after_the_header_are_not_kept() {
    let mut parser = HeaderParser::new();
    let raw = Raw::new(0, 0).bytes(&[0xff; 200_000]);
    assert_eq!(parser.push(&raw.0), Ok(Progress::Done));
    assert_eq!(parser.push(b"more"), Ok(Progress::Done));
    assert_eq!(parser.finish().unwrap().bytes().len(), 24);
}

#[test]
fn file_of_the_magic_alone_is_refused() {
    let error = Header::parse(b"GGUF").unwrap_err();
    assert_eq!(error.to_string(), "gguf: ends at byte 4, inside its first 24 bytes");
    assert!(matches!(Header::parse(b""), Err(GgufError::Ends { offset: 0, .. })));
}

#[test]
fn wrong_magic_is_refused_at_the_fourth_byte() {
    let text = |magic: &[u8]| Raw(magic.to_vec()).refused().to_string();
    assert_eq!(
        text(b"\x80\x02}q"),
        r#"gguf: wrong format: expected "GGUF" at the start, found "\x80\x02}q""#
    );
}

#[test]
fn version_1_is_refused_with_a_hint() {
    let error = Raw(b"GGUF".to_vec()).u32(1).refused().to_string();
    assert_eq!(error, "gguf: version: expected 2 or 3, found 1");
    assert_eq!(Raw(b"GGUF".to_vec()).u32(1 << 24).refused(), GgufError::OldVersion { found: 1 });
}

#[test]
fn version_0_and_newer_versions_are_refused() {
    let refused = |version| Raw(b"GGUF".to_vec()).u32(version).refused();
    assert_eq!(refused(0), GgufError::OldVersion { found: 0 });
    assert_eq!(refused(4), GgufError::NewVersion { found: 4 });
    assert_eq!(refused(4 << 24), GgufError::NewVersion { found: 4 });
    assert_eq!(refused(u32::MAX), GgufError::NewVersion { found: u32::MAX });
}

#[test]
fn absurd_counts_are_refused_before_anything_is_read() {
    for found in [Header::MAX_TENSORS + 1, 1 << 63, u64::MAX] {
        let tensors = Raw(b"GGUF".to_vec()).u32(3).u64(found);
        assert!(matches!(tensors.refused(), GgufError::Count { offset: 8, .. }));
        let keys = Raw::new(0, found);
        assert!(matches!(keys.refused(), GgufError::Count { offset: 16, .. }));
    }
}

#[test]
fn absurd_string_lengths_are_refused_at_the_length() {
    for length in [Header::MAX_BYTES, 1 << 63, u64::MAX] {
        let key = Raw::new(0, 1).u64(length);
        assert_eq!(key.refused(), GgufError::TooLong { offset: 32, count: length, size: 1 });
        let value = Raw::new(0, 1).key("k", 8).u64(length);
        assert!(matches!(value.refused(), GgufError::TooLong { .. }));
        let element = Raw::new(0, 1).key("k", 9).u32(8).u64(2).string(b"").u64(length);
        assert!(matches!(element.refused(), GgufError::TooLong { .. }));
        let name = Raw::new(1, 0).u64(length);
        assert!(matches!(name.refused(), GgufError::TooLong { .. }));
    }
}

#[test]
fn absurd_array_counts_are_refused_at_the_count() {
    for (element, count) in [(8, 1 << 61), (0, u64::MAX), (10, 1 << 61), (8, 1 << 22), (12, 1 << 22)] {
        let raw = Raw::new(0, 1).key("k", 9).u32(element).u64(count);
        assert!(matches!(raw.refused(), GgufError::TooLong { .. }), "{count} of {element}");
    }
}

#[test]
fn header_that_grows_beyond_the_limit_is_refused() {
    // Two strings of 16 MiB: each could fit, together they cannot.
    let string = vec![b'x'; 16 << 20];
    let raw = Raw::new(0, 2).key("a", 8).string(&string).key("b", 8).u64(string.len() as u64);
    let error = Header::parse(&raw.0).unwrap_err();
    assert!(matches!(error, GgufError::TooLong { .. }), "{error}");
}

#[test]
fn empty_key_is_refused_but_odd_keys_are_read() {
    assert_eq!(Raw::new(0, 1).u64(0).refused(), GgufError::EmptyKey { offset: 24 });
    let header =
        Raw::new(0, 2).string(b"\xff\0").u32(0).bytes(&[1]).key("\u{1b}[2J", 0).bytes(&[2]).accepted();
    let keys: Vec<&[u8]> = header.metadata().map(|(key, _)| key).collect();
    assert_eq!(keys, [&b"\xff\0"[..], b"\x1b[2J"]);
}

#[test]
fn duplicate_key_is_refused() {
    let raw = Raw::new(0, 3).key("a", 0).bytes(&[1]).key("b", 0).bytes(&[1]).key("a", 7).bytes(&[1]);
    assert_eq!(raw.refused(), GgufError::DuplicateKey { key: "a".into() });
}

#[test]
fn unknown_value_types_are_refused() {
    let error = Raw::new(0, 1).key("k", 13).refused();
    assert_eq!(
        error.to_string(),
        r#"gguf: metadata key "k" at byte 33: value type: expected 0 to 12, found 13"#
    );
    let element = Raw::new(0, 1).key("k", 9).u32(u32::MAX).refused();
    assert_eq!(element, GgufError::ValueType { key: "k".into(), offset: 37, found: u32::MAX });
}

#[test]
fn array_of_arrays_is_refused() {
    let error = Raw::new(0, 1).key("k", 9).u32(9).refused();
    assert_eq!(error, GgufError::NestedArray { key: "k".into(), offset: 37 });
}

#[test]
fn any_byte_but_zero_is_true() {
    let header = Raw::new(0, 1).key("k", 9).u32(7).u64(3).bytes(&[0, 1, 237]).accepted();
    let array = header.value("k").and_then(|value| value.as_array()).unwrap();
    let values: Vec<bool> = array.iter().filter_map(|value| value.as_bool()).collect();
    assert_eq!(values, [false, true, true]);
}

#[test]
fn string_values_of_any_bytes_are_kept() {
    let header = Raw::new(0, 2).key("a", 8).string(b"\xff\0\x1b").key("b", 8).string(b"llama").accepted();
    assert_eq!(header.value("a"), Some(MetadataValue::String(b"\xff\0\x1b")));
    assert_eq!(header.value("a").unwrap().as_str(), None);
    assert_eq!(header.value("b").unwrap().as_str(), Some("llama"));
    assert_eq!(header.value("a").unwrap().to_string(), r#""�\0\u{1b}""#);
    assert_eq!(header.value("c"), None);
}

#[test]
fn long_arrays_are_shown_shortened() {
    let mut writer = GgufWriter::new();
    writer.metadata("k", vec![1_i32; 10]).unwrap().metadata("e", Vec::<f32>::new()).unwrap();
    let header = Header::parse(&writer.header().unwrap()).unwrap();
    assert_eq!(header.value("k").unwrap().to_string(), "[1, 1, 1, 1, 1, 1, 1, 1, … 2 more]");
    assert_eq!(header.value("e").unwrap().to_string(), "[]");
}

#[test]
fn well_known_key_of_wrong_type_is_ignored() {
    let header = Raw::new(0, 1).key("general.architecture", 4).u32(7).accepted();
    assert_eq!(header.architecture(), None);
    assert_eq!(header.value("general.architecture").unwrap().as_u64(), Some(7));
}

#[test]
fn integers_of_every_type_are_numbers_unless_they_are_negative() {
    let values: [(&str, Value, Value); 4] = [
        ("8", Value::I8(5), Value::I8(-1)),
        ("16", Value::I16(5), Value::I16(-1)),
        ("32", Value::I32(5), Value::I32(-1)),
        ("64", Value::I64(5), Value::I64(-1)),
    ];
    let unsigned = [Value::U8(5), Value::U16(5), Value::U32(5), Value::U64(5)];
    let read = |value: Value| {
        let mut writer = GgufWriter::new();
        writer.metadata("k", value).unwrap();
        Header::parse(&writer.header().unwrap()).unwrap().value("k").unwrap().as_u64()
    };
    for (bits, positive, negative) in values {
        assert_eq!((read(positive), read(negative)), (Some(5), None), "{bits} bits");
    }
    assert_eq!(unsigned.map(read), [Some(5); 4]);
    assert_eq!((read(Value::F32(5.0)), read(Value::Bool(true))), (None, None));
}

#[test]
fn alignment_that_is_not_a_power_of_two_is_refused() {
    for found in [0, 13, 48, u32::MAX] {
        let raw = Raw::new(0, 1).key(ALIGNMENT_KEY, 4).u32(found);
        assert_eq!(raw.refused(), GgufError::Alignment { found });
    }
}

#[test]
fn alignment_beyond_the_limit_is_refused() {
    let with = |alignment| Raw::new(0, 1).key(ALIGNMENT_KEY, 4).u32(alignment);
    assert_eq!(with(1 << 31).refused(), GgufError::Alignment { found: 1 << 31 });
    assert_eq!(with(MAX_ALIGNMENT * 2).refused(), GgufError::Alignment { found: MAX_ALIGNMENT * 2 });
    assert_eq!(with(MAX_ALIGNMENT).accepted().data_offset(), u64::from(MAX_ALIGNMENT));
    assert_eq!(with(1).accepted().data_offset(), with(1).0.len() as u64);
}

#[test]
fn alignment_of_another_type_is_refused() {
    let raw = Raw::new(0, 1).key(ALIGNMENT_KEY, 5).u32(32);
    assert_eq!(raw.refused(), GgufError::AlignmentType { found: ValueType::I32 });
    let strings = Raw::new(0, 1).key(ALIGNMENT_KEY, 9).u32(8).u64(1).string(b"32");
    assert_eq!(strings.refused(), GgufError::AlignmentType { found: ValueType::Array });
}

#[test]
fn tensor_name_rules() {
    let named = |name: &[u8]| Raw::new(1, 0).tensor(name, &[8], 0, 0);
    for name in ["", "a/b", "../../x", "größe", &"x".repeat(127)] {
        let header = named(name.as_bytes()).accepted();
        assert_eq!(header.tensors().next().unwrap().name(), name);
    }
    let long = Raw::new(1, 0).u64(128);
    assert_eq!(long.refused_tensor(), TensorError::NameLength { found: 128 });
    for name in [b"a\0b".as_slice(), b"\x1b[2J", b"a\nb", b"\xff", b"\xc2\x9b"] {
        assert_eq!(Raw::new(1, 0).string(name).refused_tensor(), TensorError::NameText, "{name:?}");
    }
}

#[test]
fn duplicate_tensor_name_is_refused() {
    for name in ["a", ""] {
        let raw = Raw::new(2, 0).tensor(name.as_bytes(), &[8], 0, 0).tensor(name.as_bytes(), &[4], 1, 32);
        assert_eq!(raw.refused(), GgufError::DuplicateTensor { name: name.into() });
    }
}

#[test]
fn tensor_of_any_rank_is_read() {
    for rank in [0, 1, 4, 5, 6, 64, 1024] {
        let dimensions: Vec<u64> = (0..rank).map(|place| 1 + place % 2 * u64::from(place < 5)).collect();
        let header = Raw::new(2, 0).tensor(b"a", &dimensions, 0, 0).tensor(b"b", &[7, 0], 0, 32).accepted();
        let [first, last] = header.tensors().collect::<Vec<_>>().try_into().unwrap();
        assert_eq!(first.shape().dimensions(), dimensions);
        assert_eq!(first.size_bytes(), Some(4 * dimensions.iter().product::<u64>()));
        assert_eq!((last.name(), last.shape().dimensions()), ("b", &[7, 0][..]));
    }
}

#[test]
fn absurd_number_of_dimensions_is_refused_at_the_count() {
    let raw = Raw::new(1, 0).string(b"blk.3.ffn_up.weight").u32(1025);
    assert_eq!(
        raw.refused().to_string(),
        r#"gguf: tensor "blk.3.ffn_up.weight" at byte 24: too many dimensions: expected at most 1024, found 1025"#
    );
    assert_eq!(
        Raw::new(1, 0).string(b"a").u32(u32::MAX).refused_tensor(),
        TensorError::Rank { found: u32::MAX.into() }
    );
}

#[test]
fn negative_dimension_is_refused() {
    let raw = Raw::new(1, 0).string(b"a").u32(2).u64(8).u64(u64::MAX);
    assert_eq!(raw.refused_tensor(), TensorError::Dimension { index: 1, found: -1 });
}

#[test]
fn element_product_that_wraps_is_refused() {
    for dimensions in [vec![1 << 32, 1 << 32], vec![4 * (i32::MAX as u64), 4 * (i32::MAX as u64)]] {
        let raw = Raw::new(1, 0).string(b"a").u32(2).u64(dimensions[0]).u64(dimensions[1]);
        assert_eq!(raw.refused_tensor(), TensorError::Elements { dimensions });
    }
}

#[test]
fn zero_dimension_is_read_as_no_elements() {
    let header = Raw::new(1, 0).tensor(b"a", &[7, 0, 1 << 62, 1 << 62], 0, 0).accepted();
    let info = header.tensors().next().unwrap();
    assert_eq!((info.shape().element_count(), info.size_bytes()), (0, Some(0)));
}

#[test]
fn size_that_does_not_fit_is_refused_at_the_type() {
    let raw = Raw::new(1, 0).string(b"a").u32(1).u64(i64::MAX as u64).u32(27);
    assert_eq!(raw.refused_tensor(), TensorError::Size);
}

#[test]
fn removed_types_are_refused_at_the_type() {
    for id in [5, 31, 32, 33, 36, 37, 38] {
        let raw = Raw::new(1, 0).string(b"a").u32(1).u64(256).u32(id);
        let ggml_type = GgmlType::from_id(id);
        assert_eq!(raw.refused_tensor(), TensorError::RemovedType { ggml_type });
    }
}

#[test]
fn row_of_an_incomplete_block_is_refused_at_the_type() {
    let raw = Raw::new(1, 0).string(b"a").u32(1).u64(384).u32(12);
    assert!(matches!(raw.refused_tensor(), TensorError::Row { row: 384, block: 256, .. }));
}

#[test]
fn unknown_and_legacy_types_are_read() {
    let size = |id, dimensions: &[u64]| {
        let header = Raw::new(1, 0).tensor(b"a", dimensions, id, 0).accepted();
        header.tensors().next().unwrap().size_bytes()
    };
    assert_eq!(size(77, &[5, 7]), None);
    assert_eq!(size(u32::MAX, &[5, 7]), None);
    assert_eq!(size(4, &[64, 2]), Some(68));
    assert_eq!(size(0, &[]), Some(4));
}

#[test]
fn truncated_header_is_refused_with_its_incomplete_part() {
    let text = |raw: Raw| Header::parse(&raw.0).unwrap_err().to_string();
    assert!(text(Raw::new(0, 2).key("a", 0).bytes(&[1])).ends_with("metadata entry 2 of 2"));
    assert!(text(Raw::new(0, 1).key("a", 9).u32(8).u64(3).string(b"x")).ends_with("metadata entry 1 of 1"));
    assert!(text(Raw::new(3, 0).tensor(b"a", &[1], 0, 0)).ends_with("tensor info 2 of 3"));
}

#[test]
fn hundred_thousand_tensors_in_small_pieces_are_read() {
    let names = (0..100_000).map(|index| format!("t{index}"));
    let raw = names.fold(Raw::new(100_000, 0), |raw, name| raw.tensor(name.as_bytes(), &[0], 0, 0));
    let header = parse_in_pieces(&raw.0, &[16 << 10]).unwrap();
    assert_eq!(header.tensors().last().unwrap().name(), "t99999");
}

#[test]
fn hundred_thousand_keys_and_strings_in_small_pieces_are_read() {
    let keys = (0..100_000).map(|index| format!("key.{index}"));
    let raw = keys.fold(Raw::new(0, 100_001), |raw, key| raw.key(&key, 0).bytes(&[1]));
    let raw = (0..100_000).fold(raw.key("tokens", 9).u32(8).u64(100_000), |raw, _| raw.string(b"token"));
    let header = parse_in_pieces(&raw.0, &[16 << 10, 1, 7]).unwrap();
    assert_eq!(header.metadata().count(), 100_001);
    assert_eq!(header.value("tokens").unwrap().as_array().unwrap().iter().count(), 100_000);
}

#[test]
fn hundred_thousand_equal_names_are_refused() {
    let raw = (0..100_000).fold(Raw::new(100_000, 0), |raw, _| raw.tensor(b"same", &[0], 0, 0));
    assert_eq!(Header::parse(&raw.0), Err(GgufError::DuplicateTensor { name: "same".into() }));
}

#[test]
fn only_the_key_of_the_alignment_changes_the_padding() {
    for (key, alignment) in [("other", 32), (ALIGNMENT_KEY, 512)] {
        let mut writer = GgufWriter::new();
        writer.metadata(key, 512_u32).unwrap().tensor("t", GgmlType::F32, &[8]).unwrap();
        let header = writer.header().unwrap();
        let data_offset = Header::parse(&header).unwrap().data_offset();
        assert_eq!((data_offset, data_offset % alignment), (header.len() as u64, 0), "{key}");
        assert_eq!(data_offset.is_multiple_of(512), alignment == 512, "{key}");
        assert_eq!(writer.data_size().unwrap(), alignment, "the tensor of 32 bytes and its padding, {key}");
    }
}

#[test]
fn writer_places_tensors_consecutively() {
    let mut writer = GgufWriter::new();
    writer.metadata(ALIGNMENT_KEY, 64_u32).unwrap();
    writer.tensor("a", GgmlType::F32, &[3]).unwrap().tensor("b", GgmlType::Q4_0, &[32, 5]).unwrap();
    writer.tensor("c", GgmlType::I8, &[1]).unwrap();
    assert_eq!(writer.tensor_offsets().unwrap(), [0, 64, 192]);
    assert_eq!(writer.data_size().unwrap(), 256);
    let bytes = writer.header().unwrap();
    assert_eq!(Header::parse(&bytes).unwrap().data_offset(), bytes.len() as u64);
}

#[test]
fn writer_refuses_what_the_parser_refuses() {
    let mut writer = GgufWriter::new();
    assert!(writer.metadata("", 1_u8).is_err());
    assert!(writer.tensor("a\0", GgmlType::F32, &[1]).is_err());
    assert!(writer.tensor("a", GgmlType::F32, &[1; 1025]).is_err());
    assert!(writer.tensor("a", GgmlType::Q4_0, &[31]).is_err());
    assert!(writer.tensor("a", GgmlType::from_id(77), &[1]).is_err());
    writer.metadata("k", 1_u8).unwrap().metadata("k", 2_u8).unwrap();
    assert_eq!(writer.header(), Err(GgufError::DuplicateKey { key: "k".into() }));
    assert!(GgufWriter::new().metadata(ALIGNMENT_KEY, 0_u32).unwrap().header().is_err());
    assert!(GgufWriter::new().with_version(1).header().is_err());
}

#[test]
fn writer_refuses_offsets_that_wrap() {
    let mut writer = GgufWriter::new();
    writer.tensor_at("a", GgmlType::I8, &[64], u64::MAX - 31).unwrap();
    assert!(matches!(writer.header(), Err(GgufError::Unwritable { problem: TensorError::Size, .. })));
}
