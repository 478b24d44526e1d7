//! Continues a download where an earlier session stopped.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::ops::Range;
use std::path::{Path, PathBuf};

use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::split::{SplitPlan, Target};
use rustix::fs::{Advice, fadvise};

use super::PartialDirectory;
use crate::assembler::Assembler;
use crate::assembler::second_copy::{Difference, Differences, FirstCopy};
use crate::content::downloads::extents::Extents;
use crate::content::downloads::journal::{Record, Session};
use crate::{Staging, StoreError, lock};

impl Session {
    pub(super) fn for_plan(plan: &SplitPlan) -> Self {
        Self { boot: boot_id(), plan: fingerprint(plan) }
    }
}

/// The content of a journal for the current plan.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// Ranges of the file written since this boot: the kernel still has them.
    trusted: Vec<Range<u64>>,
    /// Ranges written before this boot, with the CRC-32 of their content.
    unverified: Vec<(Range<u64>, u32)>,
    stored: BTreeMap<usize, Digest>,
    /// Set if these claims are of a second copy.
    first: Option<FirstClaims>,
}

/// What a journal claims of a first copy whose digest is wrong.
#[derive(Debug)]
struct FirstClaims {
    digest: Digest,
    trusted: Vec<Range<u64>>,
    unverified: Vec<(Range<u64>, u32)>,
    differences: Differences,
}

impl Claims {
    pub(super) fn from_records(records: &[Record], now: &Session) -> Self {
        let mut claims = Self::default();
        let (mut is_same_plan, mut is_same_boot) = (false, false);
        for record in records {
            match *record {
                Record::Session(session) => {
                    (is_same_plan, is_same_boot) = (session.plan == now.plan, session.boot == now.boot);
                    if !is_same_plan {
                        // That session emptied the directory.
                        claims = Self::default();
                    }
                }
                Record::Arrived { offset, length, crc } if is_same_plan => {
                    let range = offset..offset.saturating_add(u64::from(length));
                    if is_same_boot {
                        claims.trusted.push(range);
                    } else {
                        claims.unverified.push((range, crc));
                    }
                }
                Record::Stored { blob, digest } if is_same_plan => {
                    claims.stored.insert(usize::try_from(blob).unwrap_or(usize::MAX), digest);
                }
                Record::SecondCopy { first } if is_same_plan => claims = claims.into_first_copy(first),
                Record::Differs { offset, length, bytes } if is_same_plan => {
                    if let Some(first) = &mut claims.first {
                        let range = offset..offset.saturating_add(u64::from(length));
                        first.differences.insert(Difference { range, bytes: u64::from(bytes) });
                    }
                }
                Record::Arrived { .. }
                | Record::Stored { .. }
                | Record::SecondCopy { .. }
                | Record::Differs { .. } => {}
            }
        }
        claims
    }

    /// Turns these into claims of a first copy. Blobs of the store may be wrong too, so they are downloaded again.
    pub(super) fn into_first_copy(self, digest: Digest) -> Self {
        let Self { trusted, unverified, .. } = self;
        let first = FirstClaims { digest, trusted, unverified, differences: Differences::default() };
        Self { first: Some(first), ..Self::default() }
    }

    pub(super) fn is_of_second_copy(&self) -> bool {
        self.first.is_some()
    }

    pub(super) fn is_empty(&self) -> bool {
        let has_none = self.trusted.is_empty() && self.unverified.is_empty() && self.stored.is_empty();
        has_none && self.first.is_none()
    }
}

impl Assembler {
    /// Adopts the claims that are true.
    pub(super) fn recover(&self, partial: &PartialDirectory, claims: &Claims) -> Result<(), StoreError> {
        let mut files = BTreeMap::new();
        for blob in partial.present_files(self.plan()) {
            if partial.reopen(blob, &self.staging)? {
                files.insert(blob, partial.path_of(blob));
            }
        }
        lock(&self.state).files = files.clone();
        let mut arrived = self.confirmed(&claims.trusted, &claims.unverified);
        let first = claims.first.as_ref();
        let mut held =
            first.map(|first| self.confirmed(&first.trusted, &first.unverified)).unwrap_or_default();
        let mut stored = BTreeMap::new();
        for (blob, planned) in self.plan().blobs().iter().enumerate() {
            if files.contains_key(&blob) {
                continue;
            }
            for range in partial.ranges(self.plan(), blob) {
                arrived.remove(range.clone());
                held.remove(range);
            }
            if let Some(digest) = claims.stored.get(&blob)
                && partial.download.store.content.blob_size(*digest)? == Some(planned.size)
            {
                stored.insert(blob, *digest);
                partial.ranges(self.plan(), blob).for_each(|range| arrived.insert(range));
            }
        }
        let copies = [Some(&mut arrived), first.map(|_| &mut held)];
        for extents in copies.into_iter().flatten() {
            extents.remove(partial.download.size..u64::MAX);
            partial.remove_truncated(self.plan(), &files, extents)?;
        }
        let mut state = lock(&self.state);
        (state.arrived, state.stored) = (arrived, stored);
        state.first = first.map(|first| FirstCopy::new(first.digest, held, first.differences.clone()));
        Ok(())
    }

