//! Power cuts and kills in the middle of random sequences of verbs, on a disk that forgets whatever
//! was not synced ([`blobd_tests::crash_disk`]).
//!
//! After each: the store opens without help, every blob has the digest of its name, every model
//! and everything in the trash is whole, what was acknowledged is there, what was removed is gone,
//! and what was on its way has happened or not. The sequence then goes on with what was found.
//! That this notices a sync that is missing is a test of its own.

use std::fs;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::sync::Arc;

use blobd_store::{Durability, Ingest, Store, StoreOptions};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::manifest::Manifest;
use blobd_tests::crash_disk::{CrashDisk, Dice, Omission};
use blobd_tests::offers;
use blobd_tests::places::fast_folder;
use blobd_tests::samples::{EMPTY, LARGE, LARGE_RELATIVE, MANY, NAMES, WHOLE, files, reference};
use blobd_tests::steps::Step;
use blobd_tests::verbs::InProcess;
use blobd_tests::world::{Allowed, World, check_collection, check_promises};
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use tempfile::TempDir;

/// An entry of a sequence.
#[derive(Clone, Copy, Debug)]
struct Entry {
    action: Action,
    cut: Option<Cut>,
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Take(Step),
    Reopen,
}

/// The end of a process: after so many calls to the disk, or with the entry if that takes fewer.
#[derive(Clone, Copy, Debug)]
struct Cut {
    calls: u64,
    end: End,
}

#[derive(Clone, Copy, Debug)]
enum End {
    /// The process dies, the machine runs on.
    Kill,
    /// The power fails; the seed decides what is found afterwards. With a number, it fails once more
    /// after so many calls of the process that opens the store again.
    Power { seed: u64, again: Option<u64> },
}

fn action() -> impl Strategy<Value = Action> {
    let name = || 0..NAMES.len();
    let step = prop_oneof![
        8 => (0..LARGE, name()).prop_map(|(file, name)| Step::Import { file, name }),
        1 => (LARGE..=MANY, name()).prop_map(|(file, name)| Step::Import { file, name }),
        4 => (0..LARGE, name()).prop_map(|(file, name)| Step::Pull { file, name }),
        1 => (LARGE..=WHOLE, name()).prop_map(|(file, name)| Step::Pull { file, name }),
        2 => (0..=WHOLE, name()).prop_map(|(file, name)| Step::PullInTwoParts { file, name }),
        3 => (name(), name()).prop_map(|(source, target)| Step::Tag { source, target }),
        4 => name().prop_map(|name| Step::Remove { name }),
        3 => name().prop_map(|name| Step::PutAside { name }),
        3 => name().prop_map(|name| Step::Undelete { name }),
        3 => (name(), prop::bool::weighted(0.4)).prop_map(|(name, pinned)| Step::Pin { name, pinned }),
        2 => Just(Step::Collect),
        1 => (0..WHOLE).prop_map(|file| Step::Abandon { file }),
    ];
    prop_oneof![12 => step.prop_map(Action::Take), 1 => Just(Action::Reopen)]
}

fn cut() -> impl Strategy<Value = Cut> {
    let calls = prop_oneof![0..12_u64, 0..120_u64, 0..2000_u64];
    let power = (any::<u64>(), prop::option::weighted(0.2, 0..30_u64))
        .prop_map(|(seed, again)| End::Power { seed, again });
    let end = prop_oneof![1 => Just(End::Kill), 3 => power];
    (calls, end).prop_map(|(calls, end)| Cut { calls, end })
}

fn sequence() -> impl Strategy<Value = Vec<Entry>> {
    let entry =
        (action(), prop::option::weighted(0.4, cut())).prop_map(|(action, cut)| Entry { action, cut });
    prop::collection::vec(entry, 1..20)
}

