//! Verifies many blobs, two at a time: two digests cost little more than one (`blobd_sha256`).

use std::cell::Cell;
use std::fs::File;

use blobd_sha256::{Sha256, update_both};
use blobd_store_format::digest::Digest;

use super::check::verdict_on_mode;
use super::read::{Buffer, DiskFile, Next};
use super::{DiskReader, Ended, Gate, Step, Verdict};
use crate::content::internal_reads::InternalRead;
use crate::{FileStatus, Store, StoreError, lock};

/// Receives the result of each check; an error ends the checks.
pub type VerdictSink<'v> = dyn FnMut(Digest, Result<Verdict, StoreError>) -> Result<(), StoreError> + 'v;

/// Checks the blobs that `next` returns, until it returns `None` or `gate` stops it, and passes the results to `sink`,
/// not always in the same order.
///
/// Nearly all blobs are right, and are read in pairs. Those that are not are checked again one by one at the end
/// ([`DiskReader::check`]).
pub fn check_in_pairs(
    store: &Store,
    next: &mut dyn FnMut() -> Option<Digest>,
    gate: &mut Gate<'_>,
    sink: &mut VerdictSink<'_>,
) -> Result<(), StoreError> {
    let (mut lanes, mut unclear) = (Lanes::default(), Vec::new());
    while lanes.fill(store, next, &mut unclear) {
        for (digest, outcome) in lanes.step(store, gate) {
            match outcome {
                Outcome::Right(right) => sink(digest, Ok(right))?,
                Outcome::Unclear => unclear.push(digest),
                Outcome::Stopped => return Ok(()),
            }
        }
    }
    let mut reader = DiskReader::default();
    for digest in unclear {
        match reader.check(store, digest, gate) {
            Ok(Verdict::Unfinished) => return Ok(()),
            checked => sink(digest, checked)?,
        }
    }
    Ok(())
}

struct Lane<'s> {
    digest: Digest,
    seen: FileStatus,
    file: DiskFile<File>,
    hash: Sha256,
    _reading: InternalRead<'s>,
}

#[derive(Default)]
struct Lanes<'s> {
    lanes: [Option<Lane<'s>>; 2],
    buffers: [Buffer; 2],
}

enum Outcome {
    Right(Verdict),
    /// Wrong, gone, about to be collected, or unreadable.
    Unclear,
    Stopped,
}

impl<'s> Lane<'s> {
    /// `None` if the blob needs a separate check.
    fn open(store: &'s Store, digest: Digest) -> Option<Self> {
        let seen = store.content.blob_status(digest).ok().flatten().filter(FileStatus::is_file)?;
        let reading = store.content.begin_internal_read_unless_blocked(digest)?;
        let file = DiskFile::open(store.content.open_own_blob(digest, 0).ok()?);
        Some(Self { digest, seen, file, hash: Sha256::new(), _reading: reading })
    }

    fn next<'b>(&mut self, buffer: &'b mut Buffer, gate: &mut Gate<'_>) -> Result<&'b [u8], Outcome> {
        match self.file.next(buffer, gate) {
            Ok(Next::Chunk(bytes)) => Ok(bytes),
            Ok(Next::Ended(Ended::Complete)) => {
                let found = Digest::from_bytes(std::mem::take(&mut self.hash).finish());
                Err(if found == self.digest {
                    Outcome::Right(verdict_on_mode(&self.seen))
                } else {
                    Outcome::Unclear
                })
            }
            Ok(Next::Ended(Ended::Stopped)) => Err(Outcome::Stopped),
            Ok(Next::Ended(Ended::Unlinked)) | Err(_) => Err(Outcome::Unclear),
        }
    }
}

impl<'s> Lanes<'s> {
    /// Opens blobs until both lanes are in use; returns false when there are no more blobs.
    fn fill(
        &mut self,
        store: &'s Store,
        next: &mut dyn FnMut() -> Option<Digest>,
        unclear: &mut Vec<Digest>,
    ) -> bool {
        for lane in &mut self.lanes {
            while lane.is_none()
                && let Some(digest) = next()
            {
                *lane = Lane::open(store, digest);
                if lane.is_none() {
                    unclear.push(digest);
                }
            }
        }
        self.lanes.iter().any(Option::is_some)
    }

