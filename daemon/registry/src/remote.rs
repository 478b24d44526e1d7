//! One file at a server, whatever kind of server that is: what a transfer needs to know, and a way
//! to its bytes.

use std::ops::Range;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use bytes::Bytes;

use super::web_file::WebFile;
use super::{BlobStream, Part, RangeStream, RegistryClient, RegistryError};

/// What a source turned out to be.
#[derive(Debug)]
pub enum RemoteModel {
    /// A model whose registry has a manifest for it.
    Published(Manifest),
    /// Files without a manifest: one, or the shards of one model, and a projector if it has one.
    Files {
        /// The files, shards in order.
        files: Vec<RemoteFile>,
        /// Where the very same can be had again; absent if nowhere for long.
        origin: Option<String>,
    },
}

/// One file at a server. Its address and what is known about it have been checked; its bytes come
/// by [`RegistryClient::open`] and [`RegistryClient::open_range`].
#[derive(Clone, Debug)]
pub struct RemoteFile {
    place: Place,
    media_type: MediaType,
    name: Option<String>,
    size: u64,
    digest: Option<Digest>,
}

#[derive(Clone, Debug)]
enum Place {
    /// A layer of a model's manifest.
    Layer(Reference),
    /// A file with an address of its own.
    Web(WebFile),
}

impl RemoteFile {
    /// One of the files that the manifest of `reference` lists.
    #[must_use]
    pub fn layer(reference: &Reference, file: &Descriptor) -> Self {
        let Descriptor { media_type, digest, size } = file.clone();
        let place = Place::Layer(reference.clone());
        Self { place, media_type, name: None, size, digest: Some(digest) }
    }

    /// A file with an address of its own.
    pub(super) fn web(
        file: WebFile,
        media_type: &str,
        name: &str,
        size: u64,
        digest: Option<Digest>,
    ) -> Self {
        let (media_type, name) = (MediaType::new(media_type), Some(name.to_owned()));
        Self { place: Place::Web(file), media_type, name, size, digest }
    }

    /// What the file is.
    #[must_use]
    pub const fn media_type(&self) -> &MediaType {
        &self.media_type
    }

    /// What it is called at its server; that of a layer its manifest tells.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Its length in bytes.
    #[must_use]
    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The SHA-256 of the whole file, if anybody names it beforehand. What a transfer keeps of a
    /// file without one is only worth something together with its [`validator`](Self::validator).
    #[must_use]
    pub const fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// What tells this version of a file from others while its digest is unknown: an `ETag`, or the
    /// time of its last change. It is compared with each answer.
    #[must_use]
    pub fn validator(&self) -> Option<&str> {
        match &self.place {
            Place::Web(file) if self.digest.is_none() => file.validator(),
            _ => None,
        }
    }

    /// Its descriptor, if its digest is known.
    #[must_use]
    pub fn descriptor(&self) -> Option<Descriptor> {
        let (media_type, size) = (self.media_type.clone(), self.size);
        self.digest.map(|digest| Descriptor { media_type, digest, size })
    }

    /// What people know it by: a URL without its query, or a model's layer.
    #[must_use]
    pub fn label(&self) -> String {
        match &self.place {
            Place::Layer(reference) => format!("{} of {}", self.media_type.component(), reference.short()),
            Place::Web(file) => file.address().to_owned(),
        }
    }

    /// Names what a transfer keeps of it: its digest, or else what tells this version of it from
    /// others.
    #[must_use]
    pub fn identity(&self) -> Digest {
        let version = || format!("{} {} {}", self.label(), self.size, self.validator().unwrap_or_default());
        self.digest.unwrap_or_else(|| Digest::of(version().as_bytes()))
    }

    /// Whether bytes that come later are known to be of the same file: it has a digest, or its
    /// server names its version.
    #[must_use]
    pub fn is_resumable(&self) -> bool {
        self.digest.is_some() || self.validator().is_some()
    }

    /// The model that it is a layer of.
    #[must_use]
    pub const fn model(&self) -> Option<&Reference> {
        match &self.place {
            Place::Layer(reference) => Some(reference),
            Place::Web(_) => None,
        }
    }

    /// The host that is asked for it, for a limit of connections.
    #[must_use]
    pub fn host(&self) -> &str {
        match &self.place {
            Place::Layer(reference) => reference.host(),
            Place::Web(file) => file.host(),
        }
    }

    /// The descriptor, or one that says nothing about the content: streams count, they do not hash.
    fn counted(&self) -> Descriptor {
        let digest = self.digest.unwrap_or_else(|| Digest::of(self.label().as_bytes()));
        Descriptor { media_type: self.media_type.clone(), digest, size: self.size }
    }

    /// The address to name in errors, where there is no digest to name.
    fn address(&self) -> Option<String> {
        match &self.place {
            Place::Web(file) if self.digest.is_none() => Some(file.address().to_owned()),
            _ => None,
        }
    }
}

impl RegistryClient {
    /// What `source` names: a manifest, or files that need none.
    ///
    /// # Errors
    /// [`RegistryError`] when it names nothing that could be had, or its server misbehaves.
    pub async fn resolve(&self, source: &PullSource) -> Result<RemoteModel, RegistryError> {
        match source {
            PullSource::Registry(reference) => match self.manifest(reference).await {
                Ok(manifest) => Ok(RemoteModel::Published(manifest)),
                Err(error) => self.hub_model_of_tag(reference, error).await,
            },
            PullSource::Hub(file) => self.hub_model(file).await,
            PullSource::Url(url) => {
                Ok(RemoteModel::Files { files: self.web_files(url).await?, origin: source.origin() })
            }
        }
    }

