//! Distributes layers over devices.

use super::{Basis, Estimate, Part};

/// How a model is distributed over devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The devices in the order in which they were given.
    pub devices: Vec<Device>,
    /// The number of layers on devices: blocks, and one layer for the output with the vision tower.
    pub layers: u64,
    /// The number of layers that the model has.
    pub layers_of: u64,
    /// Where each part is.
    pub places: Places,
    /// Whether projector, draft model and adapters are on a device; true if the model has none of them.
    pub companions_fit: bool,
    /// Whether the other weights are on a device, see [`Estimate::other_weights_bytes`].
    pub others_fit: bool,
    /// Whether the architecture has a rule, see [`Estimate::has_rule`].
    pub has_rule: bool,
    /// The bytes of the whole model, on devices and in the machine's memory: the layers with their KV cache, projector,
    /// draft model and adapters, and for each device with layers the graph and, by Ollama's rules, the layer kept free.
    /// At most 2^64 - 1.
    pub total_bytes: u64,
    /// The bytes in the machine's memory: the input, layers that are not on a device with their KV cache, experts
    /// if the settings keep them there, and the graph if no layer is on a device.
    pub memory_bytes: u64,
}

/// The index of the device that holds each part of a model. A part without one is in the machine's memory.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Places {
    /// Each block with its KV cache.
    pub blocks: Vec<Option<usize>>,
    /// The output and the vision tower.
    pub output: Option<usize>,
    /// The other weights, see [`Estimate::other_weights_bytes`].
    pub others: Option<usize>,
    /// Projector, draft model and adapters.
    pub companions: Option<usize>,
}

impl Places {
    /// The places of a model with this number of blocks before any part is on a device.
    fn in_memory(blocks: usize) -> Self {
        Self { blocks: vec![None; blocks], ..Self::default() }
    }

    /// The device that holds a layer of this role.
    #[must_use]
    pub fn device_of(&self, part: Part) -> Option<usize> {
        match part {
            Part::Block(block) => self.blocks.get(usize::try_from(block).ok()?).copied().flatten(),
            Part::Output | Part::Vision => self.output,
            Part::Other => self.others,
            Part::Input => None,
        }
    }

    /// The number of layers on devices.
    fn layers(&self) -> u64 {
        self.blocks.iter().chain([&self.output]).flatten().count() as u64
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    pub vram_bytes: u64,
    pub layers: u64,
    /// The bytes used on it, including its graph and, by Ollama's rules, the layer kept free; 0 if it is unused.
    pub used_bytes: u64,
}

impl Placement {
    /// Whether everything is on devices. Never true without a rule for the architecture, since it is unknown what else
    /// the model needs.
    pub const fn fits(&self) -> bool {
        self.has_rule && self.layers == self.layers_of && self.companions_fit && self.others_fit
    }
}

impl Estimate<'_> {
    /// Places the layers on devices by the rules of the basis. `devices` is the memory of each in bytes.
    pub fn place(&self, devices: &[u64]) -> Placement {
        match self.rules {
            Basis::Ollama => self.place_as_ollama(devices),
            Basis::LlamaCpp => self.place_as_llama_cpp(devices),
        }
    }

    /// The bytes that are not on devices, given the bytes and the layers placed there.
    pub(super) fn memory_bytes(&self, placed: u128, layers: u64) -> u64 {
        let all =
            self.block_bytes().sum::<u128>() + self.output_bytes() + u128::from(self.other_weights_bytes);
        let off_devices = (all + self.companion_bytes()).saturating_sub(placed);
        let graph = if layers == 0 { self.graph_full_bytes } else { 0 };
        clamp(off_devices + u128::from(self.input_weights_bytes) + self.expert_bytes() + u128::from(graph))
    }
}

fn clamp(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}

