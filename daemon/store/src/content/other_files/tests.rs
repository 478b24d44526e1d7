//! Every file of a store is counted once, under its purpose, and the sum is that of the directory.

use std::fs;
use std::os::unix::fs::MetadataExt as _;
use std::sync::Arc;

use super::*;
use crate::testing::{add_blobs, begin, manifest, name, new_store};
use crate::{Pinner, Store};

/// The bytes on disk of what is at this path in the store, with everything below it.
fn all(store: &Store, path: &str) -> u64 {
    let path = store.path(path);
    let below = fs::read_dir(&path).into_iter().flatten().map(|entry| {
        let below = entry.unwrap().path();
        all(store, below.strip_prefix(store.path("")).unwrap().to_str().unwrap())
    });
    own(&path) + below.sum::<u64>()
}

fn own(path: &Path) -> u64 {
    fs::symlink_metadata(path).unwrap().blocks() * 512
}

/// The same for a directory without its own size.
fn below(store: &Store, path: &str) -> u64 {
    all(store, path) - own(&store.path(path))
}

/// Writes a file of this many KiB, with the directories above it.
fn write(store: &Store, path: &str, kib: usize) -> u64 {
    let path = store.path(path);
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(&path, vec![7; kib << 10]).unwrap();
    own(&path)
}

fn count(store: &Store) -> OtherFiles {
    let mut manifests = VisitedFiles::default();
    store.names.summaries_with_files(&mut manifests).unwrap();
    store.content.other_files(store.content.index().recheck_sizes().unwrap(), &manifests).unwrap()
}

fn store_with_a_model() -> (tempfile::TempDir, Arc<Store>) {
    let (folder, store) = new_store();
    let mut ingest = begin(&store);
    ingest.add_bytes(b"model").unwrap();
    ingest.commit(&name("m"), &manifest(&[b"model"]), Some("a test")).unwrap();
    (folder, store)
}

#[test]
fn every_file_is_counted_under_its_purpose() {
    let (_folder, store) = store_with_a_model();
    let (record, file) = (Digest::of(b"record"), Digest::of(b"file"));
    let before = count(&store);
    store.names.pin(&name("m"), Pinner::User(7)).unwrap();
    let mut records = write(&store, layout::SCRUB_FILE, 5);
    records += write(&store, "scrub.json.new", 6) + write(&store, "store.json.new", 7);
    records += write(&store, layout::origin(record).to_str().unwrap(), 9);
    records += write(&store, &format!("history/{}", layout::recipe_name(record)), 10);
    records += own(&store.path(layout::pin(&name("m"))));
    write(&store, "index/sled/db", 20);
    write(&store, "index/CLEAN", 3);
    let audit = write(&store, "audit/log", 11) + write(&store, "audit/log.1", 12);
    let reserve = write(&store, layout::RESERVE_FILE, 13);
    let quarantined = write(&store, layout::quarantined(file, 7).to_str().unwrap(), 14);
    let trash = write(&store, layout::trashed(record).to_str().unwrap(), 15);
    write(&store, "staging/1-0/0", 16);
    write(&store, "staging/1-0/1", 17);
    write(&store, "staging/stray", 18);
    let download = layout::partial(file);
    let download = download.to_str().unwrap();
    write(&store, &format!("{download}/0"), 19);
    write(&store, &format!("{download}/journal"), 1);
    let directories = ["", "blobs", "recipes", "manifests", "origins", "history", "staging", "partial"];
    let directories = directories.into_iter().chain(["trash", "pins", "quarantine", "audit"]);
    let tag = "registry.ollama.ai/library/m";
    let of_names = ["manifests", "pins"].into_iter().flat_map(|top| {
        Path::new(tag)
            .ancestors()
            .filter(|path| !path.as_os_str().is_empty())
            .map(move |path| Path::new(top).join(path))
    });
    let directories = directories.map(PathBuf::from).chain(of_names);
    let found = count(&store);
    let expected = OtherFiles {
        records: before.records + records,
        index: all(&store, "index"),
        audit,
        reserve,
        directories: directories.map(|path| own(&store.path(path))).sum(),
        quarantine: quarantined,
        trash: [(record, trash)].into(),
        staging: [("1-0".into(), all(&store, "staging/1-0")), ("stray".into(), all(&store, "staging/stray"))]
            .into(),
        downloads: [(file, all(&store, download))].into(),
        foreign: 0,
        foreign_paths: Vec::new(),
    };
    assert_eq!(found, expected);
    assert_eq!(found.trash_bytes(), trash);
    assert_eq!(found.staging_bytes(), below(&store, "staging"));
    assert_eq!(found.total() + below(&store, "blobs") + below(&store, "recipes"), all(&store, ""));
}

