use std::fs;
use std::path::Path;
use std::sync::Arc;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::{Piece, Recipe};
use blobd_store_format::reference::Reference;
use blobd_store_format::tensor::TensorFormat;
use tempfile::TempDir;

use crate::NameRule;
use crate::testing::begin;
use crate::{Store, StoreError, StoreOptions, gc};

fn name(text: &str) -> Reference {
    text.parse().unwrap()
}

fn described(bytes: &[u8]) -> Descriptor {
    let media_type = MediaType::new("text/plain");
    Descriptor { media_type, digest: Digest::of(bytes), size: bytes.len() as u64 }
}

/// Adds a model of a whole file and of a file that is split into two blobs.
fn add(store: &Arc<Store>, tag: &str, whole: &[u8], halves: [&[u8]; 2]) -> Manifest {
    let mut ingest = begin(store).may_take(NameRule::replacing_any());
    ingest.add_bytes(whole).unwrap();
    let piece = |half: &[u8]| Piece::Blob { blob: Digest::of(half), offset: 0, length: half.len() as u64 };
    for half in halves {
        ingest.add_bytes(half).unwrap();
    }
    let split = halves.concat();
    let recipe =
        Recipe::new(Digest::of(&split), TensorFormat::Gguf, halves.map(piece).to_vec(), Vec::new()).unwrap();
    ingest.add_recipe(recipe);
    let manifest = Manifest::compose(described(whole), vec![described(&split)]).unwrap();
    ingest.commit(&name(tag), &manifest, None).unwrap();
    manifest
}

struct Stores {
    folder: TempDir,
}

impl Stores {
    /// A lower store with one model.
    fn new() -> Self {
        let stores = Self { folder: tempfile::tempdir().unwrap() };
        let lower = Arc::new(Store::open(stores.lower()).unwrap());
        add(&lower, "site", b"config", [b"first", b"second"]);
        stores
    }

    fn lower(&self) -> std::path::PathBuf {
        self.folder.path().join("lower")
    }

    fn open(&self) -> Arc<Store> {
        let options = StoreOptions { lower: vec![self.lower()], ..StoreOptions::default() };
        Arc::new(Store::open_with(self.folder.path().join("upper"), options).unwrap())
    }

    fn unmount(&self) {
        fs::rename(self.lower(), self.folder.path().join("away")).unwrap();
        fs::create_dir(self.lower()).unwrap();
    }

    fn mount(&self) {
        fs::remove_dir(self.lower()).unwrap();
        fs::rename(self.folder.path().join("away"), self.lower()).unwrap();
    }
}

fn is_whole(store: &Store, tag: &str) -> bool {
    let manifest = store.names().manifest(&name(tag)).unwrap();
    manifest.files().all(|file| store.content().has_file(file).unwrap())
}

fn file_count(directory: &Path) -> usize {
    fs::read_dir(directory).unwrap().count()
}

#[test]
fn lower_store_is_searched_and_never_written_to() {
    let stores = Stores::new();
    let before = file_count(&stores.lower());
    let modified = fs::metadata(stores.lower().join("lock")).unwrap().modified().unwrap();
    let store = stores.open();
    assert!(is_whole(&store, "site"));
    assert_eq!(store.names().all_tags().unwrap(), [name("site")]);
    assert_eq!(store.names().tags().unwrap().references, []);
    assert!(store.names().all_summaries().unwrap()[0].lower.is_some());
    store.content().open_blob(Digest::of(b"first"), 5).unwrap();
    let short = store.content().open_blob(Digest::of(b"first"), 6);
    assert!(matches!(short, Err(StoreError::BlobSize { found: 5, expected: 6, .. })));
    assert_eq!(file_count(&stores.lower()), before);
    assert_eq!(fs::metadata(stores.lower().join("lock")).unwrap().modified().unwrap(), modified);
}

#[test]
fn model_of_a_lower_store_cannot_be_changed() {
    let stores = Stores::new();
    let store = stores.open();
    let refused = store.names().resolve_for_change(&name("site"));
    assert!(matches!(refused, Err(StoreError::InLowerStore { name, .. }) if name == "site:latest"));
}

#[test]
fn blob_of_a_lower_store_is_not_stored_again() {
    let stores = Stores::new();
    let store = stores.open();
    add(&store, "mine", b"config", [b"first", b"mine"]);
    assert_eq!(store.content().blobs().unwrap(), [Digest::of(b"mine")]);
    assert!(is_whole(&store, "mine"));
    let recipes: Vec<_> = store.content().recipes().unwrap();
    assert!(recipes.contains(&Digest::of(b"config")), "a recipe records the whole file");
    assert!(store.content().recipe(Digest::of(b"config")).unwrap().is_none(), "which is stored whole");
}

