//! Whether one blob is what its name says, and what is done if not: the two-read rule.

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

/// What a check has found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// The blob is what its name says.
    Good,
    /// There is none. Or there was one, and its last name was removed while it was read.
    Gone,
    /// It was not read to its end, because the gate said so.
    Unfinished,
    /// It read wrong and then right: it stays, and the machine is not to be trusted.
    Unreliable {
        /// What was wrong with the first reading.
        reason: String,
    },
    /// Its bytes are right, and whoever has the daemon's rights may write to it: it stays.
    Writable {
        /// Its mode.
        mode: u32,
    },
    /// It cannot be read, for a reason that says nothing about its bytes: it stays.
    Unreadable {
        /// Why.
        reason: String,
    },
    /// It read wrong twice.
    Bad {
        /// What was wrong.
        reason: String,
        /// Whether it is out of the way, or why it could not be moved.
        set_aside: Result<(), String>,
    },
}

/// One reading of a blob.
enum Reading {
    Right,
    Wrong(String),
    Unreadable(String),
    Gone,
    Unfinished,
    /// It was not read, because a collection may be about to delete the blob.
    LetGo,
}

/// How often a reading makes way for a collection before it is carried through: who removes and
/// imports the same model all the time must not keep it from being verified.
const MAX_YIELDS: u32 = 3;

impl DiskReader {
    /// Reads a blob from the disk, a second time if the first was wrong, and puts it into
    /// quarantine if both were. Holds no lock while it reads.
    ///
    /// # Errors
    /// [`StoreError::Io`] when this process lacks what it takes to look at any blob, such as a
    /// file descriptor. Whatever else goes wrong is a verdict, so that the next blob is looked at.
    pub fn check(
        &mut self,
        store: &Store,
        digest: Digest,
        gate: &mut Gate<'_>,
    ) -> Result<Verdict, StoreError> {
        // Twice, like all that is read.
        let seen = match store.blob_status(digest).or_else(|_| store.blob_status(digest)) {
            Ok(Some(seen)) => seen,
            Ok(None) => return Ok(Verdict::Gone),
            Err(error) => return unseen(digest, error),
        };
        if !seen.is_file() {
            return Ok(bad(store, digest, &seen, "is no regular file".to_owned()));
        }
        let first = match self.reading(store, digest, gate)? {
            Reading::Right => return Ok(verdict_on_mode(&seen)),
            Reading::Gone => return Ok(Verdict::Gone),
            Reading::Unfinished | Reading::LetGo => return Ok(Verdict::Unfinished),
            Reading::Unreadable(reason) => return Ok(unreadable(digest, reason)),
            Reading::Wrong(reason) => reason,
        };
        tracing::warn!("blob {digest}: {first}; reading it once more");
        match self.reading(store, digest, gate)? {
            Reading::Right => {
                tracing::error!(
                    "blob {digest}: {first}, and right when read again: memory, bus or disk of this machine err"
                );
                Ok(Verdict::Unreliable { reason: first })
            }
            Reading::Wrong(second) => {
                let reason = if second == first { first } else { format!("{first}, then: {second}") };
                Ok(bad(store, digest, &seen, reason))
            }
            Reading::Unreadable(second) => Ok(unreadable(digest, format!("{first}, then: {second}"))),
            Reading::Gone => Ok(Verdict::Gone),
            Reading::Unfinished | Reading::LetGo => Ok(Verdict::Unfinished),
        }
    }

    /// One reading. It lets go of a blob that is condemned or about to be deleted. If the blob is
    /// there after that, somebody else holds or needs it, and it is read all the same.
    fn reading(&mut self, store: &Store, digest: Digest, gate: &mut Gate<'_>) -> Result<Reading, StoreError> {
        for yields in 0..=MAX_YIELDS {
            // What is condemned and stays may be held by a program for days.
            let heeds_condemned = yields == 0;
            let is_wanted = || {
                yields < MAX_YIELDS
                    && (store.is_internal_read_blocked(digest)
                        || heeds_condemned && store.is_condemned(digest))
            };
            match self.attempt(store, digest, &is_wanted, gate)? {
                Reading::LetGo if stand_aside(store, digest, gate) == Step::Stop => break,
                Reading::LetGo => {}
                reading => return Ok(reading),
            }
        }
        Ok(Reading::Unfinished)
    }

