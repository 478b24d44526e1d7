//! Accounts for the bytes of models that lose their tags, because they are removed or evicted or because the tag is
//! given to another model.

use std::collections::{BTreeMap, BTreeSet};
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::held::is_held_by_a_program;
use super::{KeptBytes, Node, Owner, Snapshot, UNKNOWN_HOLDER, holders, needs};
use crate::liveness::Liveness;
use crate::{Displaced, StoreError};

/// A model without its tag, and what it needs.
#[derive(Clone, Debug)]
pub struct Untagged {
    pub reference: Reference,
    pub manifest: Digest,
    /// The sum of its files' sizes; 0 if the manifest is damaged.
    pub size: u64,
    /// What it needs; empty if that cannot be read, so that only a collection of the whole store finds it.
    pub nodes: BTreeSet<Node>,
}

/// A model that has lost its tag, and where its bytes on disk are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LostModel {
    pub reference: Reference,
    pub manifest: Digest,
    pub size: u64,
    /// Bytes on disk that were freed. Of several models, the last one that needs a blob counts it.
    pub freed_bytes: u64,
    /// Bytes on disk that nothing needs any more and that a collection frees. Counted in the same way.
    pub reclaimable_bytes: u64,
    /// Bytes on disk that stay, and what needs them.
    pub kept: Vec<KeptBytes>,
}

impl Displaced {
    pub fn untagged(self, store: &Liveness) -> Untagged {
        Untagged::new(store, self.reference, self.raw_manifest)
    }
}

impl Untagged {
    pub fn new(store: &Liveness, reference: Reference, raw_manifest: Vec<u8>) -> Self {
        let digest = Digest::of(&raw_manifest);
        let manifest = Manifest::parse(raw_manifest).ok();
        let size = manifest.as_ref().map_or(0, Manifest::size);
        let nodes = manifest.and_then(|manifest| needs(store, &manifest).ok()).unwrap_or_default();
        Self { reference, manifest: digest, size, nodes }
    }

    fn lost(&self) -> LostModel {
        let Self { reference, manifest, size, nodes: _ } = self.clone();
        LostModel { reference, manifest, size, freed_bytes: 0, reclaimable_bytes: 0, kept: Vec::new() }
    }
}

/// Where the bytes of models are that have lost their tags.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct LossReport {
    pub models: Vec<LostModel>,
    /// What stays on disk of all of them together, by holder; bytes that nothing needs have none.
    pub kept: Vec<KeptBytes>,
}

impl LossReport {
    /// `deletions` is what was deleted after the models had lost their tags. Never fails: if the store cannot tell what
    /// needs the rest, the reason is given as its holder.
    pub fn new(store: &Liveness, models: &[Untagged], deletions: &[(Node, u64)]) -> Self {
        Self::in_snapshot(store, models, deletions, None)
    }

    /// Like [`Self::new`], with a snapshot that was taken after the models had lost their tags, if there is one.
    pub(super) fn in_snapshot(
        store: &Liveness,
        models: &[Untagged],
        deletions: &[(Node, u64)],
        snapshot: Option<Snapshot>,
    ) -> Self {
        let deleted: BTreeMap<Node, u64> = deletions.iter().copied().collect();
        let nodes = models.iter().flat_map(|model| &model.nodes).copied();
        let rest = nodes.filter(|node| !deleted.contains_key(node)).collect();
        // In a dry run they still have their tags. The tag of a displaced model has another manifest.
        let without = models.iter().map(|model| (&model.reference, model.manifest)).collect();
        match Keepers::find(store, &rest, &without, snapshot) {
            Ok(keepers) => Self::with_keepers(store, models, &deleted, &keepers.or_programs(store, &rest)),
            Err(error) => Self::unknown(store, models, &error),
        }
    }

    /// Of models whose bytes all stay, since collections are refused.
    pub fn unknown(store: &Liveness, models: &[Untagged], refusal: &StoreError) -> Self {
        let kept = |nodes: &BTreeSet<Node>| {
            let kept = KeptBytes { bytes: size(store, nodes), by: vec![refusal.to_string()] };
            Vec::from_iter((kept.bytes > 0).then_some(kept))
        };
        let nodes = models.iter().flat_map(|model| &model.nodes).copied().collect();
        let models = models.iter().map(|model| LostModel { kept: kept(&model.nodes), ..model.lost() });
        Self { models: models.collect(), kept: kept(&nodes) }
    }

