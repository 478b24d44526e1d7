//! Pieces and tensors as a recipe's JSON has them: with the numbers of their blobs in a list that has each digest once.
//!
//! Two thirds of a recipe without that list were digests: a piece and a tensor named each blob, and a packed expert
//! group of 128 experts had its digest 256 times.

use std::borrow::Cow;
use std::collections::{BTreeMap, HashMap};
use std::fmt;

use serde::de::{SeqAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer, Serialize, Serializer};

use super::piece::{Piece, literal};
use super::{PlaceInBlob, RecipeError, TensorEntries, TensorEntry};
use crate::digest::Digest;
use crate::tensor::Experts;
use crate::tensor_table::{TableRow, TensorTable};

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

/// A piece that was read: half the size of its fields.
#[derive(Deserialize)]
#[serde(from = "NumberedPiece")]
pub(super) enum ListedPiece {
    Blob {
        blob: BlobId,
        offset: u64,
        length: u64,
    },
    Zeros(u64),
    Literal(Vec<u8>),
    /// Its fields are not those of a piece.
    Unknown,
}

impl From<NumberedPiece> for ListedPiece {
    fn from(piece: NumberedPiece) -> Self {
        let NumberedPiece { blob, offset, length, zeros, literal } = piece;
        match (blob, offset, length, zeros, literal) {
            (Some(blob), Some(offset), Some(length), None, None) => Self::Blob { blob, offset, length },
            (None, None, None, Some(zeros), None) => Self::Zeros(zeros),
            (None, None, None, None, Some(Literal(literal))) => Self::Literal(literal),
            _ => Self::Unknown,
        }
    }
}

/// A tensor. `blob` is absent if it has no elements; versions before 6 have `digest` in its place.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct NumberedTensor<'t> {
    #[serde(borrow)]
    name: Cow<'t, str>,
    #[serde(rename = "type", borrow)]
    type_name: Cow<'t, str>,
    shape: Vec<u64>,
    blob: Option<u64>,
    digest: Option<Digest>,
    offset: u64,
    size: u64,
    experts: Option<Experts>,
}

/// The tensors that were read, with their blobs and offsets. Of the fields, those of one tensor exist at a time.
#[derive(Default)]
pub(super) struct ListedTensors {
    table: TensorTable,
    places: Vec<(ListedBlob, u64)>,
}

enum ListedBlob {
    Unnamed,
    Named(BlobId),
    NamedTwice,
}

impl ListedTensors {
    fn push(&mut self, tensor: NumberedTensor<'_>) {
        let NumberedTensor { name, type_name, shape, blob, digest, offset, size, experts } = tensor;
        self.table.push(TableRow { name: &name, type_name: &type_name, shape: &shape, size, experts });
        let blob = match (blob, digest) {
            (None, None) => ListedBlob::Unnamed,
            (Some(number), None) => ListedBlob::Named(BlobId::Number(number)),
            (None, Some(digest)) => ListedBlob::Named(BlobId::Digest(digest)),
            (Some(_), Some(_)) => ListedBlob::NamedTwice,
        };
        self.places.push((blob, offset));
    }
}

impl<'de> Deserialize<'de> for ListedTensors {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Tensors;
        impl<'de> Visitor<'de> for Tensors {
            type Value = ListedTensors;

            fn expecting(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
                formatter.write_str("a list of tensors")
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut list: A) -> Result<ListedTensors, A::Error> {
                let mut tensors = ListedTensors::default();
                while let Some(tensor) = list.next_element()? {
                    tensors.push(tensor);
                }
                Ok(tensors)
            }
        }
        deserializer.deserialize_seq(Tensors)
    }
}

/// A tensor as it is written.
#[derive(Serialize)]
pub(super) struct NewTensor<'t> {
    name: Cow<'t, str>,
    #[serde(rename = "type")]
    type_name: Cow<'t, str>,
    shape: Cow<'t, [u64]>,
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
    pub(super) fn pieces(&mut self, pieces: Vec<ListedPiece>) -> Result<Vec<Piece>, RecipeError> {
        let pieces = pieces.into_iter().map(|piece| self.piece(piece)).collect::<Result<_, _>>()?;
        match self {
            Self::Listed { used, .. } if used.contains(&false) => Err(RecipeError::UnusedBlob),
            _ => Ok(pieces),
        }
    }

    /// The tensors with the digests of their blobs.
    pub(super) fn tensors(&self, tensors: ListedTensors) -> Result<TensorEntries, RecipeError> {
        let ListedTensors { table, places } = tensors;
        let empty = Digest::of(b"");
        let place = |(blob, offset)| {
            let digest = match (self, blob) {
                (Self::Listed { .. }, ListedBlob::Unnamed) => empty,
                (_, ListedBlob::Named(blob)) => self.digest(blob)?,
                (Self::Unlisted, ListedBlob::Unnamed) | (_, ListedBlob::NamedTwice) => {
                    return Err(RecipeError::BlobId);
                }
            };
            Ok(PlaceInBlob { digest, offset })
        };
        Ok(TensorEntries::new(table, places.into_iter().map(place).collect::<Result<_, _>>()?))
    }

    /// The digests and sizes of blobs that other files have parts of too.
    pub(super) fn shared(&self, shared: Vec<NumberedShared>) -> Result<BTreeMap<Digest, u64>, RecipeError> {
        let digest = |NumberedShared { blob, size }| Ok((self.digest(BlobId::Number(blob))?, size));
        shared.into_iter().map(digest).collect()
    }

    fn piece(&mut self, piece: ListedPiece) -> Result<Piece, RecipeError> {
        match piece {
            ListedPiece::Blob { blob, offset, length } => {
                Ok(Piece::Blob { blob: self.used(blob)?, offset, length })
            }
            ListedPiece::Zeros(zeros) => Ok(Piece::Zeros { zeros }),
            ListedPiece::Literal(literal) => Ok(Piece::Literal { literal }),
            ListedPiece::Unknown => Err(RecipeError::PieceFields),
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

    pub(super) fn tensor<'t>(&self, tensor: TensorEntry<'t>) -> NewTensor<'t> {
        let TensorEntry { name, type_name, shape, digest, offset, size, experts } = tensor;
        NewTensor { name, type_name, shape, blob: self.number(digest), offset, size, experts }
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
