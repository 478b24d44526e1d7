//! The tensors of a model that has a layer for each: by name, without a copy.
//!
//! Ollama's models for image generation and for MLX have no GGUF file. Their manifest has one
//! layer of type `application/vnd.ollama.image.tensor` per tensor, or per group of experts, and
//! each is a small safetensors file. [`ManifestWeights`] reads all forms in which such files
//! have ever been written:
//!
//! - one tensor under the layer's name, under that name without its component (`text_encoder/…`),
//!   or, in those of January 2026, under the name `data`;
//! - a quantised tensor `T` with `T.scale`, and perhaps `T.bias` and `T.global_scale`, in one file,
//!   shown as `T`, `T_scale`, `T_qbias` and `T_global_scale`; those of February 2026 have layers
//!   of their own with these names;
//! - a group: many tensors under names of their own, none of them the layer's.
//!
//! ```no_run
//! use blobd_client::Client;
//! use blobd_client::weights::{Dtype, ManifestWeights};
//!
//! # fn main() -> Result<(), Box<dyn std::error::Error>> {
//! let client = Client::connect_default()?;
//! let weights = ManifestWeights::open_component(&client, &"z-image".parse()?, "text_encoder")?;
//! for name in weights.names() {
//!     println!("{name} {:?}", weights.quantization_of(name));
//! }
//! let norm = weights.tensor_as("model.norm.weight", Dtype::F32)?; // converted if it is BF16
//! println!("{:?} {:02x?}", norm.shape(), &norm[..8]);
//! # Ok(())
//! # }
//! ```
//!
//! What this module does not do is dequantise: the parts of a quantised tensor come as they are
//! stored, whatever type is asked for.

mod error;
mod inference;
mod quantization;
mod table;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use blobd_store_format::reference::Reference;
pub use blobd_store_format::safetensors::Dtype;
use blobd_store_format::safetensors::convert;
use serde_json::Value as Json;

pub use self::error::WeightsError;
pub use self::quantization::Quantization;
use self::table::{Table, Weight};
use crate::client::Client;
use crate::model::{BlobSlice, OpenModel};
use crate::protocol::request::{OpenParams, TensorSelection};

/// The tensors of a model, or of one of its components; the model is in use until this is dropped.
#[derive(Debug)]
pub struct ManifestWeights {
    model: OpenModel,
    /// Without the slash; empty for all of the model.
    component: String,
    tensors: BTreeMap<String, Weight>,
    /// The names of layers that hold several tensors, and which.
    groups: BTreeMap<String, Vec<String>>,
    quantization: Option<String>,
    group_size: Option<u32>,
}

impl ManifestWeights {
    /// Opens all tensors of a model. Those of a component have its name in front of theirs.
    ///
    /// # Errors
    /// [`WeightsError`] when the model cannot be opened, has no layers of this kind, or when one of
    /// them is no safetensors file of a known form.
    pub fn open(client: &Client, reference: &Reference) -> Result<Self, WeightsError> {
        Self::of(client.open_with(&OpenParams::new(reference.clone()))?, "")
    }

