//! The report of `fit`.

use blobd_store_format::digest::Digest;
use blobd_store_format::estimate::{
    Basis, Device, Estimate, EstimateError, LayerWeights, ModelSet, Part, Placement, Settings,
};
use blobd_store_format::metadata::Metadata;
use serde::Serialize;

use super::machine::Machine;
use super::notes::notes;

/// The JSON document.
#[derive(Debug, Serialize)]
pub(super) struct Report<'a> {
    pub(super) name: &'a str,
    pub(super) digest: Option<Digest>,
    #[serde(flatten)]
    pub(super) memory: Memory<'a>,
    /// The size of the files that hold the weights.
    pub(super) file_bytes: u64,
    /// The part of these files that is not tensor data.
    pub(super) header_bytes: u64,
    /// On one device.
    pub(super) required_bytes: u64,
    /// In all, on devices and in the machine's memory.
    pub(super) needed_bytes: u64,
    /// For which the model was trained, in tokens.
    pub(super) context_length: Option<u64>,
    pub(super) context_source: ContextSource,
    pub(super) notes: Vec<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) projector: Option<Projector>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) draft: Option<Memory<'a>>,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub(super) adapters: Vec<u64>,
    #[serde(flatten)]
    pub(super) answer: Answer,
    /// On which the answer is based if no devices were named.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(super) machine: Option<Machine>,
    /// For llama.cpp's programs.
    pub(super) options: Vec<String>,
}

/// Why an estimate has its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum ContextSource {
    /// `--ctx`.
    Option,
    /// `--ctx 0`.
    Trained,
    /// The model's `num_ctx`.
    Model,
    /// None of these.
    Default,
}

/// The memory of one model.
#[derive(Debug, Serialize)]
pub(super) struct Memory<'a> {
    pub(super) basis: String,
    pub(super) graph_basis: String,
    pub(super) has_rule: bool,
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
    /// The size of tables that engines read from the disk row by row.
    pub(super) table_bytes: u64,
    pub(super) vision_weights_bytes: u64,
    pub(super) vision_graph_bytes: u64,
    pub(super) missing_keys: Vec<String>,
}

#[derive(Debug, Serialize)]
pub(super) struct Layer<'a> {
    pub(super) layer: &'a str,
    pub(super) bytes: u64,
    pub(super) place: LayerPlace,
}

/// Where the weights of a layer belong.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum LayerPlace {
    Device,
    /// The machine's memory.
    Memory,
    /// On a device, except the experts, which are in the machine's memory.
    DeviceAndMemory,
    /// Read row by row.
    Disk,
}

#[derive(Debug, Serialize)]
pub(super) struct Projector {
    pub(super) basis: String,
    pub(super) weights_bytes: u64,
}

/// Whether it fits.
#[derive(Debug, Serialize)]
pub(super) struct Answer {
    /// Of all devices.
    pub(super) vram_bytes: u64,
    pub(super) layers: u64,
    pub(super) layers_of: u64,
    pub(super) total_bytes: u64,
    /// What is in the machine's memory.
    pub(super) memory_bytes: u64,
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

/// What a report is about.
#[derive(Clone, Copy, Debug)]
pub(super) struct Subject<'a> {
    pub(super) name: &'a str,
    pub(super) digest: Option<Digest>,
    pub(super) metadata: Metadata<'a>,
    /// The size of the files that hold the weights.
    pub(super) file_bytes: u64,
    /// The part of these files before the tensor data.
    pub(super) data_offset: u64,
}

impl<'a> Report<'a> {
    pub(super) fn new(
        subject: Subject<'a>,
        context_source: ContextSource,
        mut estimate: Estimate<'a>,
        answer: Answer,
        machine: Option<Machine>,
    ) -> Self {
        let tensors_end = subject.data_offset.saturating_add(estimate.weights_bytes);
        let file_bytes = subject.file_bytes.max(tensors_end);
        let mut notes = notes(&estimate, subject.metadata, answer.max_context);
        if subject.file_bytes < tensors_end {
            notes.push(format!(
                "the file is incomplete: it has {} bytes, its header describes {tensors_end}",
                subject.file_bytes
            ));
        }
        let needed_bytes = estimate.required_memory_bytes();
        let options = options(&estimate, &answer);
        let projector = estimate.projector.take();
        let (required_bytes, draft) = (estimate.required_bytes(), estimate.draft.take());
        let context_length = Some(subject.metadata.context_length()).filter(|length| *length > 0);
        Self {
            name: subject.name,
            digest: subject.digest,
            file_bytes,
            header_bytes: file_bytes - estimate.weights_bytes.min(file_bytes),
            required_bytes,
            needed_bytes,
            context_length,
            context_source,
            notes,
            projector: projector.map(|projector| Projector {
                basis: projector.basis,
                weights_bytes: projector.weights_bytes,
            }),
            draft: draft.map(|draft| Memory::new(*draft)),
            adapters: std::mem::take(&mut estimate.adapters),
            options,
            memory: Memory::new(estimate),
            answer,
            machine,
        }
    }
}

