//! Tests of the store's guarantees on a real directory.

use std::fs::File;
use std::io::Read as _;
use std::os::unix::fs::{FileExt as _, MetadataExt as _, symlink};
use std::path::Path;
use std::sync::Arc;
use std::{fs, thread};

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::{layout, testing};
use tempfile::TempDir;

use super::*;
use crate::testing::{begin, file, manifest, name, new_store, new_store_with, recipe_of};

const ME: Actor = Actor::new(7, Verb::Rm);

/// Stores a model of whole files.
fn add(store: &Arc<Store>, reference: &str, files: &[&[u8]]) -> Committed {
    let mut ingest = begin(store).may_take(NameRule::replacing_any());
    for bytes in files {
        ingest.add_bytes(bytes).unwrap();
    }
    ingest.commit(&name(reference), &manifest(files), Some("a test")).unwrap()
}

/// The result of a commit that has written this many bytes under a new name.
fn written(reference: &str, new_bytes: u64, new_blob_count: u64) -> Committed {
    let name = Some(name(reference));
    Committed { name, new_bytes, new_blob_count, tag_changed: true, ..Committed::default() }
}

fn blob_path(store: &Store, bytes: &[u8]) -> PathBuf {
    store.path(layout::blob(Digest::of(bytes)))
}

fn entries(path: &Path) -> Vec<String> {
    let mut names: Vec<_> =
        fs::read_dir(path).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

#[test]
fn store_id_survives_a_restart() {
    let (folder, store) = new_store();
    let read = || fs::read_to_string(folder.path().join("store/store.json")).unwrap();
    let first = read();
    assert!(first.contains("\"format\":1") && first.len() > 40, "{first}");
    drop(store);
    Store::open(folder.path().join("store")).unwrap();
    assert_eq!(read(), first);
    let (other, _store) = new_store();
    assert_ne!(fs::read_to_string(other.path().join("store/store.json")).unwrap(), first);
}

#[test]
fn one_process_locks_the_store_and_records_itself() {
    let (folder, store) = new_store();
    store.content.announce(Some(Path::new("/run/x.sock")), None);
    let error = Store::open(folder.path().join("store")).unwrap_err();
    let StoreError::Locked { holder, .. } = error else { panic!("{error}") };
    let socket = Some(PathBuf::from("/run/x.sock"));
    assert_eq!(*holder, LockHolder { pid: std::process::id(), socket, command: None });
    store.content.announce(None, None);
    drop(store);
    Store::open(folder.path().join("store")).unwrap();
}

#[test]
fn lock_file_may_have_any_content() {
    let (folder, store) = new_store();
    fs::write(folder.path().join("store/lock"), "{\"pid\":\"what?\"").unwrap();
    let error = Store::open(folder.path().join("store")).unwrap_err();
    assert!(matches!(error, StoreError::Locked { .. }), "{error}");
    drop(store);
    Store::open(folder.path().join("store")).unwrap();
}

#[test]
fn newer_format_is_refused_before_anything_is_made() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("store.json"), r#"{"format":2,"id":"x"}"#).unwrap();
    let error = Store::open(folder.path()).unwrap_err();
    assert!(matches!(error, StoreError::NewerFormat { found: 2, .. }), "{error}");
    assert_eq!(entries(folder.path()), ["store.json"]);
}

#[test]
fn directory_of_other_files_is_not_made_a_store() {
    let folder = tempfile::tempdir().unwrap();
    fs::write(folder.path().join("thesis.tex"), "").unwrap();
    let error = Store::open(folder.path()).unwrap_err();
    assert!(matches!(error, StoreError::NotAStore { .. }), "{error}");
    assert_eq!(entries(folder.path()), ["thesis.tex"]);
}

#[test]
fn interrupted_creation_is_continued() {
    let folder = tempfile::tempdir().unwrap();
    for left in ["lock", "store.json.new"] {
        fs::write(folder.path().join(left), "{").unwrap();
    }
    Store::open(folder.path()).unwrap();
    assert!(!folder.path().join("store.json.new").exists());
}

