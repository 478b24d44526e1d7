//! Expert groups whose tensors are in several files, such as the shards of a model.
//!
//! Each file has a part of such a group's blob. The headers alone say where in the blob it is, so the files can be read one
//! after the other.

use std::collections::BTreeMap;

use crate::expert::{Member, group_and_number, pack};
use crate::file_layout::{FileContent, FileLayout, RangeContent, TensorRange};
use crate::gguf::GgmlType;
use crate::tensor::TensorFormat;

/// Collects the separate experts of files, and finds the groups that several files have tensors of.
///
/// Its memory is bounded. Beyond its limits, and if a tensor comes twice, the groups of each file stay its own.
///
/// ```
/// use blobd_store_format::file_format::read_header;
/// use blobd_store_format::safetensors::{Dtype, HeaderWriter};
/// use blobd_store_format::split::{ExpertsOfFiles, SplitPlan};
///
/// let mut experts = ExpertsOfFiles::default();
/// let mut layouts = Vec::new();
/// for number in 0..2 {
///     let mut writer = HeaderWriter::new();
///     writer.tensor(&format!("model.layers.0.mlp.experts.{number}.up_proj.weight"), Dtype::F32, &[4, 4])?;
///     let header = writer.header()?;
///     let layout = read_header(&header)?.file_layout(header.len() as u64 + 64)?;
///     experts.add(0, number, &layout);
///     layouts.push(layout);
/// }
/// let groups = experts.shared();
/// assert_eq!(groups.blob_sizes(), [128]);
/// let plan = SplitPlan::sharing(layouts.remove(1), groups.parts_of(1));
/// assert_eq!(plan.tensors().next().unwrap().offset_in_blob, 64);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
#[derive(Debug, Default)]
pub struct ExpertsOfFiles {
    groups: BTreeMap<GroupName, Group>,
    experts: usize,
    text: usize,
}

/// A set of files, and a tensor's name before and after the number of the expert.
type GroupName = (usize, String, String);

#[derive(Debug)]
struct Group {
    form: Form,
    /// Whether all have this form.
    is_uniform: bool,
    tensors: Vec<Expert>,
}

#[derive(Debug, PartialEq, Eq)]
struct Form {
    type_name: String,
    shape: Vec<u64>,
    size: Option<u64>,
}

#[derive(Clone, Copy, Debug)]
struct Expert {
    number: u32,
    place: PlaceInFiles,
    tensor: usize,
}

/// Where a tensor is in the files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlaceInFiles {
    /// The number of the file.
    pub file: usize,
    /// In bytes from the start of that file.
    pub offset: u64,
    /// In bytes.
    pub size: u64,
}

/// The groups that several files have tensors of.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct SharedGroups {
    blob_sizes: Vec<u64>,
    places: Vec<Vec<PlaceInFiles>>,
    parts: BTreeMap<usize, Vec<SharedPart>>,
}

/// A tensor of a group that several files have tensors of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SharedPart {
    /// The index of the tensor in the table of its file.
    pub tensor: usize,
    /// The number of the group in [`SharedGroups`].
    pub group: usize,
    /// The size of the group's blob in bytes.
    pub blob_size: u64,
    /// Where the tensor is in that blob.
    pub offset_in_blob: u64,
}

impl ExpertsOfFiles {
    /// More than the largest models of today have, with all that a quantisation adds, times six.
    const MAX_EXPERTS: usize = 1 << 20;
    /// The most bytes of the names and shapes of groups.
    const MAX_TEXT_BYTES: usize = 64 << 20;

    /// Adds the separate experts of a file. Files of different sets share no group.
    pub fn add(&mut self, set: usize, file: usize, layout: &FileLayout) {
        let FileContent::Tensors(format) = *layout.content() else { return };
        let offsets = offsets(layout);
        for ((tensor, range), offset) in layout.tensors().iter().enumerate().zip(offsets) {
            if let Some(((before, after), number)) = group_and_number(format, range.name)
                && self.has_room()
            {
                let name = (set, before.to_owned(), after.to_owned());
                let place = PlaceInFiles { file, offset, size: range.size };
                self.add_expert(name, Form::of(format, &range), Expert { number, place, tensor });
            }
        }
    }

