//! Recipes: how to rebuild a split file from its blobs, bit for bit.
//!
//! A recipe is a JSON document named by the digest of the file it rebuilds. It lists the file's
//! pieces in order, and the position of each tensor. `docs/STORE-FORMAT.md` specifies the format.
//!
//! Invariants of a [`Recipe`]: its pieces add up to its size, every length is positive, padding is
//! limited, every tensor lies in a blob that a piece uses, and nothing overflows.

mod member;
mod unpacked;
mod whole;

use std::collections::{BTreeMap, BTreeSet};

use base64::engine::general_purpose::STANDARD as BASE64;
use serde::{Deserialize, Serialize};

pub use self::member::Member;
pub use self::unpacked::Unpacked;
use self::unpacked::UnpackedFile;
use crate::digest::Digest;
use crate::stored_file::{FilePiece, FilePieces, PieceError, Source};

/// A validated recipe.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    file: Digest,
    pieces: FilePieces<Piece>,
    tensors: Vec<TensorEntry>,
    members: Vec<Member>,
    unpacked: Option<UnpackedFile>,
    is_whole: bool,
}

/// One contiguous part of a file.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(untagged, deny_unknown_fields)]
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
        #[serde(with = "literal")]
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

/// A tensor as the store records it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TensorEntry {
    /// The tensor's name in its file.
    pub name: String,
    /// The name of its ggml type, such as `Q4_K`.
    #[serde(rename = "type")]
    pub type_name: String,
    /// Its dimensions in GGUF order, the fastest first.
    pub shape: Vec<u64>,
    /// The blob that holds it. For a tensor without elements, the digest of empty input, which is
    /// not stored.
    pub digest: Digest,
    /// Its offset in the blob; 0 unless it belongs to a packed expert group.
    pub offset: u64,
    /// Its size in bytes.
    pub size: u64,
    /// The position of each expert, if it is a stack of experts.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub experts: Option<Experts>,
}

/// The position of each expert in a stacked tensor: expert `i` has `stride` bytes at `i * stride`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Experts {
    /// The number of experts.
    pub count: u64,
    /// The size of one in bytes.
    pub stride: u64,
}

impl Recipe {
    /// The version of a file's recipe.
    pub const VERSION: u32 = 1;
    /// The version of the recipe of an archive with files, which earlier versions of blobd cannot read.
    pub const ARCHIVE_VERSION: u32 = 2;
    /// The version of the recipe of a compressed archive.
    pub const UNPACKED_VERSION: u32 = 3;
    /// The version of the recipe of a file that is stored whole.
    pub const WHOLE_VERSION: u32 = 4;
    /// The longest recipe read. A recipe with the most tensors and the longest names is shorter.
    pub const MAX_BYTES: u64 = 128 << 20;
    /// The longest gap that becomes a literal: it covers the padding of any page size and keeps the
    /// recipe readable.
    pub const MAX_LITERAL_BYTES: u64 = 64 << 10;
    /// The most bytes of all literals. Larger gaps become filler blobs, so that a hostile file cannot
    /// make a huge recipe.
    pub const MAX_LITERALS_BYTES: u64 = 16 << 20;

    /// Makes a recipe from its parts.
    ///
    /// # Errors
    /// [`RecipeError`] when an invariant of the module does not hold.
    pub fn new(file: Digest, pieces: Vec<Piece>, tensors: Vec<TensorEntry>) -> Result<Self, RecipeError> {
        let pieces = check_pieces(pieces)?;
        let blobs = blob_sizes(&pieces);
        tensors.iter().try_for_each(|tensor| check_tensor(tensor, &blobs))?;
        Ok(Self { file, pieces, tensors, members: Vec::new(), unpacked: None, is_whole: false })
    }

    /// Parses the JSON form.
    ///
    /// # Errors
    /// [`RecipeError`] when the JSON is not a recipe, has another version, or breaks an invariant.
    pub fn parse(json: &[u8]) -> Result<Self, RecipeError> {
        let raw: RawRecipe = serde_json::from_slice(json)?;
        check_version(raw.version, !raw.members.is_empty(), raw.unpacked.is_some(), raw.whole)?;
        check_seal(json, raw.check)?;
        let content = raw.unpacked.as_ref().map_or(raw.file, |unpacked| unpacked.digest);
        let recipe = Self::new(content, raw.pieces, raw.tensors)?.with_members(raw.members)?;
        check_size(recipe.size(), raw.size, raw.unpacked.as_ref())?;
        match raw.unpacked {
            Some(unpacked) => recipe.of_packed(raw.file, raw.size, unpacked.compression),
            None if raw.whole => recipe.into_whole(),
            None => Ok(recipe),
        }
    }