/// A store on a disk that forgets, and what may be found in it after a power cut now.
struct Machine {
    folder: TempDir,
    durability: Durability,
    omission: Option<Omission>,
    /// How often the power has failed: each time what is left lies in another directory.
    life: usize,
    disk: Arc<CrashDisk>,
    verbs: Option<InProcess>,
    allowed: Allowed,
}

impl Machine {
    fn new(durability: Durability, omission: Option<Omission>) -> Self {
        let folder = fast_folder();
        let root = folder.path().join("0");
        fs::create_dir(&root).unwrap();
        let disk = Arc::new(CrashDisk::new(&root, &folder.path().join("0-shadow")).without(omission));
        let allowed = Allowed::default();
        let mut machine = Self { folder, durability, omission, life: 0, disk, verbs: None, allowed };
        machine.reopen();
        machine
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join(self.life.to_string())
    }

    fn options(&self) -> StoreOptions {
        StoreOptions { disk: self.disk.clone(), durability: self.durability, ..StoreOptions::default() }
    }

    /// May fail when the power does, and only then.
    fn reopen(&mut self) {
        self.verbs = None;
        match InProcess::open_with(&self.root(), &self.options()) {
            Ok(verbs) => self.verbs = Some(verbs),
            Err(error) => assert!(self.disk.is_cut(), "{error}"),
        }
    }

    fn follow(&mut self, entry: Entry) {
        if let Some(cut) = entry.cut {
            self.disk.cut_after(cut.calls);
        }
        match entry.action {
            Action::Take(step) => self.take(step),
            Action::Reopen => self.reopen(),
        }
        let Some(cut) = entry.cut else { return };
        self.verbs = None;
        match cut.end {
            End::Kill => self.disk.restore(),
            End::Power { seed, again } => self.lose_power(seed, again),
        }
        self.reopen();
        self.allowed.check(&World::observe(&self.verbs.as_ref().unwrap().store));
    }

    fn take(&mut self, step: Step) {
        let store = &self.verbs.as_ref().unwrap().store;
        let before = World::observe(store);
        let outcomes = step.outcomes(&before);
        match step.take(store) {
            Ok(()) => {
                let after = World::observe(store);
                assert!(outcomes.worlds.contains(&after), "{step:?} led from {before:?} to {after:?}");
                self.allowed.settle(&before, &after, step.subject());
            }
            Err(_) if self.disk.is_cut() => {
                outcomes.worlds.iter().for_each(|after| self.allowed.widen(&before, after));
            }
            Err(error) => {
                assert!(outcomes.refusals.contains(&error.code), "{step:?}: {error}");
                assert_eq!(World::observe(store), before, "{step:?}");
            }
        }
    }

    /// What is found then is the beginning of another life, in which all of it is durable.
    fn lose_power(&mut self, seed: u64, again: Option<u64>) {
        self.crash(&mut Dice::new(seed));
        if let Some(calls) = again {
            self.disk.cut_after(calls);
            self.reopen();
            self.verbs = None;
            self.crash(&mut Dice::new(seed.rotate_left(7)));
        }
        let verbs = InProcess::open(&self.root());
        let found = World::observe(&verbs.store);
        self.allowed.check(&found);
        check_promises(&verbs);
        if seed.is_multiple_of(3) {
            check_collection(&verbs);
        }
        self.allowed = Allowed::only(&found);
        drop(verbs);
        self.adopt();
    }

    fn crash(&mut self, dice: &mut Dice) {
        let before = self.root();
        self.life += 1;
        self.disk.crash(dice, &self.root());
        fs::remove_dir_all(before).unwrap();
        self.adopt();
    }

    /// Puts a disk of its own under what was found.
    fn adopt(&mut self) {
        let shadow = self.folder.path().join("shadow");
        let _ = fs::remove_dir_all(&shadow);
        self.disk = Arc::new(CrashDisk::new(&self.root(), &shadow).without(self.omission));
    }
}

