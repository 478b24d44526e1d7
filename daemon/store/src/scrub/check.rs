//! Verifies one blob, and moves it to quarantine if it was read wrong twice.

use std::fs::File;
use std::io;
use std::thread;
use std::time::{Duration, Instant};

use blobd_store_format::digest::{Digest, Hasher};

use super::fault::Fault;
use super::read::{DiskReader, Ended, Gate, Step};
use crate::{FileStatus, Store, StoreError};

/// The mode of every blob.
const MODE: u32 = 0o444;

/// The result of a check.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The bytes and mode are right.
    Good,
    /// There is no blob, or its last name was removed while it was read.
    Gone,
    /// It is not in this store, and a lower store that may have it cannot be used.
    Hidden {
        /// Why.
        problem: String,
    },
    /// The gate stopped the check.
    Unfinished,
    /// It was read wrong and then right: it stays. The machine is unreliable.
    Unreliable {
        /// The fault of the first read.
        reason: String,
    },
    /// Its bytes are right, but its mode is not 0444: it stays.
    Writable {
        /// Its mode.
        mode: u32,
    },
    /// It cannot be read, for a reason that says nothing about its bytes: it stays.
    Unreadable {
        /// Why.
        reason: String,
    },
    /// It is in a lower store, and was read wrong twice there.
    BadBelow {
        /// The fault.
        reason: String,
        /// The directory of the lower store.
        store: String,
    },
    /// It was read wrong twice.
    Bad {
        /// The fault.
        reason: String,
        /// Whether it was moved to quarantine, or why not.
        quarantined: Result<(), String>,
    },
}

impl Verdict {
    /// The fault of a blob that was read wrong, and whether the blob was moved to quarantine.
    #[must_use]
    pub fn damage(&self) -> Option<(&str, bool)> {
        match self {
            Self::Unreliable { reason } | Self::BadBelow { reason, .. } => Some((reason, false)),
            Self::Bad { reason, quarantined } => Some((reason, quarantined.is_ok())),
            _ => None,
        }
    }
}

enum Reading {
    Right,
    Wrong(String),
    Unreadable(String),
    Gone,
    Unfinished,
    /// Not completed, because a collection may be about to delete the blob.
    Yielded,
}

/// How often a read gives way to a collection before it ignores collections. Otherwise removing and
/// importing the same model all the time would keep it from being verified.
const MAX_YIELDS: u32 = 3;

impl DiskReader {
    /// Reads a blob from the disk, a second time if the first read was wrong, and moves it to quarantine if
    /// both were. Holds no lock while it reads.
    ///
    /// # Errors
    /// [`StoreError::Io`] when this process cannot read any blob, for example because it has too many open
    /// files. Everything else is a verdict, so that the caller goes on to the next blob.
    pub fn check(
        &mut self,
        store: &Store,
        digest: Digest,
        gate: &mut Gate<'_>,
    ) -> Result<Verdict, StoreError> {
        // Twice, as with the content.
        let seen = match store.content().blob_status(digest).or_else(|_| store.content().blob_status(digest))
        {
            Ok(Some(seen)) => seen,
            Ok(None) => return self.check_lower(store, digest, gate),
            Err(error) => return verdict_on_status_error(digest, error),
        };
        if !seen.is_file() {
            return Ok(bad(store, digest, &seen, "is no regular file".to_owned()));
        }
        let first = match self.reading(store, digest, gate)? {
            Reading::Right => return Ok(verdict_on_mode(&seen)),
            Reading::Gone => return Ok(Verdict::Gone),
            Reading::Unfinished | Reading::Yielded => return Ok(Verdict::Unfinished),
            Reading::Unreadable(reason) => return Ok(unreadable(digest, reason)),
            Reading::Wrong(reason) => reason,
        };
        tracing::warn!("blob {digest}: {first}; reading it again");
        match self.reading(store, digest, gate)? {
            Reading::Right => {
                tracing::error!(
                    "blob {digest}: {first}, but right when read again: memory, bus or disk of this machine is faulty"
                );
                Ok(Verdict::Unreliable { reason: first })
            }
            Reading::Wrong(second) => {
                let reason = if second == first { first } else { format!("{first}, then: {second}") };
                Ok(bad(store, digest, &seen, reason))
            }
            Reading::Unreadable(second) => Ok(unreadable(digest, format!("{first}, then: {second}"))),
            Reading::Gone => Ok(Verdict::Gone),
            Reading::Unfinished | Reading::Yielded => Ok(Verdict::Unfinished),
        }
    }

