//! What names mean: models with their recipes, origins and kinds.

use std::sync::Arc;

use blobd_model::kind::ModelKind;
use blobd_store_format::recipe::Recipe;

use super::*;
use crate::testing::{begin, file, manifest, name, new_store, new_store_with, recipe_of};
use crate::{NameOrigin, RecordedFacts, Store, StoreOptions};

/// Adds a model of a whole file and of one that is split, and returns the recipe.
fn add(store: &Arc<Store>, tag: &str) -> Recipe {
    let mut ingest = begin(store);
    for bytes in [&b"config"[..], b"head", b"tensor"] {
        ingest.add_bytes(bytes).unwrap();
    }
    let recipe = recipe_of(&[b"head", b"tensor"]);
    ingest.add_recipe(recipe.clone());
    ingest.note_facts(RecordedFacts { kind: Some(ModelKind::Reranker), ..RecordedFacts::default() });
    ingest.commit(&name(tag), &manifest(&[b"config", b"headtensor"]), Some("https://example.org/m")).unwrap();
    recipe
}

#[test]
fn model_has_its_files_in_their_stored_form() {
    let (_folder, store) = new_store();
    let recipe = add(&store, "m");
    let model = store.names.model(&name("M")).unwrap();
    assert_eq!(
        (model.reference.clone(), model.manifest.digest()),
        (name("m"), manifest(&[b"config", b"headtensor"]).digest())
    );
    let files: Vec<_> =
        model.files.iter().map(|file| (file.descriptor.clone(), file.recipe.as_deref())).collect();
    assert_eq!(files, [(file(b"config"), None), (file(b"headtensor"), Some(&recipe))]);
    let mut sizes: Vec<_> = model.blob_sizes().collect();
    sizes.sort();
    let mut expected =
        [&b"config"[..], b"head", b"tensor"].map(|bytes| (Digest::of(bytes), bytes.len() as u64));
    expected.sort();
    assert_eq!(sizes, expected);
    let contents = model.contents().unwrap();
    assert_eq!(contents.len(), 2, "neither of them is an archive");
    assert!(contents.iter().all(|named| named.name.is_none() && named.unpacked_from.is_none()));
    let raw = model.manifest.raw().len() as u64;
    assert_eq!(store.names.manifest_length(&name("m")).unwrap(), raw);
    let recipes = recipe.to_json().len() as u64;
    assert_eq!(store.names.recipes_length(&name("m")).unwrap(), (model.manifest.digest(), recipes));
}

#[test]
fn model_that_is_stored_in_another_form_is_another_one() {
    let (_folder, store) = new_store();
    add(&store, "m");
    let split = store.names.model(&name("m")).unwrap();
    assert!(split.is_stored_as(&split));
    let mut whole = split.clone();
    whole.files[1].recipe = None;
    assert!(!split.is_stored_as(&whole) && whole.is_stored_as(&whole));
    let mut equal = split.clone();
    equal.files[1].recipe = Some(Arc::new(recipe_of(&[b"head", b"tensor"])));
    assert!(split.is_stored_as(&equal), "an equal recipe, read again");
    let mut other = split.clone();
    other.files[1].recipe = Some(Arc::new(recipe_of(&[b"headten", b"sor"])));
    assert!(!split.is_stored_as(&other));
    let fewer = Model { files: split.files[..1].to_vec(), ..split.clone() };
    assert!(!split.is_stored_as(&fewer));
    let renamed = Model { manifest: manifest(&[b"config"]), ..split.clone() };
    assert!(!split.is_stored_as(&renamed));
    let mut swapped = whole.clone();
    swapped.files[1] = swapped.files[0].clone();
    assert!(!whole.is_stored_as(&swapped));
}

#[test]
fn lengths_and_origins_of_models_of_lower_stores_are_known() {
    let (lower_folder, lower) = new_store();
    let recipe = add(&lower, "m");
    drop(lower);
    let options = StoreOptions { lower: vec![lower_folder.path().join("store")], ..StoreOptions::default() };
    let (_folder, store) = new_store_with(options);
    let model = manifest(&[b"config", b"headtensor"]);
    assert_eq!(store.names.manifest_length(&name("m")).unwrap(), model.raw().len() as u64);
    let recipes = recipe.to_json().len() as u64;
    assert_eq!(store.names.recipes_length(&name("m")).unwrap(), (model.digest(), recipes));
    assert_eq!(store.names.facts(model.digest()).kind, Some(ModelKind::Reranker));
    assert_eq!(store.names.origin(model.digest()).as_deref(), Some("https://example.org/m"));
    assert_eq!(store.names.own_origin(model.digest()), None);
    assert_eq!(
        store.names.recorded_origin(model.digest()).unwrap().as_deref(),
        Some("https://example.org/m")
    );
    let origin = store.names.name_origin(&name("m"), model.digest());
    assert_eq!(origin.origin.as_deref(), Some("https://example.org/m"));
    assert!(store.names.lower_place_of(&name("m")).unwrap().is_some());
    assert_eq!(store.names.lower_place_of(&name("n")).unwrap(), None);
    assert_eq!(store.names.lower_name(&name("M")), Some((name("m"), model.digest())));
    assert!(matches!(store.names.own_manifest(&name("m")), Err(StoreError::NoSuchModel { .. })));
}

#[test]
fn unknown_manifest_has_neither_kind_nor_origin() {
    let (_folder, store) = new_store();
    add(&store, "m");
    let known = manifest(&[b"config", b"headtensor"]).digest();
    assert_eq!(store.names.facts(known).kind, Some(ModelKind::Reranker));
    let unknown = Digest::of(b"unknown");
    assert_eq!((store.names.facts(unknown).kind, store.names.origin(unknown)), (None, None));
    assert_eq!(store.names.name_origin(&name("m"), unknown), NameOrigin::default());
    assert_eq!(store.names.origins().unwrap(), [known]);
    store.names.remove_origin(known).unwrap();
    assert!(store.names.origins().unwrap().is_empty());
    store.names.check_tag(&name("m")).unwrap();
    assert!(matches!(store.names.check_tag(&name("n")), Err(StoreError::NoSuchModel { .. })));
}

#[test]
fn copy_of_a_name_follows_no_source() {
    let origin = NameOrigin::following(Some("https://example.org/m.gguf".to_owned()));
    assert!(origin.source.is_some());
    let copy = origin.clone().for_copy();
    assert_eq!(copy, NameOrigin { source: None, ..origin.clone() });
    assert!(copy.origin.is_some());
    for imported in [Some("import m.gguf".to_owned()), None] {
        let expected = NameOrigin { origin: imported.clone(), source: None };
        assert_eq!(NameOrigin::following(imported), expected);
    }
}

#[test]
fn all_tags_are_surveyed_without_a_list_of_unchanged_directories() {
    let (_folder, store) = new_store();
    add(&store, "m");
    let foreign = store.path(layout::MANIFESTS).join("notes.txt");
    std::fs::write(&foreign, "").unwrap();
    for tags in [store.names.surveyed_tags().unwrap(), store.names.tags().unwrap()] {
        assert_eq!(tags.references, [name("m")]);
        assert_eq!(tags.foreign, [(&foreign).into()]);
    }
}
