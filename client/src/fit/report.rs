//! The report of an estimate, with notes about its limits.

use blobd_model::estimate::{
    Device, Estimate, EstimateError, LayerWeights, Part, Placement, Places, Settings, largest_context,
};
use blobd_model::metadata::Metadata;

use super::{FitModel, Room, Weights};
use crate::protocol::fit::{
    ContextSource, FitAnswer, FitDevice, FitLayer, FitMemory, FitProjector, FitReport, FitsIn, LayerPlace,
};

/// What an estimate of a safetensors model speaks of.
const SAFETENSORS_ENGINES: &str = "for engines that load safetensors, such as transformers and vLLM: weights and KV \
     cache; their buffers for the computation are not counted";
const LATENT_CACHE: &str = "the KV cache is the compressed one of vLLM and SGLang; transformers keeps the keys and values \
     of every head, which need more";

pub(super) fn report(
    model: &FitModel,
    context_source: ContextSource,
    mut estimate: Estimate<'_>,
    answer: Option<FitAnswer>,
    places: Option<&Places>,
) -> FitReport {
    let tensors_end = model.data_offset.saturating_add(estimate.weights_bytes);
    let file_bytes = model.file_bytes.max(tensors_end);
    let mut notes = notes(model, &estimate, answer.as_ref().map(|answer| answer.max_context));
    if model.file_bytes < tensors_end {
        notes.push(format!(
            "the file is incomplete: it has {} bytes, its header describes {tensors_end}",
            model.file_bytes
        ));
    }
    let needed_bytes = estimate.required_memory_bytes();
    let options = match model.weights {
        Weights::Gguf(_) => options(&estimate, answer.as_ref()),
        Weights::Safetensors(_) => Vec::new(),
    };
    let required_bytes = estimate.required_bytes();
    let (projector, draft) = (estimate.projector.take(), estimate.draft.take());
    FitReport {
        name: model.name.clone(),
        digest: model.digest,
        format: model.format().to_owned(),
        file_bytes,
        header_bytes: file_bytes - estimate.weights_bytes.min(file_bytes),
        required_bytes,
        needed_bytes,
        context_length: Some(model.trained_context()).filter(|length| *length > 0),
        context_source,
        notes,
        projector: projector
            .map(|projector| FitProjector { basis: projector.basis, weights_bytes: projector.weights_bytes }),
        draft: draft.map(|draft| memory(*draft, |_| places.map(|places| places.companions))),
        adapters: std::mem::take(&mut estimate.adapters),
        options,
        memory: memory(estimate, |part| match places {
            Some(places) => Some(places.device_of(part)),
            None => (part == Part::Input).then_some(None),
        }),
        answer,
    }
}

/// `device_of` is the index of the device that holds a part of the model. The inner `None` is the machine's memory, the
/// outer one means that it is not known where the part is.
fn memory(estimate: Estimate<'_>, device_of: impl Fn(Part) -> Option<Option<usize>>) -> FitMemory {
    let settings = estimate.settings;
    let layer = |weights: &LayerWeights| {
        let device = device_of(weights.part);
        let place = place(weights, &settings, device);
        let is_on_device = matches!(place, LayerPlace::Device | LayerPlace::DeviceAndMemory);
        FitLayer {
            layer: weights.layer.to_string(),
            block: cached_block(weights),
            bytes: weights.bytes,
            place,
            device: device.flatten().filter(|_| is_on_device).map(|device| device as u64),
        }
    };
    FitMemory {
        basis: estimate.basis,
        graph_basis: estimate.graph_basis,
        has_rule: estimate.has_rule,
        context: settings.context,
        batch: settings.batch,
        parallel: settings.parallel,
        cache_type_k: settings.cache_type_k.to_string(),
        cache_type_v: settings.cache_type_v.to_string(),
        kv_bytes: estimate.kv_bytes,
        kv_total_bytes: estimate.kv_total_bytes,
        graph_partial_bytes: estimate.graph_partial_bytes,
        graph_full_bytes: estimate.graph_full_bytes,
        weights: estimate.weights.iter().map(layer).collect(),
        weights_bytes: estimate.weights_bytes,
        table_bytes: estimate.table_bytes,
        vision_weights_bytes: estimate.vision.weights_bytes,
        vision_graph_bytes: estimate.vision.graph_bytes,
        missing_keys: estimate.missing_keys,
        unsized_tensors: estimate.unsized_tensors,
    }
}

/// The block whose KV cache belongs to a layer. An encoder beside a decoder has none.
fn cached_block(weights: &LayerWeights) -> Option<u64> {
    match weights.part {
        Part::Block(block) if !weights.layer.starts_with("enc.") => Some(block),
        _ => None,
    }
}

fn place(weights: &LayerWeights, settings: &Settings, device: Option<Option<usize>>) -> LayerPlace {
    match device {
        _ if weights.table_bytes > 0 && weights.table_bytes == weights.bytes => LayerPlace::Disk,
        Some(None) => LayerPlace::Memory,
        _ if settings.experts_in_memory && weights.expert_bytes > 0 => LayerPlace::DeviceAndMemory,
        _ => LayerPlace::Device,
    }
}

/// Whether the model fits into the room, and where its parts are. `estimate_with` estimates it with other settings.
pub(super) fn answer<'m>(
    estimate: &Estimate<'_>,
    trained: u64,
    estimate_with: impl Fn(&Settings) -> Result<Estimate<'m>, EstimateError>,
    room: &Room,
) -> Result<(FitAnswer, Places), EstimateError> {
    let placement = estimate.place(&room.devices);
    let largest = largest_context(|context| {
        let estimate = estimate_with(&Settings { context, ..estimate.settings })?;
        Ok(fits_in(&estimate.place(&room.devices), room).is_some())
    })?;
    Ok((placed(trained, &placement, fits_in(&placement, room), largest), placement.places))
}

