//! Compares the catalog with a simple model, and with what is decoded from its encoded form.

use std::collections::BTreeMap;

use blobd_store_format::digest::Digest;
use proptest::prelude::*;

use crate::disk::Root;
use crate::index::UsageCounter;
use crate::index::catalog::{BlobFacts, Catalog, RecipeFacts};
use crate::index::database::Database;
use crate::index::encoding::{Decoder, Edit, chunk_key, next_edits};

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

/// The expected content of a catalog.
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

/// The content of the database: pages, and chunks of recipes.
#[derive(Default)]
struct EncodedCopy {
    pages: BTreeMap<Vec<u8>, Vec<u8>>,
    recipes: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl EncodedCopy {
    /// Writes the changes, as the writer does.
    fn write(&mut self, catalog: &mut Catalog) {
        for edit in next_edits(catalog, usize::MAX) {
            match edit {
                Edit::Page { number, value } => drop(self.pages.insert(number.to_be_bytes().into(), value)),
                Edit::Recipe { file, chunks } => {
                    self.recipes.retain(|key, _| !key.starts_with(file.as_bytes()));
                    let chunks = (0..).zip(chunks).map(|(chunk, value)| (chunk_key(file, chunk), value));
                    self.recipes.extend(chunks);
                }
            }
        }
        assert!(!catalog.has_unwritten());
    }

    fn read(&self) -> Option<Catalog> {
        let mut decoder = Decoder::default();
        self.pages.iter().try_for_each(|(key, value)| decoder.add_page(key, value))?;
        self.recipes.iter().try_for_each(|(key, value)| decoder.add_chunk(key, value))?;
        decoder.finish()
    }
}

proptest! {
    #[test]
    fn catalog_and_its_copy_match_the_events(
        events in prop::collection::vec(event(), 0..200),
        write_every in 1usize..50,
    ) {
        let (mut model, mut catalog, mut copy) = (Model::default(), Catalog::default(), EncodedCopy::default());
        for (number, event) in events.iter().enumerate() {
            model.apply(&mut catalog, event);
            if number % write_every == 0 {
                copy.write(&mut catalog);
            }
        }
        model.check(&catalog);
        copy.write(&mut catalog);
        let mut loaded = copy.read().unwrap();
        model.check(&loaded);
        // A loaded catalog can be changed like the original.
        for event in &events {
            model.apply(&mut loaded, event);
        }
        model.check(&loaded);
    }
}

#[test]
fn unused_rows_are_reused() {
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
    assert_eq!((catalog.rows().len(), catalog.used_bytes(), catalog.blob_count()), (100, 0, 0));
}

#[test]
fn recipe_of_many_blobs_is_stored_in_chunks_and_removed_completely() {
    let folder = tempfile::tempdir().unwrap();
    let database = Database::create(&Root::open(folder.path()).unwrap()).unwrap();
    let mut catalog = Catalog::default();
    let mut needs: Vec<Digest> = (0..2500u32).map(|number| Digest::of(&number.to_le_bytes())).collect();
    needs.sort_unstable();
    let facts = RecipeFacts { bytes_on_disk: 4096, needs: Some(needs) };
    let write = |catalog: &mut Catalog| {
        let mut recipes = Vec::new();
        for edit in next_edits(catalog, usize::MAX) {
            if let Edit::Recipe { chunks, .. } = &edit {
                recipes.extend(chunks.iter().map(Vec::len));
            }
            database.apply(edit).unwrap();
        }
        recipes
    };
    catalog.set_recipe(file(1), Some(facts.clone()));
    let chunks = write(&mut catalog);
    assert!(chunks.len() == 3 && chunks.iter().all(|length| *length <= 4096), "{chunks:?}");
    assert_eq!(database.read().unwrap().0.recipe(file(1)), Some(facts));
    catalog.set_recipe(file(1), Some(RecipeFacts { bytes_on_disk: 512, needs: Some(vec![blob(1)]) }));
    write(&mut catalog);
    assert_eq!(database.read().unwrap().0.recipe(file(1)), catalog.recipe(file(1)));
    catalog.set_recipe(file(1), None);
    write(&mut catalog);
    // A chunk that was left over would be malformed without those before it.
    assert_eq!(database.read().unwrap().0.recipe_count(), 0);
}

#[test]
fn copy_with_missing_rows_or_gaps_is_refused() {
    let pages: [(&[u8], Vec<u8>); 3] = [(&[0, 0, 0, 1], vec![]), (&[0], vec![]), (&[0; 4], vec![2; 48])];
    for (key, value) in pages {
        assert_eq!(Decoder::default().add_page(key, &value), None, "{key:?}");
    }
    let free_row = [0; 49];
    let recipe = |number| [&[0; 8][..], &[1], &[number, 0, 0, 0]].concat();
    let recipes = [(0, recipe(9)), (0, recipe(0)), (0, vec![0; 8]), (1, vec![])];
    for (chunk, value) in recipes {
        let mut decoder = Decoder::default();
        decoder.add_page(&[0; 4], &free_row).unwrap();
        let added = decoder.add_chunk(&chunk_key(file(7), chunk), &value);
        assert!(added.and_then(|()| decoder.finish()).is_none(), "{value:?}");
    }
}

#[test]
fn usage_counts_each_blob_once_for_each_model() {
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
    let mut counter = UsageCounter::new(&catalog);
    counter.add(&[file(1), file(1), blob(1)]).unwrap();
    counter.add(&[file(2)]).unwrap();
    counter.add_trashed(&[blob(3), blob(4)]).unwrap();
    counter.keep([blob(5), blob(1)]);
    let usage = counter.finish();
    let shares: Vec<_> = usage.models.iter().map(|share| (share.unique_bytes, share.shared_bytes)).collect();
    assert_eq!(shares, [(1, 10), (0, 110)]);
    assert_eq!((usage.needed_bytes, usage.trash_bytes), (111, 1000));
    assert_eq!(usage.unneeded_blobs, [blob(6)]);
}

#[test]
fn catalog_is_unwritten_until_each_of_its_parts_was_taken() {
    let mut catalog = Catalog::default();
    assert!(!catalog.has_unwritten());
    catalog.set_blob(blob(1), Some(BlobFacts { length: 1, bytes_on_disk: 512 }));
    assert!(catalog.has_unwritten());
    catalog.take_unwritten(10);
    assert!(!catalog.has_unwritten());
    catalog.set_recipe(file(1), Some(RecipeFacts { bytes_on_disk: 512, needs: None }));
    catalog.take_unwritten(10);
    assert!(!catalog.has_unwritten());
    catalog.set_recipe(file(2), Some(RecipeFacts { bytes_on_disk: 512, needs: None }));
    assert!(catalog.has_unwritten());
}

#[test]
fn most_blobs_of_a_recipe_are_known() {
    let mut catalog = Catalog::default();
    assert_eq!(catalog.most_needs(), 0);
    for (number, needs) in [(1, vec![1, 2]), (2, vec![1, 2, 3]), (3, vec![])] {
        let mut needs: Vec<Digest> = needs.into_iter().map(blob).collect();
        needs.sort_unstable();
        catalog.set_recipe(file(number), Some(RecipeFacts { bytes_on_disk: 512, needs: Some(needs) }));
    }
    assert_eq!(catalog.most_needs(), 3);
}

#[test]
fn copy_with_a_blob_twice_is_refused() {
    let row = |state: u8, digest: u8| [&[state][..], &[digest; 32], &[1; 16]].concat();
    let is_read = |rows: &[(u8, u8)]| {
        let page: Vec<u8> = rows.iter().flat_map(|(state, digest)| row(*state, *digest)).collect();
        Decoder::default().add_page(&[0; 4], &page).is_some()
    };
    assert!(is_read(&[(2, 1), (2, 2), (1, 3), (0, 0), (0, 0)]));
    assert!(!is_read(&[(2, 1), (2, 1)]) && !is_read(&[(1, 1), (2, 1)]) && !is_read(&[(3, 1)]));
}
