//! Why metadata cannot be edited.

use super::value::EditType;
use blobd_store_format::gguf::GgufError;

/// Why a header cannot be edited as requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum EditError {
    /// The key describes the file or its tensors, which an edit does not change.
    #[error("metadata key {key:?}: cannot be edited: it {reason}")]
    Reserved {
        /// The key.
        key: String,
        /// What the key describes.
        reason: &'static str,
    },
    /// One key has several edits.
    #[error("metadata key {key:?}: is edited twice")]
    Twice {
        /// The key.
        key: String,
    },
    /// The text is not a value of the type.
    #[error("metadata key {key:?}: {text:?} is not a value of type {value_type}{}", hint(value_type))]
    Value {
        /// The key.
        key: String,
        /// The text, truncated.
        text: String,
        /// The type.
        value_type: EditType,
    },
    /// The edit would change the length of an array that has one element per token.
    #[error(
        "metadata key {key:?}: wrong number of elements: expected {expected}, one for each token, found {found}"
    )]
    Tokens {
        /// The key.
        key: String,
        /// The new number of elements.
        found: usize,
        /// The number of tokens.
        expected: usize,
    },
    /// The new header would be invalid, for example too long.
    #[error(transparent)]
    Gguf(#[from] GgufError),
}

fn hint(value_type: &EditType) -> &'static str {
    if value_type.is_array() { ", which is written as JSON, such as [1,2]" } else { "" }
}
