//! `blobd tensor`: statistics, values, raw bytes and numpy files, with a daemon and without.

use std::fs;

use blobd_fixtures::skipped::skipped;
use blobd_model::quant::{dequantize, swap_bytes};
use blobd_store_format::gguf::{ByteOrder, GgmlType};
use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{ModelFile, ModelTensor};
use blobd_tests::raw_gguf::RawGguf;
use serde_json::{Value as Json, json};

use crate::layouts::many_dimensions;

fn floats(values: &[f32]) -> Vec<u8> {
    values.iter().flat_map(|value| value.to_le_bytes()).collect()
}

/// Eight blocks of `Q8_0` with scale 0.5, as 4 rows of 64; the quants are -128 to 127.
fn q8_0() -> Vec<u8> {
    let quants: Vec<u8> = (i8::MIN..=i8::MAX).map(i8::cast_unsigned).collect();
    quants.chunks(32).flat_map(|block| [&[0x00, 0x38], block].concat()).collect()
}

fn model() -> ModelFile {
    let mut file = ModelFile::empty();
    let special = [f32::NAN, 1.5, f32::INFINITY, -0.5, f32::NEG_INFINITY, 3.5];
    for (name, ggml_type, shape, bytes) in [
        ("special", GgmlType::F32, &[3, 2][..], floats(&special)),
        ("quantised", GgmlType::Q8_0, &[64, 4], q8_0()),
        ("half", GgmlType::F16, &[2], vec![0x00, 0x3c, 0x00, 0xc1]),
        ("brain", GgmlType::BF16, &[2], vec![0x80, 0x3f, 0x20, 0xc0]),
        ("wide", GgmlType::I64, &[2], [i64::MAX.to_le_bytes(), (-1_i64).to_le_bytes()].concat()),
        ("blk.0.ffn_up_exps.weight", GgmlType::I8, &[2, 2, 3], (0..12).collect()),
        ("none", GgmlType::F32, &[0], Vec::new()),
    ] {
        file.tensors.push(ModelTensor::of_bytes(name, ggml_type, shape, bytes));
    }
    file
}

fn imported(file: &[u8]) -> TestDaemon {
    let daemon = TestDaemon::start();
    let path = daemon.scratch().join("m.gguf");
    fs::write(&path, file).unwrap();
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
    daemon
}

/// Runs a test with the daemon, and again without.
fn each_way(file: &[u8], test: impl Fn(&Blobd)) {
    let mut daemon = imported(file);
    test(&daemon.command());
    daemon.stop();
    test(&daemon.embedded());
}

#[test]
fn tensors_of_many_dimensions_are_shown_and_written() {
    each_way(&many_dimensions().bytes(), |commands| {
        let shown = commands.line("tensor m patch_embedding.weight --json").succeeds().json();
        assert_eq!((&shown["shape"], &shown["elements"]), (&json!([2, 2, 1, 3, 5]), &json!(60)));
        let quantised = commands.line("tensor m quantised.weight --json").succeeds().json();
        assert_eq!(quantised["elements"], 384);
        for (name, shape) in [("patch_embedding.weight", "(5, 3, 1, 2, 2,)"), ("scalar", "()")] {
            let written = commands.run(["tensor", "m", name, "--npy"]).succeeds().stdout;
            let (header, _) = parsed_npy(&written);
            assert!(header.contains(&format!("'shape': {shape}")), "{header}");
        }
        commands.line("show m --tensors").succeeds();
        let same = commands.line("diff m m --values --json").succeeds().json();
        assert_eq!((&same["only_a_bytes"], &same["only_b_bytes"]), (&json!(0), &json!(0)), "{same}");
    });
}

/// The header text and the data of a numpy file.
pub(crate) fn parsed_npy(file: &[u8]) -> (String, Vec<u8>) {
    assert_eq!(&file[..8], b"\x93NUMPY\x01\x00");
    let end = 10 + usize::from(u16::from_le_bytes([file[8], file[9]]));
    assert_eq!(end % 64, 0);
    (String::from_utf8(file[10..end].to_vec()).unwrap().trim_end().to_owned(), file[end..].to_vec())
}

