use std::fs;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use tempfile::TempDir;

use super::BETWEEN_LOG_LINES;
use crate::testing::{begin, manifest, name, recipe_of};
use crate::{NameRule, Store, StoreError, StoreOptions, gc, lock};

/// Adds a model of a whole file and of a file that is split into two blobs.
fn add(store: &Arc<Store>, tag: &str, whole: &[u8], halves: [&[u8]; 2]) -> Manifest {
    let mut ingest = begin(store).may_take(NameRule::replacing_any());
    ingest.add_bytes(whole).unwrap();
    for half in halves {
        ingest.add_bytes(half).unwrap();
    }
    ingest.add_recipe(recipe_of(&halves));
    let manifest = manifest(&[whole, &halves.concat()]);
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

    /// Replaces a blob of the lower store.
    fn damage(&self, blob: &[u8]) {
        let path = self.lower().join(layout::blob(Digest::of(blob)));
        fs::remove_file(&path).unwrap();
        fs::write(&path, b"wrong").unwrap();
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
    let manifest = store.names.manifest(&name(tag)).unwrap();
    manifest.files().all(|file| store.content.has_file(file).unwrap())
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
    assert_eq!(store.names.all_tags().unwrap(), [name("site")]);
    assert_eq!(store.names.tags().unwrap().references, []);
    assert!(store.names.all_summaries().unwrap()[0].lower.is_some());
    store.content.open_blob(Digest::of(b"first"), 5).unwrap();
    let short = store.content.open_blob(Digest::of(b"first"), 6);
    assert!(matches!(short, Err(StoreError::BlobSize { found: 5, expected: 6, .. })));
    assert_eq!(file_count(&stores.lower()), before);
    assert_eq!(fs::metadata(stores.lower().join("lock")).unwrap().modified().unwrap(), modified);
}

#[test]
fn model_of_a_lower_store_cannot_be_changed() {
    let stores = Stores::new();
    let store = stores.open();
    let refused = store.names.resolve_for_change(&name("site"));
    assert!(matches!(refused, Err(StoreError::InLowerStore { name, .. }) if name == "site:latest"));
}

#[test]
fn blob_of_a_lower_store_is_not_stored_again() {
    let stores = Stores::new();
    let store = stores.open();
    add(&store, "mine", b"config", [b"first", b"mine"]);
    assert_eq!(store.content.blobs().unwrap(), [Digest::of(b"mine")]);
    assert!(is_whole(&store, "mine"));
    let recipes: Vec<_> = store.content.recipes().unwrap();
    assert!(recipes.contains(&Digest::of(b"config")), "a recipe records the whole file");
    assert!(store.content.recipe(Digest::of(b"config")).unwrap().is_none(), "which is stored whole");
}

#[test]
fn collection_without_the_lower_store_deletes_nothing_that_a_model_needs() {
    let stores = Stores::new();
    let store = stores.open();
    add(&store, "mine", b"config", [b"first", b"mine"]);
    let lease = store.liveness.leases().grant("a test");
    let site = store.names.leased_model(&name("site"), &lease).unwrap().manifest;
    begin(&store).commit(&name("alias"), &site, None).unwrap();
    drop(lease);
    let (blobs, recipes) = (store.content.blobs().unwrap(), store.content.recipes().unwrap());
    stores.unmount();
    assert_eq!(store.names.all_tags().unwrap(), [name("alias"), name("mine")]);
    assert!(!is_whole(&store, "mine"));
    assert_eq!(gc::collect(&store.liveness).unwrap(), 0);
    drop(store);
    let store = stores.open();
    assert_eq!(gc::collect(&store.liveness).unwrap(), 0);
    assert_eq!(
        (store.content.blobs().unwrap().len(), store.content.recipes().unwrap().len()),
        (blobs.len(), recipes.len())
    );
    let hidden = store.content.open_blob(Digest::of(b"first"), 0);
    assert!(matches!(hidden, Err(StoreError::Hidden { .. })), "{hidden:?}");
    stores.mount();
    assert!(["site", "mine", "alias"].iter().all(|tag| is_whole(&store, tag)));
}

#[test]
fn commit_that_needs_a_lower_store_which_is_gone_is_refused() {
    let stores = Stores::new();
    let store = stores.open();
    let site = store.names.manifest(&name("site")).unwrap();
    stores.unmount();
    let refused = begin(&store).commit(&name("alias"), &site, None);
    assert!(matches!(refused, Err(StoreError::Hidden { .. })), "{refused:?}");
    assert_eq!(store.names.tags().unwrap().references, []);
}

#[test]
fn another_store_in_the_place_of_a_lower_one_is_left_out() {
    let stores = Stores::new();
    let store = stores.open();
    assert!(is_whole(&store, "site"));
    stores.unmount();
    drop(Store::open(stores.lower()).unwrap());
    assert_eq!(store.names.all_tags().unwrap(), []);
    let status = store.content.lower_stores().remove(0).state;
    assert!(status.unwrap_err().contains("restart blobd"));
}

#[test]
fn store_that_is_its_own_lower_store_is_left_out() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path().join("store");
    drop(Store::open(&root).unwrap());
    let options = StoreOptions { lower: vec![root.clone()], ..StoreOptions::default() };
    let store = Store::open_with(&root, options).unwrap();
    assert!(store.content.lower_stores().remove(0).state.unwrap_err().contains("the writable store itself"));
}