    /// The groups that are complete in all files together, and in no file alone.
    pub fn shared(self) -> SharedGroups {
        let mut shared = SharedGroups::default();
        if self.has_room() {
            self.groups.into_values().filter(Group::is_in_several_files).for_each(|group| shared.add(&group));
        }
        shared
    }

    fn has_room(&self) -> bool {
        self.experts < Self::MAX_EXPERTS && self.text < Self::MAX_TEXT_BYTES
    }

    fn add_expert(&mut self, name: GroupName, form: Form, expert: Expert) {
        self.experts += 1;
        if let Some(group) = self.groups.get_mut(&name) {
            group.is_uniform &= group.form == form;
            return group.tensors.push(expert);
        }
        let shape = form.shape.len().saturating_mul(size_of::<u64>());
        let text = name.1.len().saturating_add(name.2.len()).saturating_add(shape);
        self.text = self.text.saturating_add(text);
        self.groups.insert(name, Group { form, is_uniform: true, tensors: vec![expert] });
    }
}

/// Where each tensor starts in its file; 0 for one without bytes.
fn offsets(layout: &FileLayout) -> Vec<u64> {
    let mut offsets = vec![0; layout.tensors().len()];
    for range in layout.ranges() {
        if let RangeContent::Tensor(tensor) = range.content
            && let Some(offset) = offsets.get_mut(tensor)
        {
            *offset = range.offset;
        }
    }
    offsets
}

impl Form {
    fn of(format: TensorFormat, range: &TensorRange<'_>) -> Self {
        // The size of a tensor of an unknown type includes padding.
        let is_known = match format {
            TensorFormat::Gguf => {
                GgmlType::from_name(&range.type_name).is_some_and(|ggml_type| ggml_type.block().is_some())
            }
            TensorFormat::Safetensors => true,
        };
        let size = is_known.then_some(range.size);
        Self { type_name: range.type_name.to_string(), shape: range.shape.to_vec(), size }
    }
}

impl Group {
    fn is_in_several_files(&self) -> bool {
        let mut files = self.tensors.iter().map(|expert| expert.place.file);
        files.next().is_some_and(|first| files.any(|file| file != first))
    }
}

impl SharedGroups {
    /// The sizes of the groups' blobs in bytes, by their numbers.
    pub fn blob_sizes(&self) -> &[u64] {
        &self.blob_sizes
    }

    /// Where the bytes of a group's blob are, in their order.
    pub fn places_of(&self, group: usize) -> &[PlaceInFiles] {
        self.places.get(group).map(Vec::as_slice).unwrap_or_default()
    }

    /// The tensors of a file that are in these groups.
    pub fn parts_of(&self, file: usize) -> &[SharedPart] {
        self.parts.get(&file).map(Vec::as_slice).unwrap_or_default()
    }

    fn add(&mut self, group: &Group) {
        let size = group.form.size.filter(|_| group.is_uniform);
        let member =
            |(index, expert): (usize, &Expert)| Member { expert: expert.number, index, form: (), size };
        let Some(packed) = pack(group.tensors.iter().enumerate().map(member).collect()) else { return };
        let number = self.blob_sizes.len();
        let (blob_size, mut places) = (packed.size_bytes(), Vec::with_capacity(packed.members().len()));
        for member in packed.members() {
            let Some(Expert { place, tensor, .. }) = group.tensors.get(*member).copied() else { continue };
            let offset_in_blob = packed.stride().saturating_mul(places.len() as u64);
            let part = SharedPart { tensor, group: number, blob_size, offset_in_blob };
            self.parts.entry(place.file).or_default().push(part);
            places.push(place);
        }
        self.blob_sizes.push(blob_size);
        self.places.push(places);
    }
}

#[cfg(test)]
mod tests;
