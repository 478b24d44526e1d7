//! The tensors of a model with one layer per tensor, read from the headers of its layers.
//!
//! Ollama's models for image generation and for MLX have no GGUF file. Their manifest has one
//! layer of type `application/vnd.ollama.image.tensor` per tensor, or per group of experts, and
//! each is a small safetensors file. [`TensorLayers`] understands all forms of these files that Ollama
//! has written:
//!
//! - one tensor with the layer's name, with that name without its component (`text_encoder/…`),
//!   or, in files of January 2026, with the name `data`;
//! - a quantised tensor `T` with `T.scale`, and perhaps `T.bias` and `T.global_scale`, in one file.
//!   They are named `T`, `T_scale`, `T_qbias` and `T_global_scale`. In models of February 2026 each of
//!   them is a separate layer with that name. Without `T.scale`, `T.bias` is a tensor of its own;
//! - a group: several tensors, none of which has the layer's name.
//!
//! ```
//! use blobd_store_format::safetensors::{Dtype, Header, HeaderWriter};
//! use blobd_model::tensor_layers::{Quantization, TensorLayers};
//!
//! let mut writer = HeaderWriter::new();
//! writer.metadata("quant_type", "nvfp4");
//! writer.tensor("up.weight", Dtype::U32, &[2, 8])?.tensor("up.weight.scale", Dtype::U8, &[2, 4])?;
//! let header = Header::parse(&writer.header()?, writer.header()?.len() as u64 + 72)?;
//!
//! let mut layers = TensorLayers::new("");
//! layers.add("up.weight", 0, &header)?;
//! let described: Vec<_> = layers.describe(&Quantization::default()).collect();
//! assert_eq!((described[0].name, &*described[0].type_name), ("up.weight", "NVFP4"));
//! assert_eq!(described[0].shape, [2, 64]);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
//!
//! Sources: Ollama's `x/create` (writing), `x/imagegen/manifest`, `x/mlxrunner/model` and `x/server/show.go`
//! (reading).

mod describe;
mod quantization;
#[cfg(test)]
mod tests;
mod unpack;

use std::collections::{BTreeMap, BTreeSet};
use std::ops::Deref;
use std::sync::Arc;

use blobd_store_format::safetensors::{Header, Tensor};

pub use self::describe::{DescribedTensor, Totals};
pub use self::quantization::Quantization;
pub use self::unpack::{PackedTensor, Part, UnpackError};

/// The tensors and groups in the layers of a model, or of one of its components.
#[derive(Clone, Debug, Default)]
pub struct TensorLayers {
    component: String,
    tensors: BTreeMap<String, LayerTensor>,
    groups: BTreeMap<String, Vec<String>>,
    /// What the first file with a type declares; if no file has one, what the first file with a size declares.
    declared: Quantization,
}

/// One tensor, or a part of a quantised one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LayerTensor {
    /// As its file describes it: packed elements have the type `U32`.
    tensor: Tensor,
    layer: usize,
    layer_name: Arc<str>,
    /// What its file declares for it.
    declared: Quantization,
    /// Whether it is a scale or bias in the file of its tensor.
    is_part: bool,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum TensorLayersError {
    #[error("tensor {name:?}: in layer {first:?} and in layer {second:?}")]
    Ambiguous { name: String, first: String, second: String },
    /// Layers that refer to the same file many times can declare any number of tensors.
    #[error("model: more than {limit} tensors in its layers")]
    TooMany { limit: usize },
}

impl TensorLayers {
    /// The most tensors of a model, including parts: twice the number in the largest models if each
    /// expert's matrices, scales and biases were separate tensors.
    pub const MAX_TENSORS: usize = 1 << 18;

    /// Starts without tensors. With a component, the caller adds only its layers (see [`includes`](Self::includes)),
    /// and the names of tensors do not contain the component. With an empty component, the caller adds all layers, and
    /// names start with their component.
    pub fn new(component: &str) -> Self {
        Self { component: component.trim_end_matches('/').to_owned(), ..Self::default() }
    }

    /// Whether a layer belongs to the component. [`add`](Self::add) does not check it.
    pub fn includes(&self, layer: &str) -> bool {
        self.component.is_empty() || strip_component(layer, &self.component).len() < layer.len()
    }

    /// Adds the tensors in the header of the layer with this name and number. The number is the caller's.
    pub fn add(&mut self, layer: &str, number: usize, header: &Header) -> Result<(), TensorLayersError> {
        if self.declared.quant_type.is_none() {
            let declared = Quantization::declared_for_file(header);
            if declared.quant_type.is_some() || self.declared.group_size.is_none() {
                self.declared = declared;
            }
        }
        let file = File { header, layer: layer.into(), number };
        match tensor_key(header, layer, &self.component) {
            Some(key) => {
                let name = strip_component(layer, &self.component).to_owned();
                self.add_tensor(&file, key, &name)?;
                self.add_without_scale(&file, key, &name)
            }
            None => self.add_group(&file),
        }
    }

