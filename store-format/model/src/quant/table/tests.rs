//! The tables of types, compared with each other, with a table typed in independently, and with
//! `docs/FORMATS.md`.

use crate::quant::{BlockLayout, FieldType};
use blobd_store_format::gguf::GgmlType;

const FORMATS: &str = include_str!("../../../../../docs/FORMATS.md");

/// ID, name, elements of a block, its bytes, and bits per weight, as ggml reports them at run time. A type with 0
/// elements was removed.
const EXPECTED: [(u32, &str, u64, u64, f64); 43] = [
    (0, "F32", 1, 4, 32.0),
    (1, "F16", 1, 2, 16.0),
    (2, "Q4_0", 32, 18, 4.5),
    (3, "Q4_1", 32, 20, 5.0),
    (4, "MXFP4_OLLAMA", 32, 17, 4.25),
    (5, "type-5", 0, 0, 0.0),
    (6, "Q5_0", 32, 22, 5.5),
    (7, "Q5_1", 32, 24, 6.0),
    (8, "Q8_0", 32, 34, 8.5),
    (9, "Q8_1", 32, 36, 9.0),
    (10, "Q2_K", 256, 84, 2.625),
    (11, "Q3_K", 256, 110, 3.4375),
    (12, "Q4_K", 256, 144, 4.5),
    (13, "Q5_K", 256, 176, 5.5),
    (14, "Q6_K", 256, 210, 6.5625),
    (15, "Q8_K", 256, 292, 9.125),
    (16, "IQ2_XXS", 256, 66, 2.0625),
    (17, "IQ2_XS", 256, 74, 2.3125),
    (18, "IQ3_XXS", 256, 98, 3.0625),
    (19, "IQ1_S", 256, 50, 1.5625),
    (20, "IQ4_NL", 32, 18, 4.5),
    (21, "IQ3_S", 256, 110, 3.4375),
    (22, "IQ2_S", 256, 82, 2.5625),
    (23, "IQ4_XS", 256, 136, 4.25),
    (24, "I8", 1, 1, 8.0),
    (25, "I16", 1, 2, 16.0),
    (26, "I32", 1, 4, 32.0),
    (27, "I64", 1, 8, 64.0),
    (28, "F64", 1, 8, 64.0),
    (29, "IQ1_M", 256, 56, 1.75),
    (30, "BF16", 1, 2, 16.0),
    (31, "type-31", 0, 0, 0.0),
    (32, "type-32", 0, 0, 0.0),
    (33, "type-33", 0, 0, 0.0),
    (34, "TQ1_0", 256, 54, 1.6875),
    (35, "TQ2_0", 256, 66, 2.0625),
    (36, "type-36", 0, 0, 0.0),
    (37, "type-37", 0, 0, 0.0),
    (38, "type-38", 0, 0, 0.0),
    (39, "MXFP4", 32, 17, 4.25),
    (40, "NVFP4", 64, 36, 4.5),
    (41, "Q1_0", 128, 18, 1.125),
    (42, "Q2_0", 64, 18, 2.25),
];

#[test]
fn types_are_those_of_ggml() {
    for (id, name, elements, bytes, bits) in EXPECTED {
        let ggml_type = GgmlType::from_id(id);
        assert_eq!(ggml_type.name(), name);
        let layout = BlockLayout::for_type(ggml_type);
        assert_eq!(ggml_type.block(), (elements > 0).then_some((elements, bytes)), "{name}");
        assert_eq!(ggml_type.is_removed(), elements == 0, "{name}");
        assert_eq!(layout.is_some(), elements > 0, "{name}");
        assert_eq!(layout.map_or(0.0, |layout| layout.bits_per_weight()).to_bits(), bits.to_bits(), "{name}");
    }
    assert!(BlockLayout::for_type(GgmlType::from_id(43)).is_none());
}

