//! Random sequences of verbs on a store, compared with a map in memory.
//!
//! After every step, each blob has the digest in its name, and each tag gives exactly the imported bytes. A
//! dry run matches the collection, after which nothing unneeded is left.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use blobd_client::protocol::error::ErrorCode;
use blobd_store::{Ingest, SpacePolicy, StoreOptions};
use blobd_store_format::manifest::Manifest;
use blobd_tests::file_source::ingest_bytes;
use blobd_tests::model::{End, ModelFile};
use blobd_tests::store_dir::{check_blobs, check_rows, names, staged};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::{InProcess, Verbs as _};
use proptest::prelude::*;
use tempfile::TempDir;

const NAMES: [&str; 4] = ["a", "b", "me/c:1", "C.example/d/e:f"];

#[derive(Clone, Debug)]
enum Step {
    Import {
        file: usize,
        name: usize,
    },
    Tag {
        source: usize,
        target: usize,
    },
    Remove {
        name: usize,
    },
    Collect,
    Reopen,
    /// A transaction that is dropped, or whose process dies, before it is committed.
    Abandon {
        file: usize,
        crash: bool,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let name = || 0..NAMES.len();
    prop_oneof![
        4 => (0..files().len(), name()).prop_map(|(file, name)| Step::Import { file, name }),
        2 => (name(), name()).prop_map(|(source, target)| Step::Tag { source, target }),
        3 => name().prop_map(|name| Step::Remove { name }),
        1 => Just(Step::Collect),
        1 => Just(Step::Reopen),
        1 => (0..files().len(), any::<bool>()).prop_map(|(file, crash)| Step::Abandon { file, crash }),
    ]
}

/// Small files that share tensors, in several layouts.
fn files() -> &'static [Vec<u8>] {
    static FILES: OnceLock<Vec<Vec<u8>>> = OnceLock::new();
    FILES.get_or_init(|| {
        let base = ModelFile::dense_of(1, 1, 32);
        [
            base.clone(),
            base.clone().with_changed("output.weight"),
            base.clone().with("general.name", "another header"),
            ModelFile { reversed: true, padding: 5, end: End::Bare, ..base },
            ModelFile::stacked_experts(1, 3),
            ModelFile::separate_experts(1, 3),
            ModelFile::empty(),
        ]
        .iter()
        .map(ModelFile::bytes)
        .collect()
    })
}

/// A store, and the expected file of each name.
struct CheckedStore {
    folder: TempDir,
    verbs: Option<InProcess>,
    expected: BTreeMap<&'static str, usize>,
}

/// Without a trash for what other models replace, which has tests of its own.
fn open(folder: &TempDir) -> InProcess {
    let space = SpacePolicy { keep_displaced: Duration::ZERO, ..SpacePolicy::default() };
    let options = StoreOptions { space, ..StoreOptions::default() };
    InProcess::open_with(&folder.path().join("store"), &options).unwrap()
}

impl CheckedStore {
    fn new() -> Self {
        let folder = tmpfs_directory();
        let verbs = Some(open(&folder));
        Self { folder, verbs, expected: BTreeMap::new() }
    }

    fn verbs(&self) -> &InProcess {
        self.verbs.as_ref().unwrap()
    }

    fn path_of(&self, file: usize) -> PathBuf {
        let path = self.folder.path().join(format!("{file}.gguf"));
        fs::write(&path, &files()[file]).unwrap();
        path
    }

    fn take(&mut self, step: &Step) {
        match *step {
            Step::Import { file, name } => {
                self.verbs().import_with(&self.path_of(file), Some(NAMES[name]), true).unwrap();
                self.expected.insert(NAMES[name], file);
            }
            Step::Tag { source, target } => self.tag(NAMES[source], NAMES[target]),
            Step::Remove { name } => self.remove(NAMES[name]),
            Step::Collect => self.collect(),
            Step::Reopen => {
                drop(self.verbs.take());
                self.verbs = Some(open(&self.folder));
            }
            Step::Abandon { file, crash } => self.abandon(&files()[file], crash),
        }
    }