    /// Whether no tensor was added.
    pub fn is_empty(&self) -> bool {
        self.tensors.is_empty()
    }

    /// The sorted names of tensors, their parts (`…_scale`) and groups. Ollama also lists groups among the
    /// tensors.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        let names: BTreeSet<_> = self.tensors.keys().chain(self.groups.keys()).map(String::as_str).collect();
        names.into_iter()
    }

    /// The tensors and parts with their names, sorted by these.
    pub fn tensors(&self) -> impl Iterator<Item = (&str, &LayerTensor)> {
        self.tensors.iter().map(|(name, tensor)| (name.as_str(), tensor))
    }

    /// The tensor or part with this name.
    pub fn tensor(&self, name: &str) -> Option<&LayerTensor> {
        self.tensors.get(name)
    }

    /// The names of a group's tensors, in the order of its file; `None` if there is no such group.
    pub fn group(&self, name: &str) -> Option<&[String]> {
        self.groups.get(name).map(Vec::as_slice)
    }

    /// The requested component; empty for all.
    pub fn component(&self) -> &str {
        &self.component
    }

    /// Whether the tensor with this name has a scale.
    pub fn is_quantized(&self, name: &str) -> bool {
        self.tensors.contains_key(&scale_name(name))
    }

    /// Whether this is a scale or bias of another tensor, in its file or in a separate layer.
    pub fn is_part(&self, name: &str) -> bool {
        let is_separate_part = |(_, api_suffix): (_, &str)| {
            let base = name.strip_suffix(api_suffix);
            base.is_some_and(|base| self.tensors.contains_key(base) && self.is_quantized(base))
        };
        self.tensors.get(name).is_some_and(|tensor| tensor.is_part) || PARTS.into_iter().any(is_separate_part)
    }

    /// How the model is quantised. Type and size always come from one source: the first file that declares a type; else
    /// `index`, the content of `model_index.json`, if it names a known type; else scales in separate layers; else an
    /// unknown type in the index. A type without a size gets its default size.
    pub fn quantization(&self, index: &Quantization) -> Quantization {
        if self.declared.quant_type.is_some() {
            return self.declared.clone().or_default_size();
        }
        if index.bits().is_some() {
            return index.clone().or_default_size();
        }
        if let Some(inferred) = quantization::infer_from_separate_scales(self) {
            let group_size = index.group_size.filter(|_| index.quant_type.is_none());
            return Quantization { quant_type: Some(inferred), group_size }.or_default_size();
        }
        let declares_size = index.quant_type.is_none() && self.declared.group_size.is_some();
        if declares_size { self.declared.clone() } else { index.clone().or_default_size() }
    }

    /// How this tensor is quantised; `None` if it has no scale and is therefore not quantised. `model` is
    /// how the model is quantised.
    ///
    /// In order of precedence: what its file declares for this tensor, what the file declares for all
    /// its tensors, what the shapes and types of the tensor and its scale imply, the type's default size. Shapes that
    /// allow the quantisation of the model imply it.
    pub fn quantization_of(&self, name: &str, model: &Quantization) -> Option<Quantization> {
        let (tensor, scale) = (self.tensors.get(name)?, self.tensors.get(&scale_name(name))?);
        let declared = &tensor.declared;
        if declared.quant_type.is_none() {
            let has_bias = self.tensors.contains_key(&bias_name(name));
            let inferred = quantization::infer(tensor, scale, has_bias, model);
            return Some(if inferred.quant_type.is_some() { inferred } else { declared.clone() });
        }
        let of_shapes = || quantization::group_size(tensor, scale, declared.bits()?);
        let group_size = match declared.group_size {
            None if !declared.has_fixed_size() => of_shapes(),
            group_size => group_size,
        };
        Some(Quantization { group_size, ..declared.clone() }.or_default_size())
    }

    /// Adds a tensor with its parts; `key` is its name in the file.
    fn add_tensor(&mut self, file: &File<'_>, key: &str, name: &str) -> Result<(), TensorLayersError> {
        for (suffix, api_suffix) in PARTS {
            if let Some((part, true)) = file.part(key, suffix) {
                self.insert(file, part, format!("{name}{api_suffix}"), true)?;
            }
        }
        match file.header.tensor(key) {
            Some(tensor) => self.insert(file, tensor, name.to_owned(), false),
            None => Ok(()),
        }
    }

    /// Adds a bias without a scale under its name in the file, because it is an ordinary tensor.
    fn add_without_scale(&mut self, file: &File<'_>, key: &str, name: &str) -> Result<(), TensorLayersError> {
        for (suffix, _) in PARTS {
            if let Some((tensor, false)) = file.part(key, suffix) {
                self.insert(file, tensor, format!("{name}{suffix}"), false)?;
            }
        }
        Ok(())
    }

    /// Adds a group: all tensors of the file, with their parts.
    fn add_group(&mut self, file: &File<'_>) -> Result<(), TensorLayersError> {
        let group = strip_component(&file.layer, &self.component).to_owned();
        let mut members = Vec::new();
        for tensor in file.header.tensors().iter().filter(|tensor| !is_part(file.header, tensor.name())) {
            let name = member_name(tensor.name(), &file.layer, &self.component);
            self.add_tensor(file, tensor.name(), &name)?;
            members.push(name);
        }
        self.groups.insert(group, members);
        Ok(())
    }

    fn insert(
        &mut self,
        file: &File<'_>,
        tensor: &Tensor,
        name: String,
        is_part: bool,
    ) -> Result<(), TensorLayersError> {
        if self.tensors.len() >= Self::MAX_TENSORS {
            return Err(TensorLayersError::TooMany { limit: Self::MAX_TENSORS });
        }
        let added = LayerTensor {
            tensor: tensor.clone(),
            layer: file.number,
            layer_name: Arc::clone(&file.layer),
            declared: Quantization::declared_for_tensor(file.header, tensor.name()),
            is_part,
        };
        match self.tensors.insert(name.clone(), added) {
            None => Ok(()),
            Some(first) => {
                let (first, second) = (first.layer_name.to_string(), file.layer.to_string());
                Err(TensorLayersError::Ambiguous { name, first, second })
            }
        }
    }
}