#[test]
fn only_abandoned_transactions_are_removed_from_staging() {
    let (folder, store) = new_store();
    add(&store, "m", &[b"config", b"layer"]);
    drop(store);
    let (root, outside) = (folder.path().join("store"), folder.path().join("outside"));
    fs::create_dir(&outside).unwrap();
    fs::write(outside.join("precious"), "x").unwrap();
    fs::create_dir(root.join("staging/4711-0")).unwrap();
    fs::write(root.join("staging/4711-0/0"), "half a blob").unwrap();
    fs::write(root.join("staging/stray"), "").unwrap();
    symlink(&outside, root.join("staging/link")).unwrap();
    let store = Store::open(&root).unwrap();
    assert_eq!(entries(&root.join("staging")), [""; 0]);
    assert_eq!(entries(&outside), ["precious"]);
    assert_eq!(store.content.blobs().unwrap().len(), 2);
}

#[test]
fn committed_blob_is_read_only_under_its_digest() {
    let (_folder, store) = new_store();
    let committed = add(&store, "m", &[b"config", b"layer"]);
    assert_eq!(committed, written("m", 11, 2));
    for bytes in [&b"config"[..], b"layer"] {
        assert_eq!(fs::read(blob_path(&store, bytes)).unwrap(), bytes);
        assert_eq!(fs::metadata(blob_path(&store, bytes)).unwrap().mode() & 0o7777, 0o444);
    }
    assert_eq!(entries(&store.path(layout::STAGING)), [""; 0]);
    assert_eq!(store.names.manifest(&name("m")).unwrap(), manifest(&[b"config", b"layer"]));
    assert_eq!(store.names.origin(manifest(&[b"config", b"layer"]).digest()).as_deref(), Some("a test"));
}

#[test]
fn names_of_a_manifest_are_its_current_tags() {
    let (_folder, store) = new_store();
    let files: [&[u8]; 2] = [b"config", b"layer"];
    let digest = manifest(&files).digest();
    let names = || store.names.names_of(digest).unwrap();
    assert_eq!(names(), []);
    add(&store, "m", &files);
    add(&store, "n", &files);
    assert_eq!(names(), [name("m"), name("n")]);
    add(&store, "n", &[b"config", b"other"]);
    assert_eq!(names(), [name("m")]);
    store.names.remove_tag(&name("m"), ME).unwrap();
    assert_eq!(names(), []);
}

#[test]
fn damaged_record_of_an_origin_is_not_taken_for_an_absent_one() {
    let (_folder, store) = new_store();
    add(&store, "m", &[b"config", b"layer"]);
    let digest = manifest(&[b"config", b"layer"]).digest();
    assert_eq!(store.names.recorded_origin(digest).unwrap().as_deref(), Some("a test"));
    let path = store.path(layout::origin(digest));
    fs::write(&path, "{").unwrap();
    assert!(matches!(store.names.recorded_origin(digest), Err(StoreError::Io { action: "parse", .. })));
    assert_eq!(store.names.origin(digest), None);
    fs::remove_file(&path).unwrap();
    assert_eq!(store.names.recorded_origin(digest).unwrap(), None);
}

/// From eight new blobs on, one `syncfs` replaces one `fsync` each.
#[test]
fn many_blobs_are_committed_with_syncfs() {
    let (_folder, store) = new_store();
    let files: Vec<Vec<u8>> = (0..20).map(|n| vec![n; 100]).collect();
    let files: Vec<&[u8]> = files.iter().map(Vec::as_slice).collect();
    assert_eq!(add(&store, "m", &files).new_blob_count, 20);
    assert!(files.iter().all(|bytes| fs::read(blob_path(&store, bytes)).unwrap() == *bytes));
}

#[test]
fn ingest_that_is_dropped_leaves_nothing() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    ingest.add_bytes(b"never committed").unwrap();
    let mut unfinished = ingest.staging().stage(100);
    unfinished.append(b"some of it").unwrap();
    assert_eq!(store.liveness.leases().leased().len(), 1);
    drop(ingest);
    drop(unfinished);
    assert_eq!(entries(&store.path(layout::STAGING)), [""; 0]);
    assert!(store.content.blobs().unwrap().is_empty() && store.liveness.leases().leased().is_empty());
}

