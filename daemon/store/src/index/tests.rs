//! The catalog against a plain model of it, the copy in every state that a directory can be in,
//! and the two while somebody imports.

use std::collections::BTreeMap;
use std::fs;
use std::path::PathBuf;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::{Piece, Recipe};
use proptest::prelude::*;
use tempfile::TempDir;

use super::cache::{Index, MemoryIndex, Table};
use super::catalog::{BlobFacts, Catalog, RecipeFacts};
use super::{IndexStatus, Name, State, pages};
use crate::{Ingest, Store, lock};

/// An event as the store would note it.
#[derive(Clone, Debug)]
enum Event {
    Blob(u8, Option<u8>),
    Recipe(u8, Option<Vec<u8>>),
    UnreadableRecipe(u8),
}

fn event() -> impl Strategy<Value = Event> {
    prop_oneof![
        (0u8..200, prop::option::of(any::<u8>())).prop_map(|(blob, length)| Event::Blob(blob, length)),
        (0u8..20, prop::option::of(prop::collection::vec(0u8..200, 0..40)))
            .prop_map(|(file, needs)| Event::Recipe(file, needs)),
        (0u8..20).prop_map(Event::UnreadableRecipe),
    ]
}

fn blob(number: u8) -> Digest {
    Digest::of(&[b'b', number])
}

fn file(number: u8) -> Digest {
    Digest::of(&[b'f', number])
}

/// What a catalog should say.
#[derive(Default)]
struct Model {
    blobs: BTreeMap<Digest, BlobFacts>,
    recipes: BTreeMap<Digest, RecipeFacts>,
}

impl Model {
    fn apply(&mut self, catalog: &mut Catalog, event: &Event) {
        match event {
            Event::Blob(number, length) => {
                let facts = length.map(|length| BlobFacts { length: length.into(), bytes_on_disk: 512 });
                self.set_blob(catalog, blob(*number), facts);
            }
            Event::Recipe(number, needs) => {
                let facts = needs.as_ref().map(|needs| {
                    let mut needs: Vec<_> = needs.iter().map(|number| blob(*number)).collect();
                    needs.sort_unstable();
                    needs.dedup();
                    RecipeFacts { bytes_on_disk: 4096, needs: Some(needs) }
                });
                self.set_recipe(catalog, file(*number), facts.as_ref());
            }
            Event::UnreadableRecipe(number) => {
                let facts = RecipeFacts { bytes_on_disk: 8192, needs: None };
                self.set_recipe(catalog, file(*number), Some(&facts));
            }
        }
    }

    fn set_blob(&mut self, catalog: &mut Catalog, digest: Digest, facts: Option<BlobFacts>) {
        let old = match facts {
            Some(facts) => self.blobs.insert(digest, facts),
            None => self.blobs.remove(&digest),
        };
        assert_eq!(catalog.set_blob(digest, facts), old != facts);
    }

    fn set_recipe(&mut self, catalog: &mut Catalog, digest: Digest, facts: Option<&RecipeFacts>) {
        let old = match facts {
            Some(facts) => self.recipes.insert(digest, facts.clone()),
            None => self.recipes.remove(&digest),
        };
        assert_eq!(catalog.set_recipe(digest, facts.cloned()), old.as_ref() != facts);
    }

    fn check(&self, catalog: &Catalog) {
        let on_disk = self.blobs.values().map(|facts| facts.bytes_on_disk);
        let recipes = self.recipes.values().map(|facts| facts.bytes_on_disk);
        assert_eq!(catalog.used_bytes(), on_disk.chain(recipes).sum::<u64>());
        assert_eq!(catalog.blob_count(), self.blobs.len() as u64);
        assert_eq!(catalog.recipe_count(), self.recipes.len() as u64);
        for number in 0..200 {
            assert_eq!(catalog.blob(blob(number)), self.blobs.get(&blob(number)).copied());
        }
        for number in 0..20 {
            assert_eq!(catalog.recipe(file(number)).as_ref(), self.recipes.get(&file(number)));
        }
        for length in 0..=255 {
            let count = self.blobs.values().filter(|facts| facts.length == length).count();
            assert_eq!(catalog.blobs_of_length(length), count as u64);
        }
    }
}

/// Writes what has changed, as the keeper does.
fn write(catalog: &mut Catalog, index: &mut MemoryIndex) {
    let changes = catalog.take_changes();
    let pages = changes.pages.into_iter().map(|number| pages::page_edit(catalog, number));
    let recipes = changes.recipes.into_iter().flat_map(|file| pages::recipe_edits(catalog, file));
    for edit in pages.chain(recipes) {
        edit.apply(index).unwrap();
    }
}

