//! The index of a store: with its database in every state of a directory, and during imports.

use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::{Piece, Recipe};
use blobd_store_format::tensor::TensorFormat;
use tempfile::TempDir;

use super::IndexStatus;
use super::facts::BlobFacts;
use super::writer::MAX_USES;
use crate::{Ingest, Store, lock};

mod catalog;

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
        let mut ingest = Ingest::begin(store, store.liveness().leases().grant("a test")).unwrap();
        let pieces = numbers.clone().map(|number| {
            let blob = ingest.add_bytes(&number.to_le_bytes()).unwrap();
            Piece::Blob { blob, offset: 0, length: 4 }
        });
        let pieces: Vec<_> = pieces.collect();
        let name = Digest::of(format!("{numbers:?}").as_bytes());
        ingest.add_recipe(Recipe::new(name, TensorFormat::Gguf, pieces, vec![]).unwrap());
        let manifest = manifest(name, u64::from(numbers.end - numbers.start) * 4);
        let config = ingest.add_bytes(b"{}").unwrap();
        assert_eq!(config, manifest.config().digest);
        let reference = format!("m{}", numbers.start).parse().unwrap();
        ingest.commit(&reference, &manifest, None).unwrap();
    }

    /// Opens the store with an index, waits for it, runs `then`, and closes it.
    fn with_index(&self, then: impl FnOnce(&Arc<Store>)) {
        let store = self.open();
        store.content().start_index();
        drop(store.content().index().catalog().unwrap());
        then(&store);
        store.content().stop_index();
    }

    fn blob_count(&self) -> u64 {
        fs::read_dir(self.root().join("blobs")).unwrap().count() as u64
    }

    /// Checks that the index is rebuilt correctly, and that the next start loads it.
    fn check_recovers(&self) {
        self.with_index(|store| {
            let found = store.reindex().unwrap();
            assert_eq!((found.blob_count, found.count), (self.blob_count(), 0));
            assert_eq!(store.content().index().status(), IndexStatus::Ready);
        });
        assert!(self.index("CLEAN").is_file());
    }
}

fn manifest(file: Digest, size: u64) -> blobd_store_format::manifest::Manifest {
    use blobd_store_format::descriptor::{Descriptor, MediaType};
    use blobd_store_format::manifest::Manifest;
    let config = Descriptor {
        media_type: MediaType::new(MediaType::DOCKER_CONFIG),
        digest: Digest::of(b"{}"),
        size: 2,
    };
    let layer = Descriptor { media_type: MediaType::new("x/model"), digest: file, size };
    Manifest::compose(config, vec![layer]).unwrap()
}

#[test]
fn index_is_marked_only_while_nothing_writes() {
    let fixture = Fixture::new();
    fixture.with_index(|_| assert!(!fixture.index("CLEAN").exists()));
    assert!(fixture.index("CLEAN").is_file());
    // A command that only reads leaves it; one that changes something removes it first.
    let store = fixture.open();
    assert_eq!(store.content().index().catalog().unwrap().blob_count(), fixture.blob_count());
    assert!(fixture.index("CLEAN").is_file());
    drop(store.content().index().begin_change());
    assert!(!fixture.index("CLEAN").exists());
}

#[test]
fn closed_index_is_loaded_and_not_rebuilt() {
    let fixture = Fixture::new();
    fixture.with_index(|store| store.content().index().note_use(Digest::of(b"some manifest"), 7));
    // Only the database has the use, so it was loaded.
    fixture.with_index(|store| {
        assert!(store.content().index().last_use(Digest::of(b"some manifest")).is_some());
        assert_eq!(store.content().index().catalog().unwrap().blob_count(), fixture.blob_count());
        assert!(!lock(&store.content().index().state).is_stale, "it is used without a scan");
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
                store.content().index().catalog().unwrap().blob_count(),
                fixture.blob_count(),
                "{foreign}"
            );
            assert!(store.content().index().last_use(Digest::of(b"none")).is_none());
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
        assert_eq!(store.content().index().catalog().unwrap().blob_count(), fixture.blob_count());
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
        assert_eq!(store.content().index().catalog().unwrap().blob_count(), fixture.blob_count());
    });
    add_blob(b"while it is closed");
    fixture.with_index(|store| {
        assert_eq!(store.content().index().catalog().unwrap().blob_count(), fixture.blob_count());
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
        store.content().start_index();
        for _ in 0..5 {
            assert!(store.reindex().is_ok());
        }
    });
    let found = store.reindex().unwrap();
    assert_eq!((found.blob_count, found.recipe_count, found.count), (fixture.blob_count(), 32, 0));
    store.content().stop_index();
}

