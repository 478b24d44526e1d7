//! Downloads that can be resumed: `partial/sha256-…/`, one directory for each file.
//!
//! What arrives goes straight into the files that become the blobs, so each byte is written once.
//! The journal beside them says which bytes those are. Nothing here is durable and nothing has to
//! be: after a crash of the daemon all of it is still there, and after one of the machine what the
//! journal claims is compared with what the disk has. Whatever it says, a file is committed only
//! when all its bytes have its digest.
//!
//! As long as a file has its directory here, what the store has of it is not collected.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt as _;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::split::{BlobPlaces, Part, Segment, SplitPlan, Target};

use super::staged::StagedHash;
use super::staging::{Room, Staging};
use super::{Store, StoreError, lock};

mod extents;
mod journal;
mod recover;

pub use extents::Extents;
use journal::Record;
use recover::{Claims, Session};

/// A download's directory. One transfer has it at a time, which the caller sees to.
#[derive(Debug)]
pub struct PartialFile {
    store: Arc<Store>,
    file: Digest,
    size: u64,
    directory: PathBuf,
    /// What earlier sessions have written.
    records: Vec<Record>,
}

impl PartialFile {
    /// What there is of a file of `size` bytes, if anything.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn open(store: &Arc<Store>, file: Digest, size: u64) -> Result<Self, StoreError> {
        let directory = layout::partial(file);
        let journal = store.root.read_limited(&directory.join(JOURNAL), MAX_JOURNAL_BYTES)?;
        let found = journal.map_or_else(Vec::new, |journal| journal::parse(&journal, file, size));
        Ok(Self { store: Arc::clone(store), file, size, directory, records: found })
    }

    /// The first bytes of the file, as many as have arrived in one run, but at most `limit`: the
    /// header, from which the plan is made. None that have arrived before this boot of the machine,
    /// which may be lost: with another plan all the rest would be.
    #[must_use]
    pub fn head(&self, limit: u64) -> Vec<u8> {
        let certain = self.claimed(Some(recover::boot_id()));
        let length = usize::try_from(certain.end_of_run(0).min(limit)).unwrap_or_default();
        let mut head = vec![0; length];
        // In every plan the file begins with its first blob.
        let Ok(file) = self.store.root.open_file(&self.path_of(0)) else { return Vec::new() };
        let read = file.metadata().and_then(|metadata| {
            head.truncate(usize::try_from(metadata.len()).unwrap_or_default().min(length));
            file.read_exact_at(&mut head, 0)
        });
        if read.is_ok() { head } else { Vec::new() }
    }

    /// How much the journal says has come.
    #[must_use]
    pub fn claimed_bytes(&self) -> u64 {
        self.claimed(None).total()
    }

    /// Whether a planned blob has a file here.
    #[must_use]
    pub fn has_begun(&self, blob: usize) -> bool {
        self.store.root.status(&self.path_of(blob)).is_ok_and(|status| status.is_some())
    }

    /// What has arrived by the journal; only since a boot if one is given.
    fn claimed(&self, since: Option<[u8; 16]>) -> Extents {
        let (mut arrived, mut counts) = (Extents::default(), since.is_none());
        for record in &self.records {
            match *record {
                Record::Session { boot, .. } => counts = since.is_none_or(|since| since == boot),
                Record::Arrived { offset, length, .. } if counts => {
                    arrived.insert(offset..offset.saturating_add(u64::from(length)));
                }
                Record::Arrived { .. } | Record::Stored { .. } => {}
            }
        }
        arrived
    }

    /// Goes on by this plan. What has arrived by another one is given up, and so is what the disk
    /// does not have as the journal says.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn follow(self, plan: SplitPlan, staging: Staging) -> Result<Partial, StoreError> {
        let session = Session::by(&plan);
        let claims = Claims::of(&self.records, &session);
        let mut partial = Partial::new(self, plan, staging)?;
        if claims.is_empty() {
            partial.begin_anew()?;
        } else {
            partial.recover(&claims)?;
        }
        partial.append(session.record())?;
        Ok(partial)
    }

    fn path_of(&self, blob: usize) -> PathBuf {
        self.directory.join(blob.to_string())
    }
}

/// A download in progress: its bytes come in any order, from any thread.
#[derive(Debug)]
pub struct Partial {
    home: PartialFile,
    staging: Staging,
    plan: SplitPlan,
    places: BlobPlaces,
    journal: File,
    /// Held while a blob's file is made and room for it is found, which may take long: two who write the
    /// same blob must not both begin it. Who reads waits for nobody.
    beginning: Mutex<()>,
    /// Held for changes in memory alone.
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    end_of_journal: u64,
    arrived: Extents,
    /// Planned blobs whose bytes are read from the store.
    stored: BTreeMap<usize, Digest>,
    /// Planned blobs that have a file here.
    begun: BTreeSet<usize>,
}

