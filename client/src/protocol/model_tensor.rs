//! The tensors in the description of a model.

use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::{Experts, TensorEntry};
pub use blobd_store_format::tensor::TensorFormat;
use serde::{Deserialize, Serialize};

/// A tensor of a model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ModelTensor {
    /// Its name.
    pub name: String,
    /// The name of its type: in a GGUF file the ggml type, such as `Q4_K`; in a layer of its own the element
    /// type, such as `BF16`, or how it is quantised, such as `NVFP4`.
    #[serde(rename = "type")]
    pub type_name: String,
    /// The format of its file, which gives the order of its dimensions. Daemons before it was added list only
    /// tensors of GGUF files.
    #[serde(default)]
    pub format: TensorFormat,
    /// Its dimensions: of GGUF the fastest first, of safetensors the slowest first. Of a quantised tensor in
    /// safetensors, those of its unpacked elements.
    pub shape: Vec<u64>,
    /// The blob that holds it.
    pub digest: Digest,
    /// Its offset in the blob.
    pub offset: u64,
    /// Its size in bytes. Scales and biases in the same blob are not included.
    pub size: u64,
    /// The position of each expert, if it is a stack of experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
}

impl ModelTensor {
    /// A tensor of a file of this format.
    #[must_use]
    pub fn new(format: TensorFormat, entry: &TensorEntry) -> Self {
        let TensorEntry { name, type_name, shape, digest, offset, size, experts } = entry.clone();
        Self { name, type_name, format, shape, digest, offset, size, experts }
    }
}

/// Without the format.
impl From<ModelTensor> for TensorEntry {
    fn from(tensor: ModelTensor) -> Self {
        let ModelTensor { name, type_name, shape, digest, offset, size, experts, .. } = tensor;
        Self { name, type_name, shape, digest, offset, size, experts }
    }
}
