//! The files in an archive, as its recipe records them.

use serde::{Deserialize, Serialize};

use super::{Recipe, RecipeError};
use crate::digest::Digest;
use crate::manifest::is_file_name;
use crate::recipe::Piece;
use crate::stored_file::Source;

/// A file in an archive. Its tensors follow those of the files before it in the recipe's list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    /// Its path in the archive.
    pub path: String,
    /// Where its content starts, in bytes from the start of the archive.
    pub offset: u64,
    /// Its length in bytes; never 0.
    pub size: u64,
    /// The SHA-256 of its content.
    pub digest: Digest,
    /// The number of its tensors.
    pub tensors: u64,
}

impl Recipe {
    /// The recipe of a file that consists of these parts, in order.
    ///
    /// # Errors
    /// [`RecipeError`] when they have too much padding together.
    pub fn joined(file: Digest, parts: Vec<Self>) -> Result<Self, RecipeError> {
        let (mut pieces, mut tensors) = (Vec::new(), Vec::new());
        for part in parts {
            pieces.extend_from_slice(&part.pieces);
            tensors.extend(part.tensors);
        }
        Self::new(file, pieces, tensors)
    }

    /// The recipe of an archive with these files, in the order of their content.
    ///
    /// # Errors
    /// [`RecipeError::Member`] when a file is empty, overlaps another, is not in the archive, has no safe path, or
    /// its tensors are not in it.
    pub fn with_members(mut self, members: Vec<Member>) -> Result<Self, RecipeError> {
        let (mut position, mut tensors) = (0, 0_u64);
        for member in &members {
            let refused = || RecipeError::Member { path: member.path.chars().take(200).collect() };
            let end = member.offset.checked_add(member.size).filter(|end| *end <= self.pieces.size());
            let is_in_order = member.offset >= position && member.size > 0;
            position = end.filter(|_| is_in_order && is_file_name(&member.path)).ok_or_else(refused)?;
            tensors = tensors.checked_add(member.tensors).ok_or_else(refused)?;
        }
        if let Some(last) = members.last().filter(|_| tensors != self.tensors().len() as u64) {
            return Err(RecipeError::Member { path: last.path.clone() });
        }
        self.members = members;
        (0..self.members.len()).try_for_each(|index| self.member_recipe(index).map(drop))?;
        Ok(self)
    }

    /// The files in the archive; none if the file is no archive.
    #[must_use]
    pub fn members(&self) -> &[Member] {
        &self.members
    }

    /// The recipe of a file in the archive.
    ///
    /// # Errors
    /// [`RecipeError`] when there is none with this index, or its tensors are not in it.
    pub fn member_recipe(&self, index: usize) -> Result<Self, RecipeError> {
        let before = self.members.get(..index).unwrap_or_default().iter().map(|member| member.tensors);
        let first = usize::try_from(before.fold(0, u64::saturating_add)).unwrap_or(usize::MAX);
        let Some(member) = self.members.get(index) else {
            let (what, expected) = ("files in an archive", self.members.len());
            return Err(RecipeError::Parts { what, found: index, expected });
        };
        let count = usize::try_from(member.tensors).unwrap_or(usize::MAX);
        let tensors = self.tensors.get(first..).and_then(|tensors| tensors.get(..count)).unwrap_or_default();
        let range = member.offset..member.offset.saturating_add(member.size);
        let piece = |source: Source<'_, Digest>| match source {
            Source::Blob { blob, offset, length } => Piece::Blob { blob, offset, length },
            Source::Zeros { length } => Piece::Zeros { zeros: length },
            Source::Literal { bytes } => Piece::Literal { literal: bytes.to_vec() },
        };
        Self::new(member.digest, self.pieces.sources(range).map(piece).collect(), tensors.to_vec())
    }

    /// Whether the file is one whole blob, which then has the file's digest.
    #[must_use]
    pub fn is_one_blob(&self) -> bool {
        matches!(self.pieces.as_ref(), [Piece::Blob { blob, offset: 0, .. }] if *blob == self.file)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::recipe::TensorEntry;

    fn member(path: &str, offset: u64, size: u64, tensors: u64) -> Member {
        Member { path: path.to_owned(), offset, size, digest: Digest::of(path.as_bytes()), tensors }
    }

    /// An archive of 100 bytes: a header of 10, a file of 40 with a tensor of 30, one of 5, and zeros.
    fn archive() -> Recipe {
        let (header, weights) = (Digest::of(b"header"), Digest::of(b"weights"));
        let tensor = TensorEntry {
            name: "t".to_owned(),
            type_name: "I8".to_owned(),
            shape: vec![30],
            digest: weights,
            offset: 0,
            size: 30,
            experts: None,
        };
        let pieces = vec![
            Piece::Literal { literal: vec![1; 10] },
            Piece::Blob { blob: header, offset: 0, length: 10 },
            Piece::Blob { blob: weights, offset: 0, length: 30 },
            Piece::Literal { literal: b"text, 5".to_vec() },
            Piece::Zeros { zeros: 43 },
        ];
        Recipe::new(Digest::of(b"archive"), pieces, vec![tensor]).unwrap()
    }

    #[test]
    fn files_of_an_archive_have_recipes_of_their_own() {
        let members = vec![member("m.gguf", 10, 40, 1), member("a.txt", 52, 5, 0)];
        let recipe = archive().with_members(members).unwrap();
        let again = Recipe::parse(&recipe.to_json()).unwrap();
        assert_eq!(again, recipe);
        let weights = recipe.member_recipe(0).unwrap();
        assert_eq!((weights.size(), weights.tensors().len()), (40, 1));
        assert_eq!(weights.header(), Some((Digest::of(b"header"), 10)));
        let text = recipe.member_recipe(1).unwrap();
        assert_eq!(text.pieces().to_vec(), [Piece::Literal { literal: b"xt, 5".to_vec() }]);
        assert!(recipe.member_recipe(2).is_err());
    }

    #[test]
    fn files_that_are_not_in_the_archive_are_refused() {
        for members in [
            vec![member("m", 10, 40, 0)],
            vec![member("m", 10, 29, 1)],
            vec![member("m", 10, 40, 2)],
            vec![member("m", 10, 91, 1)],
            vec![member("m", u64::MAX, 1, 1)],
            vec![member("../m", 10, 40, 1)],
            vec![member("m", 10, 40, 1), member("n", 49, 5, 0)],
            vec![member("m", 10, 40, 1), member("n", 52, 0, 0)],
            vec![member("m", 10, 40, u64::MAX), member("n", 52, 5, 2)],
        ] {
            assert!(archive().with_members(members.clone()).is_err(), "{members:?}");
        }
    }
}
