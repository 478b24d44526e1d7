//! The parts of a file in its recipe.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serializer};

use crate::digest::Digest;
use crate::stored_file::{FilePiece, Source};

/// One contiguous part of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Piece {
    /// A segment: `length` bytes of a blob, starting at `offset`.
    Blob {
        blob: Digest,
        /// Where in the blob the segment starts.
        offset: u64,
        length: u64,
    },
    /// Zero bytes: padding.
    Zeros { zeros: u64 },
    /// Bytes outside any blob: padding that is not zero, or trailing bytes.
    Literal { literal: Vec<u8> },
}

impl Piece {
    pub fn length(&self) -> u64 {
        self.source().length()
    }
}

impl FilePiece for Piece {
    type Blob = Digest;

    fn whole(blob: Digest, size: u64) -> Self {
        Self::Blob { blob, offset: 0, length: size }
    }

    fn source(&self) -> Source<'_, Digest> {
        match self {
            Self::Blob { blob, offset, length } => {
                Source::Blob { blob: *blob, offset: *offset, length: *length }
            }
            Self::Zeros { zeros } => Source::Zeros { length: *zeros },
            Self::Literal { literal } => Source::Literal { bytes: literal },
        }
    }
}

impl From<Source<'_, Digest>> for Piece {
    fn from(source: Source<'_, Digest>) -> Self {
        match source {
            Source::Blob { blob, offset, length } => Self::Blob { blob, offset, length },
            Source::Zeros { length } => Self::Zeros { zeros: length },
            Source::Literal { bytes } => Self::Literal { literal: bytes.to_vec() },
        }
    }
}

/// Bytes as base64 in JSON, for serde's `with`.
pub mod literal {
    use super::*;

    /// Writes the bytes as base64.
    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(bytes))
    }

    /// Reads base64.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        BASE64.decode(text.as_bytes()).map_err(D::Error::custom)
    }
}
