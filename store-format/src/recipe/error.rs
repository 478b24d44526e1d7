//! Errors of recipes.

use super::Recipe;
use crate::digest::Digest;

/// Why a recipe is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// Not JSON, or not the expected JSON.
    #[error("recipe: {0}")]
    Json(#[from] serde_json::Error),
    /// The version is not supported.
    #[error("recipe: version {found}, this blobd reads 1 to {}; upgrade blobd", Recipe::VERSION)]
    Version {
        /// The version found.
        found: u32,
    },
    /// The fields do not belong to the kind, or the kind does not belong to the version.
    #[error("recipe: its fields are not those of version {version} and kind {kind}")]
    Fields {
        /// The version.
        version: u32,
        /// The kind, as the document states it.
        kind: &'static str,
    },
    /// The pieces do not add up to the file's size.
    #[error("recipe: pieces of {pieces} bytes, file of {declared}")]
    Size {
        /// The sum of the pieces' lengths.
        pieces: u64,
        /// The size the recipe declares.
        declared: u64,
    },
    /// A piece has no bytes, or its end does not fit 64 bits.
    #[error("recipe: piece {index} is empty or ends beyond 2^64")]
    Piece {
        /// Its place in the list.
        index: usize,
    },
    /// The recipe has more padding than blobd writes.
    #[error("recipe: too much padding up to piece {index}: expected at most {limit} bytes, found {found}")]
    Padding {
        /// The piece at which the limit is exceeded.
        index: usize,
        /// The padding in that piece, or in all pieces up to it.
        found: u64,
        /// The most there may be.
        limit: u64,
    },
    /// The recipe has changed since it was written.
    #[error("recipe: changed since it was written: expected digest {expected}, found {found}")]
    Check {
        /// The digest of the content.
        found: Digest,
        /// The digest in the recipe.
        expected: Digest,
    },
    /// A tensor lies outside the file's blobs.
    #[error("recipe: tensor {name:?}: bytes {offset}+{size} are not in a blob of this file")]
    Tensor {
        /// The tensor.
        name: String,
        /// Its declared offset.
        offset: u64,
        /// Its declared size.
        size: u64,
    },
    /// Two tensors of one file have the same name.
    #[error("recipe: tensor {name:?} comes twice")]
    DuplicateTensor {
        /// The name.
        name: String,
    },
    /// A file has tensors and no format, so nobody could interpret them.
    #[error("recipe: {count} tensors of a file without a format")]
    NoFormat {
        /// The number of tensors.
        count: usize,
    },
    /// The content of a compressed file that is no archive with files.
    #[error("recipe: the content of a compressed file has no files in it")]
    Packed,
    /// A file that is stored whole consists of something else than the blob of its digest.
    #[error("recipe: the file is stored whole, but its pieces are not the one blob of its digest")]
    Whole,
    /// A file in an archive is not in it, or overlaps another.
    #[error("recipe: file {path:?} in the archive: not in it, or overlaps another file")]
    Member {
        /// Its path.
        path: String,
    },
    /// A tensor's experts do not add up to its size.
    #[error("recipe: tensor {name:?}: {count} experts of {stride} bytes do not make {size} bytes")]
    Experts {
        /// The tensor.
        name: String,
        /// The declared number of experts.
        count: u64,
        /// The declared size of each.
        stride: u64,
        /// The tensor's size.
        size: u64,
    },
    /// The number of digests or literals does not match the plan.
    #[error("recipe: wrong number of {what}: expected {expected} as in the plan, found {found}")]
    Parts {
        /// The kind of things that were counted.
        what: &'static str,
        /// The number given.
        found: usize,
        /// The number in the plan.
        expected: usize,
    },
}
