//! Why the tensors of a model's layers cannot be had.

use blobd_store_format::safetensors::SafetensorsError;

use crate::error::{ClientError, ModelError};
use crate::protocol::error::ErrorCode;

/// Why the tensors of a model's layers cannot be had.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum WeightsError {
    /// The model cannot be opened.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// A layer cannot be mapped.
    #[error(transparent)]
    Model(#[from] ModelError),
    /// The model has no layer of the kind, or none in the component.
    #[error("model {model}: no layer is a tensor{}; {}", of_component(.component), hint(.component))]
    NoWeights {
        /// The model.
        model: String,
        /// The component asked for; empty for all.
        component: String,
    },
    /// No tensor has this name.
    #[error("model {model}: no tensor {name:?}; ManifestWeights::names lists those there are")]
    NoTensor {
        /// The model.
        model: String,
        /// The name asked for.
        name: String,
    },
    /// The name is that of a layer with several tensors.
    #[error("{name:?} is a group of tensors; ask for one of them{}", like(.first))]
    IsGroup {
        /// The group's name.
        name: String,
        /// One of its tensors.
        first: Option<String>,
    },
    /// A layer is no safetensors file.
    #[error("layer {layer:?}: {reason}; run `blobd verify`")]
    Layer {
        /// The layer's name.
        layer: String,
        /// What is wrong.
        reason: SafetensorsError,
    },
    /// Two layers have a tensor of one name.
    #[error("tensor {name:?}: in layer {first:?} and in layer {second:?}")]
    Ambiguous {
        /// The tensor's name.
        name: String,
        /// A layer that has it.
        first: String,
        /// Another.
        second: String,
    },
    /// Layers that name one file many times can make any number of names.
    #[error("model: more than {limit} tensors in its layers")]
    TooMany {
        /// How many are allowed.
        limit: usize,
    },
    /// A JSON file of the model is not JSON.
    #[error("file {name:?}: {reason}")]
    Json {
        /// The file's path.
        name: String,
        /// What is wrong.
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
            Self::IsGroup { .. } => ErrorCode::InvalidRequest,
            Self::Layer { .. } | Self::Ambiguous { .. } | Self::TooMany { .. } | Self::Json { .. } => {
                ErrorCode::InvalidInput
            }
        }
    }
}

fn of_component(component: &str) -> String {
    if component.is_empty() { String::new() } else { format!(" of component {component:?}") }
}

fn hint(component: &str) -> &'static str {
    match component {
        "" => "open it with Client::open, it may be a GGUF model",
        _ => "open all of it to see which components there are",
    }
}

fn like(first: &Option<String>) -> String {
    first.as_ref().map_or_else(String::new, |name| format!(", such as {name:?}"))
}