/// Where a placed model fits; `None` if it does not. Parts that are not on devices may use the machine's memory only if
/// the amount of available memory is known, or if there are no devices.
fn fits_in(placement: &Placement, room: &Room) -> Option<FitsIn> {
    let is_in_memory = room.memory_bytes.is_none_or(|available| placement.memory_bytes <= available);
    let is_on_devices = |device: &Device| device.used_bytes > 0;
    if !placement.has_rule || !is_in_memory {
        None
    } else if !room.devices.is_empty() && placement.fits() {
        Some(FitsIn::Devices)
    } else if placement.devices.iter().any(is_on_devices) {
        room.memory_bytes.map(|_| FitsIn::DevicesAndMemory)
    } else {
        (room.devices.is_empty() || room.memory_bytes.is_some()).then_some(FitsIn::Memory)
    }
}

fn placed(trained: u64, placement: &Placement, fits_in: Option<FitsIn>, largest: Option<u64>) -> FitAnswer {
    let device = |device: &Device| FitDevice {
        vram_bytes: device.vram_bytes,
        layers: device.layers,
        used_bytes: device.used_bytes,
    };
    let vram = placement.devices.iter().map(|device| device.vram_bytes);
    let most = if trained > 0 { trained } else { u64::MAX };
    FitAnswer {
        vram_bytes: vram.fold(0, u64::saturating_add),
        layers: placement.layers,
        layers_of: placement.layers_of,
        total_bytes: placement.total_bytes,
        memory_bytes: placement.memory_bytes,
        fits: fits_in.is_some(),
        fits_in,
        max_context: largest.unwrap_or(0).min(most),
        devices: placement.devices.iter().map(device).collect(),
    }
}

fn options(estimate: &Estimate<'_>, answer: Option<&FitAnswer>) -> Vec<String> {
    if !estimate.has_rule {
        return Vec::new();
    }
    let Settings { context, batch, parallel, cache_type_k, cache_type_v, experts_in_memory } =
        estimate.settings;
    let mut options = vec!["-c".to_owned(), context.saturating_mul(parallel).to_string()];
    let mut add =
        |is_needed: bool, words: &[String]| options.extend(words.iter().filter(|_| is_needed).cloned());
    let named = |name: &str, value: String| [name.to_owned(), value];
    add(parallel > 1, &named("-np", parallel.to_string()));
    add(batch != Settings::default().batch, &named("-ub", batch.to_string()));
    add(cache_type_k != Settings::default().cache_type_k, &named("-ctk", cache_type_k.to_string()));
    add(cache_type_v != Settings::default().cache_type_v, &named("-ctv", cache_type_v.to_string()));
    if let Some(answer) = answer {
        add(true, &named("-ngl", answer.layers.to_string()));
        let split: Vec<String> = answer.devices.iter().map(|device| device.layers.to_string()).collect();
        add(split.len() > 1 && answer.layers > 0, &named("-ts", split.join(",")));
    }
    add(experts_in_memory, &["--cpu-moe".to_owned()]);
    // Their paths are not known here.
    add(estimate.projector.is_some(), &named("--mmproj", "PROJECTOR".to_owned()));
    add(estimate.draft.is_some(), &named("-md", "DRAFT".to_owned()));
    for _ in &estimate.adapters {
        add(true, &named("--lora", "ADAPTER".to_owned()));
    }
    options
}

fn notes(model: &FitModel, estimate: &Estimate<'_>, max_context: Option<u64>) -> Vec<String> {
    let mut notes = Vec::new();
    let trained = model.trained_context();
    if trained > 0 && estimate.settings.context > trained {
        notes.push(format!("the model was trained for a context of {trained}"));
    }
    if trained > 0 && max_context == Some(trained) {
        notes.push("more context than the model was trained for may fit".to_owned());
    }
    match &model.weights {
        Weights::Gguf(files) => notes.extend(cache_note(estimate, files.metadata()).map(str::to_owned)),
        Weights::Safetensors(_) if !estimate.has_rule => {}
        Weights::Safetensors(safetensors) => {
            notes.push(SAFETENSORS_ENGINES.to_owned());
            notes.extend(safetensors.has_latent_cache().then(|| LATENT_CACHE.to_owned()));
        }
    }
    let is_weights_only = |basis: &str| basis.starts_with("weights only");
    if is_weights_only(&estimate.basis) {
        notes.push("only the weights are known, so nobody can say whether it fits".to_owned());
    } else if !estimate.has_rule && estimate.unknown_companions.is_empty() {
        notes.push("the file has no weights of blocks, so it is not a whole model".to_owned());
    }
    for companion in &estimate.unknown_companions {
        notes.push(format!(
            "the memory of the {companion} is not known, so nobody can say whether everything fits"
        ));
    }
    if estimate.unsized_tensors > 0 {
        let count = estimate.unsized_tensors;
        notes.push(format!("tensors of unknown types, which count up to the next tensor: {count}"));
    }
    if estimate.projector.as_ref().is_some_and(|projector| is_weights_only(&projector.basis)) {
        notes.push("the compute buffer of the projector is not counted".to_owned());
    }
    for compared in [Some(estimate), estimate.draft.as_deref()].into_iter().flatten() {
        if !compared.is_compared && !is_weights_only(&compared.basis) {
            notes.push(format!("the numbers of {} were not compared with llama.cpp", compared.basis));
        }
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
