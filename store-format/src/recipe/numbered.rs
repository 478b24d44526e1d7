//! Pieces and tensors as a recipe's JSON has them: with the numbers of their blobs in a list that has each digest once.
//!
//! Two thirds of a recipe without that list were digests: a piece and a tensor named each blob, and a packed expert
//! group of 128 experts had its digest 256 times.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::de::{Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::piece::{Piece, literal};
use super::{Experts, RecipeError, TensorEntry};
use crate::digest::Digest;

/// How an entry says which blob it means.
#[derive(Clone, Copy, Debug, Serialize)]
#[serde(untagged)]
pub(super) enum BlobId {
    /// Its place in the recipe's list.
    Number(u64),
    /// In versions before 6, which had no list.
    Digest(Digest),
}

/// Not derived: for an untagged enum serde first copies each value, which would be half of the time that reading a
/// recipe takes.
impl<'de> Deserialize<'de> for BlobId {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct NumberOrDigest;
        impl Visitor<'_> for NumberOrDigest {
            type Value = BlobId;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("the number of a blob, or its digest")
            }

            fn visit_u64<E: serde::de::Error>(self, number: u64) -> Result<BlobId, E> {
                Ok(BlobId::Number(number))
            }

            fn visit_str<E: serde::de::Error>(self, text: &str) -> Result<BlobId, E> {
                let digest = text.parse().map(BlobId::Digest);
                digest.map_err(|_wrong| E::invalid_value(Unexpected::Str(text), &self))
            }
        }
        deserializer.deserialize_any(NumberOrDigest)
    }
}

/// One of: `blob`, `offset` and `length`; `zeros`; `literal`.
#[derive(Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NumberedPiece {
    #[serde(skip_serializing_if = "Option::is_none")]
    blob: Option<BlobId>,
    #[serde(skip_serializing_if = "Option::is_none")]
    offset: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    length: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    zeros: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    literal: Option<Literal>,
}

#[derive(Serialize, Deserialize)]
struct Literal(#[serde(with = "literal")] Vec<u8>);

/// A tensor. `blob` is absent if it has no elements; versions before 6 have `digest` in its place.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NumberedTensor {
    name: String,
    #[serde(rename = "type")]
    type_name: String,
    shape: Vec<u64>,
    blob: Option<u64>,
    digest: Option<Digest>,
    offset: u64,
    size: u64,
    experts: Option<Experts>,
}

/// A tensor as it is written.
#[derive(Serialize)]
pub(super) struct NewTensor<'t> {
    name: &'t str,
    #[serde(rename = "type")]
    type_name: &'t str,
    shape: &'t [u64],
    #[serde(skip_serializing_if = "Option::is_none")]
    blob: Option<u64>,
    offset: u64,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    experts: Option<Experts>,
}

/// Writes an array whose values exist one at a time.
pub(super) struct InOrder<I>(pub(super) I);

impl<I: Iterator<Item: Serialize> + Clone> Serialize for InOrder<I> {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_seq(self.0.clone())
    }
}

/// A blob that other files have parts of too.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct NumberedShared {
    blob: u64,
    size: u64,
}

/// The blobs of a recipe that is read.
pub(super) enum KnownBlobs {
    /// The list, and which of its blobs a piece has used.
    Listed { digests: Vec<Digest>, used: Vec<bool> },
    /// None: versions before 6 name each blob by its digest.
    Unlisted,
}

impl KnownBlobs {
    pub(super) fn new(list: Option<Vec<Digest>>) -> Self {
        match list {
            Some(digests) => Self::Listed { used: vec![false; digests.len()], digests },
            None => Self::Unlisted,
        }
    }

    /// The pieces with the digests of their blobs. Each listed blob must be used.
    pub(super) fn pieces(&mut self, pieces: Vec<NumberedPiece>) -> Result<Vec<Piece>, RecipeError> {
        let pieces = pieces.into_iter().map(|piece| self.piece(piece)).collect::<Result<_, _>>()?;
        match self {
            Self::Listed { used, .. } if used.contains(&false) => Err(RecipeError::UnusedBlob),
            _ => Ok(pieces),
        }
    }

    /// The tensors with the digests of their blobs.
    pub(super) fn tensors(&self, tensors: Vec<NumberedTensor>) -> Result<Vec<TensorEntry>, RecipeError> {
        tensors.into_iter().map(|tensor| self.tensor(tensor)).collect()
    }

    /// The digests and sizes of blobs that other files have parts of too.
    pub(super) fn shared(&self, shared: Vec<NumberedShared>) -> Result<BTreeMap<Digest, u64>, RecipeError> {
        let digest = |NumberedShared { blob, size }| Ok((self.digest(BlobId::Number(blob))?, size));
        shared.into_iter().map(digest).collect()
    }

