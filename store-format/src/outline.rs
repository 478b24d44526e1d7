//! The blobs that a recipe references, parsed without its tensors.
//!
//! A collection and an index rebuild read every recipe of a store but need no tensors, which are two
//! thirds of a recipe and most of the parsing time. Every recipe that [`crate::recipe::Recipe::parse`] accepts has an
//! outline with the same blobs; a recipe with a changed byte has none.

use serde::Deserialize;
use serde::de::IgnoredAny;

use crate::digest::Digest;
use crate::recipe::{
    Piece, RecipeError, Unpacked, blob_sizes, check_pieces, check_seal, check_size, check_version, literal,
};

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
    ///
    /// let piece = Piece::Blob { blob: Digest::of(b"weights"), offset: 0, length: 7 };
    /// let recipe = Recipe::new(Digest::of(b"file"), vec![piece], vec![])?;
    /// let outline = RecipeOutline::parse(&recipe.to_json())?;
    /// assert_eq!(outline.file(), recipe.file());
    /// assert_eq!(outline.digests(), [Digest::of(b"weights")]);
    /// # Ok::<(), Box<dyn std::error::Error>>(())
    /// ```
    pub fn parse(json: &[u8]) -> Result<Self, RecipeError> {
        let raw: RawOutline = serde_json::from_slice(json)?;
        check_version(raw.version, !raw.members.is_empty(), raw.unpacked.is_some(), raw.whole)?;
        check_seal(json, raw.check)?;
        let pieces: Vec<Piece> = raw
            .pieces
            .into_iter()
            .enumerate()
            .map(|(index, piece)| piece.into_piece().ok_or_else(|| no_piece(index)))
            .collect::<Result<_, _>>()?;
        let pieces = check_pieces(pieces)?;
        check_size(pieces.size(), raw.size, raw.unpacked.as_ref())?;
        Ok(Self { file: raw.file, size: raw.size, digests: blob_sizes(&pieces).into_keys().collect() })
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

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawOutline {
    version: u32,
    file: Digest,
    size: u64,
    #[serde(default)]
    unpacked: Option<Unpacked>,
    #[serde(default)]
    whole: bool,
    pieces: Vec<RawPiece>,
    #[serde(rename = "tensors")]
    _tensors: IgnoredAny,
    #[serde(default)]
    members: Vec<IgnoredAny>,
    check: Digest,
}

/// All kinds of pieces in one struct: serde would buffer each piece of an untagged enum.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct RawPiece {
    blob: Option<Digest>,
    offset: Option<u64>,
    length: Option<u64>,
    zeros: Option<u64>,
    literal: Option<RawLiteral>,
}

#[derive(Deserialize)]
struct RawLiteral(#[serde(deserialize_with = "literal::deserialize")] Vec<u8>);

impl RawPiece {
    fn into_piece(self) -> Option<Piece> {
        match (self.blob, self.offset, self.length, self.zeros, self.literal) {
            (Some(blob), Some(offset), Some(length), None, None) => {
                Some(Piece::Blob { blob, offset, length })
            }
            (None, None, None, Some(zeros), None) => Some(Piece::Zeros { zeros }),
            (None, None, None, None, Some(RawLiteral(literal))) => Some(Piece::Literal { literal }),
            _ => None,
        }
    }
}

fn no_piece(index: usize) -> RecipeError {
    RecipeError::Json(serde::de::Error::custom(format!("piece {index} has no known kind")))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::recipe::Recipe;
    use crate::recipe::seal;

    fn sample() -> Recipe {
        let pieces = vec![
            Piece::Blob { blob: Digest::of(b"header"), offset: 0, length: 6 },
            Piece::Zeros { zeros: 26 },
            Piece::Literal { literal: vec![0xff, 0, 1] },
        ];
        Recipe::new(Digest::of(b"file"), pieces, vec![]).unwrap()
    }

    #[test]
    fn damaged_pieces_and_versions_are_refused() {
        let json = String::from_utf8(sample().to_json()).unwrap();
        for (from, to) in [
            ("\"size\":35", "\"size\":34"),
            ("\"version\":1", "\"version\":2"),
            ("\"version\":1", "\"version\":1,\"extra\":1"),
            ("\"zeros\":26", "\"zeros\":0"),
            ("\"zeros\":26", "\"zeros\":26,\"literal\":\"AA==\""),
            ("\"zeros\":26", "\"zeros\":18446744073709551615"),
            ("\"offset\":0,", ""),
            ("/wAB", "/wA"),
            ("\"tensors\":[]", "\"tensors\":["),
            (",\"tensors\":[]", ""),
        ] {
            let broken = json.replacen(from, to, 1);
            assert_ne!(broken, json, "{from} is not in {json}");
            assert!(RecipeOutline::parse(broken.as_bytes()).is_err(), "{to} was accepted");
            let body = broken.split(",\"check\"").next().unwrap();
            let error = RecipeOutline::parse(&seal(format!("{body}}}").into_bytes())).unwrap_err();
            assert!(!matches!(error, RecipeError::Check { .. }), "{to}: {error}");
        }
    }

    #[test]
    fn any_changed_byte_is_detected() {
        let json = sample().to_json();
        for index in 0..json.len() - 1 {
            let mut changed = json.clone();
            changed[index] ^= 1;
            assert!(RecipeOutline::parse(&changed).is_err(), "byte {index}");
        }
    }

    fn piece() -> impl Strategy<Value = Piece> {
        prop_oneof![
            (0u8..9, 0u64..99, 1u64..99).prop_map(|(blob, offset, length)| Piece::Blob {
                blob: Digest::of(&[blob]),
                offset,
                length
            }),
            (1u64..99).prop_map(|zeros| Piece::Zeros { zeros }),
            prop::collection::vec(any::<u8>(), 1..9).prop_map(|literal| Piece::Literal { literal }),
        ]
    }

    proptest! {
        #[test]
        fn outline_names_the_same_blobs_as_the_recipe(pieces in prop::collection::vec(piece(), 1..20)) {
            let recipe = Recipe::new(Digest::of(b"f"), pieces, vec![]).unwrap();
            let outline = RecipeOutline::parse(&recipe.to_json()).unwrap();
            prop_assert_eq!((outline.file(), outline.size()), (recipe.file(), recipe.size()));
            prop_assert!(outline.digests().iter().copied().eq(recipe.digests()));
        }
    }
}
