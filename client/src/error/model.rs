//! Errors of an open model.

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
        /// The requested name.
        name: String,
    },
    /// No layer with this number.
    #[error("layer {layer}: no such layer, the model has {count}")]
    NoLayer {
        /// The requested number.
        layer: usize,
        /// The number of them.
        count: usize,
    },
    /// The layer has no GGUF header.
    #[error("{}: no GGUF header", .layer.map_or("model".to_owned(), |layer| format!("layer {layer}")))]
    NoHeader {
        /// The requested layer; any if absent.
        layer: Option<usize>,
    },
    /// A layer's GGUF header is invalid, or no common header can be made.
    #[error("{}{reason}", .layer.map_or(String::new(), |layer| format!("layer {layer}: ")))]
    Gguf {
        /// The layer; absent for the header to be made.
        layer: Option<usize>,
        /// The fault in it.
        reason: GgufError,
    },
    /// A tensor was not opened, so no image of the file can be made.
    #[error("layer {layer}: tensor {name:?} was not requested; open with TensorSelection::All")]
    NotOpened {
        /// The layer's number.
        layer: usize,
        /// The tensor.
        name: String,
    },
    /// The tensor table and the file's header disagree about a size.
    #[error(
        "tensor {name:?}: wrong size: expected {expected} bytes by its type and shape, found {found}; run `blobd verify`"
    )]
    Size {
        /// The tensor.
        name: String,
        /// Its size in the table.
        found: u64,
        /// Its size by type and shape.
        expected: u64,
    },
    /// The address space for an image cannot be reserved.
    #[error("image of {length} bytes: {reason}; raise `ulimit -v` or `sysctl vm.max_map_count`")]
    Image {
        /// Its length.
        length: u64,
        /// The kernel's error.
        reason: io::Error,
    },
    /// The layer is a split file, not one blob.
    #[error("layer {layer}: stored in pieces; use write_layer")]
    NotWhole {
        /// Its number.
        layer: usize,
    },
    /// The layer is a split file whose pieces were not requested.
    #[error("layer {layer}: its pieces were not requested; open with FileSelection::All")]
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
        /// The number of them.
        count: usize,
    },
    /// A descriptor's file is shorter than the table says.
    #[error("descriptor {fd}: file too short: expected {expected} bytes, found {found}; run `blobd verify`")]
    Short {
        /// The descriptor's number.
        fd: u32,
        /// Its size.
        found: u64,
        /// The minimum size expected.
        expected: u64,
    },
    /// The file cannot be mapped.
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
    /// The output cannot be written.
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
