//! A store and its expected content.

mod accidents;

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::os::unix::fs::MetadataExt as _;
use std::path::Path;
use std::time::{Duration, Instant};

use blobd_client::Client;
use blobd_client::error::ClientError;
use blobd_client::model::OpenModel;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::request::{
    FileSelection, GcParams, ImportParams, OpenParams, OpenPurpose, PinParams, RemoveParams, TagParams,
    TensorSelection, UndeleteParams, VerifyParams,
};
use blobd_client::protocol::upkeep::{GcReason, GcReport};
use blobd_store_format::reference::Reference;
use blobd_tests::oracle::sha256;
use blobd_tests::samples::files;
use blobd_tests::wait::eventually;

use super::Step;
use super::disk_snapshot::{COLLECTED, DiskSnapshot, REMOVED};
use super::location::{Holder, StoreLocation};
use super::model_registry::{FILES, ModelRegistry};
use super::needs::{Content, Needs, file_and_blobs};

pub(super) const NAMES: [&str; 3] = ["a", "b", "me/c:1"];
/// The time after its start at which a daemon first checks the trash and retries collections.
const ROUND: Duration = Duration::from_secs(60);
/// A case ends early if its daemon has run for this time.
const OLD: Duration = Duration::from_secs(40);

#[derive(Debug)]
struct Trashed {
    name: usize,
    needs: Needs,
    is_expired: bool,
}

/// A program that has a blob open, and so keeps the file even without its name.
#[derive(Debug)]
struct Program {
    _holder: Holder,
    path: String,
    inode: u64,
}

/// How far a store differs from an idle one, in numbers of files, and the number of refused requests.
#[derive(Clone, Copy, Debug)]
pub(super) struct Reached {
    pub(super) content: usize,
    pub(super) unneeded: usize,
    pub(super) condemned: usize,
    pub(super) sessions: usize,
    pub(super) programs: usize,
    pub(super) trashed: usize,
    pub(super) quarantined: usize,
    pub(super) downloads: usize,
    /// The downloads whose whole file has arrived.
    pub(super) whole_downloads: usize,
    pub(super) refusals: usize,
}

/// A daemon's store and its expected content.
pub(super) struct CheckedStore<'o> {
    /// Declared before the daemon, which waits for the end of this connection.
    sessions: Vec<(OpenModel, Needs)>,
    programs: Vec<Program>,
    pub(super) location: StoreLocation,
    registry: &'o ModelRegistry,
    pub(super) client: Client,
    started: Instant,
    names: BTreeMap<usize, Needs>,
    pinned: BTreeSet<usize>,
    /// In the order of their removal.
    trash: Vec<Trashed>,
    /// Blobs and recipes that the daemon collects when they are no longer used.
    condemned: Content,
    /// Whether any blob was ever changed.
    is_damaged: bool,
    refusals: usize,
}

impl<'o> CheckedStore<'o> {
    pub(super) fn new(location: StoreLocation, registry: &'o ModelRegistry) -> Self {
        let client = location.daemon.client();
        Self {
            sessions: Vec::new(),
            programs: Vec::new(),
            location,
            registry,
            client,
            started: Instant::now(),
            names: BTreeMap::new(),
            pinned: BTreeSet::new(),
            trash: Vec::new(),
            condemned: Content::new(),
            is_damaged: false,
            refusals: 0,
        }
    }

    pub(super) fn reached(&self) -> Reached {
        let (on_disk, downloads) = (DiskSnapshot::of(&self.location), self.downloads());
        let recipes = on_disk.names("recipes/");
        let is_whole = |file: &&String| recipes.contains(&format!("{file}.json"));
        Reached {
            content: on_disk.content().len(),
            unneeded: self.unneeded(&on_disk).len(),
            condemned: self.condemned.len(),
            sessions: self.sessions.len(),
            programs: self.programs.len(),
            trashed: on_disk.names("trash/").len(),
            quarantined: on_disk.names("quarantine/").len(),
            downloads: downloads.len(),
            whole_downloads: downloads.iter().filter(is_whole).count(),
            refusals: self.refusals,
        }
    }