    /// Reads a blob once. It gives way to a collection of the blob. If the blob still exists afterwards,
    /// something else holds or needs it, and it is read.
    fn reading(&mut self, store: &Store, digest: Digest, gate: &mut Gate<'_>) -> Result<Reading, StoreError> {
        for yields in 0..=MAX_YIELDS {
            // A program may hold a condemned blob for days, so this counts only once.
            let yields_to_condemned = yields == 0;
            let must_yield = || {
                yields < MAX_YIELDS
                    && (store.content().is_internal_read_blocked(digest)
                        || yields_to_condemned && store.liveness().is_condemned(digest))
            };
            match self.attempt(store, digest, &must_yield, gate)? {
                Reading::Yielded if wait_for_collection(store, digest, gate) == Step::Stop => break,
                Reading::Yielded => {}
                reading => return Ok(reading),
            }
        }
        Ok(Reading::Unfinished)
    }

    fn attempt(
        &mut self,
        store: &Store,
        digest: Digest,
        must_yield: &dyn Fn() -> bool,
        gate: &mut Gate<'_>,
    ) -> Result<Reading, StoreError> {
        let _reading = match store.content().begin_internal_read_unless_blocked(digest) {
            Some(reading) => reading,
            None if must_yield() => return Ok(Reading::Yielded),
            None => store.content().begin_internal_read(digest),
        };
        let file = match store.content().open_own_blob(digest, 0) {
            Err(StoreError::MissingBlob { .. }) => return Ok(Reading::Gone),
            Err(StoreError::Io { source, .. }) => return classify_error("open", digest, source),
            Err(error @ StoreError::UnexpectedFile { .. }) => {
                return Ok(Reading::Unreadable(error.to_string()));
            }
            file => file?,
        };
        let mut yielded = false;
        let mut gate = |next| {
            yielded = must_yield();
            if yielded { Step::Stop } else { gate(next) }
        };
        let hashed = self.digest_of(&file, &mut gate);
        if let Ok(Some((_, bytes))) = &hashed {
            store.content().counts.checked_bytes.add(*bytes);
        }
        match hashed {
            Ok(Some((found, _))) if found == digest => Ok(Reading::Right),
            Ok(Some((found, bytes))) => {
                Ok(Reading::Wrong(format!("its {bytes} bytes have the digest {found}")))
            }
            Ok(None) if is_unlinked(&file) => Ok(Reading::Gone),
            Ok(None) if yielded => Ok(Reading::Yielded),
            Ok(None) => Ok(Reading::Unfinished),
            Err(source) => classify_error("read", digest, source),
        }
    }

    /// The digest and the length of a file; `None` if it was not read to its end.
    pub(super) fn digest_of(
        &mut self,
        file: &File,
        gate: &mut Gate<'_>,
    ) -> io::Result<Option<(Digest, u64)>> {
        let (mut hasher, mut bytes) = (Hasher::new(), 0u64);
        let ended = self.read(file, gate, &mut |chunk| {
            hasher.update(chunk);
            bytes = bytes.saturating_add(chunk.len() as u64);
        })?;
        Ok((ended == Ended::Complete).then(|| (hasher.finish(), bytes)))
    }
}

/// Waits until the collection that may delete the blob is over. If the blob is only condemned, waits long
/// enough for one to begin.
fn wait_for_collection(store: &Store, digest: Digest, gate: &mut Gate<'_>) -> Step {
    /// Longer than the interval at which the daemon collects condemned blobs.
    const MAX_CONDEMNED_WAIT: Duration = Duration::from_millis(2500);
    const POLL_INTERVAL: Duration = Duration::from_millis(50);
    let since = Instant::now();
    let must_yield = || {
        let is_condemned = store.liveness().is_condemned(digest) && since.elapsed() < MAX_CONDEMNED_WAIT;
        is_condemned || store.content().is_internal_read_blocked(digest)
    };
    while must_yield() && matches!(store.content().blob_status(digest), Ok(Some(_))) {
        if gate(0) == Step::Stop {
            return Step::Stop;
        }
        thread::sleep(POLL_INTERVAL);
    }
    Step::Go
}

