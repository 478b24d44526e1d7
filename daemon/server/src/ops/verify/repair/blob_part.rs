//! The ranges of a file that contain a blob.

use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::{Piece, Recipe};

/// A range of a file that is a range of a blob. All numbers are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct BlobPart {
    pub(super) offset_in_file: u64,
    pub(super) offset_in_blob: u64,
    pub(super) length: u64,
}

impl BlobPart {
    pub(super) const fn whole(size: u64) -> Self {
        Self { offset_in_file: 0, offset_in_blob: 0, length: size }
    }

    pub(super) const fn end_in_file(&self) -> u64 {
        self.offset_in_file.saturating_add(self.length)
    }
}

/// The ranges of a split file that together contain the whole blob, in the order of the blob and as few as
/// possible. Empty if the file does not contain all of it.
pub(super) fn parts_of_blob(recipe: &Recipe, blob: Digest) -> Vec<BlobPart> {
    let parts = parts_in_files([recipe], blob);
    parts.into_iter().map(|(_, part)| part).collect()
}

/// The ranges of several split files that together contain the whole blob, as [`parts_of_blob`], each with the number of its
/// file.
pub(super) fn parts_in_files<'r>(
    recipes: impl IntoIterator<Item = &'r Recipe>,
    blob: Digest,
) -> Vec<(usize, BlobPart)> {
    let (mut found, mut size) = (Vec::new(), 0);
    for (file, recipe) in recipes.into_iter().enumerate() {
        let part = |(offset_in_file, piece): (u64, &Piece)| match *piece {
            Piece::Blob { blob: other, offset: offset_in_blob, length } if other == blob => {
                Some((file, BlobPart { offset_in_file, offset_in_blob, length }))
            }
            _ => None,
        };
        found.extend(recipe.pieces().with_offsets().filter_map(part));
        size = size.max(recipe.blob_sizes().get(&blob).copied().unwrap_or_default());
    }
    found.sort_by_key(|(_, part)| (part.offset_in_blob, part.length));
    covering(&found, size)
}

/// Joins adjacent ranges and drops repeated ones: a file may contain a tensor twice. Empty if they are not a whole blob
/// of `size` bytes.
fn covering(parts: &[(usize, BlobPart)], size: u64) -> Vec<(usize, BlobPart)> {
    let mut covering: Vec<(usize, BlobPart)> = Vec::new();
    let mut covered = 0;
    for (file, part) in parts {
        if part.offset_in_blob != covered {
            continue;
        }
        covered = covered.saturating_add(part.length);
        match covering.last_mut() {
            Some((other, last)) if other == file && last.end_in_file() == part.offset_in_file => {
                last.length = last.length.saturating_add(part.length);
            }
            _ => covering.push((*file, *part)),
        }
    }
    if covered == size { covering } else { Vec::new() }
}

#[cfg(test)]
mod tests {
    use super::*;
    use blobd_store_format::tensor::TensorFormat;

    fn recipe(pieces: &[(&[u8], u64, u64)]) -> Recipe {
        let piece = |(blob, offset, length): &(&[u8], u64, u64)| match blob.is_empty() {
            true => Piece::Zeros { zeros: *length },
            false => Piece::Blob { blob: Digest::of(blob), offset: *offset, length: *length },
        };
        Recipe::new(Digest::of(b"file"), TensorFormat::Gguf, pieces.iter().map(piece).collect(), Vec::new())
            .unwrap()
    }

    fn found(pieces: &[(&[u8], u64, u64)]) -> Vec<(u64, u64, u64)> {
        let parts = parts_of_blob(&recipe(pieces), Digest::of(b"t"));
        parts.iter().map(|part| (part.offset_in_file, part.offset_in_blob, part.length)).collect()
    }

    #[test]
    fn tensor_is_one_range_after_the_preceding_pieces() {
        assert_eq!(found(&[(b"h", 0, 100), (b"", 0, 28), (b"t", 0, 64), (b"u", 0, 9)]), [(128, 0, 64)]);
    }

    #[test]
    fn experts_are_in_the_order_of_their_group_and_adjacent_ones_are_joined() {
        let file: [(&[u8], u64, u64); 5] =
            [(b"t", 128, 64), (b"", 0, 1), (b"t", 0, 64), (b"t", 64, 64), (b"u", 0, 5)];
        assert_eq!(found(&file), [(65, 0, 128), (0, 128, 64)]);
    }

    #[test]
    fn repeated_tensor_is_listed_once() {
        assert_eq!(found(&[(b"t", 0, 64), (b"u", 0, 5), (b"t", 0, 64)]), [(0, 0, 64)]);
    }

    #[test]
    fn incomplete_blob_has_no_ranges() {
        assert_eq!(found(&[(b"t", 0, 64), (b"t", 65, 64)]), []);
        assert_eq!(found(&[(b"t", 1, 64)]), []);
        assert_eq!(found(&[(b"u", 0, 64)]), []);
    }

    #[test]
    fn blob_of_which_other_files_have_the_rest_has_no_ranges() {
        let of_size = |size| {
            let shared = [(Digest::of(b"t"), size)].into();
            let recipe = recipe(&[(b"h", 0, 100), (b"t", 0, 64)]).sharing(shared).unwrap();
            parts_of_blob(&recipe, Digest::of(b"t")).len()
        };
        assert_eq!((of_size(64), of_size(128)), (1, 0));
    }

    #[test]
    fn files_together_have_a_blob_if_no_part_is_missing() {
        let part = |before: u64, offset: u64| {
            let shared = [(Digest::of(b"t"), 192)].into();
            recipe(&[(b"h", 0, before), (b"t", offset, 64)]).sharing(shared).unwrap()
        };
        let files = [part(7, 64), part(8, 128), part(9, 0)];
        let parts = |files: &[Recipe]| {
            let parts = parts_in_files(files, Digest::of(b"t")).into_iter();
            parts.map(|(file, part)| (file, part.offset_in_file, part.length)).collect::<Vec<_>>()
        };
        assert_eq!(parts(&files), [(2, 9, 64), (0, 7, 64), (1, 8, 64)]);
        assert_eq!(parts(&files[..2]), []);
    }
}
