//! Reading a stored file, which is one blob or a list of pieces.
//!
//! Recipes name blobs by digest, responses to an open by descriptor number. Both are read in the same way:
//! [`FilePieces::sources`] lists the sources of a range, [`FilePieces::read_at`] fills a buffer.

use std::ops::{Deref, Range};

use serde::{Deserialize, Serialize};

/// How a file is stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum StoredForm {
    /// As one blob, named by the file's own digest.
    Blob,
    /// As a recipe and the blobs it names.
    Recipe,
}

/// The source of consecutive bytes of a file. All numbers are bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Source<'p, B> {
    /// In a blob.
    Blob {
        blob: B,
        /// Their offset in the blob.
        offset: u64,
        length: u64,
    },
    Zeros {
        length: u64,
    },
    Literal {
        bytes: &'p [u8],
    },
}

impl<B> Source<'_, B> {
    /// The length in bytes.
    pub const fn length(&self) -> u64 {
        match self {
            Self::Blob { length, .. } | Self::Zeros { length } => *length,
            Self::Literal { bytes } => bytes.len() as u64,
        }
    }

    /// A sub-range. It must lie inside, so nothing overflows.
    fn part(self, range: Range<u64>) -> Self {
        let length = range.end.saturating_sub(range.start);
        match self {
            Self::Blob { blob, offset, .. } => {
                Self::Blob { blob, offset: offset.saturating_add(range.start), length }
            }
            Self::Zeros { .. } => Self::Zeros { length },
            Self::Literal { bytes } => {
                let place = |at| usize::try_from(at).unwrap_or(usize::MAX);
                Self::Literal { bytes: bytes.get(place(range.start)..place(range.end)).unwrap_or_default() }
            }
        }
    }
}

/// A piece of a file in a recipe or in the response to an open.
pub trait FilePiece {
    type Blob;

    /// A piece that is a whole blob of `size` bytes.
    fn whole(blob: Self::Blob, size: u64) -> Self;

    fn source(&self) -> Source<'_, Self::Blob>;
}

/// All pieces of a file, in order; derefs to them. Neither their sum nor an end in a blob overflows.
///
/// ```
/// use blobd_store_format::digest::Digest;
/// use blobd_store_format::recipe::Piece;
/// use blobd_store_format::stored_file::FilePieces;
///
/// let blob = Digest::of(b"weights");
/// let pieces = FilePieces::new(vec![
///     Piece::Blob { blob, offset: 1, length: 3 },
///     Piece::Literal { literal: b"!?".to_vec() },
/// ])?;
/// let mut buffer = [0; 8];
/// let read = pieces.read_at(1, &mut buffer, |_blob, offset, bytes| {
///     let start = usize::try_from(offset).unwrap();
///     Ok::<_, std::io::Error>(bytes.copy_from_slice(&b"weights"[start..start + bytes.len()]))
/// })?;
/// assert_eq!(&buffer[..read], b"ig!?");
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FilePieces<P> {
    pieces: Vec<P>,
    /// The offset in the file at which each piece ends.
    ends: Vec<u64>,
}

/// A piece whose end in the file or in its blob does not fit 64 bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error("piece {index} ends beyond 2^64")]
pub struct PieceError {
    pub index: usize,
}

impl<P: FilePiece> FilePieces<P> {
    /// Checks and adds up the pieces.
    pub fn new(pieces: Vec<P>) -> Result<Self, PieceError> {
        let mut size = 0u64;
        let mut end_of = |(index, piece): (usize, &P)| {
            let source = piece.source();
            let is_valid = match source {
                Source::Blob { offset, length, .. } => offset.checked_add(length).is_some(),
                Source::Zeros { .. } | Source::Literal { .. } => true,
            };
            let end = size.checked_add(source.length()).filter(|_| is_valid);
            size = end.ok_or(PieceError { index })?;
            Ok(size)
        };
        let ends = pieces.iter().enumerate().map(&mut end_of).collect::<Result<_, _>>()?;
        Ok(Self { pieces, ends })
    }

    /// A file that is one blob.
    pub fn whole(blob: P::Blob, size: u64) -> Self {
        Self { pieces: vec![P::whole(blob, size)], ends: vec![size] }
    }

    pub fn size(&self) -> u64 {
        self.ends.last().copied().unwrap_or_default()
    }

    /// The pieces, each with the offset in the file at which it starts.
    pub fn with_offsets(&self) -> impl Iterator<Item = (u64, &P)> {
        std::iter::once(0).chain(self.ends.iter().copied()).zip(&self.pieces)
    }

    /// The sources of a range of the file, in order, up to the end of the file. No source is empty.
    pub fn sources(&self, range: Range<u64>) -> impl Iterator<Item = Source<'_, P::Blob>> {
        let Range { start, end } = range;
        let first = self.ends.partition_point(|end_of_piece| *end_of_piece <= start);
        let mut piece_start = first.checked_sub(1).and_then(|last| self.ends.get(last)).copied().unwrap_or(0);
        let ends = self.ends.get(first..).unwrap_or_default();
        let pieces = self.pieces.get(first..).unwrap_or_default();
        let sources = pieces.iter().zip(ends).map_while(move |(piece, piece_end)| {
            let own_start = std::mem::replace(&mut piece_start, *piece_end);
            let from = start.max(own_start).saturating_sub(own_start);
            let to = end.min(*piece_end).saturating_sub(own_start);
            (own_start < end).then(|| piece.source().part(from..to))
        });
        sources.filter(|source| source.length() > 0)
    }

    /// Fills `buffer` from `offset` on, up to the end of the file, and returns the number of bytes.
    /// `read_blob` fills a buffer from an offset of a blob.
    pub fn read_at<E>(
        &self,
        offset: u64,
        buffer: &mut [u8],
        mut read_blob: impl FnMut(P::Blob, u64, &mut [u8]) -> Result<(), E>,
    ) -> Result<usize, E> {
        let length = buffer.len();
        let mut rest = buffer;
        for source in self.sources(offset..offset.saturating_add(length as u64)) {
            let portion = usize::try_from(source.length()).unwrap_or(usize::MAX).min(rest.len());
            let (now, later) = rest.split_at_mut(portion);
            match source {
                Source::Blob { blob, offset, .. } => read_blob(blob, offset, now)?,
                Source::Zeros { .. } => now.fill(0),
                Source::Literal { bytes } => now.copy_from_slice(bytes),
            }
            rest = later;
        }
        Ok(length - rest.len())
    }
}

