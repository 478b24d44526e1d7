//! From layers to names: which tensor is where, whatever form its file has.

use std::collections::{BTreeMap, HashMap};
use std::sync::Arc;

use blobd_store_format::digest::Digest;
use blobd_store_format::safetensors::{Dtype, Header, Tensor};

use super::error::WeightsError;
use super::quantization::{self, Quantization};
use crate::model::{BlobSlice, OpenModel};
use crate::protocol::response::OpenLayer;

/// Everything that a model's layers have.
#[derive(Debug, Default)]
pub(super) struct Table {
    pub(super) tensors: BTreeMap<String, Weight>,
    pub(super) groups: BTreeMap<String, Vec<String>>,
    /// What the first file that says so says of itself.
    pub(super) quant_type: Option<String>,
    pub(super) group_size: Option<u32>,
}

/// One tensor, or a part of a quantised one.
#[derive(Clone, Debug)]
pub(super) struct Weight {
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) bytes: BlobSlice,
    /// What its file says about it.
    pub(super) quantization: Quantization,
    /// For a scale or bias, the tensor it belongs to.
    pub(super) part_of: Option<String>,
    /// The name of the layer it is in.
    pub(super) layer: Arc<str>,
}

/// A layer's file.
struct File {
    header: Header,
    bytes: BlobSlice,
}

/// The parts of a quantised tensor: how they end in a file, and how they are shown.
const PARTS: [(&str, &str); 3] =
    [(".scale", "_scale"), (".bias", "_qbias"), (".global_scale", "_global_scale")];
/// The most tensors of a model, parts included: twice as many as the largest models have experts'
/// matrices with scales and biases, each for itself.
const MAX_TENSORS: usize = 1 << 18;
/// The only tensor of a file of January 2026.
const LEGACY_KEY: &str = "data";

pub(super) fn scale_name(name: &str) -> String {
    format!("{name}_scale")
}

pub(super) fn bias_name(name: &str) -> String {
    format!("{name}_qbias")
}

impl Table {
    /// Reads the headers of all layers that are tensors and belong to the component, each file once.
    pub(super) fn read(model: &OpenModel, component: &str) -> Result<Self, WeightsError> {
        let (mut table, mut files) = (Self::default(), HashMap::new());
        for (number, layer) in model.layers().iter().enumerate() {
            if let Some(name) = tensor_layer(layer).filter(|name| is_of(name, component)) {
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
        let said = quantization::of_file(&file.header);
        self.quant_type = self.quant_type.take().or(said.quant_type);
        self.group_size = self.group_size.or(said.group_size);
        let shown = without(layer, component);
        match own_key(&file.header, layer, component) {
            Some(key) => self.add_tensor(file, layer, key, shown.to_owned()),
            None => self.add_group(file, layer, component, shown),
        }
    }

    /// A tensor with its parts.
    fn add_tensor(&mut self, file: &File, layer: &str, key: &str, shown: String) -> Result<(), WeightsError> {
        for (suffix, ending) in PARTS {
            let has_scale = file.header.tensor(&format!("{key}.scale")).is_some();
            if let Some(part) = file.header.tensor(&format!("{key}{suffix}")).filter(|_| has_scale) {
                self.insert(file, layer, part, format!("{shown}{ending}"), Some(shown.clone()))?;
            }
        }
        match file.header.tensor(key) {
            Some(tensor) => self.insert(file, layer, tensor, shown, None),
            None => Ok(()),
        }
    }

    /// All tensors of a file that are no part of another.
    fn add_group(
        &mut self,
        file: &File,
        layer: &str,
        component: &str,
        group: &str,
    ) -> Result<(), WeightsError> {
        let mut members = Vec::new();
        for tensor in file.header.tensors().iter().filter(|tensor| !is_part(&file.header, tensor.name())) {
            let shown = shown_member(tensor.name(), layer, component);
            members.push(shown.clone());
            self.add_tensor(file, layer, tensor.name(), shown)?;
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
            // The header was checked against the length of these very bytes.
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

    /// Parts that have layers of their own, as in February 2026.
    fn mark_separate_parts(&mut self) {
        let names: Vec<String> = self.tensors.keys().cloned().collect();
        for name in names {
            for (_, ending) in PARTS {
                let base = name.strip_suffix(ending);
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

/// The name of a layer that is one tensor or a group of them.
fn tensor_layer(layer: &OpenLayer) -> Option<&str> {
    layer.name.as_deref().filter(|_| layer.media_type.component() == "tensor")
}

fn is_of(layer: &str, component: &str) -> bool {
    component.is_empty() || without(layer, component).len() < layer.len()
}

/// A name without the component in front of it, if it is there.
fn without<'n>(name: &'n str, component: &str) -> &'n str {
    let rest = name.strip_prefix(component).and_then(|rest| rest.strip_prefix('/'));
    rest.filter(|_| !component.is_empty()).unwrap_or(name)
}

/// Reads a layer's header, unless the same file has been another layer before.
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
    let bad = |reason| WeightsError::Layer { layer: name.to_owned(), reason };
    let header = Header::parse(&bytes, bytes.len() as u64).map_err(bad)?;
    let file = Arc::new(File { header, bytes });
    files.insert(layer.digest, Arc::clone(&file));
    Ok(file)
}

/// The key under which a file has the tensor that its layer is named after; `None` for a group.
fn own_key<'n>(header: &Header, layer: &'n str, component: &str) -> Option<&'n str> {
    let mut keys = vec![without(layer, component), layer];
    // With all components open at once, a file may still leave out its own.
    keys.extend(layer.split_once('/').map(|(_, rest)| rest));
    keys.push(LEGACY_KEY);
    keys.into_iter().find(|key| header.tensor(key).is_some())
}

/// Whether a tensor of a file is a part of another one there.
fn is_part(header: &Header, name: &str) -> bool {
    PARTS.into_iter().any(|(suffix, _)| {
        name.strip_suffix(suffix).is_some_and(|base| {
            let has = |name: &str| header.tensor(name).is_some();
            has(base) && has(&format!("{base}.scale"))
        })
    })
}

/// The name of a group's tensor: without the component if that was asked for, and with the one of
/// its layer if not.
fn shown_member(key: &str, layer: &str, component: &str) -> String {
    let own = layer.split_once('/').map_or("", |(own, _)| own);
    match component {
        "" if !own.is_empty() => format!("{own}/{}", without(key, own)),
        _ => without(key, component).to_owned(),
    }
}
