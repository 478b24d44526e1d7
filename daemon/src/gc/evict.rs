//! Eviction: whole models go, the one that was used longest ago first, until enough is free.
//!
//! Never one that is pinned, open or mapped, and never one that could not be pulled again unless
//! the policy says so. If all that may go were not enough, nothing goes.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;

use super::execute::is_held;
use super::{Node, collect_from, needs};
use crate::store::{Eviction, Store, StoreError};

/// What would be evicted, as a value.
#[derive(Clone, Debug, Default)]
pub struct EvictionPlan {
    /// The models that go, in this order.
    pub victims: Vec<Victim>,
    /// The models that stay whatever happens, and why.
    pub spared: Vec<(Reference, &'static str)>,
    /// What the plan frees on disk.
    pub freed_bytes: u64,
}

/// A model that is to go.
#[derive(Clone, Debug)]
pub struct Victim {
    /// Its tag.
    pub reference: Reference,
    /// What the tag points to.
    pub manifest: Manifest,
    /// When it was last used.
    pub last_used: SystemTime,
    /// What goes with it and with those before it.
    pub freed_bytes: u64,
    needs: BTreeSet<Node>,
}

/// Plans to free at least `needed_bytes`. `last_used` tells when a model was last opened.
///
/// # Errors
/// [`StoreError`]: a manifest or recipe that cannot be read, since it may need anything.
pub fn plan_eviction(
    store: &Store,
    needed_bytes: u64,
    last_used: &dyn Fn(&Reference) -> Option<SystemTime>,
) -> Result<EvictionPlan, StoreError> {
    let mut users = trash_users(store)?;
    let (mut candidates, mut plan) = (Vec::new(), EvictionPlan::default());
    for model in models(store, last_used)? {
        for node in &model.needs {
            *users.entry(*node).or_default() += 1;
        }
        candidates.push(model);
    }
    candidates.sort_by(|a, b| (a.last_used, &a.reference).cmp(&(b.last_used, &b.reference)));
    let pinned = store.leases().pinned();
    // What a session has open, or a transaction found here and builds on, frees nothing.
    for node in pinned.iter().flat_map(|digest| [Node::Blob(*digest), Node::Recipe(*digest)]) {
        *users.entry(node).or_default() += 1;
    }
    let mut evictable = Vec::new();
    for model in candidates {
        match reason_to_spare(store, &model, &pinned) {
            Some(reason) => plan.spared.push((model.reference, reason)),
            None => evictable.push(model),
        }
    }
    plan.victims = choose(store, evictable, users, needed_bytes)?;
    plan.freed_bytes = plan.victims.last().map_or(0, |victim| victim.freed_bytes);
    Ok(plan)
}

/// Evicts what the plan lists, but for what has come into use since; returns what that freed.
///
/// # Errors
/// [`StoreError`].
pub fn evict(store: &Store, plan: &EvictionPlan) -> Result<u64, StoreError> {
    let mut candidates = BTreeSet::new();
    for victim in &plan.victims {
        let _tags = store.lock_tags();
        let leased = store.leases().pinned().contains(&victim.manifest.digest());
        let unchanged = store.manifest(&victim.reference).is_ok_and(|now| now == victim.manifest);
        if leased || !unchanged || store.is_pinned(&victim.reference) {
            continue;
        }
        tracing::info!("evicting {} to make room", victim.reference.short());
        store.remove_tag(&victim.reference)?;
        candidates.extend(victim.needs.iter().map(|node| node.digest()));
    }
    Ok(collect_from(store, candidates)?.freed_bytes())
}

fn models(
    store: &Store,
    last_used: &dyn Fn(&Reference) -> Option<SystemTime>,
) -> Result<Vec<Victim>, StoreError> {
    let mut models = Vec::new();
    for reference in store.tags()?.references {
        let (manifest, modified) = match (store.manifest(&reference), store.modified(&reference)) {
            (Err(StoreError::NoSuchModel { .. }), _) | (_, Err(StoreError::NoSuchModel { .. })) => continue,
            (manifest, modified) => (manifest?, modified?),
        };
        let needs = needs(store, &manifest)?;
        let opened = last_used(&reference).or_else(|| store.last_use(manifest.digest()));
        let last_used = opened.map_or(modified, |opened| opened.max(modified));
        models.push(Victim { reference, manifest, last_used, freed_bytes: 0, needs });
    }
    Ok(models)
}

fn trash_users(store: &Store) -> Result<BTreeMap<Node, u64>, StoreError> {
    let mut users = BTreeMap::new();
    for trashed in store.trash()? {
        for node in needs(store, &trashed.manifest)? {
            *users.entry(node).or_default() += 1;
        }
    }
    Ok(users)
}

fn reason_to_spare(store: &Store, model: &Victim, pinned: &BTreeSet<Digest>) -> Option<&'static str> {
    let policy = store.space_policy().eviction;
    if store.is_pinned(&model.reference) {
        return Some("pinned");
    }
    if pinned.contains(&model.manifest.digest()) {
        return Some("open");
    }
    let can_be_pulled = store.origin(model.manifest.digest()).is_some_and(|origin| is_pullable(&origin));
    if policy != Eviction::All && !can_be_pulled {
        return Some("cannot be pulled again");
    }
    // What a session has pinned is another model's that shares it, and stays without this one.
    let blobs = model.needs.iter().filter(|node| matches!(node, Node::Blob(_))).map(|node| node.digest());
    let mut unexplained = blobs.filter(|digest| !pinned.contains(digest));
    unexplained.any(|digest| is_held(store, digest)).then_some("mapped by a running program")
}

