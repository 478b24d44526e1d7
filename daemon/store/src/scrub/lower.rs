//! Verifies a blob that only a lower store has. It is reported and never moved.

use std::fs::File;
use std::io;

use blobd_store_format::digest::Digest;

use super::check::{Verdict, is_unlinked};
use super::fault::Fault;
use super::read::{DiskReader, Gate};
use crate::{Store, StoreError};

/// The result of one read.
enum Read {
    Right,
    Wrong(String),
    /// The store's own collection has deleted it meanwhile.
    Gone,
    Unfinished,
}

impl DiskReader {
    /// Reads a blob of a lower store, a second time if the first read was wrong.
    pub(super) fn check_lower(
        &mut self,
        store: &Store,
        digest: Digest,
        gate: &mut Gate<'_>,
    ) -> Result<Verdict, StoreError> {
        let Some((file, place)) = store.open_lower_blob(digest) else {
            return Ok(store.lower_problem().map_or(Verdict::Gone, |problem| Verdict::Hidden { problem }));
        };
        let outcome = match self.read_lower(&file, digest, gate) {
            Ok(Read::Wrong(first)) => {
                self.read_lower(&file, digest, gate).map(|second| (second, Some(first)))
            }
            read => read.map(|read| (read, None)),
        };
        match outcome {
            Ok((Read::Unfinished, _)) => Ok(Verdict::Unfinished),
            Ok((Read::Gone, _)) => Ok(Verdict::Gone),
            Ok((Read::Right, None)) => Ok(Verdict::Good),
            Ok((Read::Right, Some(reason))) => Ok(Verdict::Unreliable { reason }),
            Ok((Read::Wrong(reason), _)) => {
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

    fn read_lower(&mut self, file: &File, digest: Digest, gate: &mut Gate<'_>) -> io::Result<Read> {
        Ok(match self.digest_of(file, gate)? {
            Some((found, _)) if found == digest => Read::Right,
            Some((found, bytes)) => Read::Wrong(format!("its {bytes} bytes have the digest {found}")),
            None if is_unlinked(file) => Read::Gone,
            None => Read::Unfinished,
        })
    }
}
