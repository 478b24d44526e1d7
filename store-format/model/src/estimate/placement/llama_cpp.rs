//! Placement by llama.cpp's rules.
//!
//! Source: `llama_model_base::load_tensors` of llama.cpp b11434: `--n-gpu-layers` counts from the last layer, which is the
//! output, and `--tensor-split` gives each device layers that follow each other, the first ones to the first device.

use super::{Device, Placement, clamp};
use crate::estimate::Estimate;

impl Estimate<'_> {
    /// Uses the fewest devices, counted from the first, that hold everything; all devices if none suffice.
    pub(super) fn place_as_llama_cpp(&self, devices: &[u64]) -> Placement {
        let on_first = |count: usize| self.fill(devices, count);
        let fitting = (1..devices.len()).map(on_first).find(Placement::fits);
        fitting.unwrap_or_else(|| on_first(devices.len()))
    }

    /// Fills the first `count` devices in reverse order with the layers in reverse order, as far as the memory reaches.
    /// Each device with layers holds a graph. Projector, draft model and adapters go on the first device with room for
    /// them, before any layer.
    fn fill(&self, devices: &[u64], count: usize) -> Placement {
        let graph = u128::from(self.graph_full_bytes.max(self.graph_partial_bytes));
        let mut filled: Vec<Filled> = devices.iter().map(|vram| Filled::new(*vram, graph)).collect();
        let (used, _unused) = filled.split_at_mut(count.min(devices.len()));
        let companions = self.companion_bytes();
        let companions_fit = companions == 0 || used.iter_mut().any(|device| device.hold(companions));
        let (output, others) = (self.output_bytes(), u128::from(self.other_weights_bytes));
        let with_output = (output > 0).then_some(output);
        let last_first = with_output.into_iter().chain(self.block_bytes().rev());
        let mut from_last = used.iter_mut().rev().peekable();
        let mut layers = 0;
        for bytes in last_first {
            while from_last.peek_mut().is_some_and(|device| !device.add_layer(bytes)) {
                from_last.next();
            }
            if from_last.peek().is_none() {
                break;
            }
            layers += 1;
        }
        let others_fit = others == 0 || used.iter_mut().any(|device| device.hold(others));
        let graphs = filled.iter().filter(|device| device.layers > 0).count().max(1);
        let all = companions + self.block_bytes().sum::<u128>() + output + others;
        Placement {
            layers,
            layers_of: self.kv_bytes.len() as u64 + u64::from(output > 0),
            companions_fit,
            others_fit,
            has_rule: self.has_rule,
            total_bytes: clamp(all + graph * graphs as u128),
            memory_bytes: self.memory_bytes(filled.iter().map(|device| device.placed).sum()),
            devices: filled.iter().map(Filled::device).collect(),
        }
    }
}

/// A device while layers are placed.
struct Filled {
    vram: u128,
    graph: u128,
    placed: u128,
    layers: u64,
}

impl Filled {
    fn new(vram: u64, graph: u128) -> Self {
        Self { vram: vram.into(), graph, placed: 0, layers: 0 }
    }

    /// Places something other than a layer, if there is room for it and for the graph.
    fn hold(&mut self, bytes: u128) -> bool {
        let fits = self.placed + bytes + self.graph <= self.vram;
        self.placed += if fits { bytes } else { 0 };
        fits
    }

    fn add_layer(&mut self, bytes: u128) -> bool {
        let fits = self.hold(bytes);
        self.layers += u64::from(fits);
        fits
    }

    fn device(&self) -> Device {
        let used = self.placed + if self.layers > 0 { self.graph } else { 0 };
        Device { vram_bytes: clamp(self.vram), layers: self.layers, used_bytes: clamp(used) }
    }
}
