//! The index of a store: with its database in every state of a directory, and during imports.

use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};
use std::{fs, thread};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use tempfile::TempDir;

use super::IndexStatus;
use super::catalog::BlobFacts;
use super::writer::MAX_USES;
use crate::testing::{begin, manifest, name, new_store, recipe_of};
use crate::{Store, lock};

mod catalog;
mod counts;

const DIGEST: Digest = Digest::from_bytes([1; 32]);

struct Fixture {
    folder: TempDir,
}

impl Fixture {
    /// A store with some blobs and a recipe, closed.
    fn new() -> Self {
        let fixture = Self { folder: tempfile::tempdir().unwrap() };
        fixture.add(&fixture.open(), 0..20);
        fixture
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join("store")
    }

    fn open(&self) -> Arc<Store> {
        Arc::new(Store::open(self.root()).unwrap())
    }

    fn index(&self, name: &str) -> PathBuf {
        self.root().join(layout::INDEX).join(name)
    }

    /// Imports a model of blobs and a recipe.
    fn add(&self, store: &Arc<Store>, numbers: std::ops::Range<u32>) {
        let mut ingest = begin(store);
        let blobs: Vec<_> = numbers.clone().map(u32::to_le_bytes).collect();
        let blobs: Vec<&[u8]> = blobs.iter().map(<[u8; 4]>::as_slice).collect();
        for blob in blobs.iter().copied().chain([&b"{}"[..]]) {
            ingest.add_bytes(blob).unwrap();
        }
        ingest.add_recipe(recipe_of(&blobs));
        let reference = name(&format!("m{}", numbers.start));
        ingest.commit(&reference, &manifest(&[b"{}", &blobs.concat()]), None).unwrap();
    }

    /// Opens the store with an index, waits for it, runs `then`, and closes it.
    fn with_index(&self, then: impl FnOnce(&Arc<Store>)) {
        let store = self.open();
        store.content.start_index();
        drop(store.content.index().catalog().unwrap());
        then(&store);
        store.content.stop_index();
    }

    fn blob_count(&self) -> u64 {
        fs::read_dir(self.root().join("blobs")).unwrap().count() as u64
    }

    /// Checks that the index is rebuilt correctly, and that the next start loads it.
    fn check_recovers(&self) {
        self.with_index(|store| {
            let found = store.reindex().unwrap();
            assert_eq!((found.blob_count, found.count), (self.blob_count(), 0));
            assert_eq!(store.content.index().status(), IndexStatus::Ready);
        });
        assert!(self.index("CLEAN").is_file());
    }
}

#[test]
fn index_is_marked_only_while_nothing_writes() {
    let fixture = Fixture::new();
    fixture.with_index(|_| assert!(!fixture.index("CLEAN").exists()));
    assert!(fixture.index("CLEAN").is_file());
    // A command that only reads leaves it; one that changes something removes it first.
    let store = fixture.open();
    assert_eq!(store.content.index().catalog().unwrap().blob_count(), fixture.blob_count());
    assert!(fixture.index("CLEAN").is_file());
    drop(store.content.index().begin_change());
    assert!(!fixture.index("CLEAN").exists());
}

#[test]
fn closed_index_is_loaded_and_not_rebuilt() {
    let fixture = Fixture::new();
    fixture.with_index(|store| store.content.index().note_use(Digest::of(b"some manifest"), 7));
    // Only the database has the use, so it was loaded.
    fixture.with_index(|store| {
        assert!(store.content.index().last_use(Digest::of(b"some manifest")).is_some());
        assert_eq!(store.content.index().catalog().unwrap().blob_count(), fixture.blob_count());
        assert!(!lock(&store.content.index().state).is_stale, "it is used without a scan");
    });
}

#[test]
fn marker_that_does_not_match_is_ignored() {
    let fixture = Fixture::new();
    fixture.with_index(|_| ());
    let marker = fs::read_to_string(fixture.index("CLEAN")).unwrap();
    let another_store = {
        let other = Fixture::new();
        other.with_index(|_| ());
        fs::read_to_string(other.index("CLEAN")).unwrap()
    };
    for foreign in [
        String::new(),
        marker[..marker.len() / 2].to_owned(),
        "\u{0}\u{0}\u{0}".to_owned(),
        another_store,
        marker.replace("\"format\":1", "\"format\":2"),
        marker.replace("\"blob_count\":21", "\"blob_count\":20"),
        marker.replace("\"recipe_count\":1", "\"recipe_count\":2"),
    ] {
        assert_ne!(foreign, marker);
        fs::write(fixture.index("CLEAN"), &foreign).unwrap();
        fixture.with_index(|store| {
            assert_eq!(
                store.content.index().catalog().unwrap().blob_count(),
                fixture.blob_count(),
                "{foreign}"
            );
            assert!(store.content.index().last_use(Digest::of(b"none")).is_none());
        });
        fixture.check_recovers();
    }
}

