//! `rm`: names go, and with them what only they needed.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Mutex, PoisonError};

use blobd_client::protocol::request::RemoveParams;
use blobd_client::protocol::response::{Kept, Removed};
use blobd_store_format::reference::Reference;

use super::OpError;
use crate::gc::{self, Node};
use crate::store::{Store, StoreError};

/// What removed models needed and an open session still holds: it goes when the session ends.
#[derive(Debug, Default)]
pub struct Condemned(Mutex<BTreeSet<Node>>);

impl Condemned {
    /// Collects what no session holds any more. Cheap when nothing is condemned.
    ///
    /// # Errors
    /// [`StoreError`]; what could not be collected is left to the next `gc`.
    pub fn collect(&self, store: &Store) -> Result<u64, StoreError> {
        let nodes = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        if nodes.is_empty() {
            return Ok(0);
        }
        let freed = gc::collect_from(store, &nodes)?.freed_bytes();
        self.add(still_pinned(store, &nodes));
        Ok(freed)
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
    let references: BTreeSet<Reference> =
        params.references.iter().map(|reference| store.resolve(reference)).collect::<Result<_, _>>()?;
    let mut candidates = BTreeSet::new();
    for reference in &references {
        candidates.extend(needed_if_readable(store, reference)?);
    }
    {
        let _tags = store.lock_tags();
        for reference in &references {
            store.remove_tag(reference)?;
        }
    }
    let removed = references.iter().map(Reference::short).collect();
    // One unreadable manifest may need any blob: names are gone, bytes stay.
    let deleted = match gc::collect_from(store, &candidates) {
        Ok(deleted) => deleted,
        Err(error) => {
            let bytes = bytes_on_disk(store, &candidates)?;
            return Ok(Removed {
                removed,
                freed_bytes: 0,
                kept: vec![Kept { bytes, by: vec![error.to_string()] }],
            });
        }
    };
    condemned.add(still_pinned(store, &candidates));
    for (node, _) in &deleted.deletions {
        candidates.remove(node);
    }
    Ok(Removed { removed, freed_bytes: deleted.freed_bytes(), kept: kept(store, &candidates)? })
}

/// What a tag needs; nothing if its own manifest is damaged, for then `gc` has to find it.
fn needed_if_readable(store: &Store, reference: &Reference) -> Result<BTreeSet<Node>, StoreError> {
    match store.manifest(reference).and_then(|manifest| gc::needs(store, &manifest)) {
        Ok(nodes) => Ok(nodes),
        Err(StoreError::Manifest { .. } | StoreError::Recipe { .. }) => Ok(BTreeSet::new()),
        Err(error) => Err(error),
    }
}

fn still_pinned(store: &Store, nodes: &BTreeSet<Node>) -> BTreeSet<Node> {
    let pinned = store.leases().pinned();
    nodes.iter().copied().filter(|node| pinned.contains(&node.digest())).collect()
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