#[test]
fn change_in_progress_at_the_stop_leaves_no_marker() {
    let fixture = Fixture::new();
    let store = fixture.open();
    store.content().start_index();
    drop(store.content().index().catalog().unwrap());
    let change = store.content().index().begin_change();
    let begin = Instant::now();
    store.content().stop_index();
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
    store.content().start_index();
    assert!(store.content().index().catalog().is_err(), "there are no blobs/ any more");
    let deadline = Instant::now() + Duration::from_secs(10);
    while !matches!(store.content().index().status(), IndexStatus::Degraded(_)) {
        assert!(Instant::now() < deadline, "{:?}", store.content().index().status());
        thread::sleep(Duration::from_millis(5));
    }
    fs::rename(&hidden, &blobs).unwrap();
    assert_eq!(store.content().index().catalog().unwrap().blob_count(), fixture.blob_count());
    // `reindex` starts the database again.
    assert_eq!(store.reindex().unwrap().count, 0);
    assert_eq!(store.content().index().status(), IndexStatus::Ready);
    store.content().stop_index();
}

/// sled follows symbolic links and writes to their targets.
#[test]
fn index_with_a_symlink_is_replaced_and_the_target_not_written() {
    let fixture = Fixture::new();
    let start = || {
        let store = fixture.open();
        store.content().start_index();
        assert_eq!(store.content().index().catalog().unwrap().blob_count(), fixture.blob_count());
        store.content().stop_index();
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
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("store")).unwrap();
    drop(store.content().index().catalog().unwrap());
    store.content().index().set_building(true);
    assert!(
        store.content().index().catalog_now().is_none()
            && store.content().index().catalog_unless_building().unwrap().is_none()
    );
    store.content().index().set_building(false);
    assert!(store.content().index().catalog_now().is_some());
}

#[test]
fn index_is_not_locked_while_the_disk_is_read() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("store")).unwrap();
    drop(store.content().index().catalog().unwrap());
    let facts = Some(BlobFacts { length: 1, bytes_on_disk: 512 });
    let read = || {
        assert!(
            store.content().index().state.try_lock().is_ok()
                && store.content().index().uses.try_lock().is_ok()
        );
        Ok(facts)
    };
    let is_news =
        store.content().index().update_entry(DIGEST, read, |catalog, facts| catalog.set_blob(DIGEST, facts));
    assert!(is_news.unwrap());
    assert_eq!(store.content().index().catalog_now().unwrap().blob(DIGEST), facts);
}

#[test]
fn later_of_two_concurrent_reads_of_a_name_is_kept() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("store")).unwrap();
    drop(store.content().index().catalog().unwrap());
    let reads = AtomicU64::new(0);
    // Each reader returns its number, and the first one takes the longest.
    let update = || {
        let read = || {
            let number = reads.fetch_add(1, Ordering::SeqCst) + 1;
            thread::sleep(Duration::from_millis(20 / number));
            Ok(Some(BlobFacts { length: number, bytes_on_disk: 512 }))
        };
        store
            .content()
            .index()
            .update_entry(DIGEST, read, |catalog, facts| catalog.set_blob(DIGEST, facts))
            .unwrap()
    };
    thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(update);
        }
    });
    assert_eq!(store.content().index().catalog_now().unwrap().blob(DIGEST).unwrap().length, 4);
}

#[test]
fn changes_during_loading_are_in_the_catalog() {
    let fixture = Fixture::new();
    fixture.with_index(|_| ());
    for round in 0..5 {
        let store = fixture.open();
        store.content().start_index();
        fixture.add(&store, 100 + round * 100..110 + round * 100);
        let found = store.reindex().unwrap();
        assert_eq!((found.blob_count, found.count), (fixture.blob_count(), 0));
        store.content().stop_index();
    }
}

#[test]
fn uses_are_kept_when_the_index_is_closed() {
    let fixture = Fixture::new();
    let (first, second) = (Digest::of(b"one"), Digest::of(b"two"));
    fixture.with_index(|store| store.content().index().note_use(first, 7));
    fixture.with_index(|store| {
        store.content().index().note_use(second, 8);
        assert!(store.reindex().is_ok(), "the database is written anew");
    });
    fixture.with_index(|store| {
        let [first, second] =
            [first, second].map(|manifest| store.content().index().last_use(manifest).unwrap());
        assert!(first.at <= second.at);
        assert_eq!((first.uid, second.uid), (Some(7), Some(8)));
    });
}

#[test]
fn times_before_uses_were_recorded_are_known_to_be_unknown() {
    let fixture = Fixture::new();
    let mut since = None;
    let known = |store: &Store| {
        while store.content().index().uses_since().is_none() {
            std::thread::yield_now();
        }
        store.content().index().uses_since()
    };
    fixture.with_index(|store| since = known(store));
    fixture.with_index(|store| assert_eq!(known(store), since, "kept with the uses"));
    let folder = tempfile::tempdir().unwrap();
    let command = Store::open(folder.path().join("store")).unwrap();
    assert!(command.content().index().uses_since().is_none(), "no daemon");
}

#[test]
fn oldest_uses_are_dropped_when_there_are_too_many() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("store")).unwrap();
    let count = MAX_USES as u64 + 10;
    let used = |seconds| super::uses::LastUse { seconds, uid: None };
    (0..count).for_each(|second| {
        store.content().index().record_use(Digest::of(&second.to_le_bytes()), used(second));
    });
    let kept = store.content().index().recent_uses();
    assert_eq!(
        (kept.len(), kept.values().min(), kept.values().max()),
        (MAX_USES, Some(&used(10)), Some(&used(count - 1)))
    );
}
