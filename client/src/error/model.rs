//! Why an open model cannot be read.

use std::io;

use blobd_store_format::gguf::GgufError;

use crate::protocol::error::ErrorCode;

/// Why an open model cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum ModelError {
    /// No tensor with this name was opened.
    #[error("model {model}: no tensor {name:?}")]
    NoTensor {
        /// The model.
        model: String,
        /// The name asked for.
        name: String,
    },
    /// No layer with this number.
    #[error("layer {layer}: no such layer, the model has {count}")]
    NoLayer {
        /// The number asked for.
        layer: usize,
        /// How many there are.
        count: usize,
    },
    /// No GGUF header there.
    #[error("{}: no GGUF header", .layer.map_or("model".to_owned(), |layer| format!("layer {layer}")))]
    NoHeader {
        /// The layer asked for; any if absent.
        layer: Option<usize>,
    },
    /// A layer's GGUF header cannot be read, or none can be made for one file of all.
    #[error("{}{reason}", .layer.map_or(String::new(), |layer| format!("layer {layer}: ")))]
    Gguf {
        /// The layer; absent for the header to be made.
        layer: Option<usize>,
        /// What is wrong with it.
        reason: GgufError,
    },
    /// A tensor of a file was not asked for, so there is no image of the file.
    #[error("layer {layer}: tensor {name:?} was not asked for; open with TensorSelection::All")]
    NotOpened {
        /// The layer's number.
        layer: usize,
        /// The tensor.
        name: String,
    },
    /// The table and the file's header differ about a tensor.
    #[error("tensor {name:?}: {found} bytes in the table, {expected} by its header; run `blobd verify`")]
    Size {
        /// The tensor.
        name: String,
        /// Its size in the table.
        found: u64,
        /// Its size by type and shape.
        expected: u64,
    },
    /// There is no room for the image of a file.
    #[error("image of {length} bytes: {reason}; raise `ulimit -v` or `sysctl vm.max_map_count`")]
    Image {
        /// How long it would be.
        length: u64,
        /// What the kernel says.
        reason: io::Error,
    },
    /// The layer is a split file, not one blob.
    #[error("layer {layer}: stored in pieces; use write_layer")]
    NotWhole {
        /// Its number.
        layer: usize,
    },
    /// The layer is a split file, and its pieces were not asked for.
    #[error("layer {layer}: its pieces were not asked for; open with FileSelection::All")]
    NoPieces {
        /// Its number.
        layer: usize,
    },
    /// The layer is not UTF-8.
    #[error("layer {layer}: not UTF-8 text")]
    NotText {
        /// Its number.
        layer: usize,
    },
    /// No descriptor with this number: the location is not from this model.
    #[error("descriptor {fd}: no such descriptor, the model has {count}")]
    NoFd {
        /// The number.
        fd: u32,
        /// How many there are.
        count: usize,
    },
    /// The file behind a descriptor is shorter than the table says.
    #[error("descriptor {fd}: {found} bytes behind it, {expected} expected; run `blobd verify`")]
    Short {
        /// The descriptor's number.
        fd: u32,
        /// How many bytes there are.
        found: u64,
        /// How many there should be at least.
        expected: u64,
    },
    /// The kernel does not map the file.
    #[error("descriptor {fd}: cannot be mapped: {reason}{}", map_hint(.reason))]
    Map {
        /// The descriptor's number.
        fd: u32,
        /// Why not.
        reason: io::Error,
    },
    /// The file cannot be read.
    #[error("descriptor {fd}: cannot be read: {reason}")]
    Read {
        /// The descriptor's number.
        fd: u32,
        /// Why not.
        reason: io::Error,
    },
    /// The file being written cannot be written.
    #[error("layer cannot be written: {0}")]
    Write(io::Error),
}

impl ModelError {
    /// The kind of failure.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::NoTensor { .. } | Self::NoLayer { .. } | Self::NoHeader { .. } => ErrorCode::NotFound,
            Self::NotWhole { .. } | Self::NoPieces { .. } | Self::NotOpened { .. } | Self::NoFd { .. } => {
                ErrorCode::InvalidRequest
            }
            Self::NotText { .. } | Self::Short { .. } | Self::Gguf { .. } | Self::Size { .. } => {
                ErrorCode::Corrupt
            }
            Self::Write(error) if error.kind() == io::ErrorKind::StorageFull => ErrorCode::NoSpace,
            Self::Map { .. } | Self::Read { .. } | Self::Image { .. } | Self::Write(_) => ErrorCode::Internal,
        }
    }

    pub(crate) fn short(fd: u32, found: u64, offset: u64, length: u64) -> Self {
        Self::Short { fd, found, expected: offset.saturating_add(length) }
    }
}

fn map_hint(reason: &io::Error) -> &'static str {
    match reason.kind() {
        io::ErrorKind::OutOfMemory => "; raise `sysctl vm.max_map_count`",
        _ => "",
    }
}
