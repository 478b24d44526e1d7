//! The layers of the network, for `show --layers`.

use std::collections::BTreeMap;

use blobd_model::layers::{block_number, split_name};
use serde::Serialize;

use super::tensors::ShownTensor;

/// The tensors of one layer.
#[derive(Debug, PartialEq, Eq, Serialize)]
pub(super) struct NetworkLayer {
    pub(super) layer: String,
    pub(super) tensors: u64,
    pub(super) bytes: u64,
}

/// Groups the tensors by layer: the blocks by number, then the others in the order of the file.
pub(super) fn of(tensors: &[ShownTensor]) -> Vec<NetworkLayer> {
    let mut layers: Vec<NetworkLayer> = Vec::new();
    let mut places: BTreeMap<&str, usize> = BTreeMap::new();
    let mut blocks = Vec::new();
    for tensor in tensors {
        let (name, _) = split_name(tensor.name());
        let place = *places.entry(name).or_insert_with(|| {
            layers.push(NetworkLayer { layer: name.to_owned(), tensors: 0, bytes: 0 });
            blocks.push(block_number(tensor.name()));
            layers.len() - 1
        });
        if let Some(layer) = layers.get_mut(place) {
            layer.tensors += 1;
            layer.bytes = layer.bytes.saturating_add(tensor.size());
        }
    }
    let mut ordered: Vec<_> = blocks.into_iter().zip(layers).collect();
    // The sort is stable, so layers outside the blocks keep their order.
    ordered.sort_by_key(|(block, _)| (block.is_none(), *block));
    ordered.into_iter().map(|(_, layer)| layer).collect()
}
