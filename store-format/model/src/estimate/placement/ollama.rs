//! Placement by Ollama's rules.
//!
//! Source: `estimateGPULayers` in Ollama's `llm/memory.go`, revision d5a0d8d904 of August 2025.

use super::{Device, Placement, clamp};
use crate::estimate::Estimate;

impl Estimate<'_> {
    /// Places the layers on devices. `devices` is the memory of each in bytes.
    ///
    /// Every device that gets layers keeps room for one more: block 0 with its KV cache. It also holds a
    /// graph: the full one if there is one device and everything is on it, otherwise the partial one. A
    /// device without room for the larger graph and two layers gets nothing. Projector and draft model come
    /// first, on the first device with room. Then the blocks are placed from the last to the first, with
    /// several devices in turn (block `i` on device `i` modulo their number), as long as the sum is less than
    /// the device's memory; a device without room for its turn gets no more blocks. When all blocks are
    /// placed, the output layer and the vision tower follow, and then all other weights but those of the input.
    pub(super) fn place_as_ollama(&self, devices: &[u64]) -> Placement {
        let partial = u128::from(self.graph_partial_bytes);
        let full = if devices.len() == 1 { self.graph_full_bytes.into() } else { partial };
        // Which of the two graphs is needed is not known until all layers are placed.
        let mut placer = Placer::new(devices, self.buffer_bytes() + partial.max(full));
        let companions = self.companion_bytes();
        let companions_fit = placer.place_companions(companions, self.buffer_bytes());
        let blocks = placer.place_blocks(self.block_bytes());
        let output = self.output_bytes();
        let layers_of = self.kv_bytes.len() as u64 + u64::from(output > 0);
        let layers = match output {
            1.. if blocks + 1 == layers_of && placer.place_output(blocks, output) => layers_of,
            _ => blocks,
        };
        let others = u128::from(self.other_weights_bytes);
        let others_fit = others == 0 || placer.place_others(others);
        let all = companions + self.block_bytes().sum::<u128>() + output;
        let each = self.buffer_bytes() + if layers == layers_of { full } else { partial };
        let used = placer.candidates.iter().filter(|candidate| candidate.is_used()).count();
        Placement {
            devices: placer.candidates.iter().map(|candidate| candidate.device(each)).collect(),
            layers,
            layers_of,
            companions_fit,
            others_fit,
            has_rule: self.has_rule,
            total_bytes: clamp(all + each * used as u128),
            memory_bytes: self.memory_bytes(placer.candidates.iter().map(|candidate| candidate.placed).sum()),
        }
    }
}

/// A device while layers are placed.
struct Candidate {
    vram: u128,
    placed: u128,
    layers: u64,
}

impl Candidate {
    const fn is_used(&self) -> bool {
        self.placed > 0 || self.layers > 0
    }

    const fn has_room_for(&self, bytes: u128) -> bool {
        self.placed + bytes <= self.vram
    }

    fn device(&self, each: u128) -> Device {
        let used = if self.is_used() { self.placed + each } else { 0 };
        Device { vram_bytes: clamp(self.vram), layers: self.layers, used_bytes: clamp(used) }
    }
}

struct Placer {
    candidates: Vec<Candidate>,
    /// The indices of the candidates that still take turns.
    in_turn: Vec<usize>,
    /// The bytes that every device with layers must keep free: the layer and the graph.
    reserved: u128,
}

impl Placer {
    fn new(devices: &[u64], reserved: u128) -> Self {
        let candidate = |vram: &u64| Candidate { vram: (*vram).into(), placed: 0, layers: 0 };
        Self {
            candidates: devices.iter().map(candidate).collect(),
            in_turn: (0..devices.len()).collect(),
            reserved,
        }
    }

    /// Places projector and draft model on the first device with room for them and a layer, and drops the devices
    /// without room for a layer.
    fn place_companions(&mut self, bytes: u128, layer: u128) -> bool {
        let least = self.reserved + layer;
        let found = self.candidates.iter().position(|candidate| candidate.has_room_for(least + bytes));
        let fits = bytes == 0 || found.is_some_and(|device| self.place_on(device, bytes, 0));
        self.in_turn.retain(|device| {
            self.candidates.get(*device).is_some_and(|candidate| candidate.has_room_for(least))
        });
        fits
    }

    /// Places the blocks from the last to the first until one does not fit; returns how many it placed.
    fn place_blocks(&mut self, blocks: impl DoubleEndedIterator<Item = u128> + ExactSizeIterator) -> u64 {
        let last_first = blocks.enumerate().rev();
        last_first.take_while(|(number, bytes)| self.place_block(*number, *bytes)).count() as u64
    }

    fn place_block(&mut self, number: usize, bytes: u128) -> bool {
        while let Some(turn) = number.checked_rem(self.in_turn.len()) {
            if self.in_turn.get(turn).copied().is_some_and(|device| self.place_on(device, bytes, 1)) {
                return true;
            }
            self.in_turn.remove(turn);
        }
        false
    }

    /// Places the output layer, on the device whose turn it is or on an earlier one.
    fn place_output(&mut self, blocks: u64, bytes: u128) -> bool {
        let turns = (1..=self.in_turn.len()).rev();
        let devices: Vec<usize> = turns
            .filter_map(|count| self.in_turn.get(usize::try_from(blocks).ok()? % count).copied())
            .collect();
        devices.into_iter().any(|device| self.place_on(device, bytes, 1))
    }

    /// Places weights that are not a layer on the first device with room.
    fn place_others(&mut self, bytes: u128) -> bool {
        let devices = self.in_turn.clone();
        devices.into_iter().any(|device| self.place_on(device, bytes, 0))
    }

    fn place_on(&mut self, device: usize, bytes: u128, layers: u64) -> bool {
        let Some(candidate) = self.candidates.get_mut(device) else { return false };
        let fits = candidate.placed + self.reserved + bytes < candidate.vram;
        if fits {
            candidate.placed += bytes;
            candidate.layers += layers;
        }
        fits
    }
}
