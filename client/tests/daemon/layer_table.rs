// The table of models that have one safetensors file per tensor, which the tests of all clients read, and a fake
// daemon that serves them. (No `//!` here: tests of two packages include this file.)

use std::collections::BTreeMap;

use blobd_store_format::digest::Digest;
use blobd_store_format::safetensors::{Dtype, HeaderWriter};
use serde::Deserialize;
use serde_json::Value as Json;

use crate::fake::FakeModel;

pub(crate) const TENSOR: &str = "application/vnd.ollama.image.tensor";
pub(crate) const JSON: &str = "application/vnd.ollama.image.json";

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Table {
    #[serde(rename = "about")]
    _about: String,
    pub(crate) models: Vec<Model>,
    pub(crate) refused: Vec<Refused>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Model {
    pub(crate) name: String,
    pub(crate) layers: Vec<Layer>,
    pub(crate) json: BTreeMap<String, Json>,
    pub(crate) components: Vec<String>,
    pub(crate) opened: Vec<Opened>,
}

/// A file whose header is the text, or one with these tensors.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Layer {
    pub(crate) name: String,
    #[serde(default)]
    metadata: BTreeMap<String, String>,
    #[serde(default)]
    tensors: Vec<(String, String, Vec<u64>)>,
    header: Option<String>,
    #[serde(default)]
    data: usize,
    length: Option<u64>,
    file_of: Option<usize>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Refused {
    pub(crate) what: String,
    header: String,
    data: usize,
    length: Option<u64>,
}

/// What a client finds, or why it finds nothing.
#[derive(Debug, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
pub(crate) enum Opened {
    Failed { component: String, error: String, words: String },
    Found(Found),
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Found {
    pub(crate) component: String,
    pub(crate) quantization: (Option<String>, Option<u32>),
    pub(crate) tensors: BTreeMap<String, FoundTensor>,
    pub(crate) groups: BTreeMap<String, Vec<String>>,
}

#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct FoundTensor {
    pub(crate) dtype: String,
    pub(crate) shape: Vec<u64>,
    pub(crate) layer: usize,
    pub(crate) start: usize,
    pub(crate) size: usize,
    #[serde(default)]
    pub(crate) part: bool,
    pub(crate) quantization: Option<(Option<String>, Option<u32>)>,
}

/// The table in the repository.
pub(crate) fn table() -> Table {
    serde_json::from_str(include_str!("../tensor_layers.json")).unwrap()
}

/// A model with these layers, and layers of JSON.
pub(crate) fn model<'l>(
    layers: impl IntoIterator<Item = &'l Layer>,
    json: &BTreeMap<String, Json>,
) -> FakeModel {
    let named = |(number, layer): (usize, &'l Layer)| (TENSOR, layer.name.clone(), layer.file(number));
    let tensors = layers.into_iter().enumerate().map(named);
    let documents = json.iter().map(|(name, json)| (JSON, name.clone(), json.to_string().into_bytes()));
    let files: Vec<_> = tensors.chain(documents).collect();
    model_of_files(files.iter().map(|(media_type, name, bytes)| (*media_type, &**name, &**bytes)))
}

/// A model of files, each with its media type and name.
pub(crate) fn model_of_files<'f>(files: impl IntoIterator<Item = (&'f str, &'f str, &'f [u8])>) -> FakeModel {
    let mut model = FakeModel::new();
    model.head.layers.clear();
    model.pieces.clear();
    for (media_type, name, bytes) in files {
        let fd = model.add_file(bytes);
        let number = model.add_layer(media_type, Some(fd), u64::try_from(bytes.len()).unwrap());
        model.head.layers[number].name = Some(name.to_owned());
        model.head.layers[number].digest = Digest::of(bytes);
    }
    model
}

/// A part of the data of the layer with this number.
pub(crate) fn data(number: usize, start: usize, size: usize) -> Vec<u8> {
    (start..start + size).map(|place| u8::try_from((place + 17 * number) % 250 + 1).unwrap()).collect()
}

impl Refused {
    pub(crate) fn layer(&self) -> Layer {
        Layer {
            name: "w".to_owned(),
            metadata: BTreeMap::new(),
            tensors: Vec::new(),
            header: Some(self.header.clone()),
            data: self.data,
            length: self.length,
            file_of: None,
        }
    }
}

impl Layer {
    /// The layer's file; its number is this.
    fn file(&self, number: usize) -> Vec<u8> {
        let number = self.file_of.unwrap_or(number);
        let Some(header) = &self.header else {
            let (mut file, size) = self.written_header();
            file.extend(data(number, 0, size));
            return file;
        };
        let length = self.length.unwrap_or(u64::try_from(header.len()).unwrap());
        [&length.to_le_bytes(), header.as_bytes(), &data(number, 0, self.data)].concat()
    }

    /// The header with its length, and the size of the data.
    fn written_header(&self) -> (Vec<u8>, usize) {
        let (mut writer, mut size) = (HeaderWriter::new(), 0);
        for (key, value) in &self.metadata {
            writer.metadata(key, value);
        }
        for (name, dtype, shape) in &self.tensors {
            let dtype = Dtype::from_name(dtype).unwrap();
            writer.tensor(name, dtype, shape).unwrap();
            size += usize::try_from(shape.iter().product::<u64>() * dtype.bits() / 8).unwrap();
        }
        (writer.header().unwrap(), size)
    }
}
