//! The memory of a vision tower inside the model's file.
//!
//! Source: `VisionGraphSize` in Ollama's `fs/ggml/ggml.go`, revision d5a0d8d904 of August 2025.

use std::collections::BTreeMap;

use super::keys::Keys;
use super::number::Number;
use super::{EstimateError, Vision};
use crate::layers::Layer;

/// The default maximum number of pixels of qwen25vl.
const QWEN25VL_MAX_PIXELS: u64 = 28 * 28 * 1280;

/// The vision tower's weights and graph in bytes; both 0 if the model has none.
///
/// # Errors
/// [`EstimateError::Overflow`].
pub(super) fn vision(
    keys: &mut Keys<'_>,
    layers: &BTreeMap<&str, Layer<'_>>,
) -> Result<Vision, EstimateError> {
    if keys.optional("vision.block_count").unwrap_or(0) == 0 {
        return Ok(Vision::default());
    }
    let is_vision = |name: &&str| *name == "v" || name.starts_with("v.");
    let weights = layers.iter().filter(|(name, _)| is_vision(name)).map(|(_, layer)| layer.size_bytes());
    let weights: Number = weights.map(Number::from).sum();
    let has_class = layers.get("v").is_some_and(|layer| layer.tensor("class_embd").is_some());
    Ok(Vision {
        weights_bytes: weights.bytes("vision weights")?,
        graph_bytes: graph(keys, has_class).bytes("vision graph")?,
    })
}

fn graph(keys: &mut Keys<'_>, has_class: bool) -> Number {
    let architecture = keys.metadata().architecture();
    if !matches!(architecture, "mllama" | "gemma3" | "mistral3" | "qwen25vl") {
        return 0.into();
    }
    let patch = keys.number("vision.patch_size", 0);
    if patch == 0 {
        keys.add_missing("vision.patch_size");
        return 0.into();
    }
    let channels = Number::from(keys.number("vision.num_channels", 0));
    let embedding = Number::from(keys.number("vision.embedding_length", 0));
    let heads = Number::from(keys.number("vision.attention.head_count", 0));
    if architecture == "qwen25vl" {
        let pixels = Number::from(keys.optional("vision.max_pixels").unwrap_or(QWEN25VL_MAX_PIXELS));
        let patch = Number::from(patch);
        let n = pixels / (patch * patch);
        let pixel_values = pixels * channels + pixels * channels + n * channels * patch * patch;
        return 4 * (pixel_values + n * n * heads + embedding * n);
    }
    let image = keys.number("vision.image_size", 0);
    // The quotient of two `u32` numbers, squared, fits 64 bits.
    let patches = (image / patch).saturating_mul(image / patch).saturating_add(u64::from(has_class));
    let (image, n) = (Number::from(image), Number::from(patches));
    if architecture == "mllama" {
        let tiles = Number::from(keys.number("vision.max_num_tiles", 0));
        let padded = n + (8 - patches % 8);
        let embeddings = embedding * n * tiles + 9 * embedding * padded * tiles;
        return 4
            * (8 + image * image * channels * tiles + embeddings + padded * tiles * padded * tiles * heads);
    }
    4 * (image * image * channels + embedding * patch + n * n * heads)
}
