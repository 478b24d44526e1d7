//! The plan: which bytes of the file belong to which blob.

use std::collections::BTreeMap;

use super::experts_of_files::SharedPart;
use crate::digest::Digest;
use crate::expert::ExpertGroup;
use crate::file_layout::{ArchiveFile, ArchiveMember, FileContent, FileLayout, RangeContent};
use crate::recipe::{Member, Piece, PlaceInBlob, Recipe, RecipeError, TensorEntries};
use crate::tensor::Experts;
use crate::tensor_table::{TableRow, TensorTable};

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SplitPlan {
    file_size: u64,
    blobs: Vec<PlannedBlob>,
    /// Sorted, adjacent, none empty.
    segments: Vec<Segment>,
    tensors: TensorTable,
    /// The blob of each tensor and the offset in that blob; `None` for a tensor without bytes.
    homes: Vec<Option<(usize, u64)>>,
    literal_count: usize,
    /// `None` for a file that is stored whole.
    content: Option<FileContent>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedBlob {
    /// Its length in bytes.
    pub size: u64,
    pub content: BlobContent,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum BlobContent {
    /// A whole file that is not split.
    File,
    /// The header and the padding before the data section.
    Header,
    /// The bytes of one tensor.
    Tensor,
    /// The bytes of all tensors of an expert group, in expert order.
    ExpertGroup,
    /// The same, of a group whose tensors are in several files.
    SharedGroup {
        /// Its number in [`SharedGroups`](super::SharedGroups).
        number: usize,
    },
    /// Bytes that belong to no tensor, too many for a literal.
    Filler,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its offset in the file, in bytes.
    pub offset_in_file: u64,
    /// Its length in bytes; never 0.
    pub length: u64,
    /// The target of its first byte.
    pub target: Target,
}

/// The target of bytes of the file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Target {
    Blob {
        /// Its index in [`SplitPlan::blobs`].
        blob: usize,
        /// The offset in the blob, in bytes.
        offset_in_blob: u64,
    },
    /// Appended to a literal, which the recipe contains.
    Literal {
        /// The index of the literal, below [`SplitPlan::literal_count`].
        literal: usize,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PlannedTensor<'p> {
    pub name: &'p str,
    /// The name of its type in its format, such as `Q4_K`.
    pub type_name: &'p str,
    /// Its dimensions, in the order of its format.
    pub shape: &'p [u64],
    /// In bytes.
    pub size: u64,
    /// The position of each expert, if it is a stack of experts.
    pub experts: Option<Experts>,
    /// The index of its blob in [`SplitPlan::blobs`]; `None` if it has no bytes.
    pub blob: Option<usize>,
    /// Its offset in the blob, in bytes.
    pub offset_in_blob: u64,
}

impl SplitPlan {
    pub fn new(layout: FileLayout) -> Self {
        Self::for_part(layout, 0)
    }

    /// The plan for a file that has parts of blobs which other files have parts of too.
    pub fn sharing(layout: FileLayout, parts: &[SharedPart]) -> Self {
        Self::build(layout, parts, 0)
    }

    /// The plan for a part of a file, such as a file in an archive, after parts with this many bytes of literals. The
    /// plans of all parts, one after the other, are the plan of the whole file.
    pub fn for_part(layout: FileLayout, literal_bytes_before: u64) -> Self {
        Self::build(layout, &[], literal_bytes_before)
    }

    fn build(layout: FileLayout, parts: &[SharedPart], literals_size: u64) -> Self {
        let shared = parts.iter().map(|part| (part.tensor, part)).collect();
        let mut builder = Builder { literals_size, shared, ..Builder::new(&layout) };
        for range in layout.ranges() {
            match range.content {
                RangeContent::Header => builder.push_header(range.size),
                RangeContent::Tensor(tensor) => builder.push_tensor(tensor, range.size),
                RangeContent::Gap => builder.push_gap(range.size),
            }
        }
        let Builder { position: file_size, blobs, segments, literal_count, homes, .. } = builder;
        let (tensors, content) = layout.into_parts();
        let (tensors, content) = (tensors.into_table(), Some(content));
        Self { file_size, blobs, segments, tensors, homes, literal_count, content }
    }

    /// The plan for a file that is not split, such as one of an unknown format.
    pub fn whole(file_size: u64) -> Self {
        let target = Target::Blob { blob: 0, offset_in_blob: 0 };
        let segment = Segment { offset_in_file: 0, length: file_size, target };
        let blobs = vec![PlannedBlob { size: file_size, content: BlobContent::File }];
        // Segments are never empty.
        let segments = if file_size == 0 { Vec::new() } else { vec![segment] };
        let (tensors, homes) = (TensorTable::default(), Vec::new());
        Self { file_size, blobs, segments, tensors, homes, literal_count: 0, content: None }
    }

    pub fn file_size(&self) -> u64 {
        self.file_size
    }

    /// The blobs, in the order of their first byte in the file; the header is the first, except in an archive.
    pub fn blobs(&self) -> &[PlannedBlob] {
        &self.blobs
    }

    /// The segments: sorted, adjacent, and covering the file.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The tensors, in the order of the file's table.
    pub fn tensors(&self) -> impl ExactSizeIterator<Item = PlannedTensor<'_>> + Clone {
        self.tensors.iter().zip(&self.homes).map(|(row, home)| PlannedTensor::new(row, *home))
    }

    /// Whether the file is stored as one blob, and without a recipe.
    pub const fn is_whole(&self) -> bool {
        self.content.is_none()
    }

    pub fn members(&self) -> &[ArchiveMember] {
        match &self.content {
            Some(FileContent::Archive(members)) => members,
            Some(FileContent::Tensors(_)) | None => &[],
        }
    }

    pub fn literal_count(&self) -> usize {
        self.literal_count
    }

    /// The end of the chunk that starts at `offset_in_file`, at most `max` bytes later. Small segments
    /// are read together. A segment of `max` bytes or more starts a new chunk and is cut at multiples
    /// of `max`, so that large blobs are written in aligned pieces. Greater than `offset_in_file` if
    /// that is in the file.
    pub fn chunk_end(&self, offset_in_file: u64, max: u64) -> u64 {
        let max = max.max(1);
        let limit = offset_in_file.saturating_add(max).min(self.file_size).max(offset_in_file);
        let is_large =
            |segment: &&Segment| segment.length >= max && matches!(segment.target, Target::Blob { .. });
        if let Some(segment) = self.segment_at(offset_in_file).filter(is_large) {
            let done = offset_in_file.saturating_sub(segment.offset_in_file);
            let left_of_piece = max.saturating_sub(done % max);
            return offset_in_file.saturating_add(left_of_piece).min(segment.end());
        }
        // A large segment that starts inside the chunk also holds the chunk's last byte.
        let last = self.segment_at(limit.saturating_sub(1)).filter(is_large);
        last.map(|segment| segment.offset_in_file).filter(|start| *start > offset_in_file).unwrap_or(limit)
    }

    /// The recipe that rebuilds the file; it takes the tensors of the plan. `file` is the digest of the whole file, `blobs` are
    /// the digests of the planned blobs, `literals` the planned literals, in order.
    ///
    /// # Errors
    /// [`RecipeError`] when there are too few or too many of them, a literal is incomplete, or the file is an
    /// archive with files in it.
    pub fn recipe(
        self,
        file: Digest,
        blobs: &[Digest],
        literals: Vec<Vec<u8>>,
    ) -> Result<Recipe, RecipeError> {
        self.archive_recipe(file, blobs, literals, &[])
    }

    /// As [`recipe`](Self::recipe), for any file; `members` are the digests of the files in an archive.
    pub fn archive_recipe(
        self,
        file: Digest,
        blobs: &[Digest],
        literals: Vec<Vec<u8>>,
        members: &[Digest],
    ) -> Result<Recipe, RecipeError> {
        check_parts("files in the archive", members.len(), self.members().len())?;
        check_parts("blobs", blobs.len(), self.blobs.len())?;
        check_parts("literals", literals.len(), self.literal_count)?;
        let shared = self.shared_blobs(blobs);
        let pieces = pieces(self.segments, blobs, literals)?;
        let tensors = TensorEntries::new(self.tensors, places(self.homes, blobs));
        match self.content {
            Some(FileContent::Tensors(format)) => Recipe::new(file, format, pieces, tensors)?.sharing(shared),
            Some(FileContent::Archive(files)) => {
                let members = files.iter().zip(members).map(|(file, digest)| member(file, *digest)).collect();
                Recipe::for_archive(file, pieces, tensors, members)
            }
            None => Recipe::for_whole_file(file, self.file_size),
        }
    }

    /// The digests of the blobs that other files have parts of too, with their sizes.
    fn shared_blobs(&self, digests: &[Digest]) -> BTreeMap<Digest, u64> {
        let blobs = self.blobs.iter().zip(digests);
        let shared = blobs.filter(|(blob, _)| blob.shared_group().is_some());
        shared.map(|(blob, digest)| (*digest, blob.size)).collect()
    }

    /// The bytes of all literals.
    pub fn literal_bytes(&self) -> u64 {
        let literals =
            self.segments.iter().filter(|segment| matches!(segment.target, Target::Literal { .. }));
        literals.fold(0, |sum, segment| sum.saturating_add(segment.length))
    }

    fn segment_at(&self, offset_in_file: u64) -> Option<&Segment> {
        self.segments.get(self.segment_index(offset_in_file))
    }

    /// The index of the segment that contains this offset; past the last one if it is not in the file.
    pub(super) fn segment_index(&self, offset_in_file: u64) -> usize {
        self.segments.partition_point(|segment| segment.end() <= offset_in_file)
    }
}

impl PlannedBlob {
    /// The number of its group, if other files have tensors of that too.
    pub const fn shared_group(&self) -> Option<usize> {
        match self.content {
            BlobContent::SharedGroup { number } => Some(number),
            _ => None,
        }
    }
}

impl Segment {
    pub(super) fn end(&self) -> u64 {
        // Segments lie in a file, whose size is a u64.
        self.offset_in_file.saturating_add(self.length)
    }
}

impl Target {
    /// The target after `length` bytes.
    pub(super) fn advanced(self, length: u64) -> Self {
        match self {
            Self::Blob { blob, offset_in_blob } => {
                Self::Blob { blob, offset_in_blob: offset_in_blob.saturating_add(length) }
            }
            Self::Literal { .. } => self,
        }
    }
}

impl<'p> PlannedTensor<'p> {
    fn new(row: TableRow<'p>, home: Option<(usize, u64)>) -> Self {
        let TableRow { name, type_name, shape, size, experts } = row;
        let (blob, offset_in_blob) = (home.map(|(blob, _)| blob), home.map_or(0, |(_, offset)| offset));
        Self { name, type_name, shape, size, experts, blob, offset_in_blob }
    }
}

/// An index of a plan's segments by blob. Without it, finding the segments of all blobs is quadratic.
#[derive(Clone, Debug)]
pub struct BlobPlaces {
    /// Indices of segments in the plan, grouped by blob, in file order.
    segments: Vec<usize>,
    /// The start of each blob's group, and the end of the last.
    starts: Vec<usize>,
}

impl BlobPlaces {
    pub fn new(plan: &SplitPlan) -> Self {
        let own = plan.segments().iter().enumerate().filter_map(|(place, segment)| match segment.target {
            Target::Blob { blob, .. } => Some((blob, place)),
            Target::Literal { .. } => None,
        });
        let mut own: Vec<(usize, usize)> = own.collect();
        own.sort_unstable();
        let starts = (0..=plan.blobs().len()).map(|blob| own.partition_point(|(other, _)| *other < blob));
        Self { starts: starts.collect(), segments: own.into_iter().map(|(_, place)| place).collect() }
    }

    /// The segments of a blob, in file order. `plan` must be the plan that this was made from.
    pub fn segments<'p>(&self, plan: &'p SplitPlan, blob: usize) -> impl Iterator<Item = &'p Segment> {
        let start = self.starts.get(blob).copied().unwrap_or_default();
        let end = self.starts.get(blob.saturating_add(1)).copied().unwrap_or_default();
        let places = self.segments.get(start..end.max(start)).unwrap_or_default();
        places.iter().filter_map(|place| plan.segments().get(*place))
    }
}

