//! Names of models.

use blobd_client::protocol::error::ErrorCode;
use blobd_tests::model::ModelFile;
use blobd_tests::store_dir::snapshot;
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::Verbs;

use super::{import, replace};

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
    replace(verbs, &ModelFile::dense(2), "me/llama:8b");
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
    let refused = verbs.tag("other", "mine/assistant:v1").unwrap_err();
    assert_eq!(refused.code, ErrorCode::Busy, "{refused}");
    verbs.tag_with("other", "mine/assistant:v1", true).unwrap();
    assert!(verbs.export("mine/assistant:v1").unwrap() == ModelFile::dense(2).bytes());
}

pub(super) fn unknown_name_is_not_found_and_removes_nothing(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let before = snapshot(&verbs.root().join("blobs"));
    let error = verbs.remove(&["nobody:1"]).unwrap_err();
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

pub(super) fn name_is_given_to_other_content_only_with_force(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    import(verbs, &ModelFile::dense(2), "n");
    let folder = tmpfs_directory();
    let path = ModelFile::dense(2).write_to(folder.path(), "model.gguf");
    let refused = [
        verbs.import(&path, Some("m")).map(drop),
        verbs.tag("n", "m").map(drop),
        verbs.rename("n", "M", false).map(drop),
    ];
    let id = verbs.show("m").unwrap().digest.short();
    for error in refused.map(Result::unwrap_err) {
        assert_eq!(error.code, ErrorCode::Busy, "{error}");
        let expected =
            format!("model m:latest: exists already with other content: ID {id}, from import model.gguf");
        assert_eq!(error.message, expected);
        assert!(error.hint.unwrap().contains("--force"));
    }
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
    assert_eq!(verbs.gc(false).unwrap().freed_bytes, 0, "a refused import leaves nothing");
    replace(verbs, &ModelFile::dense(2), "m");
    assert_eq!(listed(verbs), ["m:latest", "n:latest"]);
    assert!(verbs.export("m").unwrap() == ModelFile::dense(2).bytes());
}

pub(super) fn replaced_model_can_be_restored_from_the_trash(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    replace(verbs, &ModelFile::dense(2), "m");
    assert_eq!(verbs.gc(false).unwrap().freed_bytes, 0, "a collection deletes nothing of it");
    assert_eq!(verbs.undelete("m").unwrap_err().code, ErrorCode::Busy);
    verbs.rename("m", "new", false).unwrap();
    verbs.undelete("m").unwrap();
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
    assert!(verbs.export("new").unwrap() == ModelFile::dense(2).bytes());
    assert_eq!(verbs.trash().unwrap().models, []);
}

pub(super) fn import_of_another_model_with_the_same_file_name_gets_another_name(verbs: &impl Verbs) {
    let folder = tmpfs_directory();
    let write = |directory: &str, seed: u64, file: &str| {
        let directory = folder.path().join(directory);
        std::fs::create_dir_all(&directory).unwrap();
        ModelFile::dense(seed).write_to(&directory, file)
    };
    let files = [
        (write("a", 1, "model.gguf"), 1),
        (write("b", 2, "model.gguf"), 2),
        (write("a", 3, "mmproj-F16.gguf"), 3),
        (write("b", 4, "mmproj-F16.gguf"), 4),
        (write("a", 5, "llama-3-8b-Q4_K_M.gguf"), 5),
        (write("a", 6, "llama-3-8b.Q4_K_M.gguf"), 6),
        (write("a", 7, "Foo-Q4_K_M.gguf"), 7),
        (write("a", 8, "foo-q4_k_m.gguf"), 8),
        (write("a", 9, "qwen-中文.gguf"), 9),
        (write("a", 10, "qwen-日本.gguf"), 10),
        (write("a", 11, &format!("{}-one.gguf", "x".repeat(90))), 11),
        (write("a", 12, &format!("{}-two.gguf", "x".repeat(90))), 12),
    ];
    let import =
        || -> Vec<String> { files.iter().map(|(path, _)| verbs.import(path, None).unwrap().name).collect() };
    let names = import();
    assert_eq!(names[0], "model:latest");
    assert_eq!(import(), names, "the same again");
    assert_eq!(listed(verbs).len(), files.len());
    for (name, (path, seed)) in names.iter().zip(&files) {
        assert!(verbs.export(name).unwrap() == ModelFile::dense(*seed).bytes(), "{name} {}", path.display());
    }
    assert_eq!(verbs.trash().unwrap().models, []);
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

pub(super) fn pinned_name_stays_with_its_model(verbs: &impl Verbs) {
    let pinned = import(verbs, &ModelFile::dense(1), "Pinned").digest;
    import(verbs, &ModelFile::dense(2), "other");
    verbs.pin("pinned").unwrap();
    let folder = tmpfs_directory();
    let path = ModelFile::dense(2).write_to(folder.path(), "model.gguf");
    let rename = verbs.rename("other", "pinned", false).map(drop);
    for refused in
        [verbs.tag("other", "pinned").map(drop), verbs.import(&path, Some("pinned")).map(drop), rename]
    {
        let error = refused.unwrap_err();
        assert_eq!(error.code, ErrorCode::Denied, "{error}");
        assert!(error.message.starts_with("model Pinned:latest: is pinned"), "{error}");
        let hint = error.hint.unwrap();
        assert!(hint.contains("--force") && hint.contains("`blobd unpin Pinned:latest`"), "{hint}");
    }
    assert_eq!(verbs.show("pinned").unwrap().digest, pinned);
    // The same model again changes nothing.
    assert_eq!(import(verbs, &ModelFile::dense(1), "pinned").digest, pinned);
    verbs.tag("pinned", "copy").unwrap();
    verbs.tag("copy", "pinned").unwrap();
    verbs.move_to_trash(&["copy"], 3600).unwrap();
    verbs.unpin("pinned").unwrap();
    let moved = verbs.tag_with("other", "pinned", true).unwrap();
    assert_ne!(moved.digest, pinned);
}

pub(super) fn verb_that_takes_a_name_reports_the_model_that_had_it(verbs: &impl Verbs) {
    let first = import(verbs, &ModelFile::dense(1), "m");
    assert_eq!((first.effects.displaced, first.effects.evicted), (Vec::new(), Vec::new()));
    import(verbs, &ModelFile::dense(1).with_changed("output.weight"), "sibling");
    let size = verbs.list().unwrap().models[0].size;
    let second = replace(verbs, &ModelFile::dense(2), "m");
    let [lost] = second.effects.displaced.try_into().expect("one model");
    assert_eq!((lost.name.as_str(), lost.digest, lost.size), ("m:latest", first.digest, size));
    assert_eq!((lost.freed_bytes, lost.reclaimable_bytes), (0, 0), "the trash keeps it");
    assert!(lost.keepers().contains(&"sibling:latest"), "{lost:?}");
    assert!(lost.keepers().contains(&"m:latest in the trash"), "{lost:?}");
    let [trashed] = verbs.trash().unwrap().models.try_into().expect("one model");
    assert_eq!((trashed.digest, trashed.replaced), (first.digest, true));
    assert_eq!(lost.kept_until, Some(trashed.expires));
    verbs.tag("m", "copy").unwrap();
    let [lost] =
        verbs.tag_with("sibling", "m", true).unwrap().effects.displaced.try_into().expect("one model");
    assert_eq!((lost.digest, lost.reclaimable_bytes), (second.digest, 0));
    assert!(lost.keepers().contains(&"copy:latest"), "{lost:?}");
    assert!(verbs.tag("sibling", "m").unwrap().effects.displaced.is_empty(), "the same model");
}

pub(super) fn removal_reports_each_model_with_its_bytes_and_who_keeps_them(verbs: &impl Verbs) {
    let first = import(verbs, &ModelFile::dense(1), "a");
    import(verbs, &ModelFile::dense(1).with_changed("output.weight"), "b");
    import(verbs, &ModelFile::dense(3), "c");
    let size = verbs.list().unwrap().models[0].size;
    let removed = verbs.remove(&["a", "c"]).unwrap();
    assert_eq!(removed.removed, ["a:latest", "c:latest"]);
    let freed: u64 = removed.models.iter().map(|model| model.freed_bytes).sum();
    assert_eq!(freed, removed.freed_bytes);
    let [a, c] = removed.models.try_into().expect("two models");
    assert_eq!((a.digest, a.size, a.keepers()), (first.digest, size, vec!["b:latest"]));
    assert!(a.freed_bytes > 0 && a.kept_bytes() > 0 && a.reclaimable_bytes == 0, "{a:?}");
    // All models of this form have the same configuration.
    assert!(c.freed_bytes > 0 && c.kept_bytes() < a.kept_bytes(), "{c:?}");
}

pub(super) fn dry_run_of_a_removal_reports_the_same_and_removes_nothing(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "a");
    import(verbs, &ModelFile::dense(1).with_changed("output.weight"), "b");
    import(verbs, &ModelFile::dense(3), "c");
    let before = snapshot(&verbs.root().join("blobs"));
    let mut planned = verbs.plan_removal(&["a", "c"]).unwrap();
    assert_eq!(listed(verbs).len(), 3);
    assert_eq!(snapshot(&verbs.root().join("blobs")), before);
    assert!(std::mem::take(&mut planned.dry_run));
    assert_eq!(planned, verbs.remove(&["a", "c"]).unwrap());
    assert_eq!(verbs.plan_removal(&["nobody"]).unwrap_err().code, ErrorCode::NotFound);
}

pub(super) fn renamed_model_keeps_its_pin_and_origin(verbs: &impl Verbs) {
    let imported = import(verbs, &ModelFile::dense(1), "Old/Name:1");
    verbs.pin("old/name:1").unwrap();
    let renamed = verbs.rename("old/name:1", "new", false).unwrap();
    assert_eq!((renamed.from.as_str(), renamed.name.as_str()), ("Old/Name:1", "new:latest"));
    assert_eq!((renamed.digest, renamed.effects.displaced.len()), (imported.digest, 0));
    let [model] = verbs.list().unwrap().models.try_into().expect("one model");
    assert_eq!((model.name.as_str(), model.pinned), ("new:latest", true));
    assert_eq!(model.origin.as_deref(), Some("import model.gguf"));
    assert!(!verbs.root().join("pins/registry.ollama.ai/Old").exists());
    assert_eq!(verbs.usage().unwrap().reclaimable_bytes, 0);
    // Only upper and lower case, and nothing at all.
    assert_eq!(verbs.rename("new", "NEW", false).unwrap().name, "NEW:latest");
    verbs.rename("new", "NEW", false).unwrap();
    assert_eq!(listed(verbs), ["NEW:latest"]);
    assert!(verbs.list().unwrap().models[0].pinned);
    assert!(verbs.export("new").unwrap() == ModelFile::dense(1).bytes());
    assert_eq!(verbs.rename("nobody", "x", false).unwrap_err().code, ErrorCode::NotFound);
}

pub(super) fn rename_replaces_another_model_only_with_force(verbs: &impl Verbs) {
    let first = import(verbs, &ModelFile::dense(1), "a").digest;
    let second = import(verbs, &ModelFile::dense(2), "b").digest;
    let error = verbs.rename("a", "b", false).unwrap_err();
    assert_eq!(error.code, ErrorCode::Busy);
    assert!(error.message.starts_with("model b:latest: exists already"), "{error}");
    assert!(error.hint.unwrap().contains("--force"));
    assert_eq!(listed(verbs), ["a:latest", "b:latest"]);
    let [lost] = verbs.rename("a", "b", true).unwrap().effects.displaced.try_into().expect("one model");
    assert_eq!((lost.name.as_str(), lost.digest), ("b:latest", second));
    assert_eq!(listed(verbs), ["b:latest"]);
    assert_eq!(verbs.show("b").unwrap().digest, first);
    assert!(lost.kept_until.is_some());
    assert!(verbs.export("b").unwrap() == ModelFile::dense(1).bytes());
    // The same model under both names: nothing is lost, so nothing has to be forced.
    verbs.tag("b", "c").unwrap();
    assert!(verbs.rename("b", "c", false).unwrap().effects.displaced.is_empty());
    assert_eq!(listed(verbs), ["c:latest"]);
}
