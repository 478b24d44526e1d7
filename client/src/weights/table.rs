//! Finds the tensors in the layers, for all forms of their files.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use blobd_store_format::digest::Digest;
use blobd_store_format::safetensors::{Dtype, Header, Tensor};

use super::error::WeightsError;
use super::quantization::{self, Quantization};
use crate::model::{BlobSlice, OpenModel};
use crate::protocol::response::OpenLayer;

/// The tensors and groups in a model's layers.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) tensors: BTreeMap<String, Weight>,
    pub(super) groups: BTreeMap<String, Vec<String>>,
    /// As declared by the first file that declares it.
    pub(super) quant_type: Option<String>,
    pub(super) group_size: Option<u32>,
}

/// One tensor, or a part of a quantised one.
#[derive(Clone, Debug)]
pub(super) struct Weight {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: BlobSlice,
    /// What its file declares for it.
    pub(super) quantization: Quantization,
    /// For a scale or bias, the tensor it belongs to.
    pub(super) part_of: Option<String>,
    /// The name of its layer.
    pub(super) layer: Arc<str>,
}

/// A layer's file.
struct File {
    header: Header,
    bytes: BlobSlice,
}

/// The parts of a quantised tensor: the suffix of their names in a file, and in this API.
const PARTS: [(&str, &str); 3] =
    [(".scale", "_scale"), (".bias", "_qbias"), (".global_scale", "_global_scale")];
/// The most tensors of a model, including parts: twice the number in the largest models if each
/// expert's matrices, scales and biases were separate tensors.
const MAX_TENSORS: usize = 1 << 18;
/// The name of the only tensor in a file of January 2026.
const LEGACY_KEY: &str = "data";

pub(super) fn scale_name(name: &str) -> String {
    format!("{name}_scale")
}

pub(super) fn bias_name(name: &str) -> String {
    format!("{name}_qbias")
}

impl Table {
    /// Reads the headers of all tensor layers of the component, each file once.
    pub(super) fn read(model: &OpenModel, component: &str) -> Result<Self, WeightsError> {
        let (mut table, mut files) = (Self::default(), HashMap::new());
        for (number, layer) in model.layers().iter().enumerate() {
            if let Some(name) = tensor_layer_name(layer).filter(|name| is_in_component(name, component)) {
                let file = read_once(&mut files, model, number, layer, name)?;
                table.add_layer(&file, name, component)?;
            }
        }
        if table.tensors.is_empty() {
            let (model, component) = (model.name().to_owned(), component.to_owned());
            return Err(WeightsError::NoWeights { model, component });
        }
        table.mark_separate_parts();
        Ok(table)
    }

    fn add_layer(&mut self, file: &File, layer: &str, component: &str) -> Result<(), WeightsError> {
        let declared = quantization::of_file(&file.header);
        self.quant_type = self.quant_type.take().or(declared.quant_type);
        self.group_size = self.group_size.or(declared.group_size);
        let name = strip_component(layer, component);
        match tensor_key(&file.header, layer, component) {
            Some(key) => self.add_tensor(file, layer, key, name.to_owned()),
            None => self.add_group(file, layer, component, name),
        }
    }

    /// Adds a tensor with its parts; `key` is its name in the file.
    fn add_tensor(&mut self, file: &File, layer: &str, key: &str, name: String) -> Result<(), WeightsError> {
        for (suffix, api_suffix) in PARTS {
            let has_scale = file.header.tensor(&format!("{key}.scale")).is_some();
            if let Some(part) = file.header.tensor(&format!("{key}{suffix}")).filter(|_| has_scale) {
                self.insert(file, layer, part, format!("{name}{api_suffix}"), Some(name.clone()))?;
            }
        }
        match file.header.tensor(key) {
            Some(tensor) => self.insert(file, layer, tensor, name, None),
            None => Ok(()),
        }
    }

    /// Adds a group: all tensors of the file, with their parts.
    fn add_group(
        &mut self,
        file: &File,
        layer: &str,
        component: &str,
        group: &str,
    ) -> Result<(), WeightsError> {
        let mut members = Vec::new();
        for tensor in file.header.tensors().iter().filter(|tensor| !is_part(&file.header, tensor.name())) {
            let name = member_name(tensor.name(), layer, component);
            members.push(name.clone());
            self.add_tensor(file, layer, tensor.name(), name)?;
        }
        self.groups.insert(group.to_owned(), members);
        Ok(())
    }