/// Appends segments, which always cover the file up to `position`.
struct Builder<'l> {
    position: u64,
    blobs: Vec<PlannedBlob>,
    segments: Vec<Segment>,
    literal_count: usize,
    literals_size: u64,
    groups: &'l [ExpertGroup],
    /// The blob of each group, once a member has been added.
    group_blobs: Vec<Option<usize>>,
    /// For each tensor, its group and expert number; empty without groups.
    memberships: Vec<Option<(usize, usize)>>,
    /// The tensors of groups that other files have tensors of too.
    shared: BTreeMap<usize, &'l SharedPart>,
    /// The blob of each of these groups, once a member has been added.
    shared_blobs: BTreeMap<usize, usize>,
    /// For each tensor, its blob and offset.
    homes: Vec<Option<(usize, u64)>>,
}

impl<'l> Builder<'l> {
    fn new(layout: &'l FileLayout) -> Self {
        let groups = layout.groups();
        // Most files have no separate experts.
        let grouped = if groups.is_empty() { 0 } else { layout.tensors().len() };
        let mut memberships = vec![None; grouped];
        for (group, members) in groups.iter().map(ExpertGroup::members).enumerate() {
            for (expert, tensor) in members.iter().enumerate() {
                if let Some(membership) = memberships.get_mut(*tensor) {
                    *membership = Some((group, expert));
                }
            }
        }
        Self {
            position: 0,
            // Most ranges are a tensor that is a blob of its own.
            blobs: Vec::with_capacity(layout.ranges().len()),
            segments: Vec::with_capacity(layout.ranges().len()),
            literal_count: 0,
            literals_size: 0,
            group_blobs: vec![None; groups.len()],
            groups,
            homes: vec![None; layout.tensors().len()],
            memberships,
            shared: BTreeMap::new(),
            shared_blobs: BTreeMap::new(),
        }
    }

