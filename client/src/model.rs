//! An open model: its tensors and files.
//!
//! An [`OpenModel`] has received everything it needs and sends no more requests. It holds the
//! connection and with it the lease: until it is dropped, the daemon lists the model as in use and does
//! not evict it.

use std::borrow::Cow;
use std::collections::HashMap;
use std::io::{self, Write};
use std::ops::Deref;
use std::os::fd::BorrowedFd;
use std::os::unix::net::UnixStream;
use std::sync::OnceLock;

use blobd_store_format::digest::Digest;
use blobd_store_format::expert::separate_expert;
use blobd_store_format::stored_file::{FilePieces, Source};
use rustix::io::Errno;
use rustix::net::{RecvFlags, recv};

use crate::blob::{Blob, BlobError, CopyError};
use crate::error::ModelError;
pub use crate::map::BlobSlice;
use crate::protocol::response::{OpenHead, OpenLayer, OpenPiece, TensorLocation};

/// A model held open; dropping it ends the lease.
///
/// Maps and slices made from it are independent of it: they stay valid when it is dropped, when
/// the daemon stops, and when the model is removed from the store.
#[derive(Debug)]
pub struct OpenModel {
    head: OpenHead,
    /// One list per layer; empty if not requested.
    pieces: Vec<FilePieces<OpenPiece>>,
    tensors: Vec<TensorLocation>,
    /// The index in `tensors` by name; built on first use.
    names: OnceLock<HashMap<Box<str>, usize>>,
    blobs: Vec<Blob>,
    /// The lease: held, never written to.
    lease: UnixStream,
}

impl OpenModel {
    pub(crate) fn new(
        head: OpenHead,
        pieces: Vec<FilePieces<OpenPiece>>,
        tensors: Vec<TensorLocation>,
        blobs: Vec<Blob>,
        lease: UnixStream,
    ) -> Self {
        Self { head, pieces, tensors, names: OnceLock::new(), blobs, lease }
    }

    /// The shortest name that was unique when the model was opened.
    pub fn name(&self) -> &str {
        &self.head.name
    }

    /// The manifest's digest: the model's ID.
    pub fn digest(&self) -> Digest {
        self.head.digest
    }

    /// The model's files, the configuration first.
    pub fn layers(&self) -> &[OpenLayer] {
        &self.head.layers
    }

    /// The requested tensors, by layer and in file order.
    pub fn tensors(&self) -> &[TensorLocation] {
        &self.tensors
    }

    /// The tensor with this name, in constant time. If several layers have one, such as a model
    /// and its draft model, the first; [`tensors`](Self::tensors) has all.
    pub fn tensor(&self, name: &str) -> Option<&TensorLocation> {
        self.tensors.get(self.tensor_index(name)?)
    }

    /// The index in [`tensors`](Self::tensors) of the tensor with this name.
    pub fn tensor_index(&self, name: &str) -> Option<usize> {
        let names = self.names.get_or_init(|| {
            // In reverse, so that the first of several is kept.
            let places = self.tensors.iter().enumerate().rev();
            places.map(|(place, tensor)| (tensor.name.as_str().into(), place)).collect()
        });
        names.get(name).copied()
    }

    /// Maps the tensor with this name.
    ///
    /// # Errors
    /// [`ModelError::NoTensor`], or those of [`map_tensor`](Self::map_tensor).
    pub fn map(&self, name: &str) -> Result<TensorMap, ModelError> {
        let unknown = || ModelError::NoTensor { model: self.head.name.clone(), name: name.to_owned() };
        self.map_tensor(self.tensor(name).ok_or_else(unknown)?)
    }

    /// Maps a tensor of the table. Tensors that share a blob share its map; one without elements
    /// is an empty slice.
    ///
    /// # Errors
    /// [`ModelError::Short`] when the blob is shorter than the table says, [`ModelError::Map`]
    /// when the kernel refuses.
    pub fn map_tensor(&self, tensor: &TensorLocation) -> Result<TensorMap, ModelError> {
        let bytes = match tensor.fd {
            Some(fd) if tensor.size > 0 => self.slice(fd, tensor.offset, tensor.size)?,
            _ => BlobSlice::default(),
        };
        Ok(TensorMap { tensor: tensor.clone(), bytes })
    }

