//! Recipes: how to rebuild a file from its blobs, bit for bit.
//!
//! A recipe is a JSON document named by the digest of the file it rebuilds. It says what kind of file that
//! is, and lists the file's pieces in order and the position of each tensor. `docs/STORE-FORMAT.md` specifies
//! the format.
//!
//! Invariants of a [`Recipe`]: its pieces add up to its size, every length is positive, padding is
//! limited, every tensor lies in a blob that a piece of its file uses, no file has two tensors of one name,
//! and nothing overflows.
//!
//! ```
//! use blobd_store_format::digest::Digest;
//! use blobd_store_format::recipe::{Piece, Recipe, RecipeKind};
//! use blobd_store_format::tensor::TensorFormat;
//!
//! let header = Digest::of(b"a header");
//! let pieces = vec![Piece::Blob { blob: header, offset: 0, length: 8 }, Piece::Zeros { zeros: 24 }];
//! let recipe = Recipe::new(Digest::of(b"a file"), TensorFormat::Gguf, pieces, Vec::new())?;
//! assert_eq!((recipe.size(), recipe.header()), (32, Some((header, 8))));
//! assert_eq!(*recipe.kind(), RecipeKind::Split { format: Some(TensorFormat::Gguf) });
//! assert_eq!(Recipe::parse(&recipe.to_json())?, recipe);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

mod document;
mod entries;
mod member;
mod numbered;
mod piece;
#[cfg(test)]
mod tests;

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::hash::{BuildHasher, RandomState};

