//! Valid and invalid headers: one case for each refusal, and properties of accepted headers.

use std::io;

use proptest::prelude::*;

use super::*;
use crate::digest::Digest;
use crate::file_format::read_header;

/// A file with this header and `data` bytes after it.
fn file(json: &str, data: usize) -> Vec<u8> {
    let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
    bytes.extend(json.as_bytes());
    bytes.resize(bytes.len() + data, 7);
    bytes
}

fn parse(json: &str, data: usize) -> Result<Header, SafetensorsError> {
    let bytes = file(json, data);
    Header::parse(&bytes, bytes.len() as u64)
}

fn refused(json: &str, data: usize) -> String {
    parse(json, data).expect_err(json).to_string()
}

/// A tensor of U8 at these offsets.
fn entry(name: &str, begin: u64, end: u64) -> String {
    format!(r#""{name}":{{"dtype":"U8","shape":[{}],"data_offsets":[{begin},{end}]}}"#, end - begin)
}

#[test]
fn tensors_come_in_the_order_of_their_data() {
    let json = format!(
        r#"{{{},"__metadata__":{{"quant_type":"int4","group_size":"64"}},{}, {}}}   "#,
        entry("b", 4, 10),
        entry("empty", 4, 4),
        entry("a", 0, 4)
    );
    let header = parse(&json, 10).unwrap();
    let names: Vec<_> = header.tensors().iter().map(Tensor::name).collect();
    assert_eq!(names, ["a", "empty", "b"]);
    assert_eq!(header.metadata()["group_size"], "64");
    let b = header.tensor("b").unwrap();
    assert_eq!((b.offset_in_file(), b.size_bytes()), (header.data_offset() + 4, 6));
    assert_eq!(header.tensor("__metadata__"), None);
}

#[test]
fn scalars_and_elements_of_less_than_a_byte_have_sizes() {
    let json = r#"{"s":{"dtype":"F32","shape":[],"data_offsets":[0,4]},"f":{"dtype":"F4","shape":[3,2],"data_offsets":[4,7]},"z":{"dtype":"F64","shape":[0,18446744073709551615,9],"data_offsets":[7,7]}}"#;
    assert_eq!(parse(json, 7).unwrap().tensors().len(), 3);
    assert_eq!(parse("{}", 0).unwrap().tensors().len(), 0);
}

#[test]
fn headers_that_are_cut_off_or_too_long_are_refused() {
    let whole = file(&format!("{{{}}}", entry("a", 0, 4)), 4);
    for length in 0..whole.len() - 4 {
        let error = Header::parse(&whole[..length], whole.len() as u64).unwrap_err();
        assert!(matches!(error, SafetensorsError::Truncated { .. }), "{length}: {error}");
    }
    assert!(Header::parse(&whole[..whole.len() - 4], whole.len() as u64).is_ok());
    // The limit of the library.
    assert_eq!(Header::end(100_000_000_u64.to_le_bytes()), Ok(100_000_008));
    for length in [100_000_001, u64::MAX] {
        let error = Header::parse(&length.to_le_bytes(), 1 << 40).unwrap_err();
        assert_eq!(error, SafetensorsError::HeaderLength { found: length });
        assert!(error.is_over_limit());
    }
    assert!(!Header::parse(&whole[..9], whole.len() as u64).unwrap_err().is_over_limit());
}

#[test]
fn json_of_another_form_is_refused() {
    for (json, words) in [
        ("", "EOF"),
        ("[]", "a header"),
        ("null", "a header"),
        ("{} x", "trailing"),
        (r#"{"a":{}}"#, "missing field"),
        (r#"{"a":{"dtype":"U8","dtype":"U8","shape":[1],"data_offsets":[0,1]}}"#, "duplicate field"),
        (r#"{"a":{"dtype":"U8","shape":[-1],"data_offsets":[0,1]}}"#, "integer `-1`"),
        (r#"{"a":{"dtype":"U8","shape":[1.5],"data_offsets":[0,1]}}"#, "1.5"),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1,2]}}"#, "trailing"),
        (r#"{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,18446744073709551616]}}"#, "floating point"),
        (r#"{"__metadata__":{"a":1}}"#, "integer `1`"),
        (r#"{"__metadata__":{"a":{}}}"#, "invalid type: map"),
        (r#"{"__metadata__":{},"__metadata__":{}}"#, "duplicate field"),
    ] {
        let error = refused(json, 1);
        assert!(error.contains(words), "{json}: {error}");
    }
    let deep = format!("{{\"a\":{}{}}}", "[".repeat(100_000), "]".repeat(100_000));
    assert!(matches!(parse(&deep, 0), Err(SafetensorsError::Json { .. })));
}

#[test]
fn invalid_data_offsets_are_refused() {
    let two = |a: (u64, u64), b: (u64, u64)| format!("{{{},{}}}", entry("a", a.0, a.1), entry("b", b.0, b.1));
    for (what, json, data, words) in [
        ("a gap", two((0, 4), (5, 8)), 8, "wrong offset in the data: expected 4, found 5"),
        ("an overlap", two((0, 4), (3, 8)), 8, "wrong offset in the data: expected 4, found 3"),
        ("the same twice", two((0, 4), (0, 4)), 4, "wrong offset in the data: expected 4, found 0"),
        ("a gap in front", format!("{{{}}}", entry("a", 1, 4)), 4, "expected 0, found 1"),
        ("a file too short", two((0, 4), (4, 8)), 7, "the tensors end at byte"),
        ("a file too long", two((0, 4), (4, 8)), 9, "the tensors end at byte"),
    ] {
        let error = refused(&json, data);
        assert!(error.contains(words), "{what}: {error}");
    }
    for (what, fields) in [
        ("reversed", r#""shape":[1],"data_offsets":[1,0]"#),
        ("too long", r#""shape":[1],"data_offsets":[0,2]"#),
        ("beyond 2^64", r#""shape":[1],"data_offsets":[18446744073709551614,18446744073709551615]"#),
    ] {
        let error = parse(&format!(r#"{{"a":{{"dtype":"U8",{fields}}}}}"#), 1).unwrap_err();
        assert!(matches!(error, SafetensorsError::Length { .. }), "{what}: {error}");
    }
}

#[test]
fn shapes_without_a_size_are_refused() {
    for (dtype, shape) in [
        ("U8", "[4294967296,4294967296]"),
        ("F64", "[4611686018427387904]"),
        ("F4", "[3]"),
        ("F6_E2M3", "[2]"),
    ] {
        let json = format!(r#"{{"a":{{"dtype":"{dtype}","shape":{shape},"data_offsets":[0,0]}}}}"#);
        let error = parse(&json, 0).unwrap_err();
        assert!(matches!(error, SafetensorsError::Size { .. }), "{json}: {error}");
    }
    let of_rank = |rank: usize| {
        let ones = vec!["1"; rank].join(",");
        format!(r#"{{"a":{{"dtype":"U8","shape":[{ones}],"data_offsets":[0,1]}}}}"#)
    };
    for rank in [0, 5, 17, 64, 1024] {
        assert!(parse(&of_rank(rank), 1).is_ok(), "{rank}");
    }
    let many = of_rank(1025);
    assert!(matches!(parse(&many, 1), Err(SafetensorsError::Rank { found: 1025, .. })));
    assert!(refused(&many.replace("U8", "U9\\u001b"), 1).contains("unknown element type \"U9\\u{1b}\""));
}

#[test]
fn names_are_any_text_but_a_reader_of_tensors_takes_printable_ones_only() {
    for name in ["", "a\\u001b[2J", "a\\nb", "a\\u0000b", "../../größe"] {
        let json = format!("{{{}}}", entry(name, 0, 1));
        let header = Header::parse_start(&file(&json, 1)).unwrap();
        let text: String = serde_json::from_str(&format!("\"{name}\"")).unwrap();
        assert!(header.tensor(&text).is_some(), "{name}");
        assert_eq!(parse(&json, 1).is_ok(), name.contains(".."), "{name}");
    }
    let of_length = |length: usize| format!("{{{}}}", entry(&"n".repeat(length), 0, 1));
    assert!(parse(&of_length(Header::MAX_PRINTABLE_NAME_BYTES), 1).is_ok());
    let longer = of_length(Header::MAX_PRINTABLE_NAME_BYTES + 1);
    assert!(refused(&longer, 1).contains("1025 bytes: too long"));
    assert!(Header::parse_start(&file(&longer, 1)).is_ok());
    assert!(Header::parse_start(&file(&of_length(Header::MAX_NAME_BYTES), 1)).is_ok());
    let error = Header::parse_start(&file(&of_length(Header::MAX_NAME_BYTES + 1), 1)).unwrap_err();
    assert!(error.to_string().contains("65537 bytes: too long"), "{error}");
}

#[test]
fn tensors_are_counted() {
    let with = |count: usize| {
        let entries: Vec<_> = (0..count).map(|number| entry(&number.to_string(), 0, 0)).collect();
        parse(&format!("{{{}}}", entries.join(",")), 0)
    };
    assert!(with(Header::MAX_TENSORS).is_ok());
    assert_eq!(with(Header::MAX_TENSORS + 1), Err(SafetensorsError::TooMany(Limit::Tensors)));
}

#[test]
fn headers_that_no_reader_accepts_are_not_written() {
    let mut writer = HeaderWriter::new();
    writer.tensor("a", Dtype::U8, &[1]).unwrap();
    for (name, dtype, shape) in [
        ("a", Dtype::U8, &[1][..]),
        ("__metadata__", Dtype::U8, &[1]),
        ("b", Dtype::F4, &[1]),
        ("b", Dtype::U8, &[u64::MAX]),
    ] {
        assert!(writer.clone().tensor(name, dtype, shape).is_err(), "{name} {dtype}");
    }
}

/// The bytes of a column of the table: `\\xNN` is a byte.
fn unescaped(text: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), text);
    while let Some((before, after)) = rest.split_once("\\x") {
        bytes.extend(before.as_bytes());
        bytes.push(u8::from_str_radix(&after[..2], 16).unwrap());
        rest = &after[2..];
    }
    [bytes, rest.into()].concat()
}

/// The first line of the table names its program. Accepted files are also laid out, which the library does not do.
#[test]
fn verdicts_are_those_of_the_library() {
    let table = include_str!("library_cases.tsv");
    let mut count = 0;
    for row in table.lines().filter(|line| !line.starts_with('#')) {
        let [verdict, name, length, spaces, data, header] =
            row.split('\t').collect::<Vec<_>>().try_into().unwrap();
        let mut json = unescaped(header);
        json.resize(json.len() + spaces.parse::<usize>().unwrap(), b' ');
        let length = length.parse::<i128>().unwrap_or(json.len() as i128);
        let mut file = u64::try_from(length).map_or(Vec::new(), |length| length.to_le_bytes().to_vec());
        if !file.is_empty() {
            file.extend(json);
            file.resize(file.len() + data.parse::<usize>().unwrap(), 0);
        }
        let size = file.len() as u64;
        count += 1;
        let checked = Header::parse_start(&file).and_then(|header| header.check_file_size(size));
        assert_eq!(checked.is_ok(), verdict == "accepted", "{name}: {header}: {checked:?}");
        // Reading it twice would take long.
        if size > 1 << 20 {
            continue;
        }
        let laid_out = read_header(&file).and_then(|header| header.file_layout(size));
        assert_eq!(laid_out.is_ok(), verdict == "accepted", "{name}: {header}: {laid_out:?}");
    }
    assert!(count > 77 + 60, "{count}");
}

#[test]
fn errors_name_the_byte_or_the_tensor() {
    for (json, words) in [
        ("{\n  \"a\": {\"dtype\": \"U8\",\n x}}", "at byte 34 of the file: key must be a string"),
        ("{} x", "at byte 11 of the file: trailing characters"),
        (
            r#"{"a":{"dtype":"U9","shape":[1],"data_offsets":[0,1]}}"#,
            "tensor \"a\": unknown element type \"U9\"",
        ),
        (
            r#"{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,1]}}"#,
            "tensor \"a\": wrong size: expected 2 bytes",
        ),
    ] {
        let error = refused(json, 1);
        assert!(error.contains(words), "{json}: {error}");
    }
}

#[test]
fn what_a_header_may_cost_is_limited() {
    let refused = |json: &str| Header::parse_start(&file(json, 0)).unwrap_err();
    let tensor = |shape: &str| format!(r#"{{"dtype":"U8","shape":[{shape}],"data_offsets":[0,0]}}"#);
    let long = "n".repeat(Header::MAX_TEXT_BYTES + 1);
    for json in [
        format!(r#"{{"__metadata__":{{"a":"{long}"}}}}"#),
        format!(r#"{{"{long}":{}}}"#, tensor("0")),
        format!(r#"{{"a":{{"x":"\\{long}"}}}}"#),
    ] {
        assert_eq!(refused(&json), SafetensorsError::TooMany(Limit::Text), "{}", &json[..20]);
    }
    let half = "n".repeat(Header::MAX_TEXT_BYTES / 2 + 1);
    let json = format!(r#"{{"__metadata__":{{"a":"{half}","b":"{half}"}}}}"#);
    assert_eq!(refused(&json), SafetensorsError::TooMany(Limit::Text));
    let entries: Vec<String> =
        (0..=Header::MAX_METADATA).map(|number| format!("\"{number}\":\"\"")).collect();
    let json = format!(r#"{{"__metadata__":{{{}}}}}"#, entries.join(","));
    assert_eq!(refused(&json), SafetensorsError::TooMany(Limit::Metadata));
    let shape = vec!["0"; Header::MAX_DIMENSIONS].join(",");
    let tensors = Header::MAX_TOTAL_DIMENSIONS / Header::MAX_DIMENSIONS + 1;
    let entries: Vec<String> =
        (0..tensors).map(|number| format!("\"{number}\":{}", tensor(&shape))).collect();
    assert_eq!(refused(&format!("{{{}}}", entries.join(","))), SafetensorsError::TooMany(Limit::Dimensions));
}

fn tables() -> impl Strategy<Value = Vec<(String, Dtype, Vec<u64>)>> {
    let dtype = prop::sample::select(vec![Dtype::F32, Dtype::BF16, Dtype::U32, Dtype::Bool, Dtype::I64]);
    let tensor = ("[a-z./\"\\\\ü]{1,12}", dtype, prop::collection::vec(0_u64..5, 0..4));
    prop::collection::vec(tensor, 0..8)
}

/// Gives a few bytes at a time, and fails at the end of what it has.
struct Trickle<'b>(&'b [u8]);

impl io::Read for Trickle<'_> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let (part, rest) = self.0.split_at(self.0.len().min(buffer.len()).min(7000));
        self.0 = rest;
        buffer[..part.len()].copy_from_slice(part);
        if part.is_empty() { Err(io::Error::other("broken")) } else { Ok(part.len()) }
    }
}

#[test]
fn header_that_is_read_in_pieces_is_the_same() {
    let spaces = |count: usize| " \n\r\t".repeat(count / 4);
    let long = spaces(17 << 20);
    for (before, name) in [(spaces(8), "a"), (spaces(200_000), "a"), (long.clone(), "  \\\" a \\\\")] {
        let json = format!("{before}{{{before}{}{before}}}{before}", entry(name, 0, 1));
        let bytes = file(&json, 1);
        let (header, digest) = Header::read(&mut Trickle(&bytes)).unwrap().unwrap();
        assert_eq!(digest, Digest::of(&bytes[..bytes.len() - 1]));
        assert_eq!(Ok(header), Header::parse_start(&bytes));
    }
    // The form feed is no white space of JSON, and spaces in a string are not left out.
    let wrong = file(&format!("{{{long}\u{c}{}}}", entry("a", 0, 1)), 1);
    let error = Header::read(&mut Trickle(&wrong)).unwrap().unwrap_err();
    assert!(error.to_string().contains(&format!("at byte {} of the file", 9 + long.len())), "{error}");
    let name = " ".repeat(Header::MAX_NAME_BYTES);
    let bytes = file(&format!("{{{long}{}}}", entry(&name, 0, 1)), 1);
    let (header, _) = Header::read(&mut Trickle(&bytes)).unwrap().unwrap();
    assert!(header.tensor(&name).is_some());
}

#[test]
fn file_that_cannot_be_read_is_no_wrong_header() {
    let bytes = file(&format!("{{{}}}", entry("a", 0, 1)), 0);
    for end in [0, 7, 8, 9, bytes.len() - 1] {
        assert_eq!(Header::read(&mut Trickle(&bytes[..end])).unwrap_err().to_string(), "broken", "{end}");
    }
}

proptest! {
    #[test]
    fn header_that_was_written_reads_back(table in tables()) {
        let (mut writer, mut written) = (HeaderWriter::new(), Vec::new());
        writer.metadata("k", "v\"");
        for (name, dtype, shape) in table {
            if writer.tensor(&name, dtype, &shape).is_ok() {
                written.push((name, dtype, shape));
            }
        }
        let bytes = writer.header().unwrap();
        prop_assert_eq!(bytes.len() % 8, 0);
        let data: u64 = written.iter().filter_map(|(_, dtype, shape)| header::size_bytes(*dtype, shape)).sum();
        let header = Header::parse(&bytes, bytes.len() as u64 + data).unwrap();
        prop_assert_eq!(header.tensors().len(), written.len());
        for (name, dtype, shape) in &written {
            let tensor = header.tensor(name).unwrap();
            prop_assert_eq!((tensor.dtype(), tensor.shape()), (*dtype, &shape[..]));
        }
    }

    #[test]
    fn any_json_like_bytes_are_refused_or_cover_the_file(
        text in r#"\{("[ab]":\{"dtype":"(U8|F32|x)","shape":\[[0-9]{0,2}\],"data_offsets":\[[0-9],[0-9]{1,2}\]\},?){0,3}\}"#,
        data in 0_usize..20,
    ) {
        if let Ok(header) = parse(&text, data) {
            let sum: u64 = header.tensors().iter().map(Tensor::size_bytes).sum();
            prop_assert_eq!(sum, data as u64);
        }
    }

    #[test]
    fn any_bytes_are_refused_or_read(bytes in prop::collection::vec(any::<u8>(), 0..64)) {
        let _ = Header::parse(&bytes, bytes.len() as u64);
    }
}
