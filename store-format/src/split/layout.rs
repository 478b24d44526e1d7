//! Where each tensor lies in its file, checked: aligned, inside, not overlapping.

use super::error::SplitError;
use crate::gguf::Header;
use crate::tensor::TensorInfo;

/// A tensor's bytes in the file.
#[derive(Clone, Copy, Debug)]
pub(super) struct Extent {
    /// The tensor's place in the header's table.
    pub(super) tensor: usize,
    /// From the start of the file.
    pub(super) start: u64,
    /// 0 for a tensor without elements.
    pub(super) size: u64,
}

impl Extent {
    pub(super) fn end(&self) -> u64 {
        // `place` has proved that it lies in the file.
        self.start.saturating_add(self.size)
    }
}

/// Places every tensor, in the order of the table.
pub(super) fn extents(header: &Header, file_size: u64) -> Result<Vec<Extent>, SplitError> {
    let header_size = header.bytes().len() as u64;
    if file_size < header_size {
        return Err(SplitError::Header { header_size, file_size });
    }
    // Without the final padding the data section may start behind the end of the file.
    let data_size = file_size.saturating_sub(header.data_offset());
    let boundaries = boundaries(header);
    let place = |(tensor, info): (usize, TensorInfo<'_>)| {
        let size = check(&info, header.alignment(), data_size, &boundaries)?;
        // `check` has proved that the offset is in the data section.
        Ok(Extent { tensor, start: header.data_offset().saturating_add(info.offset()), size })
    };
    header.tensors().enumerate().map(place).collect()
}

/// The tensors that have bytes, in the order of the file.
pub(super) fn file_order(header: &Header, extents: &[Extent]) -> Result<Vec<Extent>, SplitError> {
    let mut ordered: Vec<Extent> = extents.iter().filter(|extent| extent.size > 0).copied().collect();
    ordered.sort_unstable_by_key(|extent| extent.start);
    match ordered.array_windows().find(|[first, second]| second.start < first.end()) {
        Some([first, second]) => Err(overlap(header, first, second)),
        None => Ok(ordered),
    }
}

/// Where tensors start, in order: a tensor of an unknown type goes on up to the next one.
fn boundaries(header: &Header) -> Vec<u64> {
    let mut offsets: Vec<u64> = header.tensors().map(|info| info.offset()).collect();
    offsets.sort_unstable();
    offsets
}

/// Proves that a tensor is where it may be; returns its size.
fn check(
    info: &TensorInfo<'_>,
    alignment: u64,
    data_size: u64,
    boundaries: &[u64],
) -> Result<u64, SplitError> {
    let (name, offset) = (|| info.name().to_owned(), info.offset());
    if !offset.is_multiple_of(alignment) {
        return Err(SplitError::Misaligned { name: name(), offset, alignment });
    }
    let size = info.size_bytes().unwrap_or_else(|| {
        let next = boundaries.get(boundaries.partition_point(|start| *start <= offset));
        next.copied().unwrap_or(data_size).saturating_sub(offset)
    });
    if offset.checked_add(size).is_none_or(|end| end > data_size) {
        return Err(SplitError::Outside { name: name(), offset, size, data_size });
    }
    if size == 0 && info.shape().element_count() > 0 {
        return Err(SplitError::NoBytes { name: name(), ggml_type: info.ggml_type(), offset });
    }
    Ok(size)
}

fn overlap(header: &Header, first: &Extent, second: &Extent) -> SplitError {
    let info = |extent: &Extent| header.tensors().nth(extent.tensor);
    let name = |extent| info(extent).map(|info| info.name().to_owned()).unwrap_or_default();
    let offset = info(second).map(|info| info.offset()).unwrap_or_default();
    SplitError::Overlap { first: name(first), second: name(second), offset }
}
