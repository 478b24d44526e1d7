//! `blobd export --alignment`, `--endian`, `--merge` and `--split-max-size`.

use std::fs;
use std::path::Path;

use blobd_model::quant::swap_bytes;
use blobd_store_format::digest::Digest;
use blobd_store_format::gguf::{ByteOrder, GgmlType, Header, Value};
use blobd_tests::command::Blobd;
use blobd_tests::daemon::TestDaemon;
use blobd_tests::model::{ModelFile, ModelTensor};
use blobd_tests::registry::FakeRegistry;
use blobd_tests::store_dir::{flip_byte, names};
use blobd_tests::temp_dirs::tmpfs_directory;

use super::daemon_with;
use crate::layouts::{layouts, many_dimensions};

const MODEL: &str = "application/vnd.ollama.image.model";

/// Name, type, shape and bytes of each tensor, in the order of the table.
fn tensors(file: &[u8]) -> Vec<(String, String, Vec<u64>, Vec<u8>)> {
    let header = Header::parse(file).unwrap();
    let layout = header.file_layout(file.len() as u64).unwrap();
    let start = usize::try_from(header.data_offset()).unwrap();
    let tensors = layout.tensors().iter().map(|range| {
        let at = start + usize::try_from(range.offset).unwrap();
        let bytes = file[at..at + usize::try_from(range.size).unwrap()].to_vec();
        (range.name.to_owned(), range.type_name.to_string(), range.shape.to_vec(), bytes)
    });
    tensors.collect()
}

fn without_padding_of_unknown_types(file: &[u8], model: &ModelFile) -> Vec<Vec<u8>> {
    let bytes = tensors(file).into_iter().zip(&model.tensors);
    bytes.map(|((.., bytes), own)| bytes[..own.bytes().len()].to_vec()).collect()
}

fn export(commands: &Blobd, arguments: &[&str]) -> Vec<u8> {
    commands.run([&["export", "m", "-o", "-"], arguments].concat()).succeeds().stdout
}

#[test]
fn model_of_every_layout_keeps_its_tensors_at_another_alignment() {
    for (layout, model) in layouts() {
        let root = tmpfs_directory();
        let commands = Blobd::at_root(&root.path().join("store"));
        let path = model.write_to(root.path(), "m.gguf");
        commands.run(["import", path.to_str().unwrap(), "--name", "m"]).succeeds();
        for alignment in ["4096", "32", "8"] {
            let written = export(&commands, &["--alignment", alignment]);
            let header = Header::parse(&written).unwrap();
            assert_eq!(header.alignment().to_string(), alignment, "{layout}");
            assert_eq!(header.byte_order(), model.order, "{layout}");
            let keys: Vec<_> = header.metadata().collect();
            for (key, value) in &model.metadata {
                let found = header.value(key).unwrap().to_value();
                assert_eq!(format!("{found:?}"), format!("{value:?}"), "{layout}: {key}");
            }
            let has_key = header.value("general.alignment").is_some();
            assert_eq!(keys.len(), model.metadata.len() + usize::from(has_key), "{layout}");
            assert_eq!(has_key, alignment != "32", "{layout}");
            let expected: Vec<_> = model.tensors.iter().map(ModelTensor::bytes).collect();
            assert!(without_padding_of_unknown_types(&written, &model) == expected, "{layout}");
        }
        assert!(export(&commands, &[]) == model.bytes(), "{layout}: the plain export");
    }
}

#[test]
fn big_endian_export_has_swapped_numbers_and_can_be_imported() {
    let model = ModelFile::dense(1).with("answer", 42_u32);
    let daemon = daemon_with(&model);
    let big = export(&daemon.command(), &["--endian", "big"]);
    let header = Header::parse(&big).unwrap();
    assert_eq!(header.byte_order(), ByteOrder::Big);
    assert_eq!(header.value("answer").unwrap().as_u64(), Some(42));
    for ((name, type_name, _, bytes), own) in tensors(&big).into_iter().zip(&model.tensors) {
        let mut expected = own.bytes();
        swap_bytes(GgmlType::from_name(&type_name).unwrap(), &mut expected).unwrap();
        assert!(bytes == expected, "{name}");
    }
    let path = daemon.scratch().join("big.gguf");
    fs::write(&path, big).unwrap();
    daemon.command().run(["import", path.to_str().unwrap(), "--name", "m", "--force"]).succeeds();
    assert!(export(&daemon.command(), &["--endian", "little"]) == model.bytes());
}