    /// Maps all tensors of the table, in its order.
    pub fn map_all(&self) -> Result<Vec<TensorMap>, ModelError> {
        self.tensors.iter().map(|tensor| self.map_tensor(tensor)).collect()
    }

    /// The header of the model's first split GGUF file: all bytes before its data section.
    ///
    /// # Errors
    /// [`ModelError::NoHeader`] when no layer has one, and those of mapping.
    pub fn header(&self) -> Result<BlobSlice, ModelError> {
        let has_header = |layer: &OpenLayer| layer.header.is_some() && layer.format.is_gguf();
        let place = self.head.layers.iter().position(has_header);
        self.layer_header(place.ok_or(ModelError::NoHeader { layer: None })?)
    }

    /// The header of the layer with this number, in the layer's format.
    ///
    /// # Errors
    /// As [`header`](Self::header), or [`ModelError::NoLayer`].
    pub fn layer_header(&self, layer: usize) -> Result<BlobSlice, ModelError> {
        let header = self.described(layer)?.1.header.ok_or(ModelError::NoHeader { layer: Some(layer) })?;
        self.slice(header.fd, 0, header.size)
    }

    /// The bytes of a layer that is stored whole: a template, parameters, a licence.
    ///
    /// # Errors
    /// [`ModelError::NoLayer`], [`ModelError::NotWhole`] for a split file (see
    /// [`write_layer`](Self::write_layer)), and those of mapping.
    pub fn layer_bytes(&self, layer: usize) -> Result<BlobSlice, ModelError> {
        let OpenLayer { fd, size, .. } = self.layer(layer)?;
        match fd {
            Some(fd) if *size > 0 => self.slice(*fd, 0, *size),
            None if *size > 0 => Err(ModelError::NotWhole { layer }),
            _ => Ok(BlobSlice::default()),
        }
    }

    /// The text of the first layer of this component: `template`, `params`, `license`, …; `None` if
    /// there is none.
    ///
    /// # Errors
    /// Those of [`layer_bytes`](Self::layer_bytes), and [`ModelError::NotText`].
    pub fn text(&self, component: &str) -> Result<Option<String>, ModelError> {
        let mut layers = self.head.layers.iter();
        let Some(layer) = layers.position(|layer| layer.media_type.component() == component) else {
            return Ok(None);
        };
        let bytes = self.layer_bytes(layer)?.to_vec();
        String::from_utf8(bytes).map(Some).map_err(|_binary| ModelError::NotText { layer })
    }

    /// Writes the file that a layer was, bit for bit, and returns its length. A split file needs
    /// [`FileSelection::All`](crate::protocol::request::FileSelection::All) when opening.
    /// Nothing is verified: hash the bytes if the file is kept.
    ///
    /// # Errors
    /// [`ModelError::NoLayer`], [`ModelError::NoPieces`], and failures to read or write.
    pub fn write_layer(&self, layer: usize, mut out: impl Write) -> Result<u64, ModelError> {
        let file = self.file(layer)?;
        let size = file.size();
        let mut buffer = vec![0; usize::try_from(size).unwrap_or(usize::MAX).min(COPY_BYTES)];
        for source in file.sources(0..size) {
            match source {
                Source::Blob { blob: fd, offset, length } => {
                    self.copy(fd, offset, length, &mut buffer, &mut out)?;
                }
                Source::Literal { bytes } => out.write_all(bytes).map_err(ModelError::Write)?,
                Source::Zeros { length } => {
                    let mut zeros = io::Read::take(io::repeat(0), length);
                    io::copy(&mut zeros, &mut out).map_err(ModelError::Write)?;
                }
            }
        }
        out.flush().map_err(ModelError::Write)?;
        Ok(size)
    }

