//! Repairs a blob from bytes in the store.

use std::collections::BTreeSet;

use blobd_store::{BlobWriter, FileReader, StoreError};
use blobd_store_format::digest::Digest;

use super::place::{Place, places};
use super::{Failure, Repair};
use crate::ops::survey::Need;

const CHUNK_BYTES: u64 = 1 << 20;

impl Repair<'_> {
    /// A copy in quarantine may be right: if the page cache still has what the disk has lost, or if the machine
    /// read it wrongly. So it is read through the page cache.
    pub(super) fn take_from_quarantine(&self, digest: Digest, need: &Need) -> bool {
        let copies = self.store.content().quarantined_copies(digest).unwrap_or_default();
        copies.into_iter().any(|time| {
            let copy = self
                .store
                .content()
                .open_quarantined(digest, time, need.size)
                .map_err(|error| error.to_string());
            let copied = copy.and_then(|copy| self.copy(digest, need, copy, &[Place::whole(need.size)]));
            self.is_ok_or_log(&copied, digest, "its copy in quarantine")
        })
    }

    /// A file that was stored whole before it was split contains all of its blobs.
    pub(super) fn take_from_whole_file(&self, digest: Digest, need: &Need) -> bool {
        let split: BTreeSet<Digest> =
            self.store.content().recipes().unwrap_or_default().into_iter().collect();
        let whole = self.store.content().blobs().unwrap_or_default();
        whole.into_iter().filter(|file| split.contains(file)).any(|file| {
            let Ok(Some(recipe)) = self.store.content().recipe(file) else { return false };
            let places = places(&recipe, digest);
            // A compressed file is not what its recipe rebuilds.
            if places.is_empty() || recipe.unpacked().is_some() {
                return false;
            }
            let _reading = self.store.content().begin_internal_read(file);
            let whole = FileReader::of_blob(self.store.content(), file, recipe.size());
            self.is_ok_or_log(&self.copy(digest, need, whole, &places), digest, "the whole file")
        })
    }

    fn copy(
        &self,
        digest: Digest,
        need: &Need,
        mut file: FileReader<'_>,
        places: &[Place],
    ) -> Result<(), Failure> {
        let published = self.publish(digest, need.size, |writer| {
            let copied = places.iter().try_for_each(|place| copy(&mut file, *place, writer));
            copied.map_err(|error| self.failure(&error))
        });
        published.map_err(|unpublished| unpublished.to_string())
    }

    fn is_ok_or_log(&self, copied: &Result<(), Failure>, digest: Digest, source: &str) -> bool {
        if let Err(failure) = copied {
            tracing::debug!("blob {digest}: not repaired from {source}: {failure}");
        }
        copied.is_ok()
    }
}

fn copy(file: &mut FileReader<'_>, place: Place, writer: &mut BlobWriter) -> Result<(), StoreError> {
    let mut offset = place.offset_in_file;
    while offset < place.end_in_file() {
        let end = offset.saturating_add(CHUNK_BYTES).min(place.end_in_file());
        writer.append(&file.read_range(offset..end)?)?;
        offset = end;
    }
    Ok(())
}