    pub(super) fn is_old(&self) -> bool {
        self.started.elapsed() > OLD
    }

    pub(super) fn take(&mut self, step: Step) {
        match step {
            Step::Import { file, name } => self.import(FILES[file % FILES.len()], name % NAMES.len()),
            Step::Pull { file, name } => {
                if let Err(error) = self.pull(FILES[file % FILES.len()], name % NAMES.len()) {
                    self.may_be_pinned_or_damaged(&error, name % NAMES.len());
                }
            }
            Step::PullInterrupted { file, name, whole } => {
                self.interrupt(FILES[file % FILES.len()], name % NAMES.len(), whole);
            }
            Step::Tag { source, target } => self.tag(source % NAMES.len(), target % NAMES.len()),
            Step::Remove { name } => self.remove(name % NAMES.len()),
            Step::MoveToTrash { name, expired } => self.move_to_trash(name % NAMES.len(), expired),
            Step::Undelete { name } => self.undelete(name % NAMES.len()),
            Step::Pin { name, pinned } => self.pin(name % NAMES.len(), pinned),
            Step::Open { name } => self.open(name % NAMES.len()),
            Step::Close { session } => self.close(session),
            Step::Hold { blob } => self.hold(blob),
            Step::CloseProgram { program } => self.close_program(program),
            Step::Flip { blob } => self.flip(blob),
            Step::Truncate { blob } => self.truncate(blob),
            Step::Lose { blob } => self.lose(blob),
            Step::Verify { repair } => {
                let params = VerifyParams { reference: None, repair };
                self.client.verify(&params, |_| ()).unwrap();
            }
            Step::Orphan { pages } => {
                self.plant("blobs", &format!("sha256-{}", sha256(&accidents::orphan(pages))), pages);
            }
            Step::DeadTransaction { pages } => {
                fs::create_dir_all(self.location.root.join("staging/1-1")).unwrap();
                self.plant("staging/1-1", "0", pages);
            }
            Step::AgeDownloads => self.age_downloads(),
            Step::Foreign { location, pages } => self.add_foreign(location, pages),
            Step::Collect => self.collect(),
            Step::Stop => {
                while !self.sessions.is_empty() {
                    self.close(0);
                }
                self.location.daemon.stop();
                self.start();
            }
            Step::Kill => self.restart_killed(|_| ()),
            Step::Refuse { refusal, name } => self.refuse(refusal, name % NAMES.len()),
        }
        self.rest();
    }

    /// Asserts that `df`, the dry run and the model agree on the bytes that a collection would free.
    pub(super) fn check(&self) {
        let on_disk = DiskSnapshot::of(&self.location);
        let held: u64 =
            self.unneeded(&on_disk).intersection(&self.held()).map(|path| on_disk.files[path]).sum();
        // A process that another test is starting has copies of this process's descriptors until its exec. If
        // this test had a blob open just then, that process holds it for a moment.
        eventually("only this test's programs hold blobs", || {
            let usage = self.client.disk_usage().unwrap_or_else(|error| panic!("df: {error}"));
            usage.held_bytes == held
        });
        let usage = self.client.disk_usage().unwrap_or_else(|error| panic!("df: {error}"));
        let planned = self
            .client
            .gc(&GcParams { dry_run: true, ..GcParams::default() })
            .unwrap_or_else(|error| panic!("gc: {error}"));
        assert_eq!(usage.reclaimable_bytes, planned.freed_bytes, "df and gc: {planned:?}");
        self.check_plan(&planned, &on_disk);
        assert_eq!(usage.quarantine_bytes, on_disk.taken_in(&["quarantine/"]), "bytes in quarantine");
        self.check_rows(&on_disk);
    }

    /// The models that need a blob or recipe.
    pub(super) fn names_that_need(&self, path: &str) -> Vec<usize> {
        let needing = self.names.iter().filter(|(_, needs)| needs.all.contains(path));
        needing.map(|(name, _)| *name).collect()
    }

    pub(super) fn content_of(&self, name: usize) -> &Content {
        &self.names[&name].files
    }