proptest! {
    #[test]
    fn catalog_and_its_copy_say_what_the_events_said(
        events in prop::collection::vec(event(), 0..200),
        write_every in 1usize..50,
    ) {
        let (mut model, mut catalog, mut index) = (Model::default(), Catalog::default(), MemoryIndex::default());
        for (number, event) in events.iter().enumerate() {
            model.apply(&mut catalog, event);
            if number % write_every == 0 {
                write(&mut catalog, &mut index);
            }
        }
        model.check(&catalog);
        write(&mut catalog, &mut index);
        let mut loaded = pages::read(&index).unwrap();
        model.check(&loaded);
        // What was loaded goes on as if it had never been away.
        for event in &events {
            model.apply(&mut loaded, event);
        }
        model.check(&loaded);
    }
}

#[test]
fn rows_that_nothing_needs_are_used_again() {
    let mut catalog = Catalog::default();
    for round in 0..10u8 {
        for number in 0..100 {
            let digest = Digest::of(&[round, number]);
            catalog.set_blob(digest, Some(BlobFacts { length: 1, bytes_on_disk: 512 }));
        }
        for number in 0..100 {
            catalog.set_blob(Digest::of(&[round, number]), None);
        }
    }
    assert_eq!((catalog.row_count(), catalog.used_bytes(), catalog.blob_count()), (100, 0, 0));
}

#[test]
fn recipe_of_many_blobs_is_kept_in_chunks_and_removed_whole() {
    let (mut catalog, mut index) = (Catalog::default(), MemoryIndex::default());
    let mut needs: Vec<Digest> = (0..2500u32).map(|number| Digest::of(&number.to_le_bytes())).collect();
    needs.sort_unstable();
    let facts = RecipeFacts { bytes_on_disk: 4096, needs: Some(needs) };
    catalog.set_recipe(file(1), Some(facts.clone()));
    write(&mut catalog, &mut index);
    let mut chunks = 0;
    index
        .scan(Table::Recipes, &mut |_, value| {
            assert!(value.len() <= 4096, "{} bytes", value.len());
            chunks += 1;
            Ok(())
        })
        .unwrap();
    assert_eq!(chunks, 3);
    assert_eq!(pages::read(&index).unwrap().recipe(file(1)), Some(facts));
    catalog.set_recipe(file(1), None);
    write(&mut catalog, &mut index);
    assert_eq!(pages::read(&index).unwrap().recipe_count(), 0);
    index.scan(Table::Recipes, &mut |key, _| panic!("{key:?} is left")).unwrap();
}

#[test]
fn copy_that_names_no_rows_or_has_gaps_is_refused() {
    let entries: [(Table, Vec<u8>, Vec<u8>); 5] = [
        (Table::Blobs, vec![0, 0, 0, 1], vec![]),
        (Table::Blobs, vec![0], vec![]),
        (Table::Blobs, vec![0, 0, 0, 0], vec![2; 48]),
        (Table::Recipes, [&[7; 32][..], &[0; 4]].concat(), [&[0; 8][..], &[1], &[9, 0, 0, 0]].concat()),
        (Table::Recipes, [&[7; 32][..], &[0, 0, 0, 1]].concat(), vec![]),
    ];
    for (table, key, value) in entries {
        let mut index = MemoryIndex::default();
        index.put(table, &key, &value).unwrap();
        let error = pages::read(&index).err().unwrap().to_string();
        assert!(error.contains("malformed"), "{error}");
    }
}

