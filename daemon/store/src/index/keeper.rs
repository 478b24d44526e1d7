//! The thread that keeps a copy of the catalog on disk.
//!
//! It loads the copy if its marker says that nothing is missing, else it has the catalog built
//! from disk and begins a new copy. Then it writes what changes. Whatever goes wrong with the
//! copy, a panic or a hang of sled included, ends with a catalog that is in memory alone.

use std::collections::{BTreeSet, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::{Duration, Instant, SystemTime};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use super::cache::{Index, IndexError, Table};
use super::catalog::Catalog;
use super::marker::{Marker, Stamps};
use super::pages::{self, Edit};
use super::scan::Differences;
use super::sled_index::SledIndex;
use super::{Keeper, Order, Running, Shared, Stage, State, StoreIndex, USE_GRAIN, Use, unix_seconds};
use crate::disk::{Disk as _, KernelDisk, Root, remove_tree};
use crate::root::{Directory, Entry};
use crate::sys::give_back_memory;
use crate::{StoreError, lock};

/// How long opening and reading the copy may take.
const OPEN_LIMIT: Duration = Duration::from_secs(10);
/// How long a stop waits for the last writes.
const STOP_LIMIT: Duration = Duration::from_secs(10);
/// How long a stop waits for changes that are under way.
const SETTLE_LIMIT: Duration = Duration::from_secs(2);
/// Changes that come within this time are written together.
const GATHER: Duration = Duration::from_millis(100);
/// Pages, and recipes, written before the state is looked at again.
const BATCH: usize = 64;

impl StoreIndex {
    pub(super) fn start(&self) {
        let marker = Marker::take(&self.0.root);
        let mut state = lock(&self.0.state);
        state.is_unmarked = true;
        state.keeper = Keeper::Running(Running::default());
        if state.stage == Stage::Unbuilt {
            state.stage = Stage::Building;
        }
        drop(state);
        let index = self.clone();
        let spawned = thread::Builder::new().name("index".to_owned()).spawn(move || index.keep(marker));
        if let Err(error) = spawned {
            let mut state = lock(&self.0.state);
            state.leave_to_others();
            state.degrade(format!("cannot start its thread: {error}"));
        }
    }

    pub(super) fn stop(&self) {
        let mut state = lock(&self.0.state);
        match (state.stage, &mut state.keeper) {
            (Stage::Ready, Keeper::Running(running)) => running.order = Order::Stop,
            // Whatever is on disk has no marker and is not believed.
            _ => state.keeper = Keeper::Nobody,
        }
        self.0.changed.notify_all();
        let deadline = Instant::now() + STOP_LIMIT;
        while matches!(state.keeper, Keeper::Running(_)) {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                state.keeper = Keeper::Nobody;
            }
            state = self.0.wait(state, left);
        }
    }

    /// Compares everything with everything, and mends it. A copy that was given up is begun anew.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(super) fn reindex(&self) -> Result<Differences, StoreError> {
        // What is being built is no difference.
        drop(self.built()?);
        let on_disk = self.0.compare()?;
        let mut state = lock(&self.0.state);
        if matches!(state.keeper, Keeper::Degraded(_)) {
            drop(state);
            self.start();
            state = lock(&self.0.state);
        }
        if let Keeper::Running(running) = &mut state.keeper {
            running.order = Order::Compare;
        }
        self.0.changed.notify_all();
        let in_copy = loop {
            match &mut state.keeper {
                Keeper::Running(Running { order: Order::Compare, .. }) => {
                    state = self.0.wait(state, GATHER);
                    state.watch_writer();
                }
                Keeper::Running(Running { order: order @ Order::Compared(_), .. }) => {
                    break if let Order::Compared(count) = std::mem::take(order) { count } else { 0 };
                }
                _ => break 0,
            }
        };
        let (blob_count, recipe_count) = (state.catalog.blob_count(), state.catalog.recipe_count());
        Ok(Differences { blob_count, recipe_count, count: on_disk + in_copy })
    }

    /// The thread.
    fn keep(&self, marker: Option<Marker>) {
        let outcome = caught(|| {
            let index = self.0.open(marker)?;
            // Somebody may wait for the catalog; nobody waits for the copy.
            let _ = rustix::process::nice(5);
            self.0.write(index)
        });
        let Err(error) = outcome else { return };
        let mut state = lock(&self.0.state);
        if matches!(state.keeper, Keeper::Running(_)) {
            state.degrade(error.to_string());
        }
        state.leave_to_others();
        self.0.changed.notify_all();
    }
}

