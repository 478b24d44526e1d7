//! Files that are stored unpacked: their recipe rebuilds what is in them and not their own bytes.

use serde::{Deserialize, Serialize};

use super::{Recipe, RecipeError};
use crate::descriptor::Compression;
use crate::digest::Digest;

/// The content of a compressed file, as its recipe records it.
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

/// The file itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct UnpackedFile {
    compression: Compression,
    /// The digest of its content.
    content: Digest,
    size: u64,
}

impl UnpackedFile {
    pub(super) const fn packed_bytes(&self) -> u64 {
        self.size
    }
}

impl Recipe {
    /// The recipe of a compressed file of `size` bytes with the digest `file`, whose content this recipe rebuilds.
    ///
    /// # Errors
    /// [`RecipeError::Unpacked`] when the content has no files: then nobody could tell it from the file.
    pub fn of_packed(self, file: Digest, size: u64, compression: Compression) -> Result<Self, RecipeError> {
        if self.members.is_empty() {
            return Err(RecipeError::Unpacked);
        }
        let unpacked = Some(UnpackedFile { compression, content: self.file, size });
        Ok(Self { file, unpacked, ..self })
    }

    /// What the recipe rebuilds if the file is compressed: its content. The file itself cannot be rebuilt then.
    #[must_use]
    pub fn unpacked(&self) -> Option<Unpacked> {
        let UnpackedFile { compression, content: digest, .. } = self.unpacked?;
        Some(Unpacked { compression, digest, size: self.pieces.size() })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outline::RecipeOutline;
    use crate::recipe::{Member, Piece, seal};

    /// The recipe of an archive of 12 bytes with one file.
    fn archive() -> Recipe {
        let pieces = vec![
            Piece::Literal { literal: vec![1; 4] },
            Piece::Blob { blob: Digest::of(b"content!"), offset: 0, length: 8 },
        ];
        let digest = Digest::of(b"content!");
        let member = Member { path: "m".to_owned(), offset: 4, size: 8, digest, tensors: 0 };
        Recipe::new(Digest::of(b"archive"), pieces, Vec::new()).unwrap().with_members(vec![member]).unwrap()
    }

    #[test]
    fn recipe_of_a_compressed_file_has_the_digests_and_sizes_of_both() {
        let recipe = archive().of_packed(Digest::of(b"packed"), 5, Compression::Gzip).unwrap();
        assert_eq!((recipe.file(), recipe.size()), (Digest::of(b"packed"), 5));
        let unpacked = Unpacked { compression: Compression::Gzip, digest: Digest::of(b"archive"), size: 12 };
        assert_eq!(recipe.unpacked(), Some(unpacked));
        let json = recipe.to_json();
        assert_eq!(Recipe::parse(&json).unwrap(), recipe);
        let outline = RecipeOutline::parse(&json).unwrap();
        assert_eq!((outline.file(), outline.size()), (recipe.file(), 5));
        assert_eq!(outline.digests(), [Digest::of(b"content!")]);
        let member = recipe.member_recipe(0).unwrap();
        assert!(member.unpacked().is_none() && member.is_one_blob());
    }

    #[test]
    fn recipe_of_a_compressed_file_with_a_wrong_size_or_version_is_refused() {
        let recipe = archive().of_packed(Digest::of(b"packed"), 5, Compression::Zstd).unwrap();
        let json = String::from_utf8(recipe.to_json()).unwrap();
        for (from, to) in [
            ("\"version\":3", "\"version\":2"),
            ("\"size\":12", "\"size\":13"),
            ("\"zstd\"", "\"bzip2\""),
            ("\"path\":\"m\"", "\"path\":\"../m\""),
        ] {
            let changed = json.replacen(from, to, 1);
            assert_ne!(changed, json, "{from}");
            let body = changed.split(",\"check\":").next().unwrap();
            let sealed = seal(format!("{body}}}").into_bytes());
            assert!(Recipe::parse(&sealed).is_err(), "{to}");
        }
        let without = Recipe::new(Digest::of(b""), Vec::new(), Vec::new()).unwrap();
        assert!(without.of_packed(Digest::of(b"packed"), 5, Compression::Gzip).is_err());
    }
}