    pub(super) fn is_needed_by_trash(&self, path: &str) -> bool {
        self.trash.iter().any(|trashed| !trashed.is_expired && trashed.needs.all.contains(path))
    }

    pub(super) fn is_leased_or_held(&self, path: &str) -> bool {
        self.leased().contains(path) || self.held().contains(path)
    }

    fn check_plan(&self, planned: &GcReport, on_disk: &DiskSnapshot) {
        let sum: u64 = planned.deleted.iter().map(|item| item.size).sum();
        assert_eq!(sum, planned.freed_bytes, "{planned:?}");
        let mut listed = BTreeMap::new();
        for item in &planned.deleted {
            let digest = || item.digest.expect("it has a digest").to_hex();
            match item.reason {
                GcReason::UnreferencedBlob => listed.insert(format!("blobs/sha256-{}", digest()), item.size),
                GcReason::UnreferencedRecipe => {
                    listed.insert(format!("recipes/sha256-{}.json", digest()), item.size)
                }
                _ => None,
            };
        }
        let expected = self.unneeded(on_disk).difference(&self.held()).cloned().collect::<Content>();
        let expected: BTreeMap<_, _> =
            expected.into_iter().map(|path| (path.clone(), on_disk.files[&path])).collect();
        assert_eq!(listed, expected, "what nothing needs");
    }

    pub(super) fn collect(&mut self) {
        let before = DiskSnapshot::of(&self.location);
        let usage = self.client.disk_usage().unwrap();
        let planned = self.client.gc(&GcParams { dry_run: true, ..GcParams::default() }).unwrap();
        let done = self.client.gc(&GcParams { dry_run: false, ..GcParams::default() }).unwrap();
        assert_eq!(usage.reclaimable_bytes, done.freed_bytes, "df and gc");
        assert_eq!(
            (planned.deleted, planned.freed_bytes),
            (done.deleted, done.freed_bytes),
            "dry run and gc"
        );
        DiskSnapshot::of(&self.location).check_freed(&before, &COLLECTED, done.freed_bytes);
        self.trash.retain(|trashed| !trashed.is_expired);
        let unneeded = self.unneeded(&before);
        self.condemn(&unneeded);
    }

    fn import(&mut self, file: usize, name: usize) {
        let path = self.location.daemon.scratch().join("model.gguf");
        fs::write(&path, &files()[file].bytes).unwrap();
        let params =
            ImportParams { name: Some(reference(name)), force: true, ..ImportParams::new("model.gguf") };
        match self.client.import(&params, File::open(&path).unwrap(), |_, _| ()) {
            Ok(_) => self.learn(name),
            Err(error) => self.may_be_pinned_or_damaged(&error, name),
        }
    }

    fn pull(&mut self, file: usize, name: usize) -> Result<(), ClientError> {
        let params = self.registry.pull(file, reference(name));
        self.client.pull(&params, |_| ())?;
        self.learn(name);
        Ok(())
    }

    /// The daemon would collect the blobs of a failed transaction within a second. It is killed, so that they
    /// stay.
    fn interrupt(&mut self, file: usize, name: usize, whole: bool) {
        self.registry.break_off(file, whole);
        let pulled = self.pull(file, name);
        self.registry.clear_faults();
        // It succeeds if the store already has the bytes that the registry does not send.
        if pulled.is_err() {
            self.restart_killed(|_| ());
        }
    }

    fn tag(&mut self, source: usize, target: usize) {
        let params =
            TagParams { source: reference(source), target: reference(target), force: true, origin: None };
        match self.client.tag(&params) {
            Ok(_) => {
                let needs = self.names[&source].clone();
                self.set(target, needs);
            }
            Err(error) if error.code() == ErrorCode::Denied => self.may_be_pinned(&error, target),
            Err(error) => self.may_be_refused(&error, source),
        }
    }