impl Shared {
    /// Loads the copy, or builds the catalog from disk and begins a new copy.
    fn open(&self, marker: Option<Marker>) -> Result<Box<dyn Index>, IndexError> {
        let reason = match marker.map(|marker| self.load(&marker)) {
            Some(Ok(index)) => return Ok(index),
            Some(Err(error)) => error.to_string(),
            None => "the store was not closed cleanly, or changed without a daemon".to_owned(),
        };
        tracing::info!("index: rebuilt from disk: {reason}");
        self.refresh()?;
        {
            let mut state = lock(&self.state);
            state.catalog.touch_all();
            let (blobs, recipes) = (state.catalog.blob_count(), state.catalog.recipe_count());
            tracing::info!("index: complete with {blobs} blobs and {recipes} recipes");
        }
        let directory = clear(&self.root)?;
        let index = within(OPEN_LIMIT, "opening it", move || SledIndex::open(directory))?;
        Ok(Box::new(index))
    }

    fn load(&self, marker: &Marker) -> Result<Box<dyn Index>, IndexError> {
        let _alone = lock(&self.scans);
        {
            let mut state = lock(&self.state);
            state.noted = Some(super::Noted::default());
            // A change of our own since the start makes the marker wrong, which the next line finds.
            state.directories = Some(marker.directories().clone());
        }
        marker.check_store(&self.root)?;
        let directory = own_directory(&self.root)?;
        let read = within(OPEN_LIMIT, "reading it", move || {
            let index = SledIndex::open(directory)?;
            let (catalog, uses) = (pages::read(&index)?, read_uses(&index)?);
            Ok((index, catalog, uses))
        });
        let (index, catalog, uses) = read.inspect_err(|error| self.put_aside(error))?;
        marker.check_content(&catalog).inspect_err(|error| self.put_aside(error))?;
        lock(&self.state).adopt(catalog);
        self.adopt_uses(uses);
        self.changed.notify_all();
        give_back_memory();
        tracing::info!("index: loaded without a rebuild");
        Ok(Box::new(index))
    }

    /// Takes what was written down of the models' uses.
    fn adopt_uses(&self, uses: HashMap<Digest, Use>) {
        let mut known = lock(&self.uses);
        for (manifest, used) in uses {
            let known = known.entry(manifest).or_default();
            *known = Use { last: used.last.max(known.last), written: used.written };
        }
    }

    /// Keeps a copy that cannot be read, for whoever wants to know why; one at the most.
    fn put_aside(&self, error: &IndexError) {
        tracing::warn!("index: {error}");
        if let Err(error) = put_aside(&self.root) {
            tracing::warn!("index: cannot be put aside: {error}");
        }
    }

    /// Writes what changes until it is told to stop.
    fn write(&self, mut index: Box<dyn Index>) -> Result<(), IndexError> {
        let mut is_synced = true;
        loop {
            match self.next_work(is_synced) {
                Work::Edit(edits) => {
                    edits.iter().try_for_each(|edit| edit.apply(&mut *index))?;
                    is_synced = false;
                }
                Work::Sync => {
                    index.sync()?;
                    is_synced = true;
                }
                Work::Compare => {
                    let count = self.differences(&*index)?;
                    if let Keeper::Running(running) = &mut lock(&self.state).keeper {
                        running.order = Order::Compared(count);
                    }
                    self.changed.notify_all();
                }
                Work::Close => return self.close(index),
                Work::Nothing => return Ok(()),
            }
        }
    }

    fn next_work(&self, is_synced: bool) -> Work {
        let mut state = lock(&self.state);
        let mut settled_by = None;
        loop {
            let Keeper::Running(running) = &mut state.keeper else { return Work::Nothing };
            running.writing_since = None;
            let order = running.order;
            let edits = state.take_edits(&mut lock(&self.uses), order);
            if let (false, Keeper::Running(running)) = (edits.is_empty(), &mut state.keeper) {
                running.writing_since = Some(Instant::now());
                return Work::Edit(edits);
            }
            if !is_synced {
                return Work::Sync;
            }
            let limit = match order {
                Order::Compare => return Work::Compare,
                Order::Stop if state.changes_in_flight == 0 => return Work::Close,
                Order::Stop => {
                    let deadline = *settled_by.get_or_insert_with(|| Instant::now() + SETTLE_LIMIT);
                    if Instant::now() > deadline {
                        return Work::Close;
                    }
                    GATHER
                }
                Order::Nothing | Order::Compared(_) => USE_GRAIN,
            };
            state = self.wait(state, limit);
            if state.has_edits() {
                drop(state);
                thread::sleep(GATHER);
                state = lock(&self.state);
            }
        }
    }