fn classify_error(action: &'static str, digest: Digest, error: io::Error) -> Result<Reading, StoreError> {
    match Fault::of(&error) {
        Fault::Damage => Ok(Reading::Wrong(format!("the disk cannot read it ({error})"))),
        Fault::Refusal => Ok(Reading::Unreadable(error.to_string())),
        Fault::Shortage => Err(StoreError::io(action, &digest.to_string())(error)),
    }
}

/// The blob is not moved: without its inode it is unknown which file would be moved.
fn verdict_on_status_error(digest: Digest, error: StoreError) -> Result<Verdict, StoreError> {
    let StoreError::Io { source, .. } = &error else { return Err(error) };
    match Fault::of(source) {
        Fault::Damage => {
            tracing::error!("blob {digest}: damaged: {error}; not moved to quarantine");
            let quarantined = Err("its inode cannot be read".to_owned());
            Ok(Verdict::Bad { reason: error.to_string(), quarantined })
        }
        Fault::Refusal => Ok(unreadable(digest, error.to_string())),
        Fault::Shortage => Err(error),
    }
}

fn unreadable(digest: Digest, reason: String) -> Verdict {
    tracing::error!("blob {digest}: cannot be read, so it was not verified: {reason}");
    Verdict::Unreadable { reason }
}

pub(super) fn is_unlinked(file: &File) -> bool {
    use std::os::unix::fs::MetadataExt as _;
    file.metadata().is_ok_and(|metadata| metadata.nlink() == 0)
}

pub(super) fn verdict_on_mode(seen: &FileStatus) -> Verdict {
    match seen.permissions() {
        MODE => Verdict::Good,
        mode => Verdict::Writable { mode },
    }
}

fn bad(store: &Store, digest: Digest, seen: &FileStatus, reason: String) -> Verdict {
    let quarantined = match store.content().quarantine(digest, seen) {
        Ok(Some(place)) => {
            tracing::error!("blob {digest}: damaged: {reason}; moved to {}", place.display());
            Ok(())
        }
        Ok(None) => return Verdict::Gone,
        Err(error) => {
            tracing::error!("blob {digest}: damaged: {reason}; cannot be moved to quarantine: {error}");
            Err(error.to_string())
        }
    };
    Verdict::Bad { reason, quarantined }
}

/// The result of one read of a blob that only a lower store has.
enum LowerRead {
    Right,
    Wrong(String),
    /// The store's own collection has deleted it meanwhile.
    Gone,
    Unfinished,
}

impl DiskReader {
    /// Reads a blob that only a lower store has, a second time if the first read was wrong. A damaged one is reported and
    /// never moved.
    fn check_lower(
        &mut self,
        store: &Store,
        digest: Digest,
        gate: &mut Gate<'_>,
    ) -> Result<Verdict, StoreError> {
        let Some((file, place)) = store.content().open_lower_blob(digest) else {
            return Ok(store
                .content()
                .lower_problem()
                .map_or(Verdict::Gone, |problem| Verdict::Hidden { problem }));
        };
        let outcome = match self.read_lower(&file, digest, gate) {
            Ok(LowerRead::Wrong(first)) => {
                self.read_lower(&file, digest, gate).map(|second| (second, Some(first)))
            }
            read => read.map(|read| (read, None)),
        };
        match outcome {
            Ok((LowerRead::Unfinished, _)) => Ok(Verdict::Unfinished),
            Ok((LowerRead::Gone, _)) => Ok(Verdict::Gone),
            Ok((LowerRead::Right, None)) => Ok(Verdict::Good),
            Ok((LowerRead::Right, Some(reason))) => Ok(Verdict::Unreliable { reason }),
            Ok((LowerRead::Wrong(reason), _)) => {
                tracing::error!("blob {digest} in the lower store {}: {reason}", place.display());
                Ok(Verdict::BadBelow { reason, store: place.display().to_string() })
            }
            Err(error) if Fault::of(&error) == Fault::Shortage => {
                Err(StoreError::io("read", &digest.to_string())(error))
            }
            Err(error) => {
                let reason = format!("in the lower store {}: {error}", place.display());
                Ok(Verdict::Unreadable { reason })
            }
        }
    }