#[test]
fn index_of_another_store_is_ignored() {
    let (fixture, other) = (Fixture::new(), Fixture::new());
    other.add(&other.open(), 100..140);
    other.with_index(|_| ());
    fs::rename(other.root().join("index"), fixture.root().join("index")).unwrap();
    fixture.check_recovers();
}

#[test]
fn damaged_index_is_rebuilt() {
    let fixture = Fixture::new();
    fixture.with_index(|_| ());
    let mut seed = 1u32;
    let mut random = move || {
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        usize::try_from(seed >> 8).unwrap()
    };
    for _ in 0..8 {
        for entry in fs::read_dir(fixture.index("sled")).unwrap() {
            let path = entry.unwrap().path();
            if path.is_file() && path.metadata().unwrap().len() > 0 {
                let mut bytes = fs::read(&path).unwrap();
                for _ in 0..50 {
                    let place = random() % bytes.len();
                    bytes[place] ^= u8::try_from(random() % 255).unwrap() + 1;
                }
                bytes.truncate(bytes.len() - random() % (bytes.len() / 2));
                fs::write(&path, bytes).unwrap();
            }
        }
        fixture.check_recovers();
    }
}

#[test]
fn torn_snapshot_is_removed_before_opening() {
    let fixture = Fixture::new();
    fixture.with_index(|_| ());
    fs::write(fixture.index("sled/snap.ffffffffffffffff.generating"), b"torn").unwrap();
    fixture.with_index(|store| {
        assert_eq!(store.content.index().catalog().unwrap().blob_count(), fixture.blob_count());
    });
    assert!(!fixture.index("sled/snap.ffffffffffffffff.generating").exists());
}

#[test]
fn file_in_place_of_the_index_is_renamed_and_kept_once() {
    let fixture = Fixture::new();
    for _ in 0..2 {
        let index = fixture.root().join("index");
        if index.exists() {
            fs::remove_dir_all(&index).unwrap();
        }
        fs::write(&index, b"not a directory").unwrap();
        fixture.check_recovers();
    }
    let names = fs::read_dir(fixture.root()).unwrap().map(|entry| entry.unwrap().file_name());
    let aside = names.filter(|name| name.to_string_lossy().starts_with("index.bad-")).count();
    assert_eq!(aside, 1);
}

#[test]
fn blob_added_by_another_process_is_detected() {
    let fixture = Fixture::new();
    let add_blob = |name: &[u8]| {
        fs::write(fixture.root().join(layout::blob(Digest::of(name))), name).unwrap();
    };
    fixture.with_index(|store| {
        add_blob(b"while it is open");
        assert_eq!(store.content.index().catalog().unwrap().blob_count(), fixture.blob_count());
    });
    add_blob(b"while it is closed");
    fixture.with_index(|store| {
        assert_eq!(store.content.index().catalog().unwrap().blob_count(), fixture.blob_count());
        fs::remove_file(fixture.root().join(layout::blob(Digest::of(b"while it is closed")))).unwrap();
        assert_eq!(store.reindex().unwrap().count, 1);
        assert_eq!(store.reindex().unwrap().count, 0);
    });
}

#[test]
fn imports_during_a_rebuild_are_not_lost() {
    let fixture = Fixture::new();
    fixture.add(&fixture.open(), 1000..2000);
    let store = fixture.open();
    thread::scope(|scope| {
        let (store, fixture) = (&store, &fixture);
        for importer in 1..4u32 {
            scope.spawn(move || {
                for round in 0..10 {
                    let first = importer * 10_000 + round * 100;
                    fixture.add(store, first..first + 10);
                }
            });
        }
        store.content.start_index();
        for _ in 0..5 {
            assert!(store.reindex().is_ok());
        }
    });
    let found = store.reindex().unwrap();
    assert_eq!((found.blob_count, found.recipe_count, found.count), (fixture.blob_count(), 32, 0));
    store.content.stop_index();
}

