//! Disk usage, sharing, and freed space.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::space::UsageKind;
use blobd_tests::model::ModelFile;
use blobd_tests::oracle::sha256;
use blobd_tests::store_dir::{blob_path, check_blobs, check_empty, names, snapshot};
use blobd_tests::verbs::Verbs;

use super::import;

fn blobs(verbs: &impl Verbs) -> BTreeSet<String> {
    check_blobs(verbs.root()).into_iter().collect()
}

/// Adds an unneeded blob to the store.
fn add_orphan(verbs: &impl Verbs, bytes: &[u8]) -> PathBuf {
    let path = blob_path(verbs.root(), &format!("sha256:{}", sha256(bytes)));
    fs::write(&path, bytes).unwrap();
    fs::set_permissions(&path, fs::Permissions::from_mode(0o444)).unwrap();
    path
}

pub(super) fn second_import_of_a_file_stores_nothing(verbs: &impl Verbs) {
    let first = import(verbs, &ModelFile::dense(1), "m");
    let before = (blobs(verbs), names(&verbs.root().join("recipes")));
    let again = import(verbs, &ModelFile::dense(1), "n");
    assert_eq!((again.new_bytes, again.new_blob_count), (0, 0));
    assert_eq!(again.reused_bytes, first.new_bytes);
    assert_eq!((again.digest, again.file), (first.digest, first.file));
    assert_eq!((blobs(verbs), names(&verbs.root().join("recipes"))), before);
}

pub(super) fn sibling_adds_only_what_differs(verbs: &impl Verbs) {
    let base = ModelFile::dense(1);
    import(verbs, &base, "base");
    let before = blobs(verbs);
    let sibling = base.with_changed("blk.1.ffn_down.weight").with("general.name", "sibling");
    let imported = import(verbs, &sibling, "sibling");
    let added: Vec<_> = blobs(verbs).difference(&before).cloned().collect();
    let size =
        |digest: &String| fs::metadata(blob_path(verbs.root(), &format!("sha256-{digest}"))).unwrap().len();
    // The tensor, the header, and the configuration, which names the file's digest.
    assert_eq!((added.len(), imported.new_blob_count), (3, 3));
    assert_eq!(imported.new_bytes, added.iter().map(size).sum::<u64>());
    let tensor = sibling.tensors.iter().find(|tensor| tensor.name == "blk.1.ffn_down.weight").unwrap();
    assert!(added.contains(&sha256(&tensor.bytes())));
}

pub(super) fn stacked_and_separate_experts_share_every_expert(verbs: &impl Verbs) {
    let (stacked, separate) = (ModelFile::stacked_experts(1, 12), ModelFile::separate_experts(1, 12));
    import(verbs, &stacked, "stacked");
    let before = blobs(verbs);
    import(verbs, &separate, "separate");
    let header = sha256(
        &separate.bytes()[..separate.bytes().len()
            - separate.tensors.iter().map(|tensor| tensor.bytes().len()).sum::<usize>()],
    );
    let added: BTreeSet<_> = blobs(verbs).difference(&before).cloned().collect();
    assert!(added.contains(&header), "all tensors are multiples of the alignment");
    assert_eq!(added.len(), 2, "header and configuration");
    assert!(verbs.export("separate").unwrap() == separate.bytes());
}

pub(super) fn removal_frees_the_reported_bytes(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let before = verbs.usage().unwrap();
    let removed = verbs.remove(&["m"]).unwrap();
    assert_eq!(removed.removed, ["m:latest"]);
    assert_eq!(removed.freed_bytes, before.physical_bytes);
    assert!(removed.kept.is_empty(), "{:?}", removed.kept);
    assert_eq!(verbs.usage().unwrap().physical_bytes, 0);
    check_empty(verbs.root());
}

pub(super) fn removal_keeps_shared_blobs_and_names_the_models_that_need_them(verbs: &impl Verbs) {
    let sibling = ModelFile::dense(1).with_changed("output.weight");
    import(verbs, &ModelFile::dense(1), "base");
    import(verbs, &sibling, "sibling");
    let before = verbs.usage().unwrap();
    let removed = verbs.remove(&["base"]).unwrap();
    let after = verbs.usage().unwrap();
    assert_eq!(removed.freed_bytes, before.physical_bytes - after.physical_bytes);
    let unique = before.models.iter().find(|model| model.name == "base:latest").unwrap().unique_bytes;
    assert_eq!(removed.freed_bytes, unique);
    let [kept] = removed.kept.try_into().expect("one group of keepers");
    assert_eq!(kept.by, ["sibling:latest"]);
    assert_eq!(kept.bytes, before.models[0].shared_bytes);
    assert!(verbs.export("sibling").unwrap() == sibling.bytes());
    assert!(verbs.gc(true).unwrap().deleted.is_empty());
}

