//! Eviction: removes whole models, the least recently used first, until enough space is free.
//!
//! A model that is pinned, open or mapped is never evicted. One that cannot be pulled again is evicted only if the
//! policy allows it. If all candidates together would not free enough, or if a collection after the eviction would be
//! refused, nothing is evicted.

use std::collections::{BTreeSet, HashMap};
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PulledSource;

use super::displaced::check_collectable;
use super::held::is_held_by_a_program;
use super::{
    LossReport, LostModel, Node, Owned, Owner, Untagged, collect_condemned_in_snapshot, needs, walk,
};
use crate::liveness::Liveness;
use crate::names::records::{Actor, Verb};
use crate::sys::give_back_memory;
use crate::{Eviction, StoreError, lock};

#[derive(Clone, Debug, Default)]
pub struct EvictionPlan {
    pub victims: Vec<Victim>,
    /// The models that cannot be evicted, and why.
    pub spared: Vec<(Reference, &'static str)>,
    pub freed_bytes: u64,
}

#[derive(Clone, Debug)]
pub struct Victim {
    pub reference: Reference,
    pub manifest: Digest,
    pub last_used: SystemTime,
    /// Bytes on disk that this eviction and those before it free.
    pub freed_bytes: u64,
}

/// A model that may be evicted, with the numbers of the nodes that it needs.
#[derive(Clone)]
struct Candidate {
    victim: Victim,
    needs: Box<[usize]>,
}

type Counted = (Node, u32);

/// Counts the users of each node. Nodes are numbered, which bounds the memory for ten thousand models.
#[derive(Default)]
struct Users {
    numbers: HashMap<Node, usize>,
    counted: Vec<Counted>,
}

impl Users {
    /// Adds a user of `nodes` and returns their numbers.
    fn add(&mut self, nodes: impl IntoIterator<Item = Node>) -> Box<[usize]> {
        let Self { numbers, counted } = self;
        let number = |node| {
            let number = *numbers.entry(node).or_insert(counted.len());
            match counted.get_mut(number) {
                Some((_, count)) => *count = count.saturating_add(1),
                None => counted.push((node, 1)),
            }
            number
        };
        nodes.into_iter().map(number).collect()
    }
}

/// Plans to free as many bytes as the first of `goals` that can be reached, or nothing. The caller has collected
/// unneeded data before. `last_used` returns when a name and manifest were last opened.
pub fn plan_eviction(
    store: &Liveness,
    goals: &[u64],
    last_used: &dyn Fn(&Reference, Digest) -> Option<SystemTime>,
) -> Result<EvictionPlan, StoreError> {
    // A collection at the same time would make files disappear, which would look like damage.
    let _guard = store.lock_collections();
    let mut users = Users::default();
    let mut candidates = candidates(store, &mut users, last_used)?;
    let leased = store.leases().leased();
    let Users { counted, .. } = users;
    let order = |candidate: &Candidate| (candidate.victim.last_used, candidate.victim.reference.clone());
    candidates.sort_by_cached_key(order);
    let (mut evictable, mut plan) = (Vec::new(), EvictionPlan::default());
    for candidate in candidates {
        match reason_to_keep(store, &candidate, &counted, &leased) {
            Some(reason) => plan.spared.push((candidate.victim.reference, reason)),
            None => evictable.push(candidate),
        }
    }
    for goal in goals {
        if let Some(victims) = choose(store, &evictable, counted.clone(), *goal)? {
            plan.victims = victims;
            break;
        }
    }
    give_back_memory();
    plan.freed_bytes = plan.victims.last().map_or(0, |victim| victim.freed_bytes);
    Ok(plan)
}

/// The bytes that would be free if all models were evicted that may be.
pub fn evictable_bytes(store: &Liveness) -> Result<u64, StoreError> {
    let _guard = store.lock_collections();
    let mut users = Users::default();
    let candidates = candidates(store, &mut users, &|_model, _manifest| None)?;
    let (leased, mut counted) = (store.leases().leased(), users.counted);
    let mut freed = 0u64;
    for candidate in candidates {
        if reason_to_keep(store, &candidate, &counted, &leased).is_none() {
            freed = freed.saturating_add(release(store, &candidate, &mut counted)?);
        }
    }
    give_back_memory();
    Ok(freed)
}

/// Evicts the models of the plan that have not come into use since, and calls `report` with each; returns the bytes
/// freed.
///
/// # Errors
/// As for [`super::plan`]; then no model was removed. [`StoreError::Io`] when one cannot be removed; those before it
/// are evicted and reported.
pub fn evict(store: &Liveness, plan: &EvictionPlan, report: &dyn Fn(&LostModel)) -> Result<u64, StoreError> {
    if plan.victims.is_empty() {
        return Ok(0);
    }
    check_collectable(store)?;
    let mut evicted = Vec::new();
    let removed = plan.victims.iter().try_for_each(|victim| {
        evicted.extend(evict_one(store, victim)?);
        Ok(())
    });
    let (losses, collected) = match collect_condemned_in_snapshot(store) {
        Ok((deleted, snapshot)) => {
            (LossReport::in_snapshot(store, &evicted, &deleted.deletions, snapshot), Ok(deleted))
        }
        Err(refusal) => (LossReport::unknown(store, &evicted, &refusal), Err(refusal)),
    };
    let freed = losses.models.iter().map(|model| model.freed_bytes).fold(0, u64::saturating_add);
    lock(&store.content.counts).evicted_models += losses.models.len() as u64;
    lock(&store.content.counts).evicted_bytes += freed;
    losses.models.iter().for_each(report);
    removed.and(collected).map(|deleted| deleted.freed_bytes())
}

/// Removes the tag; `None` if the model is in use or another one by now.
fn evict_one(store: &Liveness, victim: &Victim) -> Result<Option<Untagged>, StoreError> {
    let _tags = store.names.lock_tags();
    let unchanged =
        store.names.own_manifest(&victim.reference).ok().filter(|now| now.digest() == victim.manifest);
    let Some(manifest) = unchanged else { return Ok(None) };
    let leased = store.leases().leased().contains(&victim.manifest);
    if leased || store.names.is_pinned(&victim.reference) {
        return Ok(None);
    }
    let (reference, size, nodes) = (victim.reference.clone(), manifest.size(), needs(store, &manifest)?);
    let removed = store.names.remove_tag(&reference, Actor::daemon(Verb::Evict));
    // Even if removing failed: after it, nothing else records what this tag needed.
    store.condemn(nodes.iter().map(|node| node.digest()));
    removed.map(|()| Some(Untagged { reference, manifest: victim.manifest, size, nodes }))
}

/// The models that may be evicted. Sessions, the trash and unfinished downloads are only counted as users.
fn candidates(
    store: &Liveness,
    users: &mut Users,
    last_used: &dyn Fn(&Reference, Digest) -> Option<SystemTime>,
) -> Result<Vec<Candidate>, StoreError> {
    let mut candidates = Vec::new();
    walk(store, SystemTime::now(), &mut |owned| {
        let Owned { owner: Owner::Tag(reference), manifest: Some(manifest), .. } = owned.clone() else {
            users.add(owned.nodes(store)?);
            return Ok(());
        };
        let modified = match store.names.modified(&reference) {
            Err(StoreError::NoSuchModel { .. }) => return Ok(()),
            modified => modified?,
        };
        let needs = users.add(owned.nodes(store)?);
        let opened = last_used(&reference, manifest)
            .or_else(|| store.content.index().last_use(manifest).map(|last| last.at));
        let last_used = opened.map_or(modified, |opened| opened.max(modified));
        candidates
            .push(Candidate { victim: Victim { reference, manifest, last_used, freed_bytes: 0 }, needs });
        Ok(())
    })?;
    Ok(candidates)
}

fn reason_to_keep(
    store: &Liveness,
    Candidate { victim, needs }: &Candidate,
    counted: &[Counted],
    leased: &BTreeSet<Digest>,
) -> Option<&'static str> {
    let policy = store.ledger.space_policy().eviction;
    if store.names.is_pinned(&victim.reference) {
        return Some("pinned");
    }
    if leased.contains(&victim.manifest) {
        return Some("open");
    }
    let origins = [
        store.names.name_origin(&victim.reference, victim.manifest).origin,
        store.names.own_origin(victim.manifest),
    ];
    let can_be_pulled = origins.into_iter().flatten().any(|origin| is_pullable(&origin));
    if policy != Eviction::All && !can_be_pulled {
        return Some("cannot be pulled again");
    }
    // A blob that is leased belongs to an open model that shares it, and stays without this one. This process's own
    // verification releases a blob that is to be evicted.
    let nodes = needs.iter().filter_map(|number| counted.get(*number));
    let mut unleased = nodes.filter_map(|(node, _)| node.blob()).filter(|digest| !leased.contains(digest));
    unleased.any(|digest| is_held_by_a_program(store, digest)).then_some("mapped by a running program")
}