fn survives(entries: &[Entry], durability: Durability, omission: Option<Omission>) {
    let mut machine = Machine::new(durability, omission);
    for entry in entries {
        machine.follow(*entry);
    }
    let verbs = machine.verbs.as_ref().unwrap();
    check_promises(verbs);
    check_collection(verbs);
}

/// The number of cases is the environment's `PROPTEST_CASES` if that is set.
fn config(cases: u32) -> ProptestConfig {
    let config =
        ProptestConfig { max_shrink_iters: 300, failure_persistence: None, ..ProptestConfig::default() };
    match std::env::var_os("PROPTEST_CASES") {
        Some(_) => config,
        None => ProptestConfig { cases, ..config },
    }
}

proptest! {
    #![proptest_config(config(64))]

    #[test]
    fn what_was_acknowledged_survives_and_nothing_is_ever_torn(
        entries in sequence(),
        durability in prop::sample::select(&MODES[..]),
    ) {
        survives(&entries, durability, None);
    }
}

/// The same property on a disk that leaves out a sync must fail, or it would prove nothing.
fn is_noticed(omission: Omission) {
    let config = ProptestConfig {
        max_shrink_iters: 0,
        failure_persistence: None,
        cases: 200,
        ..ProptestConfig::default()
    };
    let rng = TestRng::deterministic_rng(RngAlgorithm::ChaCha);
    let mut runner = TestRunner::new_with_rng(config, rng);
    let outcome = runner.run(&sequence(), |entries| {
        survives(&entries, Durability::Auto, Some(omission));
        Ok(())
    });
    println!("{omission:?}: {runner}");
    assert!(outcome.is_err(), "nothing breaks without {omission:?}");
}

#[test]
fn files_that_are_not_synced_are_noticed() {
    is_noticed(Omission::Files("staging"));
}

#[test]
fn dozens_of_blobs_that_are_not_synced_are_noticed() {
    is_noticed(Omission::NewBlobs);
}

/// A tag that was removed by a process that died before it synced the directory, and whose blobs were
/// collected after that.
#[test]
fn collection_that_does_not_sync_first_is_noticed() {
    let survives_all = |omission| {
        let mut cases = (0..4_u64).flat_map(|calls| (0..20_u64).map(move |seed| (calls, seed)));
        cases.all(|(calls, seed)| {
            let entries = [
                whole(Step::Import { file: 3, name: 0 }),
                killed(Step::Remove { name: 0 }, calls),
                without_power_after(Step::Collect, seed),
            ];
            catch_unwind(|| survives(&entries, Durability::Auto, omission)).is_ok()
        })
    };
    assert!(survives_all(None));
    assert!(!survives_all(Some(Omission::Everything)));
}

const MODES: [Durability; 3] = [Durability::Auto, Durability::Fsync, Durability::Syncfs];

/// Which syncs make the content of blobs durable.
fn syncs_of_content(durability: Durability) -> &'static [Omission] {
    match durability {
        Durability::Fsync => &[Omission::Blobs],
        Durability::Syncfs => &[Omission::NewBlobs],
        Durability::Auto => &[Omission::Blobs, Omission::NewBlobs],
    }
}

/// Whether a power cut just after a step loses nothing, whatever it does to what was not synced.
fn survives_power_cuts(
    before: &[Step],
    step: Step,
    durability: Durability,
    omission: Option<Omission>,
) -> bool {
    (0..12_u64).all(|seed| {
        let before = before.iter().copied().map(whole);
        let entries: Vec<_> = before.chain([without_power_after(step, seed)]).collect();
        catch_unwind(|| survives(&entries, durability, omission)).is_ok()
    })
}

/// Every way into the store, in every mode: with all syncs it survives, and at least one of those of
/// its content is needed for that.
fn needs_its_sync(before: &[Step], step: Step) {
    for durability in MODES {
        assert!(survives_power_cuts(before, step, durability, None), "{step:?}, {durability:?}");
        let is_needed =
            |omission: &&Omission| !survives_power_cuts(before, step, durability, Some(**omission));
        let needed = syncs_of_content(durability).iter().find(is_needed);
        assert!(needed.is_some(), "{step:?}, {durability:?}: nothing breaks without a sync");
    }
}

