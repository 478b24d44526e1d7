//! Going on where an earlier session has stopped.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::split::{SplitPlan, Target};
use rustix::fs::{Advice, fadvise};

use super::journal::Record;
use super::{Extents, PartialDirectory};
use crate::assembler::Assembler;
use crate::{Staging, StoreError, lock};

/// While what a session has written is what the disk has, and means the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Session {
    /// A power cut can take from the disk what was not synced; a killed process cannot.
    boot: [u8; 16],
    /// Offsets in the file are offsets in other files by another plan.
    plan: [u8; 16],
}

impl Session {
    pub(super) fn by(plan: &SplitPlan) -> Self {
        Self { boot: boot_id(), plan: fingerprint(plan) }
    }

    pub(super) const fn record(self) -> Record {
        Record::Session { boot: self.boot, plan: self.plan }
    }
}

/// What a journal claims, as far as it is about the same plan.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Ranges of the file, written since this boot: the kernel still has them.
    certain: Vec<Range<u64>>,
    /// Ranges written before, with their content's CRC-32.
    doubtful: Vec<(Range<u64>, u32)>,
    stored: BTreeMap<usize, Digest>,
}

impl Claims {
    pub(super) fn of(records: &[Record], now: &Session) -> Self {
        let mut claims = Self::default();
        let (mut is_same_plan, mut is_same_boot) = (false, false);
        for record in records {
            match *record {
                Record::Session { boot, plan } => {
                    (is_same_plan, is_same_boot) = (plan == now.plan, boot == now.boot);
                    if !is_same_plan {
                        // That session has emptied the directory.
                        claims = Self::default();
                    }
                }
                Record::Arrived { offset, length, crc } if is_same_plan => {
                    let range = offset..offset.saturating_add(u64::from(length));
                    if is_same_boot { claims.certain.push(range) } else { claims.doubtful.push((range, crc)) }
                }
                Record::Stored { blob, digest } if is_same_plan => {
                    claims.stored.insert(usize::try_from(blob).unwrap_or(usize::MAX), digest);
                }
                Record::Arrived { .. } | Record::Stored { .. } => {}
            }
        }
        claims
    }

    pub(super) fn is_empty(&self) -> bool {
        self.certain.is_empty() && self.doubtful.is_empty() && self.stored.is_empty()
    }
}

impl Assembler {
    /// Takes over what of the claims is true.
    pub(super) fn recover(&self, partial: &PartialDirectory, claims: &Claims) -> Result<(), StoreError> {
        let mut there = Extents::default();
        claims.certain.iter().for_each(|range| there.insert(range.clone()));
        let mut files = BTreeMap::new();
        for blob in partial.present_files(self.plan()) {
            if partial.reopen(blob, &self.staging)? {
                files.insert(blob, partial.path_of(blob));
            }
        }
        lock(&self.state).files = files.clone();
        for (range, crc) in &claims.doubtful {
            if self.has(range, *crc) {
                there.insert(range.clone());
            } else {
                // A later session may have fetched it again; then it has a record of its own.
                tracing::debug!("bytes {range:?} of {} were lost", partial.home.file);
            }
        }
        let mut stored = BTreeMap::new();
        for (blob, planned) in self.plan().blobs().iter().enumerate() {
            if files.contains_key(&blob) {
                continue;
            }
            partial.ranges(self.plan(), blob).for_each(|range| there.remove(range));
            if let Some(digest) = claims.stored.get(&blob)
                && partial.home.store.blob_size(*digest)? == Some(planned.size)
            {
                stored.insert(blob, *digest);
                partial.ranges(self.plan(), blob).for_each(|range| there.insert(range));
            }
        }
        there.remove(partial.home.size..u64::MAX);
        partial.remove_cut_off(self.plan(), &files, &mut there)?;
        let mut state = lock(&self.state);
        (state.arrived, state.stored) = (there, stored);
        Ok(())
    }

    fn has(&self, range: &Range<u64>, crc: u32) -> bool {
        let length = usize::try_from(range.end.saturating_sub(range.start)).unwrap_or(usize::MAX);
        if range.end > self.plan().file_size() || length > MAX_RECORD_BYTES {
            return false;
        }
        let mut content = vec![0; length];
        self.read(range.start, &mut content).is_ok() && crc32fast::hash(&content) == crc
    }
}

