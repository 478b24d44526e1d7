//! Plans the image of a file in a model's folder: which of its pages are mapped from blobs, and what is copied.
//!
//! A file that is stored whole is its blob. A safetensors file gets another header and another order of its tensors: the
//! format allows no gap between tensors, so first come those whose bytes are whole pages of a blob, each at a page of the
//! image, and then the others. Of these, the largest starts at a page and is mapped up to its last whole page; the rest is
//! copied. Names, types, shapes, metadata and values are the file's. Any other split file is copied.

use blobd_client::error::ModelError;
use blobd_client::gguf_view::ImagePart;
use blobd_client::model::OpenModel;
use blobd_client::protocol::response::OpenPiece;
use blobd_store_format::safetensors::{Header, HeaderWriter, SafetensorsError, Tensor};
use blobd_store_format::stored_file::{FilePieces, Source};

/// The image of a file: a header, then mapped parts, then copied pieces.
#[derive(Debug, Default, PartialEq, Eq)]
pub(super) struct FileImage {
    pub(super) header: Vec<u8>,
    /// Each at a page of the image.
    pub(super) parts: Vec<ImagePart>,
    /// Where the copied pieces start: at a page.
    pub(super) copied_offset: u64,
    pub(super) copied: Vec<OpenPiece>,
    pub(super) length: u64,
}

impl FileImage {
    pub(super) fn of_layer(model: &OpenModel, layer: usize) -> Result<Self, ModelError> {
        let pieces = model.file(layer)?;
        if let [OpenPiece::Fd { fd, offset: 0, length }] = **pieces {
            return Ok(Self::whole(fd, length));
        }
        let header = read_header(model, &pieces)?;
        let planned = header.and_then(|header| {
            let page = rustix::param::page_size() as u64;
            plan(&header, &pieces, page).ok()
        });
        Ok(planned.unwrap_or_else(|| Self::copy(&pieces)))
    }

    fn whole(fd: u32, length: u64) -> Self {
        let part = ImagePart { offset: 0, length, fd, fd_offset: 0 };
        let parts = if length > 0 { vec![part] } else { Vec::new() };
        Self { parts, length, copied_offset: length, ..Self::default() }
    }

    fn copy(pieces: &FilePieces<OpenPiece>) -> Self {
        Self { copied: pieces.to_vec(), length: pieces.size(), ..Self::default() }
    }

    pub(super) const fn copied_length(&self) -> u64 {
        self.length.saturating_sub(self.copied_offset)
    }
}

/// The header of a safetensors file; `None` for any other file.
fn read_header(model: &OpenModel, pieces: &FilePieces<OpenPiece>) -> Result<Option<Header>, ModelError> {
    let read = |buffer: &mut [u8]| pieces.read_at(0, buffer, |fd, at, bytes| model.read_at(fd, at, bytes));
    let mut length = [0; Header::LENGTH_BYTES];
    read(&mut length)?;
    let Some(end) = Header::end(length).ok().filter(|end| *end <= pieces.size()) else { return Ok(None) };
    let mut start = vec![0; usize::try_from(end).unwrap_or(usize::MAX)];
    read(&mut start)?;
    Ok(Header::parse_start(&start).ok())
}

/// Tensors that follow each other in a blob.
struct Run<'h> {
    tensors: Vec<&'h Tensor>,
    fd: u32,
    fd_offset: u64,
    length: u64,
}

/// # Errors
/// If the tensors are not the file's whole data, or no header can be made.
fn plan(header: &Header, pieces: &FilePieces<OpenPiece>, page: u64) -> Result<FileImage, SafetensorsError> {
    header.check_file_size(pieces.size())?;
    let (filled, empty): (Vec<&Tensor>, Vec<_>) =
        header.tensors().iter().partition(|tensor| tensor.size_bytes() > 0);
    let (runs, scattered) = runs(pieces, filled);
    let starts_at_page = |run: &Run<'_>| run.fd_offset.is_multiple_of(page);
    let (whole, mut loose): (Vec<_>, Vec<_>) =
        runs.into_iter().partition(|run| starts_at_page(run) && run.length.is_multiple_of(page));
    // The tensors after it must stay aligned to their elements.
    let bits =
        loose.iter().flat_map(|run| &run.tensors).chain(&scattered).map(|tensor| tensor.dtype().bits());
    let alignment = bits.max().unwrap_or_default().div_ceil(8);
    let can_be_first = |run: &Run<'_>| starts_at_page(run) && run.length.is_multiple_of(alignment);
    let largest = (0..loose.len())
        .filter(|place| loose.get(*place).is_some_and(can_be_first))
        .max_by_key(|place| loose.get(*place).map(|run| run.length));
    let first = largest.map(|place| loose.remove(place));
    let mut rest: Vec<&Tensor> = loose.into_iter().flat_map(|run| run.tensors).chain(scattered).collect();
    rest.sort_by_key(|tensor| std::cmp::Reverse(tensor.dtype().bits()));
    let mapped = || whole.iter().chain(&first);
    let order = empty.iter().chain(mapped().flat_map(|run| &run.tensors)).chain(&rest);
    let mut image = FileImage { header: write_header(header, order.copied(), page)?, ..FileImage::default() };
    image.copied_offset = image.header.len() as u64;
    for run in mapped() {
        let length = run.length.checked_div(page).unwrap_or_default().saturating_mul(page);
        if length > 0 {
            let offset = image.copied_offset;
            image.parts.push(ImagePart { offset, length, fd: run.fd, fd_offset: run.fd_offset });
        }
        image.copied_offset = image.copied_offset.saturating_add(length);
        if length < run.length {
            let (offset, length) = (run.fd_offset.saturating_add(length), run.length.saturating_sub(length));
            image.copied.push(OpenPiece::Fd { fd: run.fd, offset, length });
        }
    }
    image.copied.extend(rest.into_iter().flat_map(|tensor| sources(pieces, tensor)).map(owned));
    let data = pieces.size().saturating_sub(header.data_offset());
    image.length = (image.header.len() as u64).saturating_add(data);
    Ok(image)
}