#[test]
fn collection_without_the_lower_store_deletes_nothing_that_a_model_needs() {
    let stores = Stores::new();
    let store = stores.open();
    add(&store, "mine", b"config", [b"first", b"mine"]);
    let lease = store.liveness().leases().grant("a test");
    let site = store.names().leased_model(&name("site"), &lease).unwrap().manifest;
    begin(&store).commit(&name("alias"), &site, None).unwrap();
    drop(lease);
    let (blobs, recipes) = (store.content().blobs().unwrap(), store.content().recipes().unwrap());
    stores.unmount();
    assert_eq!(store.names().all_tags().unwrap(), [name("alias"), name("mine")]);
    assert!(!is_whole(&store, "mine"));
    assert_eq!(gc::collect(store.liveness()).unwrap(), 0);
    drop(store);
    let store = stores.open();
    assert_eq!(gc::collect(store.liveness()).unwrap(), 0);
    assert_eq!(
        (store.content().blobs().unwrap().len(), store.content().recipes().unwrap().len()),
        (blobs.len(), recipes.len())
    );
    let hidden = store.content().open_blob(Digest::of(b"first"), 0);
    assert!(matches!(hidden, Err(StoreError::Hidden { .. })), "{hidden:?}");
    stores.mount();
    assert!(["site", "mine", "alias"].iter().all(|tag| is_whole(&store, tag)));
}

#[test]
fn commit_that_needs_a_lower_store_which_is_gone_is_refused() {
    let stores = Stores::new();
    let store = stores.open();
    let site = store.names().manifest(&name("site")).unwrap();
    stores.unmount();
    let refused = begin(&store).commit(&name("alias"), &site, None);
    assert!(matches!(refused, Err(StoreError::Hidden { .. })), "{refused:?}");
    assert_eq!(store.names().tags().unwrap().references, []);
}

#[test]
fn another_store_in_the_place_of_a_lower_one_is_left_out() {
    let stores = Stores::new();
    let store = stores.open();
    assert!(is_whole(&store, "site"));
    stores.unmount();
    drop(Store::open(stores.lower()).unwrap());
    assert_eq!(store.names().all_tags().unwrap(), []);
    let status = store.content().lower_stores().remove(0).state;
    assert!(status.unwrap_err().contains("restart blobd"));
}

#[test]
fn store_that_is_its_own_lower_store_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    drop(Store::open(&root).unwrap());
    let options = StoreOptions { lower: vec![root.clone()], ..StoreOptions::default() };
    let store = Store::open_with(&root, options).unwrap();
    assert!(
        store.content().lower_stores().remove(0).state.unwrap_err().contains("the writable store itself")
    );
}

/// Whatever is wrong with a lower store, this store goes on.
#[test]
fn malformed_lower_store_prevents_no_change_of_this_one() {
    let stores = Stores::new();
    for directory in ["blobs", "recipes", "manifests"] {
        fs::rename(stores.lower().join(directory), stores.lower().join("away")).unwrap();
        std::os::unix::fs::symlink("/etc", stores.lower().join(directory)).unwrap();
        let store = stores.open();
        add(&store, directory, directory.as_bytes(), [b"first", b"mine"]);
        assert!(is_whole(&store, directory));
        assert!(store.names().resolve(&name("absent")).is_err());
        assert!(store.content().lower_stores()[0].state.is_err(), "{directory}");
        drop(store);
        fs::remove_file(stores.lower().join(directory)).unwrap();
        fs::rename(stores.lower().join("away"), stores.lower().join(directory)).unwrap();
    }
}

/// A blob that can be seen and not opened, as one of mode 0600, is not there.
#[test]
fn unreadable_blob_of_a_lower_store_is_stored_again() {
    let stores = Stores::new();
    let blob = stores.lower().join(layout::blob(Digest::of(b"first")));
    fs::remove_file(&blob).unwrap();
    // Root may read every file, but a directory is no file.
    fs::create_dir(&blob).unwrap();
    let store = stores.open();
    add(&store, "mine", b"config", [b"first", b"mine"]);
    assert!(store.content().blobs().unwrap().contains(&Digest::of(b"first")));
    assert!(is_whole(&store, "mine"));
}

#[test]
fn unreadable_part_of_a_lower_store_hides_only_that() {
    let stores = Stores::new();
    let lower = Arc::new(Store::open(stores.lower()).unwrap());
    add(&lower, "other/m:1", b"config", [b"first", b"third"]);
    drop(lower);
    let manifest = stores.lower().join(layout::manifest(&name("other/m:1")));
    fs::remove_file(&manifest).unwrap();
    std::os::unix::net::UnixListener::bind(&manifest).unwrap();
    let store = stores.open();
    let listed = store.names().all_summaries().unwrap();
    let usable: Vec<_> =
        listed.iter().filter(|tag| tag.manifest.is_ok()).map(|tag| tag.reference.short()).collect();
    assert_eq!(usable, ["site:latest"]);
    assert!(store.names().all_tags().unwrap().contains(&name("site")));
}

