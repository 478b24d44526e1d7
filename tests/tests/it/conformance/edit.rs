//! An edited model has another header and the same tensors.

use std::fs;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::naming::{EditParams, Edited, KeyChange};
use blobd_store_format::gguf::Header;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::{blob_path, check_blobs, flip_byte, names, snapshot, staged};
use blobd_tests::verbs::Verbs;
use serde_json::json;

use super::import;
use crate::layouts::layouts;

fn set(key: &str, value: &str) -> KeyChange {
    KeyChange { key: key.to_owned(), value: Some(value.to_owned()), value_type: None }
}

fn unset(key: &str) -> KeyChange {
    KeyChange { key: key.to_owned(), value: None, value_type: None }
}

fn params(source: &str, target: &str, keys: Vec<KeyChange>) -> EditParams {
    let (source, target) = (source.parse().unwrap(), target.parse().unwrap());
    let (template_layer, files) = (None, Vec::new());
    EditParams { source, target, keys, template_layer, files, force: false, dry_run: false }
}

fn edit(verbs: &impl Verbs, source: &str, target: &str, keys: Vec<KeyChange>) -> Result<Edited, ErrorBody> {
    verbs.edit(&params(source, target, keys))
}

/// Everything but the metadata: the data section, and the table of tensors.
fn rest(file: &[u8]) -> (Vec<u8>, String) {
    let header = Header::parse(file).unwrap();
    let data = file.get(usize::try_from(header.data_offset()).unwrap()..).unwrap_or_default();
    let tensors: Vec<_> = header.tensors().collect();
    (data.to_vec(), format!("{tensors:?} {} {:?}", header.alignment(), header.byte_order()))
}

fn metadata(file: &[u8]) -> Vec<(Vec<u8>, String)> {
    let header = Header::parse(file).unwrap();
    header.metadata().map(|(key, value)| (key.to_vec(), format!("{value:?}"))).collect()
}

pub(super) fn edited_model_of_every_layout_differs_only_in_the_edited_keys(verbs: &impl Verbs) {
    for (layout, model) in layouts() {
        let model = model.with("old.key", 7_u16);
        import(verbs, &model, layout);
        let target = format!("edited/{layout}");
        let edited = edit(verbs, layout, &target, vec![set("new.key", "text"), unset("old.key")]);
        let edited = edited.unwrap_or_else(|error| panic!("{layout}: {error}"));
        let changed: Vec<_> = edited.changed.into_iter().map(|c| (c.key, c.from, c.to)).collect();
        let expected =
            [("new.key".to_owned(), None, Some(json!("text"))), ("old.key".to_owned(), Some(json!(7)), None)];
        assert_eq!(changed, expected, "{layout}");
        let (before, after) = (model.bytes(), verbs.export(&target).unwrap());
        assert!(rest(&before) == rest(&after), "{layout}");
        let mut kept = metadata(&before);
        kept.retain(|(key, _)| key != b"old.key");
        let mut found = metadata(&after);
        let (key, value) = found.pop().unwrap();
        assert_eq!((&key[..], value.contains("116")), (&b"new.key"[..], true), "{layout}: {value}");
        assert_eq!(found, kept, "{layout}");
        assert!(verbs.export(layout).unwrap() == before, "{layout}: the source");
        let tensors = |name: &str| verbs.show(name).unwrap().tensors;
        assert_eq!(tensors(layout), tensors(&target), "{layout}: digests and places");
    }
    check_blobs(verbs.root());
    assert_eq!(staged(verbs.root()), [""; 0]);
}

pub(super) fn edit_stores_a_header_and_shares_every_tensor(verbs: &impl Verbs) {
    for model in [ModelFile::dense(1), ModelFile { alignment: Some(4096), ..ModelFile::dense(2) }] {
        import(verbs, &model, "m");
        let blobs = verbs.root().join("blobs");
        let before = names(&blobs);
        let edited = edit(verbs, "m", "n", vec![set("general.name", "another")]).unwrap();
        let header = Header::parse(&verbs.export("n").unwrap()).unwrap();
        let size = |name: &String| fs::metadata(blobs.join(name)).unwrap().len();
        let new: Vec<u64> = names(&blobs).iter().filter(|name| !before.contains(name)).map(size).collect();
        // The header and the configuration.
        assert_eq!(new.len(), 2);
        assert_eq!(new.iter().sum::<u64>(), edited.new_bytes);
        assert!(new.contains(&header.data_offset()), "{new:?}");
        assert!(edited.new_bytes < header.data_offset() + 1024);
        let shown = verbs.show("n").unwrap();
        assert_eq!(Some(shown.digest), edited.digest);
        assert_eq!(verbs.list().unwrap().models.len(), 2);
        verbs.remove(&["n", "m"]).unwrap();
    }
}

pub(super) fn edited_model_does_not_need_its_source(verbs: &impl Verbs) {
    let model = ModelFile::separate_experts(1, 12);
    import(verbs, &model, "m");
    edit(verbs, "m", "n", vec![set("general.name", "another")]).unwrap();
    let expected = verbs.export("n").unwrap();
    verbs.remove(&["m"]).unwrap();
    verbs.gc(false).unwrap();
    assert!(verbs.export("n").unwrap() == expected);
    assert!(rest(&expected) == rest(&model.bytes()));
    let origin = verbs.list().unwrap().models.remove(0).origin;
    assert!(origin.unwrap().starts_with("edit m:latest@sha256:"));
    // The file is what an import of it would store.
    let path = verbs.root().with_extension("n.gguf");
    fs::write(&path, &expected).unwrap();
    let imported = verbs.import(&path, Some("again"));
    fs::remove_file(&path).unwrap();
    assert_eq!(imported.unwrap().new_blob_count, 0);
    assert_eq!(verbs.show("again").unwrap().digest, verbs.show("n").unwrap().digest);
}

