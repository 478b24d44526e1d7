//! The memory that a model needs, and how much of it fits.
#![expect(missing_docs, reason = "a name that says it all has no comment")]

use std::str::FromStr;

use blobd_model::estimate::{Basis, CacheType};
use blobd_store_format::digest::Digest;
use serde::{Deserialize, Serialize};

/// Parameters of `Route::Fit`, its query.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct FitParams {
    /// The context of one sequence in tokens; 0 is the one that the model was trained for. Without it, the model's
    /// `num_ctx`, else the trained one, at most 8192.
    pub context: Option<u64>,
    /// The tokens that are processed together.
    pub batch: Option<u64>,
    /// The sequences that are processed at the same time, each with the whole context.
    pub parallel: Option<u64>,
    /// The type of keys in the cache.
    pub cache_type_k: Option<CacheType>,
    /// The type of values in the cache.
    pub cache_type_v: Option<CacheType>,
    /// The memory of each device that the model may take.
    pub vram_bytes: Vec<u64>,
    /// The machine's memory that the model may take.
    pub memory_bytes: Option<u64>,
    /// Leave the experts of a mixture in the machine's memory.
    pub cpu_moe: bool,
    /// The formulas.
    pub basis: Option<Basis>,
}

/// Why a parameter is refused.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{0}")]
pub struct FitQueryError(String);

const BASES: [(&str, Basis); 2] = [("llama.cpp", Basis::LlamaCpp), ("ollama", Basis::Ollama)];

impl FitParams {
    /// The most devices of a request.
    pub const MAX_DEVICES: usize = 64;

    /// The query, without the question mark; empty if no parameter is set.
    pub fn to_query(&self) -> String {
        let mut pairs = Vec::new();
        let mut add =
            |key: &str, value: Option<String>| pairs.extend(value.map(|value| format!("{key}={value}")));
        let number = |value: Option<u64>| value.map(|value| value.to_string());
        add("context", number(self.context));
        add("batch", number(self.batch));
        add("parallel", number(self.parallel));
        add("cache_type_k", self.cache_type_k.map(|kind| kind.to_string()));
        add("cache_type_v", self.cache_type_v.map(|kind| kind.to_string()));
        for bytes in &self.vram_bytes {
            add("vram_bytes", Some(bytes.to_string()));
        }
        add("memory_bytes", number(self.memory_bytes));
        add("cpu_moe", self.cpu_moe.then(|| "true".to_owned()));
        let basis = BASES.iter().find(|(_, basis)| Some(*basis) == self.basis);
        add("basis", basis.map(|(name, _)| (*name).to_owned()));
        pairs.join("&")
    }

    /// The formulas with this name.
    pub fn basis_of_name(name: &str) -> Result<Basis, FitQueryError> {
        let found = BASES.iter().find(|(known, _)| *known == name).map(|(_, basis)| *basis);
        found.ok_or_else(|| {
            let names = BASES.map(|(name, _)| name).join(" or ");
            FitQueryError(format!("basis: expected {names}, found {name:?}"))
        })
    }

    fn set(&mut self, key: &str, value: &str) -> Result<(), FitQueryError> {
        match key {
            "context" => once(&mut self.context, key, number(key, value, 0)?),
            "batch" => once(&mut self.batch, key, number(key, value, 1)?),
            "parallel" => once(&mut self.parallel, key, number(key, value, 1)?),
            "memory_bytes" => once(&mut self.memory_bytes, key, number(key, value, 0)?),
            "cache_type_k" => once(&mut self.cache_type_k, key, cache_type(key, value)?),
            "cache_type_v" => once(&mut self.cache_type_v, key, cache_type(key, value)?),
            "basis" => once(&mut self.basis, key, Self::basis_of_name(value)?),
            "vram_bytes" if self.vram_bytes.len() >= Self::MAX_DEVICES => Err(FitQueryError(format!(
                "vram_bytes: too many devices: expected at most {}",
                Self::MAX_DEVICES
            ))),
            "vram_bytes" => {
                self.vram_bytes.push(number(key, value, 0)?);
                Ok(())
            }
            "cpu_moe" => {
                let wrong = || FitQueryError(format!("cpu_moe: expected true or false, found {value:?}"));
                self.cpu_moe = value.parse().map_err(|_not_a_bool| wrong())?;
                Ok(())
            }
            _ => Err(FitQueryError(format!(
                "{key:?}: unknown parameter: expected context, batch, parallel, cache_type_k, cache_type_v, \
                 vram_bytes, memory_bytes, cpu_moe or basis"
            ))),
        }
    }
}

