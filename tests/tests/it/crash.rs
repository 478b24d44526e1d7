//! Power cuts and kills in random sequences of verbs, on a disk that loses unsynced data
//! ([`blobd_tests::crash_disk`]).
//!
//! After each of them, the store opens without help, every blob has the digest in its name, every model and
//! everything in the trash is complete, acknowledged changes have happened, and every other change has
//! happened completely or not at all. The sequence then continues on this store. Further tests check that a
//! missing sync is detected.

use std::fs;
use std::panic::catch_unwind;
use std::path::PathBuf;
use std::sync::Arc;

use blobd_store::{Durability, Ingest, Store, StoreOptions};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::manifest::Manifest;
use blobd_tests::crash_disk::{CrashChoices, CrashDisk, Omission};
use blobd_tests::pulls;
use blobd_tests::samples::{EMPTY, LARGE, LARGE_RELATIVE, MANY, NAMES, PACKED, WHOLE, files, reference};
use blobd_tests::steps::Step;
use blobd_tests::store_state::{Allowed, StoreState, check_collection, check_invariants};
use blobd_tests::temp_dirs::tmpfs_directory;
use blobd_tests::verbs::InProcess;
use proptest::prelude::*;
use proptest::test_runner::{RngAlgorithm, TestRng, TestRunner};
use tempfile::TempDir;

/// An entry of a sequence.
#[derive(Clone, Copy, Debug)]
struct Entry {
    action: Action,
    cut: Option<Cut>,
}