#[test]
fn tally_counts_each_blob_once_for_each_model() {
    let mut catalog = Catalog::default();
    let size = |bytes| Some(BlobFacts { length: bytes, bytes_on_disk: bytes });
    for (number, bytes) in [(1, 1), (2, 10), (3, 100), (4, 1000), (5, 10_000), (6, 100_000)] {
        catalog.set_blob(blob(number), size(bytes));
    }
    let recipe = |needs: &[u8]| {
        let mut needs: Vec<_> = needs.iter().map(|number| blob(*number)).collect();
        needs.sort_unstable();
        Some(RecipeFacts { bytes_on_disk: 0, needs: Some(needs) })
    };
    catalog.set_recipe(file(1), recipe(&[1, 2]));
    catalog.set_recipe(file(2), recipe(&[2, 3]));
    let mut tally = catalog.tally();
    tally.add(&[file(1), file(1), blob(1)]).unwrap();
    tally.add(&[file(2)]).unwrap();
    tally.add_trashed(&[blob(3), blob(4)]).unwrap();
    tally.keep([blob(5), blob(1)]);
    let measured = tally.finish();
    let shares: Vec<_> =
        measured.models.iter().map(|share| (share.unique_bytes, share.shared_bytes)).collect();
    assert_eq!(shares, [(1, 10), (0, 110)]);
    assert_eq!((measured.needed_bytes, measured.trash_bytes), (111, 1000));
    assert_eq!(measured.unneeded_blobs, [(blob(6), 100_000)]);
}

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

    /// Publishes blobs and a recipe of them; what is not committed is there all the same.
    fn add(&self, store: &Arc<Store>, numbers: std::ops::Range<u32>) {
        let mut ingest = Ingest::begin(store, store.leases().grant("a test")).unwrap();
        let pieces = numbers.clone().map(|number| {
            let blob = ingest.add_bytes(&number.to_le_bytes()).unwrap();
            Piece::Blob { blob, offset: 0, length: 4 }
        });
        let pieces: Vec<_> = pieces.collect();
        let name = Digest::of(format!("{numbers:?}").as_bytes());
        ingest.add_recipe(Recipe::new(name, pieces, vec![]).unwrap());
        let manifest = manifest(name, u64::from(numbers.end - numbers.start) * 4);
        let config = ingest.add_bytes(b"{}").unwrap();
        assert_eq!(config, manifest.config().digest);
        let reference = format!("m{}", numbers.start).parse().unwrap();
        ingest.commit(&reference, &manifest, None).unwrap();
    }

    /// Opens with an index, waits for it, and says whether it was loaded.
    fn with_index(&self, then: impl FnOnce(&Arc<Store>)) {
        let store = self.open();
        store.start_index();
        drop(store.catalog().unwrap());
        then(&store);
        store.stop_index();
    }

    fn blob_count(&self) -> u64 {
        fs::read_dir(self.root().join("blobs")).unwrap().count() as u64
    }

    /// Whatever was done to the index, it is rebuilt and right, and the next start loads it.
    fn check_recovers(&self) {
        self.with_index(|store| {
            let found = store.reindex().unwrap();
            assert_eq!((found.blob_count, found.count), (self.blob_count(), 0));
            assert_eq!(store.index_status(), IndexStatus::Ready);
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
fn index_is_marked_while_nobody_writes_and_only_then() {
    let fixture = Fixture::new();
    fixture.with_index(|_| assert!(!fixture.index("CLEAN").exists()));
    assert!(fixture.index("CLEAN").is_file());
    // A command that only looks leaves it; one that changes something removes it first.
    let store = fixture.open();
    assert_eq!(store.catalog().unwrap().blob_count(), fixture.blob_count());
    assert!(fixture.index("CLEAN").is_file());
    drop(store.begin_change());
    assert!(!fixture.index("CLEAN").exists());
}

#[test]
fn closed_index_is_loaded_and_not_rebuilt() {
    let fixture = Fixture::new();
    fixture.with_index(|store| store.note_use(Digest::of(b"some manifest")));
    // What only a copy knows: it was read, and not the disk.
    fixture.with_index(|store| {
        assert!(store.last_use(Digest::of(b"some manifest")).is_some());
        assert_eq!(store.catalog().unwrap().blob_count(), fixture.blob_count());
        let state = lock(&store.index().0.state);
        assert!(state.noted.is_none() && !state.is_suspect, "it is believed without a scan");
    });
}

#[test]
fn marker_that_does_not_fit_is_not_believed() {
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
            assert_eq!(store.catalog().unwrap().blob_count(), fixture.blob_count(), "{foreign}");
            assert!(store.last_use(Digest::of(b"none")).is_none());
        });
        fixture.check_recovers();
    }
}

#[test]
fn index_of_another_store_is_not_believed() {
    let (fixture, other) = (Fixture::new(), Fixture::new());
    other.add(&other.open(), 100..140);
    other.with_index(|_| ());
    fs::rename(other.root().join("index"), fixture.root().join("index")).unwrap();
    fixture.check_recovers();
}