/// An origin is a source, or `import` and a file's name.
pub(crate) fn is_pullable(origin: &str) -> bool {
    origin.parse::<PullSource>().is_ok()
}

/// The least recently used that together free enough; none if all do not.
fn choose(
    store: &Store,
    evictable: Vec<Victim>,
    mut users: BTreeMap<Node, u64>,
    needed_bytes: u64,
) -> Result<Vec<Victim>, StoreError> {
    let (mut chosen, mut freed) = (Vec::new(), 0u64);
    for mut victim in evictable {
        if freed >= needed_bytes {
            break;
        }
        for node in &victim.needs {
            let count = users.entry(*node).or_default();
            *count = count.saturating_sub(1);
            if *count == 0 {
                freed = freed.saturating_add(node.bytes_on_disk(store)?.unwrap_or_default());
            }
        }
        victim.freed_bytes = freed;
        chosen.push(victim);
    }
    if freed < needed_bytes {
        return Ok(Vec::new());
    }
    spare_the_useless(store, &mut chosen, users, needed_bytes)?;
    Ok(chosen)
}

/// A model all of whose bytes others share frees nothing: those that the goal is reached without
/// stay, the ones used last first.
fn spare_the_useless(
    store: &Store,
    chosen: &mut Vec<Victim>,
    mut users: BTreeMap<Node, u64>,
    needed_bytes: u64,
) -> Result<(), StoreError> {
    let mut freed = chosen.last().map_or(0, |victim| victim.freed_bytes);
    for index in (0..chosen.len()).rev() {
        let Some(victim) = chosen.get(index) else { continue };
        let mut own = 0u64;
        for node in victim.needs.iter().filter(|node| users.get(node) == Some(&0)) {
            own = own.saturating_add(node.bytes_on_disk(store)?.unwrap_or_default());
        }
        if freed.saturating_sub(own) < needed_bytes {
            continue;
        }
        freed = freed.saturating_sub(own);
        for node in &victim.needs {
            *users.entry(*node).or_default() += 1;
        }
        chosen.remove(index);
        for later in chosen.iter_mut().skip(index) {
            later.freed_bytes = later.freed_bytes.saturating_sub(own);
        }
    }
    Ok(())
}
