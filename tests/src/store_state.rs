//! The state of a store, as facts that tests compare: the actual state, the expected one, and those permitted after a
//! crash.

use std::collections::{BTreeMap, BTreeSet};

use blobd_store::{HistoryRow, Store, StoreError};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use crate::samples::{NAMES, files, reference, weights};
use crate::store_dir::{allocated_bytes, check_blobs, check_rows, staged};
use crate::verbs::{InProcess, Verbs as _};

/// A fact about a store. Names and files are given by their number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Key {
    /// Which file a name stands for, counted from 1; 0 if there is no such model.
    Tag(usize),
    /// 1 if the name is pinned.
    Pin(usize),
    /// How many signatures the model of a name has.
    Signatures(usize),
    /// How many records of this name and file are in the trash.
    Trash(usize, usize),
}

/// All facts about a store; a fact that is not listed is 0.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct StoreState(BTreeMap<Key, usize>);

impl StoreState {
    /// Reads the facts from a store.
    ///
    /// # Panics
    /// When something in it cannot be read or was not stored by a test.
    #[must_use]
    pub fn observe(store: &Store) -> Self {
        let mut state = Self::default();
        let tags = store.names().tags().unwrap();
        assert!(tags.foreign.is_empty(), "{:?}", tags.foreign);
        for tag in tags.references {
            let manifest = store.names().manifest(&tag).unwrap_or_else(|error| panic!("{error}"));
            state.0.insert(Key::Tag(number_of(&tag)), file_of(&manifest) + 1);
            let signatures =
                store.names().signatures(manifest.digest()).unwrap_or_else(|error| panic!("{error}"));
            if !signatures.is_empty() {
                state.0.insert(Key::Signatures(number_of(&tag)), signatures.len());
            }
        }
        for trashed in store.names().trash().unwrap_or_else(|error| panic!("{error}")) {
            let record = Key::Trash(number_of(&trashed.reference), file_of(&trashed.manifest));
            *state.0.entry(record).or_default() += 1;
        }
        let pinned = (0..NAMES.len()).filter(|name| store.names().is_pinned(&reference(*name)));
        state.0.extend(pinned.map(|name| (Key::Pin(name), 1)));
        state
    }

    /// One fact.
    #[must_use]
    pub fn get(&self, key: Key) -> usize {
        self.0.get(&key).copied().unwrap_or_default()
    }

    /// A copy with one fact changed.
    #[must_use]
    pub fn with(&self, key: Key, value: usize) -> Self {
        let mut state = self.clone();
        match value {
            0 => state.0.remove(&key),
            value => state.0.insert(key, value),
        };
        state
    }

    /// A copy with an empty trash.
    #[must_use]
    pub fn without_trash(&self) -> Self {
        let others = self.0.iter().filter(|(key, _)| !matches!(key, Key::Trash(..)));
        Self(others.map(|(key, value)| (*key, *value)).collect())
    }

    /// The facts that differ between two states.
    fn differences(&self, other: &Self) -> BTreeSet<Key> {
        self.0.keys().chain(other.0.keys()).copied().filter(|key| self.get(*key) != other.get(*key)).collect()
    }
}

/// The states that are permitted after a power cut, as the permitted values of each fact.
#[derive(Clone, Debug, Default)]
pub struct Allowed(BTreeMap<Key, BTreeSet<usize>>);

impl Allowed {
    /// Permits only this state.
    #[must_use]
    pub fn only(state: &StoreState) -> Self {
        Self(state.0.iter().map(|(key, value)| (*key, BTreeSet::from([*value]))).collect())
    }

    /// Permits both states, because a step from `before` to `after` was interrupted.
    pub fn widen(&mut self, before: &StoreState, after: &StoreState) {
        for key in before.differences(after) {
            let values = self.0.entry(key).or_insert_with(|| BTreeSet::from([0]));
            values.extend([before.get(key), after.get(key)]);
        }
    }

    /// Permits only `after` in the facts that an acknowledged step has changed, and in its `subject`.
    pub fn settle(&mut self, before: &StoreState, after: &StoreState, subject: Option<Key>) {
        for key in before.differences(after).into_iter().chain(subject) {
            self.0.insert(key, BTreeSet::from([after.get(key)]));
        }
    }