    fn read_lower(&mut self, file: &File, digest: Digest, gate: &mut Gate<'_>) -> io::Result<LowerRead> {
        Ok(match self.digest_of(file, gate)? {
            Some((found, _)) if found == digest => LowerRead::Right,
            Some((found, bytes)) => LowerRead::Wrong(format!("its {bytes} bytes have the digest {found}")),
            None if is_unlinked(file) => LowerRead::Gone,
            None => LowerRead::Unfinished,
        })
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::PermissionsExt as _;
    use std::sync::Arc;

    use rustix::io::Errno;

    use super::*;
    use crate::testing::{overwrite_blob, store_with};

    fn check(store: &Store, digest: Digest) -> Verdict {
        DiskReader::default().check(store, digest, &mut |_| Step::Go).unwrap()
    }

    #[test]
    fn good_blob_stays() {
        let (_folder, store, digest) = store_with(b"weights");
        assert_eq!(check(&store, digest), Verdict::Good);
        assert!(store.content().damaged().is_empty());
    }

    #[test]
    fn blob_with_wrong_bytes_or_length_is_moved_to_quarantine() {
        for (bytes, what) in
            [(&b"veights"[..], "its 7 bytes"), (b"weigh", "its 5 bytes"), (b"", "its 0 bytes")]
        {
            let (folder, store, digest) = store_with(b"weights");
            overwrite_blob(&folder, digest, bytes);
            let Verdict::Bad { reason, quarantined } = check(&store, digest) else { panic!("{what}") };
            assert!(reason.starts_with(what), "{reason}");
            assert_eq!(quarantined, Ok(()));
            assert_eq!(store.content().damaged(), [digest].into());
            assert_eq!(check(&store, digest), Verdict::Gone);
        }
    }

    #[test]
    fn blob_that_reads_wrong_and_then_right_stays() {
        let (folder, store, digest) = store_with(b"weights");
        overwrite_blob(&folder, digest, b"veights");
        let mut calls = 0;
        let mut gate = |_| {
            calls += 1;
            // After the first read.
            if calls == 3 {
                overwrite_blob(&folder, digest, b"weights");
            }
            Step::Go
        };
        let verdict = DiskReader::default().check(&store, digest, &mut gate).unwrap();
        assert!(matches!(verdict, Verdict::Unreliable { .. }), "{verdict:?}");
        assert!(store.content().damaged().is_empty());
    }

    #[test]
    fn blob_that_is_not_a_file_is_moved_to_quarantine() {
        let (_folder, store, digest) = store_with(b"weights");
        let path = store.path(blobd_store_format::layout::blob(digest));
        fs::remove_file(&path).unwrap();
        std::os::unix::fs::symlink("/etc/passwd", &path).unwrap();
        assert!(matches!(check(&store, digest), Verdict::Bad { .. }));
        assert!(fs::symlink_metadata(&path).is_err());
    }

    #[test]
    fn writable_blob_of_the_right_bytes_stays() {
        let (_folder, store, digest) = store_with(b"weights");
        let path = store.path(blobd_store_format::layout::blob(digest));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o644)).unwrap();
        assert_eq!(check(&store, digest), Verdict::Writable { mode: 0o644 });
        assert!(path.exists());
    }

    #[test]
    fn blob_that_is_collected_while_it_is_read_is_gone() {
        let (_folder, store, digest) = store_with(b"weights");
        let path = store.path(blobd_store_format::layout::blob(digest));
        let mut gate = |_| {
            let _ = fs::remove_file(&path);
            Step::Wait
        };
        assert_eq!(DiskReader::default().check(&store, digest, &mut gate).unwrap(), Verdict::Gone);
    }

    #[test]
    fn unreadable_blob_is_a_verdict_and_not_an_error() {
        let digest = Digest::of(b"x");
        let of = |errno: Errno| classify_error("read", digest, errno.into());
        assert!(matches!(of(Errno::REMOTEIO), Ok(Reading::Wrong(_))));
        assert!(matches!(of(Errno::ACCESS), Ok(Reading::Unreadable(_))));
        assert!(of(Errno::MFILE).is_err());
        let on_status =
            |errno: Errno| verdict_on_status_error(digest, StoreError::errno("inspect", "/b")(errno));
        assert!(matches!(on_status(Errno::IO), Ok(Verdict::Bad { quarantined: Err(_), .. })));
        assert!(matches!(on_status(Errno::PERM), Ok(Verdict::Unreadable { .. })));
        assert!(on_status(Errno::NOMEM).is_err());
    }

    #[test]
    fn blob_that_may_not_be_read_stays() {
        let (_folder, store, digest) = store_with(b"weights");
        let path = store.path(blobd_store_format::layout::blob(digest));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        // Root may read everything, so only the mode differs.
        let expected = match File::open(&path) {
            Ok(_) => Verdict::Writable { mode: 0 },
            Err(error) => Verdict::Unreadable { reason: error.to_string() },
        };
        assert_eq!(check(&store, digest), expected);
        assert!(path.exists() && store.content().damaged().is_empty());
    }

    #[test]
    fn condemned_blob_is_released_so_that_it_can_be_collected() {
        let (_folder, store, digest) = store_with(b"weights");
        let mut gate = |_| {
            let is_read = store.content().is_reading(digest);
            store.liveness().condemn([digest]);
            assert_eq!(
                crate::liveness::gc::collect_condemned(store.liveness()).unwrap().freed_bytes() > 0,
                !is_read
            );
            Step::Go
        };
        assert_eq!(DiskReader::default().check(&store, digest, &mut gate).unwrap(), Verdict::Gone);
    }

    #[test]
    fn condemned_blob_that_stays_is_verified() {
        let (_folder, store, digest) = store_with(b"weights");
        store.liveness().condemn([digest]);
        assert_eq!(check(&store, digest), Verdict::Good);
        let verdict = DiskReader::default().check(&store, digest, &mut |_| Step::Stop).unwrap();
        assert_eq!(verdict, Verdict::Unfinished);
    }

    #[test]
    fn reader_releases_a_blob_that_a_collection_deletes() {
        let (_folder, store, digest) = store_with(b"weights");
        let (reading, read_started) = std::sync::mpsc::channel();
        let of_reader = Arc::clone(&store);
        let reader = thread::spawn(move || {
            let mut gate = |_| {
                let _ = reading.send(());
                thread::sleep(Duration::from_millis(10));
                Step::Wait
            };
            DiskReader::default().check(&of_reader, digest, &mut gate).unwrap()
        });
        read_started.recv().unwrap();
        let done = crate::liveness::gc::collect_from(store.liveness(), [digest].into()).unwrap();
        assert!(done.freed_bytes() > 0 && done.held.is_empty(), "{done:?}");
        assert_eq!(reader.join().unwrap(), Verdict::Gone);
    }

    #[test]
    fn reader_does_not_start_on_a_blob_that_is_being_collected() {
        let (_folder, store, digest) = store_with(b"weights");
        let barred = store.content().block_internal_reads([digest].into());
        let of_reader = Arc::clone(&store);
        let reader = thread::spawn(move || check(&of_reader, digest));
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            assert!(!store.content().is_reading(digest));
            thread::sleep(Duration::from_millis(1));
        }
        drop(barred);
        assert_eq!(reader.join().unwrap(), Verdict::Good);
    }

    #[test]
    fn endless_collections_do_not_prevent_a_check() {
        let (folder, store, digest) = store_with(b"weights");
        overwrite_blob(&folder, digest, b"veights");
        let mut barred = None;
        let verdict = DiskReader::default().check(&store, digest, &mut |_| {
            // Another collection begins each time the reader waits for one to end.
            barred = (!store.content().is_reading(digest))
                .then(|| store.content().block_internal_reads([digest].into()));
            Step::Go
        });
        assert!(matches!(verdict.unwrap(), Verdict::Bad { .. }));
    }

    #[test]
    fn stopped_check_gives_no_verdict() {
        let (folder, store, digest) = store_with(b"weights");
        overwrite_blob(&folder, digest, b"veights");
        let verdict = DiskReader::default().check(&store, digest, &mut |_| Step::Stop).unwrap();
        assert_eq!(verdict, Verdict::Unfinished);
        assert!(store.content().damaged().is_empty());
    }
}