    fn remove(&mut self, name: usize) {
        let before = DiskSnapshot::of(&self.location);
        let removed = match self
            .client
            .remove(&RemoveParams { references: vec![reference(name)], ..RemoveParams::default() })
        {
            Ok(removed) => removed,
            Err(error) => return self.may_be_pinned(&error, name),
        };
        let needs = self.names.remove(&name).expect("it was there");
        DiskSnapshot::of(&self.location).check_freed(&before, &REMOVED, removed.freed_bytes);
        let unneeded: Content = self.unneeded_with_trash(&before).intersection(&needs.all).cloned().collect();
        let freed: u64 = unneeded.difference(&self.held()).map(|path| before.files[path]).sum();
        assert_eq!(removed.freed_bytes, freed, "what only this model needs: {removed:?}");
        self.condemn(&needs.all);
    }

    fn move_to_trash(&mut self, name: usize, is_expired: bool) {
        const DAY: u64 = 86400;
        let before = DiskSnapshot::of(&self.location);
        let keep_seconds = Some(if is_expired { 0 } else { DAY });
        match self.client.remove(&RemoveParams {
            references: vec![reference(name)],
            keep_seconds,
            ..RemoveParams::default()
        }) {
            Ok(removed) => {
                DiskSnapshot::of(&self.location).check_freed(&before, &REMOVED, removed.freed_bytes);
                let needs = self.names.remove(&name).expect("it was there");
                self.trash.push(Trashed { name, needs, is_expired });
            }
            Err(error) => self.may_be_pinned(&error, name),
        }
    }

    fn undelete(&mut self, name: usize) {
        let newest = self.trash.iter().rposition(|trashed| trashed.name == name);
        match self.client.undelete(&UndeleteParams { reference: reference(name), name: None, force: false }) {
            Ok(_) => {
                let trashed = self.trash.remove(newest.expect("there is one in the trash"));
                self.names.insert(name, trashed.needs);
            }
            // Another, pinned model has the name.
            Err(error) if error.code() == ErrorCode::Denied => self.may_be_pinned(&error, name),
            Err(error) => match newest {
                None => assert_eq!(error.code(), ErrorCode::NotFound, "{error}"),
                // Another model has the name, or a blob that it needs is damaged.
                Some(_) => {
                    let expected = [ErrorCode::Busy, ErrorCode::Corrupt];
                    assert!(expected.contains(&error.code()), "{error}");
                }
            },
        }
    }

    fn pin(&mut self, name: usize, pinned: bool) {
        match self.client.pin(&PinParams { reference: reference(name), pinned }) {
            Ok(_) if pinned => drop(self.pinned.insert(name)),
            Ok(_) => drop(self.pinned.remove(&name)),
            Err(error) => self.may_be_refused(&error, name),
        }
    }

    fn open(&mut self, name: usize) {
        let params = OpenParams {
            reference: reference(name),
            // Without descriptors, because leases and open files are tested separately.
            tensors: TensorSelection::None,
            component: Some("model".to_owned()),
            files: FileSelection::Whole,
            purpose: OpenPurpose::Open,
        };
        match self.client.open_with(&params) {
            Ok(model) => self.sessions.push((model, self.names[&name].clone())),
            Err(error) => self.may_be_refused(&error, name),
        }
    }

    fn close(&mut self, session: usize) {
        if self.sessions.is_empty() {
            return;
        }
        drop(self.sessions.swap_remove(session % self.sessions.len()));
        let left = self.sessions.len();
        // The session is listed until the daemon has collected the blobs that it kept.
        eventually("the session ends", || self.client.sessions().unwrap().sessions.len() == left);
        self.settle();
    }

    fn hold(&mut self, blob: usize) {
        let Some(path) = self.blob(blob) else { return };
        let script = "exec 3< \"$0\" && echo ready && exec cat";
        let location = self.location.root.join(&path);
        let holder = Holder::start(&[], script, &location).expect("a blob can be opened");
        let inode = fs::metadata(location).unwrap().ino();
        self.programs.push(Program { _holder: holder, path, inode });
    }

    fn close_program(&mut self, program: usize) {
        if self.programs.is_empty() {
            return;
        }
        drop(self.programs.swap_remove(program % self.programs.len()));
    }