#[test]
fn names_that_differ_in_case_are_one_model() {
    let stores = Stores::new();
    let store = stores.open();
    add(&store, "SITE", b"config", [b"first", b"mine"]);
    assert_eq!(store.names().all_tags().unwrap(), [name("SITE")]);
    assert_eq!(store.names().all_summaries().unwrap().len(), 1);
}

#[test]
fn name_of_a_lower_store_keeps_its_content_too() {
    let stores = Stores::new();
    let store = stores.open();
    let other = Manifest::compose(described(b"other"), vec![described(b"other")]).unwrap();
    let give = |rule| {
        let mut ingest = begin(&store).may_take(rule);
        ingest.add_bytes(b"other").unwrap();
        ingest.commit(&name("SITE"), &other, None)
    };
    let refused = give(NameRule { replace_of_others: true, ..NameRule::default() });
    assert!(matches!(refused, Err(StoreError::NameTaken { .. })), "{refused:?}");
    // The users who are no administrators do not change for all what a name of a site means.
    let refused = give(NameRule { uid: 1001, replace: true, ..NameRule::default() });
    assert!(matches!(refused, Err(StoreError::NameOfAnother { adder: None, .. })), "{refused:?}");
    assert!(is_whole(&store, "site"));
    let same = store.names().manifest(&name("site")).unwrap();
    begin(&store).commit(&name("site"), &same, None).unwrap();
}

#[test]
fn held_lower_stores_stay_open_until_the_last_operation_ends() {
    let stores = Stores::new();
    let store = stores.open();
    let (first, second) = (store.content().hold_lower_stores(), store.content().hold_lower_stores());
    assert!(is_whole(&store, "site"));
    stores.unmount();
    drop(first);
    assert!(is_whole(&store, "site"), "as programs that have a file open");
    drop(second);
    assert!(store.names().manifest(&name("site")).is_err());
}

/// A transfer has found that a blob of a lower store is damaged.
#[test]
fn own_copy_takes_the_place_of_a_damaged_blob_of_a_lower_store() {
    let stores = Stores::new();
    let blob = stores.lower().join(layout::blob(Digest::of(b"first")));
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, b"wrong").unwrap();
    let store = stores.open();
    let mut ingest = begin(&store);
    ingest.keep_own_copy(Digest::of(b"first"));
    ingest.add_bytes(b"first").unwrap();
    ingest.add_bytes(b"second").unwrap();
    ingest.commit_blobs().unwrap();
    assert_eq!(store.content().blobs().unwrap(), [Digest::of(b"first")]);
    assert_eq!(store.content().read_blob(Digest::of(b"first"), 9).unwrap().unwrap(), b"first");
}

#[test]
fn copied_blob_is_verified() {
    let stores = Stores::new();
    let store = stores.open();
    let blob = stores.lower().join(layout::blob(Digest::of(b"first")));
    fs::remove_file(&blob).unwrap();
    fs::write(&blob, b"wrong").unwrap();
    let mut ingest = begin(&store).keeping_own_copies();
    let refused = ingest.copy_blob(Digest::of(b"first"), 5, &mut |_| true);
    assert!(matches!(refused, Err(StoreError::DamagedBlob { .. })), "{refused:?}");
    assert!(ingest.copy_blob(Digest::of(b"second"), 6, &mut |_| true).unwrap());
    assert!(!ingest.copy_blob(Digest::of(b"config"), 6, &mut |_| false).unwrap(), "it was stopped");
    ingest.commit_blobs().unwrap();
    assert_eq!(store.content().blobs().unwrap(), [Digest::of(b"second")]);
}

#[test]
fn damaged_blob_is_not_missed_while_a_lower_store_has_it() {
    let stores = Stores::new();
    let store = stores.open();
    let mut ingest = begin(&store).keeping_own_copies();
    assert!(ingest.copy_blob(Digest::of(b"first"), 5, &mut |_| true).unwrap());
    ingest.commit_blobs().unwrap();
    let own = store.path(layout::blob(Digest::of(b"first")));
    fs::remove_file(&own).unwrap();
    fs::write(&own, b"wrong").unwrap();
    store.content().quarantine_if_damaged(Digest::of(b"first")).unwrap().unwrap();
    assert!(store.content().damaged().is_empty());
    assert_eq!(store.content().read_blob(Digest::of(b"first"), 9).unwrap().unwrap(), b"first");
    stores.unmount();
    assert!(store.content().damaged().contains(&Digest::of(b"first")));
}
