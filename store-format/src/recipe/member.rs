//! The files in an archive, as its recipe records them.

use serde::{Deserialize, Serialize};

use super::{Piece, Recipe, RecipeError, RecipeKind, TensorEntries, blob_sizes, check_tensors};
use crate::digest::Digest;
use crate::manifest::is_file_name;
use crate::stored_file::Source;
use crate::tensor::TensorFormat;

/// A file in an archive. Its tensors follow those of the files before it in the recipe's list.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Member {
    pub path: String,
    /// Where its content starts, in bytes from the start of the archive.
    pub offset: u64,
    /// Its length in bytes; never 0.
    pub size: u64,
    /// The SHA-256 of its content.
    pub digest: Digest,
    /// Its format; `None` if it is not split.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub format: Option<TensorFormat>,
    /// The number of its tensors.
    pub tensors: u64,
}

impl Member {
    /// Sets the format of a file in a recipe before version 5, which did not state it: only GGUF files were split.
    pub(super) fn guess_format(&mut self) {
        let has_name = || self.path.to_ascii_lowercase().ends_with(".gguf");
        self.format = (self.tensors > 0 || has_name()).then_some(TensorFormat::Gguf);
    }
}

impl Recipe {
    /// The recipe of an uncompressed archive with these files, in the order of their content. `tensors` are those of
    /// the first file, then those of the next, and so on.
    ///
    /// # Errors
    /// [`RecipeError::Member`] when a file is empty, overlaps another, is not in the archive, has no safe path, or
    /// its tensors are not in it.
    pub fn for_archive(
        file: Digest,
        pieces: Vec<Piece>,
        tensors: impl Into<TensorEntries>,
        members: Vec<Member>,
    ) -> Result<Self, RecipeError> {
        Self::checked(file, pieces, tensors.into(), RecipeKind::Archive { members })
    }

    /// The recipe of an archive that consists of these parts, in order: archives themselves.
    ///
    /// # Errors
    /// [`RecipeError`] when they have too much padding together, or two files of one path.
    pub fn joined(file: Digest, parts: Vec<Self>) -> Result<Self, RecipeError> {
        let (mut pieces, mut tensors, mut members) = (Vec::new(), TensorEntries::default(), Vec::new());
        let mut position = 0_u64;
        for part in parts {
            let moved =
                |member: &Member| Member { offset: position.saturating_add(member.offset), ..member.clone() };
            members.extend(part.members().iter().map(moved));
            position = position.saturating_add(part.pieces.size());
            pieces.extend_from_slice(&part.pieces);
            tensors.append(&part.tensors);
        }
        Self::for_archive(file, pieces, tensors, members)
    }

    pub(super) fn check_members(&self, members: &[Member]) -> Result<(), RecipeError> {
        let (mut position, mut first) = (0, 0_usize);
        for member in members {
            let refused = || RecipeError::Member { path: member.path.chars().take(200).collect() };
            let end = member.offset.checked_add(member.size).filter(|end| *end <= self.pieces.size());
            let is_in_order = member.offset >= position && member.size > 0;
            position = end.filter(|_| is_in_order && is_file_name(&member.path)).ok_or_else(refused)?;
            let count = usize::try_from(member.tensors).ok();
            let count = count.filter(|count| *count <= self.tensors.len().saturating_sub(first));
            let count = count.ok_or_else(refused)?;
            if member.format.is_none() && count > 0 {
                return Err(RecipeError::NoFormat { count });
            }
            let own = self.tensors.iter().skip(first).take(count);
            check_tensors(own, &blob_sizes(self.sources(member)))?;
            first = first.saturating_add(count);
        }
        let left = self.tensors.len().saturating_sub(first);
        match members.last() {
            Some(last) if left > 0 => Err(RecipeError::Member { path: last.path.clone() }),
            // Padding has no tensors.
            None if left > 0 => Err(RecipeError::NoFormat { count: left }),
            _ => Ok(()),
        }
    }

    /// The recipe of a file in the archive.
    pub fn member_recipe(&self, index: usize) -> Result<Self, RecipeError> {
        let Some(member) = self.members().get(index) else {
            let (what, expected) = ("files in an archive", self.members().len());
            return Err(RecipeError::Parts { what, found: index, expected });
        };
        let before = self.members().iter().take(index).map(|member| member.tensors);
        let first = usize::try_from(before.fold(0, u64::saturating_add)).unwrap_or(usize::MAX);
        let count = usize::try_from(member.tensors).unwrap_or(usize::MAX);
        let tensors = self.tensors.iter().skip(first).take(count).collect();
        let pieces = self.sources(member).map(Piece::from).collect();
        let kind = RecipeKind::Split { format: member.format };
        Self::checked(member.digest, pieces, tensors, kind)
    }

    fn sources(&self, member: &Member) -> impl Iterator<Item = Source<'_, Digest>> {
        self.pieces.sources(member.offset..member.offset.saturating_add(member.size))
    }
}