#[test]
fn import_needs_the_sync_of_its_blobs_in_every_mode() {
    needs_its_sync(&[], Step::Import { file: 0, name: 0 });
    needs_its_sync(&[Step::Import { file: 0, name: 0 }], Step::Import { file: 1, name: 1 });
}

#[test]
fn pull_needs_the_sync_of_its_blobs_in_every_mode() {
    needs_its_sync(&[], Step::Pull { file: 0, name: 0 });
    needs_its_sync(&[], Step::Pull { file: MANY, name: 0 });
}

#[test]
fn pull_of_a_file_that_is_not_split_needs_its_sync_in_every_mode() {
    needs_its_sync(&[Step::Import { file: EMPTY, name: 1 }], Step::Pull { file: WHOLE, name: 0 });
}

#[test]
fn pull_that_goes_on_needs_the_sync_of_its_blobs_in_every_mode() {
    needs_its_sync(&[], Step::PullInTwoParts { file: 0, name: 0 });
}

#[test]
fn pull_of_a_relative_needs_the_sync_of_what_it_fetches_in_every_mode() {
    let (relative, step) =
        (Step::Import { file: LARGE, name: 1 }, Step::Pull { file: LARGE_RELATIVE, name: 0 });
    needs_its_sync(&[relative], step);
}

/// A blob that is gone is fetched from where its model came from.
fn repair_survives(durability: Durability, omission: Option<Omission>, seed: u64) -> bool {
    let file = &files()[LARGE];
    let repaired = || {
        let mut machine = Machine::new(durability, omission);
        machine.take(Step::Pull { file: LARGE, name: 0 });
        machine.verbs = None;
        let blobs = machine.root().join("blobs");
        let largest = fs::read_dir(&blobs).unwrap().map(|entry| entry.unwrap().path());
        let largest = largest.max_by_key(|blob| fs::metadata(blob).unwrap().len()).unwrap();
        assert!(fs::metadata(&largest).unwrap().len() > file.bytes.len() as u64 / 2);
        fs::remove_file(&largest).unwrap();
        machine.adopt();
        machine.reopen();
        let done = offers::repair(&machine.verbs.as_ref().unwrap().store).unwrap();
        assert!(done.corrupt.iter().all(|blob| blob.repaired) && done.corrupt.len() == 1, "{done:?}");
        machine.verbs = None;
        machine.crash(&mut Dice::new(seed));
        check_promises(&InProcess::open(&machine.root()));
    };
    catch_unwind(repaired).is_ok()
}

#[test]
fn repair_needs_the_sync_of_its_blobs_in_every_mode() {
    for durability in MODES {
        let survives = |omission| (0..12).all(|seed| repair_survives(durability, omission, seed));
        assert!(survives(None), "{durability:?}");
        let needed = syncs_of_content(durability).iter().find(|omission| !survives(Some(**omission)));
        assert!(needed.is_some(), "{durability:?}: nothing breaks without a sync");
    }
}

