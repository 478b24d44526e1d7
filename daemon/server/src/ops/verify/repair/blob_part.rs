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
    let part = |(offset_in_file, piece): (u64, &Piece)| match *piece {
        Piece::Blob { blob: other, offset: offset_in_blob, length } if other == blob => {
            Some(BlobPart { offset_in_file, offset_in_blob, length })
        }
        _ => None,
    };
    let mut found: Vec<BlobPart> = recipe.pieces().with_offsets().filter_map(part).collect();
    found.sort_by_key(|part| (part.offset_in_blob, part.length));
    let end = found.iter().map(|part| part.offset_in_blob.saturating_add(part.length)).max();
    covering(&found, recipe.shared_blobs().get(&blob).copied().or(end).unwrap_or_default())
}

/// Joins adjacent ranges and drops repeated ones: a file may contain a tensor twice. Empty if they are not a whole blob
/// of `size` bytes.
fn covering(parts: &[BlobPart], size: u64) -> Vec<BlobPart> {
    let mut covering: Vec<BlobPart> = Vec::new();
    let mut covered = 0;
    for part in parts {
        if part.offset_in_blob != covered {
            continue;
        }
        covered = covered.saturating_add(part.length);
        match covering.last_mut() {
            Some(last) if last.end_in_file() == part.offset_in_file => {
                last.length = last.length.saturating_add(part.length);
            }
            _ => covering.push(*part),
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
}
