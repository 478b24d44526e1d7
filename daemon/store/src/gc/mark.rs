//! The mark phase: what is needed, read from manifests and recipes on disk.
//!
//! For a million blobs it takes seconds and some 40 MiB: the candidates are one sorted list, and
//! of each recipe only the blobs are read. The index has no say in it.

use std::collections::{BTreeSet, HashSet};
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reach::{Marks, mark_listed, reachable};

use super::plan::Node;
use super::read_ahead::with_read_ahead;
use super::walk::{Owner, references, roots_of, walk};
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
