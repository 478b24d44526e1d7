//! `rm`: removes names, and what only they needed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use blobd_client::protocol::request::RemoveParams;
use blobd_client::protocol::response::{Kept, Removed};
use blobd_store::gc::{self, Node};
use blobd_store::{Store, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::{OpError, rfc3339};

/// Removes the names and frees what nothing else needs. What another model, the trash, a session or a
/// mapping program needs is kept and reported with its holder. With `keep_seconds`, moves the models to
/// the trash and frees nothing.
///
/// # Errors
/// [`StoreError::NoSuchModel`] or [`OpError::Pinned`] for any of the names; then none is removed.
pub fn remove(store: &Store, params: &RemoveParams) -> Result<Removed, OpError> {
    store.with_reserve(|| match params.keep_seconds {
        Some(seconds) => move_to_trash(store, &params.references, Duration::from_secs(seconds)),
        None => free(store, &params.references),
    })
}

fn move_to_trash(store: &Store, names: &[Reference], keep: Duration) -> Result<Removed, OpError> {
    // Held until the tags are removed: a collection that saw neither record nor tag would delete the models.
    let lease = store.leases().grant("rm --keep");
    let mut trashed_until = None;
    let trash = |reference: &Reference| -> Result<(), OpError> {
        let manifest = store.leased_model(reference, &lease)?.manifest;
        // Before the tag is removed: a crash in between leaves both, which is harmless.
        trashed_until = Some(rfc3339(store.add_to_trash(reference, &manifest, keep)?));
        Ok(())
    };
    let (removed, candidates) = drop_names(store, names, trash)?;
    drop(lease);
    let kept = kept_or_why(store, &candidates, &BTreeSet::new());
    Ok(Removed { removed, freed_bytes: 0, kept, trashed_until })
}

fn free(store: &Store, names: &[Reference]) -> Result<Removed, OpError> {
    let (removed, mut candidates) = drop_names(store, names, |_| Ok(()))?;
    // An unreadable manifest may need any blob: then the names are removed and the bytes kept.
    let deleted = match gc::collect_from(store, candidates.iter().map(|node| node.digest()).collect()) {
        Ok(deleted) => deleted,
        Err(error) => {
            let kept = vec![kept_because(store, &candidates, &error)];
            // Retried later, by the next `gc` at the latest.
            store.condemn(candidates.iter().map(|node| node.digest()));
            return Ok(Removed { removed, freed_bytes: 0, kept, trashed_until: None });
        }
    };
    for (node, _) in &deleted.deletions {
        candidates.remove(node);
    }
    let held = deleted.held.iter().map(|(node, _)| node.digest()).collect();
    let kept = kept_or_why(store, &candidates, &held);
    Ok(Removed { removed, freed_bytes: deleted.freed_bytes(), kept, trashed_until: None })
}

/// The names are removed already, so a failure to find the holders is reported, not returned.
fn kept_or_why(store: &Store, nodes: &BTreeSet<Node>, held: &BTreeSet<Digest>) -> Vec<Kept> {
    kept(store, nodes, held).unwrap_or_else(|error| vec![kept_because(store, nodes, &error)])
}

fn kept_because(store: &Store, nodes: &BTreeSet<Node>, error: &StoreError) -> Kept {
    Kept { bytes: bytes_on_disk(store, nodes).unwrap_or_default(), by: vec![error.to_string()] }
}

/// Removes the names, all or none, after `before` was called with each. Returns them with what they needed.
/// Tags are locked, so that none changes between check and removal.
fn drop_names(
    store: &Store,
    names: &[Reference],
    mut before: impl FnMut(&Reference) -> Result<(), OpError>,
) -> Result<(Vec<String>, BTreeSet<Node>), OpError> {
    let _tags = store.lock_tags();
    let references: BTreeSet<Reference> =
        names.iter().map(|reference| store.resolve(reference)).collect::<Result<_, _>>()?;
    let mut needed = BTreeSet::new();
    for reference in &references {
        needed.extend(needed_if_readable(store, reference)?);
    }
    if let Some(pinned) = references.iter().find(|reference| store.is_pinned(reference)) {
        return Err(OpError::Pinned { name: pinned.short() });
    }
    references.iter().try_for_each(&mut before)?;
    for reference in &references {
        store.remove_tag(reference)?;
    }
    Ok((references.iter().map(Reference::short).collect(), needed))
}

/// What a tag needs. Nothing if its manifest or a recipe is damaged: then only `gc` can find what to free.
fn needed_if_readable(store: &Store, reference: &Reference) -> Result<BTreeSet<Node>, StoreError> {
    match store.manifest(reference).and_then(|manifest| gc::needs(store, &manifest)) {
        Ok(nodes) => Ok(nodes),
        Err(
            StoreError::Manifest { .. }
            | StoreError::Recipe { .. }
            // Removed by another client meanwhile.
            | StoreError::NoSuchModel { .. },
        ) => {
            Ok(BTreeSet::new())
        }
        Err(error) => Err(error),
    }
}

/// Groups what is kept by its holders: models, the trash, partial downloads, sessions, and for `held`
/// programs that have it mapped without a session.
fn kept(store: &Store, nodes: &BTreeSet<Node>, held: &BTreeSet<Digest>) -> Result<Vec<Kept>, StoreError> {
    let mut keepers: BTreeMap<Node, BTreeSet<String>> = BTreeMap::new();
    // At the epoch no trash record has expired, so all of them count as holders.
    gc::walk(store, SystemTime::UNIX_EPOCH, &mut |owned| {
        let Some(name) = owned.owner.name() else { return Ok(()) };
        for node in owned.nodes(store)?.intersection(nodes) {
            keepers.entry(*node).or_default().insert(name.clone());
        }
        Ok(())
    })?;
    let programs = gc::holders(store, held);
    let mut groups: BTreeMap<Vec<String>, BTreeSet<Node>> = BTreeMap::new();
    for node in nodes {
        let mut by = keepers.remove(node).unwrap_or_default();
        by.extend(store.leases().holders(node.digest()));
        if by.is_empty() && held.contains(&node.digest()) {
            let unknown = || BTreeSet::from([gc::UNKNOWN_HOLDER.to_owned()]);
            by = programs.get(&node.digest()).cloned().unwrap_or_else(unknown);
        }
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
