//! Distributes layers over devices.

mod llama_cpp;
mod ollama;

use super::{Basis, Estimate};

/// How a model is distributed over devices.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Placement {
    /// The devices in the order in which they were given.
    pub devices: Vec<Device>,
    /// The number of layers on devices: blocks, and one layer for the output with the vision tower.
    pub layers: u64,
    /// The number of layers that the model has.
    pub layers_of: u64,
    /// Whether projector and draft model are on a device; true if the model has neither.
    pub companions_fit: bool,
    /// Whether the other weights are on a device, see [`Estimate::other_weights_bytes`].
    pub others_fit: bool,
    /// Whether the architecture has a rule, see [`Estimate::has_rule`].
    pub has_rule: bool,
    /// The bytes of the whole model, on devices and in the machine's memory: the layers with their KV cache, projector,
    /// draft model and adapters, and for each device with layers the graph and, by Ollama's rules, the layer kept free.
    /// At most 2^64 - 1.
    pub total_bytes: u64,
    /// The bytes in the machine's memory: the input, layers that are not on a device with their KV cache, and experts
    /// if the settings keep them there.
    pub memory_bytes: u64,
}

/// The content of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Device {
    /// Its memory in bytes.
    pub vram_bytes: u64,
    /// The layers on it.
    pub layers: u64,
    /// The bytes used on it, including its graph and, by Ollama's rules, the layer kept free; 0 if it is unused.
    pub used_bytes: u64,
}

impl Placement {
    /// Whether everything is on devices. Never true without a rule for the architecture, since it is unknown what else
    /// the model needs.
    #[must_use]
    pub const fn fits(&self) -> bool {
        self.has_rule && self.layers == self.layers_of && self.companions_fit && self.others_fit
    }
}

impl Estimate<'_> {
    /// Places the layers on devices by the rules of the basis. `devices` is the memory of each in bytes.
    #[must_use]
    pub fn place(&self, devices: &[u64]) -> Placement {
        match self.rules {
            Basis::Ollama => self.place_as_ollama(devices),
            Basis::LlamaCpp => self.place_as_llama_cpp(devices),
        }
    }

    /// The bytes that are not on devices, given the bytes placed there.
    fn memory_bytes(&self, placed: u128) -> u64 {
        let all =
            self.block_bytes().sum::<u128>() + self.output_bytes() + u128::from(self.other_weights_bytes);
        let off_devices = (all + self.companion_bytes()).saturating_sub(placed);
        clamp(off_devices + u128::from(self.input_weights_bytes) + self.expert_bytes())
    }
}

fn clamp(bytes: u128) -> u64 {
    u64::try_from(bytes).unwrap_or(u64::MAX)
}