    /// Waits until the daemon has finished with released blobs. Within a second it finds that it can collect
    /// them, or that they are needed, which is not observable: then it is killed.
    fn rest(&mut self) {
        let in_use: Content = self.held().union(&self.leased()).cloned().collect();
        let free: Content = self.condemned.difference(&in_use).cloned().collect();
        if !self.unneeded_with_trash(&DiskSnapshot::of(&self.location)).is_disjoint(&free) {
            self.settle();
        } else if !free.is_empty() {
            self.restart_killed(|_| ());
        }
    }

    /// Waits until the daemon has collected what it collects in the background.
    fn settle(&mut self) {
        let in_use: Content = self.held().union(&self.leased()).cloned().collect();
        let free: Content = self.condemned.difference(&in_use).cloned().collect();
        let start = Instant::now();
        eventually("released blobs are collected", || {
            self.unneeded_with_trash(&DiskSnapshot::of(&self.location)).is_disjoint(&free)
        });
        assert!(start.elapsed() < ROUND - OLD, "the daemon may have checked the trash meanwhile");
        self.condemned.retain(|path| in_use.contains(path));
    }

    /// Records blobs and recipes that are no longer needed: those in use are collected later.
    fn condemn(&mut self, given_up: &Content) {
        let in_use: Content = self.held().union(&self.leased()).cloned().collect();
        self.condemned.extend(given_up.intersection(&in_use).cloned());
    }

    /// Kills the daemon, changes its store and starts it again, without its former state in memory.
    pub(super) fn restart_killed(&mut self, meanwhile: impl FnOnce(&Path)) {
        self.location.daemon.kill();
        self.sessions.clear();
        meanwhile(&self.location.root);
        self.start();
    }

    fn start(&mut self) {
        self.location.daemon.restart();
        self.client = self.location.daemon.client();
        self.started = Instant::now();
        self.condemned.clear();
        // It deletes the files of dead transactions before it responds.
        assert_eq!(DiskSnapshot::of(&self.location).names("staging/"), [""; 0]);
    }

    /// Removes a model while collections refuse, and asserts that nothing is freed or reported as freed.
    pub(super) fn remove_in_vain(&mut self, name: usize) {
        let before = DiskSnapshot::of(&self.location);
        let usage = self.client.disk_usage().map(|usage| usage.reclaimable_bytes);
        let planned = self.client.gc(&GcParams { dry_run: true, ..GcParams::default() });
        match (&usage, &planned) {
            (Ok(reclaimable), Ok(planned)) => assert_eq!(*reclaimable, planned.freed_bytes, "df and gc"),
            (Ok(reclaimable), Err(refused)) => assert_eq!(*reclaimable, 0, "df, but gc: {refused}"),
            (Err(failed), Ok(planned)) => panic!("gc: {planned:?}, but df: {failed}"),
            (Err(_), Err(_)) => {}
        }
        if planned.is_err() {
            self.refusals += 1;
            self.client
                .gc(&GcParams { dry_run: false, ..GcParams::default() })
                .expect_err("its dry run was refused");
        }
        DiskSnapshot::of(&self.location).check_freed(&before, &COLLECTED, 0);
        match self
            .client
            .remove(&RemoveParams { references: vec![reference(name)], ..RemoveParams::default() })
        {
            Ok(removed) => {
                DiskSnapshot::of(&self.location).check_freed(&before, &REMOVED, removed.freed_bytes);
                self.names.remove(&name);
            }
            Err(error) if error.code() == ErrorCode::Corrupt => {}
            Err(error) => self.may_be_pinned(&error, name),
        }
    }

    /// The path of a model's manifest.
    pub(super) fn manifest_of(&self, name: usize) -> Option<String> {
        self.names.contains_key(&name).then(|| manifest_place(name))
    }

    /// A file of a model, as a recipe or as a blob.
    pub(super) fn file_of(&self, name: usize, directory: &str) -> Option<String> {
        let files = &self.names.get(&name)?.files;
        let is_there = |path: &&String| path.starts_with(directory) && self.location.root.join(path).exists();
        files.iter().find(is_there).cloned()
    }

    /// Records the needs of a model that has just got its name.
    fn learn(&mut self, name: usize) {
        let needs = Needs::of(&self.location.root, &manifest_place(name));
        self.set(name, needs);
    }

