//! The parts of a file in its recipe.

use std::borrow::Cow;

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::digest::Digest;
use crate::stored_file::{FilePiece, Source};

/// One contiguous part of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(untagged)]
pub enum Piece {
    /// A segment: `length` bytes of a blob, starting at `offset`.
    Blob {
        /// The blob.
        blob: Digest,
        /// Where in the blob the segment starts.
        offset: u64,
        /// Its length in bytes.
        length: u64,
    },
    /// Zero bytes: padding.
    Zeros {
        /// Their number.
        zeros: u64,
    },
    /// Bytes outside any blob: padding that is not zero, or trailing bytes.
    Literal {
        /// The bytes; base64 in JSON.
        #[serde(serialize_with = "literal::serialize")]
        literal: Vec<u8>,
    },
}

impl Piece {
    /// The piece's length in bytes.
    #[must_use]
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

/// Not derived: for an untagged enum serde first copies each piece into a tree of values, which made pieces
/// half of the time that reading a recipe takes.
impl<'de> Deserialize<'de> for Piece {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let RawPiece { blob, offset, length, zeros, literal } = RawPiece::deserialize(deserializer)?;
        match (blob, offset, length, zeros, literal) {
            (Some(blob), Some(offset), Some(length), None, None) => Ok(Self::Blob { blob, offset, length }),
            (None, None, None, Some(zeros), None) => Ok(Self::Zeros { zeros }),
            (None, None, None, None, Some(Literal(literal))) => Ok(Self::Literal { literal }),
            _ => Err(D::Error::custom("a piece is none of blob with offset and length, zeros, literal")),
        }
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPiece {
    blob: Option<Digest>,
    offset: Option<u64>,
    length: Option<u64>,
    zeros: Option<u64>,
    literal: Option<Literal>,
}

#[derive(Deserialize)]
struct Literal(#[serde(deserialize_with = "literal::deserialize")] Vec<u8>);

/// Bytes as base64 in JSON, for serde's `with`.
pub mod literal {
    use super::*;

    /// Writes the bytes as base64.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(bytes))
    }

    /// Reads base64.
    ///
    /// # Errors
    /// When the text is not base64.
    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        BASE64.decode(text.as_bytes()).map_err(D::Error::custom)
    }
}