    fn with_keepers(
        store: &Liveness,
        models: &[Untagged],
        deleted: &BTreeMap<Node, u64>,
        keepers: &Keepers,
    ) -> Self {
        let (mut counted, mut rest) = (BTreeSet::new(), BTreeSet::new());
        let mut lost = Vec::new();
        for model in models.iter().rev() {
            let new: BTreeSet<Node> = model.nodes.difference(&counted).copied().collect();
            let freed = new.iter().filter_map(|node| deleted.get(node)).copied();
            let stay: BTreeSet<Node> =
                model.nodes.iter().filter(|node| !deleted.contains_key(node)).copied().collect();
            let unneeded = new.intersection(&stay).filter(|node| !keepers.0.contains_key(node));
            lost.push(LostModel {
                freed_bytes: freed.fold(0, u64::saturating_add),
                reclaimable_bytes: size(store, unneeded),
                kept: keepers.kept(store, &stay),
                ..model.lost()
            });
            counted.extend(new);
            rest.extend(stay);
        }
        lost.reverse();
        let mut kept = keepers.kept(store, &rest);
        let bytes = size(store, rest.iter().filter(|node| !keepers.0.contains_key(node)));
        kept.extend((bytes > 0).then(|| KeptBytes { bytes, by: Vec::new() }));
        Self { models: lost, kept }
    }
}

/// What needs blobs and recipes, by name. Those that nothing needs are not listed.
struct Keepers(BTreeMap<Node, BTreeSet<String>>);

impl Keepers {
    /// Finds what needs any of `nodes`, except the models in `without`.
    fn find(
        store: &Liveness,
        nodes: &BTreeSet<Node>,
        without: &BTreeSet<(&Reference, Digest)>,
        snapshot: Option<Snapshot>,
    ) -> Result<Self, StoreError> {
        let mut keepers: BTreeMap<Node, BTreeSet<String>> = BTreeMap::new();
        if nodes.is_empty() {
            return Ok(Self(keepers));
        }
        // At the epoch no trash record has expired, so all of them count as holders.
        let snapshot = snapshot.map_or_else(|| Snapshot::take(store, SystemTime::UNIX_EPOCH), Ok)?;
        for owned in snapshot.owned() {
            if let (Owner::Tag(tag), Some(manifest)) = (&owned.owner, owned.manifest)
                && without.contains(&(tag, manifest))
            {
                continue;
            }
            let Some(name) = owned.owner.name() else { continue };
            for node in owned.nodes(store)?.intersection(nodes) {
                keepers.entry(*node).or_default().insert(name.clone());
            }
        }
        for node in nodes {
            let sessions = store.leases().holders(node.digest());
            if !sessions.is_empty() {
                keepers.entry(*node).or_default().extend(sessions);
            }
        }
        Ok(Self(keepers))
    }

    /// Adds the programs that have blobs open or mapped which nothing else needs.
    fn or_programs(mut self, store: &Liveness, nodes: &BTreeSet<Node>) -> Self {
        let unneeded = nodes.iter().filter(|node| !self.0.contains_key(node));
        let held: BTreeSet<Digest> = unneeded
            .filter_map(|node| node.blob())
            .filter(|digest| is_held_by_a_program(store, *digest))
            .collect();
        let programs = holders(store, &held);
        for digest in &held {
            let unknown = || BTreeSet::from([UNKNOWN_HOLDER.to_owned()]);
            let by = programs.get(digest).cloned().unwrap_or_else(unknown);
            self.0.entry(Node::Blob(*digest)).or_insert(by);
        }
        self
    }

    /// Groups the bytes on disk of those of `nodes` that something needs by what needs them.
    fn kept(&self, store: &Liveness, nodes: &BTreeSet<Node>) -> Vec<KeptBytes> {
        let mut groups: BTreeMap<&BTreeSet<String>, BTreeSet<Node>> = BTreeMap::new();
        for node in nodes {
            if let Some(by) = self.0.get(node) {
                groups.entry(by).or_default().insert(*node);
            }
        }
        let kept = |(by, nodes): (&BTreeSet<String>, BTreeSet<Node>)| KeptBytes {
            bytes: size(store, &nodes),
            by: by.iter().cloned().collect(),
        };
        groups.into_iter().map(kept).filter(|kept| kept.bytes > 0).collect()
    }
}

/// The size on disk. What cannot be read counts as 0: a report must not fail after the work is done.
fn size<'n>(store: &Liveness, nodes: impl IntoIterator<Item = &'n Node>) -> u64 {
    let sizes =
        nodes.into_iter().map(|node| store.content.bytes_on_disk(*node).ok().flatten().unwrap_or_default());
    sizes.fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests;