#[test]
fn incomplete_model_gets_no_tag() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    ingest.add_bytes(b"config").unwrap();
    let error = ingest.commit(&name("m"), &manifest(&[b"config", b"layer"]), None).unwrap_err();
    assert!(matches!(error, StoreError::MissingBlob { digest } if digest == Digest::of(b"layer")), "{error}");
    assert!(store.names.tags().unwrap().references.is_empty());
}

#[test]
fn recipe_without_all_its_blobs_is_refused() {
    let (_folder, store) = new_store();
    let (whole, recipe) = (b"headtensor", recipe_of(&[b"head", b"tensor"]));
    let mut ingest = begin(&store);
    ingest.add_bytes(b"config").unwrap();
    ingest.add_bytes(b"head").unwrap();
    ingest.add_recipe(recipe.clone());
    let error = ingest.commit(&name("m"), &manifest(&[b"config", whole]), None).unwrap_err();
    assert!(
        matches!(error, StoreError::MissingBlob { digest } if digest == Digest::of(b"tensor")),
        "{error}"
    );
    assert!(store.names.tags().unwrap().references.is_empty());
    let mut ingest = begin(&store);
    for bytes in [&b"config"[..], b"head", b"tensor"] {
        ingest.add_bytes(bytes).unwrap();
    }
    ingest.add_recipe(recipe);
    ingest.commit(&name("m"), &manifest(&[b"config", whole]), None).unwrap();
    assert!(store.content.has_file(&file(whole)).unwrap());
    assert!(!store.path(layout::blob(Digest::of(whole))).exists(), "the file itself is not stored");
}

#[test]
fn leased_model_has_all_its_blobs_pinned() {
    let (_folder, store) = new_store();
    let whole = b"headtensor";
    let mut ingest = begin(&store);
    for bytes in [&b"config"[..], b"head", b"tensor"] {
        ingest.add_bytes(bytes).unwrap();
    }
    ingest.add_recipe(recipe_of(&[b"head", b"tensor"]));
    let manifest = manifest(&[b"config", whole]);
    ingest.commit(&name("m"), &manifest, None).unwrap();
    let lease = store.liveness.leases().grant("a reader");
    store.names.leased_model(&name("m"), &lease).unwrap();
    let files = [&b"config"[..], b"head", b"tensor", whole].map(Digest::of);
    let expected = files.into_iter().chain([manifest.digest()]).collect();
    assert_eq!(store.liveness.leases().leased(), expected);
    drop(lease);
    assert!(store.liveness.leases().leased().is_empty());
}

#[test]
fn stored_blob_is_neither_written_nor_replaced() {
    let (_folder, store) = new_store();
    add(&store, "m", &[b"config", b"layer"]);
    let inode = || fs::metadata(blob_path(&store, b"layer")).unwrap().ino();
    let before = inode();
    let committed = add(&store, "n", &[b"other", b"layer"]);
    assert_eq!(committed, Committed { reused_bytes: 5, ..written("n", 5, 1) });
    assert_eq!(inode(), before, "maps of it stay shared");
}

#[test]
fn same_bytes_twice_in_one_ingest_are_one_blob() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    for _ in 0..3 {
        ingest.add_bytes(b"again").unwrap();
    }
    let committed = ingest.commit(&name("m"), &manifest(&[b"again", b"again"]), None).unwrap();
    assert_eq!(committed, Committed { reused_bytes: 10, ..written("m", 5, 1) });
}

