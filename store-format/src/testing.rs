//! Helpers for unit tests of several crates.
#![allow(clippy::unwrap_used, reason = "for tests alone")]

use crate::digest::Digest;
use crate::recipe::{Piece, Recipe, TensorEntry};
use crate::tensor::TensorFormat;

/// The recipe of a file of one blob, which has tensors of these names; they overlap.
///
/// # Panics
/// When a name is too long.
pub fn recipe(file: Digest, names: impl IntoIterator<Item = String>) -> Recipe {
    let blob = Digest::of(b"blob");
    let tensor = |name: String| TensorEntry {
        name: name.into(),
        type_name: "F32".into(),
        shape: vec![1].into(),
        digest: blob,
        offset: 0,
        size: 4,
        experts: None,
    };
    let pieces = vec![Piece::Blob { blob, offset: 0, length: 4 }];
    Recipe::new(file, TensorFormat::Gguf, pieces, names.into_iter().map(tensor).collect::<Vec<_>>()).unwrap()
}