impl<'a> Memory<'a> {
    fn new(estimate: Estimate<'a>) -> Self {
        let settings = estimate.settings;
        let layer = |weights: &'a LayerWeights| Layer {
            layer: &weights.layer,
            bytes: weights.bytes,
            place: LayerPlace::of(weights, &settings),
        };
        Self {
            basis: estimate.basis,
            graph_basis: estimate.graph_basis,
            has_rule: estimate.has_rule,
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
            table_bytes: estimate.table_bytes,
            vision_weights_bytes: estimate.vision.weights_bytes,
            vision_graph_bytes: estimate.vision.graph_bytes,
            missing_keys: estimate.missing_keys,
        }
    }
}

impl LayerPlace {
    fn of(weights: &LayerWeights, settings: &Settings) -> Self {
        match weights.part {
            _ if weights.table_bytes > 0 && weights.table_bytes == weights.bytes => Self::Disk,
            Part::Input => Self::Memory,
            _ if settings.experts_in_memory && weights.expert_bytes > 0 => Self::DeviceAndMemory,
            _ => Self::Device,
        }
    }
}

impl Answer {
    /// For devices with so many bytes. Of this machine, the rest must fit into its memory.
    pub(super) fn on_devices(
        models: &ModelSet<'_>,
        estimate: &Estimate<'_>,
        basis: Basis,
        devices: &[u64],
        available: Option<u64>,
    ) -> Result<Self, EstimateError> {
        let is_met = |placement: &Placement| {
            placement.fits() && available.is_none_or(|available| placement.memory_bytes <= available)
        };
        let placement = estimate.place(devices);
        let largest = models
            .largest_context_where(&estimate.settings, basis, |estimate| is_met(&estimate.place(devices)))?;
        Ok(Self::new(models, &placement, is_met(&placement), largest))
    }

    /// For this machine without a GPU.
    pub(super) fn in_memory(
        models: &ModelSet<'_>,
        estimate: &Estimate<'_>,
        basis: Basis,
        available: Option<u64>,
    ) -> Result<Self, EstimateError> {
        let is_met = |estimate: &Estimate<'_>| {
            estimate.has_rule
                && available.is_none_or(|available| estimate.required_memory_bytes() <= available)
        };
        let largest = models.largest_context_where(&estimate.settings, basis, is_met)?;
        let placement = Placement { memory_bytes: estimate.required_memory_bytes(), ..estimate.place(&[]) };
        Ok(Self::new(models, &placement, is_met(estimate), largest))
    }

    fn new(models: &ModelSet<'_>, placement: &Placement, fits: bool, largest: Option<u64>) -> Self {
        let device = |device: &Device| OneDevice {
            vram_bytes: device.vram_bytes,
            layers: device.layers,
            used_bytes: device.used_bytes,
        };
        let vram = placement.devices.iter().map(|device| device.vram_bytes);
        let trained = models.model.metadata().context_length();
        let most = if trained > 0 { trained } else { u64::MAX };
        Self {
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

    /// Whether any context fits.
    pub(super) fn is_unlimited(&self) -> bool {
        self.max_context == ModelSet::MAX_CONTEXT
    }
}

/// The options of llama.cpp's programs that give this placement.
fn options(estimate: &Estimate<'_>, answer: &Answer) -> Vec<String> {
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
    add(true, &named("-ngl", answer.layers.to_string()));
    let split: Vec<String> = answer.devices.iter().map(|device| device.layers.to_string()).collect();
    add(split.len() > 1 && answer.layers > 0, &named("-ts", split.join(",")));
    add(experts_in_memory, &["--cpu-moe".to_owned()]);
    options
}