    fn push_header(&mut self, size: u64) {
        let blob = self.add_blob(size, BlobContent::Header);
        self.push_segment(size, Target::Blob { blob, offset_in_blob: 0 });
    }

    fn push_tensor(&mut self, tensor: usize, size: u64) {
        let membership = self.memberships.get(tensor).copied().flatten();
        let (blob, offset_in_blob) = match (self.shared.get(&tensor).copied(), membership) {
            (Some(part), _) => (self.shared_blob(part), part.offset_in_blob),
            (None, Some((group, expert))) => self.place_of_member(group, expert),
            (None, None) => (self.add_blob(size, BlobContent::Tensor), 0),
        };
        if let Some(home) = self.homes.get_mut(tensor) {
            *home = Some((blob, offset_in_blob));
        }
        self.push_segment(size, Target::Blob { blob, offset_in_blob });
    }

    fn push_gap(&mut self, size: u64) {
        let literals_size = self.literals_size.saturating_add(size);
        if size > Recipe::MAX_LITERAL_BYTES || literals_size > Recipe::MAX_LITERALS_BYTES {
            let blob = self.add_blob(size, BlobContent::Filler);
            return self.push_segment(size, Target::Blob { blob, offset_in_blob: 0 });
        }
        self.push_segment(size, Target::Literal { literal: self.literal_count });
        self.literal_count += 1;
        self.literals_size = literals_size;
    }