    fn attempt(
        &mut self,
        store: &Store,
        digest: Digest,
        is_wanted: &dyn Fn() -> bool,
        gate: &mut Gate<'_>,
    ) -> Result<Reading, StoreError> {
        let _reading = match store.begin_internal_read_unless_blocked(digest) {
            Some(reading) => reading,
            None if is_wanted() => return Ok(Reading::LetGo),
            None => store.begin_internal_read(digest),
        };
        let file = match store.open_blob(digest, 0) {
            Err(StoreError::MissingBlob { .. }) => return Ok(Reading::Gone),
            Err(StoreError::Io { source, .. }) => return failed("open", digest, source),
            Err(error @ StoreError::UnexpectedFile { .. }) => {
                return Ok(Reading::Unreadable(error.to_string()));
            }
            file => file?,
        };
        let mut lets_go = false;
        let mut gate = |next| {
            lets_go = is_wanted();
            if lets_go { Step::Stop } else { gate(next) }
        };
        match self.digest_of(&file, &mut gate) {
            Ok(Some((found, _))) if found == digest => Ok(Reading::Right),
            Ok(Some((found, bytes))) => {
                Ok(Reading::Wrong(format!("its {bytes} bytes have the digest {found}")))
            }
            Ok(None) if is_unlinked(&file) => Ok(Reading::Gone),
            Ok(None) if lets_go => Ok(Reading::LetGo),
            Ok(None) => Ok(Reading::Unfinished),
            Err(source) => failed("read", digest, source),
        }
    }

    /// The digest and the length of a file, read to its end; nothing if it was not.
    fn digest_of(&mut self, file: &File, gate: &mut Gate<'_>) -> io::Result<Option<(Digest, u64)>> {
        let (mut hasher, mut bytes) = (Hasher::new(), 0u64);
        let ended = self.read(file, gate, &mut |chunk| {
            hasher.update(chunk);
            bytes = bytes.saturating_add(chunk.len() as u64);
        })?;
        Ok((ended == Ended::Complete).then(|| (hasher.finish(), bytes)))
    }
}

/// Leaves a blob alone until the collection that is about to delete it is over, or for long enough
/// that one begins if it is only condemned.
fn stand_aside(store: &Store, digest: Digest, gate: &mut Gate<'_>) -> Step {
    /// Longer than the daemon takes from one look at what is condemned to the next.
    const LONG_ENOUGH: Duration = Duration::from_millis(2500);
    const BETWEEN_LOOKS: Duration = Duration::from_millis(50);
    let since = Instant::now();
    let is_wanted = || {
        let is_condemned = store.is_condemned(digest) && since.elapsed() < LONG_ENOUGH;
        is_condemned || store.is_internal_read_blocked(digest)
    };
    while is_wanted() && matches!(store.blob_status(digest), Ok(Some(_))) {
        if gate(0) == Step::Stop {
            return Step::Stop;
        }
        thread::sleep(BETWEEN_LOOKS);
    }
    Step::Go
}

/// What a failed call makes of a reading.
fn failed(action: &'static str, digest: Digest, error: io::Error) -> Result<Reading, StoreError> {
    match Fault::of(&error) {
        Fault::Damage => Ok(Reading::Wrong(format!("the disk cannot read it ({error})"))),
        Fault::Refusal => Ok(Reading::Unreadable(error.to_string())),
        Fault::Shortage => Err(StoreError::io(action, &digest.to_string())(error)),
    }
}

/// Of a blob whose inode cannot be read: without it nobody knows which file would be moved.
fn unseen(digest: Digest, error: StoreError) -> Result<Verdict, StoreError> {
    let StoreError::Io { source, .. } = &error else { return Err(error) };
    match Fault::of(source) {
        Fault::Damage => {
            tracing::error!("blob {digest}: damaged: {error}; not moved to quarantine");
            let set_aside = Err("its inode cannot be read".to_owned());
            Ok(Verdict::Bad { reason: error.to_string(), set_aside })
        }
        Fault::Refusal => Ok(unreadable(digest, error.to_string())),
        Fault::Shortage => Err(error),
    }
}

fn unreadable(digest: Digest, reason: String) -> Verdict {
    tracing::error!("blob {digest}: cannot be read and so not judged: {reason}");
    Verdict::Unreadable { reason }
}

