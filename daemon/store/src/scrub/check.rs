//! Verifies one blob, and moves it to quarantine if it was read wrong twice.

use std::fs::File;
use std::time::{Duration, Instant};
use std::{io, thread};

use blobd_store_format::digest::{Digest, Hasher};

use super::read::{DiskReader, Ended, Fault, Gate, Step};
use crate::{FileStatus, Store, StoreError, lock};

const MODE: u32 = 0o444;

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    Good,
    /// There is no blob, or its last name was removed while it was read.
    Gone,
    /// It is not in this store, and a lower store that may have it cannot be used.
    Hidden {
        problem: String,
    },
    /// The gate stopped the check.
    Unfinished,
    /// It was read wrong and then right: it stays. The machine is unreliable.
    Unreliable {
        reason: String,
    },
    /// Its bytes are right, but its mode is not 0444: it stays.
    Writable {
        mode: u32,
    },
    /// It cannot be read, for a reason that says nothing about its bytes: it stays.
    Unreadable {
        reason: String,
    },
    /// It is in a lower store, and was read wrong twice there.
    BadBelow {
        reason: String,
        store: String,
    },
    /// It was read wrong twice.
    Bad {
        reason: String,
        /// Whether it was moved to quarantine, or why not.
        quarantined: Result<(), String>,
    },
}

impl Verdict {
    /// The fault of a blob that was read wrong, and whether the blob was moved to quarantine.
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

/// How often a read gives way to a collection. Without a limit, some blobs would never be verified.
const MAX_YIELDS: u32 = 3;

impl DiskReader {
    /// Reads a blob from the disk, a second time if the first read was wrong, and moves it to quarantine if both were.
    /// Holds no lock while it reads.
    ///
    /// # Errors
    /// [`StoreError::Io`] when this process cannot read any blob, for example because it has too many open files.
    /// Everything else is a verdict, so that the caller continues with the next blob.
    pub fn check(
        &mut self,
        store: &Store,
        digest: Digest,
        gate: &mut Gate<'_>,
    ) -> Result<Verdict, StoreError> {
        // Twice, as with the content.
        let seen = match store.content.blob_status(digest).or_else(|_| store.content.blob_status(digest)) {
            Ok(Some(seen)) => seen,
            Ok(None) => return self.check_lower(store, digest, gate),
            Err(error) => return verdict_on_status_error(digest, error),
        };
        if !seen.is_file() {
            return Ok(bad(store, digest, &seen, "is not a regular file".to_owned()));
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

    /// Reads a blob once. Gives way to a collection of it; a blob that still exists afterwards is needed, and read.
    fn reading(&mut self, store: &Store, digest: Digest, gate: &mut Gate<'_>) -> Result<Reading, StoreError> {
        for yields in 0..=MAX_YIELDS {
            // A program may hold a condemned blob for days, so this counts only once.
            let yields_to_condemned = yields == 0;
            let must_yield = || {
                yields < MAX_YIELDS
                    && (store.content.is_internal_read_blocked(digest)
                        || yields_to_condemned && store.liveness.is_condemned(digest))
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
        let _reading = match store.content.begin_internal_read_unless_blocked(digest) {
            Some(reading) => reading,
            None if must_yield() => return Ok(Reading::Yielded),
            None => store.content.begin_internal_read(digest),
        };
        let file = match store.content.open_own_blob(digest, 0) {
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
            lock(&store.content.counts).checked_bytes += *bytes;
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

/// Waits until the collection is over. If the blob is only condemned, waits long enough for one to begin.
fn wait_for_collection(store: &Store, digest: Digest, gate: &mut Gate<'_>) -> Step {
    /// Longer than the interval at which the daemon collects condemned blobs.
    const MAX_CONDEMNED_WAIT: Duration = Duration::from_millis(2500);
    const POLL_INTERVAL: Duration = Duration::from_millis(50);
    let since = Instant::now();
    let must_yield = || {
        let is_condemned = store.liveness.is_condemned(digest) && since.elapsed() < MAX_CONDEMNED_WAIT;
        is_condemned || store.content.is_internal_read_blocked(digest)
    };
    while must_yield() && matches!(store.content.blob_status(digest), Ok(Some(_))) {
        if gate(0) == Step::Stop {
            return Step::Stop;
        }
        thread::sleep(POLL_INTERVAL);
    }
    Step::Go
}

fn classify_error(action: &'static str, digest: Digest, error: io::Error) -> Result<Reading, StoreError> {
    match Fault::from_error(&error) {
        Fault::Damage => Ok(Reading::Wrong(format!("the disk cannot read it ({error})"))),
        Fault::Refusal => Ok(Reading::Unreadable(error.to_string())),
        Fault::Shortage => Err(StoreError::io(action, &digest.to_string())(error)),
    }
}

/// The blob is not moved: without its inode it is unknown which file would be moved.
fn verdict_on_status_error(digest: Digest, error: StoreError) -> Result<Verdict, StoreError> {
    let StoreError::Io { source, .. } = &error else { return Err(error) };
    match Fault::from_error(source) {
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
    let quarantined = match store.content.quarantine(digest, seen) {
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

impl DiskReader {
    /// Reads a blob that only a lower store has, twice if wrong. A damaged one is reported and never moved.
    fn check_lower(
        &mut self,
        store: &Store,
        digest: Digest,
        gate: &mut Gate<'_>,
    ) -> Result<Verdict, StoreError> {
        let Some((file, place)) = store.content.open_lower_blob(digest) else {
            let problem = store.content.lower_problem();
            return Ok(problem.map_or(Verdict::Gone, |problem| Verdict::Hidden { problem }));
        };
        let outcome = match self.read_lower(&file, digest, gate) {
            Ok(Reading::Wrong(first)) => {
                self.read_lower(&file, digest, gate).map(|second| (second, Some(first)))
            }
            read => read.map(|read| (read, None)),
        };
        match outcome {
            Ok((Reading::Gone, _)) => Ok(Verdict::Gone),
            Ok((Reading::Unfinished | Reading::Yielded, _)) => Ok(Verdict::Unfinished),
            Ok((Reading::Right, None)) => Ok(Verdict::Good),
            Ok((Reading::Right, Some(reason))) => Ok(Verdict::Unreliable { reason }),
            Ok((Reading::Wrong(reason) | Reading::Unreadable(reason), _)) => {
                tracing::error!("blob {digest} in the lower store {}: {reason}", place.display());
                Ok(Verdict::BadBelow { reason, store: place.display().to_string() })
            }
            Err(error) if Fault::from_error(&error) == Fault::Shortage => {
                Err(StoreError::io("read", &digest.to_string())(error))
            }
            Err(error) => {
                let reason = format!("in the lower store {}: {error}", place.display());
                Ok(Verdict::Unreadable { reason })
            }
        }
    }

    fn read_lower(&mut self, file: &File, digest: Digest, gate: &mut Gate<'_>) -> io::Result<Reading> {
        Ok(match self.digest_of(file, gate)? {
            Some((found, _)) if found == digest => Reading::Right,
            Some((found, bytes)) => Reading::Wrong(format!("its {bytes} bytes have the digest {found}")),
            None if is_unlinked(file) => Reading::Gone,
            None => Reading::Unfinished,
        })
    }
}

#[cfg(test)]
mod tests;