#[test]
fn two_ingests_of_the_same_bytes_both_commit() {
    let (_folder, store) = new_store();
    let (mut first, mut second) = (begin(&store), begin(&store));
    for ingest in [&mut first, &mut second] {
        ingest.add_bytes(b"config").unwrap();
        ingest.add_bytes(b"layer").unwrap();
    }
    first.commit(&name("a"), &manifest(&[b"config", b"layer"]), None).unwrap();
    let inode = fs::metadata(blob_path(&store, b"layer")).unwrap().ino();
    second.commit(&name("b"), &manifest(&[b"config", b"layer"]), None).unwrap();
    assert_eq!(fs::metadata(blob_path(&store, b"layer")).unwrap().ino(), inode, "the first stays");
    assert_eq!((store.names.tags().unwrap().references.len(), store.content.blobs().unwrap().len()), (2, 2));
}

#[test]
fn blob_of_the_wrong_length_is_replaced_and_its_readers_keep_the_old_file() {
    let (_folder, store) = new_store();
    let path = blob_path(&store, b"layer");
    fs::write(&path, "lay").unwrap();
    let reader = File::open(&path).unwrap();
    add(&store, "m", &[b"config", b"layer"]);
    assert_eq!(fs::read(&path).unwrap(), b"layer");
    assert_eq!(std::io::read_to_string(reader).unwrap(), "lay");
}

#[test]
fn opened_blob_has_an_offset_of_its_own_and_cannot_be_written() {
    let (_folder, store) = new_store();
    add(&store, "m", &[b"config", b"layer"]);
    let open = || store.content.open_blob(Digest::of(b"layer"), 5).unwrap();
    let (mut first, mut second) = (open(), open());
    let mut bytes = String::new();
    first.read_to_string(&mut bytes).unwrap();
    assert_eq!(second.read_to_string(&mut bytes).unwrap(), 5);
    assert!(first.write_at(b"x", 0).is_err() && first.set_len(0).is_err());
}

#[test]
fn blob_that_is_missing_short_or_a_link_is_not_opened() {
    let (folder, store) = new_store();
    add(&store, "m", &[b"config", b"layer"]);
    let digest = Digest::of(b"layer");
    let error = store.content.open_blob(digest, 6).unwrap_err();
    assert!(matches!(error, StoreError::BlobSize { found: 5, expected: 6, .. }), "{error}");
    let (path, elsewhere) = (blob_path(&store, b"layer"), folder.path().join("elsewhere"));
    fs::rename(&path, &elsewhere).unwrap();
    assert!(matches!(store.content.open_blob(digest, 0), Err(StoreError::MissingBlob { .. })));
    symlink(&elsewhere, &path).unwrap();
    let followed = store.content.open_blob(digest, 0);
    assert!(matches!(followed, Err(StoreError::UnexpectedFile { .. })), "a link is followed");
}

#[test]
fn files_without_a_digest_as_name_are_not_listed_as_blobs() {
    let (_folder, store) = new_store();
    for foreign in ["README", "sha256-00", ".sha256-x", "sha512-00"] {
        fs::write(store.path(layout::BLOBS).join(foreign), "").unwrap();
    }
    assert!(store.content.blobs().unwrap().is_empty());
}

#[test]
fn tags_are_case_insensitive() {
    let (_folder, store) = new_store();
    add(&store, "Me/Llama:8B", &[b"1", b"one"]);
    add(&store, "me/llama:8b", &[b"2", b"two"]);
    let tags = store.names.tags().unwrap();
    assert_eq!(tags.references, [name("Me/Llama:8B")]);
    assert_eq!(store.names.resolve(&name("ME/LLAMA:8b")).unwrap(), name("Me/Llama:8B"));
    assert_eq!(store.names.manifest(&tags.references[0]).unwrap(), manifest(&[b"2", b"two"]));
    assert!(matches!(store.names.resolve(&name("me/llama:7b")), Err(StoreError::NoSuchModel { .. })));
}

#[test]
fn removed_tag_is_not_reported_as_a_disk_failure() {
    let (_folder, store) = new_store();
    for result in [store.names.modified(&name("m")).map(drop), store.names.manifest(&name("m")).map(drop)] {
        assert!(matches!(result, Err(StoreError::NoSuchModel { .. })));
    }
}