impl Partial {
    fn new(home: PartialFile, plan: SplitPlan, staging: Staging) -> Result<Self, StoreError> {
        let disk = home.store.disk();
        home.store.create_directories(Path::new(layout::PARTIAL))?;
        disk.create_dir(&home.directory)?;
        let path = home.directory.join(JOURNAL);
        let journal = disk.open_or_create(&path, 0o600)?;
        let end_of_journal = (journal::HEAD_BYTES + home.records.len() * journal::RECORD_BYTES) as u64;
        // A torn record may have sound ones behind it, which are none of what follows.
        journal.set_len(end_of_journal).map_err(home.store.root.failure("shorten", &path))?;
        let state = State {
            end_of_journal,
            arrived: Extents::default(),
            stored: BTreeMap::new(),
            begun: BTreeSet::new(),
        };
        let (places, beginning) = (BlobPlaces::of(&plan), Mutex::default());
        Ok(Self { home, staging, plan, places, journal, beginning, state: Mutex::new(state) })
    }

    /// How the file is split.
    #[must_use]
    pub const fn plan(&self) -> &SplitPlan {
        &self.plan
    }

    /// Takes bytes of the file: they are written to where they will stay, and noted. Those that have
    /// arrived before stay as they are: they may have been hashed already.
    ///
    /// # Errors
    /// [`StoreError::Io`], [`StoreError::NoRoom`], [`StoreError::Quota`]; [`StoreError::BlobSize`]
    /// for bytes beyond the end.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let gaps = lock(&self.state).arrived.gaps(offset..offset.saturating_add(bytes.len() as u64));
        for gap in gaps {
            // Within `bytes`, whose length is a `usize`.
            let within = |place: u64| usize::try_from(place.saturating_sub(offset)).unwrap_or(usize::MAX);
            self.write_new(gap.start, bytes.get(within(gap.start)..within(gap.end)).unwrap_or_default())?;
        }
        Ok(())
    }

    /// Takes bytes in place of those that have arrived. Nobody may be hashing the file.
    ///
    /// # Errors
    /// Those of [`Self::write`].
    pub fn replace(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        lock(&self.state).arrived.remove(offset..offset.saturating_add(bytes.len() as u64));
        self.write(offset, bytes)
    }

    fn write_new(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let mut position = offset;
        for part in self.parts(offset, bytes)? {
            self.write_part(position, &part)?;
            position = position.saturating_add(part.bytes.len() as u64);
        }
        let length = u32::try_from(bytes.len()).unwrap_or(u32::MAX);
        self.append(Record::Arrived { offset, length, crc: crc32fast::hash(bytes) })?;
        lock(&self.state).arrived.insert(offset..offset.saturating_add(u64::from(length)));
        Ok(())
    }

    /// Fills `buffer` with bytes of the file that have arrived or are read from the store.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn read(&self, offset: u64, buffer: &mut [u8]) -> Result<(), StoreError> {
        let targets = self.parts(offset, buffer)?.into_iter().map(|part| (part.target, part.bytes.len()));
        let mut done = 0;
        for (target, length) in targets.collect::<Vec<_>>() {
            let (path, offset_there) = self.source(target, offset.saturating_add(done as u64));
            let part = buffer.get_mut(done..done + length).unwrap_or_default();
            let root = &self.home.store.root;
            let file = root.open_file(&path)?;
            file.read_exact_at(part, offset_there).map_err(root.failure("read", &path))?;
            done += length;
        }
        Ok(())
    }

    /// What has still to arrive, in order.
    #[must_use]
    pub fn missing(&self) -> Vec<Range<u64>> {
        lock(&self.state).arrived.gaps(0..self.home.size)
    }

    /// Where the run ends of bytes that can be read from `offset` on.
    #[must_use]
    pub fn end_of_run(&self, offset: u64) -> u64 {
        lock(&self.state).arrived.end_of_run(offset)
    }

    /// How many bytes need not arrive any more.
    #[must_use]
    pub fn arrived_bytes(&self) -> u64 {
        lock(&self.state).arrived.total()
    }

    /// Whether nothing of a planned blob has arrived yet.
    #[must_use]
    pub fn is_untouched(&self, blob: usize) -> bool {
        let state = lock(&self.state);
        !state.begun.contains(&blob) && !state.stored.contains_key(&blob)
    }

    /// From now on a planned blob is read from the store, where it has this digest. The caller has
    /// it pinned.
    pub fn take_stored(&self, blob: usize, digest: Digest) {
        let mut state = lock(&self.state);
        state.stored.insert(blob, digest);
        for range in self.ranges(blob) {
            state.arrived.insert(range);
        }
    }

    /// No more: it has to arrive after all.
    pub fn forget_stored(&self, blob: usize) {
        let mut state = lock(&self.state);
        if state.stored.remove(&blob).is_some() {
            for range in self.ranges(blob) {
                state.arrived.remove(range);
            }
        }
    }

    /// The planned blobs that are read from the store.
    #[must_use]
    pub fn stored(&self) -> BTreeMap<usize, Digest> {
        lock(&self.state).stored.clone()
    }

    /// The digest in the making of a planned blob that has a file here; none for one that is read
    /// from the store.
    #[must_use]
    pub fn hash(&self, blob: usize) -> Option<StagedHash> {
        let size = self.plan.blobs().get(blob)?.size;
        if size > 0 && !self.has_begun(blob) {
            return None;
        }
        let store = &self.home.store;
        let room = Room::of_partial(store, store.space().on_disk(size));
        Some(StagedHash::of(self.home.path_of(blob), room, size))
    }

    /// Notes that planned blobs have these digests, before their files go to their final places: a
    /// crash on the way loses nothing then.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn note_digests(&self, digests: &[Digest]) -> Result<(), StoreError> {
        for (blob, digest) in digests.iter().enumerate() {
            let blob = u32::try_from(blob).unwrap_or(u32::MAX);
            self.append(Record::Stored { blob, digest: *digest })?;
        }
        Ok(())
    }

    fn parts<'b>(&self, offset: u64, bytes: &'b [u8]) -> Result<Vec<Part<'b>>, StoreError> {
        let end = offset.saturating_add(bytes.len() as u64);
        let (digest, expected) = (self.home.file, self.home.size);
        self.plan.parts(offset, bytes).map_err(|_too_long| StoreError::BlobSize {
            digest,
            found: end,
            expected,
        })
    }

    /// Where bytes are read from that lie at `offset_in_file`.
    fn source(&self, target: Target, offset_in_file: u64) -> (PathBuf, u64) {
        match target {
            Target::Literal { .. } => (self.home.directory.join(LITERALS), offset_in_file),
            Target::Blob { blob, offset_in_blob } => match lock(&self.state).stored.get(&blob) {
                Some(digest) => (layout::blob(*digest), offset_in_blob),
                None => (self.home.path_of(blob), offset_in_blob),
            },
        }
    }

    fn write_part(&self, offset_in_file: u64, part: &Part<'_>) -> Result<(), StoreError> {
        let disk = self.home.store.disk();
        match part.target {
            Target::Blob { blob, offset_in_blob } => {
                let file = self.file_of(blob)?;
                disk.write_at(&self.home.path_of(blob), &file, part.bytes, offset_in_blob)
            }
            Target::Literal { .. } => {
                let path = self.home.directory.join(LITERALS);
                let file = disk.open_or_create(&path, 0o600)?;
                disk.write_at(&path, &file, part.bytes, offset_in_file)
            }
        }
    }

    /// The file of a planned blob, for writing. A new one has its room set aside.
    fn file_of(&self, blob: usize) -> Result<Arc<File>, StoreError> {
        let path = self.home.path_of(blob);
        if self.has_begun(blob) {
            return self.staging.written().writer(&path);
        }
        let _alone = lock(&self.beginning);
        if self.has_begun(blob) {
            return self.staging.written().writer(&path);
        }
        let size = self.plan.blobs().get(blob).map_or(0, |planned| planned.size);
        let disk = self.home.store.disk();
        disk.remove_file(&path)?;
        let file = disk.create_file(&path, 0o600)?;
        let room = self.staging.room(size, || disk.reserve(&path, &file, size));
        let room = room.inspect_err(|_| {
            // Empty, and nothing of it is noted.
            let _ = disk.remove_file(&path);
        })?;
        room.stays_in_partial();
        let file = self.staging.written().add(&path, file)?;
        lock(&self.state).begun.insert(blob);
        Ok(file)
    }

    fn has_begun(&self, blob: usize) -> bool {
        lock(&self.state).begun.contains(&blob)
    }

    /// Where a planned blob's bytes are in the file.
    fn ranges(&self, blob: usize) -> impl Iterator<Item = Range<u64>> {
        let range =
            |segment: &Segment| segment.offset_in_file..segment.offset_in_file.saturating_add(segment.length);
        self.places.segments(&self.plan, blob).map(range)
    }

    /// Writes a record behind the others. A place that stays empty because its write fails ends the
    /// journal there for the next session, which then fetches more again than it would have to.
    fn append(&self, record: Record) -> Result<(), StoreError> {
        let place = {
            let mut state = lock(&self.state);
            let next = state.end_of_journal.saturating_add(journal::RECORD_BYTES as u64);
            std::mem::replace(&mut state.end_of_journal, next)
        };
        let path = self.home.directory.join(JOURNAL);
        self.home.store.disk().write_at(&path, &self.journal, &record.encode(), place)
    }

    /// Empties the directory and begins a journal.
    fn begin_anew(&self) -> Result<(), StoreError> {
        let (disk, directory) = (self.home.store.disk(), &self.home.directory);
        if let Some(listed) = self.home.store.root.find_directory(directory)? {
            for entry in listed.entries()? {
                let path = directory.join(entry?.name);
                if !path.ends_with(JOURNAL) {
                    self.staging.written().forget(&path);
                    disk.remove_file(&path)?;
                }
            }
        }
        self.home.store.space().recount_partial();
        let path = directory.join(JOURNAL);
        self.journal.set_len(0).map_err(self.home.store.root.failure("shorten", &path))?;
        disk.write_at(&path, &self.journal, &journal::head(self.home.file, self.home.size), 0)?;
        lock(&self.state).end_of_journal = journal::HEAD_BYTES as u64;
        Ok(())
    }
}

