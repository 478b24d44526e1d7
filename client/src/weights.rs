//! The tensors of a model that has one layer per tensor: by name, without a copy.
//!
//! Ollama's models for image generation and for MLX have no GGUF file. Their manifest has one
//! layer of type `application/vnd.ollama.image.tensor` per tensor, or per group of experts, and
//! each is a small safetensors file. [`ManifestWeights`] reads all forms of these files that Ollama
//! has written; [`tensor_layers`](blobd_model::tensor_layers) lists them, and how their tensors are
//! named. The parts of a quantised tensor `T` are `T_scale`, `T_qbias` and `T_global_scale`.
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
//! This module does not dequantise: the parts of a quantised tensor are returned as they are stored,
//! whatever type is requested.

mod error;
mod layers;

use std::collections::BTreeSet;
use std::ops::Deref;
use std::sync::Arc;

use blobd_model::convert::convert;
pub use blobd_model::tensor_layers::Quantization;
use blobd_store_format::reference::Reference;
pub use blobd_store_format::safetensors::Dtype;
use serde_json::Value as Json;

pub use self::error::WeightsError;
use self::layers::{Layers, Weight};
use crate::client::Client;
use crate::model::{BlobSlice, OpenModel};
use crate::protocol::request::{OpenParams, TensorSelection};

/// The tensors of a model, or of one of its components. The model is in use until this is dropped.
#[derive(Debug)]
pub struct ManifestWeights {
    model: OpenModel,
    layers: Layers,
    /// How the model is quantised, in capital letters.
    quantization: Quantization,
}

impl ManifestWeights {
    /// Opens all tensors of a model. The names of a component's tensors start with the component.
    ///
    /// # Errors
    /// [`WeightsError`] when the model cannot be opened, has no tensor layers, or when one of them is
    /// not a safetensors file of a known form.
    pub fn open(client: &Client, reference: &Reference) -> Result<Self, WeightsError> {
        Self::of(client.open_with(&OpenParams::new(reference.clone()))?, "")
    }

    /// Opens the tensors of one component, such as `transformer` or `text_encoder`. Their names do not
    /// contain the component. The daemon passes no descriptors for other tensors.
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

    /// Finds the tensors of a model that is already open; `component` is empty for the whole model.
    ///
    /// # Errors
    /// As [`open`](Self::open).
    pub fn of(model: OpenModel, component: &str) -> Result<Self, WeightsError> {
        let layers = Layers::read(&model, component)?;
        let index = read_json(&model, MODEL_INDEX)?;
        let index = index.as_ref().map(Quantization::of_model_index).unwrap_or_default();
        let mut quantization = layers.tensors.quantization(&index);
        quantization.quant_type = quantization.quant_type.map(|name| name.to_uppercase());
        Ok(Self { model, layers, quantization })
    }