impl FromStr for FitParams {
    type Err = FitQueryError;

    fn from_str(query: &str) -> Result<Self, FitQueryError> {
        let mut params = Self::default();
        for pair in query.split('&').filter(|pair| !pair.is_empty()) {
            let (key, value) = pair.split_once('=').unwrap_or((pair, ""));
            params.set(key, value)?;
        }
        Ok(params)
    }
}

fn once<T>(field: &mut Option<T>, key: &str, value: T) -> Result<(), FitQueryError> {
    match field.replace(value) {
        None => Ok(()),
        Some(_) => Err(FitQueryError(format!("{key}: given twice"))),
    }
}

fn number(key: &str, value: &str, least: u64) -> Result<u64, FitQueryError> {
    let number = value.parse().ok().filter(|number| *number >= least);
    number.ok_or_else(|| FitQueryError(format!("{key}: expected a number from {least} on, found {value:?}")))
}

fn cache_type(key: &str, value: &str) -> Result<CacheType, FitQueryError> {
    value.parse().map_err(|error| FitQueryError(format!("{key}: {error}")))
}

/// The memory that a model needs, and whether it fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FitReport {
    pub name: String,
    /// The digest of its manifest, if it has one.
    pub digest: Option<Digest>,
    /// The format of the weights: `gguf` (an estimate for llama.cpp and Ollama) or `safetensors` (an estimate for
    /// transformers, vLLM and similar programs).
    #[serde(default)]
    pub format: String,
    /// What the model itself needs.
    #[serde(flatten)]
    pub memory: FitMemory,
    /// The size of the files that hold the weights.
    pub file_bytes: u64,
    /// The part of these files that is not tensor data.
    pub header_bytes: u64,
    /// What one device must have so that everything fits on it.
    pub required_bytes: u64,
    /// What is needed in all, on devices and in the machine's memory.
    pub needed_bytes: u64,
    /// The context for which the model was trained, in tokens.
    pub context_length: Option<u64>,
    /// Why the estimate has its context.
    pub context_source: ContextSource,
    /// What limits the answer, for people.
    pub notes: Vec<String>,
    /// The file of the vision tower.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub projector: Option<FitProjector>,
    /// The model for speculative decoding that belongs to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub draft: Option<FitMemory>,
    /// The weights of each adapter in bytes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub adapters: Vec<u64>,
    /// Whether it fits; only if it is known into what.
    #[serde(flatten, default, skip_serializing_if = "Option::is_none")]
    pub answer: Option<FitAnswer>,
    /// The options of llama.cpp's programs that run the model so; none without a rule.
    pub options: Vec<String>,
}

/// Why an estimate has its context.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum ContextSource {
    /// It was requested.
    Option,
    /// 0 was requested.
    Trained,
    /// The model's `num_ctx`.
    Model,
    /// None of these.
    Default,
}

/// The memory that one model needs.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FitMemory {
    /// The formulas of the KV cache.
    pub basis: String,
    /// The formulas of the computation graph; `not counted` for a safetensors model.
    pub graph_basis: String,
    /// Whether the basis has a rule for this model and what belongs to it. If not, KV cache and graph are unknown, and it
    /// never fits.
    pub has_rule: bool,
    /// The context of one sequence in tokens.
    pub context: u64,
    /// The tokens that are processed together.
    pub batch: u64,
    /// The sequences that are processed at the same time.
    pub parallel: u64,
    /// The type of keys in the cache.
    pub cache_type_k: String,
    /// The type of values in the cache.
    pub cache_type_v: String,
    /// The KV cache of each block.
    pub kv_bytes: Vec<u64>,
    /// Its sum.
    pub kv_total_bytes: u64,
    /// The graph on each device if only a part of the model is on devices.
    pub graph_partial_bytes: u64,
    /// The graph if all of the model is on one device.
    pub graph_full_bytes: u64,
    /// The weights by layer; every tensor is in one of them.
    pub weights: Vec<FitLayer>,
    /// Their sum.
    pub weights_bytes: u64,
    /// The size of tables that engines read from the disk row by row.
    pub table_bytes: u64,
    /// The part of the weights that is the vision tower.
    pub vision_weights_bytes: u64,
    /// The graph of the vision tower.
    pub vision_graph_bytes: u64,
    /// Keys of the header that the formulas need and the model lacks.
    pub missing_keys: Vec<String>,
    /// The tensors of unknown types. Each counts with the bytes up to the next one.
    #[serde(default)]
    pub unsized_tensors: u64,
}

