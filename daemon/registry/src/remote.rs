//! One file at a server of any kind: what a transfer needs to know about it, and how its bytes are opened.

use std::ops::Range;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use hyper::header::{CONTENT_RANGE, HeaderValue, RANGE};

use super::mirrors::first_of;
use super::origin::Registry;
use super::request::{Response, Target};
use super::web::{WebFile, validator};
use super::{ByteStream, RegistryClient, RegistryError};

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
    validator: Option<String>,
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
        Self { place, media_type, name: None, size, digest: Some(digest), validator: None }
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
        Self { place: Place::Web(file), media_type, name, size, digest, validator: None }
    }

    /// The same in the version that was seen.
    pub(super) fn with_validator(self, validator: Option<String>) -> Self {
        Self { validator, ..self }
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
    /// time of its last change. It is compared with each response.
    #[must_use]
    pub fn validator(&self) -> Option<&str> {
        self.validator.as_deref()
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

    /// What it is called in errors.
    fn subject(&self) -> String {
        self.digest.map_or_else(|| self.label(), |digest| format!("blob {digest}"))
    }

    /// The request for it at one of its servers.
    fn target<'t>(&'t self, server: &'t Registry) -> Result<Target<'t>, RegistryError> {
        match (&self.place, self.digest) {
            (Place::Layer(reference), Some(digest)) => Target::blob(server, reference, digest),
            (Place::Layer(reference), None) => Target::new(server, reference, "blobs/"),
            (Place::Web(file), _) => file.target(server),
        }
    }

    /// Whether a response is of the version that was seen first. A server that no longer says may have
    /// another: nothing else would show it.
    fn check_version(&self, response: &Response) -> Result<(), RegistryError> {
        match self.validator() {
            seen @ Some(_) if validator(response).as_deref() != seen => {
                Err(RegistryError::FileChanged { address: self.label(), host: response.host() })
            }
            _ => Ok(()),
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
            RegistryError::NotFound {
                subject: format!("{origin} with digest {}", file.digest),
                host: "its server".to_owned(),
            }
        })
    }

    /// Starts to fetch one of the files that `reference`'s manifest lists.
    ///
    /// # Errors
    /// As for [`Self::open`].
    pub async fn blob(&self, reference: &Reference, file: &Descriptor) -> Result<ByteStream, RegistryError> {
        self.open(&RemoteFile::layer(reference, file)).await
    }

    /// Starts to fetch a whole file.
    ///
    /// # Errors
    /// [`RegistryError`] when it is not there, has another size, or its server misbehaves.
    pub async fn open(&self, file: &RemoteFile) -> Result<ByteStream, RegistryError> {
        self.open_at_any(file, None).await
    }

    /// Starts to fetch the bytes `range` of a file, which must not be empty. A server that knows no
    /// ranges sends all of it; then what comes before is skipped, and the connection is closed behind.
    /// A request that fails is repeated; a stream that breaks is not.
    ///
    /// # Errors
    /// As for [`Self::open_part`].
    pub async fn open_range(
        &self,
        file: &RemoteFile,
        range: Range<u64>,
    ) -> Result<ByteStream, RegistryError> {
        let part = self.retried(|| self.open_part(file, range.clone())).await?;
        Ok(part.only(range))
    }

    /// The same for a caller who can use all of the file if that is what the server sends: then the
    /// stream begins with the file's first byte, and [`ByteStream::is_whole`].
    ///
    /// # Errors
    /// As for [`Self::open`]; [`RegistryError::RangeDiffers`] when another part comes than was asked
    /// for, or when the range is empty or not inside the file; [`RegistryError::FileChanged`] when it
    /// is another version by now.
    pub async fn open_part(&self, file: &RemoteFile, range: Range<u64>) -> Result<ByteStream, RegistryError> {
        self.open_at_any(file, Some(range)).await
    }

    async fn open_at_any(
        &self,
        file: &RemoteFile,
        range: Option<Range<u64>>,
    ) -> Result<ByteStream, RegistryError> {
        let servers = match &file.place {
            Place::Layer(reference) => self.shared.mirrors.of(reference)?,
            Place::Web(web) => web.servers().to_vec(),
        };
        first_of(&servers, file.host(), |server| self.open_at(file, server, range.as_ref())).await
    }

    async fn open_at(
        &self,
        file: &RemoteFile,
        server: &Registry,
        range: Option<&Range<u64>>,
    ) -> Result<ByteStream, RegistryError> {
        let mut target = file.target(server)?;
        if let Some(range) = range {
            target = target.with(RANGE, range_header(file, server, range)?);
        }
        let (response, limits) = (self.shared.get(&target).await?, &self.shared.limits);
        let version = file.check_version(&response);
        let Some(range) = range.filter(|_| response.is_partial()) else {
            let page = response.web_page();
            let stream = ByteStream::open(response.into_body(), (file.subject(), file.size), None, limits);
            // A page or a length that cannot be says more than that it is another version.
            return stream.map_err(|error| page.unwrap_or(error)).and_then(|stream| version.map(|()| stream));
        };
        version?;
        let expected = content_range(range, file.size);
        check_part(&response, file, &expected)?;
        let part = (file.subject(), range.end - range.start);
        ByteStream::open(response.into_body(), part, Some(expected), limits)
    }
}

/// What asks for a part of a file, which must be inside of it and not empty.
fn range_header(
    file: &RemoteFile,
    server: &Registry,
    range: &Range<u64>,
) -> Result<HeaderValue, RegistryError> {
    let header = || HeaderValue::try_from(format!("bytes={}-{}", range.start, range.end - 1)).ok();
    let is_inside = range.start < range.end && range.end <= file.size;
    is_inside.then(header).flatten().ok_or_else(|| RegistryError::RangeDiffers {
        subject: file.subject(),
        host: server.origin().host().to_owned(),
        found: format!("{} bytes in all", file.size),
        expected: content_range(range, file.size),
    })
}

/// The header's value for this part of a file of `size` bytes.
fn content_range(range: &Range<u64>, size: u64) -> String {
    format!("bytes {}-{}/{size}", range.start, range.end.saturating_sub(1))
}

/// A part must say which it is, and be the one that was asked for.
fn check_part(response: &Response, file: &RemoteFile, expected: &str) -> Result<(), RegistryError> {
    const MAX_CHARS: usize = 80;
    let mut values = response.headers().get_all(CONTENT_RANGE).iter();
    let found = match (values.next(), values.next()) {
        (Some(value), None) if value.as_bytes().eq_ignore_ascii_case(expected.as_bytes()) => return Ok(()),
        (Some(value), None) => String::from_utf8_lossy(value.as_bytes()).chars().take(MAX_CHARS).collect(),
        (None, _) => "a part that it does not name".to_owned(),
        (Some(_), Some(_)) => "several parts".to_owned(),
    };
    let expected = expected.to_owned();
    Err(RegistryError::RangeDiffers { subject: file.subject(), host: response.host(), found, expected })
}