impl<P> Deref for FilePieces<P> {
    type Target = [P];

    fn deref(&self) -> &[P] {
        &self.pieces
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;

    use proptest::prelude::*;

    use super::*;
    use crate::digest::Digest;
    use crate::recipe::Piece;

    /// The byte of a blob at an offset.
    fn byte(blob: Digest, offset: u64) -> u8 {
        blob.as_bytes()[0] ^ u8::try_from(offset % 251).unwrap()
    }

    fn read(blob: Digest, offset: u64, buffer: &mut [u8]) -> Result<(), Infallible> {
        buffer.iter_mut().zip(offset..).for_each(|(to, offset)| *to = byte(blob, offset));
        Ok(())
    }

    /// The file, piece by piece.
    fn whole_file(pieces: &[Piece]) -> Vec<u8> {
        let bytes = |piece: &Piece| match piece {
            Piece::Blob { blob, offset, length } => {
                (*offset..offset + length).map(|offset| byte(*blob, offset)).collect()
            }
            Piece::Zeros { zeros } => vec![0; usize::try_from(*zeros).unwrap()],
            Piece::Literal { literal } => literal.clone(),
        };
        pieces.iter().flat_map(bytes).collect()
    }

    fn piece() -> impl Strategy<Value = Piece> {
        prop_oneof![
            (0u8..4, 0u64..99, 0u64..40).prop_map(|(blob, offset, length)| Piece::Blob {
                blob: Digest::of(&[blob]),
                offset,
                length,
            }),
            (0u64..40).prop_map(|zeros| Piece::Zeros { zeros }),
            prop::collection::vec(any::<u8>(), 0..40).prop_map(|literal| Piece::Literal { literal }),
        ]
    }

    proptest! {
        #[test]
        fn any_range_has_the_bytes_of_the_file(
            pieces in prop::collection::vec(piece(), 0..12),
            offset in 0u64..500,
            length in 0usize..500,
        ) {
            let file = whole_file(&pieces);
            let pieces = FilePieces::new(pieces).unwrap();
            prop_assert_eq!(pieces.size(), file.len() as u64);
            let mut buffer = vec![0xee; length];
            let read = pieces.read_at(offset, &mut buffer, read).unwrap();
            let start = usize::try_from(offset).unwrap().min(file.len());
            let expected = &file[start..(start + length).min(file.len())];
            prop_assert_eq!(&buffer[..read], expected);
            prop_assert!(buffer[read..].iter().all(|byte| *byte == 0xee), "written behind the end");
        }

        #[test]
        fn sources_of_neighbouring_ranges_add_up(
            pieces in prop::collection::vec(piece(), 0..12),
            bound in 0u64..500,
        ) {
            let pieces = FilePieces::new(pieces).unwrap();
            let lengths = |range| pieces.sources(range).map(|source| source.length()).sum::<u64>();
            prop_assert_eq!(lengths(0..bound), bound.min(pieces.size()));
            prop_assert_eq!(lengths(0..bound) + lengths(bound..u64::MAX), pieces.size());
            prop_assert!(pieces.sources(0..bound).all(|source| source.length() > 0));
            let starts = pieces.with_offsets().map(|(start, piece)| start + piece.length());
            prop_assert!(starts.eq(pieces.ends.iter().copied()));
        }
    }

    #[test]
    fn whole_blob_is_one_source_and_an_empty_one_none() {
        let blob = Digest::of(b"b");
        let pieces = FilePieces::<Piece>::whole(blob, 10);
        let sources: Vec<_> = pieces.sources(4..99).collect();
        assert_eq!(sources, [Source::Blob { blob, offset: 4, length: 6 }]);
        assert_eq!(pieces.sources(10..99).count() + pieces.sources(4..4).count(), 0);
        assert_eq!(FilePieces::<Piece>::whole(blob, 0).sources(0..u64::MAX).count(), 0);
    }

    #[test]
    fn pieces_that_end_beyond_64_bits_are_refused() {
        let blob = |offset, length| Piece::Blob { blob: Digest::of(b"b"), offset, length };
        let refused = |pieces| FilePieces::new(pieces).unwrap_err().index;
        assert_eq!(refused(vec![blob(0, 1), blob(u64::MAX, 1)]), 1);
        assert_eq!(refused(vec![blob(0, u64::MAX), Piece::Zeros { zeros: 1 }]), 1);
        let largest = FilePieces::new(vec![blob(0, u64::MAX)]).unwrap();
        assert_eq!(largest.sources(u64::MAX - 1..u64::MAX).map(|source| source.length()).sum::<u64>(), 1);
    }
}
