//! The JSON form of a recipe: its fields, the versions that have them, its checksum; and its outline.

use std::collections::BTreeMap;

use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};

use super::numbered::{BlobList, InOrder, KnownBlobs, ListedPiece, ListedTensors, NumberedShared};
use super::{
    Member, Packed, Piece, Recipe, RecipeError, RecipeKind, TensorEntries, blob_sizes, check_pieces,
};
use crate::descriptor::Compression;
use crate::digest::Digest;
use crate::stored_file::FilePiece;
use crate::tensor::TensorFormat;

/// The content of a compressed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unpacked {
    pub compression: Compression,
    /// The SHA-256 of the content.
    pub digest: Digest,
    /// The length of the content in bytes.
    pub size: u64,
}

/// The blobs that a recipe references, parsed without its tensors.
///
/// A collection and an index rebuild read every recipe of a store but need no tensors, which are two thirds of a recipe
/// and most of the parsing time. Every recipe that [`Recipe::parse`] accepts has an outline with the same blobs; a
/// recipe with a changed byte has none.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RecipeOutline {
    file: Digest,
    size: u64,
    digests: Vec<Digest>,
}

impl RecipeOutline {
    /// Reads the JSON form of a recipe.
    ///
    /// # Errors
    /// [`RecipeError`] when the JSON is not a recipe, has another version, or its pieces break an
    /// invariant of [`crate::recipe`].
    ///
    /// # Example
    /// ```
    /// use blobd_store_format::digest::Digest;
    /// use blobd_store_format::recipe::{Piece, Recipe, RecipeOutline};
    /// use blobd_store_format::tensor::TensorFormat;
    ///
    /// let piece = Piece::Blob { blob: Digest::of(b"weights"), offset: 0, length: 7 };
    /// let recipe = Recipe::new(Digest::of(b"file"), TensorFormat::Gguf, vec![piece], vec![])?;
    /// let outline = RecipeOutline::parse(&recipe.to_json())?;
    /// assert_eq!(outline.file(), recipe.file());
    /// assert_eq!(outline.digests(), [Digest::of(b"weights")]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn parse(json: &[u8]) -> Result<Self, RecipeError> {
        let document = Document::<IgnoredAny, IgnoredAny>::parse(json)?;
        let declared = document.declared_bytes();
        let Document { file, size, blobs, pieces, .. } = document;
        let pieces = check_pieces(KnownBlobs::new(blobs).pieces(pieces)?)?;
        declared.check(pieces.size())?;
        let digests = blob_sizes(pieces.iter().map(FilePiece::source)).into_keys().collect();
        Ok(Self { file, size, digests })
    }

    pub const fn file(&self) -> Digest {
        self.file
    }

    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The blobs that the recipe references, sorted and unique.
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }
}

/// The first version that has `kind` and `format`.
const KINDS_SINCE: u32 = 5;
/// The first version that has `blobs`.
const BLOBS_SINCE: u32 = 6;
/// The first version that has `shared`, and that only recipes with shared blobs have.
const SHARED_SINCE: u32 = 7;

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
enum KindName {
    Split,
    Archive,
    Packed,
    Whole,
}

impl KindName {
    const fn text(self) -> &'static str {
        match self {
            Self::Split => "split",
            Self::Archive => "archive",
            Self::Packed => "packed",
            Self::Whole => "whole",
        }
    }
}

/// The fields of every version. `T` and `M` are the tensors and a member, or what skips them.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct Document<T, M> {
    version: u32,
    kind: Option<KindName>,
    format: Option<TensorFormat>,
    file: Digest,
    size: u64,
    #[serde(default)]
    whole: bool,
    unpacked: Option<Unpacked>,
    blobs: Option<Vec<Digest>>,
    pieces: Vec<ListedPiece>,
    tensors: T,
    #[serde(default)]
    shared: Vec<NumberedShared>,
    members: Option<Vec<M>>,
    check: Digest,
}

impl<'de, T: Deserialize<'de>, M: Deserialize<'de>> Document<T, M> {
    /// Reads the fields, and checks that those of the kind are there, and that the text has its digest.
    pub(super) fn parse(json: &'de [u8]) -> Result<Self, RecipeError> {
        let document: Self = serde_json::from_slice(json).map_err(|error| refusal(json, error))?;
        document.check_fields()?;
        check_seal(json, document.check)?;
        Ok(document)
    }

    /// The kind, which versions before 5 stated by their number.
    fn kind(&self) -> Result<KindName, RecipeError> {
        match (self.version, self.kind) {
            (KINDS_SINCE..=Recipe::VERSION, Some(kind)) => Ok(kind),
            (1, None) => Ok(KindName::Split),
            (2, None) => Ok(KindName::Archive),
            (3, None) => Ok(KindName::Packed),
            (4, None) => Ok(KindName::Whole),
            (1..=Recipe::VERSION, kind) => Err(self.wrong_fields(kind)),
            (found, _) => Err(RecipeError::Version { found }),
        }
    }

    fn check_fields(&self) -> Result<(), RecipeError> {
        let kind = self.kind()?;
        let is_archive = matches!(kind, KindName::Archive | KindName::Packed);
        let names_kind = self.version >= KINDS_SINCE;
        let has_members = match &self.members {
            Some(members) => names_kind || !members.is_empty(),
            None => false,
        };
        let fits = has_members == is_archive
            && self.unpacked.is_some() == (kind == KindName::Packed)
            && self.whole == (self.version == 4)
            && self.format.is_some() == (names_kind && kind == KindName::Split)
            && self.blobs.is_some() == (self.version >= BLOBS_SINCE)
            && self.shared.is_empty() == (self.version < SHARED_SINCE);
        if fits { Ok(()) } else { Err(self.wrong_fields(Some(kind))) }
    }

    fn wrong_fields(&self, kind: Option<KindName>) -> RecipeError {
        RecipeError::Fields { version: self.version, kind: kind.map_or("unknown", KindName::text) }
    }

    /// The length that the pieces must add up to: that of the file, or of its content.
    pub(super) fn declared_bytes(&self) -> DeclaredBytes {
        DeclaredBytes(self.unpacked.map_or(self.size, |unpacked| unpacked.size))
    }
}

