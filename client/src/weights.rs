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

use std::collections::hash_map::Entry;
use std::collections::{BTreeSet, HashMap};
use std::ops::Deref;
use std::sync::Arc;

use blobd_model::convert::{ConvertError, convert};
pub use blobd_model::tensor_layers::Quantization;
use blobd_model::tensor_layers::{LayerTensor, TensorLayers, TensorLayersError};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
pub use blobd_store_format::safetensors::Dtype;
use blobd_store_format::safetensors::{Header, SafetensorsError};
use serde_json::Value as Json;

use crate::client::Client;
use crate::error::{ClientError, ModelError};
use crate::model::{BlobSlice, OpenModel};
use crate::protocol::error::ErrorCode;
use crate::protocol::request::{OpenParams, TensorSelection};
use crate::protocol::response::OpenLayer;

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
    pub fn of(model: OpenModel, component: &str) -> Result<Self, WeightsError> {
        let layers = Layers::read(&model, component)?;
        let index = read_json(&model, MODEL_INDEX)?;
        let index = index.as_ref().map(Quantization::from_model_index).unwrap_or_default();
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
    pub fn has(&self, name: &str) -> bool {
        self.layers.tensors.tensor(name).is_some() || self.group(name).is_some()
    }

    /// The names of a group's tensors, in the order of its file; `None` if there is no such group.
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
    pub fn quantization(&self) -> Option<&str> {
        self.quantization.quant_type.as_deref()
    }

    /// How many elements share a scale: as the source of [`quantization`](Self::quantization) says, else the
    /// default of that type.
    pub const fn group_size(&self) -> Option<u32> {
        self.quantization.group_size
    }

    /// How this tensor is quantised; `None` if it has no scale and is therefore not quantised.
    ///
    /// In order of precedence: what its file declares for this tensor, what the file declares for all
    /// its tensors, what the shapes and types of the tensor and its scale imply, the type's default size.
    pub fn quantization_of(&self, name: &str) -> Option<Quantization> {
        self.layers.tensors.quantization_of(name, &self.quantization)
    }

    /// Whether this is a scale or bias of another tensor, in its file or in a separate layer.
    pub fn is_part(&self, name: &str) -> bool {
        self.layers.tensors.is_part(name)
    }

    /// The sorted names of the model's components, whichever is requested.
    pub fn components(&self) -> Vec<&str> {
        let names = self.model.layers().iter().filter_map(tensor_layer_name);
        let components: BTreeSet<_> = names.filter_map(|name| Some(name.split_once('/')?.0)).collect();
        components.into_iter().collect()
    }

    /// The requested component; empty for all.
    pub fn component(&self) -> &str {
        self.layers.tensors.component()
    }

    /// The open model, with its lease and its other files.
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
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Its element type.
    pub const fn dtype(&self) -> Dtype {
        self.dtype
    }

    /// Its dimensions in safetensors order, the slowest first.
    pub fn shape(&self) -> &[u64] {
        &self.shape
    }

    /// One element of the slowest dimension, such as an expert of a stack, which can be prefetched or
    /// released by itself. `None` if `index` is out of range, for a scalar, and for converted bytes.
    pub fn expert_bytes(&self, index: u64) -> Option<BlobSlice> {
        let count = self.shape.first().copied().filter(|count| index < *count)?;
        let stride = (self.len() as u64).checked_div(count)?;
        self.mapped()?.part(index.checked_mul(stride)?, stride)
    }

    /// Its bytes in the page cache; `None` if they were converted, which makes a copy.
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

/// Why the tensors of a model's layers cannot be opened or read.
#[derive(Debug, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[non_exhaustive]
pub enum WeightsError {
    #[error(transparent)]
    Client(#[from] ClientError),
    #[error(transparent)]
    Model(#[from] ModelError),
    #[error("model {model}: no layer is a tensor{}; {}", of_component(.component), hint(.component))]
    NoWeights {
        model: String,
        /// The requested component; empty for all.
        component: String,
    },
    #[error("model {model}: no tensor {name:?}; ManifestWeights::names lists its tensors")]
    NoTensor { model: String, name: String },
    /// The name is that of a group: a layer with several tensors.
    #[error("{name:?} is a group of tensors; request one of them{}", example(.first))]
    IsGroup { name: String, first: Option<String> },
    #[error("tensor {name:?}: {source}; ManifestWeights::tensor returns it as it is stored")]
    Convert { name: String, source: ConvertError },
    #[error("layer {layer:?}: {reason}; run `blobd verify`")]
    Layer { layer: String, reason: SafetensorsError },
    #[error(transparent)]
    Layers(#[from] TensorLayersError),
    #[error("file {name:?}: {reason}")]
    Json { name: String, reason: String },
}

impl WeightsError {
    /// The kind of failure.
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Client(error) => error.code(),
            Self::Model(error) => error.code(),
            Self::NoWeights { .. } | Self::NoTensor { .. } => ErrorCode::NotFound,
            Self::IsGroup { .. } | Self::Convert { .. } => ErrorCode::InvalidRequest,
            Self::Layer { .. } | Self::Layers(_) | Self::Json { .. } => ErrorCode::InvalidInput,
        }
    }
}

fn of_component(component: &str) -> String {
    if component.is_empty() { String::new() } else { format!(" of component {component:?}") }
}

fn hint(component: &str) -> &'static str {
    match component {
        "" => "if it is a GGUF model, open it with Client::open",
        _ => "open the model without a component to see its components",
    }
}

fn example(first: &Option<String>) -> String {
    first.as_ref().map_or_else(String::new, |name| format!(", such as {name:?}"))
}

#[derive(Debug)]
struct Layers {
    tensors: TensorLayers,
    /// By the number of the first layer of each file.
    files: HashMap<usize, BlobSlice>,
}

/// One tensor, or a part of a quantised one.
struct Weight<'l> {
    tensor: &'l LayerTensor,
    bytes: BlobSlice,
}