#[test]
fn files_that_are_not_tags_are_listed_as_foreign() {
    let (_folder, store) = new_store();
    add(&store, "m", &[b"1", b"one"]);
    let manifests = store.path(layout::MANIFESTS);
    let library = manifests.join("registry.ollama.ai/library");
    // A directory at a tag's path may have replaced the tag.
    let foreign = [manifests.join("stray"), library.join("m/latest~"), library.join("m/deep")];
    fs::create_dir(&foreign[2]).unwrap();
    foreign[..2].iter().for_each(|path| fs::write(path, "").unwrap());
    let tags = store.names.tags().unwrap();
    assert_eq!(tags.references, [name("m")]);
    assert!(tags.foreign.len() == 3 && foreign.iter().all(|path| tags.foreign.contains(&path.into())));
}

#[test]
fn removal_of_a_tag_removes_its_empty_directories_and_no_others() {
    let (_folder, store) = new_store();
    for tag in ["m:a", "m:b", "me/n"] {
        add(&store, tag, &[b"1", b"one"]);
    }
    let manifests = store.path(layout::MANIFESTS);
    store.names.remove_tag(&name("m:a"), ME).unwrap();
    assert_eq!(entries(&manifests.join("registry.ollama.ai/library/m")), ["b"]);
    store.names.remove_tag(&name("m:b"), ME).unwrap();
    assert_eq!(entries(&manifests.join("registry.ollama.ai")), ["me"]);
    store.names.remove_tag(&name("me/n"), ME).unwrap();
    assert_eq!(entries(&manifests), [""; 0]);
    assert!(matches!(store.names.remove_tag(&name("me/n"), ME), Err(StoreError::NoSuchModel { .. })));
}

#[test]
fn damaged_manifest_is_named() {
    let (_folder, store) = new_store();
    add(&store, "m", &[b"1", b"one"]);
    let path = store.path(layout::manifest(&name("m")));
    let too_long = " ".repeat(usize::try_from(Manifest::MAX_BYTES).unwrap() + 1);
    for content in ["", "{}", "null", &too_long] {
        fs::write(&path, content).unwrap();
        let error = store.names.manifest(&name("m")).unwrap_err();
        assert!(
            matches!(&error, StoreError::Manifest { path: named, .. } if named.path() == path),
            "{error}"
        );
    }
}

#[test]
fn recipe_is_read_once_until_it_is_forgotten() {
    let (_folder, store) = new_store();
    let recipe = recipe_of(&[b"file"]);
    let path = store.path(layout::recipe(recipe.file()));
    fs::write(&path, recipe.to_json()).unwrap();
    assert_eq!(*store.content.recipe(recipe.file()).unwrap().unwrap(), recipe);
    fs::write(&path, "damaged since").unwrap();
    assert!(store.content.recipe(recipe.file()).unwrap().is_some());
    store.content.recipes.forget(recipe.file());
    assert!(matches!(store.content.recipe(recipe.file()), Err(StoreError::Recipe { .. })));
}