#[test]
fn what_is_not_of_the_store_is_foreign_wherever_it_is() {
    let (_folder, store) = store_with_a_model();
    let (record, file) = (Digest::of(b"record"), Digest::of(b"file"));
    let foreign = [
        "notes.txt".to_owned(),
        "pictures".to_owned(),
        "blobs/notes.txt".to_owned(),
        "recipes/notes.txt".to_owned(),
        "manifests/notes.txt".to_owned(),
        "pins/notes.txt".to_owned(),
        "origins/notes.txt".to_owned(),
        "history/notes.txt".to_owned(),
        "trash/notes.txt".to_owned(),
        "partial/notes.txt".to_owned(),
        // A file where a directory belongs, and the other way round.
        layout::partial(file).to_str().unwrap().to_owned(),
        format!("origins/{}", layout::recipe_name(record)),
        layout::trashed(record).to_str().unwrap().to_owned(),
    ];
    for (number, path) in foreign.iter().enumerate() {
        let before = count(&store);
        match number {
            1 | 11 | 12 => write(&store, &format!("{path}/deep/in/it"), 1 + number),
            _ => write(&store, path, 1 + number),
        };
        // What has been listed before is known; entries of `blobs/` and `recipes/` are found by a comparison.
        store.content.index().reindex().unwrap();
        let after = count(&store);
        assert_eq!(after.foreign - before.foreign, all(&store, path), "{path}");
        assert!(after.trash.is_empty() && after.downloads.is_empty(), "{path}: {after:?}");
        assert_eq!(after.records, before.records, "{path}");
        assert_eq!(after.foreign_paths.len(), (1 + number).min(MAX_FOREIGN_PATHS), "{path}");
        if number == 0 {
            assert_eq!(after.foreign_paths, [PathBuf::from(path)]);
        }
    }
    let found = count(&store);
    assert_eq!(found.total() + blobs_and_recipes(&store), all(&store, ""));
}

/// The blobs and recipes, without the foreign files beside them.
fn blobs_and_recipes(store: &Store) -> u64 {
    ["blobs", "recipes"].map(|top| below(store, top) - all(store, &format!("{top}/notes.txt"))).iter().sum()
}

#[test]
fn file_with_several_names_is_counted_once() {
    let (_folder, store) = new_store();
    let blob = add_blobs(&store, [vec![1; 20 << 10]])[0];
    fs::hard_link(store.path(layout::blob(blob)), store.path("copy of a blob")).unwrap();
    assert_eq!(count(&store).foreign, 0, "the index counts it");
    let file = write(&store, "first", 9);
    fs::hard_link(store.path("first"), store.path("second")).unwrap();
    let found = count(&store);
    assert_eq!((found.foreign, found.foreign_paths.len()), (file, 3));
    let copies = file + own(&store.path(layout::blob(blob)));
    assert_eq!(found.total() + below(&store, "blobs") + below(&store, "recipes"), all(&store, "") - copies);
}

#[test]
fn directories_are_entered_down_to_a_limit() {
    let (_folder, store) = new_store();
    let deep = |levels: usize| format!("audit/{}", "d/".repeat(levels));
    fs::create_dir_all(store.path(deep(MAX_LEVELS + 2))).unwrap();
    let audit = |levels: usize| {
        fs::write(store.path(deep(levels)).join("f"), [7; 5000]).unwrap();
        let found = count(&store).audit;
        fs::remove_file(store.path(deep(levels)).join("f")).unwrap();
        found
    };
    let (inside, outside) = (audit(MAX_LEVELS - 1), audit(MAX_LEVELS));
    assert!(inside >= outside + 5000, "{inside} and {outside}");
    assert_eq!(outside, count(&store).audit);
}

#[test]
fn records_are_inspected_again_after_a_change_of_their_directory_only() {
    let (_folder, store) = store_with_a_model();
    let path = |number: u8| layout::origin(Digest::of(&[number]));
    let write = |number| write(&store, path(number).to_str().unwrap(), 9);
    let settle = || std::thread::sleep(std::time::Duration::from_millis(80));
    write(1);
    settle();
    let first = count(&store);
    assert_eq!(count(&store), first);
    assert!(!lock(&store.content.record_sizes.0).is_empty());
    let added = write(2);
    assert_eq!(count(&store).records, first.records + added);
    settle();
    fs::remove_file(store.path(path(1))).unwrap();
    assert!(count(&store).records < first.records + added);
    // A file that has two names must be counted once, so its directory is listed each time.
    settle();
    fs::hard_link(store.path(path(2)), store.path("staging/other")).unwrap();
    fs::rename(store.path(path(2)), store.path(path(3))).unwrap();
    settle();
    lock(&store.content.record_sizes.0).clear();
    count(&store);
    assert!(!lock(&store.content.record_sizes.0).contains_key(layout::ORIGINS));
}