    /// The blob of a group and the offset of an expert.
    fn place_of_member(&mut self, group: usize, expert: usize) -> (usize, u64) {
        let (size, stride) =
            self.groups.get(group).map(|group| (group.size_bytes(), group.stride())).unwrap_or_default();
        let known = self.group_blobs.get(group).copied().flatten();
        let blob = known.unwrap_or_else(|| self.add_blob(size, BlobContent::ExpertGroup));
        if let Some(group_blob) = self.group_blobs.get_mut(group) {
            *group_blob = Some(blob);
        }
        (blob, stride.saturating_mul(expert as u64))
    }

    fn shared_blob(&mut self, part: &SharedPart) -> usize {
        let SharedPart { group: number, blob_size, .. } = *part;
        if let Some(known) = self.shared_blobs.get(&number) {
            return *known;
        }
        let blob = self.add_blob(blob_size, BlobContent::SharedGroup { number });
        self.shared_blobs.insert(number, blob);
        blob
    }

    fn add_blob(&mut self, size: u64, content: BlobContent) -> usize {
        self.blobs.push(PlannedBlob { size, content });
        self.blobs.len() - 1
    }

    /// Appends the next bytes of the file; merges experts that are adjacent in file and blob.
    fn push_segment(&mut self, length: u64, target: Target) {
        let offset_in_file = self.position;
        self.position = offset_in_file.saturating_add(length);
        match self.segments.last_mut() {
            Some(last) if last.target.advanced(last.length) == target => {
                last.length = last.length.saturating_add(length);
            }
            _ => self.segments.push(Segment { offset_in_file, length, target }),
        }
    }
}

