//! `df`: where the bytes go.

use std::collections::{BTreeMap, BTreeSet};

use blobd_client::protocol::response::{DiskUsage, ModelUsage};
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;

use super::OpError;
use crate::gc::{self, Node};
use crate::store::{Store, StoreError, disk};

/// Measures the store. Sizes on disk are what the file system has allocated.
///
/// # Errors
/// [`StoreError`]: a damaged manifest or recipe among them, since what it needs is unknown.
pub fn usage(
    store: &Store,
    last_opened: impl Fn(&Reference) -> Option<String>,
) -> Result<DiskUsage, OpError> {
    let models = models(store)?;
    let sizes = sizes_on_disk(store)?;
    let mut users: BTreeMap<Node, u64> = BTreeMap::new();
    for node in models.iter().flat_map(|model| &model.needs) {
        *users.entry(*node).or_default() += 1;
    }
    let needed = sum(&sizes, users.keys());
    let logical_bytes = models.iter().fold(0, |sum: u64, model| sum.saturating_add(model.logical_bytes));
    let rows = models.iter().map(|model| model.usage(&sizes, &users, &last_opened)).collect();
    Ok(DiskUsage {
        logical_bytes,
        physical_bytes: sizes.values().fold(0, |sum, bytes| sum.saturating_add(*bytes)),
        saved_bytes: logical_bytes.saturating_sub(needed),
        reclaimable_bytes: gc::plan(store)?.freed_bytes(),
        partial_bytes: disk::tree_bytes(&store.path(layout::STAGING))
            .saturating_add(disk::tree_bytes(&store.path(layout::PARTIAL))),
        trash_bytes: 0,
        quarantine_bytes: disk::tree_bytes(&store.path(layout::QUARANTINE)),
        held_bytes: 0,
        quota_bytes: None,
        free_bytes: disk::free_bytes(store.root())?,
        blob_count: sizes.keys().filter(|node| matches!(node, Node::Blob(_))).count() as u64,
        models: rows,
    })
}

struct MeasuredModel {
    reference: Reference,
    logical_bytes: u64,
    needs: BTreeSet<Node>,
}

impl MeasuredModel {
    fn usage(
        &self,
        sizes: &BTreeMap<Node, u64>,
        users: &BTreeMap<Node, u64>,
        last_opened: &impl Fn(&Reference) -> Option<String>,
    ) -> ModelUsage {
        let (unique, shared): (Vec<_>, Vec<_>) =
            self.needs.iter().partition(|node| users.get(node).is_some_and(|count| *count == 1));
        ModelUsage {
            name: self.reference.short(),
            logical_bytes: self.logical_bytes,
            unique_bytes: sum(sizes, unique),
            shared_bytes: sum(sizes, shared),
            last_opened: last_opened(&self.reference),
        }
    }
}

fn models(store: &Store) -> Result<Vec<MeasuredModel>, StoreError> {
    let mut models = Vec::new();
    for reference in store.tags()?.references {
        let manifest = match store.manifest(&reference) {
            Err(StoreError::NoSuchModel { .. }) => continue,
            manifest => manifest?,
        };
        let needs = gc::needs(store, &manifest)?;
        models.push(MeasuredModel { reference, logical_bytes: manifest.size(), needs });
    }
    models.sort_by_key(|model| model.reference.short());
    Ok(models)
}

fn sizes_on_disk(store: &Store) -> Result<BTreeMap<Node, u64>, StoreError> {
    let blobs = store.blobs()?.into_iter().map(Node::Blob);
    let recipes = store.recipes()?.into_iter().map(Node::Recipe);
    let mut sizes = BTreeMap::new();
    for node in blobs.chain(recipes) {
        sizes.insert(node, node.bytes_on_disk(store)?.unwrap_or_default());
    }
    Ok(sizes)
}

fn sum<'n>(sizes: &BTreeMap<Node, u64>, nodes: impl IntoIterator<Item = &'n Node>) -> u64 {
    nodes.into_iter().filter_map(|node| sizes.get(node)).fold(0, |sum, bytes| sum.saturating_add(*bytes))
}
