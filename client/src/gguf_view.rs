//! A model as one GGUF file in memory, without a copy.
//!
//! A split file's tensors lie in blobs of their own. [`OpenModel::contiguous`] maps them side by
//! side into one range of address space, behind a header that is written anew with an alignment of
//! one page: to an engine it is the image of one file, to the kernel it is the page cache that all
//! processes share. Shards are joined to one file. Order, types, shapes and metadata stay;
//! `general.alignment` and the tensors' offsets are others, so the image is **not** the file that
//! the model came from, byte for byte: that is [`OpenModel::write_layer`].
//!
//! A blob can be mapped only from the start of a page on. Tensors have blobs of their own and start
//! at one; an expert that was packed with others starts there if all sizes before it are multiples
//! of a page, which they are in real models. Those that do not are copied, one by one, into
//! memory of this process: [`GgufView::copied_bytes`] says how much that is.
//!
//! [`OpenModel::plan_contiguous`] gives the plan alone, for a program that passes descriptors on.

use std::collections::HashMap;
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
/// It keeps its own memory mapped, independently of the [`OpenModel`] it came from. The image
/// starts at a page's start and is a multiple of the page size long.
pub struct GgufView {
    region: Region,
    length: usize,
    segments: Vec<Segment>,
    copied_bytes: usize,
}

/// What an image is to be made of.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ImagePlan {
    /// What it begins with, up to the first part; nothing for a file that is stored whole.
    pub header: Vec<u8>,
    /// Parts of blobs, in order. What lies between them is padding.
    pub parts: Vec<ImagePart>,
    /// The image's length in bytes.
    pub length: u64,
}

/// A part of a blob in an image.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ImagePart {
    /// Where in the image it starts: at a page's start.
    pub offset: u64,
    /// How many bytes it has; never 0.
    pub length: u64,
    /// Its descriptor's number, see [`OpenModel::fd`].
    pub fd: u32,
    /// Where behind that descriptor it starts.
    pub fd_offset: u64,
}

/// Whole pages of an image that come from one place.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Segment {
    /// Where in the image it lies, in bytes. Together the segments cover it without a gap.
    pub range: Range<usize>,
    /// Whether it is memory of this process, such as the header, and not the page cache's.
    pub is_copied: bool,
}

impl OpenModel {
    /// The model's weights as one GGUF file in memory. Takes all tensors: open with
    /// [`TensorSelection::All`](crate::protocol::request::TensorSelection::All).
    ///
    /// # Errors
    /// Those of [`contiguous_component`](Self::contiguous_component).
    pub fn contiguous(&self) -> Result<GgufView, ModelError> {
        self.contiguous_component("model")
    }

    /// The layers that play this part (`model`, `projector`, `adapter`, …) as one GGUF file in
    /// memory.
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

    /// How the layers that play this part would lie in one GGUF file.
    ///
    /// # Errors
    /// [`ModelError::NoHeader`] when they are no GGUF files, [`ModelError::NotOpened`] when not all
    /// tensors were asked for, [`ModelError::Size`] when table and header differ,
    /// [`ModelError::Gguf`] when no header can be made, such as for tensors of a type that blobd
    /// does not know, and those of mapping.
    pub fn plan_contiguous(&self, component: &str) -> Result<ImagePlan, ModelError> {
        let layers = self.layers().iter().enumerate();
        let layers: Vec<_> = layers.filter(|(_, layer)| layer.media_type.component() == component).collect();
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
    /// What the image is made of, in order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// How many bytes of tensors had to be copied, because their place in their blob is no page's
    /// start, or because the system cannot map a page twice (valgrind; some sandboxes).
    #[must_use]
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

/// One file of the model, and which of several.
struct Shard {
    layer: usize,
    number: u64,
    header: Header,
}

impl Shard {
    fn read(model: &OpenModel, layer: usize) -> Result<Self, ModelError> {
        let header = Header::parse(&model.layer_header(layer)?);
        let header = header.map_err(|reason| ModelError::Gguf { layer: Some(layer), reason })?;
        let number = header.value("split.no").and_then(|number| number.as_u64()).unwrap_or(0);
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

/// A new header, and the tensors of all shards behind it.
fn joined(model: &OpenModel, shards: &[Shard]) -> Result<ImagePlan, ModelError> {
    let unwritable = |reason| ModelError::Gguf { layer: None, reason };
    let writer = write_header(shards).map_err(unwritable)?;
    let header = writer.header().map_err(unwritable)?;
    // The header is some megabytes long; a sum that wraps is too long to be mapped.
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

/// The first shard's metadata, all shards' tensors; every tensor starts at a page's start.
fn write_header(shards: &[Shard]) -> Result<GgufWriter, blobd_store_format::gguf::GgufError> {
    let mut writer = GgufWriter::new();
    if let Some(first) = shards.first() {
        writer = writer.with_byte_order(first.header.byte_order()).with_version(first.header.version());
        let is_gone = |key: &str| key == ALIGNMENT_KEY || (shards.len() > 1 && key.starts_with("split."));
        for (key, value) in first.header.metadata().filter(|(key, _)| !is_gone(key)) {
            writer.metadata(&key, value.to_value())?;
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

/// An image in the making.
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
