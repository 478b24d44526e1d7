//! Archives of weights: which files are in them, and where.
//!
//! Registries of KitOps and CNCF ModelPack have layers that are tar archives. Their files are read in place: a
//! [`TarReader`] says which bytes of the archive it needs and finds the files, and [`layout`] joins their layouts
//! to one of the archive, by which it is split like any other file.

mod tar;

pub use self::tar::{TarError, TarReader};
use crate::descriptor::{Descriptor, MediaType};
use crate::expert::ExpertGroup;
use crate::file_format::FileFormat;
use crate::file_layout::{ArchiveFile, FileLayout, FileRange, RangeContent, TensorRange};
use crate::recipe::Member;

impl Member {
    /// The descriptor that the file would have if it were a layer.
    #[must_use]
    pub fn descriptor(&self) -> Descriptor {
        let media_type = member_type(&self.path, self.tensors > 0);
        Descriptor { media_type, digest: self.digest, size: self.size }
    }
}

/// The media type of a file in an archive, by its path, and by whether it has a header with tensors.
#[must_use]
pub fn member_type(path: &str, has_tensors: bool) -> MediaType {
    let is_safetensors = || path.to_ascii_lowercase().ends_with(".safetensors");
    MediaType::new(if has_tensors || FileFormat::split_name(path).is_some() {
        MediaType::PACK_GGUF
    } else if is_safetensors() {
        MediaType::PACK_SAFETENSORS
    } else {
        MediaType::PACK_CONFIG
    })
}

/// The layout of an archive with the files `files`, in order, and the layout of each one with a known format. The
/// bytes of the other files, and those between files, belong to no tensor.
///
/// ```
/// use blobd_store_format::archive::layout;
/// use blobd_store_format::file_layout::ArchiveFile;
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
