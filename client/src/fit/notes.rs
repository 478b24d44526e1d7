//! Notes about the limits of an estimate.

use blobd_model::estimate::Estimate;
use blobd_model::metadata::Metadata;

pub(super) fn notes(
    estimate: &Estimate<'_>,
    metadata: Metadata<'_>,
    max_context: Option<u64>,
) -> Vec<String> {
    let mut notes = Vec::new();
    let trained = metadata.context_length();
    if trained > 0 && estimate.settings.context > trained {
        notes.push(format!("the model was trained for a context of {trained}"));
    }
    if trained > 0 && max_context == Some(trained) {
        notes.push("more context than the model was trained for may fit".to_owned());
    }
    notes.extend(cache_note(estimate, metadata).map(str::to_owned));
    if !estimate.has_rule {
        let reason = match estimate.basis.starts_with("weights only") {
            true => "only the weights are known, so nobody can say whether it fits",
            false => "the file has no weights of blocks, so it is not a whole model",
        };
        notes.push(reason.to_owned());
    }
    if estimate.unsized_tensors > 0 {
        let count = estimate.unsized_tensors;
        notes.push(format!("{count} tensors have a type of unknown size and count as 0 bytes"));
    }
    notes
}

fn cache_note(estimate: &Estimate<'_>, metadata: Metadata<'_>) -> Option<&'static str> {
    let is_quantized = |cache_type: &str| !matches!(cache_type, "f32" | "f16" | "bf16");
    let cache_types = [estimate.settings.cache_type_k.name(), estimate.settings.cache_type_v.name()];
    if !cache_types.into_iter().any(is_quantized) {
        None
    } else if !cache_types.into_iter().all(|name| metadata.supports_kv_cache_type(name)) {
        Some("Ollama uses f16 for this model's cache")
    } else if !metadata.supports_flash_attention() {
        Some("a quantised cache needs flash attention, which this model does not support")
    } else {
        None
    }
}
