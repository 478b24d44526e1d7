//! The blobs that a recipe references, parsed without its tensors.
//!
//! A collection and an index rebuild read every recipe of a store but need no tensors, which are two
//! thirds of a recipe and most of the parsing time. Every recipe that [`crate::recipe::Recipe::parse`] accepts has an
//! outline with the same blobs; a recipe with a changed byte has none.

use serde::de::IgnoredAny;

use crate::digest::Digest;
use crate::recipe::{Document, RecipeError, blob_sizes, check_pieces};
use crate::stored_file::FilePiece;

/// A recipe without its tensors.
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
    /// use blobd_store_format::outline::RecipeOutline;
    /// use blobd_store_format::recipe::{Piece, Recipe};
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
        let Document { file, size, pieces, .. } = document;
        let pieces = check_pieces(pieces)?;
        declared.check(pieces.size())?;
        let digests = blob_sizes(pieces.iter().map(FilePiece::source)).into_keys().collect();
        Ok(Self { file, size, digests })
    }

    /// The digest of the file that the recipe rebuilds.
    #[must_use]
    pub const fn file(&self) -> Digest {
        self.file
    }

    /// The length of that file in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The blobs that the recipe references, sorted and unique.
    #[must_use]
    pub fn digests(&self) -> &[Digest] {
        &self.digests
    }
}