    /// Opens the tensors of one component, such as `transformer` or `text_encoder`, under their
    /// names without it. No descriptor is passed for others.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn open_component(
        client: &Client,
        reference: &Reference,
        component: &str,
    ) -> Result<Self, WeightsError> {
        let component = component.trim_end_matches('/');
        let mut params = OpenParams::new(reference.clone());
        if !component.is_empty() {
            params.tensors = TensorSelection::Prefix(format!("{component}/"));
        }
        Self::of(client.open_with(&params)?, component)
    }

    /// The same for a model that is open already; `component` is empty for all of it.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn of(model: OpenModel, component: &str) -> Result<Self, WeightsError> {
        let component = component.trim_end_matches('/').to_owned();
        let Table { tensors, groups, quant_type, group_size } = Table::read(&model, &component)?;
        let index = read_json(&model, MODEL_INDEX)?;
        let indexed = |key: &str| index.as_ref().and_then(|index| index.get(key));
        let quantization = quant_type
            .or_else(|| inference::of_separate_layers(&tensors))
            .or_else(|| indexed("quantization").and_then(Json::as_str).map(str::to_owned))
            .filter(|name| !name.is_empty())
            .map(|name| name.to_uppercase());
        let group_size = group_size.or_else(|| indexed("group_size").and_then(quantization::group_size_of));
        Ok(Self { model, component, tensors, groups, quantization, group_size })
    }

    /// The names there are, sorted: of tensors, of their parts (`…_scale`), and of layers that are
    /// groups, as the original listed them.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let names: BTreeSet<_> = self.tensors.keys().chain(self.groups.keys()).map(String::as_str).collect();
        names.into_iter()
    }

    /// Whether there is a tensor, a part or a group of this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.tensors.contains_key(name) || self.groups.contains_key(name)
    }

    /// The names of the tensors in a group, in the order of its file; `None` if it is no group.
    #[must_use]
    pub fn group(&self, name: &str) -> Option<&[String]> {
        self.groups.get(name).map(Vec::as_slice)
    }

    /// The tensor of this name, mapped and as it is stored.
    ///
    /// # Errors
    /// [`WeightsError::NoTensor`]; [`WeightsError::IsGroup`] for the name of a group.
    pub fn tensor(&self, name: &str) -> Result<WeightMap, WeightsError> {
        let weight = self.weight(name)?;
        let bytes = Bytes::Mapped(weight.bytes.clone());
        Ok(WeightMap { name: name.to_owned(), dtype: weight.dtype, shape: weight.shape.clone(), bytes })
    }

    /// The same as `dtype`: converted, in memory of its own, if it is an unquantised `F32`, `F16` or
    /// `BF16` tensor of another of these types than `dtype`.
    ///
    /// A quantised tensor and its parts (scales, biases) are never converted, and neither are
    /// integers: they come as they are stored, so look at [`WeightMap::dtype`].
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor).
    pub fn tensor_as(&self, name: &str, dtype: Dtype) -> Result<WeightMap, WeightsError> {
        let mut map = self.tensor(name)?;
        let is_plain = self.weight(name)?.part_of.is_none() && !self.is_quantized(name);
        if is_plain
            && map.dtype != dtype
            && let Some(bytes) = convert(&map, map.dtype, dtype)
        {
            (map.bytes, map.dtype) = (Bytes::Converted(bytes.into()), dtype);
        }
        Ok(map)
    }

    /// How the model is quantised, in capital letters (`INT4`, `NVFP4`, `Q8`, …): what the first file
    /// that says so says, else what scales in layers of their own suggest, else what
    /// `model_index.json` says.
    #[must_use]
    pub fn quantization(&self) -> Option<&str> {
        self.quantization.as_deref()
    }

    /// How many elements share a scale: what the first file that says so says, else what
    /// `model_index.json` says.
    #[must_use]
    pub const fn group_size(&self) -> Option<u32> {
        self.group_size
    }

    /// How this tensor is quantised; `None` if it has no scale, and so is not.
    ///
    /// What its file says of this very tensor comes first, then what the file says of all of its
    /// tensors, then what follows from the shapes of the tensor and its scale.
    #[must_use]
    pub fn quantization_of(&self, name: &str) -> Option<Quantization> {
        let weight = self.tensors.get(name).filter(|_| self.is_quantized(name))?;
        let scale = self.tensors.get(&table::scale_name(name))?;
        let has_bias = self.tensors.contains_key(&table::bias_name(name));
        let guess = || inference::infer(weight, scale, has_bias, self.quantization());
        let said = weight.quantization.clone();
        let quant_type = said.quant_type.or_else(|| guess().quant_type);
        Some(Quantization { quant_type, group_size: said.group_size.or_else(|| guess().group_size) })
    }

    /// The component that was asked for; empty for all.
    #[must_use]
    pub fn component(&self) -> &str {
        &self.component
    }

    /// The open model: its lease, and its other files.
    #[must_use]
    pub const fn model(&self) -> &OpenModel {
        &self.model
    }

    /// A JSON file of the model by its path, such as `tokenizer/tokenizer_config.json`; `None` if
    /// there is none.
    ///
    /// # Errors
    /// [`WeightsError::Json`] when it is none, and failures to map it.
    pub fn json(&self, path: &str) -> Result<Option<Json>, WeightsError> {
        read_json(&self.model, path)
    }

    fn is_quantized(&self, name: &str) -> bool {
        self.tensors.contains_key(&table::scale_name(name))
    }

    fn weight(&self, name: &str) -> Result<&Weight, WeightsError> {
        if let Some(weight) = self.tensors.get(name) {
            return Ok(weight);
        }
        let (model, name) = (self.model.name().to_owned(), name.to_owned());
        Err(match self.groups.get(&name) {
            Some(members) => WeightsError::IsGroup { first: members.first().cloned(), name },
            None => WeightsError::NoTensor { model, name },
        })
    }
}

/// A tensor in memory: derefs to its bytes, independently of the [`ManifestWeights`] it came from.
#[derive(Clone, Debug)]
pub struct WeightMap {
    name: String,
    dtype: Dtype,
    shape: Vec<u64>,
    bytes: Bytes,
}

#[derive(Clone, Debug)]
enum Bytes {
    Mapped(BlobSlice),
    Converted(Arc<[u8]>),
}

impl WeightMap {
    /// The name it was asked for by.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its dimensions, the slowest first as safetensors has them.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// One of those that are stacked along the slowest dimension, such as an expert of a packed group,
    /// to be read ahead or let go alone; `None` if there are not that many, for a scalar, and for
    /// bytes that were converted.
    #[must_use]
    pub fn expert_bytes(&self, index: u64) -> Option<BlobSlice> {
        let count = self.shape.first().copied().filter(|count| index < *count)?;
        let stride = (self.len() as u64).checked_div(count)?;
        self.mapped()?.part(index.checked_mul(stride)?, stride)
    }

    /// Its bytes in the page cache; `None` if they were converted and are this process's own.
    #[must_use]
    pub const fn mapped(&self) -> Option<&BlobSlice> {
        match &self.bytes {
            Bytes::Mapped(bytes) => Some(bytes),
            Bytes::Converted(_) => None,
        }
    }
}

impl Deref for WeightMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match &self.bytes {
            Bytes::Mapped(bytes) => bytes,
            Bytes::Converted(bytes) => bytes,
        }
    }
}

impl AsRef<[u8]> for WeightMap {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// Reads a JSON layer by its name.
fn read_json(model: &OpenModel, path: &str) -> Result<Option<Json>, WeightsError> {
    let is_it = |layer: &crate::protocol::response::OpenLayer| {
        layer.media_type.component() == "json" && layer.name.as_deref() == Some(path)
    };
    let Some(number) = model.layers().iter().position(is_it) else { return Ok(None) };
    let bad = |reason: String| WeightsError::Json { name: path.to_owned(), reason };
    let bytes = model.layer_bytes(number)?;
    if bytes.len() > MAX_JSON_BYTES {
        return Err(bad(format!("{} bytes, at most {MAX_JSON_BYTES} allowed", bytes.len())));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|error| bad(error.to_string()))
}

const MODEL_INDEX: &str = "model_index.json";
/// Tokenizers are the longest JSON files of a model, at about 35 MiB.
const MAX_JSON_BYTES: usize = 128 << 20;