    /// The JSON form, as on disk.
    #[must_use]
    pub fn to_json(&self) -> Vec<u8> {
        let raw = RawRecipeRef {
            version: version(!self.members.is_empty(), self.unpacked.is_some(), self.is_whole),
            file: self.file,
            size: self.size(),
            whole: self.is_whole,
            unpacked: self.unpacked(),
            pieces: &self.pieces,
            tensors: &self.tensors,
            members: &self.members,
        };
        // Strings, integers and arrays always serialise.
        seal(serde_json::to_vec(&raw).unwrap_or_default())
    }

    /// The digest of the file that the recipe rebuilds, or of the file whose content it rebuilds if that is
    /// [`Self::unpacked`].
    #[must_use]
    pub const fn file(&self) -> Digest {
        self.file
    }

    /// The length of that file in bytes.
    #[must_use]
    pub fn size(&self) -> u64 {
        self.unpacked.as_ref().map_or_else(|| self.pieces.size(), UnpackedFile::packed_bytes)
    }

    /// The parts of the file, or of its content if that is [`Self::unpacked`], in order.
    #[must_use]
    pub const fn pieces(&self) -> &FilePieces<Piece> {
        &self.pieces
    }

    /// The file's tensors, in the order of its own table.
    #[must_use]
    pub fn tensors(&self) -> &[TensorEntry] {
        &self.tensors
    }

    /// The blob with the file's header, which is the first piece of every split file, and its size.
    #[must_use]
    pub fn header(&self) -> Option<(Digest, u64)> {
        match self.pieces.first() {
            Some(Piece::Blob { blob, offset: 0, length }) => Some((*blob, *length)),
            _ => None,
        }
    }

    /// The blobs that the recipe references.
    #[must_use]
    pub fn digests(&self) -> BTreeSet<Digest> {
        self.blob_sizes().into_keys().collect()
    }

    /// The referenced blobs with the minimum size that each must have, in bytes.
    #[must_use]
    pub fn blob_sizes(&self) -> BTreeMap<Digest, u64> {
        blob_sizes(&self.pieces)
    }
}

