//! Errors in the tensors of a model's layers.

use blobd_model::convert::ConvertError;
use blobd_model::tensor_layers::TensorLayersError;
use blobd_store_format::safetensors::SafetensorsError;

use crate::error::{ClientError, ModelError};
use crate::protocol::error::ErrorCode;

/// Why the tensors of a model's layers cannot be opened or read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The model cannot be opened.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A layer cannot be mapped.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model, or the requested component, has no tensor layer.
    #[error("model {model}: no layer is a tensor{}; {}", of_component(.component), hint(.component))]
    NoWeights {
        /// The model.
        model: String,
        /// The requested component; empty for all.
        component: String,
    },
    /// No tensor has this name.
    #[error("model {model}: no tensor {name:?}; ManifestWeights::names lists its tensors")]
    NoTensor {
        /// The model.
        model: String,
        /// The requested name.
        name: String,
    },
    /// The name is that of a group: a layer with several tensors.
    #[error("{name:?} is a group of tensors; request one of them{}", example(.first))]
    IsGroup {
        /// The group's name.
        name: String,
        /// One of its tensors.
        first: Option<String>,
    },
    /// A tensor cannot be converted to the requested type.
    #[error("tensor {name:?}: {source}; ManifestWeights::tensor returns it as it is stored")]
    Convert {
        /// The tensor's name.
        name: String,
        /// Which type is in the way.
        source: ConvertError,
    },
    /// A layer is not a safetensors file.
    #[error("layer {layer:?}: {reason}; run `blobd verify`")]
    Layer {
        /// The layer's name.
        layer: String,
        /// The fault.
        reason: SafetensorsError,
    },
    /// Two layers have a tensor with the same name, or there are too many.
    #[error(transparent)]
    Layers(#[from] TensorLayersError),
    /// A JSON file of the model is not JSON.
    #[error("file {name:?}: {reason}")]
    Json {
        /// The file's path.
        name: String,
        /// The fault.
        reason: String,
    },
}

impl WeightsError {
    /// The kind of failure.
    #[must_use]
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