#[test]
fn change_in_progress_at_the_stop_leaves_no_marker() {
    let fixture = Fixture::new();
    let store = fixture.open();
    store.content.start_index();
    drop(store.content.index().catalog().unwrap());
    let change = store.content.index().begin_change();
    let begin = Instant::now();
    store.content.stop_index();
    assert!(begin.elapsed() < Duration::from_secs(9));
    drop(change);
    assert!(!fixture.index("CLEAN").exists());
}

#[test]
fn unusable_index_directory_leaves_a_catalog_in_memory() {
    let fixture = Fixture::new();
    let (store, blobs) = (fixture.open(), fixture.root().join("blobs"));
    let hidden = fixture.folder.path().join("hidden");
    fs::rename(&blobs, &hidden).unwrap();
    store.content.start_index();
    assert!(store.content.index().catalog().is_err(), "there are no blobs/ any more");
    let deadline = Instant::now() + Duration::from_secs(10);
    while !matches!(store.content.index().status(), IndexStatus::Degraded(_)) {
        assert!(Instant::now() < deadline, "{:?}", store.content.index().status());
        thread::sleep(Duration::from_millis(5));
    }
    fs::rename(&hidden, &blobs).unwrap();
    assert_eq!(store.content.index().catalog().unwrap().blob_count(), fixture.blob_count());
    // `reindex` starts the database again.
    assert_eq!(store.reindex().unwrap().count, 0);
    assert_eq!(store.content.index().status(), IndexStatus::Ready);
    store.content.stop_index();
}

/// sled follows symbolic links and writes to their targets.
#[test]
fn index_with_a_symlink_is_replaced_and_the_target_not_written() {
    let fixture = Fixture::new();
    let start = || {
        let store = fixture.open();
        store.content.start_index();
        assert_eq!(store.content.index().catalog().unwrap().blob_count(), fixture.blob_count());
        store.content.stop_index();
    };
    start();
    let (database, outside) = (fixture.root().join("index/sled/db"), fixture.folder.path().join("outside"));
    assert!(fixture.root().join("index/CLEAN").is_file() && database.is_file());
    fs::rename(&database, &outside).unwrap();
    std::os::unix::fs::symlink(&outside, &database).unwrap();
    let before = fs::read(&outside).unwrap();
    start();
    assert!(fs::read(&outside).unwrap() == before, "the link is followed");
    assert!(database.symlink_metadata().unwrap().is_file(), "a new one is in its place");
}

#[test]
fn catalog_that_is_being_built_is_not_waited_for() {
    let (_folder, store) = new_store();
    drop(store.content.index().catalog().unwrap());
    store.content.index().set_building(true);
    assert!(
        store.content.index().catalog_now().is_none()
            && store.content.index().catalog_unless_building().unwrap().is_none()
    );
    store.content.index().set_building(false);
    assert!(store.content.index().catalog_now().is_some());
}

#[test]
fn index_is_not_locked_while_the_disk_is_read() {
    let (_folder, store) = new_store();
    drop(store.content.index().catalog().unwrap());
    let facts = Some(BlobFacts { length: 1, bytes_on_disk: 512 });
    let read = || {
        assert!(
            store.content.index().state.try_lock().is_ok() && store.content.index().uses.try_lock().is_ok()
        );
        Ok(facts)
    };
    let is_news =
        store.content.index().update_entry(DIGEST, read, |catalog, facts| catalog.set_blob(DIGEST, facts));
    assert!(is_news.unwrap());
    assert_eq!(store.content.index().catalog_now().unwrap().blob(DIGEST), facts);
}

#[test]
fn later_of_two_concurrent_reads_of_a_name_is_kept() {
    let (_folder, store) = new_store();
    drop(store.content.index().catalog().unwrap());
    let reads = AtomicU64::new(0);
    // Each reader returns its number, and the first one takes the longest.
    let update = || {
        let read = || {
            let number = reads.fetch_add(1, Ordering::SeqCst) + 1;
            thread::sleep(Duration::from_millis(20 / number));
            Ok(Some(BlobFacts { length: number, bytes_on_disk: 512 }))
        };
        store
            .content
            .index()
            .update_entry(DIGEST, read, |catalog, facts| catalog.set_blob(DIGEST, facts))
            .unwrap()
    };
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(update);
        }
    });
    assert_eq!(store.content.index().catalog_now().unwrap().blob(DIGEST).unwrap().length, 4);
}

#[test]
fn changes_during_loading_are_in_the_catalog() {
    let fixture = Fixture::new();
    fixture.with_index(|_| ());
    for round in 0..5 {
        let store = fixture.open();
        store.content.start_index();
        fixture.add(&store, 100 + round * 100..110 + round * 100);
        let found = store.reindex().unwrap();
        assert_eq!((found.blob_count, found.count), (fixture.blob_count(), 0));
        store.content.stop_index();
    }
}

