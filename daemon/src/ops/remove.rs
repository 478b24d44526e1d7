//! `rm`: names go, and with them what only they needed.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, SystemTime};

use blobd_client::protocol::request::RemoveParams;
use blobd_client::protocol::response::{Kept, Removed};
use blobd_store::gc::{self, Node};
use blobd_store::{Store, StoreError};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::{OpError, rfc3339};

/// Drops the names and frees what nothing else needs. What another model, the trash, a session or
/// a program that has mapped it needs stays and is reported with who needs it. With `keep_seconds`
/// the models go to the trash, and nothing is freed.
///
/// # Errors
/// [`StoreError::NoSuchModel`] when one of the names is unknown, [`OpError::Pinned`] when one is
/// pinned: then none is dropped.
pub fn remove(store: &Store, params: &RemoveParams) -> Result<Removed, OpError> {
    store.with_reserve(|| match params.keep_seconds {
        Some(seconds) => put_aside(store, &params.references, Duration::from_secs(seconds)),
        None => free(store, &params.references),
    })
}

fn put_aside(store: &Store, names: &[Reference], keep: Duration) -> Result<Removed, OpError> {
    // Until the tags are gone: a collection that saw neither record nor tag would free it all.
    let lease = store.leases().grant("rm --keep");
    let mut trashed_until = None;
    let trash = |reference: &Reference| -> Result<(), OpError> {
        let manifest = store.leased_model(reference, &lease)?.manifest;
        // Before the tag goes: a crash in between leaves both, and neither does harm.
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
    // One unreadable manifest may need any blob: names are gone, bytes stay.
    let deleted = match gc::collect_from(store, candidates.iter().map(|node| node.digest()).collect()) {
        Ok(deleted) => deleted,
        Err(error) => {
            let kept = vec![kept_because(store, &candidates, &error)];
            // Tried again when that may have been mended, by the next `gc` at the latest.
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

/// The names are gone: that it cannot be told who else needs the bytes is no failure of that.
fn kept_or_why(store: &Store, nodes: &BTreeSet<Node>, held: &BTreeSet<Digest>) -> Vec<Kept> {
    kept(store, nodes, held).unwrap_or_else(|error| vec![kept_because(store, nodes, &error)])
}

fn kept_because(store: &Store, nodes: &BTreeSet<Node>, error: &StoreError) -> Kept {
    Kept { bytes: bytes_on_disk(store, nodes).unwrap_or_default(), by: vec![error.to_string()] }
}

/// Drops the names, all or none, and returns them with what they needed. Before each goes, `first`
/// is called with it. No tag changes between the look and the deed.
fn drop_names(
    store: &Store,
    names: &[Reference],
    mut first: impl FnMut(&Reference) -> Result<(), OpError>,
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
    references.iter().try_for_each(&mut first)?;
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

/// Groups what is left by who needs it: models, the trash, unfinished downloads, sessions, and for
/// `held` the programs that have it mapped without a session.
fn kept(store: &Store, nodes: &BTreeSet<Node>, held: &BTreeSet<Digest>) -> Result<Vec<Kept>, StoreError> {
    let mut keepers: BTreeMap<Node, BTreeSet<String>> = BTreeMap::new();
    // Of the trash everything stays: what has expired there goes with its record.
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
