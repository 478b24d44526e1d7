//! Recipes of files that are stored whole.

use super::{Piece, Recipe, RecipeError};
use crate::digest::Digest;

impl Recipe {
    /// A recipe that says that a file of `size` bytes is stored whole, as the blob of the same digest. A store has it
    /// for a file whose blob is in a lower store only, so that a collection knows without the lower store what the
    /// file consists of.
    ///
    /// # Errors
    /// [`RecipeError`] when `size` is larger than any file of a recipe.
    pub fn of_whole_file(file: Digest, size: u64) -> Result<Self, RecipeError> {
        let whole = Piece::Blob { blob: file, offset: 0, length: size };
        let pieces = if size == 0 { Vec::new() } else { vec![whole] };
        Self::new(file, pieces, Vec::new())?.into_whole()
    }

    /// Whether it is the recipe of a file that is stored whole. A GGUF file without tensors is one blob too, but
    /// what is known of its format is in its recipe.
    #[must_use]
    pub const fn is_of_whole_file(&self) -> bool {
        self.is_whole
    }

    /// # Errors
    /// [`RecipeError::Whole`] when it is more than the blob with the file's digest.
    pub(super) fn into_whole(self) -> Result<Self, RecipeError> {
        let is_plain = self.tensors.is_empty() && self.members.is_empty() && self.unpacked.is_none();
        match is_plain && (self.is_one_blob() || self.pieces.is_empty()) {
            true => Ok(Self { is_whole: true, ..self }),
            false => Err(RecipeError::Whole),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::seal;

    #[test]
    fn recipe_of_a_whole_file_names_its_blob_alone() {
        let file = Digest::of(b"a file");
        let recipe = Recipe::of_whole_file(file, 6).unwrap();
        let parsed = Recipe::parse(&recipe.to_json()).unwrap();
        assert!(parsed.is_of_whole_file());
        assert_eq!(parsed, recipe);
        assert_eq!(parsed.blob_sizes().into_iter().collect::<Vec<_>>(), [(file, 6)]);
    }

    #[test]
    fn recipe_of_an_empty_file_needs_no_blob() {
        let recipe = Recipe::of_whole_file(Digest::of(b""), 0).unwrap();
        assert_eq!(Recipe::parse(&recipe.to_json()).unwrap().size(), 0);
        assert!(recipe.blob_sizes().is_empty() && recipe.is_of_whole_file());
    }

    #[test]
    fn file_of_one_blob_is_stored_whole_only_if_its_recipe_says_so() {
        let file = Digest::of(b"a header");
        let piece = |blob| vec![Piece::Blob { blob, offset: 0, length: 8 }];
        let split = Recipe::new(file, piece(file), Vec::new()).unwrap();
        assert!(!split.is_of_whole_file() && !Recipe::parse(&split.to_json()).unwrap().is_of_whole_file());
        let other = Recipe::new(file, piece(Digest::of(b"a tensor")), Vec::new()).unwrap();
        assert!(matches!(other.into_whole(), Err(RecipeError::Whole)));
    }

    #[test]
    fn recipe_of_a_whole_file_with_other_pieces_or_another_version_is_refused() {
        let (file, blob) = (Digest::of(b"a file"), Digest::of(b"tensor"));
        let json = String::from_utf8(Recipe::of_whole_file(file, 6).unwrap().to_json()).unwrap();
        let unsealed = json.split(",\"check\"").next().unwrap();
        let changed = |from: &str, to: &str| {
            let changed = unsealed.replacen(from, to, 1);
            assert_ne!(changed, unsealed);
            Recipe::parse(&seal(format!("{changed}}}").into_bytes()))
        };
        let pieces = (format!("\"blob\":\"{file}\""), format!("\"blob\":\"{blob}\""));
        assert!(matches!(changed(&pieces.0, &pieces.1), Err(RecipeError::Whole)));
        assert!(matches!(changed("\"version\":4", "\"version\":1"), Err(RecipeError::Version { found: 1 })));
        assert!(matches!(changed(",\"whole\":true", ""), Err(RecipeError::Version { found: 4 })));
    }
}