impl Entry {
    const fn step(&self) -> Option<Step> {
        match self.action {
            Action::Take(step) => Some(step),
            Action::Reopen => None,
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Action {
    Take(Step),
    Reopen,
}

/// The end of a process, after this many calls to the disk, or after the entry if it makes fewer calls.
#[derive(Clone, Copy, Debug)]
struct Cut {
    calls: u64,
    end: End,
}

#[derive(Clone, Copy, Debug)]
enum End {
    /// The process dies, and the machine keeps running.
    Kill,
    /// The power fails; the seed determines the state afterwards. With a number, it fails again after so many
    /// calls of the process that reopens the store.
    Power { seed: u64, again: Option<u64> },
}

fn action() -> impl Strategy<Value = Action> {
    let name = || 0..NAMES.len();
    let step = prop_oneof![
        8 => (0..LARGE, name()).prop_map(|(file, name)| Step::Import { file, name }),
        1 => (LARGE..=WHOLE, name()).prop_map(|(file, name)| Step::Import { file, name }),
        4 => (0..LARGE, name()).prop_map(|(file, name)| Step::Pull { file, name }),
        1 => (LARGE..=WHOLE, name()).prop_map(|(file, name)| Step::Pull { file, name }),
        2 => (0..=WHOLE, name()).prop_map(|(file, name)| Step::PullInTwoParts { file, name }),
        3 => (name(), name()).prop_map(|(source, target)| Step::Tag { source, target }),
        3 => (name(), name()).prop_map(|(source, target)| Step::Edit { source, target }),
        4 => name().prop_map(|name| Step::Remove { name }),
        3 => name().prop_map(|name| Step::MoveToTrash { name }),
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

/// A store on a disk that loses unsynced data, and the permitted contents after a power cut now.
struct Machine {
    folder: TempDir,
    durability: Durability,
    omission: Option<Omission>,
    /// The stores below this one. They are absent when its content is checked.
    lower: Vec<PathBuf>,
    /// The number of power cuts so far. After each, the store is in another directory.
    life: usize,
    disk: Arc<CrashDisk>,
    verbs: Option<InProcess>,
    allowed: Allowed,
}

impl Machine {
    fn new(entries: &[Entry], durability: Durability, omission: Option<Omission>) -> Self {
        let folder = tmpfs_directory();
        let root = folder.path().join("0");
        fs::create_dir(&root).unwrap();
        let disk = Arc::new(CrashDisk::new(&root, &folder.path().join("0-shadow")).without(omission));
        let allowed = Allowed::default();
        let steps: Vec<Step> = entries.iter().filter_map(Entry::step).collect();
        let below = folder.path().join("lower");
        steps.iter().for_each(|step| step.fill_lower_store(&below));
        let lower = steps.iter().flat_map(|step| step.lower_stores(&below)).collect();
        let mut machine = Self { folder, durability, omission, lower, life: 0, disk, verbs: None, allowed };
        machine.reopen();
        machine
    }

    fn root(&self) -> PathBuf {
        self.folder.path().join(self.life.to_string())
    }

    fn options(&self) -> StoreOptions {
        let (disk, lower) = (self.disk.clone(), self.lower.clone());
        StoreOptions { disk, lower, durability: self.durability, ..StoreOptions::default() }
    }

    /// Opening may fail only because of a power cut.
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
        self.allowed.check(&StoreState::observe(&self.verbs.as_ref().unwrap().store));
    }

    fn take(&mut self, step: Step) {
        let store = &self.verbs.as_ref().unwrap().store;
        let before = StoreState::observe(store);
        let outcomes = step.outcomes(&before);
        match step.take(store) {
            Ok(()) => {
                let after = StoreState::observe(store);
                assert!(outcomes.states.contains(&after), "{step:?} led from {before:?} to {after:?}");
                self.allowed.settle(&before, &after, step.subject());
            }
            Err(_) if self.disk.is_cut() => {
                outcomes.states.iter().for_each(|after| self.allowed.widen(&before, after));
            }
            Err(error) => {
                assert!(outcomes.refusals.contains(&error.code), "{step:?}: {error}");
                assert_eq!(StoreState::observe(store), before, "{step:?}");
            }
        }
    }

    /// Afterwards everything that is found is durable.
    fn lose_power(&mut self, seed: u64, again: Option<u64>) {
        self.crash(&mut CrashChoices::new(seed));
        if let Some(calls) = again {
            self.disk.cut_after(calls);
            self.reopen();
            self.verbs = None;
            self.crash(&mut CrashChoices::new(seed.rotate_left(7)));
        }
        let verbs = InProcess::open(&self.root());
        let found = StoreState::observe(&verbs.store);
        self.allowed.check(&found);
        check_invariants(&verbs);
        if seed.is_multiple_of(3) {
            check_collection(&verbs);
        }
        self.allowed = Allowed::only(&found);
        drop(verbs);
        self.adopt();
    }

    fn crash(&mut self, choices: &mut CrashChoices) {
        let before = self.root();
        self.life += 1;
        self.disk.crash(choices, &self.root());
        fs::remove_dir_all(before).unwrap();
        self.adopt();
    }

    /// Uses a new disk for the store that was found.
    fn adopt(&mut self) {
        let shadow = self.folder.path().join("shadow");
        let _ = fs::remove_dir_all(&shadow);
        self.disk = Arc::new(CrashDisk::new(&self.root(), &shadow).without(self.omission));
    }
}

fn survives(entries: &[Entry], durability: Durability, omission: Option<Omission>) {
    let mut machine = Machine::new(entries, durability, omission);
    for entry in entries {
        machine.follow(*entry);
    }
    let verbs = machine.verbs.as_ref().unwrap();
    check_invariants(verbs);
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
    fn acknowledged_changes_survive_and_every_change_is_atomic(
        entries in sequence(),
        durability in prop::sample::select(&MODES[..]),
    ) {
        survives(&entries, durability, None);
    }
}

/// The same property must fail on a disk that omits a sync, or it would prove nothing.
fn omission_is_detected(omission: Omission) {
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
fn omitted_sync_of_files_is_detected() {
    omission_is_detected(Omission::Files("staging"));
}

#[test]
fn omitted_syncfs_of_new_blobs_is_detected() {
    omission_is_detected(Omission::NewBlobs);
}

/// A tag was removed by a process that died before it synced the directory. Then its blobs were collected.
#[test]
fn omitted_sync_before_a_collection_is_detected() {
    let survives_all = |omission| {
        let mut cases = (0..16_u64).flat_map(|calls| (0..20_u64).map(move |seed| (calls, seed)));
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

/// The syncs that make the content of blobs durable.
fn syncs_of_content(durability: Durability) -> &'static [Omission] {
    match durability {
        Durability::Fsync => &[Omission::Blobs],
        Durability::Syncfs => &[Omission::NewBlobs],
        Durability::Auto => &[Omission::Blobs, Omission::NewBlobs],
    }
}

/// Whether a power cut just after a step loses nothing acknowledged, in any state of the unsynced data.
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

/// Asserts, in every mode, that a step survives power cuts with all syncs, and does not without at least one
/// of the syncs of content.
fn check_sync_is_needed(before: &[Step], step: Step) {
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
    check_sync_is_needed(&[], Step::Import { file: 0, name: 0 });
    check_sync_is_needed(&[Step::Import { file: 0, name: 0 }], Step::Import { file: 1, name: 1 });
}

#[test]
fn import_of_a_file_that_shares_its_blocks_needs_its_sync_in_every_mode() {
    check_sync_is_needed(&[Step::Import { file: EMPTY, name: 1 }], Step::Import { file: WHOLE, name: 0 });
}

#[test]
fn pull_needs_the_sync_of_its_blobs_in_every_mode() {
    check_sync_is_needed(&[], Step::Pull { file: 0, name: 0 });
    check_sync_is_needed(&[], Step::Pull { file: MANY, name: 0 });
}

#[test]
fn promotion_needs_the_sync_of_its_blobs_in_every_mode() {
    check_sync_is_needed(&[], Step::Promote { file: 0, name: 0 });
}

#[test]
fn pull_of_a_file_that_is_not_split_needs_its_sync_in_every_mode() {
    check_sync_is_needed(&[Step::Import { file: EMPTY, name: 1 }], Step::Pull { file: WHOLE, name: 0 });
}

#[test]
fn resumed_pull_needs_the_sync_of_its_blobs_in_every_mode() {
    check_sync_is_needed(&[], Step::PullInTwoParts { file: 0, name: 0 });
}

#[test]
fn second_download_of_a_damaged_file_needs_the_sync_of_its_blobs_in_every_mode() {
    check_sync_is_needed(&[], Step::PullTwice { file: 0, name: 0 });
}

#[test]
fn pull_of_a_compressed_archive_needs_the_sync_of_its_blobs_in_every_mode() {
    check_sync_is_needed(&[], Step::Pull { file: PACKED, name: 0 });
}

#[test]
fn pull_of_a_related_model_needs_the_sync_of_fetched_blobs_in_every_mode() {
    let (relative, step) =
        (Step::Import { file: LARGE, name: 1 }, Step::Pull { file: LARGE_RELATIVE, name: 0 });
    check_sync_is_needed(&[relative], step);
}

/// Repairs a missing blob from the registry of its model.
fn repair_survives(durability: Durability, omission: Option<Omission>, seed: u64) -> bool {
    let file = &files()[LARGE];
    let repaired = || {
        let mut machine = Machine::new(&[], durability, omission);
        machine.take(Step::Pull { file: LARGE, name: 0 });
        machine.verbs = None;
        let blobs = machine.root().join("blobs");
        let largest = fs::read_dir(&blobs).unwrap().map(|entry| entry.unwrap().path());
        let largest = largest.max_by_key(|blob| fs::metadata(blob).unwrap().len()).unwrap();
        assert!(fs::metadata(&largest).unwrap().len() > file.bytes.len() as u64 / 2);
        fs::remove_file(&largest).unwrap();
        machine.adopt();
        machine.reopen();
        let done = pulls::repair(&machine.verbs.as_ref().unwrap().store).unwrap();
        assert!(done.corrupt.iter().all(|blob| blob.repaired) && done.corrupt.len() == 1, "{done:?}");
        machine.verbs = None;
        machine.crash(&mut CrashChoices::new(seed));
        check_invariants(&InProcess::open(&machine.root()));
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

/// Steps that store no blobs use the same syncs in every mode.
#[test]
fn change_of_a_name_needs_the_sync_of_its_directory_in_every_mode() {
    const IMPORT: Step = Step::Import { file: 0, name: 0 };
    const TRASH: Step = Step::MoveToTrash { name: 0 };
    let changes: [(&[Step], Step, &'static str); 8] = [
        (&[IMPORT], Step::Tag { source: 0, target: 1 }, "manifests"),
        (&[IMPORT], Step::Pin { name: 0, pinned: true }, "pins"),
        (&[IMPORT], TRASH, "trash"),
        (&[IMPORT, TRASH], Step::Undelete { name: 0 }, "manifests"),
        (&[IMPORT], Step::Undo { name: 0, earlier: None }, "trash"),
        (&[IMPORT, TRASH], Step::Undo { name: 0, earlier: Some(0) }, "manifests"),
        (&[IMPORT], Step::Sign { name: 0 }, "signatures"),
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
fn omitted_sync_of_the_blobs_directory_is_detected() {
    omission_is_detected(Omission::Names("blobs"));
}

#[test]
fn omitted_sync_of_the_recipes_directory_is_detected() {
    omission_is_detected(Omission::Names("recipes"));
}

#[test]
fn omitted_sync_of_manifest_directories_is_detected() {
    omission_is_detected(Omission::Names("manifests"));
}

#[test]
fn omitted_sync_of_the_trash_directory_is_detected() {
    omission_is_detected(Omission::Names("trash"));
}

#[test]
fn omitted_sync_of_the_histories_is_detected() {
    omission_is_detected(Omission::Names("history"));
}

#[test]
fn omitted_sync_of_the_pins_directory_is_detected() {
    omission_is_detected(Omission::Names("pins"));
}

/// Cut off after any call, by a kill or by a failure of the power that loses any part of the unsynced data.
#[test]
fn interrupted_signing_leaves_the_whole_signature_or_none() {
    let ends = (0..12).map(|seed| End::Power { seed, again: None }).chain([End::Kill]);
    for (calls, end) in (0..10).flat_map(|calls| ends.clone().map(move |end| (calls, end))) {
        let cut = Some(Cut { calls, end });
        let interrupted = Entry { action: Action::Take(Step::Sign { name: 0 }), cut };
        let entries = [
            whole(Step::Import { file: 0, name: 0 }),
            interrupted,
            whole(Step::Sign { name: 0 }),
            whole(Step::Collect),
        ];
        survives(&entries, Durability::Auto, None);
    }
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

/// With this seed, all unsynced data is lost.
const SEED_THAT_LOSES_ALL: u64 = 1;

#[test]
fn partly_removed_pin_does_not_come_back() {
    let pin = |pinned| Step::Pin { name: 0, pinned };
    for calls in 0..4 {
        survives(
            &[
                whole(Step::Import { file: 0, name: 0 }),
                whole(pin(true)),
                killed(pin(false), calls),
                without_power_after(pin(false), SEED_THAT_LOSES_ALL),
            ],
            Durability::Auto,
            None,
        );
    }
}

/// After a power cut, a deleted recipe may exist again without its blobs. If the file is stored as one blob,
/// the recipe is deleted, and must not come back.
#[test]
fn recipe_replaced_by_a_whole_file_does_not_come_back() {
    let mut machine = Machine::new(&[], Durability::Auto, None);
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
    machine.crash(&mut CrashChoices::losing_all());
    check_invariants(&InProcess::open(&machine.root()));
}

/// Commits a file as one blob, as a pull of a file that is not split does.
fn commit_whole(store: &Arc<Store>, bytes: &[u8]) {
    let mut ingest = Ingest::begin(store, store.liveness().leases().grant("a test")).unwrap();
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