pub(super) fn dry_run_matches_the_collection(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let orphans = [add_orphan(verbs, b"nobody needs this"), add_orphan(verbs, &[7; 10_000])];
    let before = snapshot(verbs.root());
    let planned = verbs.gc(true).unwrap();
    assert_eq!(planned.deleted.len(), 2);
    let untouched = snapshot(verbs.root());
    // The index, which is a cache, and the audit log may be written at any time.
    let written = ["index", "audit"].map(|name| verbs.root().join(name));
    let is_own =
        |path: &Path| path.ends_with("lock") || written.iter().any(|directory| path.starts_with(directory));
    let differs = |path: &&PathBuf| untouched.get(*path) != before.get(*path) && !is_own(path);
    let changed: Vec<_> = before.keys().filter(differs).filter(|path| path.is_file()).collect();
    assert!(changed.is_empty(), "{changed:?}");
    let done = verbs.gc(false).unwrap();
    assert!(planned.dry_run && !done.dry_run);
    assert_eq!((&planned.deleted, planned.freed_bytes), (&done.deleted, done.freed_bytes));
    assert!(orphans.iter().all(|orphan| !orphan.exists()));
    assert!(verbs.gc(false).unwrap().deleted.is_empty());
    assert!(verbs.export("m").unwrap() == ModelFile::dense(1).bytes());
}

pub(super) fn unreadable_manifest_stops_collection(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "good");
    import(verbs, &ModelFile::dense(2), "bad");
    let manifest = verbs.root().join("manifests/registry.ollama.ai/library/bad/latest");
    fs::write(&manifest, "").unwrap();
    add_orphan(verbs, b"an orphan");
    let before = blobs(verbs);
    for dry_run in [true, false] {
        let error = verbs.gc(dry_run).unwrap_err();
        assert_eq!(error.code, ErrorCode::Corrupt);
        assert!(error.message.contains("library/bad/latest"), "{error}");
    }
    let listed = verbs.list().unwrap().models;
    assert_eq!(
        listed.iter().map(|model| model.name.as_str()).collect::<Vec<_>>(),
        ["bad:latest", "good:latest"]
    );
    assert!(listed[0].damage.as_ref().is_some_and(|damage| damage.contains("bad/latest")), "{listed:?}");
    let removed = verbs.remove(&["good"]).unwrap();
    assert_eq!((removed.removed, removed.freed_bytes), (vec!["good:latest".to_owned()], 0));
    assert!(removed.kept[0].by[0].contains("library/bad/latest"), "{:?}", removed.kept);
    assert_eq!(blobs(verbs), before);
    // Removing the damaged name makes collections possible again.
    verbs.remove(&["bad"]).unwrap();
    verbs.gc(false).unwrap();
    check_empty(verbs.root());
}

pub(super) fn unreadable_recipe_stops_collection(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "good");
    import(verbs, &ModelFile::dense(2), "bad");
    let file = verbs.show("bad").unwrap().layers[1].digest;
    let recipe = verbs.root().join("recipes").join(format!("sha256-{}.json", file.to_hex()));
    fs::remove_file(&recipe).unwrap();
    fs::write(&recipe, "{\"version\":1,").unwrap();
    let before = blobs(verbs);
    // A daemon may still have the recipe in memory: then it can collect.
    if let Err(error) = verbs.gc(false) {
        assert_eq!(error.code, ErrorCode::Corrupt);
        assert!(error.message.contains(&file.to_hex()), "{error}");
        assert_eq!(verbs.remove(&["good"]).unwrap().freed_bytes, 0);
    }
    assert_eq!(blobs(verbs), before);
}

/// A file with neither blob nor recipe had a recipe, whose blobs are unknown.
pub(super) fn missing_recipe_loses_no_blob(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "good");
    let file = import(verbs, &ModelFile::dense(2), "bad").file.unwrap();
    fs::remove_file(verbs.root().join("recipes").join(format!("sha256-{}.json", file.to_hex()))).unwrap();
    let before = blobs(verbs);
    match verbs.gc(false) {
        Ok(report) => assert!(report.deleted.is_empty(), "a daemon may still know it: {report:?}"),
        Err(error) => assert!(error.code == ErrorCode::Corrupt && error.message.contains("bad"), "{error}"),
    }
    assert_eq!(blobs(verbs), before);
    import(verbs, &ModelFile::dense(2), "bad");
    assert!(verbs.export("bad").unwrap() == ModelFile::dense(2).bytes());
    assert!(verbs.gc(false).unwrap().deleted.is_empty());
}