    fn insert(
        &mut self,
        file: &File,
        layer: &str,
        tensor: &Tensor,
        name: String,
        part_of: Option<String>,
    ) -> Result<(), WeightsError> {
        if self.tensors.len() >= MAX_TENSORS {
            return Err(WeightsError::TooMany { limit: MAX_TENSORS });
        }
        let bytes = file.bytes.part(tensor.offset_in_file(), tensor.size_bytes());
        let weight = Weight {
            dtype: tensor.dtype(),
            shape: tensor.shape().to_vec(),
            // `Header::parse` has checked that the tensor lies within these bytes.
            bytes: bytes.unwrap_or_default(),
            quantization: quantization::of_tensor(&file.header, tensor.name()),
            part_of,
            layer: layer.into(),
        };
        match self.tensors.insert(name.clone(), weight) {
            None => Ok(()),
            Some(first) => {
                let (first, second) = (first.layer.to_string(), layer.to_owned());
                Err(WeightsError::Ambiguous { name, first, second })
            }
        }
    }

    /// Marks the parts that are separate layers, as in models of February 2026.
    fn mark_separate_parts(&mut self) {
        let names: Vec<String> = self.tensors.keys().cloned().collect();
        for name in names {
            for (_, api_suffix) in PARTS {
                let base = name.strip_suffix(api_suffix);
                let base = base.filter(|base| {
                    self.tensors.contains_key(*base) && self.tensors.contains_key(&scale_name(base))
                });
                if let (Some(base), Some(part)) = (base, self.tensors.get_mut(&name)) {
                    part.part_of.get_or_insert_with(|| base.to_owned());
                }
            }
        }
    }
}

/// The layer's name, if the layer is a tensor or a group.
fn tensor_layer_name(layer: &OpenLayer) -> Option<&str> {
    layer.name.as_deref().filter(|_| layer.media_type.component() == "tensor")
}

fn is_in_component(layer: &str, component: &str) -> bool {
    component.is_empty() || strip_component(layer, component).len() < layer.len()
}

/// The name without the component, if it starts with it.
fn strip_component<'n>(name: &'n str, component: &str) -> &'n str {
    let rest = name.strip_prefix(component).and_then(|rest| rest.strip_prefix('/'));
    rest.filter(|_| !component.is_empty()).unwrap_or(name)
}

/// Reads the header of a layer, unless the same file was read for another layer.
fn read_once(
    files: &mut HashMap<Digest, Arc<File>>,
    model: &OpenModel,
    number: usize,
    layer: &OpenLayer,
    name: &str,
) -> Result<Arc<File>, WeightsError> {
    if let Some(file) = files.get(&layer.digest) {
        return Ok(Arc::clone(file));
    }
    let bytes = model.layer_bytes(number)?;
    let error = |reason| WeightsError::Layer { layer: name.to_owned(), reason };
    let header = Header::parse(&bytes, bytes.len() as u64).map_err(error)?;
    let file = Arc::new(File { header, bytes });
    files.insert(layer.digest, Arc::clone(&file));
    Ok(file)
}

/// The name in the file of the tensor that the layer is named after; `None` for a group.
fn tensor_key<'n>(header: &Header, layer: &'n str, component: &str) -> Option<&'n str> {
    let mut keys = vec![strip_component(layer, component), layer];
    // Even if all components are open, the names in a file may lack their component.
    keys.extend(layer.split_once('/').map(|(_, rest)| rest));
    keys.push(LEGACY_KEY);
    keys.into_iter().find(|key| header.tensor(key).is_some())
}

/// Whether a tensor is a part of another one in the same file.
fn is_part(header: &Header, name: &str) -> bool {
    PARTS.into_iter().any(|(suffix, _)| {
        name.strip_suffix(suffix).is_some_and(|base| {
            let has = |name: &str| header.tensor(name).is_some();
            has(base) && has(&format!("{base}.scale"))
        })
    })
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