/// Whatever is wrong with a lower store, this store works.
#[test]
fn malformed_lower_store_prevents_no_change_of_this_one() {
    let stores = Stores::new();
    for directory in ["blobs", "recipes", "manifests"] {
        fs::rename(stores.lower().join(directory), stores.lower().join("away")).unwrap();
        std::os::unix::fs::symlink("/etc", stores.lower().join(directory)).unwrap();
        let store = stores.open();
        add(&store, directory, directory.as_bytes(), [b"first", b"mine"]);
        assert!(is_whole(&store, directory));
        assert!(store.names.resolve(&name("absent")).is_err());
        assert!(store.content.lower_stores()[0].state.is_err(), "{directory}");
        drop(store);
        fs::remove_file(stores.lower().join(directory)).unwrap();
        fs::rename(stores.lower().join("away"), stores.lower().join(directory)).unwrap();
    }
}

/// A blob that exists and cannot be opened, such as one of mode 0600, counts as missing.
#[test]
fn unreadable_blob_of_a_lower_store_is_stored_again() {
    let stores = Stores::new();
    let blob = stores.lower().join(layout::blob(Digest::of(b"first")));
    fs::remove_file(&blob).unwrap();
    // Root may read every file, but a directory is not a file.
    fs::create_dir(&blob).unwrap();
    let store = stores.open();
    add(&store, "mine", b"config", [b"first", b"mine"]);
    assert!(store.content.blobs().unwrap().contains(&Digest::of(b"first")));
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
    let listed = store.names.all_summaries().unwrap();
    let usable: Vec<_> =
        listed.iter().filter(|tag| tag.manifest.is_ok()).map(|tag| tag.reference.short()).collect();
    assert_eq!(usable, ["site:latest"]);
    assert!(store.names.all_tags().unwrap().contains(&name("site")));
}

#[test]
fn names_that_differ_in_case_are_one_model() {
    let stores = Stores::new();
    let store = stores.open();
    add(&store, "SITE", b"config", [b"first", b"mine"]);
    assert_eq!(store.names.all_tags().unwrap(), [name("SITE")]);
    assert_eq!(store.names.all_summaries().unwrap().len(), 1);
}

#[test]
fn name_of_a_lower_store_keeps_its_content_too() {
    let stores = Stores::new();
    let store = stores.open();
    let other = manifest(&[b"other"]);
    let give = |rule| {
        let mut ingest = begin(&store).may_take(rule);
        ingest.add_bytes(b"other").unwrap();
        ingest.commit(&name("SITE"), &other, None)
    };
    let refused = give(NameRule { replace_of_others: true, ..NameRule::default() });
    assert!(matches!(refused, Err(StoreError::NameTaken { .. })), "{refused:?}");
    // Users who are not administrators cannot change for all users what a name of the lower store means.
    let refused = give(NameRule { uid: 1001, replace: true, ..NameRule::default() });
    assert!(matches!(refused, Err(StoreError::NameOfAnother { adder: None, .. })), "{refused:?}");
    assert!(is_whole(&store, "site"));
    let same = store.names.manifest(&name("site")).unwrap();
    begin(&store).commit(&name("site"), &same, None).unwrap();
}

#[test]
fn held_lower_stores_stay_open_until_the_last_operation_ends() {
    let stores = Stores::new();
    let store = stores.open();
    let (first, second) = (store.content.hold_lower_stores(), store.content.hold_lower_stores());
    assert!(is_whole(&store, "site"));
    stores.unmount();
    drop(first);
    assert!(is_whole(&store, "site"), "as programs that have a file open");
    drop(second);
    assert!(store.names.manifest(&name("site")).is_err());
}