    /// The sorted names of tensors, their parts (`…_scale`) and groups. Ollama also lists groups among the
    /// tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.layers.tensors.names()
    }

    /// Whether there is a tensor, a part or a group with this name.
    #[must_use]
    pub fn has(&self, name: &str) -> bool {
        self.layers.tensors.tensor(name).is_some() || self.group(name).is_some()
    }

    /// The names of a group's tensors, in the order of its file; `None` if there is no such group.
    #[must_use]
    pub fn group(&self, name: &str) -> Option<&[String]> {
        self.layers.tensors.group(name)
    }

    /// The tensor with this name, mapped, as it is stored.
    ///
    /// # Errors
    /// [`WeightsError::NoTensor`]; [`WeightsError::IsGroup`] for the name of a group.
    pub fn tensor(&self, name: &str) -> Result<WeightMap, WeightsError> {
        let Weight { tensor, bytes } = self.weight(name)?;
        let (dtype, shape, bytes) = (tensor.dtype(), tensor.shape().to_vec(), Bytes::Mapped(bytes));
        Ok(WeightMap { name: name.to_owned(), dtype, shape, bytes })
    }

    /// The tensor with this name, converted to `dtype`, which is `F64`, `F32`, `F16` or `BF16`, if it has
    /// another float type and is not quantised. Converted bytes are a copy in this process's memory.
    ///
    /// A quantised tensor and its parts (scales, biases) are never converted, and neither are
    /// integers. They are returned as they are stored, so check [`WeightMap::dtype`].
    ///
    /// # Errors
    /// As [`tensor`](Self::tensor); [`WeightsError::Convert`] for float types of less than a byte, and for
    /// any other `dtype`.
    pub fn tensor_as(&self, name: &str, dtype: Dtype) -> Result<WeightMap, WeightsError> {
        let mut map = self.tensor(name)?;
        let is_plain = !self.layers.tensors.is_part(name) && !self.layers.tensors.is_quantized(name);
        if is_plain && map.dtype != dtype && map.dtype.is_float() {
            let bytes = convert(&map, map.dtype, dtype)
                .map_err(|source| WeightsError::Convert { name: name.to_owned(), source })?;
            (map.bytes, map.dtype) = (Bytes::Converted(bytes.into()), dtype);
        }
        Ok(map)
    }

    /// How the model is quantised, in capital letters (`INT4`, `NVFP4`, `Q8`, …): as the first file that
    /// declares it says, else as `model_index.json` says, else as inferred from scales in separate layers.
    #[must_use]
    pub fn quantization(&self) -> Option<&str> {
        self.quantization.quant_type.as_deref()
    }

    /// How many elements share a scale: as the source of [`quantization`](Self::quantization) says, else the
    /// default of that type.
    #[must_use]
    pub const fn group_size(&self) -> Option<u32> {
        self.quantization.group_size
    }

    /// How this tensor is quantised; `None` if it has no scale and is therefore not quantised.
    ///
    /// In order of precedence: what its file declares for this tensor, what the file declares for all
    /// its tensors, what the shapes and types of the tensor and its scale imply, the type's default size.
    #[must_use]
    pub fn quantization_of(&self, name: &str) -> Option<Quantization> {
        self.layers.tensors.quantization_of(name, &self.quantization)
    }

    /// Whether this is a scale or bias of another tensor, in its file or in a separate layer.
    #[must_use]
    pub fn is_part(&self, name: &str) -> bool {
        self.layers.tensors.is_part(name)
    }

    /// The sorted names of the model's components, whichever is requested.
    #[must_use]
    pub fn components(&self) -> Vec<&str> {
        let names = self.model.layers().iter().filter_map(layers::tensor_layer_name);
        let components: BTreeSet<_> = names.filter_map(|name| Some(name.split_once('/')?.0)).collect();
        components.into_iter().collect()
    }

    /// The requested component; empty for all.
    #[must_use]
    pub fn component(&self) -> &str {
        self.layers.tensors.component()
    }

    /// The open model, with its lease and its other files.
    #[must_use]
    pub const fn model(&self) -> &OpenModel {
        &self.model
    }

    /// Reads a JSON file of the model by its path, such as `tokenizer/tokenizer_config.json`; `None` if
    /// the model has no such file.
    ///
    /// # Errors
    /// [`WeightsError::Json`] when it is not JSON or too long; errors from mapping it.
    pub fn json(&self, path: &str) -> Result<Option<Json>, WeightsError> {
        read_json(&self.model, path)
    }

    fn weight(&self, name: &str) -> Result<Weight<'_>, WeightsError> {
        if let Some(weight) = self.layers.weight(name) {
            return Ok(weight);
        }
        Err(match self.group(name) {
            Some(members) => WeightsError::IsGroup { first: members.first().cloned(), name: name.to_owned() },
            None => WeightsError::NoTensor { model: self.model.name().to_owned(), name: name.to_owned() },
        })
    }
}

/// A tensor in memory, which derefs to its bytes. It stays valid after its [`ManifestWeights`] is dropped.
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
    /// The name by which it was requested.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its element type.
    #[must_use]
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its dimensions in safetensors order, the slowest first.
    #[must_use]
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// One element of the slowest dimension, such as an expert of a stack, which can be prefetched or
    /// released by itself. `None` if `index` is out of range, for a scalar, and for converted bytes.
    #[must_use]
    pub fn expert_bytes(&self, index: u64) -> Option<BlobSlice> {
        let count = self.shape.first().copied().filter(|count| index < *count)?;
        let stride = (self.len() as u64).checked_div(count)?;
        self.mapped()?.part(index.checked_mul(stride)?, stride)
    }

    /// Its bytes in the page cache; `None` if they were converted, which makes a copy.
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

/// Reads a JSON layer by its name; `None` if there is none.
fn read_json(model: &OpenModel, path: &str) -> Result<Option<Json>, WeightsError> {
    let is_wanted = |layer: &crate::protocol::response::OpenLayer| {
        layer.media_type.component() == "json" && layer.name.as_deref() == Some(path)
    };
    let Some(number) = model.layers().iter().position(is_wanted) else { return Ok(None) };
    let error = |reason: String| WeightsError::Json { name: path.to_owned(), reason };
    let bytes = model.layer_bytes(number)?;
    if bytes.len() > MAX_JSON_BYTES {
        return Err(error(format!(
            "too long: expected at most {MAX_JSON_BYTES} bytes, found {}",
            bytes.len()
        )));
    }
    serde_json::from_slice(&bytes).map(Some).map_err(|invalid| error(invalid.to_string()))
}

const MODEL_INDEX: &str = "model_index.json";
/// Tokenizers are the longest JSON files of a model, at about 35 MiB.
const MAX_JSON_BYTES: usize = 128 << 20;