#[test]
fn large_recipe_read_concurrently_is_in_memory_once() {
    let (_folder, store) = new_store();
    let names = (0..8192).map(|number| format!("{number:0100}"));
    let recipe = testing::recipe(Digest::of(b"file"), names);
    let json = recipe.to_json();
    assert!(json.len() > 1 << 20);
    fs::write(store.path(layout::recipe(recipe.file())), json).unwrap();
    let read = || store.content.recipe(recipe.file()).unwrap().unwrap();
    let all: Vec<_> = thread::scope(|scope| {
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(read)).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert!(all.iter().all(|other| Arc::ptr_eq(other, &all[0])));
}

#[test]
fn recipe_of_another_file_is_refused() {
    let (_folder, store) = new_store();
    let recipe = recipe_of(&[b"file"]);
    fs::write(store.path(layout::recipe(Digest::of(b"another"))), recipe.to_json()).unwrap();
    let error = store.content.recipe(Digest::of(b"another")).unwrap_err();
    assert!(error.to_string().contains("is the recipe of"), "{error}");
}

#[test]
fn transaction_in_progress_is_not_abandoned() {
    let (_folder, store) = new_store();
    let ingest = begin(&store);
    let directory = ingest.staging().directory().to_path_buf();
    assert_eq!(store.content.abandoned_staging().unwrap(), []);
    // Even if a caller treats it as abandoned.
    store.content.remove_abandoned(directory.file_name().unwrap()).unwrap();
    assert!(store.path(directory).is_dir());
}

#[test]
fn directory_that_becomes_a_store_is_closed_to_others() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    fs::create_dir(&root).unwrap();
    fs::set_permissions(&root, std::os::unix::fs::PermissionsExt::from_mode(0o755)).unwrap();
    drop(Store::open(&root).unwrap());
    assert_eq!(fs::metadata(&root).unwrap().mode() & 0o777, 0o700);
    // A later decision of the owner is kept.
    fs::set_permissions(&root, std::os::unix::fs::PermissionsExt::from_mode(0o750)).unwrap();
    drop(Store::open(&root).unwrap());
    assert_eq!(fs::metadata(&root).unwrap().mode() & 0o777, 0o750);
}

#[test]
fn writing_to_removed_staging_is_an_error() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    fs::remove_dir_all(store.path(layout::STAGING)).unwrap();
    assert!(matches!(ingest.add_bytes(b"x"), Err(StoreError::Io { .. })));
    // The next transaction creates it again.
    assert!(begin(&store).add_bytes(b"x").is_ok());
}

#[test]
fn staged_file_cannot_be_opened_by_others_before_it_is_complete() {
    let (_folder, store) = new_store();
    let mut ingest = begin(&store);
    let mut writer = ingest.staging().stage(4);
    writer.append(b"half").unwrap();
    let txn = entries(&store.path(layout::STAGING)).pop().unwrap();
    let path = store.path(layout::STAGING).join(txn).join("0");
    assert_eq!(fs::metadata(&path).unwrap().mode() & 0o777, 0o600);
    ingest.add_blob(writer.finish().unwrap()).unwrap();
    ingest.commit_blobs().unwrap();
    assert_eq!(fs::metadata(blob_path(&store, b"half")).unwrap().mode() & 0o777, 0o444);
}

/// The bytes on disk below the directories that the quota counts.
fn measured(store: &Store) -> u64 {
    let places = ["blobs", "recipes", "manifests", "origins", "history", "trash"];
    places.into_iter().map(|place| store.content.root.tree_bytes(Path::new(place))).sum()
}

fn limited_store(quota_bytes: u64) -> (TempDir, Arc<Store>) {
    let space =
        SpacePolicy { quota_bytes: Some(quota_bytes), min_free_bytes: Some(0), ..SpacePolicy::default() };
    new_store_with(StoreOptions { space, ..StoreOptions::default() })
}

#[test]
fn quota_counts_manifests_origins_and_trash() {
    let (folder, store) = limited_store(1 << 30);
    assert_eq!(store.ledger.used_bytes(), 0);
    let files: [&[u8]; 2] = [b"{}", b"weights"];
    let check = |what: &str| assert_eq!(store.ledger.used_bytes(), measured(&store), "{what}");
    add(&store, "m:a", &files);
    check("a manifest and its origin");
    add(&store, "m:b", &files);
    check("a further name");
    add(&store, "m:b", &[b"{}", &[7; 9000]]);
    check("a replaced manifest");
    let keep = std::time::Duration::from_secs(60);
    store.names.add_to_trash(&name("m:a"), &manifest(&files), keep).unwrap();
    store.names.remove_tag(&name("m:a"), ME).unwrap();
    check("trash");
    assert!(measured(&store) > store.content.root.tree_bytes(Path::new(layout::BLOBS)));
    let trashed = store.names.trash().unwrap().remove(0);
    begin(&store).restore(&trashed.reference, &trashed.manifest).unwrap();
    store.names.remove_from_trash(trashed.record).unwrap();
    check("a model that came back");
    store.names.remove_tag(&name("m:a"), ME).unwrap();
    store.names.remove_tag(&name("m:b"), ME).unwrap();
    let (dropped, _freed) =
        crate::liveness::gc::drop_displaced(&store.liveness, None, &|| Ok(false)).unwrap();
    assert_eq!(dropped.len(), 1, "what another manifest has replaced");
    crate::liveness::gc::collect(&store.liveness).unwrap();
    let histories = store.content.root.tree_bytes(Path::new(layout::HISTORY));
    assert_eq!((store.ledger.used_bytes(), measured(&store)), (histories, histories));
    add(&store, "m:a", &files);
    let used = store.ledger.used_bytes();
    drop(store);
    let space = SpacePolicy { quota_bytes: Some(1 << 30), ..SpacePolicy::default() };
    let options = StoreOptions { space, ..StoreOptions::default() };
    let store = Store::open_with(folder.path().join("store"), options).unwrap();
    assert_eq!(store.ledger.used_bytes(), used, "counted at the start");
}

