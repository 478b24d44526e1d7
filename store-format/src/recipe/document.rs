//! The JSON form of a recipe: its fields, the versions that have them, and its checksum.

use serde::{Deserialize, Serialize};

use super::{Member, Packed, Piece, Recipe, RecipeError, RecipeKind, TensorEntry};
use crate::descriptor::Compression;
use crate::digest::Digest;
use crate::tensor::TensorFormat;

/// The content of a compressed file.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Unpacked {
    /// How the file is compressed.
    pub compression: Compression,
    /// The SHA-256 of the content.
    pub digest: Digest,
    /// The length of the content in bytes.
    pub size: u64,
}

/// The names of the kinds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum KindName {
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
pub(crate) struct Document<T, M> {
    version: u32,
    kind: Option<KindName>,
    format: Option<TensorFormat>,
    pub(crate) file: Digest,
    pub(crate) size: u64,
    #[serde(default)]
    whole: bool,
    unpacked: Option<Unpacked>,
    pub(crate) pieces: Vec<Piece>,
    tensors: T,
    members: Option<Vec<M>>,
    check: Digest,
}

impl<'de, T: Deserialize<'de>, M: Deserialize<'de>> Document<T, M> {
    /// Reads the fields, and checks that those of the kind are there, and that the text has its digest.
    pub(crate) fn parse(json: &'de [u8]) -> Result<Self, RecipeError> {
        let document: Self = serde_json::from_slice(json).map_err(|error| refusal(json, error))?;
        document.check_fields()?;
        check_seal(json, document.check)?;
        Ok(document)
    }

    /// The kind, which versions before 5 stated by their number.
    fn kind(&self) -> Result<KindName, RecipeError> {
        match (self.version, self.kind) {
            (Recipe::VERSION, Some(kind)) => Ok(kind),
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
        let has_members = match self.version {
            Recipe::VERSION => self.members.is_some(),
            _ => self.members.as_ref().is_some_and(|members| !members.is_empty()),
        };
        let fits = has_members == is_archive
            && self.unpacked.is_some() == (kind == KindName::Packed)
            && self.whole == (self.version == 4)
            && self.format.is_some() == ((self.version, kind) == (Recipe::VERSION, KindName::Split));
        if fits { Ok(()) } else { Err(self.wrong_fields(Some(kind))) }
    }

    fn wrong_fields(&self, kind: Option<KindName>) -> RecipeError {
        RecipeError::Fields { version: self.version, kind: kind.map_or("unknown", KindName::text) }
    }

    /// The length that the pieces must have together: that of the file, or of its content.
    pub(crate) fn declared_bytes(&self) -> DeclaredBytes {
        DeclaredBytes(self.unpacked.map_or(self.size, |unpacked| unpacked.size))
    }
}

/// A length in bytes.
pub(crate) struct DeclaredBytes(u64);

impl DeclaredBytes {
    pub(crate) const fn check(&self, pieces: u64) -> Result<(), RecipeError> {
        let declared = self.0;
        if pieces == declared { Ok(()) } else { Err(RecipeError::Size { pieces, declared }) }
    }
}

/// The digest of a file, its parts and its kind.
type Parts = (Digest, Vec<Piece>, Vec<TensorEntry>, RecipeKind);

impl Document<Vec<TensorEntry>, Member> {
    pub(super) fn into_parts(self) -> Result<Parts, RecipeError> {
        let (kind, is_earlier) = (self.kind()?, self.version < Recipe::VERSION);
        let mut members = self.members.unwrap_or_default();
        if is_earlier {
            members.iter_mut().for_each(Member::guess_format);
        }
        let kind = match (kind, self.unpacked) {
            // Versions before 5 had no other format.
            (KindName::Split, _) if is_earlier => RecipeKind::Split { format: Some(TensorFormat::Gguf) },
            (KindName::Split, _) => RecipeKind::Split { format: self.format },
            (KindName::Packed, Some(Unpacked { compression, digest: content, .. })) => {
                RecipeKind::Packed(Packed { compression, content, size: self.size, members })
            }
            (KindName::Archive | KindName::Packed, _) => RecipeKind::Archive { members },
            (KindName::Whole, _) => RecipeKind::Whole,
        };
        Ok((self.file, self.pieces, self.tensors, kind))
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

#[derive(Serialize)]
struct NewDocument<'a> {
    version: u32,
    kind: KindName,
    #[serde(skip_serializing_if = "Option::is_none")]
    format: Option<TensorFormat>,
    file: Digest,
    size: u64,
    #[serde(skip_serializing_if = "Option::is_none")]
    unpacked: Option<Unpacked>,
    pieces: &'a [Piece],
    tensors: &'a [TensorEntry],
    #[serde(skip_serializing_if = "Option::is_none")]
    members: Option<&'a [Member]>,
}

/// The JSON form, as on disk.
pub(super) fn to_json(recipe: &Recipe) -> Vec<u8> {
    let (kind, members) = match &recipe.kind {
        RecipeKind::Split { .. } => (KindName::Split, None),
        RecipeKind::Archive { members } => (KindName::Archive, Some(members.as_slice())),
        RecipeKind::Packed(packed) => (KindName::Packed, Some(packed.members.as_slice())),
        RecipeKind::Whole => (KindName::Whole, None),
    };
    let document = NewDocument {
        version: Recipe::VERSION,
        kind,
        format: recipe.format(),
        file: recipe.file,
        size: recipe.size(),
        unpacked: recipe.unpacked(),
        pieces: &recipe.pieces,
        tensors: &recipe.tensors,
        members,
    };
    // Strings, integers and arrays always serialise.
    seal(serde_json::to_vec(&document).unwrap_or_default())
}

/// Appends the check to a JSON object: the digest of everything before it. Without it, a flipped bit in
/// a recipe could let a collection delete a needed blob.
#[must_use]
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