    fn tag(&mut self, source: &'static str, target: &'static str) {
        let tagged = self.verbs().tag_with(source, target, true);
        match self.expected.get(source).copied() {
            Some(file) => {
                tagged.unwrap();
                self.expected.insert(target, file);
            }
            None => assert_eq!(tagged.unwrap_err().code, ErrorCode::NotFound),
        }
    }

    fn remove(&mut self, name: &'static str) {
        let before = self.verbs().usage().unwrap().physical_bytes;
        let removed = self.verbs().remove(&[name]);
        match self.expected.remove(name) {
            Some(_) => {
                let freed = removed.unwrap().freed_bytes;
                assert_eq!(before - self.verbs().usage().unwrap().physical_bytes, freed);
            }
            None => assert_eq!(removed.unwrap_err().code, ErrorCode::NotFound),
        }
    }

    fn collect(&self) {
        let planned = self.verbs().gc(true).unwrap();
        let before = self.verbs().usage().unwrap();
        assert_eq!(before.reclaimable_bytes, planned.freed_bytes);
        let done = self.verbs().gc(false).unwrap();
        assert_eq!((planned.deleted, planned.freed_bytes), (done.deleted, done.freed_bytes));
        let after = self.verbs().usage().unwrap();
        assert_eq!(before.physical_bytes - after.physical_bytes, done.freed_bytes);
        assert_eq!(self.in_store(), self.needed());
    }

    /// The names of all blobs and recipes in the store.
    fn in_store(&self) -> BTreeSet<String> {
        let root = self.verbs().root();
        let listed = ["blobs", "recipes"].map(|directory| names(&root.join(directory)));
        listed.into_iter().flatten().map(|name| name.trim_end_matches(".json").to_owned()).collect()
    }

    /// The blobs and recipes that the tags need, according to `show`.
    fn needed(&self) -> BTreeSet<String> {
        let mut needed = BTreeSet::new();
        for name in self.expected.keys() {
            let model = self.verbs().store.names().model(&name.parse().unwrap()).unwrap();
            let layers = model.manifest.files().map(|file| file.digest.to_hex());
            needed.extend(layers.chain(model.blob_sizes().map(|(digest, _)| digest.to_hex())));
        }
        needed.into_iter().map(|hex| format!("sha256-{hex}")).collect()
    }

    fn abandon(&mut self, bytes: &[u8], crash: bool) {
        let store = &self.verbs().store;
        let mut ingest = Ingest::begin(store, store.liveness().leases().grant("a test")).unwrap();
        ingest_bytes(&mut ingest, bytes).unwrap();
        if crash {
            // As a dead process leaves it: the staged files are deleted when the store is opened again.
            let directory = self.verbs().root().join("staging");
            assert!(!names(&directory).is_empty());
            std::mem::forget(ingest);
            // The forgotten transaction keeps the store and so its lock: the next store needs another lock
            // file.
            fs::remove_file(self.verbs().root().join("lock")).unwrap();
            self.take(&Step::Reopen);
        }
    }

    fn check(&self) {
        check_blobs(self.verbs().root());
        assert_eq!(staged(self.verbs().root()), [""; 0]);
        check_rows(self.verbs().root(), || self.verbs().usage());
        let listed: BTreeSet<_> =
            self.verbs().list().unwrap().models.into_iter().map(|model| model.name).collect();
        assert_eq!(listed.len(), self.expected.len(), "{listed:?}");
        for (name, file) in &self.expected {
            assert!(self.verbs().export(name).unwrap() == files()[*file], "{name}");
            let digest = self
                .verbs()
                .store
                .names()
                .manifest(&name.parse().unwrap())
                .map(|manifest: Manifest| manifest.digest());
            assert_eq!(self.verbs().show(name).unwrap().digest, digest.unwrap());
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn store_behaves_like_a_map(steps in proptest::collection::vec(step(), 1..24)) {
        let mut pair = CheckedStore::new();
        for step in &steps {
            pair.take(step);
            pair.check();
        }
        pair.collect();
        pair.check();
    }
}