#[test]
fn uses_are_kept_when_the_index_is_closed() {
    let fixture = Fixture::new();
    let (first, second) = (Digest::of(b"one"), Digest::of(b"two"));
    fixture.with_index(|store| store.content.index().note_use(first, 7));
    fixture.with_index(|store| {
        store.content.index().note_use(second, 8);
        assert!(store.reindex().is_ok(), "the database is rewritten");
    });
    fixture.with_index(|store| {
        let [first, second] =
            [first, second].map(|manifest| store.content.index().last_use(manifest).unwrap());
        assert!(first.at <= second.at);
        assert_eq!((first.uid, second.uid), (Some(7), Some(8)));
    });
}

#[test]
fn times_before_uses_were_recorded_are_known_to_be_unknown() {
    let fixture = Fixture::new();
    let mut since = None;
    let known = |store: &Store| {
        while store.content.index().uses_since().is_none() {
            std::thread::yield_now();
        }
        store.content.index().uses_since()
    };
    fixture.with_index(|store| since = known(store));
    fixture.with_index(|store| assert_eq!(known(store), since, "kept with the uses"));
    let (_folder, command) = new_store();
    assert!(command.content.index().uses_since().is_none(), "no daemon");
}

#[test]
fn oldest_uses_are_dropped_when_there_are_too_many() {
    let (_folder, store) = new_store();
    let count = MAX_USES as u64 + 10;
    let used = |seconds| super::database::LastUse { seconds, uid: None };
    (0..count).for_each(|second| {
        store.content.index().record_use(Digest::of(&second.to_le_bytes()), used(second));
    });
    let kept = store.content.index().recent_uses();
    assert_eq!(
        (kept.len(), kept.values().min(), kept.values().max()),
        (MAX_USES, Some(&used(10)), Some(&used(count - 1)))
    );
}

#[test]
fn files_with_several_names_are_found() {
    use std::os::unix::fs::MetadataExt as _;
    let (folder, store) = new_store();
    let digest = crate::testing::add_blobs(&store, [b"x"])[0];
    let linked = || store.content.index().recheck_sizes().unwrap();
    assert!(linked().is_empty());
    let blob = folder.path().join("store").join(layout::blob(digest));
    fs::hard_link(&blob, folder.path().join("copy")).unwrap();
    let found = fs::metadata(&blob).unwrap();
    assert_eq!(linked(), [(found.dev(), found.ino())].into());
}

#[test]
fn sizes_that_another_program_has_changed_are_corrected() {
    let (_folder, store) = new_store();
    let recipe = recipe_of(&[b"x"]);
    let blob = crate::testing::add_blobs(&store, [b"x"])[0];
    let path = store.path(layout::recipe(recipe.file()));
    fs::write(&path, recipe.to_json()).unwrap();
    store.reindex().unwrap();
    let used = || store.content.index().catalog_now().unwrap().used_bytes();
    let on_disk = |path: &std::path::Path| {
        use std::os::unix::fs::MetadataExt as _;
        fs::metadata(path).unwrap().blocks() * 512
    };
    let both = || on_disk(&store.path(layout::blob(blob))) + on_disk(&path);
    assert_eq!(used(), both());
    // The times of the directories do not show it.
    for (path, kib) in [(store.path(layout::blob(blob)), 20), (path.clone(), 40)] {
        fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o644)).unwrap();
        let mut content = fs::read(&path).unwrap();
        content.resize(kib << 10, b' ');
        fs::write(&path, content).unwrap();
        assert_ne!(used(), both());
        store.content.index().recheck_sizes().unwrap();
        assert_eq!(used(), both());
    }
}

#[test]
fn foreign_entries_are_listed_with_their_paths() {
    let (_folder, store) = new_store();
    for path in ["blobs/notes.txt", "recipes/notes.txt"] {
        fs::write(store.path(path), "").unwrap();
    }
    let foreign = || store.content.index().foreign_entries().unwrap();
    let both = ["blobs/notes.txt", "recipes/notes.txt"].map(PathBuf::from);
    assert_eq!(foreign(), both);
    fs::write(store.path("blobs/more.txt"), "").unwrap();
    assert_eq!(foreign(), both, "they are known until the next comparison");
    store.reindex().unwrap();
    assert_eq!(foreign().len(), 3);
}