/// The tensors as runs in blobs, and those that are not each in one blob.
fn runs<'h>(pieces: &FilePieces<OpenPiece>, tensors: Vec<&'h Tensor>) -> (Vec<Run<'h>>, Vec<&'h Tensor>) {
    let (mut located, mut scattered) = (Vec::new(), Vec::new());
    for tensor in tensors {
        let mut found = sources(pieces, tensor);
        match (found.next(), found.next()) {
            (Some(Source::Blob { blob, offset, .. }), None) => located.push((blob, offset, tensor)),
            _ => scattered.push(tensor),
        }
    }
    located.sort_by_key(|(fd, offset, _)| (*fd, *offset));
    let mut runs: Vec<Run<'h>> = Vec::new();
    for (fd, fd_offset, tensor) in located {
        let length = tensor.size_bytes();
        let follows =
            |run: &&mut Run<'h>| (run.fd, run.fd_offset.checked_add(run.length)) == (fd, Some(fd_offset));
        match runs.last_mut().filter(follows) {
            Some(run) => {
                run.length = run.length.saturating_add(length);
                run.tensors.push(tensor);
            }
            None => runs.push(Run { tensors: vec![tensor], fd, fd_offset, length }),
        }
    }
    (runs, scattered)
}

fn sources<'p>(
    pieces: &'p FilePieces<OpenPiece>,
    tensor: &Tensor,
) -> impl Iterator<Item = Source<'p, u32>> + use<'p> {
    let start = tensor.offset_in_file();
    pieces.sources(start..start.saturating_add(tensor.size_bytes()))
}

fn owned(source: Source<'_, u32>) -> OpenPiece {
    match source {
        Source::Blob { blob: fd, offset, length } => OpenPiece::Fd { fd, offset, length },
        Source::Zeros { length } => OpenPiece::Zeros { zeros: length },
        Source::Literal { bytes } => OpenPiece::Literal { literal: bytes.to_vec() },
    }
}

/// The header for another order of the tensors, with spaces up to a page.
fn write_header<'h>(
    header: &Header,
    order: impl Iterator<Item = &'h Tensor>,
    page: u64,
) -> Result<Vec<u8>, SafetensorsError> {
    let mut writer = HeaderWriter::new();
    for (key, value) in header.metadata() {
        writer.metadata(key, value);
    }
    for tensor in order {
        writer.tensor(tensor.name(), tensor.dtype(), tensor.shape())?;
    }
    let mut written = writer.header()?;
    let page = usize::try_from(page).unwrap_or(1);
    written.resize(written.len().next_multiple_of(page), b' ');
    let length = (written.len().saturating_sub(Header::LENGTH_BYTES) as u64).to_le_bytes();
    Header::end(length)?;
    written.splice(..Header::LENGTH_BYTES, length);
    Ok(written)
}

#[cfg(test)]
mod tests {
    use blobd_store_format::safetensors::Dtype;
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 64;

    /// The byte of a blob at an offset.
    fn byte(fd: u32, offset: u64) -> u8 {
        u8::try_from((u64::from(fd) * 31 + offset * 7) % 251).unwrap()
    }

    fn bytes(piece: &OpenPiece) -> Vec<u8> {
        match piece {
            OpenPiece::Fd { fd, offset, length } => {
                (*offset..offset + length).map(|at| byte(*fd, at)).collect()
            }
            OpenPiece::Zeros { zeros } => vec![0; usize::try_from(*zeros).unwrap()],
            OpenPiece::Literal { literal } => literal.clone(),
        }
    }