fn npy_header(descr: &str, shape: &str) -> String {
    format!("{{'descr': '{descr}', 'fortran_order': False, 'shape': {shape}, }}")
}

#[test]
fn statistics_are_those_of_the_numbers() {
    each_way(&model().bytes(), |blobd| {
        let found = blobd.line("tensor m quantised --json").succeeds().json();
        assert_eq!(found["type"], "Q8_0");
        assert_eq!(
            (&found["shape"], &found["elements"], &found["bytes"]),
            (&json!([64, 4]), &json!(256), &json!(272))
        );
        assert_eq!(
            (&found["min"], &found["max"], &found["mean"]),
            (&json!(-64.0), &json!(63.5), &json!(-0.25))
        );
        // Of 256 consecutive numbers the variance is (256^2 - 1) / 12, here times 0.25.
        let std = found["std"].as_f64().unwrap();
        assert!((std - (65535.0_f64 / 48.0).sqrt()).abs() < 1e-12 * std, "{std}");
        let counts = found["histogram"]["counts"].as_array().unwrap();
        assert_eq!(counts.iter().map(|count| count.as_u64().unwrap()).sum::<u64>(), 256);
        assert_eq!(found["histogram"]["edges"].as_array().unwrap().len(), counts.len() + 1);
        let text = blobd.line("tensor m quantised").succeeds().text();
        assert!(text.contains("deviation  36.9501\n") && text.contains("█"), "{text}");
        assert_eq!(blobd.line("tensor m quantised --stats").succeeds().text(), text);
    });
}

#[test]
fn numbers_that_are_not_finite_are_only_counted() {
    each_way(&model().bytes(), |blobd| {
        let found = blobd.line("tensor m special --json").succeeds().json();
        assert_eq!((&found["nan_count"], &found["inf_count"]), (&json!(1), &json!(2)));
        assert_eq!((&found["min"], &found["max"], &found["mean"]), (&json!(-0.5), &json!(3.5), &json!(1.5)));
        let values = blobd.line("tensor m special --values 0..6 --json").succeeds().json();
        assert_eq!(values["values"], json!(["NaN", 1.5, "Infinity", -0.5, "-Infinity", 3.5]));
        let none = blobd.line("tensor m none --json").succeeds().json();
        assert_eq!((&none["elements"], &none["min"], &none["std"]), (&json!(0), &Json::Null, &Json::Null));
        assert_eq!(none["histogram"], json!({"edges": [], "counts": []}));
        assert!(blobd.line("tensor m none").succeeds().text().contains("minimum    -"));
    });
}

#[test]
fn values_of_any_range_are_shown() {
    each_way(&model().bytes(), |blobd| {
        let found = blobd.line("tensor m quantised --values 31..34 --json").succeeds().json();
        assert_eq!((&found["first"], &found["values"]), (&json!(31), &json!([-48.5, -48.0, -47.5])));
        let text = blobd.line("tensor m quantised --values 255..256").succeeds().text();
        assert_eq!(text, "ELEMENT  VALUE\n    255   63.5\n");
        let wide = blobd.line("tensor m wide --values 0..2 --json").succeeds().json();
        assert_eq!(wide["values"], json!([i64::MAX, -1]), "integers are exact");
        let error = blobd.line("tensor m quantised --values 0..257 --json").exits_with(2).error();
        assert!(error.message.contains("257") && error.message.contains("256"), "{error}");
    });
    let daemon = imported(&model().bytes());
    for wrong in ["4..4", "5..4", "x", "-1..2"] {
        daemon.command().line(&format!("tensor m quantised --values={wrong}")).exits_with(2);
    }
}