    fn confirmed(&self, trusted: &[Range<u64>], unverified: &[(Range<u64>, u32)]) -> Extents {
        let mut confirmed = Extents::default();
        trusted.iter().for_each(|range| confirmed.insert(range.clone()));
        for (range, crc) in unverified {
            if self.has(range, *crc) {
                confirmed.insert(range.clone());
            } else {
                // A later session may have downloaded it again and made its own record.
                tracing::debug!("bytes {range:?} of a download were lost");
            }
        }
        confirmed
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
    /// Removes ranges beyond the ends of the files. The journal may claim more than there is if the disk lost its
    /// power, or was unplugged, while the machine kept running.
    fn remove_truncated(
        &self,
        plan: &SplitPlan,
        files: &BTreeMap<usize, PathBuf>,
        arrived: &mut Extents,
    ) -> Result<(), StoreError> {
        let length = |path: &Path| {
            let status = self.download.store.content.root.status(path)?;
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
                    // Read from the store, or not started.
                    None => continue,
                },
                Target::Literal { .. } => (literals, start),
            };
            let has = file_length.saturating_sub(start_there).min(segment.length);
            if has < segment.length {
                arrived.remove(start.saturating_add(has)..start.saturating_add(segment.length));
            }
        }
        Ok(())
    }

    fn present_files(&self, plan: &SplitPlan) -> Vec<usize> {
        (0..plan.blobs().len()).filter(|blob| self.download.has_begun(*blob)).collect()
    }

    /// Opens the file of a planned blob to continue it; returns false if it was published.
    fn reopen(&self, blob: usize, staging: &Staging) -> Result<bool, StoreError> {
        let (store, path) = (&self.download.store, self.path_of(blob));
        // A file that was about to be published is read-only, but may still be incomplete.
        match store.content.disk.set_mode_of(&path, 0o600) {
            Ok(_file) => {}
            // After a power cut, btrfs may have a published blob under its old name too. It must not be written to.
            Err(StoreError::UnexpectedFile { .. }) if self.has_other_links(&path)? => {
                store.content.disk.remove_file(&path)?;
                return Ok(false);
            }
            Err(error) => return Err(error),
        }
        drop_cached(&*staging.written().writer(&path)?);
        Ok(true)
    }

    fn has_other_links(&self, path: &Path) -> Result<bool, StoreError> {
        let status = self.download.store.content.root.status(path)?;
        Ok(status.is_some_and(|status| status.is_file() && status.links() > 1))
    }
}

/// The most bytes in one record: the size of one write.
const MAX_RECORD_BYTES: usize = 16 << 20;

/// Drops cached pages, so that what is read and hashed from now on is what the disk has. A write-back of an earlier
/// session may have failed; the kernel then keeps the page as if it were on disk. Pages that are not on disk yet stay.
/// If writing them fails, the error is reported to this descriptor or to the one for `syncfs`, which are both older.
fn drop_cached(file: &File) {
    // If it fails, the next scrub finds the damage.
    let _ = fadvise(file, 0, None, Advice::DontNeed);
}

