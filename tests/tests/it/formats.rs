//! `blobd tensor`, compared bit for bit with `tests/formats.py`, a decoder that was written from `docs/FORMATS.md`
//! alone: everything that it needs to know about a type is in that document.

use std::fs;
use std::path::Path;
use std::process::Command;

use blobd_fixtures::skipped::skipped;
use blobd_model::quant::{BlockLayout, Field, FieldType};
use blobd_store_format::gguf::GgmlType;
use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{ModelFile, ModelTensor};
use blobd_tests::programs::is_unavailable;
use tempfile::TempDir;

use crate::tensor::parsed_npy;
use crate::tensor_layers::with_layer;

/// Deterministic bytes.
struct Random(u64);

impl Random {
    fn byte(&mut self) -> u8 {
        // Knuth's linear congruential generator; its uppermost byte is random enough.
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        self.0.to_be_bytes()[0]
    }

    fn bytes(&mut self, count: usize) -> Vec<u8> {
        (0..count).map(|_| self.byte()).collect()
    }
}

/// Zero, subnormal, smallest, largest, infinite, NaN, of both signs where the type has signs.
fn special_numbers(field_type: FieldType) -> Vec<Vec<u8>> {
    const HALVES: [u16; 14] = [
        0x0000, 0x8000, 0x0001, 0x8001, 0x03ff, 0x83ff, 0x0400, 0x7bff, 0xfbff, 0x7c00, 0xfc00, 0x7e00,
        0xfe00, 0x7c01,
    ];
    const FLOATS: [f32; 9] =
        [0.0, -0.0, 1e-45, -1e-45, f32::MAX, f32::MIN, f32::INFINITY, f32::NEG_INFINITY, f32::NAN];
    match field_type {
        FieldType::F16 => HALVES.iter().map(|half| half.to_le_bytes().to_vec()).collect(),
        FieldType::F32 => FLOATS.iter().map(|float| float.to_le_bytes().to_vec()).collect(),
        FieldType::E8m0 => [0, 1, 2, 127, 253, 254, 255].map(|byte| vec![byte]).to_vec(),
        FieldType::Ue4m3 => [0, 1, 7, 8, 0x77, 0x7e, 0x7f, 0x80, 0x81, 0xff].map(|byte| vec![byte]).to_vec(),
        _ => Vec::new(),
    }
}

/// A random block with one number at each of these places.
fn with_number(random: &mut Random, size: usize, fields: &[Field], number: &[u8]) -> Vec<u8> {
    let mut block = random.bytes(size);
    for field in fields {
        let (start, length) =
            (usize::try_from(field.offset).unwrap(), usize::try_from(field.bytes()).unwrap());
        block[start..start + length].chunks_mut(number.len()).for_each(|place| place.copy_from_slice(number));
    }
    block
}

/// Random blocks, blocks of equal bytes, and random blocks with special scales: each alone, and all at once.
fn blocks(layout: &BlockLayout) -> Vec<u8> {
    const RANDOM_BLOCKS: usize = 40;
    let size = usize::try_from(layout.bytes()).unwrap();
    let mut random = Random(u64::from(layout.ggml_type().id()));
    let mut blocks = random.bytes(RANDOM_BLOCKS * size);
    blocks.extend([0x00, 0x01, 0x7f, 0x80, 0xff].iter().flat_map(|byte| vec![*byte; size]));
    let scales: Vec<Field> =
        layout.fields().filter(|field| !special_numbers(field.field_type).is_empty()).collect();
    let alone = scales.iter().map(std::slice::from_ref);
    for fields in alone.chain((scales.len() > 1).then_some(&scales[..])) {
        for number in special_numbers(fields[0].field_type) {
            blocks.extend(with_number(&mut random, size, fields, &number));
        }
    }
    if layout.ggml_type() == GgmlType::IQ1_M {
        for number in special_numbers(FieldType::F16) {
            let mut block = random.bytes(size);
            // A nibble of the scale is the upper half of every other one of the last eight bytes.
            let nibbles = [number[0] & 15, number[0] >> 4, number[1] & 15, number[1] >> 4];
            for (byte, nibble) in block[size - 8..].iter_mut().skip(1).step_by(2).zip(nibbles) {
                *byte = *byte & 15 | nibble << 4;
            }
            blocks.extend(block);
        }
    }
    blocks
}