#[test]
fn differences_of_blobs_and_recipes_are_counted() {
    let (_folder, store) = new_store();
    store.reindex().unwrap();
    let rebuilds = || store.content.events().index_rebuilds;
    let before = rebuilds();
    for number in 0..3_u8 {
        fs::write(store.path(layout::blob(Digest::of(&[number]))), [number]).unwrap();
    }
    for parts in [&[&b"a"[..]][..], &[b"b", b"c"]] {
        let recipe = recipe_of(parts);
        fs::write(store.path(layout::recipe(recipe.file())), recipe.to_json()).unwrap();
    }
    let differences =
        |blob_count, recipe_count, count| super::Differences { blob_count, recipe_count, count };
    assert_eq!(store.reindex().unwrap(), differences(3, 2, 5));
    assert_eq!(store.reindex().unwrap(), differences(3, 2, 0));
    assert_eq!(rebuilds() - before, 2);
    fs::remove_file(store.path(layout::blob(Digest::of(&[0])))).unwrap();
    fs::remove_file(store.path(layout::recipe(Digest::of(b"a")))).unwrap();
    assert_eq!(store.reindex().unwrap(), differences(2, 1, 2));
}

#[test]
fn failed_comparison_leaves_the_catalog_unbuilt_or_as_it_was() {
    let (_folder, store) = new_store();
    let index = store.content.index();
    let hide = || fs::rename(store.path("recipes"), store.path("away")).unwrap();
    let show = || fs::rename(store.path("away"), store.path("recipes")).unwrap();
    hide();
    assert!(index.catalog().is_err());
    assert_eq!(index.status(), IndexStatus::Unused);
    show();
    assert!(index.catalog().is_ok());
    assert_eq!(index.status(), IndexStatus::Ready);
    hide();
    assert!(index.reindex().is_err());
    assert_eq!(index.status(), IndexStatus::Ready);
    show();
    index.set_building(true);
    assert_eq!(index.status(), IndexStatus::Building);
}

#[test]
fn own_changes_are_not_taken_for_those_of_other_programs() {
    let (_folder, store) = new_store();
    drop(store.content.index().catalog().unwrap());
    let is_stale = || {
        store.content.index().detect_foreign_changes();
        lock(&store.content.index().state).is_stale
    };
    crate::testing::add_blobs(&store, [b"own"]);
    assert!(!is_stale());
    let change = store.content.index().begin_change();
    fs::write(store.path(layout::blob(DIGEST)), "x").unwrap();
    assert!(!is_stale(), "a change of our own is in progress");
    drop(change);
    assert!(!is_stale());
    fs::write(store.path("recipes/notes.txt"), "x").unwrap();
    assert!(is_stale());
}

#[test]
fn latest_use_is_kept() {
    let (_folder, store) = new_store();
    let (index, used) = (store.content.index(), |seconds, uid| super::database::LastUse { seconds, uid });
    let last = || index.last_use(DIGEST).map(|last| (last.at, last.uid));
    let at = |seconds| std::time::UNIX_EPOCH + Duration::from_secs(seconds);
    assert_eq!(last(), None);
    for (seconds, uid, expected) in [
        (50, Some(1), (50, Some(1))),
        (40, Some(2), (50, Some(1))),
        (50, None, (50, None)),
        (60, Some(3), (60, Some(3))),
    ] {
        index.record_use(DIGEST, used(seconds, uid));
        assert_eq!(last(), Some((at(expected.0), expected.1)));
    }
    index.note_use(DIGEST, 9);
    assert!(last().unwrap().0 > at(1_700_000_000) && last().unwrap().1 == Some(9));
}

#[test]
fn write_that_takes_too_long_is_reported() {
    use super::WRITE_LIMIT;
    use super::state::Writer;
    let (_folder, store) = new_store();
    let index = store.content.index();
    drop(index.catalog().unwrap());
    let status = |busy_since| {
        lock(&index.state).writer = Writer::Running { busy_since, is_stopping: false };
        index.status()
    };
    assert_eq!(status(None), IndexStatus::Ready);
    assert_eq!(status(Some(Instant::now())), IndexStatus::Ready);
    let before = Instant::now().checked_sub(WRITE_LIMIT + Duration::from_millis(1)).unwrap();
    assert!(matches!(status(Some(before)), IndexStatus::Degraded(_)));
    lock(&index.state).writer = Writer::Failed("a test".to_owned());
    assert_eq!(index.status(), IndexStatus::Degraded("a test".to_owned()));
}
