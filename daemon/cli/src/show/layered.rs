//! Models with one layer per tensor, which have no GGUF header: what follows from the daemon's description.

use std::collections::BTreeMap;

use serde_json::Value as Json;

use super::document::{Document, TypeRow};

impl Document {
    /// Adds the numbers and the quantisation mix, unless a header has told them.
    pub(super) fn add_facts_of_layers(&mut self) {
        if !self.files.is_empty() || self.tensors.is_empty() {
            return;
        }
        let architecture = self.architecture.clone().unwrap_or_default();
        let metadata = &self.metadata;
        let number = |key| metadata.get(&format!("{architecture}.{key}")).and_then(Json::as_u64);
        self.context_length = number("context_length");
        self.embedding_length = number("embedding_length");
        self.block_count = number("block_count");
        self.head_count = number("attention.head_count");
        self.head_count_kv = number("attention.head_count_kv");
        self.expert_count = number("expert_count");
        self.expert_used_count = number("expert_used_count");
        self.vocabulary_size = number("vocab_size");
        self.types = self.types_of_tensors();
        self.bits_per_weight = self.bits_of_layers();
    }

    fn types_of_tensors(&self) -> Vec<TypeRow> {
        let mut types: BTreeMap<&str, (u64, u64, u64)> = BTreeMap::new();
        for tensor in &self.tensors {
            let (tensors, elements, bytes) = types.entry(tensor.type_name()).or_default();
            let count = tensor.shape().iter().fold(1_u64, |count, length| count.saturating_mul(*length));
            (*tensors, *elements) = (tensors.saturating_add(1), elements.saturating_add(count));
            *bytes = bytes.saturating_add(tensor.size());
        }
        let row = |(name, (tensors, elements, bytes)): (&str, _)| TypeRow {
            type_name: name.to_owned(),
            tensors,
            elements,
            bytes,
        };
        let mut rows: Vec<_> = types.into_iter().map(row).collect();
        rows.sort_by_key(|row| std::cmp::Reverse(row.bytes));
        rows
    }

    /// The bits of the layers per parameter: with scales and biases, and with their headers.
    #[expect(clippy::cast_precision_loss, reason = "shown with two decimals")]
    fn bits_of_layers(&self) -> Option<f64> {
        let layers = self.layers.iter().filter(|layer| layer.media_type.component() == "tensor");
        let bytes = layers.fold(0_u64, |sum, layer| sum.saturating_add(layer.size));
        (self.parameters > 0).then(|| bytes as f64 * 8.0 / self.parameters as f64)
    }
}
