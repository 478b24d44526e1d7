//! The mark phase: what is needed, read from manifests and recipes on disk.
//!
//! For a million blobs it takes seconds and some 40 MiB: the candidates are one sorted list, and
//! of each recipe only the blobs are read. The index has no say in it.

use std::collections::{BTreeSet, HashSet};
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::outline::RecipeOutline;
use blobd_store_format::reach::{Marks, mark_listed, reachable};
use blobd_store_format::reference::Reference;

use super::plan::Node;
use super::read_ahead::with_read_ahead;
use super::walk::{Owner, walk};
use crate::sys::give_back_memory;
use crate::{Store, StoreError};

/// Which of `candidates` are needed by a tag, by a model whose time in the trash is not over at `now`, or
/// by an unfinished download.
///
/// # Errors
/// The first manifest or recipe that cannot be read or is missing, or a file under `manifests/`
/// that is none; the same in the trash.
pub(super) fn mark(store: &Store, candidates: Vec<Node>, now: SystemTime) -> Result<Marks<Node>, StoreError> {
    store.check_directories()?;
    let mut roots = Vec::new();
    walk(store, now, &mut |owned| {
        // What is pinned is no more needed for that: it is left alone, and tried again.
        if owned.owner != Owner::Leases {
            roots.extend(owned.roots);
        }
        Ok(())
    })?;
    let marks = with_read_ahead(store, &recipes_in_order(&roots), |ahead| {
        mark_listed(candidates, roots, |node| references(node, |file| ahead.outline(file)))
    });
    give_back_memory();
    marks
}

/// Calls `visit` with every tag and its manifest.
///
/// # Errors
/// What no collection goes on after: a file under `manifests/` that is no manifest, a manifest
/// that cannot be read, a file of a model that is missing; those of `visit`.
pub(super) fn each_model(
    store: &Store,
    mut visit: impl FnMut(Reference, Manifest) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    let tags = store.tags()?;
    if let Some(path) = tags.foreign.into_iter().next() {
        return Err(StoreError::ForeignFile { path });
    }
    for reference in tags.references {
        match store.manifest(&reference) {
            Ok(manifest) => {
                check_complete(store, &reference, &manifest)?;
                visit(reference, manifest)?;
            }
            // Removed since it was listed, by its owner.
            Err(StoreError::NoSuchModel { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// The recipes among the roots as the mark phase comes by them: from the last to the first.
fn recipes_in_order(roots: &[Node]) -> Vec<Digest> {
    let mut seen = HashSet::new();
    let recipe = |node: &Node| match node {
        Node::Recipe(file) => seen.insert(*file).then_some(*file),
        Node::Blob(_) => None,
    };
    roots.iter().rev().filter_map(recipe).collect()
}

/// Everything that a manifest needs.
///
/// # Errors
/// A recipe that cannot be read.
pub fn needs(store: &Store, manifest: &Manifest) -> Result<BTreeSet<Node>, StoreError> {
    reachable(roots_of(manifest), |node| references(node, |file| store.recipe_outline(file)))
}

/// A file that has neither blob nor recipe may have had a recipe, and nobody knows which blobs
/// that would have named. One that was put aside was a blob.
fn check_complete(store: &Store, reference: &Reference, manifest: &Manifest) -> Result<(), StoreError> {
    for digest in manifest.digests() {
        let is_there = store.has_recipe(digest) || store.blob_size(digest)?.is_some();
        if !is_there && !store.is_quarantined(digest) {
            return Err(StoreError::Incomplete { name: reference.short(), digest });
        }
    }
    Ok(())
}

pub(super) fn roots_of(manifest: &Manifest) -> Vec<Node> {
    let digests = manifest.digests();
    digests.into_iter().flat_map(|digest| [Node::Blob(digest), Node::Recipe(digest)]).collect()
}

pub(super) fn references(
    node: Node,
    outline: impl FnOnce(Digest) -> Result<Option<RecipeOutline>, StoreError>,
) -> Result<Vec<Node>, StoreError> {
    let Node::Recipe(file) = node else { return Ok(Vec::new()) };
    let Some(outline) = outline(file)? else { return Ok(Vec::new()) };
    Ok(outline.digests().iter().copied().map(Node::Blob).collect())
}