/// Runs the decoder on the files in this folder; `false` if Python is missing.
fn decode(folder: &Path) -> bool {
    let repository = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let mut python = Command::new("python3");
    python.arg(repository.join("tests/formats.py")).arg(repository.join("docs")).arg(folder);
    match python.output() {
        Err(error) if is_unavailable(&error) => {
            skipped(format_args!("python3: {error}"));
            false
        }
        output => {
            let output = output.unwrap();
            assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            true
        }
    }
}

/// Compares the decoder's numbers with those in a numpy file: equal bits, and NaN for NaN.
fn compare(name: &str, elements: usize, folder: &Path, npy: &[u8]) {
    let floats = |bytes: &[u8]| -> Vec<f32> {
        bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let (header, found) = parsed_npy(npy);
    assert!(header.contains("'<f4'"), "{name}: {header}");
    let found = floats(&found);
    let expected = floats(&fs::read(folder.join(name).with_extension("numbers")).unwrap());
    assert_eq!(found.len(), expected.len(), "{name}");
    for (number, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let is_same = found.to_bits() == expected.to_bits() || found.is_nan() && expected.is_nan();
        let (block, element) = (number / elements, number % elements);
        assert!(is_same, "{name}: block {block}, element {element}: {found}, the document says {expected}");
    }
}

#[test]
fn decoder_written_from_the_document_gives_the_numbers_of_every_type() {
    let folder = TempDir::new().unwrap();
    // The others are numbers already, which numpy files have in their own types.
    let is_converted = |layout: &BlockLayout| layout.elements() > 1 || layout.ggml_type() == GgmlType::BF16;
    let layouts: Vec<BlockLayout> = BlockLayout::all().filter(is_converted).collect();
    let mut file = ModelFile::empty();
    for layout in &layouts {
        let (name, blocks) = (layout.ggml_type().name(), blocks(layout));
        fs::write(folder.path().join(format!("{name}.blocks")), &blocks).unwrap();
        let elements = blocks.len() as u64 / layout.bytes() * layout.elements();
        file.tensors.push(ModelTensor::of_bytes(name, layout.ggml_type(), &[elements], blocks));
    }
    if !decode(folder.path()) {
        return;
    }
    let daemon = TestDaemon::start();
    let path = daemon.scratch().join("m.gguf");
    fs::write(&path, file.bytes()).unwrap();
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    for layout in &layouts {
        let name = layout.ggml_type().name();
        let npy = daemon.command().run(["tensor", "m", &name, "--npy"]).succeeds().stdout;
        compare(&name, usize::try_from(layout.elements()).unwrap(), folder.path(), &npy);
    }
}

#[test]
fn decoder_written_from_the_document_gives_the_numbers_of_small_floats() {
    const TYPES: [Dtype; 8] = [
        Dtype::F4,
        Dtype::F6_E2M3,
        Dtype::F6_E3M2,
        Dtype::F8_E4M3,
        Dtype::F8_E5M2,
        Dtype::F8_E4M3FNUZ,
        Dtype::F8_E5M2FNUZ,
        Dtype::F8_E8M0,
    ];
    let folder = TempDir::new().unwrap();
    let (mut writer, mut data) = (HeaderWriter::new(), Vec::new());
    for dtype in TYPES {
        // Every byte, and random ones; a multiple of three bytes.
        let mut bytes: Vec<u8> = (0..=255).collect();
        bytes.extend(Random(dtype.bits()).bytes(512));
        fs::write(folder.path().join(format!("{dtype}.elements")), &bytes).unwrap();
        writer.tensor(dtype.name(), dtype, &[bytes.len() as u64 * 8 / dtype.bits()]).unwrap();
        data.extend(bytes);
    }
    if !decode(folder.path()) {
        return;
    }
    let daemon = TestDaemon::start();
    let path = daemon.scratch().join("m.safetensors");
    fs::write(&path, [writer.header().unwrap(), data].concat()).unwrap();
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    for dtype in TYPES {
        let npy = daemon.command().run(["tensor", "m", dtype.name(), "--npy"]).succeeds().stdout;
        compare(dtype.name(), 1, folder.path(), &npy);
    }
}

/// A quantised tensor of 4 rows with 128 elements, of random codes and scales.
fn layer(quant_type: &str, group: u64, scale: Dtype, has_bias: bool, has_global_scale: bool) -> Vec<u8> {
    const ROWS: u64 = 4;
    const ROW_ELEMENTS: u64 = 128;
    let bits = if quant_type.ends_with('8') { 8 } else { 4 };
    let groups = [ROWS, ROW_ELEMENTS / group];
    let mut writer = HeaderWriter::new();
    writer.metadata("quant_type", quant_type).metadata("group_size", group.to_string());
    let mut sizes = vec![ROWS * ROW_ELEMENTS * bits / 8];
    writer.tensor("w", Dtype::U32, &[ROWS, ROW_ELEMENTS * bits / 32]).unwrap();
    for part in ["w.scale", "w.bias"].into_iter().take(1 + usize::from(has_bias)) {
        writer.tensor(part, scale, &groups).unwrap();
        sizes.push(groups[0] * groups[1] * scale.bits() / 8);
    }
    let mut file = writer.header().unwrap();
    if has_global_scale {
        writer.tensor("w.global_scale", Dtype::F32, &[]).unwrap();
        file = writer.header().unwrap();
    }
    let mut random = Random(group + bits);
    let special = match scale {
        Dtype::U8 => vec![0, 1, 0x07, 0x08, 0x7e, 0x7f, 0x80, 0xfe, 0xff],
        Dtype::F16 => special_numbers(FieldType::F16).concat(),
        Dtype::F32 => special_numbers(FieldType::F32).concat(),
        _ => Vec::new(),
    };
    for (number, size) in sizes.into_iter().enumerate() {
        let mut part = random.bytes(usize::try_from(size).unwrap());
        // The codes stay as they are.
        part.iter_mut().zip(&special).take_while(|_| number > 0).for_each(|(byte, special)| *byte = *special);
        file.extend(part);
    }
    file.extend(has_global_scale.then_some(0.3_f32.to_le_bytes()).iter().flatten());
    file
}

#[test]
fn decoder_written_from_the_document_gives_the_numbers_of_tensor_layers() {
    let folder = TempDir::new().unwrap();
    let files = [
        ("int4", 64, Dtype::BF16, true, false),
        ("int4", 32, Dtype::F16, true, false),
        ("int8", 64, Dtype::F32, true, false),
        ("int8", 32, Dtype::F64, true, true),
        ("nvfp4", 16, Dtype::U8, false, true),
        ("nvfp4", 16, Dtype::U8, false, false),
        ("mxfp4", 32, Dtype::U8, false, false),
        ("mxfp8", 32, Dtype::U8, false, false),
    ]
    .map(|(quant_type, group, scale, has_bias, has_global_scale)| {
        layer(quant_type, group, scale, has_bias, has_global_scale)
    });
    for (number, file) in files.iter().enumerate() {
        fs::write(folder.path().join(format!("{number}.safetensors")), file).unwrap();
    }
    if !decode(folder.path()) {
        return;
    }
    for (number, file) in files.iter().enumerate() {
        let (daemon, model) = with_layer("w", file);
        let npy = daemon.command().run(["tensor", &model, "w", "--npy"]).succeeds().stdout;
        compare(&number.to_string(), 128, folder.path(), &npy);
    }
}
