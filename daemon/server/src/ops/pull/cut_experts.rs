//! Joins the experts of a group that the ends of shards cut, after all files have arrived.
//!
//! Files are received one by one, each with a plan of its own, so the experts of a group that is in several shards are stored
//! in pieces at first. An import stores such a group as one blob. Here the pieces are copied into this blob, or it is found in
//! the store, and the files get the recipes that an import gives them. Until the commit, everything that was received stays,
//! and so do the earlier recipes, which readers may use.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blobd_client::protocol::event::{Phase, Progress as _};
use blobd_client::protocol::pull::PullProgress;
use blobd_store::{BlobRange, Ingest, Joined, Store, gc};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::size::human_bytes;
use blobd_store_format::split::{SharedGroups, SplitPlan};
use blobd_store_format::stored_file::Source;

use super::source::Pull;
use crate::ops::OpError;
use crate::ops::describe::read_header;
use crate::ops::shard_sets::ShardSets;
use crate::transfer::TransferError;

/// A file of the model and its path in it, if it has one.
pub(super) type ModelFile = (Descriptor, Option<String>);

/// What became of the cut groups.
#[derive(Debug, Default)]
pub(super) struct CutExperts {
    /// The blobs that may not be needed any more once the model has its name.
    replaced: BTreeSet<Digest>,
    /// How many groups have stayed in pieces for want of space, and the size of the largest.
    without_space: usize,
    largest: u64,
}

impl CutExperts {
    /// Joins the groups of these files, and adds the new recipes to the ingest.
    ///
    /// # Errors
    /// [`OpError::Interrupted`] when the client disconnects. The files stay as they are then.
    pub(super) fn join(
        pull: Pull<'_>,
        ingest: &mut Ingest,
        (name, files): (&str, &[ModelFile]),
    ) -> Result<Self, OpError> {
        let mut cut = Self::default();
        let groups = groups(ingest.store(), files)?;
        let total = groups.blob_sizes().iter().copied().fold(0, u64::saturating_add);
        if total == 0 {
            return Ok(cut);
        }
        let (mut joined, mut done) = (BTreeMap::new(), 0);
        for (group, size) in groups.blob_sizes().iter().copied().enumerate() {
            send_progress(pull, done, total);
            let ranges = ranges_of(ingest.store(), files, &groups, group)?;
            match cut.join_group(pull, ingest, &ranges, size)? {
                Some(Joined::As(digest)) => drop(joined.insert(group, digest)),
                Some(Joined::Stopped) => {
                    let source = Box::new(TransferError::Unwanted);
                    return Err(OpError::Interrupted { name: name.to_owned(), source });
                }
                Some(_) | None => {}
            }
            done = done.saturating_add(size);
        }
        if !joined.is_empty() {
            add_recipes(ingest, files, &groups, &joined)?;
        }
        // An earlier pull that was interrupted may have left pieces.
        let content = ingest.store().content();
        for (file, _) in files.iter().filter(|(file, _)| content.download_about(file.digest).is_some()) {
            let needs = content.download_needs(file.digest)?;
            cut.replaced.extend(needs.into_iter().map(gc::Node::digest));
        }
        Ok(cut)
    }

    /// `None` if the group cannot be joined.
    fn join_group(
        &mut self,
        pull: Pull<'_>,
        ingest: &mut Ingest,
        ranges: &[BlobRange],
        size: u64,
    ) -> Result<Option<Joined>, OpError> {
        let found = ranges.iter().map(|range| range.length).fold(0, u64::saturating_add);
        if found != size {
            return Ok(None);
        }
        if let [BlobRange { blob, offset: 0, .. }] = ranges {
            // Before the check, or a collection could delete it in between.
            ingest.lease().protect(*blob);
            if ingest.store().content().blob_size(*blob)? == Some(size) {
                return Ok(Some(Joined::As(*blob)));
            }
        }
        let joined = ingest.join(ranges, &mut |_| !pull.events.is_closed())?;
        match joined {
            Joined::As(_) => self.replaced.extend(ranges.iter().map(|range| range.blob)),
            Joined::NoSpace => {
                self.without_space = self.without_space.saturating_add(1);
                self.largest = self.largest.max(size);
            }
            _ => {}
        }
        Ok(Some(joined))
    }

