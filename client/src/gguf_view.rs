//! A model as one GGUF file in memory, without a copy.
//!
//! [`OpenModel::contiguous`] maps the blobs of a split file's tensors side by side, after a new header
//! with page alignment. The result is the image of one GGUF file, but its pages are the page cache's,
//! shared by all processes. Shards are joined. Order, types, shapes and metadata are kept;
//! `general.alignment` and the tensors' offsets change, so the image is **not** equal to the original
//! file, which [`OpenModel::write_layer`] gives.
//!
//! Blobs are mapped in whole pages. Most tensors start at offset 0 of their blob; an expert packed with
//! others is page-aligned if all sizes before it are, as in real models. Unaligned tensors are copied
//! into memory of this process, see [`GgufView::copied_bytes`].
//!
//! [`OpenModel::plan_contiguous`] returns only the plan, for a program that passes descriptors on.

use std::collections::{HashMap, HashSet};
use std::fmt;
use std::io;
use std::ops::{Deref, Range};

use blobd_store_format::gguf::{ALIGNMENT_KEY, GgufWriter, Header, MAGIC};
use blobd_store_format::tensor::TensorInfo;

use crate::error::ModelError;
use crate::map::{BlobSlice, Region};
use crate::model::OpenModel;
use crate::protocol::response::{OpenLayer, TensorLocation};

/// The image of a GGUF file: derefs to its bytes.
///
/// It stays mapped independently of its [`OpenModel`]. The image is page-aligned, and its length is a
/// multiple of the page size.
pub struct GgufView {
    region: Region,
    length: usize,
    segments: Vec<Segment>,
    copied_bytes: usize,
}

/// The plan of an image.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePlan {
    /// The header, up to the first part; empty for a file that is stored whole.
    pub header: Vec<u8>,
    /// Parts of blobs, in order; the gaps between them are padding.
    pub parts: Vec<ImagePart>,
    /// The image's length in bytes.
    pub length: u64,
}

/// A part of a blob in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImagePart {
    /// Its page-aligned offset in the image.
    pub offset: u64,
    /// Its size in bytes; never 0.
    pub length: u64,
    /// Its descriptor's number, see [`OpenModel::fd`].
    pub fd: u32,
    /// Its offset in the descriptor's file.
    pub fd_offset: u64,
}

/// Whole pages of an image with one source.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Its range in the image, in bytes. The segments cover the image without gaps.
    pub range: Range<usize>,
    /// Whether it is private memory of this process, such as the header, instead of page cache.
    pub is_copied: bool,
}

impl OpenModel {
    /// The model's weights as one GGUF file in memory. Needs all tensors: open with
    /// [`TensorSelection::All`](crate::protocol::request::TensorSelection::All).
    pub fn contiguous(&self) -> Result<GgufView, ModelError> {
        self.contiguous_component("model")
    }

    /// The layers of this component (`model`, `projector`, `adapter`, …) as one GGUF file in memory.
    ///
    /// # Errors
    /// Those of [`plan_contiguous`](Self::plan_contiguous), [`ModelError::Image`] when the kernel
    /// refuses, and those of mapping.
    pub fn contiguous_component(&self, component: &str) -> Result<GgufView, ModelError> {
        let plan = self.plan_contiguous(component)?;
        let mut image = Image::reserve(plan.length)?;
        image.copy(0, &plan.header)?;
        for part in &plan.parts {
            image.put(part.offset, &self.slice(part.fd, part.fd_offset, part.length)?)?;
        }
        Ok(image.view)
    }

