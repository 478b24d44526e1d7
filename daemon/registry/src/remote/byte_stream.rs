//! The bytes of a file: the body of one response, or those of the blobs that the file consists of at its registry, in turn.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;
use std::sync::Arc;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use blobd_store_format::stored_file::Source;
use blobd_store_format::tensor_layers::TensorLayers;
use bytes::Bytes;

use super::RemoteFile;
use crate::RegistryClient;
use crate::error::Result;
use crate::stream::{BodyStream, Sender};

/// The blobs that a file consists of.
#[derive(Debug)]
pub(crate) struct SeparateBlobs {
    pub(crate) recipe: Arc<Recipe>,
    pub(crate) sizes: BTreeMap<Digest, u64>,
    /// What was downloaded for the recipe.
    pub(crate) recipe_bytes: u64,
}

/// The bytes of a file, or of a part of it, as they arrive. The stream counts them but does not hash them: the caller
/// must verify the digest.
#[derive(Debug)]
pub struct ByteStream(Kind);

#[derive(Debug)]
enum Kind {
    Body(Box<BodyStream>),
    Blobs(Box<BlobsStream>),
}

impl From<BodyStream> for ByteStream {
    fn from(body: BodyStream) -> Self {
        Self(Kind::Body(Box::new(body)))
    }
}

impl ByteStream {
    pub(super) fn only(self, range: Range<u64>) -> Self {
        match self.0 {
            Kind::Body(body) => body.only(range).into(),
            Kind::Blobs(mut blobs) => {
                blobs.restrict(range);
                Self(Kind::Blobs(blobs))
            }
        }
    }

    /// The next bytes, at least one; `None` after exactly the requested number.
    ///
    /// # Errors
    /// [`SizeDiffers`](crate::RegistryError::SizeDiffers) and [`RangeDiffers`](crate::RegistryError::RangeDiffers) when there are more or
    /// fewer, [`Broken`](crate::RegistryError::Broken) and [`Stalled`](crate::RegistryError::Stalled) when the connection fails.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        match &mut self.0 {
            Kind::Body(body) => body.next().await,
            Kind::Blobs(blobs) => blobs.next().await,
        }
    }

    /// Whether this is the whole file rather than a part of it.
    pub fn is_whole(&self) -> bool {
        match &self.0 {
            Kind::Body(body) => body.is_whole(),
            Kind::Blobs(blobs) => blobs.is_whole,
        }
    }

    /// The server and host that send the bytes.
    pub const fn sender(&self) -> &Arc<Sender> {
        match &self.0 {
            Kind::Body(body) => body.sender(),
            Kind::Blobs(blobs) => &blobs.sender,
        }
    }

    /// Bytes received over the network, including bytes before the range from a server that ignores ranges.
    pub const fn received_bytes(&self) -> u64 {
        match &self.0 {
            Kind::Body(body) => body.received_bytes(),
            Kind::Blobs(blobs) => blobs.received,
        }
    }
}

/// A part of a file.
#[derive(Debug)]
enum Part {
    /// Bytes of a blob of this size.
    Blob {
        blob: Digest,
        size: u64,
        range: Range<u64>,
    },
    Zeros(u64),
    Literal(Bytes),
}

/// The parts of a file, each requested when those before it have arrived.
#[derive(Debug)]
struct BlobsStream {
    client: RegistryClient,
    file: RemoteFile,
    reference: Reference,
    blobs: Arc<SeparateBlobs>,
    parts: VecDeque<Part>,
    /// The blob that is being received.
    open: Option<BodyStream>,
    sender: Arc<Sender>,
    /// The bytes of earlier blobs, then also of the open one.
    received: u64,
    is_whole: bool,
}

/// The most zeros that are in memory.
const ZEROS: &[u8] = &[0; 64 << 10];

impl RegistryClient {
    /// Opens a file that its registry has as blobs, or a part of it. The first blob is requested at once.
    pub(super) async fn open_blobs(
        &self,
        file: &RemoteFile,
        (reference, blobs): (&Reference, &Arc<SeparateBlobs>),
        range: Option<Range<u64>>,
    ) -> Result<ByteStream> {
        let host = reference.host().to_owned();
        let mut stream = BlobsStream {
            client: self.clone(),
            file: file.clone(),
            reference: reference.clone(),
            blobs: Arc::clone(blobs),
            parts: VecDeque::new(),
            open: None,
            sender: Arc::new(Sender::new(host.clone(), host)),
            received: 0,
            is_whole: range.is_none(),
        };
        stream.restrict(range.unwrap_or(0..file.size()));
        if let Some(Part::Blob { .. }) = stream.parts.front() {
            stream.open_next().await?;
        }
        Ok(ByteStream(Kind::Blobs(Box::new(stream))))
    }
}

impl BlobsStream {
    fn restrict(&mut self, range: Range<u64>) {
        let part = |source| match source {
            Source::Blob { blob, offset, length } => {
                Part::Blob { blob, size: self.blobs.size(blob), range: offset..offset.saturating_add(length) }
            }
            Source::Zeros { length } => Part::Zeros(length),
            Source::Literal { bytes } => Part::Literal(Bytes::copy_from_slice(bytes)),
        };
        if self.open.is_none() {
            self.parts = self.blobs.recipe.pieces().sources(range).map(part).collect();
        }
    }

    /// Requests the blob that is next.
    async fn open_next(&mut self) -> Result<()> {
        let Some(Part::Blob { blob, size, range }) = self.parts.front() else { return Ok(()) };
        let media_type = MediaType::new(TensorLayers::BLOB_TYPE);
        let blob = Descriptor { media_type, digest: *blob, size: *size };
        let blob = RemoteFile::layer(&self.reference, &blob).in_order_of(&self.file);
        let part = Some(range.clone()).filter(|range| *range != (0..*size));
        let opened = self.client.open_body(&blob, part.as_ref()).await?;
        let opened = if part.is_some() { opened.only(range.clone()) } else { opened };
        self.sender = Arc::clone(opened.sender());
        self.open = Some(opened);
        self.parts.pop_front();
        Ok(())
    }

    async fn next(&mut self) -> Result<Option<Bytes>> {
        loop {
            if let Some(open) = &mut self.open {
                let before = open.received_bytes();
                let bytes = open.next().await;
                let more = open.received_bytes().saturating_sub(before);
                self.received = self.received.saturating_add(more);
                match bytes? {
                    Some(bytes) => return Ok(Some(bytes)),
                    None => self.open = None,
                }
            }
            match self.parts.pop_front() {
                None => return Ok(None),
                Some(Part::Literal(bytes)) => return Ok(Some(bytes)),
                Some(Part::Zeros(length)) => {
                    let now = length.min(ZEROS.len() as u64);
                    if length > now {
                        self.parts.push_front(Part::Zeros(length.saturating_sub(now)));
                    }
                    let now = usize::try_from(now).unwrap_or(ZEROS.len());
                    return Ok(Some(Bytes::from_static(ZEROS.get(..now).unwrap_or(ZEROS))));
                }
                Some(blob @ Part::Blob { .. }) => {
                    self.parts.push_front(blob);
                    self.open_next().await?;
                }
            }
        }
    }
}

impl SeparateBlobs {
    fn size(&self, blob: Digest) -> u64 {
        self.sizes.get(&blob).copied().unwrap_or_default()
    }
}
