//! File layouts: which bytes of a model file belong to which tensor, independent of the format.
//!
//! A [`FileLayout`] hides the format from the rest of blobd: a file is a header and a data section, in
//! which each tensor has a range, a name, a type, a shape and perhaps an expert group.
//! [`crate::file_format`] makes a layout from the start of a file; [`crate::split`] uses it.
//!
//! The ranges of a layout cover the file exactly once, in order, and every tensor is in the data
//! section. The paths of the store's files are in [`crate::layout`].

use std::borrow::Cow;

use crate::expert::ExpertGroup;
use crate::tensor::{Experts, TensorFormat};
use crate::tensor_table::{TableRow, TensorTable};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FileLayout {
    file_size: u64,
    tensors: TensorRanges,
    groups: Vec<ExpertGroup>,
    /// Sorted, adjacent, none empty.
    ranges: Vec<FileRange>,
    content: FileContent,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum FileContent {
    Tensors(TensorFormat),
    Archive(Vec<ArchiveMember>),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveMember {
    pub file: ArchiveFile,
    /// Its format, if it is split.
    pub format: Option<TensorFormat>,
    pub tensor_count: usize,
}

/// The tensors of a file, in the order of its own table.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct TensorRanges {
    table: TensorTable,
    offsets: Vec<u64>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TensorRange<'t> {
    pub name: &'t str,
    /// The name of its type in its format, such as `Q4_K`.
    pub type_name: Cow<'t, str>,
    /// Its dimensions, in the order of its format.
    pub shape: &'t [u64],
    /// Where it starts, in bytes from the start of the data section; not necessarily aligned.
    pub offset: u64,
    /// Its size in bytes; 0 without elements. Its elements may have fewer than 8 bits each. A tensor of an unknown type
    /// extends to the next tensor.
    pub size: u64,
    /// The position of each expert, if it is a stack of experts.
    pub experts: Option<Experts>,
}

/// A regular file in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveFile {
    /// Its path, without `./` in front; checked by [`crate::archive::TarReader`].
    pub path: String,
    /// Where its content starts, in bytes from the start of the archive.
    pub offset: u64,
    /// Its length in bytes; never 0.
    pub size: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileRange {
    pub content: RangeContent,
    /// Where it starts, in bytes from the start of the file.
    pub offset: u64,
    /// Its length in bytes; never 0.
    pub size: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RangeContent {
    /// The header and the padding before the data section; in an archive, of one of its files.
    Header,
    /// All bytes of the tensor at this index of [`FileLayout::tensors`].
    Tensor(usize),
    /// Bytes that belong to no tensor: padding or trailing bytes.
    Gap,
}

impl FileLayout {
    /// Checks the tensors of a file of `file_size` bytes. The data section may start after the end
    /// of a file that lacks the padding after its header. `groups` refer to indices of `tensors`.
    pub(crate) fn new(
        format: TensorFormat,
        file_size: u64,
        data_offset: u64,
        tensors: TensorRanges,
        groups: Vec<ExpertGroup>,
    ) -> Result<Self, LayoutError> {
        let data_size = file_size.saturating_sub(data_offset);
        check_ends(&tensors, data_size)?;
        let in_order = in_file_order(&tensors)?;
        let mut ranges = Ranges::default();
        ranges.push(RangeContent::Header, data_offset.min(file_size));
        for (offset, place) in in_order {
            // `check_ends` has proved that the sum is in the file.
            ranges.fill_up_to(data_offset.saturating_add(offset));
            ranges.push(RangeContent::Tensor(place), tensors.size(place));
        }
        let content = FileContent::Tensors(format);
        Ok(Self { file_size, ranges: ranges.up_to(file_size), tensors, groups, content })
    }

    /// The layout of an archive whose parts have been checked.
    pub(crate) fn for_archive(
        file_size: u64,
        tensors: TensorRanges,
        groups: Vec<ExpertGroup>,
        ranges: Vec<FileRange>,
        members: Vec<ArchiveMember>,
    ) -> Self {
        Self { file_size, tensors, groups, ranges, content: FileContent::Archive(members) }
    }

    pub fn file_size(&self) -> u64 {
        self.file_size
    }

    pub const fn tensors(&self) -> &TensorRanges {
        &self.tensors
    }

    /// Tensors that are stored as one blob, by their indices.
    pub fn groups(&self) -> &[ExpertGroup] {
        &self.groups
    }

    pub fn ranges(&self) -> &[FileRange] {
        &self.ranges
    }

    pub const fn content(&self) -> &FileContent {
        &self.content
    }

    pub(crate) fn into_parts(self) -> (TensorRanges, FileContent) {
        (self.tensors, self.content)
    }
}

impl TensorRanges {
    pub fn len(&self) -> usize {
        self.table.len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn get(&self, index: usize) -> Option<TensorRange<'_>> {
        Some(TensorRange::new(self.table.get(index)?, self.offset(index)))
    }

    pub fn iter(&self) -> impl ExactSizeIterator<Item = TensorRange<'_>> + Clone {
        self.table.iter().zip(&self.offsets).map(|(row, offset)| TensorRange::new(row, *offset))
    }

    pub(crate) fn append(&mut self, other: &Self) {
        self.table.append(&other.table);
        self.offsets.extend_from_slice(&other.offsets);
    }

    pub(crate) fn into_table(self) -> TensorTable {
        self.table
    }

    fn offset(&self, index: usize) -> u64 {
        self.offsets.get(index).copied().unwrap_or_default()
    }

    fn size(&self, index: usize) -> u64 {
        self.table.get(index).map_or(0, |row| row.size)
    }

    fn name(&self, index: usize) -> String {
        self.table.get(index).map_or_else(String::new, |row| row.name.to_owned())
    }

    fn end(&self, index: usize) -> u64 {
        // `check_ends` has proved that the sum does not overflow.
        self.offset(index).saturating_add(self.size(index))
    }
}

impl<'t> FromIterator<TensorRange<'t>> for TensorRanges {
    fn from_iter<I: IntoIterator<Item = TensorRange<'t>>>(ranges: I) -> Self {
        let mut tensors = Self::default();
        for TensorRange { name, type_name, shape, offset, size, experts } in ranges {
            tensors.table.push(TableRow { name, type_name: &type_name, shape, size, experts });
            tensors.offsets.push(offset);
        }
        tensors
    }
}