/// A transfer has found that a blob of a lower store is damaged.
#[test]
fn own_copy_takes_the_place_of_a_damaged_blob_of_a_lower_store() {
    let stores = Stores::new();
    stores.damage(b"first");
    let store = stores.open();
    let mut ingest = begin(&store);
    ingest.keep_own_copy(Digest::of(b"first"));
    ingest.add_bytes(b"first").unwrap();
    ingest.add_bytes(b"second").unwrap();
    ingest.commit_blobs().unwrap();
    assert_eq!(store.content.blobs().unwrap(), [Digest::of(b"first")]);
    assert_eq!(store.content.read_blob(Digest::of(b"first"), 9).unwrap().unwrap(), b"first");
}

#[test]
fn copied_blob_is_verified() {
    let stores = Stores::new();
    let store = stores.open();
    stores.damage(b"first");
    let mut ingest = begin(&store).keeping_own_copies();
    let refused = ingest.copy_blob(Digest::of(b"first"), 5, &mut |_| true);
    assert!(matches!(refused, Err(StoreError::DamagedBlob { .. })), "{refused:?}");
    assert!(ingest.copy_blob(Digest::of(b"second"), 6, &mut |_| true).unwrap());
    assert!(!ingest.copy_blob(Digest::of(b"config"), 6, &mut |_| false).unwrap(), "it was stopped");
    ingest.commit_blobs().unwrap();
    assert_eq!(store.content.blobs().unwrap(), [Digest::of(b"second")]);
}

#[test]
fn damaged_blob_does_not_count_as_missing_while_a_lower_store_has_it() {
    let stores = Stores::new();
    let store = stores.open();
    let mut ingest = begin(&store).keeping_own_copies();
    assert!(ingest.copy_blob(Digest::of(b"first"), 5, &mut |_| true).unwrap());
    ingest.commit_blobs().unwrap();
    let own = store.path(layout::blob(Digest::of(b"first")));
    fs::remove_file(&own).unwrap();
    fs::write(&own, b"wrong").unwrap();
    store.content.quarantine_if_damaged(Digest::of(b"first")).unwrap().unwrap();
    assert!(store.content.damaged().is_empty());
    assert_eq!(store.content.read_blob(Digest::of(b"first"), 9).unwrap().unwrap(), b"first");
    stores.unmount();
    assert!(store.content.damaged().contains(&Digest::of(b"first")));
}

#[test]
fn blob_of_a_lower_store_is_valid_if_its_bytes_are() {
    let stores = Stores::new();
    stores.damage(b"first");
    let store = stores.open();
    for (blob, is_good) in [(&b"first"[..], false), (b"second", true), (b"absent", false)] {
        assert_eq!(store.content.has_good_lower_blob(Digest::of(blob)), is_good, "{}", blob.escape_ascii());
    }
}

#[test]
fn failed_look_up_is_reported_for_some_time() {
    let stores = Stores::new();
    let store = stores.open();
    assert_eq!(store.content.lower_problem(), None);
    let lower = &store.content.lower.stores[0];
    lower.note_failure(&StoreError::NotAStore { root: "/lower".into(), what: "a test".to_owned() });
    assert!(store.content.lower_problem().unwrap().contains("a test"));
    assert_eq!(store.content.unavailable_lower_stores(), 1);
    let earlier = Instant::now().checked_sub(BETWEEN_LOG_LINES).unwrap();
    lock(&lower.seen).failure = Some((earlier, "a test".to_owned()));
    assert_eq!(store.content.lower_problem(), None);
}

#[test]
fn failure_is_noted_for_the_store_in_which_it_happened() {
    let folders = [Stores::new(), Stores::new()];
    let lower = folders.iter().map(Stores::lower).collect();
    let upper = tempfile::tempdir().unwrap();
    let options = StoreOptions { lower, ..StoreOptions::default() };
    let store = Store::open_with(upper.path().join("upper"), options).unwrap();
    let error = StoreError::NotAStore { root: "/lower".into(), what: "a test".to_owned() };
    assert_eq!(store.content.unavailable_lower_stores(), 0);
    let root = crate::root::Root::open(folders[1].lower()).unwrap();
    store.content.lower.note_failure(&root, &error);
    let problems: Vec<_> = store.content.lower.stores.iter().map(super::LowerStore::problem).collect();
    assert_eq!(problems, [None, Some(error.to_string())]);
    let states: Vec<_> = store.content.lower_stores().into_iter().map(|lower| lower.state).collect();
    assert!(states[0].is_ok());
    assert_eq!(states[1].as_ref().unwrap_err(), &error.to_string());
    let (place, problem) = store.content.lower.left_out().unwrap();
    assert_eq!((place.path(), problem), (folders[1].lower().as_path(), error.to_string()));
    assert_eq!(store.content.lower_paths(), folders.each_ref().map(|stores| (&stores.lower()).into()));
    assert_eq!(store.content.unavailable_lower_stores(), 1);
}

