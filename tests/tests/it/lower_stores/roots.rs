//! Random sequences of verbs on a store above a lower one, compared with two maps in memory: which file each name stands
//! for in either store.
//!
//! A model can be read if each of its blobs is in the store itself, or in the lower one while that is there. Nothing that a
//! lower store has is stored again, nothing that a name needs is collected, and only the steps that act on the lower store
//! change it.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::path::PathBuf;
use std::sync::OnceLock;
use std::time::Duration;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::naming::{PromoteParams, Promoted};
use blobd_server::ops::{self, Requester};
use blobd_store::{SpacePolicy, StoreOptions};
use blobd_tests::model::{End, ModelFile};
use blobd_tests::store_dir::{check_blobs, check_rows, names, snapshot, staged};
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
    Promote {
        name: usize,
    },
    Collect,
    Reopen,
    /// An empty directory takes the place of the lower store, or the other way round.
    Unmount,
    Mount,
    /// By the lower store's own administrator.
    ImportBelow {
        file: usize,
        name: usize,
    },
    /// The same; what the model needs is deleted, whoever uses it above.
    RemoveBelow {
        name: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let name = || 0..NAMES.len();
    let file = || 0..files().len();
    prop_oneof![
        4 => (file(), name()).prop_map(|(file, name)| Step::Import { file, name }),
        3 => (name(), name()).prop_map(|(source, target)| Step::Tag { source, target }),
        3 => name().prop_map(|name| Step::Remove { name }),
        2 => name().prop_map(|name| Step::Promote { name }),
        2 => Just(Step::Collect),
        1 => Just(Step::Reopen),
        2 => Just(Step::Unmount),
        3 => Just(Step::Mount),
        4 => (file(), name()).prop_map(|(file, name)| Step::ImportBelow { file, name }),
        1 => name().prop_map(|name| Step::RemoveBelow { name }),
    ]
}

/// A file, and the names of the blobs of a model of it.
struct Sample {
    bytes: Vec<u8>,
    blobs: BTreeSet<String>,
}

/// Small files that share tensors, and one without any.
fn files() -> &'static [Sample] {
    static FILES: OnceLock<Vec<Sample>> = OnceLock::new();
    FILES.get_or_init(|| {
        let base = ModelFile::dense_of(1, 1, 32);
        let models = [
            base.clone(),
            base.clone().with_changed("output.weight"),
            ModelFile { reversed: true, padding: 5, end: End::Bare, ..base },
            ModelFile::separate_experts(1, 3),
            ModelFile::empty(),
        ];
        models.iter().map(|model| Sample::of(model.bytes())).collect()
    })
}

impl Sample {
    fn of(bytes: Vec<u8>) -> Self {
        let folder = tmpfs_directory();
        let path = folder.path().join("model.gguf");
        fs::write(&path, &bytes).unwrap();
        let verbs = InProcess::open(&folder.path().join("store"));
        verbs.import(&path, Some("m")).unwrap();
        Self { bytes, blobs: names(&verbs.root().join("blobs")).into_iter().collect() }
    }
}

/// Which file each name stands for.
type Names = BTreeMap<&'static str, usize>;

/// A store above a lower one, and the expected content of both.
struct CheckedStores {
    folder: TempDir,
    verbs: Option<InProcess>,
    above: Names,
    below: Names,
    is_mounted: bool,
}

impl CheckedStores {
    fn new() -> Self {
        let folder = tmpfs_directory();
        drop(InProcess::open(&folder.path().join("lower")));
        let mut pair =
            Self { folder, verbs: None, above: Names::new(), below: Names::new(), is_mounted: true };
        pair.reopen();
        pair
    }

    fn reopen(&mut self) {
        drop(self.verbs.take());
        // Without a trash for what other models replace, which has tests of its own.
        let space = SpacePolicy { keep_displaced: Duration::ZERO, ..SpacePolicy::default() };
        let lower = vec![self.folder.path().join("lower")];
        let options = StoreOptions { lower, space, ..StoreOptions::default() };
        self.verbs = Some(InProcess::open_with(&self.folder.path().join("upper"), &options).unwrap());
    }