#[test]
fn tensors_of_many_dimensions_survive_every_rewriting() {
    let model = many_dimensions();
    let daemon = daemon_with(&model);
    let commands = daemon.command();
    assert!(export(&commands, &[]) == model.bytes());
    let forms = |file: &[u8]| tensors(file).into_iter().map(|(name, _, shape, _)| (name, shape)).collect();
    let expected: Vec<_> = model.tensors.iter().map(|own| (own.name.clone(), own.shape.clone())).collect();
    let folder = tmpfs_directory();
    let directory = folder.path().to_str().unwrap();
    commands.run(["export", "m", "--split-max-size", "512B", "-o", directory]).succeeds();
    let mut in_shards: Vec<(String, Vec<u64>)> = Vec::new();
    for name in names(folder.path()) {
        let found: Vec<_> = forms(&fs::read(folder.path().join(name)).unwrap());
        in_shards.extend(found);
    }
    assert_eq!(in_shards, expected);
    for options in [["--endian", "big"], ["--alignment", "64"]] {
        let found: Vec<_> = forms(&export(&commands, &options));
        assert_eq!(found, expected, "{options:?}");
    }
}

#[test]
fn type_of_unknown_layout_is_refused_by_name() {
    let (_, model) = layouts().into_iter().find(|(layout, _)| *layout == "unknown-types").unwrap();
    let daemon = daemon_with(&model);
    let folder = tmpfs_directory();
    let target = folder.path().join("m.gguf");
    let words = ["export", "m", "--endian", "big", "-o", target.to_str().unwrap(), "--json"];
    let error = daemon.command().run(words).exits_with(1).error();
    assert!(error.message.contains("\"new.first\"") && error.message.contains("type-77"), "{error}");
    assert_eq!(names(folder.path()), [""; 0]);
}

#[test]
fn split_model_is_written_as_named_shards_that_llama_cpp_can_find() {
    let model = ModelFile::dense(1);
    let daemon = daemon_with(&model);
    let folder = tmpfs_directory();
    let directory = folder.path().to_str().unwrap();
    let run = daemon.command().run(["export", "m", "--split-max-size", "16KiB", "-o", directory, "--json"]);
    let exported = run.succeeds().json()["exported"].as_array().unwrap().clone();
    let found = names(folder.path());
    let count = found.len();
    assert!(count > 2, "{found:?}");
    let expected: Vec<_> =
        (1..=count).map(|number| format!("m-latest-{number:05}-of-{count:05}.gguf")).collect();
    assert_eq!(found, expected);
    let mut all = Vec::new();
    for (number, (name, exported)) in found.iter().zip(&exported).enumerate() {
        let shard = fs::read(folder.path().join(name)).unwrap();
        assert_eq!(exported["digest"], Digest::of(&shard).to_string());
        assert_eq!(exported["size"], shard.len());
        let header = Header::parse(&shard).unwrap();
        assert!(shard.len() as u64 - header.data_offset() <= 16 << 10, "{name}");
        assert_eq!(header.value("split.no").unwrap().to_value(), Value::U16(u16::try_from(number).unwrap()));
        all.extend(tensors(&shard));
    }
    assert!(all == tensors(&model.bytes()));
}

#[test]
fn tensor_that_is_larger_than_a_shard_has_one_of_its_own() {
    let model = ModelFile::dense(1);
    let daemon = daemon_with(&model);
    let folder = tmpfs_directory();
    let directory = folder.path().to_str().unwrap();
    daemon.command().run(["export", "m", "--split-max-size", "100B", "-o", directory]).succeeds();
    let shards: Vec<_> = names(folder.path())
        .iter()
        .map(|name| tensors(&fs::read(folder.path().join(name)).unwrap()))
        .collect();
    let with_large = shards.iter().find(|shard| shard.iter().any(|(name, ..)| name == "token_embd.weight"));
    assert_eq!(with_large.unwrap().len(), 1);
    assert!(shards.concat() == tensors(&model.bytes()));
}

