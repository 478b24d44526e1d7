//! `rm`: names go, and with them what only they needed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use blobd_client::protocol::request::RemoveParams;
use blobd_client::protocol::response::{Kept, Removed};
use blobd_store_format::reference::Reference;

use super::OpError;
use crate::gc::{self, GcPlan, Node};
use crate::store::{Store, StoreError};

/// What removed models needed and an open session still holds: it goes when the session ends.
#[derive(Debug, Default)]
pub struct Condemned(Mutex<BTreeSet<Node>>);

impl Condemned {
    /// Collects what no lease holds any more. Cheap when that is nothing.
    ///
    /// # Errors
    /// [`StoreError`]; what could not be collected is left to the next `gc`.
    pub fn collect(&self, store: &Store) -> Result<GcPlan, StoreError> {
        let free = self.take_unpinned(store);
        if free.is_empty() { Ok(GcPlan::default()) } else { gc::collect_from(store, &free) }
    }

    fn take_unpinned(&self, store: &Store) -> BTreeSet<Node> {
        let mut nodes = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if nodes.is_empty() {
            return BTreeSet::new();
        }
        let pinned = store.leases().pinned();
        let (held, free) =
            std::mem::take(&mut *nodes).into_iter().partition(|node| pinned.contains(&node.digest()));
        *nodes = held;
        free
    }

    fn add(&self, nodes: impl IntoIterator<Item = Node>) {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).extend(nodes);
    }
}

/// Drops the names and frees what nothing else needs. What another model or a session needs
/// stays and is reported with who needs it.
///
/// # Errors
/// [`StoreError::NoSuchModel`] when one of the names is unknown: then none is dropped.
pub fn remove(store: &Store, condemned: &Condemned, params: &RemoveParams) -> Result<Removed, OpError> {
    let (removed, mut candidates) = drop_names(store, &params.references)?;
    // What a session holds now is condemned before it can end, so that it goes when that ends.
    condemned.add(candidates.iter().copied());
    // One unreadable manifest may need any blob: names are gone, bytes stay.
    let deleted = match condemned.collect(store) {
        Ok(deleted) => deleted,
        Err(error) => {
            let bytes = bytes_on_disk(store, &candidates)?;
            return Ok(Removed {
                removed,
                freed_bytes: 0,
                kept: vec![Kept { bytes, by: vec![error.to_string()] }],
                trashed_until: None,
            });
        }
    };
    for (node, _) in &deleted.deletions {
        candidates.remove(node);
    }
    Ok(Removed {
        removed,
        freed_bytes: deleted.freed_bytes(),
        kept: kept(store, &candidates)?,
        trashed_until: None,
    })
}

/// Drops the names, all or none, and returns them with what they needed. No tag changes between
/// the look and the deed.
fn drop_names(store: &Store, names: &[Reference]) -> Result<(Vec<String>, BTreeSet<Node>), OpError> {
    let _tags = store.lock_tags();
    let references: BTreeSet<Reference> =
        names.iter().map(|reference| store.resolve(reference)).collect::<Result<_, _>>()?;
    let mut needed = BTreeSet::new();
    for reference in &references {
        needed.extend(needed_if_readable(store, reference)?);
    }
    for reference in &references {
        store.remove_tag(reference)?;
    }
    Ok((references.iter().map(Reference::short).collect(), needed))
}

/// What a tag needs; nothing if its own manifest is damaged, for then `gc` has to find it.
fn needed_if_readable(store: &Store, reference: &Reference) -> Result<BTreeSet<Node>, StoreError> {
    match store.manifest(reference).and_then(|manifest| gc::needs(store, &manifest)) {
        Ok(nodes) => Ok(nodes),
        Err(
            StoreError::Manifest { .. }
            | StoreError::Recipe { .. }
            | StoreError::WrongRecipe { .. }
            // Removed meanwhile, by somebody else.
            | StoreError::NoSuchModel { .. },
        ) => {
            Ok(BTreeSet::new())
        }
        Err(error) => Err(error),
    }
}

/// Groups what is left by who needs it.
fn kept(store: &Store, nodes: &BTreeSet<Node>) -> Result<Vec<Kept>, StoreError> {
    let mut keepers: BTreeMap<Node, BTreeSet<String>> = BTreeMap::new();
    for reference in store.tags()?.references {
        for node in needed_if_readable(store, &reference)?.intersection(nodes) {
            keepers.entry(*node).or_default().insert(reference.short());
        }
    }
    let mut groups: BTreeMap<Vec<String>, BTreeSet<Node>> = BTreeMap::new();
    for node in nodes {
        let mut by = keepers.remove(node).unwrap_or_default();
        by.extend(store.leases().holders(node.digest()));
        groups.entry(by.into_iter().collect()).or_default().insert(*node);
    }
    let mut kept = Vec::new();
    for (by, nodes) in groups {
        let bytes = bytes_on_disk(store, &nodes)?;
        if bytes > 0 {
            kept.push(Kept { bytes, by });
        }
    }
    Ok(kept)
}

fn bytes_on_disk(store: &Store, nodes: &BTreeSet<Node>) -> Result<u64, StoreError> {
    let mut sum = 0u64;
    for node in nodes {
        sum = sum.saturating_add(node.bytes_on_disk(store)?.unwrap_or_default());
    }
    Ok(sum)
}