    /// The pieces of a layer's file. A split file needs
    /// [`FileSelection::All`](crate::protocol::request::FileSelection::All) when opening.
    pub fn file(&self, layer: usize) -> Result<Cow<'_, FilePieces<OpenPiece>>, ModelError> {
        let (place, OpenLayer { fd, size, .. }) = self.described(layer)?;
        let (fd, size) = (*fd, *size);
        match (fd, self.pieces.get(place)) {
            (Some(fd), _) => Ok(Cow::Owned(FilePieces::whole(fd, size))),
            (None, Some(pieces)) if pieces.size() == size => Ok(Cow::Borrowed(pieces)),
            _ => Err(ModelError::NoPieces { layer }),
        }
    }

    /// Fills `buffer` from `offset` of descriptor `n`.
    ///
    /// # Errors
    /// [`ModelError::NoFd`], [`ModelError::Short`] when the file is shorter, and failures to read.
    pub fn read_at(&self, n: u32, offset: u64, buffer: &mut [u8]) -> Result<(), ModelError> {
        let length = buffer.len() as u64;
        self.blob(n)?.read_at(offset, buffer).map_err(|error| match error {
            BlobError::Short { found } => ModelError::short(n, found, offset, length),
            BlobError::Io(reason) => ModelError::Read { fd: n, reason },
        })
    }

    /// The number of descriptors.
    pub fn fd_count(&self) -> usize {
        self.blobs.len()
    }

    /// Descriptor `n`, for an engine that maps or reads by itself.
    ///
    /// `None` if there is no such number, or if it is closed: when a model has more descriptors
    /// than half of what this process may have open (`ulimit -n`), each is mapped on arrival and
    /// closed. Everything but this method works as before.
    pub fn fd(&self, n: u32) -> Option<BorrowedFd<'_>> {
        self.blob(n).ok()?.fd()
    }

    /// All bytes of the file of descriptor `n`, mapped, whether it is still open or not. The descriptors
    /// are numbered in the order in which the model's files need them.
    pub fn blob_bytes(&self, n: u32) -> Result<BlobSlice, ModelError> {
        self.blob(n)?.whole().map_err(|reason| ModelError::Map { fd: n, reason })
    }

    /// Whether the lease is still held. It ends when the daemon stops. Maps and reads still work then,
    /// but the model may be removed or evicted; open it again to prevent that.
    pub fn has_lease(&self) -> bool {
        let flags = RecvFlags::PEEK | RecvFlags::DONTWAIT;
        // The daemon sends nothing on a lease, so there is nothing to read until it closes.
        matches!(recv(&self.lease, &mut [0_u8], flags), Err(Errno::AGAIN | Errno::INTR))
    }

    /// Keeps only the lease and closes the descriptors, for a program that has mapped what it needs.
    pub fn into_lease(self) -> Lease {
        Lease { _stream: self.lease }
    }

    fn layer(&self, layer: usize) -> Result<&OpenLayer, ModelError> {
        let count = self.head.layers.len();
        self.head.layers.get(layer).ok_or(ModelError::NoLayer { layer, count })
    }

    /// The layer that has header, pieces and tensors of this layer's file, and its number: the first with the
    /// same digest. A manifest may name a file several times, and the daemon describes it once.
    pub(crate) fn described(&self, layer: usize) -> Result<(usize, &OpenLayer), ModelError> {
        let wanted = self.layer(layer)?;
        if wanted.fd.is_some() || wanted.header.is_some() || wanted.piece_count > 0 {
            return Ok((layer, wanted));
        }
        let mut numbered = self.head.layers.iter().enumerate();
        Ok(numbered.find(|(_, known)| known.digest == wanted.digest).unwrap_or((layer, wanted)))
    }

    fn blob(&self, fd: u32) -> Result<&Blob, ModelError> {
        let place = usize::try_from(fd).unwrap_or(usize::MAX);
        self.blobs.get(place).ok_or(ModelError::NoFd { fd, count: self.blobs.len() })
    }

    pub(crate) fn slice(&self, fd: u32, offset: u64, length: u64) -> Result<BlobSlice, ModelError> {
        let blame = |error| match error {
            BlobError::Short { found } => ModelError::short(fd, found, offset, length),
            BlobError::Io(reason) => ModelError::Map { fd, reason },
        };
        self.blob(fd)?.slice(offset, length).map_err(blame)
    }

    fn copy(
        &self,
        fd: u32,
        offset: u64,
        length: u64,
        buffer: &mut [u8],
        out: &mut impl Write,
    ) -> Result<(), ModelError> {
        let blame = |error| match error {
            CopyError::Read(BlobError::Short { found }) => ModelError::short(fd, found, offset, length),
            CopyError::Read(BlobError::Io(reason)) => ModelError::Read { fd, reason },
            CopyError::Write(reason) => ModelError::Write(reason),
        };
        self.blob(fd)?.copy_to(offset, length, buffer, out).map_err(blame)
    }
}