    /// The plan of one GGUF file with the layers of this component.
    ///
    /// # Errors
    /// [`ModelError::NoHeader`] when they are not GGUF files, [`ModelError::NotOpened`] when not all
    /// tensors were requested, [`ModelError::Size`] when table and header disagree,
    /// [`ModelError::Gguf`] when no header can be made, such as for tensors of an unknown type, and
    /// those of mapping.
    pub fn plan_contiguous(&self, component: &str) -> Result<ImagePlan, ModelError> {
        let is_wanted = |(_, layer): &(usize, &OpenLayer)| layer.media_type.component() == component;
        let wanted = self.layers().iter().enumerate().filter(is_wanted);
        // A file that the manifest names several times is one part of the image.
        let mut seen = HashSet::new();
        let layers: Vec<_> = wanted.filter(|(_, layer)| seen.insert(layer.digest)).collect();
        if let [(only, OpenLayer { fd: Some(fd), size, .. })] = *layers {
            return whole(only, *fd, *size, &self.layer_bytes(only)?);
        }
        let shards: Result<Vec<_>, _> = layers.iter().map(|(layer, _)| Shard::read(self, *layer)).collect();
        let mut shards = shards?;
        if shards.is_empty() {
            return Err(ModelError::NoHeader { layer: None });
        }
        shards.sort_by_key(|shard| shard.number);
        joined(self, &shards)
    }
}

impl GgufView {
    /// The segments of the image, in order.
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The bytes of tensors that were copied, because their offset in the blob is not page-aligned or
    /// the system cannot map a page twice (valgrind, some sandboxes).
    pub const fn copied_bytes(&self) -> usize {
        self.copied_bytes
    }
}

impl Deref for GgufView {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        self.region.bytes().get(..self.length).unwrap_or_default()
    }
}

impl AsRef<[u8]> for GgufView {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

/// The counts instead of the content, which is gigabytes.
impl fmt::Debug for GgufView {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GgufView")
            .field("length", &self.length)
            .field("segments", &self.segments.len())
            .finish_non_exhaustive()
    }
}

struct Shard {
    layer: usize,
    number: u64,
    header: Header,
}

impl Shard {
    fn read(model: &OpenModel, layer: usize) -> Result<Self, ModelError> {
        if !model.described(layer)?.1.format.is_gguf() {
            return Err(ModelError::NoHeader { layer: Some(layer) });
        }
        let header = Header::parse(&model.layer_header(layer)?);
        let header = header.map_err(|reason| ModelError::Gguf { layer: Some(layer), reason })?;
        let number = header.value("split.no").and_then(|number| number.as_u64()).unwrap_or(0);
        // Tensors name the layer that has the table.
        let (layer, _) = model.described(layer)?;
        Ok(Self { layer, number, header })
    }
}

/// A file that is stored as one blob is its own image.
fn whole(layer: usize, fd: u32, length: u64, bytes: &[u8]) -> Result<ImagePlan, ModelError> {
    if !bytes.starts_with(&MAGIC) {
        return Err(ModelError::NoHeader { layer: Some(layer) });
    }
    let parts = vec![ImagePart { offset: 0, length, fd, fd_offset: 0 }];
    Ok(ImagePlan { header: Vec::new(), parts, length })
}

/// A new header, followed by the tensors of all shards.
fn joined(model: &OpenModel, shards: &[Shard]) -> Result<ImagePlan, ModelError> {
    let unwritable = |reason| ModelError::Gguf { layer: None, reason };
    let writer = write_header(shards).map_err(unwritable)?;
    let header = writer.header().map_err(unwritable)?;
    // A saturated sum is too long to be mapped.
    let data_offset = header.len() as u64;
    let length = data_offset.saturating_add(writer.data_size().map_err(unwritable)?);
    let offsets = writer.tensor_offsets().map_err(unwritable)?;
    let places = Places::of(model);
    let mut parts = Vec::new();
    let tensors = shards.iter().flat_map(|shard| shard.header.tensors().map(move |info| (shard, info)));
    for ((shard, info), offset) in tensors.zip(offsets) {
        let tensor = places.find(shard.layer, &info)?;
        if let Some(fd) = tensor.fd.filter(|_| tensor.size > 0) {
            let (offset, length) = (data_offset.saturating_add(offset), tensor.size);
            parts.push(ImagePart { offset, length, fd, fd_offset: tensor.offset });
        }
    }
    Ok(ImagePlan { header, parts, length })
}