impl LayerTensor {
    /// The number of its layer, as given to [`TensorLayers::add`].
    pub const fn layer(&self) -> usize {
        self.layer
    }
}

impl Deref for LayerTensor {
    type Target = Tensor;

    fn deref(&self) -> &Tensor {
        &self.tensor
    }
}

/// The header of a layer's file.
struct File<'h> {
    header: &'h Header,
    layer: Arc<str>,
    number: usize,
}

impl File<'_> {
    /// The tensor `{key}{suffix}`, and whether the tensor `key` has a scale.
    fn part(&self, key: &str, suffix: &str) -> Option<(&Tensor, bool)> {
        let part = self.header.tensor(&format!("{key}{suffix}"))?;
        Some((part, self.header.tensor(&format!("{key}.scale")).is_some()))
    }
}

/// The parts of a quantised tensor: the suffix of their names in a file, and in this API.
const PARTS: [(&str, &str); 3] =
    [(".scale", "_scale"), (".bias", "_qbias"), (".global_scale", "_global_scale")];
/// The name of the only tensor in a file of January 2026.
const LEGACY_KEY: &str = "data";

fn scale_name(name: &str) -> String {
    format!("{name}_scale")
}

fn bias_name(name: &str) -> String {
    format!("{name}_qbias")
}

/// The name without the component, if it starts with it.
fn strip_component<'n>(name: &'n str, component: &str) -> &'n str {
    let rest = name.strip_prefix(component).and_then(|rest| rest.strip_prefix('/'));
    rest.filter(|_| !component.is_empty()).unwrap_or(name)
}

/// The name in the file of the tensor after which the layer is named; `None` for a group.
fn tensor_key<'n>(header: &Header, layer: &'n str, component: &str) -> Option<&'n str> {
    let mut keys = vec![strip_component(layer, component), layer];
    // Even if no component was requested, names in a file may lack their component.
    keys.extend(layer.split_once('/').map(|(_, rest)| rest));
    keys.push(LEGACY_KEY);
    keys.into_iter().find(|key| header.tensor(key).is_some())
}

/// Whether a tensor is a part of another tensor in the same file, with which [`TensorLayers`] adds
/// it. Parts have no parts themselves: `T.scale.scale` is an ordinary tensor.
fn is_part(header: &Header, name: &str) -> bool {
    let mut depth = 0_usize;
    let mut next = whole_of(header, name);
    while let Some(whole) = next {
        depth += 1;
        next = whole_of(header, whole);
    }
    depth % 2 == 1
}

/// The tensor `T` to which `T.bias` belongs, if the file has `T` and `T.scale`.
fn whole_of<'n>(header: &Header, name: &'n str) -> Option<&'n str> {
    let has = |name: &str| header.tensor(name).is_some();
    let mut wholes = PARTS.into_iter().filter_map(|(suffix, _)| name.strip_suffix(suffix));
    wholes.find(|whole| has(whole) && has(&format!("{whole}.scale")))
}

/// The name of a group's tensor in this API: without the component if one was requested, otherwise with
/// the component of its layer.
fn member_name(key: &str, layer: &str, component: &str) -> String {
    let layer_component = layer.split_once('/').map_or("", |(component, _)| component);
    match component {
        "" if !layer_component.is_empty() => {
            format!("{layer_component}/{}", strip_component(key, layer_component))
        }
        _ => strip_component(key, component).to_owned(),
    }
}