#[expect(clippy::disallowed_methods, reason = "a file of the kernel, not of the store")]
pub(super) fn boot_id() -> [u8; 16] {
    let id = fs::read("/proc/sys/kernel/random/boot_id").unwrap_or_else(|_| {
        // Unknown: every session counts as its own boot, and its data is compared.
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

#[cfg(test)]
mod tests {
    use super::*;

    const PLAN: [u8; 16] = [1; 16];
    const OTHER_PLAN: [u8; 16] = [2; 16];
    const THIS_BOOT: [u8; 16] = [7; 16];
    const EARLIER_BOOT: [u8; 16] = [6; 16];

    fn session(boot: [u8; 16], plan: [u8; 16]) -> Record {
        Record::Session(Session { boot, plan })
    }

    fn arrived(offset: u64) -> Record {
        Record::Arrived { offset, length: 5, crc: 9 }
    }

    fn claims(records: &[Record]) -> Claims {
        Claims::from_records(records, &Session { boot: THIS_BOOT, plan: PLAN })
    }

    /// The starts of trusted ranges, those of unverified ones, and stored blobs.
    fn parts(claims: &Claims) -> (Vec<u64>, Vec<u64>, Vec<usize>) {
        let lengths = claims.trusted.iter().chain(claims.unverified.iter().map(|(range, _)| range));
        assert!(lengths.into_iter().all(|range| range.end - range.start == 5));
        assert!(claims.unverified.iter().all(|(_, crc)| *crc == 9));
        let unverified = claims.unverified.iter().map(|(range, _)| range.start);
        let trusted = claims.trusted.iter().map(|range| range.start);
        (trusted.collect(), unverified.collect(), claims.stored.keys().copied().collect())
    }

    #[test]
    fn bytes_of_this_boot_are_trusted_and_those_of_another_plan_are_dropped() {
        let stored = Record::Stored { blob: 3, digest: Digest::of(b"stored") };
        for (records, expected) in [
            (vec![], (vec![], vec![], vec![])),
            (vec![session(THIS_BOOT, PLAN)], (vec![], vec![], vec![])),
            (vec![arrived(0), stored], (vec![], vec![], vec![])),
            (vec![session(THIS_BOOT, OTHER_PLAN), arrived(0), stored], (vec![], vec![], vec![])),
            (vec![session(THIS_BOOT, PLAN), arrived(0)], (vec![0], vec![], vec![])),
            (vec![session(EARLIER_BOOT, PLAN), arrived(0)], (vec![], vec![0], vec![])),
            (vec![session(THIS_BOOT, PLAN), stored], (vec![], vec![], vec![3])),
            (
                vec![session(EARLIER_BOOT, PLAN), arrived(0), session(THIS_BOOT, PLAN), arrived(10), stored],
                (vec![10], vec![0], vec![3]),
            ),
            (
                vec![session(THIS_BOOT, PLAN), arrived(0), session(THIS_BOOT, OTHER_PLAN), arrived(20)],
                (vec![], vec![], vec![]),
            ),
        ] {
            let found = claims(&records);
            assert_eq!(found.is_empty(), expected == (vec![], vec![], vec![]), "{records:?}");
            assert_eq!(parts(&found), expected, "{records:?}");
            assert!(!found.is_of_second_copy());
        }
    }

    #[test]
    fn what_arrived_before_a_second_copy_began_is_its_first_copy() {
        let first = Digest::of(b"first");
        let differs = Record::Differs { offset: 40, length: 4, bytes: 2 };
        let records = [
            session(EARLIER_BOOT, PLAN),
            arrived(0),
            session(THIS_BOOT, PLAN),
            differs,
            arrived(10),
            Record::Stored { blob: 3, digest: Digest::of(b"stored") },
            Record::SecondCopy { first },
            differs,
            arrived(20),
        ];
        let found = claims(&records);
        assert!(found.is_of_second_copy() && !found.is_empty());
        assert_eq!(parts(&found), (vec![20], vec![], vec![]), "a stored blob may be wrong too");
        let FirstClaims { digest, trusted, unverified, differences } = found.first.unwrap();
        let expected = [Difference { range: 40..44, bytes: 2 }];
        assert_eq!((digest, trusted.len(), unverified.len()), (first, 1, 1));
        assert_eq!((trusted[0].start, &unverified[0].0, differences.ranges()), (10, &(0..5), &expected[..]));
        assert!(!claims(&records[..6]).is_of_second_copy());
        assert!(
            !claims(&[session(THIS_BOOT, OTHER_PLAN), Record::SecondCopy { first }, differs])
                .is_of_second_copy()
        );
        assert!(!claims(&[session(THIS_BOOT, PLAN), Record::SecondCopy { first }]).is_empty());
    }

    #[test]
    fn only_the_same_division_of_a_file_has_its_fingerprint() {
        let whole = |size| fingerprint(&SplitPlan::whole(size));
        assert_eq!(whole(10), whole(10));
        assert_ne!(whole(10), whole(11));
        assert_ne!(boot_id(), [0; 16]);
        assert_eq!(boot_id(), boot_id());
    }
}