/// The weights of a layer.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FitLayer {
    /// The layer's name, such as `blk.0` or `model.layers.0`.
    pub layer: String,
    /// The number of its block, whose KV cache is that element of `kv_bytes`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<u64>,
    /// The size of its tensors.
    pub bytes: u64,
    /// Where its tensors are; without memory in the request, where they belong.
    pub place: LayerPlace,
    /// The index of the device that holds them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<u64>,
}

/// Where the weights of a layer are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum LayerPlace {
    /// On a device.
    Device,
    /// In the machine's memory.
    Memory,
    /// On a device, except the experts, which are in the machine's memory.
    DeviceAndMemory,
    /// On the disk, from which they are read row by row.
    Disk,
}

/// The file of a vision tower.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FitProjector {
    /// The formulas.
    pub basis: String,
    /// Its weights.
    pub weights_bytes: u64,
}

/// Whether a model fits.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FitAnswer {
    /// The memory of all devices.
    pub vram_bytes: u64,
    /// The layers on devices.
    pub layers: u64,
    /// The layers of the model.
    pub layers_of: u64,
    /// Layers, KV cache and what belongs to the model, and a graph for each device with layers.
    pub total_bytes: u64,
    /// What is in the machine's memory, with the graph if no layer is on a device.
    pub memory_bytes: u64,
    /// Whether everything fits, on devices or in the machine's memory.
    pub fits: bool,
    /// Where everything fits, if it does.
    #[serde(default)]
    pub fits_in: Option<FitsIn>,
    /// The largest context with which everything fits, at most the trained one; 0 if even a context of 1 does not fit.
    pub max_context: u64,
    /// What each device holds.
    pub devices: Vec<FitDevice>,
}

/// In what a model fits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FitsIn {
    /// All layers are on devices.
    Devices,
    /// Some layers are on devices, the others in the machine's memory.
    DevicesAndMemory,
    /// Everything is in the machine's memory.
    Memory,
}

/// What a device holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct FitDevice {
    /// Its memory.
    pub vram_bytes: u64,
    /// The layers on it.
    pub layers: u64,
    /// The memory that they take.
    pub used_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_those_of_their_query() {
        for (query, params) in [
            ("", FitParams::default()),
            ("context=0", FitParams { context: Some(0), ..FitParams::default() }),
            (
                "batch=64&parallel=2&cache_type_k=q8_0&cache_type_v=f32&vram_bytes=1&vram_bytes=2&memory_bytes=3\
                 &cpu_moe=true&basis=llama.cpp",
                FitParams {
                    batch: Some(64),
                    parallel: Some(2),
                    cache_type_k: Some(CacheType::Q8_0),
                    cache_type_v: Some(CacheType::F32),
                    vram_bytes: vec![1, 2],
                    memory_bytes: Some(3),
                    cpu_moe: true,
                    basis: Some(Basis::LlamaCpp),
                    ..FitParams::default()
                },
            ),
        ] {
            assert_eq!(params.to_query(), query);
            assert_eq!(query.parse(), Ok(params));
        }
    }

    #[test]
    fn wrong_queries_are_explained() {
        let many = "vram_bytes=1&".repeat(FitParams::MAX_DEVICES + 1);
        for (query, words) in [
            ("context=much", "context: expected a number from 0 on, found \"much\""),
            ("batch=0", "batch: expected a number from 1 on, found \"0\""),
            ("parallel", "parallel: expected a number from 1 on, found \"\""),
            ("context=1&context=2", "context: given twice"),
            ("cache_type_k=q9", "cache_type_k: cache type \"q9\": expected one of f32"),
            ("basis=vllm", "basis: expected llama.cpp or ollama, found \"vllm\""),
            ("cpu_moe=1", "cpu_moe: expected true or false, found \"1\""),
            ("vram=1", "\"vram\": unknown parameter: expected context, batch"),
            ("memory_bytes=-1", "memory_bytes: expected a number"),
            (&many, "vram_bytes: too many devices: expected at most 64"),
        ] {
            let error = query.parse::<FitParams>().unwrap_err().to_string();
            assert!(error.starts_with(words), "{query}: {error}");
        }
    }
}