/// Ollama's rules: `estimateGPULayers` in its `llm/memory.go`, revision d5a0d8d904 of August 2025.
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
        let (companions, output) = (self.companion_bytes(), self.output_bytes());
        let others = u128::from(self.other_weights_bytes);
        let mut places = Places::in_memory(self.kv_bytes.len());
        places.companions = placer.place_companions(companions, self.buffer_bytes());
        placer.place_blocks(&mut places.blocks, self.block_bytes());
        let blocks = places.layers();
        let layers_of = self.kv_bytes.len() as u64 + u64::from(output > 0);
        if output > 0 && blocks + 1 == layers_of {
            places.output = placer.place_output(blocks, output);
        }
        places.others = placer.place_others(others);
        let layers = places.layers();
        let all = companions + self.block_bytes().sum::<u128>() + output;
        let each = self.buffer_bytes() + if layers == layers_of { full } else { partial };
        let used = placer.candidates.iter().filter(|candidate| candidate.is_used()).count();
        Placement {
            devices: placer.candidates.iter().map(|candidate| candidate.device(each)).collect(),
            layers,
            layers_of,
            companions_fit: companions == 0 || places.companions.is_some(),
            others_fit: others == 0 || places.others.is_some(),
            places,
            has_rule: self.has_rule,
            total_bytes: clamp(all + each * used as u128),
            memory_bytes: self
                .memory_bytes(placer.candidates.iter().map(|candidate| candidate.placed).sum(), layers),
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
    fn place_companions(&mut self, bytes: u128, layer: u128) -> Option<usize> {
        let least = self.reserved + layer;
        let found = self.candidates.iter().position(|candidate| candidate.has_room_for(least + bytes));
        let place = found.filter(|device| bytes > 0 && self.place_on(*device, bytes, 0));
        self.in_turn.retain(|device| {
            self.candidates.get(*device).is_some_and(|candidate| candidate.has_room_for(least))
        });
        place
    }

    /// Places the blocks from the last to the first until one does not fit.
    fn place_blocks(
        &mut self,
        places: &mut [Option<usize>],
        blocks: impl DoubleEndedIterator<Item = u128> + ExactSizeIterator,
    ) {
        for (number, (place, bytes)) in places.iter_mut().zip(blocks).enumerate().rev() {
            *place = self.place_block(number, bytes);
            if place.is_none() {
                break;
            }
        }
    }

    fn place_block(&mut self, number: usize, bytes: u128) -> Option<usize> {
        while let Some(turn) = number.checked_rem(self.in_turn.len()) {
            let device = self.in_turn.get(turn).copied().filter(|device| self.place_on(*device, bytes, 1));
            if device.is_some() {
                return device;
            }
            self.in_turn.remove(turn);
        }
        None
    }

    /// Places the output layer, on the device whose turn it is or on an earlier one.
    fn place_output(&mut self, blocks: u64, bytes: u128) -> Option<usize> {
        let turns = (1..=self.in_turn.len()).rev();
        let devices: Vec<usize> = turns
            .filter_map(|count| self.in_turn.get(usize::try_from(blocks).ok()? % count).copied())
            .collect();
        devices.into_iter().find(|device| self.place_on(*device, bytes, 1))
    }

    /// Places weights that are not a layer on the first device with room.
    fn place_others(&mut self, bytes: u128) -> Option<usize> {
        let devices = self.in_turn.clone();
        devices.into_iter().find(|device| bytes > 0 && self.place_on(*device, bytes, 0))
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

/// llama.cpp's rules: `llama_model_base::load_tensors` of b11434. `--n-gpu-layers` counts from the last layer, the
/// output; `--tensor-split` gives each device consecutive layers, the first ones to the first device.
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
        let (output, others) = (self.output_bytes(), u128::from(self.other_weights_bytes));
        let mut places = Places::in_memory(self.kv_bytes.len());
        places.companions = Filled::first_with_room(used, companions);
        let with_output = (output > 0).then_some((&mut places.output, output));
        let blocks = places.blocks.iter_mut().zip(self.block_bytes()).rev();
        let mut from_last = used.iter_mut().enumerate().rev().peekable();
        for (place, bytes) in with_output.into_iter().chain(blocks) {
            while from_last.peek_mut().is_some_and(|(_, device)| !device.add_layer(bytes)) {
                from_last.next();
            }
            *place = from_last.peek().map(|(device, _)| *device);
            if place.is_none() {
                break;
            }
        }
        places.others = Filled::first_with_room(used, others);
        let graphs = filled.iter().filter(|device| device.layers > 0).count();
        let all = companions + self.block_bytes().sum::<u128>() + output + others;
        let layers = places.layers();
        Placement {
            layers,
            layers_of: self.kv_bytes.len() as u64 + u64::from(output > 0),
            companions_fit: companions == 0 || places.companions.is_some(),
            others_fit: others == 0 || places.others.is_some(),
            places,
            has_rule: self.has_rule,
            total_bytes: clamp(all + graph * graphs as u128),
            memory_bytes: self.memory_bytes(filled.iter().map(|device| device.placed).sum(), layers),
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

    /// Places something other than a layer on the first device with room for it, and returns the index of the device.
    fn first_with_room(devices: &mut [Self], bytes: u128) -> Option<usize> {
        devices.iter_mut().position(|device| bytes > 0 && device.hold(bytes))
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
