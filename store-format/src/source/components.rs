//! What is pulled with a model's weights.

use serde::{Deserialize, Serialize};

/// Which of the files that belong to a model are pulled with its weights.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Components {
    /// The projector.
    #[serde(default)]
    pub projector: Projector,
    /// The model for speculative decoding.
    #[serde(default)]
    pub draft: Draft,
}

impl Components {
    /// What belongs to the model.
    pub const DEFAULT: Self = Self { projector: Projector::Nearest, draft: Draft::Nearest };

    /// Whether nothing but the default is asked for.
    #[must_use]
    pub fn are_default(&self) -> bool {
        *self == Self::DEFAULT
    }
}

/// The projector that is pulled.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Projector {
    /// The one that belongs to the model, if there is one.
    #[default]
    Nearest,
    /// None.
    None,
    /// The one with this name: its path, the name of its file, or a tag such as `BF16`.
    Named(String),
}

/// The model for speculative decoding that is pulled.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Draft {
    /// The one that belongs to the model, if there is one.
    #[default]
    Nearest,
    /// None.
    None,
}