impl Layers {
    /// Reads the headers of all tensor layers of the component, each file once.
    fn read(model: &OpenModel, component: &str) -> Result<Self, WeightsError> {
        let mut layers = Self { tensors: TensorLayers::new(component), files: HashMap::new() };
        let mut headers = HashMap::new();
        for (number, layer) in model.layers().iter().enumerate() {
            if let Some(name) = tensor_layer_name(layer).filter(|name| layers.tensors.includes(name)) {
                layers.add(&mut headers, model, number, name)?;
            }
        }
        if layers.tensors.is_empty() {
            let (model, component) = (model.name().to_owned(), layers.tensors.component().to_owned());
            return Err(WeightsError::NoWeights { model, component });
        }
        Ok(layers)
    }

    fn weight(&self, name: &str) -> Option<Weight<'_>> {
        let tensor = self.tensors.tensor(name)?;
        let bytes = self.files.get(&tensor.layer())?.part(tensor.offset_in_file(), tensor.size_bytes());
        // `Header::parse` has checked that the tensor is inside these bytes.
        Some(Weight { tensor, bytes: bytes.unwrap_or_default() })
    }

    /// Adds a layer; its file is read unless it was read for another layer.
    fn add(
        &mut self,
        headers: &mut HashMap<Digest, (usize, Header)>,
        model: &OpenModel,
        number: usize,
        name: &str,
    ) -> Result<(), WeightsError> {
        let Some(layer) = model.layers().get(number) else { return Ok(()) };
        let (number, header) = match headers.entry(layer.digest) {
            Entry::Occupied(read) => read.into_mut(),
            Entry::Vacant(unread) => {
                let bytes = model.layer_bytes(number)?;
                let error = |reason| WeightsError::Layer { layer: name.to_owned(), reason };
                let header = Header::parse(&bytes, bytes.len() as u64).map_err(error)?;
                self.files.insert(number, bytes);
                unread.insert((number, header))
            }
        };
        Ok(self.tensors.add(name, *number, header)?)
    }
}

/// The layer's name, if the layer is a tensor or a group.
fn tensor_layer_name(layer: &OpenLayer) -> Option<&str> {
    layer.name.as_deref().filter(|_| layer.media_type.component() == "tensor")
}

fn read_json(model: &OpenModel, path: &str) -> Result<Option<Json>, WeightsError> {
    let is_wanted =
        |layer: &OpenLayer| layer.media_type.component() == "json" && layer.name.as_deref() == Some(path);
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