    /// Asserts that a state is permitted.
    ///
    /// # Panics
    /// When it is not.
    pub fn check(&self, found: &StoreState) {
        let none = BTreeSet::from([0]);
        for key in self.0.keys().chain(found.0.keys()) {
            let allowed = self.0.get(key).unwrap_or(&none);
            assert!(
                allowed.contains(&found.get(*key)),
                "{key:?}: found {}, allowed are {allowed:?}",
                found.get(*key)
            );
        }
    }
}

/// Asserts that the history of each name ends with what the name means now, and that no change is missing in it.
///
/// # Panics
/// When it does not.
pub fn check_histories(store: &Store) {
    for name in (0..NAMES.len()).map(reference) {
        // The history of a name in a lower store is there.
        if store.names().lower_place_of(&name).unwrap().is_some() {
            continue;
        }
        let present = store.names().manifest(&name).ok().map(|manifest| manifest.digest());
        match store.names().history(&name) {
            Err(StoreError::NoSuchModel { .. }) => assert_eq!(present, None, "{}", name.short()),
            Err(error) => panic!("{error}"),
            Ok(history) => {
                let digest = |row: &HistoryRow| match row {
                    HistoryRow::Recorded(entry) => entry.digest,
                    HistoryRow::Unrecorded(digest) => panic!("{}: {digest:?} unrecorded", name.short()),
                };
                let digests: Vec<_> = history.rows.iter().map(digest).collect();
                assert_eq!(digests[0], present, "{}", name.short());
            }
        }
    }
}

/// Asserts the invariants of an idle store: every blob has the digest in its name, every model is complete
/// and is exported bit for bit, everything in the trash is complete, nothing is staged, and the counts of
/// used space are those of the disk.
///
/// # Panics
/// When one does not hold.
pub fn check_invariants(verbs: &InProcess) {
    let (store, root) = (&verbs.store, verbs.root());
    check_blobs(root);
    assert_eq!(staged(root), [""; 0]);
    for tag in store.names().tags().unwrap().references {
        let manifest = store.names().manifest(&tag).unwrap();
        check_whole(store, &tag, &manifest);
        let file = verbs.export(&tag.short()).unwrap_or_else(|error| panic!("{}: {error}", tag.short()));
        assert!(file == weights(file_of(&manifest)), "{}: other bytes", tag.short());
    }
    for trashed in store.names().trash().unwrap() {
        check_whole(store, &trashed.reference, &trashed.manifest);
    }
    check_histories(store);
    let on_disk = allocated_bytes(&root.join("blobs")) + allocated_bytes(&root.join("recipes"));
    let records = ["manifests", "origins", "signatures", "history", "trash"]
        .map(|name| allocated_bytes(&root.join(name)));
    let downloads = allocated_bytes(&root.join("partial"));
    assert_eq!(store.ledger().used_bytes(), on_disk + records.iter().sum::<u64>() + downloads, "used bytes");
    assert_eq!(check_rows(root, || verbs.usage()).physical_bytes, on_disk, "physical bytes");
}

/// Asserts that a collection succeeds and leaves nothing to collect, after unfinished downloads were removed.
///
/// # Panics
/// When it does not.
pub fn check_collection(verbs: &InProcess) {
    let before = StoreState::observe(&verbs.store);
    for file in verbs.store.content().partial_files().unwrap() {
        verbs.store.ledger().remove_partial(file).unwrap();
    }
    verbs.gc(false).unwrap_or_else(|error| panic!("gc: {error}"));
    assert_eq!(StoreState::observe(&verbs.store), before, "after gc");
    assert_eq!(verbs.usage().unwrap().reclaimable_bytes, 0, "after gc");
    check_invariants(verbs);
}

fn check_whole(store: &Store, tag: &Reference, manifest: &Manifest) {
    for file in manifest.files() {
        let has = store.content().has_file(file).unwrap_or_else(|error| panic!("{}: {error}", tag.short()));
        assert!(has, "{}: {} is not complete", tag.short(), file.digest);
    }
}

fn number_of(tag: &Reference) -> usize {
    let found = (0..NAMES.len()).find(|name| reference(*name).same_model(tag));
    found.unwrap_or_else(|| panic!("{}: none of the names", tag.short()))
}

fn file_of(manifest: &Manifest) -> usize {
    let digests = manifest.digests();
    // The last one, because a model with a file that is not GGUF also has one that is.
    let found = files().iter().rposition(|file| digests.contains(&file.digest));
    found.unwrap_or_else(|| panic!("{}: none of the files", manifest.digest()))
}
