//! Blobs that several files of a transaction have parts of: expert groups that the ends of shards cut.
//!
//! The files are assembled one after the other. An assembler continues what those before it have begun, and leaves what
//! is not complete to the next. Which files have which parts is known from their headers ([`SharedGroups`]).
//!
//! [`SharedGroups`]: blobd_store_format::split::SharedGroups

use std::collections::BTreeMap;
use std::path::PathBuf;

use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::{Recipe, RecipeError};
use blobd_store_format::split::SplitPlan;

use super::hash::BlobHash;
use super::{Assembler, HashedFile, State};
use crate::ledger::accounting::Reservation;
use crate::lock;

/// The blobs that files of a transaction share, and the files that have been assembled.
#[derive(Debug, Default)]
pub struct SharedBlobs {
    /// The blobs that lack parts, by the number of the group.
    begun: BTreeMap<usize, BegunBlob>,
    /// The blobs that are complete or stored, by the number of the group.
    digests: BTreeMap<usize, Digest>,
    files: Vec<(SplitPlan, HashedFile)>,
}

/// A blob that lacks the parts of later files.
#[derive(Debug)]
struct BegunBlob {
    path: PathBuf,
    reservation: Reservation,
    hash: BlobHash,
}

impl SharedBlobs {
    /// Reads the blob of a group from the store, where it has this digest. The bytes of the files are compared with it
    /// instead of written. The caller has leased it.
    pub fn take_stored(&mut self, group: usize, digest: Digest) {
        self.digests.insert(group, digest);
    }

    /// The recipes of the files, after all of them have been assembled.
    ///
    /// # Errors
    /// [`RecipeError::Parts`] when a blob lacks a part.
    pub fn into_recipes(self) -> Result<Vec<Recipe>, RecipeError> {
        let Self { digests, files, .. } = self;
        let recipe = |(plan, file): (SplitPlan, HashedFile)| file.sharing(&plan, &digests).recipe(plan, &[]);
        files.into_iter().map(recipe).collect()
    }
}

impl Assembler {
    /// Continues the shared blobs that earlier files have begun. Before anything is written.
    #[must_use]
    pub fn continuing(self, shared: &mut SharedBlobs) -> Self {
        let groups: Vec<_> = self.shared_groups().collect();
        for (blob, group) in groups {
            if let Some(BegunBlob { path, reservation, hash }) = shared.begun.remove(&group) {
                let mut state = lock(&self.state);
                state.files.insert(blob, path);
                state.reservations.insert(blob, reservation);
                state.hashes.insert(blob, hash);
            } else if let Some(digest) = shared.digests.get(&group) {
                self.take_stored(blob, *digest);
            }
        }
        self
    }

    /// Leaves the shared blobs that are not complete to the next file. The recipe is made when all are.
    pub fn leave_shared(self, file: HashedFile, shared: &mut SharedBlobs) {
        let groups: Vec<_> = self.shared_groups().collect();
        for (blob, group) in groups {
            if let Some(digest) = file.digest_of(blob) {
                shared.digests.insert(group, digest);
            } else if let Some(begun) = BegunBlob::take(&mut lock(&self.state), blob) {
                shared.begun.insert(group, begun);
            }
        }
        shared.files.push((self.plan, file));
    }

    /// The planned blobs of groups that other files have parts of, with the groups' numbers.
    fn shared_groups(&self) -> impl Iterator<Item = (usize, usize)> {
        let blobs = self.plan.blobs().iter().enumerate();
        blobs.filter_map(|(blob, planned)| Some((blob, planned.shared_group()?)))
    }
}

impl BegunBlob {
    fn take(state: &mut State, blob: usize) -> Option<Self> {
        let (path, reservation) = (state.files.remove(&blob)?, state.reservations.remove(&blob)?);
        Some(Self { path, reservation, hash: state.hashes.remove(&blob).unwrap_or_default() })
    }
}

impl HashedFile {
    /// The same file, with the digests of blobs that it has only parts of.
    fn sharing(mut self, plan: &SplitPlan, digests: &BTreeMap<usize, Digest>) -> Self {
        for (digest, planned) in self.blobs.iter_mut().zip(plan.blobs()) {
            *digest = digest.or_else(|| digests.get(&planned.shared_group()?).copied());
        }
        self
    }
}

#[cfg(test)]
mod tests;