pub(super) fn file_that_is_not_a_tag_stops_collection(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let orphan = add_orphan(verbs, b"an orphan");
    for place in ["manifests/saved-by-hand", "manifests/registry.ollama.ai/library/m/latest~"] {
        let path = verbs.root().join(place);
        fs::write(&path, "{}").unwrap();
        let error = verbs.gc(false).unwrap_err();
        assert_eq!(error.code, ErrorCode::Corrupt);
        assert!(error.message.contains(place), "{error}");
        assert!(orphan.exists());
        fs::remove_file(path).unwrap();
    }
    assert_eq!(verbs.gc(false).unwrap().deleted.len(), 1);
}

pub(super) fn usage_counts_are_consistent(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "base");
    import(verbs, &ModelFile::dense(1).with_changed("output.weight"), "sibling");
    verbs.tag("base", "again").unwrap();
    let orphan = add_orphan(verbs, &[1; 5000]);
    let usage = verbs.usage().unwrap();
    // Two names of a model are one model.
    let sizes: BTreeMap<_, _> =
        verbs.list().unwrap().models.iter().map(|model| (model.digest, model.size)).collect();
    assert_eq!((usage.model_count, usage.models.len()), (2, 3));
    assert_eq!(usage.logical_bytes, sizes.values().sum::<u64>());
    let shared = usage.models.iter().find(|model| model.name == "base:latest").unwrap();
    assert_eq!(shared.unique_bytes, 0, "`again` is the same model");
    assert_eq!(
        usage.reclaimable_bytes,
        std::os::unix::fs::MetadataExt::blocks(&fs::metadata(orphan).unwrap()) * 512
    );
    assert_eq!(usage.blob_count, blobs(verbs).len() as u64);
    assert_eq!(usage.partial_bytes, 0);
    assert!(usage.free_bytes > 0);
    assert_eq!(usage.stored_bytes, usage.physical_bytes - usage.reclaimable_bytes);
    assert_eq!(usage.saved_bytes, usage.logical_bytes.saturating_sub(usage.stored_bytes));
    let parts = usage.rows.iter().filter(|row| [UsageKind::Model, UsageKind::Shared].contains(&row.kind));
    assert_eq!(parts.map(|row| row.bytes).sum::<u64>(), usage.stored_bytes);
    let base = usage.rows.iter().find(|row| row.name.as_deref() == Some("again:latest")).unwrap();
    assert!(base.other_names == ["base:latest"] && base.bytes > 0, "{base:?}");
}

/// Then it is unknown which blobs are unneeded: the tensors of a model whose recipe is missing look unneeded.
pub(super) fn nothing_is_reclaimable_while_collections_refuse(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let lost = verbs.show("m").unwrap().layers[0].digest.to_hex();
    let lost = verbs.root().join(format!("blobs/sha256-{lost}"));
    let aside = verbs.root().with_extension("aside");
    add_orphan(verbs, &[1; 5000]);
    let foreign = verbs.root().join("manifests/notes.txt");
    let check = |is_refused: bool| {
        let (reclaimable, planned) = (verbs.usage().unwrap().reclaimable_bytes, verbs.gc(true));
        assert_eq!(
            (planned.is_err(), reclaimable == 0),
            (is_refused, is_refused),
            "{reclaimable} {planned:?}"
        );
    };
    check(false);
    fs::write(&foreign, "look at this later").unwrap();
    check(true);
    fs::remove_file(&foreign).unwrap();
    fs::rename(&lost, &aside).unwrap();
    check(true);
    fs::rename(&aside, &lost).unwrap();
    check(false);
}

pub(super) fn reclaimable_bytes_are_those_on_disk_now(verbs: &impl Verbs) {
    import(verbs, &ModelFile::dense(1), "m");
    let orphan = add_orphan(verbs, &[1; 50_000]);
    let before = verbs.usage().unwrap().reclaimable_bytes;
    fs::set_permissions(&orphan, fs::Permissions::from_mode(0o644)).unwrap();
    fs::File::options().write(true).open(&orphan).unwrap().set_len(5000).unwrap();
    fs::set_permissions(&orphan, fs::Permissions::from_mode(0o444)).unwrap();
    let after = verbs.usage().unwrap().reclaimable_bytes;
    assert!(0 < after && after < before, "{after} of {before}");
    assert_eq!(verbs.gc(false).unwrap().freed_bytes, after);
}