/// The first shard's metadata and all shards' tensors, page-aligned.
fn write_header(shards: &[Shard]) -> Result<GgufWriter, blobd_store_format::gguf::GgufError> {
    let mut writer = GgufWriter::new();
    if let Some(first) = shards.first() {
        writer = writer.with_byte_order(first.header.byte_order()).with_version(first.header.version());
        let is_gone =
            |key: &[u8]| key == ALIGNMENT_KEY.as_bytes() || (shards.len() > 1 && key.starts_with(b"split."));
        for (key, value) in first.header.metadata().filter(|(key, _)| !is_gone(key)) {
            writer.metadata(key, value.to_value())?;
        }
    }
    let page = u32::try_from(rustix::param::page_size()).unwrap_or(u32::MAX);
    writer.metadata(ALIGNMENT_KEY, page)?;
    for info in shards.iter().flat_map(|shard| shard.header.tensors()) {
        writer.tensor(info.name(), info.ggml_type(), info.shape().dimensions())?;
    }
    Ok(writer)
}

/// Where the tensors are, by layer and name: shards and a draft model may use a name again.
struct Places<'m>(HashMap<(usize, &'m str), &'m TensorLocation>);

impl<'m> Places<'m> {
    fn of(model: &'m OpenModel) -> Self {
        let key = |tensor: &'m TensorLocation| {
            (usize::try_from(tensor.layer).unwrap_or(usize::MAX), tensor.name.as_str())
        };
        Self(model.tensors().iter().map(|tensor| (key(tensor), tensor)).collect())
    }

    /// A tensor of a file's header, if the table has it with the same size.
    fn find(&self, layer: usize, info: &TensorInfo<'_>) -> Result<&'m TensorLocation, ModelError> {
        let name = || info.name().to_owned();
        let tensor = self.0.get(&(layer, info.name())).copied();
        let tensor = tensor.ok_or_else(|| ModelError::NotOpened { layer, name: name() })?;
        let expected = info.size_bytes().unwrap_or(0);
        if tensor.size != expected {
            return Err(ModelError::Size { name: name(), found: tensor.size, expected });
        }
        Ok(tensor)
    }
}

struct Image {
    view: GgufView,
}

impl Image {
    fn reserve(length: u64) -> Result<Self, ModelError> {
        let size = usize::try_from(length).map_err(|_too_long| io::ErrorKind::OutOfMemory.into());
        let region = size.and_then(|size| Region::reserve(size).map(|region| (region, size)));
        let (region, length) = region.map_err(|reason| ModelError::Image { length, reason })?;
        Ok(Self { view: GgufView { region, length, segments: Vec::new(), copied_bytes: 0 } })
    }

    /// Maps bytes of a blob, or copies them if they cannot be mapped there.
    fn put(&mut self, offset: u64, bytes: &BlobSlice) -> Result<(), ModelError> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let placed = self.view.region.place(start, bytes);
        if !placed.map_err(|reason| self.refused(reason))? {
            self.view.copied_bytes += bytes.len();
            return self.copy(offset, bytes);
        }
        self.note(start, bytes.len(), false);
        Ok(())
    }

    fn copy(&mut self, offset: u64, bytes: &[u8]) -> Result<(), ModelError> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX);
        let copied = self.view.region.copy(start, bytes);
        copied.map_err(|reason| self.refused(reason))?;
        self.note(start, bytes.len(), true);
        Ok(())
    }

    fn note(&mut self, start: usize, length: usize, is_copied: bool) {
        if length > 0 {
            let end = start + length.next_multiple_of(rustix::param::page_size());
            self.view.segments.push(Segment { range: start..end, is_copied });
        }
    }

    fn refused(&self, reason: io::Error) -> ModelError {
        ModelError::Image { length: self.view.length as u64, reason }
    }
}