impl PartialDirectory {
    /// Removes what lies beyond the ends of the files that are here. A disk that lost its power, or was
    /// unplugged, while the machine went on may have a journal that claims more.
    fn remove_cut_off(
        &self,
        plan: &SplitPlan,
        files: &BTreeMap<usize, PathBuf>,
        there: &mut Extents,
    ) -> Result<(), StoreError> {
        let length = |path: &Path| {
            let status = self.home.store.root.status(path)?;
            Ok::<_, StoreError>(status.map_or(0, |status| status.len()))
        };
        let literals = length(&self.literals_path())?;
        let mut blobs = BTreeMap::new();
        for (blob, path) in files {
            blobs.insert(*blob, length(path)?);
        }
        for segment in plan.segments() {
            let start = segment.offset_in_file;
            let (file_length, start_there) = match segment.target {
                Target::Blob { blob, offset_in_blob } => match blobs.get(&blob) {
                    Some(length) => (*length, offset_in_blob),
                    // Read from the store, or not begun.
                    None => continue,
                },
                Target::Literal { .. } => (literals, start),
            };
            let has = file_length.saturating_sub(start_there).min(segment.length);
            if has < segment.length {
                there.remove(start.saturating_add(has)..start.saturating_add(segment.length));
            }
        }
        Ok(())
    }

    fn present_files(&self, plan: &SplitPlan) -> Vec<usize> {
        (0..plan.blobs().len()).filter(|blob| self.home.has_begun(*blob)).collect()
    }

    /// Opens the file of a planned blob to go on with it; false if it has been published.
    fn reopen(&self, blob: usize, staging: &Staging) -> Result<bool, StoreError> {
        let (store, path) = (&self.home.store, self.path_of(blob));
        // One that was about to be published is read-only, and may lack something all the same.
        match store.disk().set_mode_of(&path, 0o600) {
            Ok(_file) => {}
            // After a power cut, btrfs may know a file under the name that it had and under the one that it
            // was renamed to. Then it is a blob of the store and must not be written to.
            Err(StoreError::UnexpectedFile { .. }) if self.has_further_names(&path)? => {
                store.disk().remove_file(&path)?;
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        forget_cached(&*staging.written().writer(&path)?);
        Ok(true)
    }

    fn has_further_names(&self, path: &Path) -> Result<bool, StoreError> {
        Ok(self.home.store.root.status(path)?.is_some_and(|status| status.is_file() && status.links() > 1))
    }
}

/// The most bytes that one record is about: what one write takes.
const MAX_RECORD_BYTES: usize = 16 << 20;

/// Of what earlier sessions wrote, a write-back may have failed that was reported to them, or to
/// nobody; the kernel keeps such a page as if it were on disk. It drops it here, so that what is
/// read and hashed from now on is what the disk has. A page that is not on disk yet stays, and if
/// that fails, it is reported to this descriptor or to the one for `syncfs`, which are both older.
fn forget_cached(file: &File) {
    // Where it cannot be done, the next scrub sees what is wrong.
    let _ = fadvise(file, 0, None, Advice::DontNeed);
}

/// Tells this boot of the machine from others.
#[expect(clippy::disallowed_methods, reason = "a file of the kernel, none of the store")]
pub(super) fn boot_id() -> [u8; 16] {
    let id = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| {
        // Unknown: every session is one of its own, and what it wrote is compared.
        format!("{:?} {}", std::time::SystemTime::now(), std::process::id()).into_bytes()
    });
    half(Digest::of(&id))
}

fn fingerprint(plan: &SplitPlan) -> [u8; 16] {
    let mut hasher = Hasher::new();
    for segment in plan.segments() {
        let (kind, number, offset) = match segment.target {
            Target::Blob { blob, offset_in_blob } => (0, blob, offset_in_blob),
            Target::Literal { literal } => (1, literal, 0),
        };
        for number in [kind, segment.offset_in_file, segment.length, number as u64, offset] {
            hasher.update(&number.to_le_bytes());
        }
    }
    half(hasher.finish())
}

fn half(digest: Digest) -> [u8; 16] {
    digest.as_bytes().first_chunk().copied().unwrap_or_default()
}