#[test]
fn layouts_are_in_the_order_of_their_ids() {
    let ids: Vec<_> = BlockLayout::all().map(|layout| layout.ggml_type().id()).collect();
    let expected = EXPECTED.iter().filter(|row| row.2 > 0).map(|row| row.0);
    assert!(ids.iter().copied().eq(expected), "{ids:?}");
}

#[test]
fn fields_fill_the_block() {
    for layout in BlockLayout::all() {
        let mut end = 0;
        for field in layout.fields() {
            assert_eq!(field.offset, end, "{}: {field}", layout.ggml_type());
            assert!(field.count > 0, "{}: {field}", layout.ggml_type());
            end += field.bytes();
        }
        assert_eq!(end, layout.bytes(), "{}", layout.ggml_type());
    }
}

/// Facts about fields that public descriptions often get wrong.
#[test]
fn scales_are_where_ggml_has_them() {
    let field = |ggml_type, name: &str| {
        let mut fields = BlockLayout::for_type(ggml_type).unwrap().fields();
        fields.find(|field| field.name == name).map(|field| (field.offset, field.field_type, field.count))
    };
    assert_eq!(field(GgmlType::Q8_K, "d"), Some((0, FieldType::F32, 1)));
    assert_eq!(field(GgmlType::Q8_K, "bsums"), Some((260, FieldType::I16, 16)));
    assert_eq!(field(GgmlType::IQ1_M, "d"), None);
    assert_eq!(field(GgmlType::IQ1_M, "scales"), Some((48, FieldType::U16, 4)));
    assert_eq!(field(GgmlType::Q6_K, "d"), Some((208, FieldType::F16, 1)));
    assert_eq!(field(GgmlType::Q2_K, "dmin"), Some((82, FieldType::F16, 1)));
    assert_eq!(field(GgmlType::MXFP4, "e"), Some((0, FieldType::E8m0, 1)));
    assert_eq!(field(GgmlType::NVFP4, "d"), Some((0, FieldType::Ue4m3, 4)));
}

#[test]
fn every_known_file_type_belongs_to_one_type() {
    let mut listed: Vec<u32> =
        BlockLayout::all().flat_map(|layout| layout.file_types().iter().copied()).collect();
    listed.sort_unstable();
    // llama.h: 4 was Q4_1_SOME_F16, which Ollama uses for gpt-oss; 5, 6 and 33 to 35 were removed.
    let expected = (0..42).filter(|id| !matches!(id, 5 | 6 | 33..=35));
    assert!(listed.iter().copied().eq(expected), "{listed:?}");
}

/// The rows of the table below this heading of `docs/FORMATS.md`, split into cells.
fn table(heading: &str) -> Vec<Vec<String>> {
    let lines = FORMATS.lines().skip_while(|line| *line != heading).skip_while(|line| !line.starts_with('|'));
    let rows = lines.skip(2).take_while(|line| line.starts_with('|'));
    let cells = |row: &str| {
        let cells = row.trim_matches('|').split('|');
        cells.map(|cell| cell.trim().replace('`', "")).collect()
    };
    rows.map(cells).collect()
}

#[test]
fn document_lists_every_type() {
    let file_types = |layout: &BlockLayout| {
        let numbers: Vec<_> = layout.file_types().iter().map(u32::to_string).collect();
        if numbers.is_empty() { "–".to_owned() } else { numbers.join(", ") }
    };
    let expected: Vec<_> = BlockLayout::all()
        .map(|layout| {
            vec![
                layout.ggml_type().id().to_string(),
                layout.ggml_type().name().into_owned(),
                layout.elements().to_string(),
                layout.bytes().to_string(),
                layout.bits_per_weight().to_string(),
                layout.formula().to_owned(),
                layout.source().to_owned(),
                file_types(&layout),
            ]
        })
        .collect();
    assert_eq!(table("## Types"), expected);
}