#[test]
fn damage_is_reported_only_if_no_lower_store_has_the_file() {
    let folders = [Stores::new(), Stores::new()];
    folders[0].damage(b"first");
    let lower = folders.iter().map(Stores::lower).collect();
    let upper = tempfile::tempdir().unwrap();
    let options = StoreOptions { lower, ..StoreOptions::default() };
    let store = Store::open_with(upper.path().join("upper"), options).unwrap();
    // `wrong` has the same length, and what is opened is not read.
    let short = |digest| store.content.open_blob(digest, 6);
    assert!(matches!(short(Digest::of(b"first")), Err(StoreError::BlobSize { found: 5, expected: 6, .. })));
    let path = folders[0].lower().join(layout::blob(Digest::of(b"second")));
    fs::remove_file(&path).unwrap();
    fs::write(&path, b"s").unwrap();
    assert!(short(Digest::of(b"second")).is_ok(), "the other one has all of it");
    let sizes: Vec<_> =
        [b"second"].iter().map(|blob| store.content.lower_blob_size(Digest::of(*blob))).collect();
    assert_eq!(sizes, [Some(1)], "of the first that has it");
    assert_eq!(store.content.lower_blobs(Digest::of(b"second"), 6).len(), 1);
}

#[test]
fn copy_of_a_blob_is_read_in_steps_that_are_reported() {
    let stores = Stores::new();
    let large: Vec<u8> = (0..crate::CHUNK_BYTES + 7).map(|byte| (byte % 251).to_le_bytes()[0]).collect();
    let lower = Arc::new(Store::open(stores.lower()).unwrap());
    let digest = crate::testing::add_blobs(&lower, [&large])[0];
    drop(lower);
    let store = stores.open();
    let mut steps = Vec::new();
    let mut ingest = begin(&store).keeping_own_copies();
    let size = large.len() as u64;
    let copied = ingest.copy_blob(digest, size, &mut |bytes| {
        steps.push(bytes);
        true
    });
    assert!(copied.unwrap());
    assert_eq!(steps, [crate::CHUNK_BYTES as u64, 7]);
    ingest.commit_blobs().unwrap();
    assert_eq!(store.content.own_blob_size(digest).unwrap(), Some(size));
    let absent = begin(&store).copy_blob(Digest::of(b"absent"), 6, &mut |_| true);
    assert!(matches!(absent, Err(StoreError::MissingBlob { .. })), "{absent:?}");
    stores.unmount();
    let hidden = begin(&store).copy_blob(Digest::of(b"absent"), 6, &mut |_| true);
    assert!(matches!(hidden, Err(StoreError::Hidden { .. })), "{hidden:?}");
}

#[test]
fn copy_that_does_not_fit_is_refused_and_leaves_nothing() {
    let stores = Stores::new();
    let store = stores.open();
    let policy = store.ledger.space_policy();
    store.ledger.set_space_policy(crate::SpacePolicy { quota_bytes: Some(1), ..policy }).unwrap();
    let refused = begin(&store).copy_blob(Digest::of(b"first"), 5, &mut |_| true);
    assert!(matches!(refused, Err(StoreError::Quota { .. })), "{refused:?}");
    assert_eq!(store.content.blobs().unwrap(), []);
}

#[test]
fn blobs_that_this_store_lacks_are_listed_once() {
    let stores = Stores::new();
    let store = stores.open();
    crate::testing::add_blobs(&store, [b"mine"]);
    let [mine, first, absent] = [&b"mine"[..], b"first", b"absent"].map(Digest::of);
    let asked = [(mine, 4), (first, 5), (absent, 6), (first, 5)];
    assert_eq!(store.not_own_blobs(asked).unwrap(), [(first, 5), (absent, 6)]);
    assert_eq!(store.not_own_blobs([(mine, 5)]).unwrap(), [(mine, 5)], "it is shorter");
}

#[test]
fn lower_store_is_opened_once_for_the_look_ups_of_an_operation() {
    let stores = Stores::new();
    let store = stores.open();
    let lower = &store.content.lower.stores[0];
    assert!(is_whole(&store, "site") && lock(&lower.held).root.is_none());
    let held = store.content.hold_lower_stores();
    assert!(is_whole(&store, "site") && lock(&lower.held).root.is_some());
    assert_eq!(lock(&lower.held).operations, 1);
    drop(held);
    assert!(lock(&lower.held).root.is_none() && lock(&lower.held).operations == 0);
}