#[test]
fn numpy_files_have_the_numbers_in_numpys_order() {
    let mut expected = vec![0.0; 256];
    dequantize(GgmlType::Q8_0, &q8_0(), &mut expected).unwrap();
    each_way(&model().bytes(), |blobd| {
        let npy = |name: &str| {
            let run = blobd.line(&format!("tensor m {name} --npy")).succeeds();
            parsed_npy(&run.stdout)
        };
        assert_eq!(npy("quantised"), (npy_header("<f4", "(4, 64,)"), floats(&expected)));
        assert_eq!(npy("half"), (npy_header("<f2", "(2,)"), vec![0x00, 0x3c, 0x00, 0xc1]));
        assert_eq!(npy("brain"), (npy_header("<f4", "(2,)"), floats(&[1.0, -2.5])));
        assert_eq!(npy("wide").0, npy_header("<i8", "(2,)"));
        assert_eq!(npy("none"), (npy_header("<f4", "(0,)"), Vec::new()));
        assert_eq!(npy("special").0, npy_header("<f4", "(2, 3,)"));
        assert_eq!(npy("blk.0.ffn_up_exps.weight").0, npy_header("|i1", "(3, 2, 2,)"));
    });
}

#[test]
fn raw_bytes_and_files_are_written() {
    let daemon = imported(&model().bytes());
    let blobd = daemon.command();
    assert_eq!(blobd.line("tensor m quantised --dump").succeeds().stdout, q8_0());
    assert_eq!(blobd.line("tensor m quantised --dump -o -").succeeds().stdout, q8_0());
    let path = daemon.scratch().join("t.npy");
    let run = blobd.run(["tensor", "m", "half", "--npy", "--json", "-o", path.to_str().unwrap()]).succeeds();
    let file = fs::read(&path).unwrap();
    assert_eq!(parsed_npy(&file).1, [0x00, 0x3c, 0x00, 0xc1]);
    assert_eq!(run.json(), json!({"name": "half", "path": path.to_str().unwrap(), "size": file.len()}));
    let missing = daemon.scratch().join("no such folder/t");
    blobd.run(["tensor", "m", "half", "--dump", "-o", missing.to_str().unwrap()]).exits_with(3);
    blobd.line("tensor m half --stats -o t").exits_with(2);
    blobd.line("tensor m half --dump --npy").exits_with(2);
}

#[test]
fn one_expert_of_a_stack_is_selected_like_a_tensor() {
    each_way(&model().bytes(), |blobd| {
        let line = "tensor m blk.0.ffn_up_exps.weight --expert";
        assert_eq!(blobd.line(&format!("{line} 1 --dump")).succeeds().stdout, [4, 5, 6, 7]);
        let found = blobd.line(&format!("{line} 2 --json")).succeeds().json();
        assert_eq!(
            (&found["expert"], &found["shape"], &found["mean"]),
            (&json!(2), &json!([2, 2]), &json!(9.5))
        );
        let npy = blobd.line(&format!("{line} 0 --npy")).succeeds().stdout;
        assert_eq!(parsed_npy(&npy), (npy_header("|i1", "(2, 2,)"), vec![0, 1, 2, 3]));
        let error = blobd.line(&format!("{line} 3 --json")).exits_with(3).error();
        assert!(error.message.contains("no expert 3, it has 3"), "{error}");
        blobd.line("tensor m half --expert 0").exits_with(2);
    });
}

#[test]
fn packed_experts_are_found_by_their_names() {
    let file = ModelFile::separate_experts(1, 4);
    let tensor = file.tensors.iter().find(|tensor| tensor.name == "blk.0.ffn_up.2.weight").unwrap();
    let daemon = imported(&file.bytes());
    let found = daemon.command().line("tensor m blk.0.ffn_up.2.weight --dump").succeeds().stdout;
    assert_eq!(found, tensor.bytes());
}

