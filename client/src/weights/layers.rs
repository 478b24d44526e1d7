//! Maps the layers of an open model and reads their headers.

use std::collections::HashMap;
use std::collections::hash_map::Entry;

use blobd_model::tensor_layers::{LayerTensor, TensorLayers};
use blobd_store_format::digest::Digest;
use blobd_store_format::safetensors::Header;

use super::error::WeightsError;
use crate::model::{BlobSlice, OpenModel};
use crate::protocol::response::OpenLayer;

/// The tensors in a model's layers, and the layers' files in memory.
#[derive(Debug)]
pub(super) struct Layers {
    pub(super) tensors: TensorLayers,
    /// By the number of the first layer of each file.
    files: HashMap<usize, BlobSlice>,
}

/// One tensor, or a part of a quantised one.
pub(super) struct Weight<'l> {
    pub(super) tensor: &'l LayerTensor,
    pub(super) bytes: BlobSlice,
}

impl Layers {
    /// Reads the headers of all tensor layers of the component, each file once.
    pub(super) fn read(model: &OpenModel, component: &str) -> Result<Self, WeightsError> {
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

    pub(super) fn weight(&self, name: &str) -> Option<Weight<'_>> {
        let tensor = self.tensors.tensor(name)?;
        let bytes = self.files.get(&tensor.layer())?.part(tensor.offset_in_file(), tensor.size_bytes());
        // `Header::parse` has checked that the tensor lies within these bytes.
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
pub(super) fn tensor_layer_name(layer: &OpenLayer) -> Option<&str> {
    layer.name.as_deref().filter(|_| layer.media_type.component() == "tensor")
}