/// What brings no blobs is made durable in the same way in every mode.
#[test]
fn change_of_a_name_needs_the_sync_of_its_directory_in_every_mode() {
    const IMPORT: Step = Step::Import { file: 0, name: 0 };
    const ASIDE: Step = Step::PutAside { name: 0 };
    let changes: [(&[Step], Step, &'static str); 5] = [
        (&[IMPORT], Step::Tag { source: 0, target: 1 }, "manifests"),
        (&[IMPORT], Step::Pin { name: 0, pinned: true }, "pins"),
        (&[IMPORT], ASIDE, "trash"),
        (&[IMPORT, ASIDE], Step::Undelete { name: 0 }, "manifests"),
        (&[], Step::Pull { file: 3, name: 0 }, "blobs"),
    ];
    for durability in MODES {
        for (before, step, directory) in changes {
            let survives = |omission| survives_power_cuts(before, step, durability, omission);
            assert!(survives(None), "{step:?}, {durability:?}");
            let without = Some(Omission::Names(directory));
            assert!(
                !survives(without),
                "{step:?}, {durability:?}: nothing breaks without the sync of {directory}"
            );
        }
    }
}

#[test]
fn names_of_blobs_that_are_not_synced_are_noticed() {
    is_noticed(Omission::Names("blobs"));
}

#[test]
fn names_of_recipes_that_are_not_synced_are_noticed() {
    is_noticed(Omission::Names("recipes"));
}

#[test]
fn names_of_manifests_that_are_not_synced_are_noticed() {
    is_noticed(Omission::Names("manifests"));
}

#[test]
fn names_in_the_trash_that_are_not_synced_are_noticed() {
    is_noticed(Omission::Names("trash"));
}

#[test]
fn names_of_pins_that_are_not_synced_are_noticed() {
    is_noticed(Omission::Names("pins"));
}

const fn whole(step: Step) -> Entry {
    Entry { action: Action::Take(step), cut: None }
}

const fn killed(step: Step, calls: u64) -> Entry {
    Entry { action: Action::Take(step), cut: Some(Cut { calls, end: End::Kill }) }
}

const fn without_power_after(step: Step, seed: u64) -> Entry {
    let end = End::Power { seed, again: None };
    Entry { action: Action::Take(step), cut: Some(Cut { calls: u64::MAX, end }) }
}

/// Of dice of this seed: whatever was not synced is gone.
const LOSES_ALL: u64 = 1;

#[test]
fn pin_that_somebody_else_has_half_removed_does_not_come_back() {
    let pin = |pinned| Step::Pin { name: 0, pinned };
    for calls in 0..4 {
        survives(
            &[
                whole(Step::Import { file: 0, name: 0 }),
                whole(pin(true)),
                killed(pin(false), calls),
                without_power_after(pin(false), LOSES_ALL),
            ],
            Durability::Auto,
            None,
        );
    }
}

/// A recipe may be back after a power cut, and its blobs not. Where the file is there as one blob it
/// is in the way, and stays away once it is dropped.
#[test]
fn recipe_that_is_dropped_for_a_whole_file_does_not_come_back() {
    let mut machine = Machine::new(Durability::Auto, None);
    let file = &files()[0];
    machine.take(Step::Import { file: 0, name: 0 });
    let recipe = machine.root().join(format!("recipes/sha256-{}.json", file.digest.to_hex()));
    let json = fs::read(&recipe).unwrap();
    machine.take(Step::Remove { name: 0 });
    machine.verbs = None;
    fs::write(&recipe, json).unwrap();
    machine.adopt();
    machine.reopen();
    commit_whole(&machine.verbs.as_ref().unwrap().store, &file.bytes);
    machine.verbs = None;
    machine.crash(&mut Dice::losing());
    check_promises(&InProcess::open(&machine.root()));
}

/// Commits a file as one blob, as a pull of something that is not to be split does.
fn commit_whole(store: &Arc<Store>, bytes: &[u8]) {
    let mut ingest = Ingest::begin(store, store.leases().grant("a test")).unwrap();
    let mut stage = |bytes: &[u8], media_type| Descriptor {
        media_type: MediaType::new(media_type),
        digest: ingest.add_bytes(bytes).unwrap(),
        size: bytes.len() as u64,
    };
    let config = stage(b"{}", MediaType::DOCKER_CONFIG);
    let model = stage(bytes, MediaType::OLLAMA_MODEL);
    let manifest = Manifest::compose(config, vec![model]).unwrap();
    ingest.commit(&reference(1), &manifest, None).unwrap();
}