pub(super) struct DeclaredBytes(u64);

impl DeclaredBytes {
    pub(super) const fn check(&self, pieces: u64) -> Result<(), RecipeError> {
        let declared = self.0;
        if pieces == declared { Ok(()) } else { Err(RecipeError::Size { pieces, declared }) }
    }
}

type Parts = (Digest, Vec<Piece>, TensorEntries, RecipeKind, BTreeMap<Digest, u64>);

impl Document<ListedTensors, Member> {
    pub(super) fn into_parts(self) -> Result<Parts, RecipeError> {
        let (kind, is_earlier) = (self.kind()?, self.version < KINDS_SINCE);
        let mut blobs = KnownBlobs::new(self.blobs);
        let (pieces, tensors) = (blobs.pieces(self.pieces)?, blobs.tensors(self.tensors)?);
        let shared = blobs.shared(self.shared)?;
        let mut members = self.members.unwrap_or_default();
        if is_earlier {
            members.iter_mut().for_each(Member::guess_format);
        }
        let kind = match (kind, self.unpacked) {
            // They had no other format.
            (KindName::Split, _) if is_earlier => RecipeKind::Split { format: Some(TensorFormat::Gguf) },
            (KindName::Split, _) => RecipeKind::Split { format: self.format },
            (KindName::Packed, Some(Unpacked { compression, digest: content, .. })) => {
                RecipeKind::Packed(Packed { compression, content, size: self.size, members })
            }
            (KindName::Archive | KindName::Packed, _) => RecipeKind::Archive { members },
            (KindName::Whole, _) => RecipeKind::Whole,
        };
        Ok((self.file, pieces, tensors, kind, shared))
    }
}

/// Why a text is refused that has other fields than a recipe: perhaps it is one of a later version.
fn refusal(json: &[u8], error: serde_json::Error) -> RecipeError {
    #[derive(Deserialize)]
    struct Version {
        version: u32,
    }
    match serde_json::from_slice(json) {
        Ok(Version { version: found }) if found > Recipe::VERSION => RecipeError::Version { found },
        _ => RecipeError::Json(error),
    }
}

/// A recipe of 131,072 tensors is larger than its text: `P` and `T` make each piece and tensor when it is written.
#[derive(Serialize)]
struct NewDocument<'a, P: Serialize, T: Serialize> {
    version: u32,
    kind: KindName,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<TensorFormat>,
    file: Digest,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    unpacked: Option<Unpacked>,
    blobs: &'a [Digest],
    pieces: P,
    tensors: T,
    #[serde(skip_serializing_if = "Vec::is_empty")]
    shared: Vec<NumberedShared>,
    #[serde(skip_serializing_if = "Option::is_none")]
    members: Option<&'a [Member]>,
}

pub(super) fn to_json(recipe: &Recipe) -> Vec<u8> {
    let (kind, members) = match &recipe.kind {
        RecipeKind::Split { .. } => (KindName::Split, None),
        RecipeKind::Archive { members } => (KindName::Archive, Some(members.as_slice())),
        RecipeKind::Packed(packed) => (KindName::Packed, Some(packed.members.as_slice())),
        RecipeKind::Whole => (KindName::Whole, None),
    };
    let blobs = BlobList::new(&recipe.pieces);
    let shared = blobs.shared(&recipe.shared);
    let document = NewDocument {
        version: if shared.is_empty() { SHARED_SINCE - 1 } else { SHARED_SINCE },
        kind,
        format: recipe.format(),
        file: recipe.file,
        size: recipe.size(),
        unpacked: recipe.unpacked(),
        blobs: blobs.digests(),
        pieces: InOrder(recipe.pieces.iter().map(|piece| blobs.piece(piece))),
        tensors: InOrder(recipe.tensors.iter().map(|tensor| blobs.tensor(tensor))),
        shared,
        members,
    };
    // Strings, integers and arrays always serialise.
    seal(serde_json::to_vec(&document).unwrap_or_default())
}

/// Appends the check to a JSON object: the digest of everything before it. Without it, a flipped bit in
/// a recipe could let a collection delete a needed blob.
pub fn seal(mut object: Vec<u8>) -> Vec<u8> {
    if object.last() == Some(&b'}') {
        object.pop();
    }
    let check = Digest::of(&object);
    object.extend(format!("{CHECK_KEY}\"{check}\"}}\n").into_bytes());
    object
}

const CHECK_KEY: &str = ",\"check\":";

fn check_seal(json: &[u8], expected: Digest) -> Result<(), RecipeError> {
    let tail = format!("{CHECK_KEY}\"{expected}\"}}");
    let body = json.trim_ascii_end().strip_suffix(tail.as_bytes());
    // The check must be the last field, or it would not cover what follows it.
    let found = Digest::of(body.unwrap_or(json));
    if found == expected { Ok(()) } else { Err(RecipeError::Check { found, expected }) }
}