impl<'t> TensorRange<'t> {
    const fn new(row: TableRow<'t>, offset: u64) -> Self {
        let TableRow { name, type_name, shape, size, experts } = row;
        Self { name, type_name: Cow::Borrowed(type_name), shape, offset, size, experts }
    }
}

/// Why tensors do not fit their file. Offsets are relative to the data section.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    #[error(
        "tensor {name:?}: offset {offset} and size {size} end beyond the data section of {data_size} bytes{}",
        incomplete(*data_size, *expected)
    )]
    Outside {
        name: String,
        offset: u64,
        size: u64,
        data_size: u64,
        /// The least size of the data section that has all tensors, if that can be a size.
        expected: Option<u64>,
    },
    #[error("tensors {first:?} and {second:?} overlap at offset {offset}")]
    Overlap { first: String, second: String, offset: u64 },
}

/// How much of an incomplete data section there is.
fn incomplete(data_size: u64, expected: Option<u64>) -> String {
    expected.map_or_else(String::new, |expected| {
        format!(
            "; the file is incomplete: expected at least {expected} bytes in this section, found {data_size}"
        )
    })
}

fn check_ends(tensors: &TensorRanges, data_size: u64) -> Result<(), LayoutError> {
    let end = |tensor: TensorRange<'_>| tensor.offset.checked_add(tensor.size);
    let is_outside = |tensor: &TensorRange<'_>| end(tensor.clone()).is_none_or(|end| end > data_size);
    let Some(outside) = tensors.iter().find(is_outside) else { return Ok(()) };
    let expected = tensors.iter().map(end).try_fold(0, |most, end| Some(most.max(end?)));
    let (name, offset, size) = (outside.name.to_owned(), outside.offset, outside.size);
    Err(LayoutError::Outside { name, offset, size, data_size, expected })
}

/// The offsets and indices of the tensors that have bytes.
fn in_file_order(tensors: &TensorRanges) -> Result<Vec<(u64, usize)>, LayoutError> {
    let places = tensors.offsets.iter().copied().zip(0..);
    let mut ordered: Vec<(u64, usize)> = places.filter(|(_, place)| tensors.size(*place) > 0).collect();
    ordered.sort_unstable();
    match ordered.array_windows().find(|[(_, first), (second, _)]| *second < tensors.end(*first)) {
        Some([(_, first), (offset, second)]) => {
            let (first, second) = (tensors.name(*first), tensors.name(*second));
            Err(LayoutError::Overlap { first, second, offset: *offset })
        }
        None => Ok(ordered),
    }
}

/// Builds adjacent ranges from the start of a file.
#[derive(Default)]
pub(crate) struct Ranges {
    position: u64,
    ranges: Vec<FileRange>,
}