impl Store {
    /// The files that have something here.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn partial_files(&self) -> Result<Vec<Digest>, StoreError> {
        let Some(directory) = self.root.find_directory(Path::new(layout::PARTIAL))? else {
            return Ok(Vec::new());
        };
        let mut files = Vec::new();
        for entry in directory.entries()? {
            // What has another name is none of blobd's.
            files.extend(entry?.name.to_str().and_then(layout::parse_blob_name));
        }
        Ok(files)
    }

    /// The same, with what it takes on disk and when it was last added
    /// to.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn partials(&self) -> Result<Vec<PartialDownload>, StoreError> {
        let described = self.partial_files()?.into_iter().map(|file| {
            let directory = layout::partial(file);
            let changed = |path: &Path| Some(self.root.status(path).ok()??.modified());
            let last_used = changed(&directory.join(JOURNAL)).or_else(|| changed(&directory));
            PartialDownload { file, bytes: self.root.tree_bytes(&directory), last_used }
        });
        Ok(described.collect())
    }

    /// Removes what has arrived of a file; says how much that took on disk.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn remove_partial(&self, file: Digest) -> Result<u64, StoreError> {
        let directory = layout::partial(file);
        let bytes = self.root.tree_bytes(&directory);
        if self.root.status(&directory)?.is_some() {
            self.disk().remove_tree(&directory)?;
            self.space().recount_partial();
        }
        Ok(bytes)
    }

    /// What downloads have left of these files is of no more use to whoever has had them pinned; it
    /// goes, unless somebody else is at it.
    pub fn forget_partials(&self, files: impl IntoIterator<Item = Digest>) {
        for file in files.into_iter().filter(|file| !self.leases().is_pinned(*file)) {
            if let Err(error) = self.remove_partial(file) {
                tracing::warn!("{error}; `blobd gc` removes it when a week has passed");
            }
        }
    }

    /// The blobs that downloads have brought to their final places: their files may be no part of
    /// any model yet.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub(crate) fn blobs_of_partial(&self, file: Digest) -> Result<BTreeSet<Digest>, StoreError> {
        let path = layout::partial(file).join(JOURNAL);
        let journal = self.root.read_limited(&path, MAX_JOURNAL_BYTES)?;
        Ok(journal.map(|journal| journal::stored(&journal, file).into_iter().collect()).unwrap_or_default())
    }
}

/// A download that can be resumed, or a file of a model that is not complete.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PartialDownload {
    /// The file's digest.
    pub file: Digest,
    /// What has arrived takes so much on disk.
    pub bytes: u64,
    /// When the last of it arrived, if the file system knows.
    pub last_used: Option<SystemTime>,
}

impl PartialDownload {
    /// Whether nobody has gone on with it for a week. One from the future may have been added to a
    /// moment ago.
    #[must_use]
    pub(crate) fn is_abandoned(&self, now: SystemTime) -> bool {
        const KEPT: Duration = Duration::from_secs(7 * 24 * 60 * 60);
        self.last_used.is_some_and(|last| now.duration_since(last).is_ok_and(|age| age > KEPT))
    }
}

const JOURNAL: &str = "journal";
/// Five million records: what is read of a file that somebody has put in a journal's place.
const MAX_JOURNAL_BYTES: u64 = 256 << 20;
/// Padding and the like, at its offset in the file.
const LITERALS: &str = "literals";

#[cfg(test)]
mod tests;