    /// Reads and hashes a chunk in each lane; returns the blobs that have ended. Gives way to collections.
    fn step(&mut self, store: &Store, gate: &mut Gate<'_>) -> Vec<(Digest, Outcome)> {
        let is_in_the_way =
            |digest| store.content.is_internal_read_blocked(digest) || store.liveness.is_condemned(digest);
        let mut ended = Vec::new();
        for lane in &mut self.lanes {
            let yielding = lane.take_if(|lane| is_in_the_way(lane.digest));
            ended.extend(yielding.map(|lane| (lane.digest, Outcome::Unclear)));
        }
        let digests = self.lanes.each_ref().map(|lane| lane.as_ref().map(|lane| lane.digest));
        let interrupted = Cell::new(false);
        let mut gate = |bytes| {
            interrupted.set(digests.into_iter().flatten().any(is_in_the_way));
            if interrupted.get() { Step::Stop } else { gate(bytes) }
        };
        let mut read = self.lanes.each_mut().map(|_lane| None);
        for ((lane, buffer), read) in self.lanes.iter_mut().zip(&mut self.buffers).zip(&mut read) {
            match lane.as_mut().map(|lane| lane.next(buffer, &mut gate)) {
                Some(Ok(bytes)) => {
                    lock(&store.content.counts).checked_bytes += bytes.len() as u64;
                    *read = Some(bytes);
                }
                Some(Err(Outcome::Stopped)) if interrupted.get() => {}
                Some(Err(outcome)) => ended.extend(lane.take().map(|lane| (lane.digest, outcome))),
                None => {}
            }
        }
        let hashes = self.lanes.each_mut().map(|lane| lane.as_mut().map(|lane| &mut lane.hash));
        match (hashes, read) {
            ([Some(first), Some(second)], [Some(first_bytes), Some(second_bytes)]) => {
                update_both(first, first_bytes, second, second_bytes);
            }
            ([Some(hash), _], [Some(bytes), _]) | ([_, Some(hash)], [_, Some(bytes)]) => hash.update(bytes),
            _ => {}
        }
        ended
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    use std::time::Duration;
    use std::{fs, thread};

    use super::*;
    use crate::testing::{add_blobs, new_store};

    /// Sizes that end in different chunks, and an empty blob.
    const SIZES: [usize; 7] = [0, 3, 5 << 20, 64, (1 << 20) + 1, 1 << 20, 70_000];

    fn store_of_blobs() -> (tempfile::TempDir, Arc<Store>, Vec<Digest>) {
        let (folder, store) = new_store();
        let digests = add_blobs(&store, SIZES.map(|size| vec![7; size]));
        (folder, store, digests)
    }

    fn check_all(store: &Store, digests: &[Digest], gate: &mut Gate<'_>) -> BTreeMap<Digest, Verdict> {
        let (mut left, mut verdicts) = (digests.iter().copied(), BTreeMap::new());
        let mut record = |digest, checked: Result<_, _>| {
            assert_eq!(verdicts.insert(digest, checked.unwrap()), None);
            Ok(())
        };
        check_in_pairs(store, &mut || left.next(), gate, &mut record).unwrap();
        verdicts
    }

    #[test]
    fn every_blob_gets_the_same_verdict_as_alone() {
        let (_folder, store, mut digests) = store_of_blobs();
        let path = store.path(blobd_store_format::layout::blob(digests[4]));
        fs::remove_file(&path).unwrap();
        fs::write(&path, vec![8; SIZES[4]]).unwrap();
        digests.insert(2, Digest::of(b"missing"));
        let verdicts = check_all(&store, &digests, &mut |_| Step::Go);
        assert_eq!(verdicts.len(), digests.len());
        for (place, digest) in digests.iter().enumerate() {
            match (place, &verdicts[digest]) {
                (2, Verdict::Gone) | (5, Verdict::Bad { quarantined: Ok(()), .. }) => {}
                (place, verdict) => assert_eq!(*verdict, Verdict::Good, "{place}"),
            }
        }
    }

    #[test]
    fn gate_can_stop_the_check() {
        let (_folder, store, digests) = store_of_blobs();
        let mut chunks = 0;
        let mut gate = |_| {
            chunks += 1;
            if chunks < 5 { Step::Go } else { Step::Stop }
        };
        assert!(check_all(&store, &digests, &mut gate).len() < digests.len() - 1);
    }

    #[test]
    fn collection_does_not_wait_for_a_check_that_is_rate_limited() {
        let (_folder, store, digests) = store_of_blobs();
        for wanted in [digests[2], digests[4]] {
            let is_collected = AtomicBool::new(false);
            let mut gate = |_| {
                if is_collected.load(Ordering::Relaxed) {
                    return Step::Go;
                }
                thread::sleep(Duration::from_millis(5));
                Step::Wait
            };
            let verdicts = thread::scope(|scope| {
                scope.spawn(|| {
                    while !store.content.is_reading(wanted) {
                        thread::yield_now();
                    }
                    let blocked = store.content.block_internal_reads([wanted].into());
                    // Here the collection would delete the blob.
                    let is_closed = !store.content.is_reading(wanted);
                    drop(blocked);
                    is_collected.store(true, Ordering::Relaxed);
                    assert!(is_closed);
                });
                check_all(&store, &[digests[2], digests[4]], &mut gate)
            });
            assert!(verdicts.len() == 2 && verdicts.values().all(|verdict| *verdict == Verdict::Good));
        }
    }

    #[test]
    fn condemned_blob_is_verified() {
        let (_folder, store, digests) = store_of_blobs();
        store.liveness.condemn([digests[2]]);
        assert_eq!(check_all(&store, &digests[2..3], &mut |_| Step::Go)[&digests[2]], Verdict::Good);
    }
}