    fn piece(&mut self, piece: NumberedPiece) -> Result<Piece, RecipeError> {
        let NumberedPiece { blob, offset, length, zeros, literal } = piece;
        match (blob, offset, length, zeros, literal) {
            (Some(blob), Some(offset), Some(length), None, None) => {
                Ok(Piece::Blob { blob: self.used(blob)?, offset, length })
            }
            (None, None, None, Some(zeros), None) => Ok(Piece::Zeros { zeros }),
            (None, None, None, None, Some(Literal(literal))) => Ok(Piece::Literal { literal }),
            _ => Err(RecipeError::PieceFields),
        }
    }

    fn used(&mut self, blob: BlobId) -> Result<Digest, RecipeError> {
        let digest = self.digest(blob)?;
        if let (Self::Listed { used, .. }, BlobId::Number(number)) = (self, blob)
            && let Some(used) = usize::try_from(number).ok().and_then(|number| used.get_mut(number))
        {
            *used = true;
        }
        Ok(digest)
    }

    fn tensor(&self, tensor: NumberedTensor) -> Result<TensorEntry, RecipeError> {
        let NumberedTensor { name, type_name, shape, blob, digest, offset, size, experts } = tensor;
        let blob = match (blob, digest) {
            (Some(number), None) => Some(BlobId::Number(number)),
            (None, digest) => digest.map(BlobId::Digest),
            (Some(_), Some(_)) => return Err(RecipeError::BlobId),
        };
        let digest = match (self, blob) {
            (Self::Listed { .. }, None) => Digest::of(b""),
            (_, Some(blob)) => self.digest(blob)?,
            (Self::Unlisted, None) => return Err(RecipeError::BlobId),
        };
        Ok(TensorEntry { name, type_name, shape, digest, offset, size, experts })
    }

    fn digest(&self, blob: BlobId) -> Result<Digest, RecipeError> {
        match (self, blob) {
            (Self::Listed { digests, .. }, BlobId::Number(number)) => {
                let place = usize::try_from(number).ok();
                let digest = place.and_then(|place| digests.get(place)).copied();
                digest.ok_or(RecipeError::UnknownBlob { number, count: digests.len() })
            }
            (Self::Unlisted, BlobId::Digest(digest)) => Ok(digest),
            _ => Err(RecipeError::BlobId),
        }
    }
}

/// The blobs of a recipe that is written, in the order in which its pieces use them.
#[derive(Default)]
pub(super) struct BlobList {
    digests: Vec<Digest>,
    numbers: HashMap<Digest, u64>,
}

impl BlobList {
    pub(super) fn new(pieces: &[Piece]) -> Self {
        let mut list = Self::default();
        for piece in pieces {
            if let Piece::Blob { blob, .. } = piece {
                list.add(*blob);
            }
        }
        list
    }

    fn add(&mut self, blob: Digest) {
        let next = self.digests.len() as u64;
        if *self.numbers.entry(blob).or_insert(next) == next {
            self.digests.push(blob);
        }
    }

    pub(super) fn digests(&self) -> &[Digest] {
        &self.digests
    }

    pub(super) fn piece(&self, piece: &Piece) -> NumberedPiece {
        let none = NumberedPiece::default();
        match piece {
            Piece::Blob { blob, offset, length } => NumberedPiece {
                blob: self.number(*blob).map(BlobId::Number),
                offset: Some(*offset),
                length: Some(*length),
                ..none
            },
            Piece::Zeros { zeros } => NumberedPiece { zeros: Some(*zeros), ..none },
            Piece::Literal { literal } => NumberedPiece { literal: Some(Literal(literal.clone())), ..none },
        }
    }

    pub(super) fn tensor<'t>(&self, tensor: &'t TensorEntry) -> NewTensor<'t> {
        let TensorEntry { name, type_name, shape, digest, offset, size, experts } = tensor;
        let (offset, size, experts) = (*offset, *size, *experts);
        NewTensor { name, type_name, shape, blob: self.number(*digest), offset, size, experts }
    }

    /// Blobs that pieces have used, in their order.
    pub(super) fn shared(&self, shared: &BTreeMap<Digest, u64>) -> Vec<NumberedShared> {
        let number =
            |(blob, digest): (u64, &Digest)| Some(NumberedShared { blob, size: *shared.get(digest)? });
        (0..).zip(&self.digests).filter_map(number).collect()
    }

    fn number(&self, blob: Digest) -> Option<u64> {
        self.numbers.get(&blob).copied()
    }
}