pub(super) fn edit_does_not_replace_another_model_unless_forced(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    import(verbs, &ModelFile::dense(2), "n");
    let keys = || vec![set("general.name", "another")];
    for target in ["n", "m"] {
        let error = edit(verbs, "m", target, keys()).unwrap_err();
        assert_eq!(error.code, ErrorCode::Busy, "{error}");
        assert!(error.hint.unwrap().contains("--force"));
    }
    assert!(verbs.export("n").unwrap() == ModelFile::dense(2).bytes());
    let first = verbs.edit(&EditParams { force: true, ..params("m", "n", keys()) }).unwrap();
    // The same edit again finds its own result.
    let again = edit(verbs, "m", "n", keys()).unwrap();
    assert_eq!((first.digest, again.new_bytes), (again.digest, 0));
    let in_place = verbs.edit(&EditParams { force: true, ..params("m", "m", keys()) }).unwrap();
    assert_eq!(in_place.digest, first.digest);
    assert!(verbs.export("m").unwrap() == verbs.export("n").unwrap());
}

pub(super) fn edit_that_changes_nothing_results_in_the_source(verbs: &impl Verbs) {
    let model = ModelFile::dense(1).with("general.name", "x");
    let imported = import(verbs, &model, "m");
    let edited = edit(verbs, "m", "n", vec![set("general.name", "x")]).unwrap();
    assert_eq!((edited.digest, edited.new_bytes, edited.changed.len()), (Some(imported.digest), 0, 0));
    assert!(verbs.export("n").unwrap() == model.bytes());
    let origin = verbs.list().unwrap().models.remove(0).origin;
    assert_eq!(origin.as_deref(), Some("import model.gguf"), "the manifest is that of the import");
}

pub(super) fn dry_run_of_an_edit_writes_nothing(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let stored =
        || ["blobs", "recipes", "manifests", "origins"].map(|part| snapshot(&verbs.root().join(part)));
    let before = stored();
    let dry = EditParams { dry_run: true, ..params("m", "n", vec![set("a", "1")]) };
    let edited = verbs.edit(&dry).unwrap();
    assert!(stored() == before);
    assert_eq!((edited.digest, edited.dry_run), (None, true));
    assert_eq!((edited.changed[0].from.clone(), edited.changed[0].to.clone()), (None, Some(json!(1))));
    assert!(edited.new_bytes > 0);
    assert_eq!(verbs.show("n").unwrap_err().code, ErrorCode::NotFound);
}

pub(super) fn edit_of_a_damaged_model_stores_nothing(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let tensor = verbs.show("m").unwrap().tensors[3].digest;
    flip_byte(&blob_path(verbs.root(), &tensor.to_string()), 5);
    let before = names(&verbs.root().join("blobs"));
    let error = edit(verbs, "m", "n", vec![set("a", "1")]).unwrap_err();
    assert_eq!(error.code, ErrorCode::Corrupt, "{error}");
    assert!(error.message.contains("verify --repair"), "{error}");
    assert_eq!(names(&verbs.root().join("blobs")), before);
    assert_eq!(verbs.list().unwrap().models.len(), 1);
}

pub(super) fn removal_of_an_absent_key_is_reported_as_a_note(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let edited = edit(verbs, "m", "n", vec![unset("absent"), set("a", "1")]).unwrap();
    assert_eq!(edited.changed.iter().map(|change| &change.key).collect::<Vec<_>>(), ["a"]);
    assert!(edited.effects.notes[0].contains("no metadata key \"absent\""), "{:?}", edited.effects.notes);
    let same = edit(verbs, "m", "copy", vec![unset("absent")]).unwrap();
    assert_eq!((same.digest, same.effects.notes.len()), (Some(verbs.show("m").unwrap().digest), 1));
}

pub(super) fn refused_edits_store_nothing(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let before = names(&verbs.root().join("blobs"));
    for (change, what) in [
        (set("split.count", "2"), "describes the shards"),
        (unset("general.alignment"), "describes where the tensors lie"),
        (set("general.architecture", "qwen2"), "says what the tensors mean"),
        (KeyChange { value_type: Some("uint8".to_owned()), ..set("a", "256") }, "not a value of type uint8"),
    ] {
        let error = edit(verbs, "m", "n", vec![change]).unwrap_err();
        assert_eq!(error.code, ErrorCode::InvalidRequest, "{error}");
        assert!(error.message.contains(what), "{error}");
    }
    let twice = edit(verbs, "m", "n", vec![set("a", "1"), set("a", "2")]).unwrap_err();
    assert!(twice.message.contains("edited twice"), "{twice}");
    assert_eq!(edit(verbs, "absent", "n", vec![set("a", "1")]).unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(edit(verbs, "m", "n", Vec::new()).unwrap_err().code, ErrorCode::InvalidRequest);
    assert_eq!(names(&verbs.root().join("blobs")), before);
    assert_eq!(verbs.list().unwrap().models.len(), 1);
}