/// A store with a model of three shards, as pulled from a registry.
fn daemon_with_shards(model: &ModelFile) -> TestDaemon {
    let registry = FakeRegistry::start().unwrap();
    let shards: Vec<Vec<u8>> = model.shards(3).iter().map(ModelFile::bytes).collect();
    let layers: Vec<(&str, &[u8])> = shards.iter().map(|shard| (MODEL, &shard[..])).collect();
    registry.add_model("library/big:latest", b"{}", &layers).unwrap();
    let daemon = TestDaemon::start();
    let name = registry.name("library/big:latest");
    daemon.command().run(["pull", &name]).succeeds();
    daemon.command().run(["tag", &name, "m"]).succeeds();
    daemon
}

#[test]
fn shards_are_merged_split_again_and_changed_one_by_one() {
    let model = ModelFile::dense(1);
    let daemon = daemon_with_shards(&model);
    assert!(export(&daemon.command(), &["--merge"]) == model.bytes());
    let aligned = export(&daemon.command(), &["--merge", "--alignment", "64"]);
    assert_eq!(Header::parse(&aligned).unwrap().alignment(), 64);
    assert!(tensors(&aligned) == tensors(&model.bytes()));
    let folder = tmpfs_directory();
    let directory = folder.path().to_str().unwrap();
    daemon.command().run(["export", "m", "--endian", "big", "-o", directory]).succeeds();
    let shards = names(folder.path());
    assert_eq!(shards.len(), 3, "{shards:?}");
    for shard in shards {
        let header = Header::parse(&fs::read(folder.path().join(shard)).unwrap()).unwrap();
        assert_eq!(header.byte_order(), ByteOrder::Big);
        assert_eq!(header.value("split.count").unwrap().as_u64(), Some(3));
    }
    let folder = tmpfs_directory();
    let words = ["export", "m", "--split-max-size", "1GiB", "-o", folder.path().to_str().unwrap()];
    daemon.command().run(words).succeeds();
    let whole = fs::read(folder.path().join("m-latest.gguf")).unwrap();
    assert_eq!(Header::parse(&whole).unwrap().value("split.count").unwrap().as_u64(), Some(1));
    assert!(tensors(&whole) == tensors(&model.bytes()));
}

#[test]
fn options_that_do_not_fit_are_usage_errors_and_write_nothing() {
    let daemon = daemon_with(&ModelFile::dense(1));
    let folder = tmpfs_directory();
    let target = folder.path().join("m.gguf");
    let refused = |words: &str, hint: &str| {
        let arguments = ["export", "m", "--json", "-o", target.to_str().unwrap()];
        let run = daemon.command().run(arguments.into_iter().chain(words.split_whitespace()));
        assert!(run.exits_with(2).stderr.contains(hint), "{words}");
        assert_eq!(names(folder.path()), [""; 0], "{words}");
    };
    refused("--merge", "nothing to merge");
    refused("--merge --split-max-size 1M", "cannot be used with");
    refused("--split-max-size 8KiB", "give a directory");
    refused("--split-max-size -1", "-1: no option");
    refused("--alignment 33", "a power of two");
    refused("--endian middle", "expected little or big, found \\\"middle\\\"");
    let run = daemon.command().line("export m --split-max-size 8KiB -o -");
    assert!(run.exits_with(2).stderr.contains("give a directory"));
    let run = daemon.command().line("export m --component config --alignment 64 --json");
    let error = run.exits_with(1).error();
    assert!(error.message.contains("expected a GGUF or safetensors file, found a JSON document"), "{error}");
    assert!(error.hint.unwrap().contains("only GGUF files"));
}

#[test]
fn damaged_tensor_is_found_and_no_file_is_written() {
    let model = ModelFile::separate_experts(1, 12);
    let mut daemon = daemon_with(&model);
    daemon.stop();
    let largest = largest_blob(&daemon.root().join("blobs"));
    flip_byte(&largest, 100);
    daemon.restart();
    for words in ["--alignment 64", "--split-max-size 16KiB"] {
        let folder = tmpfs_directory();
        let arguments = ["export", "m", "--json", "-o", folder.path().to_str().unwrap()];
        let run = daemon.command().run(arguments.into_iter().chain(words.split_whitespace()));
        assert!(run.exits_with(5).error().message.contains("the stored data is damaged"), "{words}");
        assert_eq!(names(folder.path()), [""; 0], "{words}");
    }
}

fn largest_blob(blobs: &Path) -> std::path::PathBuf {
    let size = |name: &String| fs::metadata(blobs.join(name)).unwrap().len();
    blobs.join(names(blobs).into_iter().max_by_key(size).unwrap())
}