#[test]
fn damaged_index_costs_a_rebuild_and_no_more() {
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
fn torn_snapshot_is_removed_before_it_is_taken_for_the_newest() {
    let fixture = Fixture::new();
    fixture.with_index(|_| ());
    fs::write(fixture.index("sled/snap.ffffffffffffffff.generating"), b"torn").unwrap();
    fixture.with_index(|store| assert_eq!(store.catalog().unwrap().blob_count(), fixture.blob_count()));
    assert!(!fixture.index("sled/snap.ffffffffffffffff.generating").exists());
}

#[test]
fn whatever_lies_in_place_of_the_index_is_put_aside_once() {
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
fn blob_put_in_by_hand_is_seen() {
    let fixture = Fixture::new();
    let plant = |name: &[u8]| {
        fs::write(fixture.root().join(layout::blob(Digest::of(name))), name).unwrap();
    };
    fixture.with_index(|store| {
        plant(b"while it is open");
        assert_eq!(store.catalog().unwrap().blob_count(), fixture.blob_count());
    });
    plant(b"while it is closed");
    fixture.with_index(|store| {
        assert_eq!(store.catalog().unwrap().blob_count(), fixture.blob_count());
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
        store.start_index();
        for _ in 0..5 {
            assert!(store.reindex().is_ok());
        }
    });
    let found = store.reindex().unwrap();
    assert_eq!((found.blob_count, found.recipe_count, found.count), (fixture.blob_count(), 32, 0));
    store.stop_index();
}

#[test]
fn change_that_is_under_way_at_the_stop_leaves_no_marker() {
    let fixture = Fixture::new();
    let store = fixture.open();
    store.start_index();
    drop(store.catalog().unwrap());
    let change = store.begin_change();
    let begin = Instant::now();
    store.stop_index();
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
    store.start_index();
    assert!(store.catalog().is_err(), "there are no blobs/ any more");
    let deadline = Instant::now() + Duration::from_secs(10);
    while !matches!(store.index_status(), IndexStatus::Degraded(_)) {
        assert!(Instant::now() < deadline, "{:?}", store.index_status());
        thread::sleep(Duration::from_millis(5));
    }
    fs::rename(&hidden, &blobs).unwrap();
    assert_eq!(store.catalog().unwrap().blob_count(), fixture.blob_count());
    // And `reindex` takes it up again.
    assert_eq!(store.reindex().unwrap().count, 0);
    assert_eq!(store.index_status(), IndexStatus::Ready);
    store.stop_index();
}

/// sled follows links and writes to what they lead to.
#[test]
fn index_with_a_link_in_it_is_begun_anew_and_nothing_is_written_through_it() {
    let fixture = Fixture::new();
    let start = || {
        let store = fixture.open();
        store.start_index();
        assert_eq!(store.catalog().unwrap().blob_count(), fixture.blob_count());
        store.stop_index();
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

/// Of two who look at one name at once, what the later one saw is entered, and both find it afterwards.
#[test]
fn look_at_the_disk_holds_no_lock_and_the_last_that_began_counts() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("store")).unwrap();
    drop(store.catalog().unwrap());
    let (index, digest) = (store.index(), blob(1));
    let facts = |length| Some(BlobFacts { length, bytes_on_disk: 512 });
    let enter = |state: &mut State, facts| {
        state.catalog.set_blob(digest, facts);
    };
    let length = || store.catalog_now().unwrap().blob(digest).map(|facts| facts.length);
    let look = |shared: &super::Shared| {
        assert!(shared.state.try_lock().is_ok(), "no lock is held");
        index.note(Name::Blob(digest), |_| Ok(facts(2)), enter);
        assert_eq!(length(), Some(2));
        Ok(facts(1))
    };
    index.note(Name::Blob(digest), look, enter);
    assert_eq!(length(), Some(2), "what is older does not replace it");
    index.note(Name::Blob(digest), |_| Ok(None), enter);
    assert_eq!(length(), None);
}

#[test]
fn whoever_notes_a_change_waits_for_a_later_look_at_the_same_name() {
    let folder = tempfile::tempdir().unwrap();
    let store = Store::open(folder.path().join("store")).unwrap();
    drop(store.catalog().unwrap());
    let (index, digest) = (store.index(), blob(1));
    let enter = |state: &mut State, facts| {
        state.catalog.set_blob(digest, facts);
    };
    let later = |_: &super::Shared| {
        thread::sleep(Duration::from_millis(50));
        Ok(Some(BlobFacts { length: 2, bytes_on_disk: 512 }))
    };
    thread::scope(|scope| {
        let first = |_: &super::Shared| {
            let begun = || lock(&index.0.state).looks.last.get(&Name::Blob(digest)).copied();
            let own = begun();
            scope.spawn(|| index.note(Name::Blob(digest), later, enter));
            while begun() == own {
                thread::yield_now();
            }
            Ok(None)
        };
        index.note(Name::Blob(digest), first, enter);
        let found = store.catalog_now().unwrap().blob(digest);
        assert_eq!(found.map(|facts| facts.length), Some(2));
    });
}