/// Origins such as `import FILE` and `edit MODEL` cannot be pulled again.
pub(crate) fn is_pullable(origin: &str) -> bool {
    origin.parse::<PulledSource>().is_ok()
}

/// The least recently used models that together free enough; `None` if all of them do not.
fn choose(
    store: &Liveness,
    evictable: &[Candidate],
    mut counted: Vec<Counted>,
    needed_bytes: u64,
) -> Result<Option<Vec<Victim>>, StoreError> {
    let (mut chosen, mut freed) = (Vec::new(), 0u64);
    for candidate in evictable {
        if freed >= needed_bytes {
            break;
        }
        freed = freed.saturating_add(release(store, candidate, &mut counted)?);
        let mut candidate = candidate.clone();
        candidate.victim.freed_bytes = freed;
        chosen.push(candidate);
    }
    if freed < needed_bytes {
        return Ok(None);
    }
    drop_unneeded_victims(store, &mut chosen, counted, needed_bytes)?;
    Ok(Some(chosen.into_iter().map(|candidate| candidate.victim).collect()))
}

/// Removes the model from the users of its nodes. Returns the bytes that then have none.
fn release(store: &Liveness, candidate: &Candidate, counted: &mut [Counted]) -> Result<u64, StoreError> {
    let mut freed = 0u64;
    for number in &candidate.needs {
        let Some((node, count)) = counted.get_mut(*number) else { continue };
        *count = count.saturating_sub(1);
        if *count == 0 {
            freed = freed.saturating_add(store.content.bytes_on_disk(*node)?.unwrap_or_default());
        }
    }
    Ok(freed)
}

/// Drops victims that the goal does not need, the most recently used first: one may share all its bytes.
fn drop_unneeded_victims(
    store: &Liveness,
    chosen: &mut Vec<Candidate>,
    mut counted: Vec<Counted>,
    needed_bytes: u64,
) -> Result<(), StoreError> {
    let mut freed = chosen.last().map_or(0, |last| last.victim.freed_bytes);
    for index in (0..chosen.len()).rev() {
        let Some(candidate) = chosen.get(index) else { continue };
        let mut own = 0u64;
        for (node, count) in candidate.needs.iter().filter_map(|number| counted.get(*number)) {
            if *count == 0 {
                own = own.saturating_add(store.content.bytes_on_disk(*node)?.unwrap_or_default());
            }
        }
        if freed.saturating_sub(own) < needed_bytes {
            continue;
        }
        freed = freed.saturating_sub(own);
        for number in &candidate.needs {
            if let Some((_, count)) = counted.get_mut(*number) {
                *count = count.saturating_add(1);
            }
        }
        chosen.remove(index);
        for later in chosen.iter_mut().skip(index) {
            later.victim.freed_bytes = later.victim.freed_bytes.saturating_sub(own);
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
