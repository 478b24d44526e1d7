//! Archives of weights: which files are in them, and where.
//!
//! Registries of KitOps and CNCF ModelPack have layers that are tar archives. Their files are read in place: a
//! [`TarReader`] says which bytes of the archive it needs and finds the files, and [`layout`] joins their layouts
//! to one of the archive, by which it is split like any other file.

mod tar;

pub use self::tar::{TarError, TarReader};
use crate::expert::ExpertGroup;
use crate::file_layout::{FileLayout, FileRange, RangeContent, TensorRange};

/// The encoding of an archive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Archive {
    /// An archive whose files can be read in place.
    Tar,
    /// A compressed archive; with the name of the compression.
    Compressed(&'static str),
}

impl Archive {
    /// Parses the end of a media type: `tar`, `tar+gzip`, `tar+zstd`.
    #[must_use]
    pub fn of_suffix(suffix: &str) -> Option<Self> {
        match suffix {
            "tar" => Some(Self::Tar),
            "tar+gzip" => Some(Self::Compressed("gzip")),
            "tar+zstd" => Some(Self::Compressed("zstd")),
            _ => suffix.starts_with("tar+").then_some(Self::Compressed("an unknown method")),
        }
    }
}

/// A regular file in an archive.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ArchiveFile {
    /// Its path, without `./` in front; checked by [`crate::manifest::is_file_name`].
    pub path: String,
    /// Where its content starts, in bytes from the start of the archive.
    pub offset: u64,
    /// Its length in bytes; never 0.
    pub size: u64,
}

/// The layout of an archive with the files `files`, in order, and the layout of each one with a known format. The
/// bytes of the other files, and those between files, belong to no tensor.
///
/// ```
/// use blobd_store_format::archive::{ArchiveFile, layout};
///
/// let file = ArchiveFile { path: "config.json".to_owned(), offset: 512, size: 2 };
/// let layout = layout(2048, vec![(file, None)]);
/// let ranges: Vec<_> = layout.ranges().iter().map(|range| (range.offset, range.size)).collect();
/// assert_eq!(ranges, [(0, 512), (512, 2), (514, 1534)]);
/// ```
#[must_use]
pub fn layout(archive_size: u64, files: Vec<(ArchiveFile, Option<FileLayout>)>) -> FileLayout {
    let mut joined = Joined::default();
    let mut members = Vec::with_capacity(files.len());
    for (file, layout) in files {
        joined.push_gap_up_to(file.offset);
        let before = joined.tensors.len();
        match layout {
            Some(layout) => joined.push_layout(layout),
            None => joined.push_gap_up_to(file.offset.saturating_add(file.size)),
        }
        let tensor_count = joined.tensors.len().saturating_sub(before);
        members.push((file, tensor_count));
    }
    joined.push_gap_up_to(archive_size);
    let Joined { tensors, groups, ranges, .. } = joined;
    FileLayout::of_archive(archive_size, tensors, groups, ranges, members)
}

#[derive(Default)]
struct Joined {
    position: u64,
    tensors: Vec<TensorRange>,
    groups: Vec<ExpertGroup>,
    ranges: Vec<FileRange>,
}

impl Joined {
    fn push(&mut self, content: RangeContent, size: u64) {
        if size > 0 {
            self.ranges.push(FileRange { content, offset: self.position, size });
            self.position = self.position.saturating_add(size);
        }
    }

    fn push_gap_up_to(&mut self, end: u64) {
        self.push(RangeContent::Gap, end.saturating_sub(self.position));
    }

    fn push_layout(&mut self, layout: FileLayout) {
        let first = self.tensors.len();
        for range in layout.ranges() {
            let content = match range.content {
                RangeContent::Tensor(tensor) => RangeContent::Tensor(first.saturating_add(tensor)),
                other => other,
            };
            self.push(content, range.size);
        }
        self.groups.extend(layout.groups().iter().map(|group| group.moved(first)));
        self.tensors.extend(layout.into_tensors());
    }
}