    /// The file with this content at the place that a model came from.
    ///
    /// # Errors
    /// [`RegistryError`] as for [`Self::resolve`], and when the place has other files by now.
    pub async fn locate(&self, origin: &PullSource, file: &Descriptor) -> Result<RemoteFile, RegistryError> {
        let files = match origin {
            PullSource::Registry(reference) => return Ok(RemoteFile::layer(reference, file)),
            PullSource::Hub(hub) => self.hub_files(hub).await?,
            PullSource::Url(url) => self.web_files(url).await?,
        };
        let is_it = |found: &RemoteFile| {
            found.size == file.size && found.digest.is_none_or(|digest| digest == file.digest)
        };
        let found = files.into_iter().find(is_it);
        found.map(|found| RemoteFile { digest: Some(file.digest), ..found }).ok_or_else(|| {
            RegistryError::FileMissing {
                address: format!("{origin} with digest {}", file.digest),
                host: "its server".to_owned(),
            }
        })
    }

    /// Starts to fetch a whole file.
    ///
    /// # Errors
    /// [`RegistryError`] when it is not there, has another size, or its server misbehaves.
    pub async fn open(&self, file: &RemoteFile) -> Result<RemoteStream, RegistryError> {
        let opened = match &file.place {
            Place::Layer(reference) => self.blob(reference, &file.counted()).await,
            Place::Web(web) => self.web_stream(web, &file.counted(), file.validator()).await,
        };
        RemoteStream::of(file, opened.map(Body::Whole))
    }

    /// Starts to fetch the bytes `range` of a file, which must not be empty.
    ///
    /// # Errors
    /// As for [`Self::range`]; [`RegistryError::FileChanged`] when it is another version by now.
    pub async fn open_range(
        &self,
        file: &RemoteFile,
        range: Range<u64>,
    ) -> Result<RemoteStream, RegistryError> {
        let opened = self.part_at(file, range.clone()).await;
        RemoteStream::of(file, opened.map(|part| Body::Part(part.only(&range))))
    }

    /// The same for a caller who can use all of the file if that is what the server sends: then the
    /// stream begins with the file's first byte, and [`RemoteStream::is_whole`].
    ///
    /// # Errors
    /// As for [`Self::open_range`].
    pub async fn open_part(
        &self,
        file: &RemoteFile,
        range: Range<u64>,
    ) -> Result<RemoteStream, RegistryError> {
        let body = self.part_at(file, range).await.map(|part| match part {
            Part::Range(stream) => Body::Part(stream),
            Part::Whole(stream) => Body::Whole(stream),
        });
        RemoteStream::of(file, body)
    }

    async fn part_at(&self, file: &RemoteFile, range: Range<u64>) -> Result<Part, RegistryError> {
        match &file.place {
            Place::Layer(reference) => self.part(reference, &file.counted(), range).await,
            Place::Web(web) => self.web_part(web, &file.counted(), file.validator(), range).await,
        }
    }
}

/// The bytes of a file or of a part of it as they arrive; counted, not hashed.
#[derive(Debug)]
pub struct RemoteStream {
    body: Body,
    address: Option<String>,
    received: u64,
}

#[derive(Debug)]
enum Body {
    Whole(BlobStream),
    Part(RangeStream),
}

impl RemoteStream {
    fn of(file: &RemoteFile, body: Result<Body, RegistryError>) -> Result<Self, RegistryError> {
        let address = file.address();
        match body {
            Ok(body) => Ok(Self { body, address, received: 0 }),
            Err(error) => Err(named(error, address.as_deref())),
        }
    }

    /// The next bytes, never none; nothing once exactly as many have come as were asked for.
    ///
    /// # Errors
    /// As for [`BlobStream::next`] and [`RangeStream::next`]; where the file has no digest,
    /// [`RegistryError::FileDiffers`] in place of those that name one.
    pub async fn next(&mut self) -> Result<Option<Bytes>, RegistryError> {
        let next = match &mut self.body {
            Body::Whole(stream) => stream.next().await,
            Body::Part(stream) => stream.next().await,
        };
        let next = next.map_err(|error| named(error, self.address.as_deref()))?;
        self.received = self.received.saturating_add(next.as_ref().map_or(0, |bytes| bytes.len() as u64));
        Ok(next)
    }

    /// Whether this is all of the file and not a part of it.
    #[must_use]
    pub const fn is_whole(&self) -> bool {
        matches!(self.body, Body::Whole(_))
    }

    /// How many bytes have come over the network, those included that a server without ranges sent
    /// in front of what was asked for.
    #[must_use]
    pub const fn received_bytes(&self) -> u64 {
        match &self.body {
            Body::Whole(_) => self.received,
            Body::Part(stream) => stream.received_bytes(),
        }
    }
}

/// A file without a digest is named by its address.
fn named(error: RegistryError, address: Option<&str>) -> RegistryError {
    let Some(address) = address.map(str::to_owned) else { return error };
    match error {
        RegistryError::SizeDiffers { host, found_bytes, expected_bytes, .. } => {
            let (found, expected) = (format!("{found_bytes} bytes"), format!("{expected_bytes}"));
            RegistryError::FileDiffers { address, host, found, expected }
        }
        RegistryError::RangeDiffers { host, found, expected, .. } => {
            RegistryError::FileDiffers { address, host, found, expected }
        }
        error => error,
    }
}