    /// Lets go of the copy, and vouches for it if nothing has changed meanwhile.
    fn close(&self, index: Box<dyn Index>) -> Result<(), IndexError> {
        index.close()?;
        let mut state = lock(&self.state);
        state.look_for_others(&self.root);
        let is_complete = !state.has_edits() && state.changes_in_flight == 0 && !state.is_suspect;
        if let (true, Some(stamps)) = (is_complete, Stamps::of(&self.root)) {
            Marker::new(&self.root, &state.catalog, stamps)
                .map_or(Ok(()), |marker| marker.write(&self.root))?;
            // Whoever changes something from now on removes it.
            state.is_unmarked = false;
        }
        state.keeper = Keeper::Nobody;
        self.changed.notify_all();
        Ok(())
    }

    /// In how many entries the copy is not what the catalog says; they are to be written again.
    fn differences(&self, index: &dyn Index) -> Result<u64, IndexError> {
        Ok(self.differing_rows(index)? + self.differing_recipes(index)?)
    }

    fn differing_rows(&self, index: &dyn Index) -> Result<u64, IndexError> {
        let (mut seen, mut count) = (BTreeSet::new(), 0);
        index.scan(Table::Blobs, &mut |key, value| {
            let number = u32::from_be_bytes(key.try_into().unwrap_or_default());
            seen.insert(number);
            count += lock(&self.state).check_page(number, value);
            Ok(())
        })?;
        let mut state = lock(&self.state);
        for number in (0..state.catalog.page_count()).filter(|number| !seen.contains(number)) {
            count += state.check_page(number, &[]);
        }
        Ok(count)
    }

    fn differing_recipes(&self, index: &dyn Index) -> Result<u64, IndexError> {
        let mut right: HashMap<Digest, usize> = HashMap::new();
        let mut wrong = BTreeSet::new();
        index.scan(Table::Recipes, &mut |key, value| {
            let Some((file, chunk)) = pages::parse_chunk_key(key) else { return Ok(()) };
            if pages::is_chunk(&lock(&self.state).catalog, file, chunk, value) {
                *right.entry(file).or_default() += 1;
            } else {
                wrong.insert(file);
            }
            Ok(())
        })?;
        let mut state = lock(&self.state);
        let State { catalog, .. } = &mut *state;
        let is_whole = |file: &Digest| {
            let row = catalog.recipe_row(*file);
            row.is_some_and(|row| right.get(file) == Some(&pages::chunk_count(row)))
        };
        wrong.extend(catalog.recipe_files().into_iter().filter(|file| !is_whole(file)));
        // What waits to be written is no difference.
        wrong.retain(|file| !catalog.changes().recipes.contains(file));
        let count = wrong.len() as u64;
        catalog.changes_mut().recipes.extend(wrong);
        Ok(count)
    }
}

/// What the thread does next.
enum Work {
    Edit(Vec<Edit>),
    Sync,
    Compare,
    Close,
    /// The copy is no longer wanted.
    Nothing,
}

impl State {
    /// Whoever waits for the catalog builds it without the thread.
    fn leave_to_others(&mut self) {
        if self.stage == Stage::Building {
            self.stage = Stage::Unbuilt;
        }
    }

    /// Some of what is to be written.
    fn take_edits(&mut self, uses: &mut HashMap<Digest, Use>, order: Order) -> Vec<Edit> {
        let changes = self.catalog.changes_mut();
        let pages: Vec<u32> = std::iter::from_fn(|| changes.pages.pop_first()).take(BATCH).collect();
        let recipes: Vec<Digest> = std::iter::from_fn(|| changes.recipes.pop_first()).take(BATCH).collect();
        let mut edits: Vec<Edit> =
            pages.into_iter().map(|number| pages::page_edit(&self.catalog, number)).collect();
        edits.extend(recipes.into_iter().flat_map(|file| pages::recipe_edits(&self.catalog, file)));
        let grain = if order == Order::Stop { 1 } else { USE_GRAIN.as_secs() };
        for (manifest, used) in uses {
            if used.last >= used.written.saturating_add(grain) {
                used.written = used.last;
                let (key, value) = (manifest.as_bytes().to_vec(), used.last.to_le_bytes().to_vec());
                edits.push(Edit::Put { table: Table::Uses, key, value });
            }
        }
        edits
    }

    fn has_edits(&self) -> bool {
        !self.catalog.changes().pages.is_empty() || !self.catalog.changes().recipes.is_empty()
    }

    /// How many rows of a page are kept wrongly, unless it waits to be written; then it does.
    fn check_page(&mut self, number: u32, kept: &[u8]) -> u64 {
        if self.catalog.changes().pages.contains(&number) {
            return 0;
        }
        let count = pages::rows_that_differ(&self.catalog, number, kept);
        if count > 0 {
            self.catalog.changes_mut().pages.insert(number);
        }
        count
    }