    /// A file whose tensors, of these types and numbers of elements, are in these blobs at these offsets.
    fn file(tensors: &[(Dtype, u64, u32, u64)]) -> (Header, FilePieces<OpenPiece>) {
        let mut writer = HeaderWriter::new();
        writer.metadata("format", "pt");
        let mut pieces = Vec::new();
        for (number, (dtype, count, fd, offset)) in tensors.iter().enumerate() {
            writer.tensor(&format!("t{number}"), *dtype, &[*count]).unwrap();
            pieces.push(OpenPiece::Fd { fd: *fd, offset: *offset, length: count * dtype.bits() / 8 });
        }
        let literal = writer.header().unwrap();
        let header = Header::parse_start(&literal).unwrap();
        pieces.insert(0, OpenPiece::Literal { literal });
        (header, FilePieces::new(pieces).unwrap())
    }

    /// The bytes that a program sees.
    fn image_bytes(image: &FileImage) -> Vec<u8> {
        let mut bytes_of = image.header.clone();
        for part in &image.parts {
            assert_eq!((part.offset % PAGE, part.fd_offset % PAGE), (0, 0), "{part:?}");
            assert_eq!(part.offset, bytes_of.len() as u64, "{part:?}");
            bytes_of.extend((part.fd_offset..part.fd_offset + part.length).map(|at| byte(part.fd, at)));
        }
        assert_eq!(image.copied_offset, bytes_of.len() as u64);
        assert!(image.copied_offset.is_multiple_of(PAGE));
        bytes_of.extend(image.copied.iter().flat_map(bytes));
        bytes_of
    }

    fn check(tensors: &[(Dtype, u64, u32, u64)]) -> FileImage {
        let (header, pieces) = file(tensors);
        let image = plan(&header, &pieces, PAGE).unwrap();
        let shown = image_bytes(&image);
        let found = Header::parse(&shown, shown.len() as u64).unwrap();
        assert_eq!((image.length, found.metadata()), (shown.len() as u64, header.metadata()));
        assert_eq!(found.tensors().len(), tensors.len());
        for (number, (dtype, count, fd, offset)) in tensors.iter().enumerate() {
            let tensor = found.tensor(&format!("t{number}")).unwrap();
            assert_eq!((tensor.dtype(), tensor.shape()), (*dtype, &[*count][..]));
            let start = usize::try_from(tensor.offset_in_file()).unwrap();
            let piece = OpenPiece::Fd { fd: *fd, offset: *offset, length: tensor.size_bytes() };
            let expected = bytes(&piece);
            assert!(shown[start..start + expected.len()] == expected[..], "t{number}");
            assert!(tensor.offset_in_file().is_multiple_of(dtype.bits() / 8), "t{number} is aligned");
        }
        image
    }

    #[test]
    fn tensors_of_whole_pages_are_mapped_and_one_other_up_to_its_last_page() {
        let image = check(&[
            (Dtype::U8, 8, 0, 0),
            (Dtype::BF16, 64, 1, 0),
            (Dtype::F32, 50, 2, 0),
            (Dtype::F32, 0, 3, 0),
            (Dtype::F16, 96, 4, 0),
        ]);
        let parts: Vec<_> = image.parts.iter().map(|part| (part.fd, part.length)).collect();
        assert_eq!(parts, [(1, 128), (4, 192), (2, 192)]);
        assert_eq!(image.copied_length(), 8 + 8);
    }

    #[test]
    fn experts_in_one_blob_are_one_part_in_the_order_of_the_blob() {
        let image = check(&[(Dtype::I8, 96, 0, 96), (Dtype::I8, 128, 1, 0), (Dtype::I8, 96, 0, 0)]);
        assert_eq!(image.parts.len(), 2);
        assert_eq!(image.copied_length(), 0);
    }

    #[test]
    fn file_with_bytes_behind_its_tensors_is_not_planned() {
        let (header, pieces) = file(&[(Dtype::U8, 64, 0, 0)]);
        let mut longer = pieces.to_vec();
        longer.push(OpenPiece::Zeros { zeros: 1 });
        let longer = FilePieces::new(longer).unwrap();
        assert!(plan(&header, &longer, PAGE).is_err());
        let copy = FileImage::copy(&longer);
        assert_eq!((copy.copied_length(), copy.parts.len()), (longer.size(), 0));
    }

    proptest! {
        #[test]
        fn image_of_any_file_has_its_tensors(
            tensors in prop::collection::vec(
                (
                    prop::sample::select(vec![Dtype::U8, Dtype::BF16, Dtype::F32, Dtype::I64]),
                    0u64..99,
                    0u32..4,
                    (0u64..9).prop_map(|places| places * 32),
                ),
                0..12,
            ),
        ) {
            check(&tensors);
        }
    }
}
