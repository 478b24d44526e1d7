//! Archives of weights: which files are in them, and where.
//!
//! Registries of KitOps and CNCF ModelPack have layers that are tar archives. Their files are read in place: a
//! [`TarReader`] says which bytes of the archive it needs and finds the files, and [`layout`] joins their layouts
//! to one of the archive, by which it is split like any other file.

mod tar;

pub use self::tar::{TarError, TarReader, layer_headers, tar_header};
use crate::descriptor::{Descriptor, MediaType};
use crate::expert::ExpertGroup;
use crate::file_format::FileFormat;
use crate::file_layout::{
    ArchiveFile, ArchiveMember, FileContent, FileLayout, RangeContent, Ranges, TensorRanges,
};
use crate::recipe::Member;
use crate::tensor::TensorFormat;

impl Member {
    /// The descriptor that the file would have if it were a layer.
    pub fn descriptor(&self) -> Descriptor {
        let media_type = member_type(&self.path, self.format);
        Descriptor { media_type, digest: self.digest, size: self.size }
    }
}

/// The media type of a file in an archive, by its format, or by its path if that is unknown.
pub fn member_type(path: &str, format: Option<TensorFormat>) -> MediaType {
    MediaType::new(
        match format.or_else(|| FileFormat::split_name(path).map(|(_stem, format)| format.tensor_format())) {
            Some(TensorFormat::Gguf) => MediaType::PACK_GGUF,
            Some(TensorFormat::Safetensors) => MediaType::PACK_SAFETENSORS,
            None => MediaType::PACK_CONFIG,
        },
    )
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
pub fn layout(archive_size: u64, files: Vec<(ArchiveFile, Option<FileLayout>)>) -> FileLayout {
    let mut joined = Joined::default();
    let mut members = Vec::with_capacity(files.len());
    for (file, layout) in files {
        joined.ranges.fill_up_to(file.offset);
        let before = joined.tensors.len();
        let format = match layout {
            Some(layout) => joined.push_layout(layout),
            None => {
                joined.ranges.fill_up_to(file.offset.saturating_add(file.size));
                None
            }
        };
        let tensor_count = joined.tensors.len().saturating_sub(before);
        members.push(ArchiveMember { file, format, tensor_count });
    }
    let Joined { tensors, groups, ranges } = joined;
    FileLayout::for_archive(archive_size, tensors, groups, ranges.up_to(archive_size), members)
}

#[derive(Default)]
struct Joined {
    tensors: TensorRanges,
    groups: Vec<ExpertGroup>,
    ranges: Ranges,
}

impl Joined {
    fn push_layout(&mut self, layout: FileLayout) -> Option<TensorFormat> {
        let first = self.tensors.len();
        for range in layout.ranges() {
            let content = match range.content {
                RangeContent::Tensor(tensor) => RangeContent::Tensor(first.saturating_add(tensor)),
                other => other,
            };
            self.ranges.push(content, range.size);
        }
        self.groups.extend(layout.groups().iter().map(|group| group.moved(first)));
        let (tensors, content) = layout.into_parts();
        self.tensors.append(&tensors);
        match content {
            FileContent::Tensors(format) => Some(format),
            FileContent::Archive(_) => None,
        }
    }
}
