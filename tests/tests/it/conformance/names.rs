//! Names of models.

use blobd_client::protocol::error::ErrorCode;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::snapshot;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::Verbs;

use super::import;

fn listed(verbs: &impl Verbs) -> Vec<String> {
    verbs.list().unwrap().models.into_iter().map(|model| model.name).collect()
}

pub(super) fn file_name_gives_the_model_its_name(verbs: &impl Verbs) {
    let folder = tmpfs_directory();
    for (file, name) in [
        ("tiny-llama-Q4_K_M.gguf", "tiny-llama:Q4_K_M"),
        ("tiny.Q8_0.gguf", "tiny:Q8_0"),
        ("My Model (2).gguf", "My-Model--2-:latest"),
    ] {
        let path = ModelFile::dense(1).write_to(folder.path(), file);
        assert_eq!(verbs.import(&path, None).unwrap().name, name);
        assert!(listed(verbs).contains(&name.to_owned()), "{name}");
    }
}

pub(super) fn name_is_the_same_in_upper_and_lower_case(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "Me/Llama:8B");
    import(verbs, &ModelFile::dense(2), "me/llama:8b");
    assert_eq!(listed(verbs), ["Me/Llama:8B"]);
    assert!(verbs.export("ME/LLAMA:8b").unwrap() == ModelFile::dense(2).bytes());
    verbs.remove(&["me/LLAMA:8B"]).unwrap();
    assert_eq!(listed(verbs), [""; 0]);
}

pub(super) fn tag_names_the_same_manifest(verbs: &impl Verbs) {
    let imported = import(verbs, &ModelFile::dense(1), "m");
    let before = verbs.usage().unwrap().physical_bytes;
    let tagged = verbs.tag("m", "mine/assistant:v1").unwrap();
    assert_eq!((tagged.name.as_str(), tagged.digest), ("mine/assistant:v1", imported.digest));
    assert_eq!(listed(verbs), ["m:latest", "mine/assistant:v1"]);
    assert_eq!(verbs.usage().unwrap().physical_bytes, before);
    assert!(verbs.export("mine/assistant:v1").unwrap() == ModelFile::dense(1).bytes());
    // The tag can be moved to another model.
    import(verbs, &ModelFile::dense(2), "other");
    verbs.tag("other", "mine/assistant:v1").unwrap();
    assert!(verbs.export("mine/assistant:v1").unwrap() == ModelFile::dense(2).bytes());
}

pub(super) fn unknown_name_is_not_found_and_removes_nothing(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let before = snapshot(&verbs.root().join("blobs"));
    let error = verbs.remove(&["m", "nobody:1"]).unwrap_err();
    assert_eq!(error.code, ErrorCode::NotFound);
    assert!(error.message.contains("nobody:1"), "{error}");
    assert_eq!(verbs.show("nobody").unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(verbs.export("nobody").unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(verbs.tag("nobody", "x").unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(listed(verbs), ["m:latest"]);
    assert_eq!(snapshot(&verbs.root().join("blobs")), before);
}

pub(super) fn digest_in_a_reference_must_match_the_model(verbs: &impl Verbs) {
    let first = import(verbs, &ModelFile::dense(1), "m").digest;
    import(verbs, &ModelFile::dense(2), "n");
    assert!(verbs.export(&format!("m@{first}")).unwrap() == ModelFile::dense(1).bytes());
    assert_eq!(verbs.show(&format!("n@{first}")).unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(verbs.remove(&[&format!("n@{first}")]).unwrap_err().code, ErrorCode::NotFound);
    assert_eq!(listed(verbs), ["m:latest", "n:latest"]);
}

pub(super) fn second_import_under_a_name_replaces_it(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    import(verbs, &ModelFile::dense(2), "m");
    assert_eq!(listed(verbs), ["m:latest"]);
    assert!(verbs.export("m").unwrap() == ModelFile::dense(2).bytes());
    // The replaced model is not deleted before `gc`.
    let waiting = verbs.usage().unwrap().reclaimable_bytes;
    assert!(waiting > 0);
    assert_eq!(verbs.gc(false).unwrap().freed_bytes, waiting);
    assert!(verbs.export("m").unwrap() == ModelFile::dense(2).bytes());
}

pub(super) fn origin_tells_where_a_model_came_from(verbs: &impl Verbs) {
    let folder = tmpfs_directory();
    let path = ModelFile::dense(1).write_to(folder.path(), "from-here.gguf");
    let imported = verbs.import(&path, Some("m")).unwrap();
    let [model] = verbs.list().unwrap().models.try_into().expect("one model");
    assert_eq!(model.origin.as_deref(), Some("import from-here.gguf"));
    assert_eq!((model.digest, model.pinned, model.damage), (imported.digest, false, None));
    assert!(model.size > imported.size, "the configuration counts");
    assert!(model.modified.ends_with('Z') && model.modified.starts_with("20"), "{}", model.modified);
}
