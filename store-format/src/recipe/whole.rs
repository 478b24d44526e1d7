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
        Self::new(file, pieces, Vec::new())
    }

    /// Whether it is the recipe of a file that is stored whole.
    #[must_use]
    pub fn is_of_whole_file(&self) -> bool {
        let is_plain = self.tensors.is_empty() && self.members.is_empty() && self.unpacked.is_none();
        is_plain && self.is_one_blob()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

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
        assert!(recipe.blob_sizes().is_empty() && !recipe.is_of_whole_file());
    }

    #[test]
    fn split_file_is_not_whole() {
        let blob = Digest::of(b"tensor");
        let pieces = vec![Piece::Blob { blob, offset: 0, length: 6 }];
        assert!(!Recipe::new(Digest::of(b"a file"), pieces, Vec::new()).unwrap().is_of_whole_file());
    }
}