use self::document::Document;
pub use self::document::{RecipeOutline, Unpacked, seal};
pub(crate) use self::entries::PlaceInBlob;
pub use self::entries::{TensorEntries, TensorEntry};
pub use self::member::Member;
pub use self::piece::{Piece, literal};
use crate::descriptor::Compression;
use crate::digest::Digest;
use crate::stored_file::{FilePiece, FilePieces, PieceError, Source};
use crate::tensor::{Experts, TensorFormat};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recipe {
    file: Digest,
    pieces: FilePieces<Piece>,
    tensors: TensorEntries,
    kind: RecipeKind,
    /// Blobs that pieces of other files cover together with those of this one, and their sizes.
    shared: BTreeMap<Digest, u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RecipeKind {
    /// A file that is split at its tensors.
    Split {
        /// Its format; `None` only for a file in an archive that has no tensors.
        format: Option<TensorFormat>,
    },
    /// An uncompressed archive.
    Archive { members: Vec<Member> },
    /// A compressed archive: the pieces rebuild its content.
    Packed(Packed),
    /// A file that is stored whole, as the blob of its digest. A store has such a recipe for a file whose blob is in
    /// a lower store only, so that a collection knows without the lower store what the file consists of.
    Whole,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Packed {
    compression: Compression,
    content: Digest,
    /// The length of the compressed file.
    size: u64,
    members: Vec<Member>,
}

impl Recipe {
    /// The latest version; all earlier ones are read too. The number changes only when an earlier blobd would misread a
    /// recipe. Recipes that an earlier blobd can read are written in the version before.
    pub const VERSION: u32 = 7;
    /// The longest recipe read. A recipe with the most tensors and the longest names is shorter: next to its name and
    /// shape, which are also in the file's header of at most 100 MB, a tensor takes less than 400 bytes.
    pub const MAX_BYTES: u64 = 160 << 20;
    /// The longest gap that becomes a literal: it covers the padding of any page size and keeps the
    /// recipe readable.
    pub const MAX_LITERAL_BYTES: u64 = 64 << 10;
    /// The most bytes of all literals. Larger gaps become filler blobs, so that a hostile file cannot
    /// make a huge recipe.
    pub const MAX_LITERALS_BYTES: u64 = 16 << 20;

    /// The recipe of a file of this format that is split.
    pub fn new(
        file: Digest,
        format: TensorFormat,
        pieces: Vec<Piece>,
        tensors: impl Into<TensorEntries>,
    ) -> Result<Self, RecipeError> {
        Self::checked(file, pieces, tensors.into(), RecipeKind::Split { format: Some(format) })
    }

    /// The recipe of a compressed file of `size` bytes with the digest `file`, whose content `archive` rebuilds.
    ///
    /// # Errors
    /// [`RecipeError::Packed`] when the content has no files: then nobody could tell it from the file.
    pub fn for_packed(
        file: Digest,
        size: u64,
        compression: Compression,
        archive: Self,
    ) -> Result<Self, RecipeError> {
        let Self { file: content, pieces, tensors, kind, shared } = archive;
        let RecipeKind::Archive { members } = kind else { return Err(RecipeError::Packed) };
        let kind = RecipeKind::Packed(Packed { compression, content, size, members });
        Self { file, pieces, tensors, kind, shared }.with_checked_kind()
    }

    /// The same recipe of a file that has only parts of these blobs, which have these sizes. Other files of its model have
    /// the rest.
    ///
    /// # Errors
    /// [`RecipeError::Shared`] when no piece names one of these blobs, or one names bytes beyond its end;
    /// [`RecipeError::SharedKind`] for a file of another kind than `split`.
    pub fn sharing(self, shared: BTreeMap<Digest, u64>) -> Result<Self, RecipeError> {
        // The sizes of all blobs take a tenth of the time that the largest recipe takes.
        if shared.is_empty() {
            return Ok(Self { shared, ..self });
        }
        if !matches!(self.kind, RecipeKind::Split { .. }) {
            return Err(RecipeError::SharedKind);
        }
        let known = self.blob_sizes();
        let wrong = shared.iter().find(|(blob, size)| known.get(blob).is_none_or(|end| end > size));
        match wrong {
            Some((blob, size)) => Err(RecipeError::Shared { blob: *blob, size: *size }),
            None => Ok(Self { shared, ..self }),
        }
    }

    /// The recipe of a file of `size` bytes that is stored whole.
    pub fn for_whole_file(file: Digest, size: u64) -> Result<Self, RecipeError> {
        let whole = Piece::Blob { blob: file, offset: 0, length: size };
        let pieces = if size == 0 { Vec::new() } else { vec![whole] };
        Self::checked(file, pieces, TensorEntries::default(), RecipeKind::Whole)
    }

    /// Parses the JSON form, of any version. A text that is handed over is dropped when its fields are known.
    pub fn parse(json: impl AsRef<[u8]>) -> Result<Self, RecipeError> {
        let document = Document::parse(json.as_ref())?;
        drop(json);
        let declared = document.declared_bytes();
        let (file, pieces, tensors, kind, shared) = document.into_parts()?;
        let recipe = Self::checked(file, pieces, tensors, kind)?;
        declared.check(recipe.pieces.size())?;
        recipe.sharing(shared)
    }

    /// The JSON form, as on disk.
    pub fn to_json(&self) -> Vec<u8> {
        document::to_json(self)
    }

    /// The digest of the file that the recipe rebuilds, or of the file whose content it rebuilds if that is
    /// [`Self::unpacked`].
    pub const fn file(&self) -> Digest {
        self.file
    }

    /// The length of that file in bytes.
    pub fn size(&self) -> u64 {
        match &self.kind {
            RecipeKind::Packed(packed) => packed.size,
            _ => self.pieces.size(),
        }
    }

    pub const fn kind(&self) -> &RecipeKind {
        &self.kind
    }

    /// The format of a file that is split.
    pub const fn format(&self) -> Option<TensorFormat> {
        match self.kind {
            RecipeKind::Split { format } => format,
            _ => None,
        }
    }

    /// The files in an archive; none if the file is not an archive.
    pub fn members(&self) -> &[Member] {
        match &self.kind {
            RecipeKind::Archive { members } | RecipeKind::Packed(Packed { members, .. }) => members,
            RecipeKind::Split { .. } | RecipeKind::Whole => &[],
        }
    }

    /// What the recipe rebuilds if the file is compressed: its content. The file itself cannot be rebuilt then.
    pub fn unpacked(&self) -> Option<Unpacked> {
        let RecipeKind::Packed(Packed { compression, content, .. }) = &self.kind else { return None };
        Some(Unpacked { compression: *compression, digest: *content, size: self.pieces.size() })
    }

    /// The parts of the file, or of its content if that is [`Self::unpacked`], in order.
    pub const fn pieces(&self) -> &FilePieces<Piece> {
        &self.pieces
    }

    pub const fn tensors(&self) -> &TensorEntries {
        &self.tensors
    }

    /// The blob with the file's header, which is the first piece of every file with a format, and its size.
    pub fn header(&self) -> Option<(Digest, u64)> {
        self.format()?;
        match self.pieces.first() {
            Some(Piece::Blob { blob, offset: 0, length }) => Some((*blob, *length)),
            _ => None,
        }
    }

    /// Whether the file is one whole blob, which has the digest of the file.
    pub fn is_one_blob(&self) -> bool {
        matches!(self.pieces.as_ref(), [Piece::Blob { blob, offset: 0, .. }] if *blob == self.file)
    }

    pub fn digests(&self) -> BTreeSet<Digest> {
        self.blob_sizes().into_keys().collect()
    }

    /// The referenced blobs with the size that each must have, in bytes.
    pub fn blob_sizes(&self) -> BTreeMap<Digest, u64> {
        let mut sizes = blob_sizes(self.pieces.iter().map(Piece::source));
        sizes.extend(&self.shared);
        sizes
    }

    /// The blobs that other files of the model have parts of too, and their sizes.
    pub const fn shared_blobs(&self) -> &BTreeMap<Digest, u64> {
        &self.shared
    }

    fn checked(
        file: Digest,
        pieces: Vec<Piece>,
        tensors: TensorEntries,
        kind: RecipeKind,
    ) -> Result<Self, RecipeError> {
        let (pieces, shared) = (check_pieces(pieces)?, BTreeMap::new());
        Self { file, pieces, tensors, kind, shared }.with_checked_kind()
    }

    /// Checks what the kind requires of the parts.
    fn with_checked_kind(self) -> Result<Self, RecipeError> {
        match &self.kind {
            RecipeKind::Split { format: None } if !self.tensors.is_empty() => {
                return Err(RecipeError::NoFormat { count: self.tensors.len() });
            }
            RecipeKind::Split { .. } => check_tensors(self.tensors.iter(), &self.blob_sizes())?,
            RecipeKind::Packed(Packed { members, .. }) if members.is_empty() => {
                return Err(RecipeError::Packed);
            }
            RecipeKind::Archive { members } | RecipeKind::Packed(Packed { members, .. }) => {
                self.check_members(members)?;
            }
            RecipeKind::Whole => {
                let is_blob = self.is_one_blob() || self.pieces.is_empty();
                if !is_blob || !self.tensors.is_empty() {
                    return Err(RecipeError::Whole);
                }
            }
        }
        Ok(self)
    }
}

#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    #[error("recipe: {0}")]
    Json(#[from] serde_json::Error),
    #[error("recipe: version {found}, this blobd reads 1 to {}; upgrade blobd", Recipe::VERSION)]
    Version { found: u32 },
    #[error("recipe: its fields are not those of version {version} and kind {kind}")]
    Fields { version: u32, kind: &'static str },
    #[error("recipe: a piece is none of blob with offset and length, zeros, literal")]
    PieceFields,
    #[error("recipe: a blob must be named by its number since version 6, and by its digest before")]
    BlobId,
    #[error("recipe: blob {number} is not in its list of {count}")]
    UnknownBlob { number: u64, count: usize },
    #[error("recipe: a blob of its list is in no piece")]
    UnusedBlob,
    #[error("recipe: shared blob {blob} of {size} bytes is in no piece, or a piece ends beyond it")]
    Shared { blob: Digest, size: u64 },
    #[error("recipe: only the recipe of a file of kind split has shared blobs")]
    SharedKind,
    #[error("recipe: wrong size of its pieces: expected {declared} bytes, found {pieces}")]
    Size { pieces: u64, declared: u64 },
    #[error("recipe: piece {index} is empty or ends beyond 2^64")]
    Piece { index: usize },
    #[error("recipe: too much padding up to piece {index}: expected at most {limit} bytes, found {found}")]
    Padding { index: usize, found: u64, limit: u64 },
    #[error("recipe: changed since it was written: expected digest {expected}, found {found}")]
    Check { found: Digest, expected: Digest },
    #[error("recipe: tensor {name:?}: bytes {offset}+{size} are not in a blob of this file")]
    Tensor { name: String, offset: u64, size: u64 },
    #[error("recipe: tensor {name:?} comes twice")]
    DuplicateTensor { name: String },
    #[error("recipe: {count} tensors of a file without a format")]
    NoFormat { count: usize },
    #[error("recipe: the content of a compressed file has no files in it")]
    Packed,
    #[error("recipe: the file is stored whole, but its pieces are not the one blob of its digest")]
    Whole,
    #[error("recipe: file {path:?} in the archive: not in it, or overlaps another file")]
    Member { path: String },
    #[error("recipe: tensor {name:?}: {count} experts of {stride} bytes do not make {size} bytes")]
    Experts { name: String, count: u64, stride: u64, size: u64 },
    #[error("recipe: wrong number of {what}: expected {expected} as in the plan, found {found}")]
    Parts { what: &'static str, found: usize, expected: usize },
}

fn check_pieces(pieces: Vec<Piece>) -> Result<FilePieces<Piece>, RecipeError> {
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

const fn check_padding(index: usize, found: u64, limit: u64) -> Result<(), RecipeError> {
    if found > limit { Err(RecipeError::Padding { index, found, limit }) } else { Ok(()) }
}

fn blob_sizes<'p>(sources: impl Iterator<Item = Source<'p, Digest>>) -> BTreeMap<Digest, u64> {
    let mut sizes = BTreeMap::new();
    for source in sources {
        if let Source::Blob { blob, offset, length } = source {
            // `FilePieces::new` has proved that it does not overflow.
            let end = offset.saturating_add(length);
            sizes.entry(blob).and_modify(|size: &mut u64| *size = end.max(*size)).or_insert(end);
        }
    }
    sizes
}

/// Checks the tensors of one file, which has these blobs.
fn check_tensors<'t>(
    tensors: impl Iterator<Item = TensorEntry<'t>> + Clone,
    blobs: &BTreeMap<Digest, u64>,
) -> Result<(), RecipeError> {
    tensors.clone().try_for_each(|tensor| check_tensor(&tensor, blobs))?;
    match repeated(tensors.map(|tensor| tensor.name)) {
        Some(name) => Err(RecipeError::DuplicateTensor { name: name.into_owned() }),
        None => Ok(()),
    }
}

/// The first name that was there before. Compares hashes first, because a set of 131,072 names takes 10 MiB.
fn repeated<'t>(mut names: impl Iterator<Item = Cow<'t, str>> + Clone) -> Option<Cow<'t, str>> {
    // With a random key, or names could be made to have equal ones.
    let hasher = RandomState::new();
    let mut hashes: Vec<u64> = names.clone().map(|name| hasher.hash_one(name)).collect();
    hashes.sort_unstable();
    if hashes.array_windows().all(|[hash, next]| hash != next) {
        return None;
    }
    let mut seen = HashSet::new();
    names.find(|name| !seen.insert(name.clone()))
}

fn check_tensor(tensor: &TensorEntry<'_>, blobs: &BTreeMap<Digest, u64>) -> Result<(), RecipeError> {
    let end = tensor.offset.checked_add(tensor.size);
    let inside = match blobs.get(&tensor.digest) {
        Some(blob_size) => end.is_some_and(|end| end <= *blob_size),
        None => tensor.size == 0 && tensor.digest == Digest::of(b""),
    };
    if !inside {
        let (name, offset, size) = (tensor.name.to_string(), tensor.offset, tensor.size);
        return Err(RecipeError::Tensor { name, offset, size });
    }
    let Some(Experts { count, stride }) = tensor.experts else { return Ok(()) };
    if count.checked_mul(stride) != Some(tensor.size) {
        let (name, size) = (tensor.name.to_string(), tensor.size);
        return Err(RecipeError::Experts { name, count, stride, size });
    }
    Ok(())
}
