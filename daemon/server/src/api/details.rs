//! The details of a large model: serialised part by part, never as a whole in memory.

use std::sync::Arc;

use blobd_client::protocol::response::{ModelDetails, ModelTensor};
use blobd_store_format::recipe::Recipe;

use crate::large_models::ReadPermit;
use crate::ops::Shown;

/// Models with at most this many tensors are sent in one part.
const MAX_TENSORS_WHOLE: usize = 2048;

/// Long enough that few system calls are needed, and short enough for the maximum number of connections.
const PART_BYTES: usize = 32 << 10;

/// Memory of a response while it is written: one part, and its copies in hyper and the kernel.
pub(super) const STREAM_BYTES: usize = 4 * PART_BYTES;

#[derive(Debug)]
pub(crate) struct DetailsStream {
    /// The JSON before the tensors of the recipes, until it is taken.
    head: Option<Vec<u8>>,
    recipes: Vec<(u32, Arc<Recipe>)>,
    /// The index of the next recipe, and of the next tensor in it.
    recipe: usize,
    tensor: usize,
    is_first_tensor: bool,
    is_done: bool,
    /// Counts the recipes until the last part is taken.
    _permit: ReadPermit,
}

const TAIL: &[u8] = b"]}";

impl DetailsStream {
    pub(super) fn new(shown: Shown) -> Self {
        let Shown { details, recipes } = shown;
        Self {
            head: Some(head(&details)),
            recipes,
            recipe: 0,
            tensor: 0,
            is_first_tensor: details.tensors.is_empty(),
            is_done: false,
            _permit: ReadPermit::default(),
        }
    }

    pub(super) fn within(self, permit: ReadPermit) -> Self {
        Self { _permit: permit, ..self }
    }

    /// All parts in one, if the model is small.
    pub(super) fn whole(&mut self) -> Option<Vec<u8>> {
        let tensors: usize = self.recipes.iter().map(|(_, recipe)| recipe.tensors().len()).sum();
        if tensors > MAX_TENSORS_WHOLE {
            return None;
        }
        let mut whole = Vec::new();
        while let Some(part) = self.next_part() {
            whole.extend_from_slice(&part);
        }
        Some(whole)
    }

    pub(super) fn head_bytes(&self) -> usize {
        self.head.as_ref().map_or(0, Vec::len)
    }

    pub(super) fn next_part(&mut self) -> Option<Vec<u8>> {
        if let Some(head) = self.head.take() {
            return Some(head);
        }
        if self.is_done {
            return None;
        }
        let mut part = Vec::with_capacity(PART_BYTES);
        while part.len() < PART_BYTES {
            let Some((layer, recipe)) = self.recipes.get(self.recipe) else {
                part.extend_from_slice(TAIL);
                self.is_done = true;
                break;
            };
            match recipe.format().zip(recipe.tensors().get(self.tensor)) {
                Some((format, tensor)) => {
                    if !std::mem::take(&mut self.is_first_tensor) {
                        part.push(b',');
                    }
                    // Strings, numbers and lists can always be serialised.
                    let _ = serde_json::to_writer(&mut part, &ModelTensor::new(*layer, format, tensor));
                    self.tensor += 1;
                }
                None => (self.recipe, self.tensor) = (self.recipe + 1, 0),
            }
        }
        Some(part)
    }
}

/// The JSON up to the first tensor of the recipes: `tensors` is the last key, and only contains the tensors of other
/// layers here.
fn head(details: &ModelDetails) -> Vec<u8> {
    let mut json = serde_json::to_vec(details).unwrap_or_default();
    if json.ends_with(TAIL) {
        json.truncate(json.len() - TAIL.len());
    }
    json
}

#[cfg(test)]
mod tests {
    use blobd_store_format::digest::Digest;
    use blobd_store_format::testing;

    use blobd_store_format::tensor::TensorFormat;

    use super::*;

    fn recipe(tensors: usize) -> Arc<Recipe> {
        let names = (0..tensors).map(|number| format!("blk.{number}.\"quoted\""));
        Arc::new(testing::recipe(Digest::of(b"file"), names))
    }

    fn shown(counts: &[usize]) -> Shown {
        let details = ModelDetails {
            name: "m".to_owned(),
            digest: Digest::of(b"m"),
            origin: None,
            store: None,
            kind: None,
            architecture: None,
            parameters: 7,
            quantization: None,
            metadata: [("tensors".to_owned(), serde_json::json!([]))].into(),
            layers: Vec::new(),
            tensors: Vec::new(),
            policy: None,
        };
        Shown { details, recipes: (0..).zip(counts.iter().map(|count| recipe(*count))).collect() }
    }

    fn tensors(layer: u32, recipe: &Recipe) -> impl Iterator<Item = ModelTensor> {
        recipe.tensors().iter().map(move |tensor| ModelTensor::new(layer, TensorFormat::Gguf, tensor))
    }

    #[test]
    fn parts_together_are_the_whole_document() {
        let of_layers: Vec<_> = tensors(7, &recipe(2)).collect();
        for (counts, of_layers) in [
            (&[][..], &[][..]),
            (&[0], &[]),
            (&[1], &[]),
            (&[0, 3, 0, 2], &[]),
            (&[5000, 1], &[]),
            (&[], &of_layers),
            (&[0, 3], &of_layers),
        ] {
            let mut shown = shown(counts);
            shown.details.tensors = of_layers.to_vec();
            let mut whole = shown.details.clone();
            whole.tensors.extend(shown.recipes.iter().flat_map(|(layer, recipe)| tensors(*layer, recipe)));
            let mut stream = DetailsStream::new(shown);
            let mut parts = Vec::new();
            while let Some(part) = stream.next_part() {
                assert!(part.len() < PART_BYTES + 1024);
                parts.extend_from_slice(&part);
            }
            assert!(parts == serde_json::to_vec(&whole).unwrap(), "{counts:?}");
        }
    }

    #[test]
    fn small_model_is_sent_in_one_part() {
        let whole = |count| DetailsStream::new(shown(&[count])).whole();
        assert!(whole(MAX_TENSORS_WHOLE).is_some());
        assert!(whole(MAX_TENSORS_WHOLE + 1).is_none());
    }
}