impl OpenModel {
    /// Maps expert `number` (from 0 on) of all tensors whose name starts with `prefix`, such as
    /// `blk.3.`, in table order: of each stack its range, with the expert's shape, and tensors that are this expert alone.
    /// Tensors without experts are left out, so nothing may be found.
    ///
    /// Only address space is taken. To open no more than some experts need, open with
    /// [`TensorSelection::Experts`](crate::protocol::request::TensorSelection::Experts).
    pub fn expert(&self, prefix: &str, number: u64) -> Result<Vec<TensorMap>, ModelError> {
        let named = self.tensors.iter().filter(|tensor| tensor.name.starts_with(prefix));
        named.filter_map(|tensor| self.expert_part(tensor, number).transpose()).collect()
    }

    fn expert_part(&self, tensor: &TensorLocation, number: u64) -> Result<Option<TensorMap>, ModelError> {
        match tensor.experts {
            Some(_) => Ok(self.map_tensor(tensor)?.expert_part(number)),
            None if separate_expert(&tensor.name) == Some(number) => self.map_tensor(tensor).map(Some),
            None => Ok(None),
        }
    }
}

/// The lease of an [`OpenModel`]: the model is in use until this is dropped.
#[must_use = "the lease ends when it is dropped"]
#[derive(Debug)]
pub struct Lease {
    _stream: UnixStream,
}

/// A mapped tensor; derefs to its bytes. It stays mapped independently of its [`OpenModel`].
#[derive(Clone, Debug)]
pub struct TensorMap {
    tensor: TensorLocation,
    bytes: BlobSlice,
}

impl TensorMap {
    /// The tensor's name.
    pub fn name(&self) -> &str {
        &self.tensor.name
    }

    /// The name of its ggml type, such as `Q4_K`.
    pub fn type_name(&self) -> &str {
        &self.tensor.type_name
    }

    /// Its dimensions in GGUF order, the fastest first.
    pub fn shape(&self) -> &[u64] {
        &self.tensor.shape
    }

    /// Its bytes as a [`BlobSlice`], which can be split, prefetched and released: see
    /// [`residency`](crate::residency).
    pub const fn bytes(&self) -> &BlobSlice {
        &self.bytes
    }

    /// One expert of a stack in this form; `None` as for [`expert`](Self::expert).
    pub fn expert_bytes(&self, index: u64) -> Option<BlobSlice> {
        let experts = self.tensor.experts.filter(|experts| index < experts.count)?;
        self.bytes.part(index.checked_mul(experts.stride)?, experts.stride)
    }

    fn expert_part(self, index: u64) -> Option<Self> {
        let bytes = self.expert_bytes(index)?;
        let mut tensor = self.tensor;
        // The experts are the slowest dimension.
        tensor.shape.pop();
        let stride = tensor.experts.take()?.stride;
        let offset = tensor.offset.checked_add(index.checked_mul(stride)?)?;
        Some(Self { tensor: TensorLocation { size: stride, offset, ..tensor }, bytes })
    }

    /// One expert of a stack; `None` if the tensor is not a stack, or has no such expert.
    pub fn expert(&self, index: u64) -> Option<&[u8]> {
        let experts = self.tensor.experts.filter(|experts| index < experts.count)?;
        let start = usize::try_from(index.checked_mul(experts.stride)?).ok()?;
        let end = start.checked_add(usize::try_from(experts.stride).ok()?)?;
        self.bytes.get(start..end)
    }
}

impl Deref for TensorMap {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.bytes
    }
}

impl AsRef<[u8]> for TensorMap {
    fn as_ref(&self) -> &[u8] {
        self
    }
}

const COPY_BYTES: usize = 4 << 20;