    /// Another model that had the name is in the trash now.
    fn set(&mut self, name: usize, needs: Needs) {
        let all = needs.all.clone();
        if let Some(needs) = self.names.insert(name, needs).filter(|before| before.all != all) {
            self.trash.push(Trashed { name, needs, is_expired: false });
        }
    }

    /// The blobs and recipes that nothing keeps.
    fn unneeded(&self, on_disk: &DiskSnapshot) -> Content {
        self.unneeded_beside(on_disk, self.trash.iter().filter(|trashed| !trashed.is_expired))
    }

    /// The same if the trash is not emptied: an expired record still keeps its blobs.
    fn unneeded_with_trash(&self, on_disk: &DiskSnapshot) -> Content {
        self.unneeded_beside(on_disk, self.trash.iter())
    }

    fn unneeded_beside<'t>(
        &self,
        on_disk: &DiskSnapshot,
        trash: impl Iterator<Item = &'t Trashed>,
    ) -> Content {
        let mut kept = self.leased();
        kept.extend(self.names.values().flat_map(|needs| needs.all.iter().cloned()));
        kept.extend(trash.flat_map(|trashed| trashed.needs.all.iter().cloned()));
        for file in self.downloads() {
            if self.location.root.join(format!("recipes/{file}.json")).exists() {
                kept.extend(file_and_blobs(&self.location.root, &file));
            }
        }
        on_disk.content().difference(&kept).cloned().collect()
    }

    pub(super) fn downloads(&self) -> Vec<String> {
        let mut names = blobd_tests::store_dir::names(&self.location.root.join("partial"));
        names.retain(|name| name.starts_with("sha256-"));
        names
    }

    fn leased(&self) -> Content {
        self.sessions.iter().flat_map(|(_, needs)| needs.all.iter().cloned()).collect()
    }

    fn held(&self) -> Content {
        let inode =
            |path: &String| fs::metadata(self.location.root.join(path)).map(|status| status.ino()).ok();
        let holds = |program: &&Program| inode(&program.path) == Some(program.inode);
        self.programs.iter().filter(holds).map(|program| program.path.clone()).collect()
    }

    /// One of the blobs.
    fn blob(&self, number: usize) -> Option<String> {
        let mut names = blobd_tests::store_dir::names(&self.location.root.join("blobs"));
        names.retain(|name| name.starts_with("sha256-"));
        names.get(number.checked_rem(names.len())?).map(|name| format!("blobs/{name}"))
    }

    /// A request may be refused only because of a damaged blob. The daemon would collect the blobs of the
    /// failed transaction within a second; it is killed, so that they stay.
    fn may_be_damaged(&mut self, error: &ClientError) {
        assert!(self.is_damaged && error.code() == ErrorCode::Corrupt, "{error}");
        self.restart_killed(|_| ());
    }

    /// The name of a pinned model is not given to another one.
    fn may_be_pinned_or_damaged(&mut self, error: &ClientError, name: usize) {
        if error.code() == ErrorCode::Denied {
            self.may_be_pinned(error, name);
        } else {
            self.may_be_damaged(error);
        }
    }

    /// A request may be refused only if the model is missing or incomplete.
    fn may_be_refused(&self, error: &ClientError, name: usize) {
        match self.names.contains_key(&name) {
            false => assert_eq!(error.code(), ErrorCode::NotFound, "{error}"),
            true => assert_eq!(error.code(), ErrorCode::Corrupt, "{error}"),
        }
    }

    fn may_be_pinned(&self, error: &ClientError, name: usize) {
        match self.pinned.contains(&name) && self.names.contains_key(&name) {
            true => assert_eq!(error.code(), ErrorCode::Denied, "{error}"),
            false => self.may_be_refused(error, name),
        }
    }
}

fn manifest_place(name: usize) -> String {
    match NAMES[name] {
        "me/c:1" => "manifests/registry.ollama.ai/me/c/1".to_owned(),
        name => format!("manifests/registry.ollama.ai/library/{name}/latest"),
    }
}

fn reference(name: usize) -> Reference {
    NAMES[name].parse().unwrap()
}