#[test]
fn manifest_over_quota_is_refused() {
    let (_folder, store) = limited_store(1 << 30);
    let files: [&[u8]; 2] = [b"{}", b"weights"];
    add(&store, "m:a", &files);
    let used = store.ledger.used_bytes();
    let (folder, tight) = limited_store(used);
    add(&tight, "m:a", &files);
    let refused = begin(&tight).commit(&name("m:b"), &manifest(&files), None);
    assert!(matches!(refused, Err(StoreError::Quota { .. })), "{refused:?}");
    assert_eq!(tight.names.tags().unwrap().references, [name("m:a")]);
    assert_eq!(tight.ledger.used_bytes(), used);
    assert_eq!(entries(&folder.path().join("store/staging")), [""; 0]);
    // A model is restored even over quota: its bytes are still counted.
    tight.names.add_to_trash(&name("m:a"), &manifest(&files), std::time::Duration::from_secs(60)).unwrap();
    tight.names.remove_tag(&name("m:a"), ME).unwrap();
    begin(&tight).restore(&name("m:a"), &manifest(&files)).unwrap();
}

#[test]
fn files_of_an_ingest_must_fit_the_quota_together() {
    let (_folder, store) = limited_store(1 << 20);
    let admit = |sizes: [u64; 2]| begin(&store).admit_all(sizes.into_iter());
    admit([1 << 18, 1 << 18]).unwrap();
    assert!(matches!(admit([3 << 18, 3 << 18]), Err(StoreError::Quota { .. })));
}

#[test]
fn audit_directory_is_noticed() {
    let (folder, store) = new_store();
    let path = folder.path().join("store").join(layout::AUDIT);
    let _ = fs::remove_dir_all(&path);
    assert!(!store.content.has_audit_directory());
    fs::create_dir(&path).unwrap();
    assert!(store.content.has_audit_directory());
}

#[test]
fn special_file_in_place_of_a_tag_is_reported() {
    let (folder, store) = new_store();
    let path = folder.path().join("store").join(layout::manifest(&name("m")));
    fs::create_dir_all(&path).unwrap();
    let error = store.names.stored_case(&name("m")).unwrap_err();
    assert!(matches!(error, StoreError::UnexpectedFile { .. }), "{error}");
    assert_eq!(store.names.stored_case(&name("n")).unwrap(), None);
}

#[test]
fn versions_of_files_are_recorded_with_the_origin() {
    let (_folder, store) = new_store();
    let version = FileVersion {
        url: "https://example.org/m".to_owned(),
        validator: "\"1\"".to_owned(),
        size: 5,
        digest: Digest::of(b"model"),
    };
    let mut ingest = begin(&store);
    ingest.add_bytes(b"model").unwrap();
    ingest.note_versions([version.clone()]);
    ingest.commit(&name("m"), &manifest(&[b"model"]), Some("https://example.org/m")).unwrap();
    let urls = [version.url.clone(), "https://example.org/other".to_owned()];
    assert_eq!(store.names.file_versions(&urls).unwrap(), [version]);
}
