//! The report of an estimate.

use blobd_model::estimate::{
    Basis, Device, Estimate, EstimateError, LayerWeights, ModelSet, Part, Placement, Settings,
};

use super::notes::notes;
use super::{FitModel, Room};
use crate::protocol::fit::{
    ContextSource, FitAnswer, FitDevice, FitLayer, FitMemory, FitProjector, FitReport, LayerPlace,
};

/// What an estimate says of a model.
pub(super) fn report(
    model: &FitModel,
    context_source: ContextSource,
    mut estimate: Estimate<'_>,
    answer: Option<FitAnswer>,
) -> FitReport {
    let metadata = model.metadata();
    let tensors_end = model.data_offset().saturating_add(estimate.weights_bytes);
    let file_bytes = model.file_bytes.max(tensors_end);
    let mut notes = notes(&estimate, metadata, answer.as_ref().map(|answer| answer.max_context));
    if model.file_bytes < tensors_end {
        notes.push(format!(
            "the file is incomplete: it has {} bytes, its header describes {tensors_end}",
            model.file_bytes
        ));
    }
    let needed_bytes = estimate.required_memory_bytes();
    let options = options(&estimate, answer.as_ref());
    let projector = estimate.projector.take();
    let (required_bytes, draft) = (estimate.required_bytes(), estimate.draft.take());
    FitReport {
        name: model.name.clone(),
        digest: model.digest,
        file_bytes,
        header_bytes: file_bytes - estimate.weights_bytes.min(file_bytes),
        required_bytes,
        needed_bytes,
        context_length: Some(metadata.context_length()).filter(|length| *length > 0),
        context_source,
        notes,
        projector: projector
            .map(|projector| FitProjector { basis: projector.basis, weights_bytes: projector.weights_bytes }),
        draft: draft.map(|draft| memory(*draft)),
        adapters: std::mem::take(&mut estimate.adapters),
        options,
        memory: memory(estimate),
        answer,
    }
}

fn memory(estimate: Estimate<'_>) -> FitMemory {
    let settings = estimate.settings;
    let layer = |weights: &LayerWeights| FitLayer {
        layer: weights.layer.to_string(),
        bytes: weights.bytes,
        place: place(weights, &settings),
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
    }
}

fn place(weights: &LayerWeights, settings: &Settings) -> LayerPlace {
    match weights.part {
        _ if weights.table_bytes > 0 && weights.table_bytes == weights.bytes => LayerPlace::Disk,
        Part::Input => LayerPlace::Memory,
        _ if settings.experts_in_memory && weights.expert_bytes > 0 => LayerPlace::DeviceAndMemory,
        _ => LayerPlace::Device,
    }
}

/// Whether the model fits into the room.
pub(super) fn answer(
    models: &ModelSet<'_>,
    estimate: &Estimate<'_>,
    basis: Basis,
    room: &Room,
) -> Result<FitAnswer, EstimateError> {
    let fits_in = |bytes: u64| room.memory_bytes.is_none_or(|available| bytes <= available);
    if room.devices.is_empty() {
        let is_met = |estimate: &Estimate<'_>| estimate.has_rule && fits_in(estimate.required_memory_bytes());
        let largest = models.largest_context_where(&estimate.settings, basis, is_met)?;
        let placement = Placement { memory_bytes: estimate.required_memory_bytes(), ..estimate.place(&[]) };
        return Ok(placed(models, &placement, is_met(estimate), largest));
    }
    let is_met = |placement: &Placement| placement.fits() && fits_in(placement.memory_bytes);
    let placement = estimate.place(&room.devices);
    let largest = models.largest_context_where(&estimate.settings, basis, |estimate| {
        is_met(&estimate.place(&room.devices))
    })?;
    Ok(placed(models, &placement, is_met(&placement), largest))
}

fn placed(models: &ModelSet<'_>, placement: &Placement, fits: bool, largest: Option<u64>) -> FitAnswer {
    let device = |device: &Device| FitDevice {
        vram_bytes: device.vram_bytes,
        layers: device.layers,
        used_bytes: device.used_bytes,
    };
    let vram = placement.devices.iter().map(|device| device.vram_bytes);
    let trained = models.model.metadata().context_length();
    let most = if trained > 0 { trained } else { u64::MAX };
    FitAnswer {
        vram_bytes: vram.fold(0, u64::saturating_add),
        layers: placement.layers,
        layers_of: placement.layers_of,
        total_bytes: placement.total_bytes,
        memory_bytes: placement.memory_bytes,
        fits,
        max_context: largest.unwrap_or(0).min(most),
        devices: placement.devices.iter().map(device).collect(),
    }
}

/// The options of llama.cpp's programs that run the model so.
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
    options
}
