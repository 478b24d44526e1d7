//! Why a file cannot be rewritten.

use blobd_store_format::gguf::GgmlType;
use blobd_store_format::gguf::GgufError;

/// Why files cannot be rewritten as requested.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum RewriteError {
    /// The list of sources is empty.
    #[error("no GGUF file")]
    NoSource,
    /// The sources are not exactly the shards of one model.
    #[error(
        "not the shards of one model: expected shard {expected} of {found}, found shard {} of {count}",
        number.map_or_else(|| "none".to_owned(), |number| number.to_string())
    )]
    Shards {
        /// The number of sources.
        found: u64,
        /// The declared number of shards.
        count: u64,
        /// The number of the shard, from 0, if it has one.
        number: Option<u64>,
        /// The expected number.
        expected: u64,
    },
    /// The source is not a shard, so there is nothing to merge.
    #[error("is one file already, nothing to merge")]
    NotSharded,
    /// The layout of the type is unknown.
    #[error(
        "tensor {name:?}: the byte order of {ggml_type} cannot be changed, because its layout is not known"
    )]
    CannotSwap {
        /// The tensor.
        name: String,
        /// Its type.
        ggml_type: GgmlType,
    },
    /// The number of shards is a 16-bit number.
    #[error("{found} shards, at most {} possible; use a larger maximum size", u16::MAX)]
    TooManyShards {
        /// The number of shards.
        found: usize,
    },
    /// The tensors do not fit 64 bits.
    #[error("the tensors end beyond 2^64 bytes")]
    Size,
    /// A source or a resulting header is invalid.
    #[error(transparent)]
    Gguf(#[from] GgufError),
}