#[test]
fn document_lists_the_fields_of_every_type() {
    let fields = |layout: BlockLayout| layout.fields().map(|field| field.to_string()).collect::<Vec<_>>();
    let expected: Vec<_> = BlockLayout::all()
        .map(|layout| vec![layout.ggml_type().name().into_owned(), fields(layout).join(", ")])
        .collect();
    assert_eq!(table("## Fields"), expected);
}

/// The document's drawing of this type: the text below the heading that names it.
fn drawing(name: &str) -> &'static str {
    let drawings = FORMATS.split("\n## ").find_map(|section| section.strip_prefix("Drawings\n")).unwrap();
    let mut sections = drawings.split("\n### ");
    let is_named =
        |section: &&str| section.lines().next().is_some_and(|title| title.contains(&format!("`{name}`")));
    sections.find(is_named).unwrap_or_else(|| panic!("docs/FORMATS.md: type {name} is not drawn"))
}

/// Compares the drawn parts of a block with the expected ones: those before `...`, or all of them without `...`.
fn assert_drawn(drawn: &[&str], expected: &[String], name: &str) {
    let count = drawn.iter().position(|part| *part == "...").unwrap_or(expected.len());
    let drawn: Vec<_> = drawn.iter().filter(|part| **part != "...").take(count).collect();
    assert_eq!(drawn, expected.iter().take(count).collect::<Vec<_>>(), "{name}");
}

#[test]
fn document_draws_the_block_of_every_type() {
    for layout in BlockLayout::all() {
        let name = layout.ggml_type().name();
        let mut lines = drawing(&name).lines();
        if layout.elements() == 1 {
            let last = layout.bytes() - 1;
            let range = if last == 0 { "byte 0 ".to_owned() } else { format!("byte 0 to {last} ") };
            let is_drawn = |line: &str| {
                line.split_once(' ').is_some_and(|(at, rest)| at == name && rest.contains(&range))
            };
            assert!(lines.any(is_drawn), "{name}: expected {range}");
            continue;
        }
        let fields: Vec<_> = layout.fields().collect();
        let offsets = lines.find_map(|line| line.strip_prefix("byte ")).expect("offsets");
        let offsets: Vec<_> = offsets.split_whitespace().collect();
        let expected: Vec<_> = fields.iter().map(|field| field.offset.to_string()).collect();
        assert_eq!(offsets.last(), Some(&&*layout.bytes().to_string()), "{name}");
        assert_drawn(&offsets[..offsets.len() - 1], &expected, &name);
        let mut cells =
            lines.skip(1).map(|line| line.split('|').map(str::trim).filter(|cell| !cell.is_empty()));
        let expected = fields.iter().map(|field| field.to_string().split_once(' ').unwrap().1.to_owned());
        assert_drawn(&cells.next().unwrap().collect::<Vec<_>>(), &expected.collect::<Vec<_>>(), &name);
        let types: Vec<_> = cells.next().unwrap().collect();
        let expected = fields.iter().map(|field| field.field_type.to_string()).take(types.len());
        assert_eq!(types, expected.collect::<Vec<_>>(), "{name}");
    }
}

#[test]
fn document_names_the_source_of_every_type() {
    let rows = table("## Origin");
    let names: Vec<_> = rows.iter().map(|row| row[0].as_str()).collect();
    let expected: Vec<_> = BlockLayout::all().map(|layout| layout.ggml_type().name()).collect();
    assert_eq!(names, expected);
    for row in rows {
        let origin = row[1].as_str();
        assert!(["#", "first commit", "Ollama"].iter().any(|start| origin.starts_with(start)), "{row:?}");
        assert!(row[2].parse().is_ok_and(|year: u32| year >= 2023), "{row:?}");
    }
}

#[test]
fn document_lists_the_removed_ids() {
    let ids: Vec<u32> = table("## Removed ids").iter().map(|row| row[0].parse().unwrap()).collect();
    let expected = (0..43).filter(|id| GgmlType::from_id(*id).is_removed());
    assert!(ids.iter().copied().eq(expected), "{ids:?}");
}