    fn verbs(&self) -> &InProcess {
        self.verbs.as_ref().unwrap()
    }

    /// Where the lower store is now.
    fn lower(&self) -> PathBuf {
        self.folder.path().join(if self.is_mounted { "lower" } else { "away" })
    }

    fn blobs_above(&self) -> BTreeSet<String> {
        names(&self.verbs().root().join("blobs")).into_iter().collect()
    }

    fn blobs_below(&self) -> BTreeSet<String> {
        names(&self.lower().join("blobs")).into_iter().collect()
    }

    /// The blobs that can be read now.
    fn readable(&self) -> BTreeSet<String> {
        let below = if self.is_mounted { self.blobs_below() } else { BTreeSet::new() };
        &self.blobs_above() | &below
    }

    /// The file that a name stands for now.
    fn file_of(&self, name: &str) -> Option<usize> {
        let below = self.below.get(name).filter(|_| self.is_mounted);
        self.above.get(name).or(below).copied()
    }

    fn is_whole(&self, file: usize) -> bool {
        files()[file].blobs.is_subset(&self.readable())
    }

    fn path_of(&self, file: usize) -> PathBuf {
        let path = self.folder.path().join(format!("{file}.gguf"));
        fs::write(&path, &files()[file].bytes).unwrap();
        path
    }

    fn take(&mut self, step: &Step) {
        let before = snapshot(&self.lower());
        match *step {
            Step::Import { file, name } => self.import(file, NAMES[name]),
            Step::Tag { source, target } => {
                let tagged = self.verbs().tag_with(NAMES[source], NAMES[target], true);
                self.named(NAMES[source], NAMES[target], tagged.map(|_| ()));
            }
            Step::Remove { name } => self.remove(NAMES[name]),
            Step::Promote { name } => self.promote(NAMES[name]),
            Step::Collect => self.collect(),
            Step::Reopen => self.reopen(),
            Step::Unmount => self.set_mounted(false),
            Step::Mount => self.set_mounted(true),
            Step::ImportBelow { file, name } => return self.import_below(file, NAMES[name]),
            Step::RemoveBelow { name } => return self.remove_below(NAMES[name]),
        }
        // The directory itself may have another name now.
        let files = |snapshot: blobd_tests::store_dir::Snapshot| snapshot.into_values().collect::<Vec<_>>();
        assert_eq!(files(snapshot(&self.lower())), files(before), "{step:?} has changed the lower store");
    }

    fn import(&mut self, file: usize, name: &'static str) {
        let before = self.blobs_above();
        self.verbs().import_with(&self.path_of(file), Some(name), true).unwrap();
        self.above.insert(name, file);
        assert!(self.is_whole(file));
        if self.is_mounted {
            let again: Vec<_> = self.blobs_above().difference(&before).cloned().collect();
            assert!(again.iter().all(|blob| !self.blobs_below().contains(blob)), "stored again: {again:?}");
        }
    }

    /// Checks the result of a verb that gives `target` to what `source` stands for.
    fn named(&mut self, source: &str, target: &'static str, result: Result<(), ErrorBody>) {
        match self.file_of(source) {
            None => assert_eq!(result.unwrap_err().code, ErrorCode::NotFound),
            Some(file) if self.is_whole(file) => {
                result.unwrap_or_else(|error| panic!("{source} to {target}: {error}"));
                self.above.insert(target, file);
            }
            Some(_) => drop(result.expect_err("blobs of the model are missing")),
        }
    }

    fn remove(&mut self, name: &'static str) {
        let before = self.verbs().usage().unwrap().physical_bytes;
        let removed = self.verbs().remove(&[name]);
        if self.above.remove(name).is_some() {
            let freed = removed.unwrap().freed_bytes;
            assert_eq!(before - self.verbs().usage().unwrap().physical_bytes, freed);
        } else {
            let expected = if self.file_of(name).is_some() { ErrorCode::Denied } else { ErrorCode::NotFound };
            assert_eq!(removed.unwrap_err().code, expected);
        }
    }

