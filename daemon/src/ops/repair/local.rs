//! Bytes of a damaged blob that are in the store itself.

use std::collections::BTreeSet;
use std::fs::File;
use std::os::unix::fs::FileExt as _;

use blobd_store::{BlobWriter, StoreError};
use blobd_store_format::digest::Digest;

use super::place::{Place, places};
use super::{Failure, Repair};
use crate::ops::survey::Need;

/// How much is copied at once, in bytes.
const CHUNK_BYTES: u64 = 1 << 20;

impl Repair<'_> {
    /// A copy that was put aside may be right: when the page cache has what the disk has lost, or
    /// when the machine erred. It is read through the page cache on purpose.
    pub(super) fn take_from_quarantine(&self, digest: Digest, need: &Need) -> bool {
        let copies = self.store.quarantined_copies(digest).unwrap_or_default();
        copies.into_iter().any(|time| {
            let whole = Place { offset_in_file: 0, offset_in_blob: 0, length: need.size };
            let file = self.store.open_quarantined(digest, time).map_err(|error| error.to_string());
            let copied = file.and_then(|file| self.copy(digest, need, &file, &[whole]));
            self.tells_of(&copied, digest, "its copy in quarantine")
        })
    }

    /// A file that was stored whole before it was split has the bytes of all its tensors.
    pub(super) fn take_from_whole_file(&self, digest: Digest, need: &Need) -> bool {
        let split: BTreeSet<Digest> = self.store.recipes().unwrap_or_default().into_iter().collect();
        let whole = self.store.blobs().unwrap_or_default();
        whole.into_iter().filter(|file| split.contains(file)).any(|file| {
            let Ok(Some(recipe)) = self.store.recipe(file) else { return false };
            let places = places(&recipe, digest);
            if places.is_empty() {
                return false;
            }
            let _reading = self.store.note_own_read(file);
            let opened = self.store.open_blob(file, recipe.size()).map_err(|error| error.to_string());
            let copied = opened.and_then(|opened| self.copy(digest, need, &opened, &places));
            self.tells_of(&copied, digest, "the whole file")
        })
    }

    fn copy(&self, digest: Digest, need: &Need, file: &File, places: &[Place]) -> Result<(), Failure> {
        self.publish(digest, need.size, |writer| {
            places.iter().try_for_each(|place| copy(file, *place, writer))
        })
    }

    fn tells_of(&self, copied: &Result<(), Failure>, digest: Digest, source: &str) -> bool {
        if let Err(failure) = copied {
            tracing::debug!("blob {digest}: {source} is no help: {failure}");
        }
        copied.is_ok()
    }
}

fn copy(file: &File, place: Place, writer: &mut BlobWriter) -> Result<(), Failure> {
    let mut done = 0;
    let mut buffer = Vec::new();
    while done < place.length {
        let step = CHUNK_BYTES.min(place.length.saturating_sub(done));
        buffer.resize(usize::try_from(step).unwrap_or_default(), 0);
        let read = file.read_exact_at(&mut buffer, place.offset_in_file.saturating_add(done));
        read.map_err(|error| error.to_string())?;
        writer.append(&buffer).map_err(|error: StoreError| error.to_string())?;
        done = done.saturating_add(step);
    }
    Ok(())
}