    /// Collects the pieces that no model needs, after the commit.
    pub(super) fn collect_pieces(&self, store: &Store) {
        if self.replaced.is_empty() {
            return;
        }
        if let Err(error) = gc::collect_from(store.liveness(), self.replaced.clone()) {
            tracing::warn!("pieces of expert groups were not collected: {error}; `blobd gc` collects them");
        }
    }

    /// What the user should know.
    pub(super) fn note(&self) -> Option<String> {
        (self.without_space > 0).then(|| {
            format!(
                "stored in pieces: expert groups that several shards have parts of: {}; joining them needs free space for one \
                 copy of each, of up to {}: free some and pull again, so that they share with other forms of the model",
                self.without_space,
                human_bytes(self.largest)
            )
        })
    }
}

fn send_progress(pull: Pull<'_>, done: u64, total: u64) {
    let progress = PullProgress::working("joining experts that several shards have", Phase::Writing);
    pull.send(PullProgress { phase_completed: Some(done), phase_total: Some(total), ..progress });
}

/// The recipe of a file that is split.
fn recipe(store: &Store, file: &Descriptor) -> Result<Option<Arc<Recipe>>, OpError> {
    let stored = store.content().stored_file(file)?;
    Ok(stored.recipe.filter(|recipe| recipe.format().is_some()))
}

/// The groups that several of these files have tensors of. Files are known by their numbers.
fn groups(store: &Store, files: &[ModelFile]) -> Result<SharedGroups, OpError> {
    let mut sets = ShardSets::default();
    let weights = || files.iter().enumerate().filter(|(_, (file, _))| file.media_type.holds_tensors());
    if weights().count() < 2 {
        return Ok(sets.shared());
    }
    for (number, (file, name)) in weights() {
        let Some(recipe) = recipe(store, file)? else { continue };
        if let Some(header) = read_header(store, &recipe)? {
            let name = name.as_deref().unwrap_or_default();
            // The header was accepted when the file was stored.
            let _ = sets.add((number, name), file.size, &*header);
        }
    }
    Ok(sets.shared())
}

/// Where the bytes of a group are stored, in their order. They are fewer if some are in no blob.
fn ranges_of(
    store: &Store,
    files: &[ModelFile],
    groups: &SharedGroups,
    group: usize,
) -> Result<Vec<BlobRange>, OpError> {
    let mut recipes = BTreeMap::new();
    let mut ranges: Vec<BlobRange> = Vec::new();
    for place in groups.places_of(group) {
        let Some((file, _)) = files.get(place.file) else { continue };
        let known = match recipes.entry(place.file) {
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(unknown) => unknown.insert(recipe(store, file)?),
        };
        let Some(recipe) = known else { continue };
        for source in recipe.pieces().sources(place.offset..place.offset.saturating_add(place.size)) {
            let Source::Blob { blob, offset, length } = source else { continue };
            match ranges.last_mut() {
                Some(last) if last.blob == blob && last.offset.saturating_add(last.length) == offset => {
                    last.length = last.length.saturating_add(length);
                }
                _ => ranges.push(BlobRange { blob, offset, length }),
            }
        }
    }
    Ok(ranges)
}

/// Adds the recipes of the files that have parts of the joined groups.
fn add_recipes(
    ingest: &mut Ingest,
    files: &[ModelFile],
    groups: &SharedGroups,
    joined: &BTreeMap<usize, Digest>,
) -> Result<(), OpError> {
    for (number, (file, _)) in files.iter().enumerate() {
        let parts = groups.parts_of(number).iter().filter(|part| joined.contains_key(&part.group));
        let parts: Vec<_> = parts.copied().collect();
        let Some(stored) = recipe(ingest.store(), file)?.filter(|_| !parts.is_empty()) else { continue };
        let Some(header) = read_header(ingest.store(), &stored)? else { continue };
        let Ok(layout) = header.file_layout(file.size) else { continue };
        let recipe = SplitPlan::sharing(layout, &parts).joined(&stored, joined);
        if let Some(recipe) = recipe.filter(|recipe| *recipe != *stored) {
            ingest.add_recipe(recipe);
        }
    }
    Ok(())
}