    /// Takes what was loaded, and what has been noted while it was.
    fn adopt(&mut self, catalog: Catalog) {
        let noted = self.noted.take().unwrap_or_default();
        self.catalog = catalog;
        for (digest, facts) in noted.blobs {
            self.catalog.set_blob(digest, facts);
        }
        for (file, facts) in noted.recipes {
            self.catalog.set_recipe(file, facts);
        }
        self.stage = Stage::Ready;
    }
}

fn read_uses(index: &dyn Index) -> Result<HashMap<Digest, Use>, IndexError> {
    let mut uses = HashMap::new();
    index.scan(Table::Uses, &mut |key, value| {
        // One that is malformed is forgotten.
        if let (Ok(manifest), Ok(last)) = (key.try_into(), value.try_into()) {
            let last = u64::from_le_bytes(last);
            uses.insert(Digest::from_bytes(manifest), Use { last, written: last });
        }
        Ok(())
    })?;
    Ok(uses)
}

/// Others have no business in it, nor a way to put something there.
const INDEX_MODE: u32 = 0o700;

fn sled_path() -> PathBuf {
    Path::new(layout::INDEX).join("sled")
}

/// The directory of a copy that was written before.
fn own_directory(root: &Root) -> Result<Directory, IndexError> {
    let missing = || StoreError::MissingDirectory { path: root.full(sled_path()) };
    Ok(root.find_directory(&sled_path())?.ok_or_else(missing)?)
}

/// An empty directory for a new copy.
fn clear(root: &Root) -> Result<Directory, IndexError> {
    Ok(make_empty(root).or_else(|_| put_aside(root).and_then(|()| make_empty(root)))?)
}

fn make_empty(root: &Root) -> Result<Directory, StoreError> {
    let (above, path) = (Path::new(layout::INDEX), sled_path());
    remove_tree(&KernelDisk, root, &path)?;
    for directory in [above, &path] {
        match KernelDisk.create_dir(root, directory) {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {}
            made => {
                made.map_err(root.failure("create directory", directory))?;
                // Whatever the umask is.
                root.set_directory_mode(directory, INDEX_MODE)?;
            }
        }
    }
    let missing = || StoreError::MissingDirectory { path: root.full(&path) };
    root.find_directory(&path)?.ok_or_else(missing)
}

/// Renames `index` to `index.bad-<unix seconds>`, in place of an older one.
fn put_aside(root: &Root) -> Result<(), StoreError> {
    const BAD: &str = "index.bad-";
    for entry in root.find_directory(Path::new(""))?.iter().flat_map(Directory::entries).flatten() {
        let entry = entry?;
        let is_older = entry.name.to_string_lossy().starts_with(BAD);
        if is_older && let Err(error) = remove_older(root, &entry) {
            // One copy too many does less harm than no index.
            tracing::warn!("{error}");
        }
    }
    let name = PathBuf::from(format!("{BAD}{}", unix_seconds(SystemTime::now())));
    KernelDisk.rename(root, Path::new(layout::INDEX), &name).map_err(root.failure("rename to", &name))
}

/// Removes what was put aside before: often just because it could not be read or written.
fn remove_older(root: &Root, entry: &Entry) -> Result<(), StoreError> {
    let path = Path::new(&entry.name);
    if !entry.is_dir() {
        return KernelDisk.remove_file(root, path).map_err(root.failure("remove", path));
    }
    root.set_directory_mode(path, INDEX_MODE)?;
    remove_tree(&KernelDisk, root, path)
}

/// Runs what may hang on a thread of its own, and gives up on it after `limit`.
fn within<T: Send + 'static>(
    limit: Duration,
    what: &'static str,
    work: impl FnOnce() -> Result<T, IndexError> + Send + 'static,
) -> Result<T, IndexError> {
    let (sender, receiver) = mpsc::channel();
    let thread = thread::Builder::new().name("index-open".to_owned());
    let spawned = thread.spawn(move || {
        // Nobody waits any more if this took too long.
        let _ = sender.send(caught(work));
    });
    spawned.map_err(|source| IndexError::Io { path: "thread".into(), source })?;
    receiver.recv_timeout(limit).unwrap_or(Err(IndexError::TooSlow { what, limit }))
}

/// Turns a panic into an error.
fn caught<T>(work: impl FnOnce() -> Result<T, IndexError>) -> Result<T, IndexError> {
    // What the work has touched is given up if it panics.
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| {
        let text = panic.downcast_ref::<String>().cloned();
        let text = text.or_else(|| panic.downcast_ref::<&str>().map(ToString::to_string));
        Err(IndexError::Panic(text.unwrap_or_default()))
    })
}
