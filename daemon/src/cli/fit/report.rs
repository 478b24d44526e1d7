//! The report of `fit`.

use blobd_store_format::digest::Digest;
use blobd_store_format::estimate::{Device, Estimate, LayerWeights, ModelSet, Placement};
use blobd_store_format::metadata::Metadata;
use serde::Serialize;

use crate::cli::model_source::DescribedModel;

/// The JSON document.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    pub(super) name: &'a str,
    pub(super) digest: Option<Digest>,
    #[serde(flatten)]
    pub(super) memory: Memory<'a>,
    pub(super) required_bytes: u64,
    /// For which the model was trained, in tokens.
    pub(super) context_length: Option<u64>,
    pub(super) notes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) projector: Option<Projector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) draft: Option<Memory<'a>>,
    #[serde(flatten)]
    pub(super) devices: Option<Devices>,
}

/// The memory of one model.
#[derive(Debug, Serialize)]
pub(super) struct Memory<'a> {
    pub(super) basis: String,
    pub(super) graph_basis: String,
    pub(super) context: u64,
    pub(super) batch: u64,
    pub(super) parallel: u64,
    pub(super) cache_type_k: &'static str,
    pub(super) cache_type_v: &'static str,
    pub(super) kv_bytes: Vec<u64>,
    pub(super) kv_total_bytes: u64,
    pub(super) graph_partial_bytes: u64,
    pub(super) graph_full_bytes: u64,
    pub(super) weights: Vec<Layer<'a>>,
    pub(super) weights_bytes: u64,
    pub(super) vision_weights_bytes: u64,
    pub(super) vision_graph_bytes: u64,
    pub(super) missing_keys: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Layer<'a> {
    pub(super) layer: &'a str,
    pub(super) bytes: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Projector {
    pub(super) basis: String,
    pub(super) weights_bytes: u64,
}

/// The answer to `--vram`.
#[derive(Debug, Serialize)]
pub(super) struct Devices {
    /// Of all devices.
    pub(super) vram_bytes: u64,
    pub(super) layers: u64,
    pub(super) layers_of: u64,
    pub(super) total_bytes: u64,
    pub(super) fits: bool,
    /// 0 if even a context of 1 does not fit.
    pub(super) max_context: u64,
    pub(super) devices: Vec<OneDevice>,
}

#[derive(Debug, Serialize)]
pub(super) struct OneDevice {
    pub(super) vram_bytes: u64,
    pub(super) layers: u64,
    pub(super) used_bytes: u64,
}

impl<'a> Report<'a> {
    pub(super) fn new(
        model: &'a DescribedModel,
        metadata: Metadata<'_>,
        mut estimate: Estimate<'a>,
        devices: Option<Devices>,
    ) -> Self {
        let projector = estimate.projector.take();
        let (required_bytes, draft) = (estimate.required_bytes(), estimate.draft.take());
        let context_length = Some(metadata.context_length()).filter(|length| *length > 0);
        Self {
            name: &model.name,
            digest: model.digest,
            required_bytes,
            context_length,
            notes: notes(&estimate, metadata),
            projector: projector.map(|projector| Projector {
                basis: projector.basis,
                weights_bytes: projector.weights_bytes,
            }),
            draft: draft.map(|draft| Memory::new(*draft)),
            memory: Memory::new(estimate),
            devices,
        }
    }

    /// Whether everything fits on the devices, if there are any.
    pub(super) fn fits(&self) -> Option<bool> {
        self.devices.as_ref().map(|devices| devices.fits)
    }
}

impl<'a> Memory<'a> {
    fn new(estimate: Estimate<'a>) -> Self {
        let settings = estimate.settings;
        let layer = |LayerWeights { layer, bytes }: &'a LayerWeights| Layer { layer, bytes: *bytes };
        Self {
            basis: estimate.basis,
            graph_basis: estimate.graph_basis,
            context: settings.context,
            batch: settings.batch,
            parallel: settings.parallel,
            cache_type_k: settings.cache_type_k.name(),
            cache_type_v: settings.cache_type_v.name(),
            kv_bytes: estimate.kv_bytes,
            kv_total_bytes: estimate.kv_total_bytes,
            graph_partial_bytes: estimate.graph_partial_bytes,
            graph_full_bytes: estimate.graph_full_bytes,
            weights: estimate.weights.iter().map(layer).collect(),
            weights_bytes: estimate.weights_bytes,
            vision_weights_bytes: estimate.vision.weights_bytes,
            vision_graph_bytes: estimate.vision.graph_bytes,
            missing_keys: estimate.missing_keys,
        }
    }
}

impl Devices {
    pub(super) fn new(placement: &Placement, largest_context: Option<u64>) -> Self {
        let device = |device: &Device| OneDevice {
            vram_bytes: device.vram_bytes,
            layers: device.layers,
            used_bytes: device.used_bytes,
        };
        let vram = placement.devices.iter().map(|device| device.vram_bytes);
        Self {
            vram_bytes: vram.fold(0, u64::saturating_add),
            layers: placement.layers,
            layers_of: placement.layers_of,
            total_bytes: placement.total_bytes,
            fits: placement.fits(),
            max_context: largest_context.unwrap_or(0),
            devices: placement.devices.iter().map(device).collect(),
        }
    }

    /// Whether any context fits.
    pub(super) fn is_unlimited(&self) -> bool {
        self.max_context == ModelSet::MAX_CONTEXT
    }
}

/// Notes about the limits of the estimate.
fn notes(estimate: &Estimate<'_>, metadata: Metadata<'_>) -> Vec<String> {
    let mut notes = Vec::new();
    let settings = estimate.settings;
    let trained = metadata.context_length();
    if trained > 0 && settings.context > trained {
        notes.push(format!("the model was trained for a context of {trained}"));
    }
    let is_quantized = |cache_type: &str| !matches!(cache_type, "f32" | "f16" | "bf16");
    let cache_types = [settings.cache_type_k.name(), settings.cache_type_v.name()];
    if cache_types.into_iter().any(is_quantized) {
        if !cache_types.into_iter().all(|name| metadata.supports_kv_cache_type(name)) {
            notes.push("Ollama uses f16 for this model's cache".to_owned());
        } else if !metadata.supports_flash_attention() {
            notes.push(
                "a quantised cache needs flash attention, which this model does not support".to_owned(),
            );
        }
    }
    if metadata.requires_ollama_engine() {
        notes.push("Ollama runs this architecture with its own engine only".to_owned());
    }
    if !estimate.has_rule {
        notes.push("only the weights are known, so this is not an answer to whether it fits".to_owned());
    }
    if estimate.unsized_tensors > 0 {
        let count = estimate.unsized_tensors;
        notes.push(format!("{count} tensors have a type of unknown size and count as 0 bytes"));
    }
    notes
}