impl Ranges {
    pub(crate) fn push(&mut self, content: RangeContent, size: u64) {
        if size > 0 {
            self.ranges.push(FileRange { content, offset: self.position, size });
            self.position = self.position.saturating_add(size);
        }
    }

    pub(crate) fn fill_up_to(&mut self, end: u64) {
        self.push(RangeContent::Gap, end.saturating_sub(self.position));
    }

    /// All ranges of a file of this size.
    pub(crate) fn up_to(mut self, file_size: u64) -> Vec<FileRange> {
        self.fill_up_to(file_size);
        self.ranges
    }
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn tensors(places: &[(u64, u64)]) -> TensorRanges {
        let names: Vec<String> = (0..places.len()).map(|number| number.to_string()).collect();
        let tensor = |(name, (offset, size)): (&String, &(u64, u64))| {
            let shape = [*size];
            let range = TensorRange {
                name,
                type_name: "I8".into(),
                shape: &shape,
                offset: *offset,
                size: *size,
                experts: None,
            };
            TensorRanges::from_iter([range])
        };
        let mut tensors = TensorRanges::default();
        names.iter().zip(places).map(tensor).for_each(|one| tensors.append(&one));
        tensors
    }

    fn layout(file_size: u64, data_offset: u64, places: &[(u64, u64)]) -> Result<FileLayout, LayoutError> {
        FileLayout::new(TensorFormat::Gguf, file_size, data_offset, tensors(places), Vec::new())
    }

    /// The content of each byte of the data section; `None` if tensors overlap or end after it.
    fn bytes(data_size: u64, places: &[(u64, u64)]) -> Option<Vec<RangeContent>> {
        let mut bytes = vec![RangeContent::Gap; usize::try_from(data_size).unwrap()];
        for (place, (offset, size)) in places.iter().enumerate() {
            for byte in bytes
                .get_mut(usize::try_from(*offset).unwrap()..)?
                .get_mut(..usize::try_from(*size).unwrap())?
            {
                match byte {
                    RangeContent::Gap => *byte = RangeContent::Tensor(place),
                    _ => return None,
                }
            }
        }
        Some(bytes)
    }

    proptest! {
        #[test]
        fn layout_covers_every_byte_or_is_refused(
            data_offset in 0..40_u64,
            data_size in 0..200_u64,
            places in vec((0..200_u64, prop_oneof![Just(0), 1..20_u64]), 0..8),
        ) {
            let layout = layout(data_offset + data_size, data_offset, &places);
            let Some(expected) = bytes(data_size, &places) else {
                prop_assert!(layout.is_err());
                return Ok(());
            };
            let layout = layout.unwrap();
            prop_assert_eq!(layout.file_size(), data_offset + data_size);
            let mut found = Vec::new();
            for range in layout.ranges() {
                prop_assert_eq!(range.offset, found.len() as u64, "a gap or an overlap");
                prop_assert!(range.size > 0);
                found.extend((0..range.size).map(|_| range.content));
            }
            let (header, data) = found.split_at(usize::try_from(data_offset).unwrap());
            prop_assert!(header.iter().all(|content| *content == RangeContent::Header));
            prop_assert_eq!(data, expected);
        }
    }

    #[test]
    fn ends_that_overflow_are_refused() {
        for (offset, size) in [(u64::MAX, 1), (1, u64::MAX), (u64::MAX, 0)] {
            let error = layout(100, 10, &[(offset, size)]).unwrap_err();
            assert_eq!(
                error,
                LayoutError::Outside {
                    name: "0".to_owned(),
                    offset,
                    size,
                    data_size: 90,
                    expected: offset.checked_add(size),
                }
            );
        }
    }

    #[test]
    fn file_may_end_before_its_data_section() {
        let header = FileRange { content: RangeContent::Header, offset: 0, size: 25 };
        assert_eq!(layout(25, 32, &[(0, 0)]).unwrap().ranges(), [header]);
        assert!(layout(25, 32, &[(0, 1)]).is_err());
        assert!(layout(25, 32, &[(1, 0)]).is_err());
    }

    #[test]
    fn overlap_names_both_tensors() {
        let overlap = |first: &str, second: &str, offset| {
            let (first, second) = (first.to_owned(), second.to_owned());
            Err(LayoutError::Overlap { first, second, offset })
        };
        assert_eq!(layout(100, 0, &[(32, 8), (0, 33)]), overlap("1", "0", 32));
        assert_eq!(layout(100, 0, &[(0, 8), (0, 8)]), overlap("0", "1", 0));
    }
}