/// Why a recipe is refused.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// Not JSON, or not the expected JSON.
    #[error("recipe: {0}")]
    Json(#[from] serde_json::Error),
    /// The version is not supported.
    #[error("recipe: version {found}, this blobd reads 1 to {}; upgrade blobd", Recipe::WHOLE_VERSION)]
    Version {
        /// The version found.
        found: u32,
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
    /// The content of a compressed file that is no archive with files.
    #[error("recipe: the content of a compressed file has no files in it")]
    Unpacked,
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

/// The version of a recipe, with or without files in it, of a file that is stored unpacked, whole, or neither.
const fn version(has_members: bool, is_unpacked: bool, is_whole: bool) -> u32 {
    match (has_members, is_unpacked) {
        (_, true) => Recipe::UNPACKED_VERSION,
        (true, false) => Recipe::ARCHIVE_VERSION,
        (false, false) if is_whole => Recipe::WHOLE_VERSION,
        (false, false) => Recipe::VERSION,
    }
}

pub(crate) const fn check_version(
    found: u32,
    has_members: bool,
    is_unpacked: bool,
    is_whole: bool,
) -> Result<(), RecipeError> {
    if found == version(has_members, is_unpacked, is_whole) {
        Ok(())
    } else {
        Err(RecipeError::Version { found })
    }
}

/// The pieces add up to the declared size of the file, or of its content.
pub(crate) fn check_size(pieces: u64, file: u64, unpacked: Option<&Unpacked>) -> Result<(), RecipeError> {
    let declared = unpacked.map_or(file, |unpacked| unpacked.size);
    if pieces == declared { Ok(()) } else { Err(RecipeError::Size { pieces, declared }) }
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

pub(crate) fn check_seal(json: &[u8], expected: Digest) -> Result<(), RecipeError> {
    let tail = format!("{CHECK_KEY}\"{expected}\"}}");
    let body = json.trim_ascii_end().strip_suffix(tail.as_bytes());
    // The check must be the last field, or it would not cover what follows it.
    let found = Digest::of(body.unwrap_or(json));
    if found == expected { Ok(()) } else { Err(RecipeError::Check { found, expected }) }
}

pub(crate) fn check_pieces(pieces: Vec<Piece>) -> Result<FilePieces<Piece>, RecipeError> {
    let pieces = FilePieces::new(pieces).map_err(|PieceError { index }| RecipeError::Piece { index })?;
    let mut padding = 0u64;
    for (index, piece) in pieces.iter().enumerate() {
        let length = piece.length();
        if length == 0 {
            return Err(RecipeError::Piece { index });
        }
        if !matches!(piece, Piece::Blob { .. }) {
            padding = padding.saturating_add(length);
            check_padding(index, length, Recipe::MAX_LITERAL_BYTES)?;
            check_padding(index, padding, Recipe::MAX_LITERALS_BYTES)?;
        }
    }
    Ok(pieces)
}

pub(crate) fn blob_sizes(pieces: &FilePieces<Piece>) -> BTreeMap<Digest, u64> {
    let mut sizes = BTreeMap::new();
    for piece in pieces.iter() {
        if let Piece::Blob { blob, offset, length } = piece {
            // `FilePieces::new` has proved that it does not overflow.
            let end = offset.saturating_add(*length);
            sizes.entry(*blob).and_modify(|size: &mut u64| *size = end.max(*size)).or_insert(end);
        }
    }
    sizes
}

const fn check_padding(index: usize, found: u64, limit: u64) -> Result<(), RecipeError> {
    if found > limit { Err(RecipeError::Padding { index, found, limit }) } else { Ok(()) }
}

fn check_tensor(tensor: &TensorEntry, blobs: &BTreeMap<Digest, u64>) -> Result<(), RecipeError> {
    let end = tensor.offset.checked_add(tensor.size);
    let inside = match blobs.get(&tensor.digest) {
        Some(blob_size) => end.is_some_and(|end| end <= *blob_size),
        None => tensor.size == 0 && tensor.digest == Digest::of(b""),
    };
    if !inside {
        let TensorEntry { name, offset, size, .. } = tensor.clone();
        return Err(RecipeError::Tensor { name, offset, size });
    }
    let Some(Experts { count, stride }) = tensor.experts else { return Ok(()) };
    if count.checked_mul(stride) != Some(tensor.size) {
        let TensorEntry { name, size, .. } = tensor.clone();
        return Err(RecipeError::Experts { name, count, stride, size });
    }
    Ok(())
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawRecipe {
    version: u32,
    file: Digest,
    size: u64,
    #[serde(default)]
    whole: bool,
    #[serde(default)]
    unpacked: Option<Unpacked>,
    pieces: Vec<Piece>,
    tensors: Vec<TensorEntry>,
    #[serde(default)]
    members: Vec<Member>,
    check: Digest,
}

#[derive(Serialize)]
struct RawRecipeRef<'a> {
    version: u32,
    file: Digest,
    size: u64,
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    whole: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    unpacked: Option<Unpacked>,
    pieces: &'a [Piece],
    tensors: &'a [TensorEntry],
    #[serde(skip_serializing_if = "<[Member]>::is_empty")]
    members: &'a [Member],
}

/// Bytes as base64 in JSON, for serde's `with`.
pub mod literal {
    use base64::Engine as _;

    use super::{BASE64, Deserialize};

    /// Writes the bytes as base64.
    ///
    /// # Errors
    /// Those of the serializer.
    pub fn serialize<S: serde::Serializer>(bytes: &[u8], serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&BASE64.encode(bytes))
    }

    /// Reads base64.
    ///
    /// # Errors
    /// When the text is not base64.
    pub fn deserialize<'de, D: serde::Deserializer<'de>>(deserializer: D) -> Result<Vec<u8>, D::Error> {
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        BASE64.decode(text.as_bytes()).map_err(serde::de::Error::custom)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn blob_piece(blob: Digest, offset: u64, length: u64) -> Piece {
        Piece::Blob { blob, offset, length }
    }

    fn tensor(digest: Digest, offset: u64, size: u64) -> TensorEntry {
        let (name, type_name) = ("t".to_owned(), "F32".to_owned());
        TensorEntry { name, type_name, shape: vec![size / 4], digest, offset, size, experts: None }
    }

    fn sample() -> Recipe {
        let (header, weights) = (Digest::of(b"header"), Digest::of(b"weights"));
        let pieces = vec![
            blob_piece(header, 0, 6),
            Piece::Zeros { zeros: 26 },
            blob_piece(weights, 0, 64),
            Piece::Literal { literal: vec![0xff, 0, 1] },
        ];
        Recipe::new(Digest::of(b"file"), pieces, vec![tensor(weights, 0, 64)]).unwrap()
    }

    #[test]
    fn padding_is_limited() {
        let of = |zeros: &[u64]| {
            let pieces = zeros.iter().map(|zeros| Piece::Zeros { zeros: *zeros }).collect();
            Recipe::new(Digest::of(b"a file"), pieces, Vec::new())
        };
        let most = Recipe::MAX_LITERAL_BYTES;
        assert!(of(&[most]).is_ok());
        assert!(matches!(of(&[8, most + 1]), Err(RecipeError::Padding { index: 1, .. })));
        let count = usize::try_from(Recipe::MAX_LITERALS_BYTES / most).unwrap();
        assert!(of(&vec![most; count]).is_ok());
        assert!(matches!(of(&vec![most; count + 1]), Err(RecipeError::Padding { .. })));
    }

    #[test]
    fn json_form_reads_back_as_the_same_recipe() {
        let recipe = sample();
        assert_eq!(Recipe::parse(&recipe.to_json()).unwrap(), recipe);
        assert_eq!(recipe.size(), 99);
        assert_eq!(recipe.header(), Some((Digest::of(b"header"), 6)));
        assert_eq!(recipe.digests().len(), 2);
    }

    #[test]
    fn wrong_size_version_or_field_is_refused() {
        let json = String::from_utf8(sample().to_json()).unwrap();
        for (from, to) in [
            ("\"size\":99", "\"size\":98"),
            ("\"version\":1", "\"version\":2"),
            ("\"version\":1", "\"version\":1,\"extra\":1"),
            ("\"zeros\":26", "\"zeros\":0"),
            ("\"zeros\":26", "\"zeros\":18446744073709551615"),
            ("\"zeros\":26", "\"zeros\":-26"),
            ("\"zeros\":26", "\"zeros\":26,\"literal\":\"AA==\""),
            ("/wAB", "/wA"),
            ("\"offset\":0,\"size\":64", "\"offset\":1,\"size\":64"),
            ("\"offset\":0,\"size\":64", "\"offset\":18446744073709551615,\"size\":64"),
        ] {
            let broken = json.replacen(from, to, 1);
            assert_ne!(broken, json, "{from} is not in {json}");
            assert!(Recipe::parse(broken.as_bytes()).is_err(), "{to} was accepted");
            let body = broken.split(CHECK_KEY).next().unwrap();
            let error = Recipe::parse(&seal(format!("{body}}}").into_bytes())).unwrap_err();
            assert!(!matches!(error, RecipeError::Check { .. }), "{to}: {error}");
        }
    }

    #[test]
    fn any_changed_byte_is_detected() {
        let json = sample().to_json();
        for index in 0..json.len() - 1 {
            let mut changed = json.clone();
            changed[index] ^= 1;
            assert!(Recipe::parse(&changed).is_err(), "byte {index}");
        }
        let renamed = String::from_utf8(json).unwrap().replace("\"t\"", "\"u\"");
        let error = Recipe::parse(renamed.as_bytes()).unwrap_err();
        assert!(matches!(error, RecipeError::Check { .. }), "{error}");
    }

    #[test]
    fn segment_that_wraps_around_is_refused() {
        let piece = blob_piece(Digest::of(b"x"), u64::MAX, 2);
        let error = Recipe::new(Digest::of(b"f"), vec![piece], vec![]).unwrap_err();
        assert!(matches!(error, RecipeError::Piece { index: 0 }), "{error}");
    }

    #[test]
    fn tensor_in_a_foreign_blob_is_refused() {
        let recipe = sample();
        let foreign = tensor(Digest::of(b"elsewhere"), 0, 64);
        let error = Recipe::new(recipe.file(), recipe.pieces().to_vec(), vec![foreign]).unwrap_err();
        assert!(matches!(error, RecipeError::Tensor { .. }), "{error}");
    }

    #[test]
    fn tensor_without_elements_needs_no_blob() {
        let recipe = sample();
        let empty = tensor(Digest::of(b""), 0, 0);
        let recipe = Recipe::new(recipe.file(), recipe.pieces().to_vec(), vec![empty]).unwrap();
        assert!(!recipe.digests().contains(&Digest::of(b"")));
    }

    #[test]
    fn experts_must_fill_their_tensor() {
        let recipe = sample();
        let mut stack = recipe.tensors()[0].clone();
        for (count, stride, accepted) in [(4, 16, true), (3, 16, false), (u64::MAX, 16, false)] {
            stack.experts = Some(Experts { count, stride });
            let result = Recipe::new(recipe.file(), recipe.pieces().to_vec(), vec![stack.clone()]);
            assert_eq!(result.is_ok(), accepted, "{count} experts of {stride} bytes");
        }
    }
}