fn is_unlinked(file: &File) -> bool {
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
    let set_aside = match store.quarantine(digest, seen) {
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
    Verdict::Bad { reason, set_aside }
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
        assert!(store.damaged().is_empty());
    }

    #[test]
    fn blob_of_other_bytes_or_another_length_is_put_aside() {
        for (bytes, what) in
            [(&b"veights"[..], "its 7 bytes"), (b"weigh", "its 5 bytes"), (b"", "its 0 bytes")]
        {
            let (folder, store, digest) = store_with(b"weights");
            overwrite_blob(&folder, digest, bytes);
            let Verdict::Bad { reason, set_aside } = check(&store, digest) else { panic!("{what}") };
            assert!(reason.starts_with(what), "{reason}");
            assert_eq!(set_aside, Ok(()));
            assert_eq!(store.damaged(), [digest].into());
            assert_eq!(check(&store, digest), Verdict::Gone);
        }
    }

    #[test]
    fn blob_that_reads_wrong_and_then_right_stays() {
        let (folder, store, digest) = store_with(b"weights");
        overwrite_blob(&folder, digest, b"veights");
        let mut asked = 0;
        let mut gate = |_| {
            asked += 1;
            // Behind the end of the first reading.
            if asked == 3 {
                overwrite_blob(&folder, digest, b"weights");
            }
            Step::Go
        };
        let verdict = DiskReader::default().check(&store, digest, &mut gate).unwrap();
        assert!(matches!(verdict, Verdict::Unreliable { .. }), "{verdict:?}");
        assert!(store.damaged().is_empty());
    }

    #[test]
    fn blob_that_is_no_file_is_put_aside() {
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
    fn blob_that_cannot_be_read_or_judged_is_a_verdict_and_no_error() {
        let digest = Digest::of(b"x");
        let of = |errno: Errno| failed("read", digest, errno.into());
        assert!(matches!(of(Errno::REMOTEIO), Ok(Reading::Wrong(_))));
        assert!(matches!(of(Errno::ACCESS), Ok(Reading::Unreadable(_))));
        assert!(of(Errno::MFILE).is_err());
        let unseen = |errno: Errno| unseen(digest, StoreError::errno("inspect", "/b")(errno));
        assert!(matches!(unseen(Errno::IO), Ok(Verdict::Bad { set_aside: Err(_), .. })));
        assert!(matches!(unseen(Errno::PERM), Ok(Verdict::Unreadable { .. })));
        assert!(unseen(Errno::NOMEM).is_err());
    }

    #[test]
    fn blob_that_may_not_be_read_stays() {
        let (_folder, store, digest) = store_with(b"weights");
        let path = store.path(blobd_store_format::layout::blob(digest));
        fs::set_permissions(&path, fs::Permissions::from_mode(0o000)).unwrap();
        // Root may read everything, and sees only the mode.
        let expected = match File::open(&path) {
            Ok(_) => Verdict::Writable { mode: 0 },
            Err(error) => Verdict::Unreadable { reason: error.to_string() },
        };
        assert_eq!(check(&store, digest), expected);
        assert!(path.exists() && store.damaged().is_empty());
    }

    #[test]
    fn condemned_blob_is_let_go_so_that_it_can_be_collected() {
        let (_folder, store, digest) = store_with(b"weights");
        let mut gate = |_| {
            let is_read = store.is_reading(digest);
            store.condemn([digest]);
            assert_eq!(crate::gc::collect_condemned(&store).unwrap().freed_bytes() > 0, !is_read);
            Step::Go
        };
        assert_eq!(DiskReader::default().check(&store, digest, &mut gate).unwrap(), Verdict::Gone);
    }

    #[test]
    fn condemned_blob_that_stays_is_read_all_the_same() {
        let (_folder, store, digest) = store_with(b"weights");
        store.condemn([digest]);
        assert_eq!(check(&store, digest), Verdict::Good);
        let verdict = DiskReader::default().check(&store, digest, &mut |_| Step::Stop).unwrap();
        assert_eq!(verdict, Verdict::Unfinished);
    }

    #[test]
    fn reader_lets_go_of_what_is_to_be_collected_now() {
        let (_folder, store, digest) = store_with(b"weights");
        let (reading, begun) = std::sync::mpsc::channel();
        let of_reader = Arc::clone(&store);
        let reader = thread::spawn(move || {
            let mut gate = |_| {
                let _ = reading.send(());
                thread::sleep(Duration::from_millis(10));
                Step::Wait
            };
            DiskReader::default().check(&of_reader, digest, &mut gate).unwrap()
        });
        begun.recv().unwrap();
        let done = crate::gc::collect_from(&store, [digest].into()).unwrap();
        assert!(done.freed_bytes() > 0 && done.held.is_empty(), "{done:?}");
        assert_eq!(reader.join().unwrap(), Verdict::Gone);
    }

    #[test]
    fn reader_begins_nothing_that_is_being_collected() {
        let (_folder, store, digest) = store_with(b"weights");
        let barred = store.block_internal_reads([digest].into());
        let of_reader = Arc::clone(&store);
        let reader = thread::spawn(move || check(&of_reader, digest));
        let start = Instant::now();
        while start.elapsed() < Duration::from_millis(200) {
            assert!(!store.is_reading(digest));
            thread::sleep(Duration::from_millis(1));
        }
        drop(barred);
        assert_eq!(reader.join().unwrap(), Verdict::Good);
    }

    #[test]
    fn collections_without_end_do_not_keep_a_blob_from_being_checked() {
        let (folder, store, digest) = store_with(b"weights");
        overwrite_blob(&folder, digest, b"veights");
        let mut barred = None;
        let verdict = DiskReader::default().check(&store, digest, &mut |_| {
            // A new one begins each time the reader waits for the end of one.
            barred = (!store.is_reading(digest)).then(|| store.block_internal_reads([digest].into()));
            Step::Go
        });
        assert!(matches!(verdict.unwrap(), Verdict::Bad { .. }));
    }

    #[test]
    fn check_that_is_stopped_says_nothing() {
        let (folder, store, digest) = store_with(b"weights");
        overwrite_blob(&folder, digest, b"veights");
        let verdict = DiskReader::default().check(&store, digest, &mut |_| Step::Stop).unwrap();
        assert_eq!(verdict, Verdict::Unfinished);
        assert!(store.damaged().is_empty());
    }
}