#[test]
fn tensors_of_a_safetensors_file_are_shown_by_its_own_types() {
    let mut writer = HeaderWriter::new();
    writer.tensor("m.experts.up_proj", Dtype::F32, &[2, 2, 8]).unwrap();
    writer.tensor("small", Dtype::F8_E4M3, &[3]).unwrap();
    let values: Vec<f32> = (0_u8..32).map(f32::from).collect();
    let file = [writer.header().unwrap(), floats(&values), vec![1, 2, 3]].concat();
    let daemon = imported(&file);
    let blobd = daemon.command();
    let shown = blobd.line("tensor m m.experts.up_proj --json").succeeds().json();
    assert_eq!(
        (&shown["type"], &shown["shape"], &shown["max"]),
        (&json!("F32"), &json!([2, 2, 8]), &json!(31.0))
    );
    let second = blobd.line("tensor m m.experts.up_proj --expert 1 --dump").succeeds().stdout;
    assert_eq!(second, floats(&values[16..]));
    assert_eq!(blobd.line("tensor m small --dump").succeeds().stdout, [1, 2, 3]);
    let small = blobd.line("tensor m small --values 0..3 --json").succeeds().json();
    assert_eq!(small["values"], json!([0.001_953_125, 0.003_906_25, 0.005_859_375]));
    let shown = blobd.line("show m --json").succeeds().json();
    assert_eq!(shown["bits_per_weight"], json!(131.0 * 8.0 / 35.0));
    let path = daemon.scratch().join("x.safetensors");
    fs::write(&path, &file).unwrap();
    let of_file = blobd.run(["show", path.to_str().unwrap(), "--json"]).succeeds().json();
    assert_eq!(of_file["bits_per_weight"], shown["bits_per_weight"]);
}

#[test]
fn integers_and_complex_numbers_of_safetensors_are_shown_and_written_as_they_are() {
    let mut writer = HeaderWriter::new();
    let tensors: [(&str, Dtype, Vec<u8>); 6] = [
        ("bool", Dtype::Bool, vec![0, 1]),
        ("u8", Dtype::U8, vec![7, 255]),
        ("u16", Dtype::U16, [7_u16, u16::MAX].map(u16::to_le_bytes).concat()),
        ("u32", Dtype::U32, [7_u32, u32::MAX].map(u32::to_le_bytes).concat()),
        ("u64", Dtype::U64, [7_u64, u64::MAX].map(u64::to_le_bytes).concat()),
        ("c64", Dtype::C64, floats(&[1.5, -2.0, 0.0, f32::INFINITY])),
    ];
    let mut data = Vec::new();
    for (name, dtype, bytes) in &tensors {
        writer.tensor(name, *dtype, &[2]).unwrap();
        data.extend(bytes);
    }
    let daemon = imported(&[writer.header().unwrap(), data].concat());
    let blobd = daemon.command();
    for ((name, _, bytes), (values, numpy)) in tensors.iter().zip([
        (json!([0, 1]), "|b1"),
        (json!([7, 255]), "|u1"),
        (json!([7, u16::MAX]), "<u2"),
        (json!([7, u32::MAX]), "<u4"),
        (json!([7, u64::MAX]), "<u8"),
        (json!([[1.5, -2.0], [0.0, "Infinity"]]), "<c8"),
    ]) {
        let found = blobd.line(&format!("tensor m {name} --values 0..2 --json")).succeeds().json();
        assert_eq!(found["values"], values, "{name}");
        let npy = blobd.line(&format!("tensor m {name} --npy")).succeeds().stdout;
        assert_eq!(parsed_npy(&npy), (npy_header(numpy, "(2,)"), bytes.clone()), "{name}");
        let path = daemon.scratch().join(format!("{name}.npy"));
        let written = blobd.run(["tensor", "m", name, "--npy", "--json", "-o", path.to_str().unwrap()]);
        assert_eq!(written.succeeds().json()["size"], fs::metadata(&path).unwrap().len(), "{name}");
    }
    let found = blobd.line("tensor m c64 --json").succeeds().json();
    assert_eq!((&found["elements"], &found["min"], &found["max"]), (&json!(2), &json!(-2.0), &json!(1.5)));
    assert_eq!(found["inf_count"], 1);
    let text = blobd.line("tensor m c64 --values 0..1").succeeds().text();
    assert!(text.contains("1.5-2i"), "{text}");
}

#[test]
fn unknown_names_are_not_found_and_the_nearest_is_suggested() {
    each_way(&model().bytes(), |blobd| {
        let error = blobd.line("tensor m quantized --json").exits_with(3).error();
        assert!(error.message.contains("\"quantized\""), "{error}");
        assert!(error.hint.unwrap().contains("quantised"), "the nearest name");
        let error = blobd.line("tensor other quantised --json").exits_with(3).error();
        assert!(error.message.contains("other"), "{error}");
        assert!(error.hint.unwrap().contains("has to be pulled first"));
    });
}

