//! Imported files can be exported, and are stored as blobs and recipes.

use std::collections::BTreeSet;
use std::fs;

use blobd_client::protocol::error::ErrorCode;
use blobd_store_format::stored_file::StoredForm;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::{sha256, tensor_ranges};
use blobd_tests::store_dir::{blob_path, check_blobs, check_empty, staged};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::Verbs;

use super::import;
use crate::layouts::layouts;

pub(super) fn file_of_every_layout_is_exported_bit_for_bit(verbs: &impl Verbs) {
    let layouts = layouts();
    for (name, file) in &layouts {
        import(verbs, file, name);
    }
    check_blobs(verbs.root());
    for (name, file) in &layouts {
        assert!(verbs.export(name).unwrap() == file.bytes(), "{name}");
    }
    assert_eq!(staged(verbs.root()), [""; 0]);
}

pub(super) fn every_tensor_blob_is_the_raw_bytes_of_its_tensor(verbs: &impl Verbs) {
    let file = ModelFile { alignment: Some(64), padding: 0xee, ..ModelFile::dense(1) };
    import(verbs, &file, "m");
    let file = file.bytes();
    let ranges = tensor_ranges(&file);
    let tensors = verbs.show("m").unwrap().tensors;
    assert_eq!(tensors.len(), ranges.len());
    let blobs = check_blobs(verbs.root());
    for tensor in tensors {
        let bytes = &file[ranges[&tensor.name].clone()];
        assert_eq!(tensor.digest.to_string(), format!("sha256:{}", sha256(bytes)), "{}", tensor.name);
        assert_eq!((tensor.offset, tensor.size), (0, bytes.len() as u64));
        assert!(blobs.contains(&tensor.digest.to_hex()), "{}", tensor.name);
    }
}

pub(super) fn experts_are_located_inside_their_group(verbs: &impl Verbs) {
    let (stacked, separate) = (ModelFile::stacked_experts(1, 11), ModelFile::separate_experts(1, 11));
    import(verbs, &stacked, "stacked");
    import(verbs, &separate, "separate");
    let stacks = verbs.show("stacked").unwrap().tensors;
    let stack = stacks.iter().find(|tensor| tensor.name == "blk.0.ffn_up_exps.weight").unwrap();
    let experts = stack.experts.expect("a stack tells its experts");
    assert_eq!((experts.count, experts.stride), (11, 1024));
    for tensor in verbs.show("separate").unwrap().tensors {
        let Some(expert) = tensor.name.strip_prefix("blk.0.ffn_up.") else { continue };
        let expert: u64 = expert.strip_suffix(".weight").unwrap().parse().unwrap();
        assert_eq!((tensor.digest, tensor.offset, tensor.size), (stack.digest, expert * 1024, 1024));
    }
    let (file, ranges) = (separate.bytes(), tensor_ranges(&separate.bytes()));
    let group = fs::read(blob_path(verbs.root(), &stack.digest.to_string())).unwrap();
    assert_eq!(group[10 * 1024..], file[ranges["blk.0.ffn_up.10.weight"].clone()]);
}

pub(super) fn show_reports_header_and_config(verbs: &impl Verbs) {
    let file = ModelFile::dense(1)
        .with("general.file_type", 7_u32)
        .with("general.name", "Tiny \u{1b}[31m")
        .with("tokenizer.ggml.tokens", (0..100).map(|n| n.to_string()).collect::<Vec<String>>());
    let imported = import(verbs, &file, "m");
    let shown = verbs.show("m").unwrap();
    assert_eq!((shown.name.as_str(), shown.digest), ("m:latest", imported.digest));
    assert_eq!(shown.architecture.as_deref(), Some("llama"));
    assert_eq!(shown.quantization.as_deref(), Some("Q8_0"));
    assert_eq!(shown.metadata["general.name"], "Tiny \u{1b}[31m");
    assert_eq!(shown.metadata["tokenizer.ggml.tokens"]["count"], 100);
    let elements = |shape: &Vec<u64>| shape.iter().product::<u64>();
    assert_eq!(shown.parameters, shown.tensors.iter().map(|tensor| elements(&tensor.shape)).sum::<u64>());
    let layers: Vec<_> = shown.layers.iter().map(|l| (l.media_type.component(), l.size, l.stored)).collect();
    assert_eq!(layers[0].0, "config");
    assert_eq!(layers[1], ("model", file.bytes().len() as u64, StoredForm::Recipe));
    assert_eq!(shown.layers[1].digest.to_string(), format!("sha256:{}", sha256(&file.bytes())));
}

pub(super) fn refused_file_leaves_nothing_behind(verbs: &impl Verbs) {
    let folder = tmpfs_directory();
    let mut bytes = ModelFile::dense(1).bytes();
    bytes.truncate(bytes.len() - 200);
    let path = folder.path().join("cut.gguf");
    fs::write(&path, bytes).unwrap();
    let error = verbs.import(&path, None).unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidInput, "{error}");
    assert!(error.message.contains("cut.gguf") && error.message.contains("output.weight"), "{error}");
    check_empty(verbs.root());
    assert!(verbs.list().unwrap().models.is_empty());
}

pub(super) fn shard_is_refused_with_a_hint(verbs: &impl Verbs) {
    let folder = tmpfs_directory();
    let shard = ModelFile::dense(1).with("split.count", 3_u16).with("split.no", 0_u16);
    let path = shard.write_to(folder.path(), "big-00001-of-00003.gguf");
    let error = verbs.import(&path, None).unwrap_err();
    assert_eq!(error.code, ErrorCode::InvalidInput);
    assert!(error.hint.as_ref().is_some_and(|hint| hint.contains("shards")), "{error}");
    check_empty(verbs.root());
}

pub(super) fn missing_blob_is_reported_as_corrupt(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let lost = verbs.show("m").unwrap().tensors[3].digest;
    fs::remove_file(blob_path(verbs.root(), &lost.to_string())).unwrap();
    let error = verbs.export("m").unwrap_err();
    assert_eq!(error.code, ErrorCode::Corrupt, "{error}");
    assert!(error.message.contains(&lost.to_string()), "{error}");
    // An incomplete model cannot be tagged. Importing it again completes it.
    assert_eq!(verbs.tag("m", "n").unwrap_err().code, ErrorCode::Corrupt);
    let imported = import(verbs, &ModelFile::dense(1), "m");
    assert_eq!(imported.new_blob_count, 1);
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
    let names: BTreeSet<_> = verbs.list().unwrap().models.into_iter().map(|model| model.name).collect();
    assert_eq!(names, ["m:latest".to_owned()].into());
}
