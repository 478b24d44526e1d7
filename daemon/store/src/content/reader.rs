//! Reads stored files at any offset.

use std::borrow::Cow;
use std::fs::File;
use std::ops::Range;

use blobd_sha256::{Sha256, update_both};
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::{Piece, Recipe};
use blobd_store_format::stored_file::FilePieces;

use crate::bounded_read::{CHUNK_BYTES, read_exact};
use crate::content::Content;
use crate::root::Root;
use crate::{StoreError, StoredFile};

/// Reads a stored file, whether a blob or split. Blobs are opened when needed; the last one stays open.
#[derive(Debug)]
pub struct FileReader<'s> {
    store: &'s Content,
    pieces: Cow<'s, FilePieces<Piece>>,
    /// The open blob, and the store that it is in.
    open: Option<(Digest, File, Root)>,
}

impl<'s> FileReader<'s> {
    pub fn new(store: &'s Content, file: &'s StoredFile) -> Self {
        match &file.recipe {
            Some(recipe) => Self::for_recipe(store, recipe),
            None => Self::for_blob(store, file.descriptor.digest, file.descriptor.size),
        }
    }

    pub const fn for_recipe(store: &'s Content, recipe: &'s Recipe) -> Self {
        Self { store, pieces: Cow::Borrowed(recipe.pieces()), open: None }
    }

    pub fn for_blob(store: &'s Content, blob: Digest, size: u64) -> Self {
        Self { store, pieces: Cow::Owned(FilePieces::whole(blob, size)), open: None }
    }

    /// Reads an open file of `size` bytes as if it were this blob.
    pub(crate) fn for_open_file(store: &'s Content, blob: Digest, size: u64, file: File) -> Self {
        Self { open: Some((blob, file, store.root.clone())), ..Self::for_blob(store, blob, size) }
    }

    /// Reads into `buffer` from `offset` on; returns how many bytes, which are fewer at the end of the file.
    pub fn read_at(&mut self, offset: u64, buffer: &mut [u8]) -> Result<usize, StoreError> {
        let Self { store, pieces, open } = self;
        pieces.read_at(offset, buffer, |blob, offset, bytes| {
            let (_, file, root) = match open {
                Some(open) if open.0 == blob => open,
                _ => {
                    let end = offset.saturating_add(bytes.len() as u64);
                    let (file, root) = store.find_blob(blob, end)?;
                    open.insert((blob, file, root))
                }
            };
            read_exact(file, bytes, offset).map_err(root.failure("read", &layout::blob(blob)))
        })
    }

    /// Computes the digest of the file and, in the same pass, that of the file that has `start` in place of its first
    /// `replaced` bytes. `report` receives the number of bytes read and returns false to stop; the result is `None`
    /// then.
    pub fn hash_with_start(
        &mut self,
        replaced: u64,
        start: &[u8],
        report: &mut dyn FnMut(u64) -> bool,
    ) -> Result<Option<[Digest; 2]>, StoreError> {
        let (mut own, mut other, mut offset) = (Sha256::new(), Sha256::new(), 0);
        other.update(start);
        let mut buffer = vec![0; CHUNK_BYTES];
        while offset < self.pieces.size() {
            // The first chunks end where the files begin to be equal.
            let rest = replaced.checked_sub(offset).filter(|rest| *rest > 0);
            let length =
                rest.and_then(|rest| usize::try_from(rest).ok()).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let length = self.read_at(offset, buffer.get_mut(..length).unwrap_or_default())?;
            let bytes = buffer.get(..length).unwrap_or_default();
            match rest {
                Some(_) => own.update(bytes),
                None => update_both(&mut own, bytes, &mut other, bytes),
            }
            offset = offset.saturating_add(length as u64);
            if !report(offset) {
                return Ok(None);
            }
        }
        Ok(Some([own, other].map(|hash| Digest::from_bytes(hash.finish()))))
    }