    fn promote(&mut self, name: &'static str) {
        let before = self.blobs_above();
        let promoted = self.run_promote(name);
        self.named(name, name, promoted.as_ref().map(|_| ()).map_err(ErrorBody::clone));
        match promoted {
            Ok(promoted) => {
                let needed = &files()[self.above[name]].blobs;
                assert!(needed.is_subset(&self.blobs_above()));
                assert_eq!(promoted.copied_blobs, needed.difference(&before).count() as u64);
            }
            Err(_) => assert_eq!(self.blobs_above(), before),
        }
    }

    fn run_promote(&self, name: &str) -> Result<Promoted, ErrorBody> {
        let params = PromoteParams { reference: name.parse().unwrap(), dry_run: false };
        let policy = ops::CallerPolicy::default();
        ops::promote(&self.verbs().store, Requester::own(), &policy, &params, &mut |_, _| true)
            .map_err(|error| error.body())
    }

    /// What a name needs stays, whether the lower store is there or not; everything else goes.
    fn collect(&self) {
        let needed: BTreeSet<_> = self.above.values().flat_map(|file| files()[*file].blobs.clone()).collect();
        let before = self.blobs_above();
        let planned = self.verbs().gc(true).unwrap();
        let done = self.verbs().gc(false).unwrap();
        assert_eq!((planned.deleted, planned.freed_bytes), (done.deleted, done.freed_bytes));
        assert_eq!(self.blobs_above(), &before & &needed);
    }

    fn set_mounted(&mut self, mounted: bool) {
        if mounted == self.is_mounted {
            return;
        }
        let (lower, away) = (self.folder.path().join("lower"), self.folder.path().join("away"));
        if mounted {
            fs::remove_dir(&lower).unwrap();
            fs::rename(&away, &lower).unwrap();
        } else {
            fs::rename(&lower, &away).unwrap();
            fs::create_dir(&lower).unwrap();
        }
        self.is_mounted = mounted;
    }

    fn import_below(&mut self, file: usize, name: &'static str) {
        InProcess::open(&self.lower()).import_with(&self.path_of(file), Some(name), true).unwrap();
        self.below.insert(name, file);
    }

    fn remove_below(&mut self, name: &'static str) {
        if self.below.remove(name).is_some() {
            InProcess::open(&self.lower()).remove(&[name]).unwrap();
        }
    }

    fn check(&self) {
        check_blobs(self.verbs().root());
        assert_eq!(staged(self.verbs().root()), [""; 0]);
        check_rows(self.verbs().root(), || self.verbs().usage());
        let list = self.verbs().list().unwrap();
        let listed: BTreeMap<_, _> =
            list.models.into_iter().map(|model| (model.name, model.store.is_some())).collect();
        let is_known = |name: &&&str| self.file_of(name).is_some();
        for name in NAMES.iter().filter(is_known) {
            let shown = name.parse::<blobd_store_format::reference::Reference>().unwrap().short();
            assert_eq!(listed.get(&shown), Some(&!self.above.contains_key(name)), "{shown}: {listed:?}");
            self.check_content(name);
        }
        assert_eq!(listed.len(), NAMES.iter().filter(is_known).count(), "{listed:?}");
    }

    fn check_content(&self, name: &str) {
        let file = self.file_of(name).unwrap();
        match self.verbs().export(name) {
            Ok(bytes) => assert!(bytes == files()[file].bytes, "{name}"),
            Err(error) => assert!(!self.is_whole(file), "{name}: {error}"),
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 24, max_shrink_iters: 200, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn stacked_stores_behave_like_two_maps(steps in proptest::collection::vec(step(), 1..24)) {
        let mut pair = CheckedStores::new();
        for step in &steps {
            pair.take(step);
            pair.check();
        }
        pair.collect();
        pair.check();
    }
}