#[test]
fn big_endian_tensors_have_the_same_numbers() {
    let mut big = model();
    big.order = ByteOrder::Big;
    for tensor in &mut big.tensors {
        let mut bytes = tensor.bytes();
        swap_bytes(tensor.ggml_type, &mut bytes).unwrap();
        *tensor = ModelTensor::of_bytes(tensor.name.clone(), tensor.ggml_type, &tensor.shape, bytes);
    }
    let (little, big) = (imported(&model().bytes()), imported(&big.bytes()));
    for name in ["quantised", "half", "brain", "wide"] {
        for form in ["--json", "--values 0..2 --json", "--npy"] {
            let line = format!("tensor m {name} {form}");
            let expected = little.command().line(&line).succeeds().stdout;
            assert_eq!(big.command().line(&line).succeeds().stdout, expected, "{line}");
        }
    }
    let raw = big.command().line("tensor m half --dump").succeeds().stdout;
    assert_eq!(raw, [0x3c, 0x00, 0xc1, 0x00], "raw bytes are as they are stored");
}

/// Tensors of a fork's type 41 with 96 bytes each, where llama.cpp's type has 36.
fn fork_file() -> (Vec<u8>, Vec<u8>) {
    let data: Vec<u8> = (0..192).collect();
    let header = RawGguf::new().tensor("a", 41, &[256], 0).tensor("b", 41, &[256], 96);
    (header.with_data(&data), data)
}

#[test]
fn types_of_forks_are_kept_shown_and_exported_but_not_converted() {
    let (file, data) = fork_file();
    each_way(&file, |blobd| {
        let tensors = blobd.line("show m --json").succeeds().json()["tensors"].clone();
        assert_eq!((&tensors[1]["type"], &tensors[1]["size"]), (&json!("type-41"), &json!(96)));
        assert_eq!(blobd.line("export m -o -").succeeds().stdout, file);
        assert_eq!(blobd.line("tensor m b --dump").succeeds().stdout, data[96..]);
        for form in ["--stats", "--npy", "--values 0..1"] {
            let error = blobd.line(&format!("tensor m b {form} --json")).exits_with(2).error();
            assert!(error.message.contains("type-41"), "{error}");
            assert!(error.hint.unwrap().contains("--dump"));
        }
    });
}

#[test]
fn raw_bytes_are_not_written_to_a_terminal() {
    let daemon = imported(&model().bytes());
    let mut command = std::process::Command::new("script");
    let line = format!("{} tensor m half --dump", blobd_tests::programs::blobd().display());
    command.args(["-qec", &line, "/dev/null"]);
    daemon.command().prepare(&mut command);
    let Ok(found) = command.output() else {
        skipped("script is not installed");
        return;
    };
    let text = String::from_utf8_lossy(&found.stdout).into_owned();
    assert_eq!(found.status.code(), Some(2), "{text}");
    assert!(text.contains("standard output is a terminal"), "{text}");
}

#[test]
fn tensor_of_a_local_file_is_that_of_the_model() {
    let daemon = TestDaemon::start();
    let path = ModelFile::stacked_experts(1, 4).write_to(daemon.scratch(), "moe-F16.gguf");
    let path = path.to_str().unwrap();
    daemon.command().run(["import", path, "--name", "m"]).succeeds();
    let name = "blk.0.ffn_up_exps.weight";
    for form in [
        &["--json"][..],
        &["--values", "3..9", "--json"],
        &["--expert", "2", "--json"],
        &["--npy"],
        &["--dump"],
    ] {
        let of = |model| daemon.command().run(["tensor", model, name].iter().chain(form)).succeeds().stdout;
        assert!(of(path) == of("m"), "{form:?}");
    }
    let error =
        daemon.command().run(["tensor", path, "blk.0.ffn_up_exp.weight", "--json"]).exits_with(3).error();
    assert!(error.hint.unwrap().contains(name), "the nearest names");
    daemon.command().run(["tensor", "/nonexistent.gguf", name]).exits_with(3);
}