    /// Reads a range of the file, shorter at the end of the file. The caller must bound its length.
    pub fn read_range(&mut self, range: Range<u64>) -> Result<Vec<u8>, StoreError> {
        let end = range.end.min(self.pieces.size());
        let mut bytes = vec![0; usize::try_from(end.saturating_sub(range.start)).unwrap_or(usize::MAX)];
        self.read_at(range.start, &mut bytes)?;
        Ok(bytes)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use blobd_store_format::tensor::TensorFormat;
    use tempfile::TempDir;

    use super::*;
    use crate::Store;
    use crate::testing::{add_blobs, new_store};

    fn store_with<const N: usize>(blobs: [&[u8]; N]) -> (TempDir, Arc<Store>, [Digest; N]) {
        let (folder, store) = new_store();
        let blobs = add_blobs(&store, blobs).try_into().unwrap();
        (folder, store, blobs)
    }

    #[test]
    fn any_range_of_a_split_file_is_read_from_its_blobs() {
        let (_folder, store, [header, weights]) = store_with([b"header", b"weights"]);
        let pieces = vec![
            Piece::Blob { blob: header, offset: 0, length: 6 },
            Piece::Zeros { zeros: 2 },
            Piece::Blob { blob: weights, offset: 3, length: 4 },
            Piece::Literal { literal: b"tail".to_vec() },
            Piece::Blob { blob: weights, offset: 0, length: 3 },
        ];
        let file = b"header\0\0ghtstailwei";
        let recipe = Recipe::new(Digest::of(file), TensorFormat::Gguf, pieces, Vec::new()).unwrap();
        let mut reader = FileReader::for_recipe(&store.content, &recipe);
        for start in 0..file.len() {
            for end in start..=file.len() {
                let read = reader.read_range(start as u64..end as u64).unwrap();
                assert_eq!(read, file[start..end], "{start}..{end}");
            }
        }
        assert_eq!(reader.read_range(15..u64::MAX).unwrap(), b"lwei");
        assert_eq!(reader.read_at(99, &mut [0; 4]).unwrap(), 0);
    }

    #[test]
    fn file_and_the_one_with_another_start_are_hashed_in_one_pass() {
        let weights = vec![7; CHUNK_BYTES + 9];
        let (_folder, store, [header, blob]) = store_with([b"header", &weights]);
        let pieces = vec![
            Piece::Blob { blob: header, offset: 0, length: 6 },
            Piece::Blob { blob, offset: 0, length: weights.len() as u64 },
        ];
        let file = [b"header", &weights[..]].concat();
        let recipe = Recipe::new(Digest::of(&file), TensorFormat::Gguf, pieces, Vec::new()).unwrap();
        for start in [&b""[..], b"a longer header"] {
            let mut read = 0;
            let mut report = |bytes| {
                read = bytes;
                true
            };
            let hashed =
                FileReader::for_recipe(&store.content, &recipe).hash_with_start(6, start, &mut report);
            let other = Digest::of(&[start, &weights].concat());
            assert_eq!(hashed.unwrap(), Some([Digest::of(&file), other]));
            assert_eq!(read, file.len() as u64);
        }
        let stopped =
            FileReader::for_recipe(&store.content, &recipe).hash_with_start(6, b"", &mut |bytes| bytes < 7);
        assert_eq!(stopped.unwrap(), None);
    }

    #[test]
    fn blob_that_is_missing_or_too_short_is_an_error() {
        let (_folder, store, [blob]) = store_with([b"blob"]);
        let mut reader = FileReader::for_blob(&store.content, blob, 6);
        assert_eq!(reader.read_range(1..3).unwrap(), b"lo");
        assert!(matches!(reader.read_range(1..6), Err(StoreError::Io { .. })), "it is open by now");
        let mut reader = FileReader::for_blob(&store.content, blob, 6);
        assert!(matches!(reader.read_range(1..6), Err(StoreError::BlobSize { found: 4, expected: 6, .. })));
        let mut missing = FileReader::for_blob(&store.content, Digest::of(b"missing"), 4);
        assert!(matches!(missing.read_range(0..4), Err(StoreError::MissingBlob { .. })));
    }
}