fn member(member: &ArchiveMember, digest: Digest) -> Member {
    let ArchiveMember { file: ArchiveFile { path, offset, size }, format, tensor_count } = member;
    let (offset, size, tensors) = (*offset, *size, *tensor_count as u64);
    Member { path: path.clone(), offset, size, digest, format: *format, tensors }
}

fn pieces(
    segments: Vec<Segment>,
    blobs: &[Digest],
    literals: Vec<Vec<u8>>,
) -> Result<Vec<Piece>, RecipeError> {
    let mut literals = literals.into_iter();
    let piece = |segment: Segment| match segment.target {
        Target::Blob { blob, offset_in_blob: offset } => {
            Ok(Piece::Blob { blob: digest_of(blobs, blob), offset, length: segment.length })
        }
        // Literals are numbered in the order of their segments.
        Target::Literal { .. } => literal_piece(literals.next().unwrap_or_default(), segment.length),
    };
    segments.into_iter().map(piece).collect()
}

/// Where the tensors of these homes are. One without bytes is in no blob; its digest is that of empty input.
fn places(homes: Vec<Option<(usize, u64)>>, blobs: &[Digest]) -> Vec<PlaceInBlob> {
    let empty = Digest::of(b"");
    let place = |home| match home {
        Some((blob, offset)) => PlaceInBlob { digest: digest_of(blobs, blob), offset },
        None => PlaceInBlob { digest: empty, offset: 0 },
    };
    homes.into_iter().map(place).collect()
}

fn digest_of(blobs: &[Digest], blob: usize) -> Digest {
    // The number of digests is that of the planned blobs.
    blobs.get(blob).copied().unwrap_or_else(|| Digest::of(b""))
}

fn literal_piece(literal: Vec<u8>, length: u64) -> Result<Piece, RecipeError> {
    let expected = usize::try_from(length).unwrap_or(usize::MAX);
    check_parts("bytes of a literal", literal.len(), expected)?;
    match literal.iter().all(|byte| *byte == 0) {
        true => Ok(Piece::Zeros { zeros: length }),
        false => Ok(Piece::Literal { literal }),
    }
}

fn check_parts(what: &'static str, found: usize, expected: usize) -> Result<(), RecipeError> {
    if found == expected { Ok(()) } else { Err(RecipeError::Parts { what, found, expected }) }
}
