//! Remote files on servers of any kind, and the requests for their bytes.

mod byte_stream;

use std::ops::Range;
use std::sync::Arc;

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::git_id::GitId;
use blobd_store_format::host;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::HubFile;
use hyper::header::{HeaderValue, IF_RANGE, RANGE};
use tokio::time::timeout;

pub use self::byte_stream::ByteStream;
pub(super) use self::byte_stream::SeparateBlobs;
use super::content_encoding::ContentEncoding;
use super::error::Result;
use super::mirrors::first_of;
use super::origin::Registry;
use super::part::PartContent;
use super::peers::PATIENCE;
use super::request::{Response, Target};
use super::stream::BodyStream;
use super::web_file::WebFile;
use super::{RegistryClient, RegistryError, Sender};

/// One file at a server. [`RegistryClient::open`] and [`RegistryClient::open_part`] return its bytes.
#[derive(Clone, Debug)]
pub struct RemoteFile {
    place: Location,
    media_type: MediaType,
    name: Option<String>,
    size: u64,
    digest: Option<Digest>,
    validator: Option<String>,
    /// Whether an equal validator proves equal bytes.
    is_lasting: bool,
    unchanged: Option<Digest>,
    git_id: Option<GitId>,
    /// The servers to try last; `None` to keep the configured order.
    avoided: Option<Vec<String>>,
    /// The user that owns the partial download; `None` if all users share it.
    user: Option<u32>,
    /// Whether only the whole file is requested, never a range.
    is_whole_only: bool,
    /// What it consists of, if the registry has its blobs in its place.
    separate: Option<Arc<SeparateBlobs>>,
}

/// A file at a URL that was pulled earlier.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct KnownFile {
    pub url: String,
    /// Its [`RemoteFile::lasting_validator`].
    pub validator: String,
    pub size: u64,
    /// The SHA-256 of the received bytes.
    pub digest: Digest,
}

#[derive(Clone, Debug)]
/// Where a file is requested.
enum Location {
    Layer(Reference),
    Web(WebFile),
}

impl RemoteFile {
    /// A file that the manifest of `reference` lists.
    pub fn layer(reference: &Reference, file: &Descriptor) -> Self {
        let Descriptor { media_type, digest, size } = file.clone();
        let place = Location::Layer(reference.clone());
        Self::new(place, media_type, None, size, Some(digest))
    }

    pub(super) fn web(
        file: WebFile,
        media_type: &str,
        name: &str,
        size: u64,
        digest: Option<Digest>,
    ) -> Self {
        let (media_type, name) = (MediaType::new(media_type), Some(name.to_owned()));
        Self::new(Location::Web(file), media_type, name, size, digest)
    }

    fn new(
        place: Location,
        media_type: MediaType,
        name: Option<String>,
        size: u64,
        digest: Option<Digest>,
    ) -> Self {
        let (validator, is_lasting, unchanged, git_id) = (None, false, None, None);
        let (avoided, user, is_whole_only) = (None, None, false);
        Self {
            place,
            media_type,
            name,
            size,
            digest,
            validator,
            is_lasting,
            unchanged,
            git_id,
            avoided,
            user,
            is_whole_only,
            separate: None,
        }
    }

    pub(super) fn with_validator(self, validator: Option<String>, is_lasting: bool) -> Self {
        Self { validator, is_lasting, ..self }
    }

    /// The file, which is the same version as a file with this digest that was pulled earlier.
    pub fn with_unchanged(self, unchanged: Option<Digest>) -> Self {
        Self { unchanged, ..self }
    }

    pub(super) fn with_git_id(self, git_id: Option<GitId>) -> Self {
        Self { git_id, ..self }
    }

    /// The file, whose digest was found out.
    pub fn with_digest(self, digest: Digest) -> Self {
        Self { digest: Some(digest), ..self }
    }

    /// A copy of the file that is requested from these servers last, because they sent wrong bytes. With an empty list,
    /// the first server is tried last.
    pub fn avoiding<'s>(&self, servers: impl IntoIterator<Item = &'s Sender>) -> Self {
        let avoided = servers.into_iter().map(|sender| sender.server().to_owned()).collect();
        Self { avoided: Some(avoided), ..self.clone() }
    }

    /// A part of the file that is a blob of its own at other blobds, such as a tensor.
    pub fn part_with_digest(&self, digest: Digest, size: u64) -> Self {
        let whole = Self { separate: None, ..self.clone() };
        Self { digest: Some(digest), size, validator: None, unchanged: None, git_id: None, ..whole }
    }

    pub(super) fn with_separate(self, separate: Option<Arc<SeparateBlobs>>) -> Self {
        Self { separate, ..self }
    }

    /// The file, requested from the same servers last as another one.
    pub(super) fn in_order_of(self, other: &Self) -> Self {
        Self { avoided: other.avoided.clone(), ..self }
    }

    /// The recipe of a file that its registry has as separate blobs, and the bytes that were downloaded for it. Not trusted.
    pub fn recipe(&self) -> Option<(&Arc<Recipe>, u64)> {
        self.separate.as_ref().map(|blobs| (&blobs.recipe, blobs.recipe_bytes))
    }

    /// A copy of the file with a partial download that belongs to one user alone.
    pub fn for_user(&self, uid: u32) -> Self {
        Self { user: Some(uid), ..self.clone() }
    }

    /// A copy of the file for which [`RegistryClient::open_part`] requests the whole file instead of a range.
    pub fn without_ranges(&self) -> Self {
        Self { is_whole_only: true, ..self.clone() }
    }

    fn in_order(&self, mut servers: Vec<Registry>) -> Vec<Registry> {
        match &self.avoided {
            None => {}
            Some(avoided) if avoided.is_empty() => {
                let count = servers.len();
                servers.rotate_left(count.min(1));
            }
            Some(avoided) => servers.sort_by_key(|server| avoided.iter().any(|name| name == server.name())),
        }
        servers
    }

    pub const fn media_type(&self) -> &MediaType {
        &self.media_type
    }

    /// The file's name on its server. Layers have none, although their manifest may name them.
    pub fn name(&self) -> Option<&str> {
        self.name.as_deref()
    }

    /// Whether a file with tensors must have a known format: because it has no digest to check, not even git's, because of
    /// its name, or because it comes from the hub's registry, which serves no other files.
    pub fn must_have_known_format(&self) -> bool {
        let is_announced = match &self.place {
            Location::Layer(reference) => {
                is_at_hub(reference) && self.media_type.archive_of_weights().is_none()
            }
            Location::Web(_) => self.name().is_some_and(|name| FileFormat::split_name(name).is_some()),
        };
        (self.digest.is_none() && self.git_id.is_none()) || is_announced
    }

    pub const fn size(&self) -> u64 {
        self.size
    }

    /// The SHA-256 of the whole file, if it is known before the download. A partial download of a file
    /// without a digest can be resumed only if the [`validator`](Self::validator) is still the same.
    pub const fn digest(&self) -> Option<Digest> {
        self.digest
    }

    /// Identifies the version of a file without a digest: its `ETag` or `Last-Modified`.
    pub fn validator(&self) -> Option<&str> {
        self.validator.as_deref()
    }

    /// The validator, if no other bytes can ever have the same one. A recent `Last-Modified` does not qualify, because
    /// the file could change again within the same second.
    pub fn lasting_validator(&self) -> Option<&str> {
        self.validator().filter(|_| self.is_lasting)
    }

    /// What git calls the content of a file that a hub stores in git itself, without a SHA-256.
    pub const fn git_id(&self) -> Option<GitId> {
        self.git_id
    }

    /// The descriptor of the file as it was pulled earlier, if the server says that it is unchanged. Unlike
    /// [`Self::digest`], this does not prove which bytes the server would send.
    pub fn unchanged(&self) -> Option<Descriptor> {
        let (media_type, size) = (self.media_type.clone(), self.size);
        self.unchanged.map(|digest| Descriptor { media_type, digest, size })
    }

    /// The descriptor, if the digest is known.
    pub fn descriptor(&self) -> Option<Descriptor> {
        let (media_type, size) = (self.media_type.clone(), self.size);
        self.digest.map(|digest| Descriptor { media_type, digest, size })
    }

    /// The file's name in messages: a URL without its query, or a model's layer.
    pub fn label(&self) -> String {
        match &self.place {
            Location::Layer(reference) => format!("{} of {}", self.media_type.component(), reference.short()),
            Location::Web(file) => file.address().to_owned(),
        }
    }

    /// Identifies a partial download: the digest, a hash of address, size and validator, or a hash of the digest and
    /// the only user.
    pub fn identity(&self) -> Digest {
        let text = match (self.digest, self.user) {
            (Some(digest), None) => return digest,
            (Some(digest), Some(user)) => format!("{digest} of uid {user}"),
            (None, _) => {
                format!("{} {} {}", self.label(), self.size, self.validator().unwrap_or_default())
            }
        };
        Digest::of(text.as_bytes())
    }

    /// Whether a partial download can be continued: the digest or the version is known.
    pub fn is_resumable(&self) -> bool {
        self.digest.is_some() || self.validator().is_some()
    }

    /// The model, if the file is a layer of one.
    pub const fn model(&self) -> Option<&Reference> {
        match &self.place {
            Location::Layer(reference) => Some(reference),
            Location::Web(_) => None,
        }
    }

    /// The host that serves it, for the limit on connections per host.
    pub fn host(&self) -> &str {
        match &self.place {
            Location::Layer(reference) => reference.host(),
            Location::Web(file) => file.host(),
        }
    }

    fn subject(&self) -> String {
        self.digest.map_or_else(|| self.label(), |digest| format!("blob {digest}"))
    }

    fn target<'t>(&'t self, server: &'t Registry) -> Result<Target<'t>> {
        match (&self.place, self.digest) {
            (Location::Layer(reference), Some(digest)) => Target::blob(server, reference, digest),
            (Location::Layer(reference), None) => Target::new(server, reference, "blobs/"),
            (Location::Web(file), _) => file.target(server),
        }
    }

    /// The same file at a peer, by its digest; `None` if it has none, or no repository of a registry or of the hub.
    fn target_at_peer<'t>(&'t self, peer: &'t Registry) -> Option<Target<'t>> {
        let digest = self.digest?;
        let (repository, host) = match &self.place {
            Location::Layer(reference) => (reference.repository(), reference.host()),
            Location::Web(file) if file.is_at_hub() => (file.repository().to_owned(), HubFile::HOST),
            Location::Web(_) => return None,
        };
        Target::at_peer(peer, &repository, host, digest).ok()
    }

    fn contains(&self, range: &Range<u64>) -> bool {
        range.start < range.end && range.end <= self.size
    }

    fn range_differs(&self, host: String, found: String, range: &Range<u64>) -> RegistryError {
        let (subject, expected) = (self.subject(), content_range(range, self.size));
        RegistryError::RangeDiffers { subject, host, found, expected }
    }

    /// Refuses a response with another validator, or with none: it may belong to another version.
    fn check_version(&self, response: &Response) -> Result<()> {
        match self.validator() {
            seen @ Some(_) if response.validator().as_deref() != seen => {
                let what = format!("changed at {} while it was pulled; pull it again", response.host());
                Err(RegistryError::unusable(self.label(), what))
            }
            _ => Ok(()),
        }
    }
}

impl RegistryClient {
    /// Opens a file that the manifest of `reference` lists.
    pub async fn blob(&self, reference: &Reference, file: &Descriptor) -> Result<ByteStream> {
        self.open(&RemoteFile::layer(reference, file)).await
    }

    /// Opens a whole file.
    pub async fn open(&self, file: &RemoteFile) -> Result<ByteStream> {
        self.open_at_any(file, None).await
    }

    /// Opens `range` of a file, which must not be empty. Where the server ignores the range, the bytes before
    /// it are skipped. A failed request is repeated; a stream that breaks is not.
    pub async fn open_range(&self, file: &RemoteFile, range: Range<u64>) -> Result<ByteStream> {
        let part = match self.retried(|| self.open_part(file, range.clone())).await {
            // The server sent another part each time.
            Err(error @ RegistryError::RangeDiffers { .. }) if file.contains(&range) => {
                let whole = self.open_part(&file.without_ranges(), range.clone()).await;
                whole.map_err(|other| more_telling(error, other))?
            }
            part => part?,
        };
        Ok(part.only(range))
    }

    /// Opens `range` of a file like [`Self::open_range`], but sends a single request. If the server ignores the range,
    /// the stream contains the whole file and [`ByteStream::is_whole`] is true.
    ///
    /// # Errors
    /// As for [`Self::open`]; [`RegistryError::RangeDiffers`] when the server sends another part, or
    /// the range is empty or not inside the file; [`RegistryError::Unusable`] when the version has
    /// changed.
    pub async fn open_part(&self, file: &RemoteFile, range: Range<u64>) -> Result<ByteStream> {
        self.open_at_any(file, Some(range).filter(|_| !file.is_whole_only)).await
    }

    async fn open_at_any(&self, file: &RemoteFile, range: Option<Range<u64>>) -> Result<ByteStream> {
        match (&file.separate, &file.place) {
            (Some(blobs), Location::Layer(reference)) => {
                if let Some(stream) = self.open_body_at_peer(file, range.as_ref()).await {
                    return Ok(stream.into());
                }
                if let Some(range) = range.as_ref().filter(|range| !file.contains(range)) {
                    let found = format!("a file of {} bytes", file.size);
                    return Err(file.range_differs(reference.host().to_owned(), found, range));
                }
                Box::pin(self.open_blobs(file, (reference, blobs), range)).await
            }
            _ => Ok(self.open_body(file, range.as_ref()).await?.into()),
        }
    }

    /// Opens a file that a server has as such, or a part of it.
    pub(super) async fn open_body(
        &self,
        file: &RemoteFile,
        range: Option<&Range<u64>>,
    ) -> Result<BodyStream> {
        if let Some(stream) = self.open_body_at_peer(file, range).await {
            return Ok(stream);
        }
        let servers = match &file.place {
            Location::Layer(reference) => self.shared.mirrors.for_model(reference)?,
            Location::Web(web) => web.servers().to_vec(),
        };
        let servers = file.in_order(servers);
        first_of(&servers, file.host(), |server| self.open_at(file, server, range)).await
    }

    /// The file from the first peer that has it. `None` without one: then the servers of its registry are asked, as they are if
    /// bytes of the file have been wrong before.
    pub async fn open_at_peer(&self, file: &RemoteFile, range: Option<&Range<u64>>) -> Option<ByteStream> {
        self.open_body_at_peer(file, range).await.map(ByteStream::from)
    }

    async fn open_body_at_peer(&self, file: &RemoteFile, range: Option<&Range<u64>>) -> Option<BodyStream> {
        let digest = file.digest.filter(|_| file.avoided.is_none())?;
        let peers = &self.shared.peers;
        for (number, peer) in peers.for_file(digest) {
            let target = file.target_at_peer(peer)?;
            let opened = timeout(PATIENCE, self.open_target(file, peer, range, target)).await;
            let lacks_file = match opened {
                Ok(Ok(stream)) => return Some(stream.of_peer(Arc::clone(peers), number)),
                Ok(Err(error)) => {
                    tracing::debug!("peer {}: {error}", peer.name());
                    error.is_about_file()
                }
                Err(_elapsed) => {
                    tracing::debug!("peer {}: no response within {PATIENCE:?}", peer.name());
                    false
                }
            };
            peers.set_aside(number, Some(digest).filter(|_| lacks_file));
        }
        None
    }

    async fn open_at(
        &self,
        file: &RemoteFile,
        server: &Registry,
        range: Option<&Range<u64>>,
    ) -> Result<BodyStream> {
        self.open_target(file, server, range, file.target(server)?).await
    }

    async fn open_target<'t>(
        &self,
        file: &RemoteFile,
        server: &'t Registry,
        range: Option<&Range<u64>>,
        mut target: Target<'t>,
    ) -> Result<BodyStream> {
        if let Some(range) = range {
            target = target.with(RANGE, range_header(file, server, range)?);
            // A server with another version then sends all of it, which is noticed at once.
            if let Some(validator) = file.lasting_validator().filter(|_| file.digest.is_none())
                && let Ok(validator) = HeaderValue::try_from(validator)
            {
                target = target.with(IF_RANGE, validator);
            }
        }
        let response = self.requested(server, &target).await;
        let Some(range) = range else { return self.whole(file, server, response?) };
        let unclear = match response {
            Ok(response) => {
                match PartContent::from_response(&response, range, file.size, file.digest.is_some()) {
                    PartContent::Whole => return self.whole(file, server, response),
                    PartContent::Requested => return self.part(file, server, response, range),
                    PartContent::Other(found) => {
                        return Err(file.range_differs(response.host(), found, range));
                    }
                    PartContent::Unclear(found) => file.range_differs(response.host(), found, range),
                }
            }
            // Some servers refuse a range that is inside the file, because they support none.
            Err(error @ RegistryError::Status { status: 416 | 501, .. }) => error,
            Err(error) => return Err(error),
        };
        tracing::debug!("{unclear}; requested again without a range");
        match self.requested(server, &target.without_range()).await {
            Ok(response) => self.whole(file, server, response),
            Err(error) => Err(more_telling(unclear, error)),
        }
    }

    /// Sends a request for a file. Its time limit is shorter than that of other requests.
    async fn requested(&self, server: &Registry, target: &Target<'_>) -> Result<Response> {
        let silence = self.shared.limits.silence;
        match timeout(silence, self.shared.get(target)).await {
            Ok(response) => response,
            Err(_elapsed) => {
                let (host, seconds) = (server.origin().host().to_owned(), silence.as_secs());
                Err(RegistryError::Stalled { host, seconds })
            }
        }
    }

    /// The stream of a response that contains the whole file.
    fn whole(&self, file: &RemoteFile, server: &Registry, response: Response) -> Result<BodyStream> {
        let (version, page) = (file.check_version(&response), response.web_page());
        let stream = self.stream(file, server, response, file.size, None);
        // A web page or a wrong length is a better explanation than a changed version.
        stream.map_err(|error| page.unwrap_or(error)).and_then(|stream| version.map(|()| stream))
    }

    /// The stream of a response that contains this part of the file.
    fn part(
        &self,
        file: &RemoteFile,
        server: &Registry,
        response: Response,
        range: &Range<u64>,
    ) -> Result<BodyStream> {
        file.check_version(&response)?;
        let length = range.end.saturating_sub(range.start);
        self.stream(file, server, response, length, Some(content_range(range, file.size)))
    }

    fn stream(
        &self,
        file: &RemoteFile,
        server: &Registry,
        response: Response,
        length: u64,
        content_range: Option<String>,
    ) -> Result<BodyStream> {
        let encoding = ContentEncoding::from_headers(response.headers());
        // A compressed archive is stored compressed, but many servers label it with `Content-Encoding`.
        let may_decode = content_range.is_none() && file.media_type.archive_of_weights().is_none();
        let body = response.into_body().with_encoding(encoding, length, may_decode);
        let limits = (&self.shared.limits, &self.counts);
        BodyStream::open(body, server.name(), (file.subject(), length), content_range, limits)
    }
}

/// Whether a reference names a model at Hugging Face.
pub(super) fn is_at_hub(reference: &Reference) -> bool {
    host::canonical(reference.host()).eq_ignore_ascii_case(HubFile::HOST)
}

/// Chooses the error to report after a request with a range and a request without one have both failed: the second
/// one's, unless it says only that an unrequested part arrived.
fn more_telling(of_range: RegistryError, of_whole: RegistryError) -> RegistryError {
    match of_whole.main() {
        RegistryError::Status { status: 206, .. } => of_range,
        _ => of_whole,
    }
}

/// Refuses a range that is empty or not inside the file.
fn range_header(file: &RemoteFile, server: &Registry, range: &Range<u64>) -> Result<HeaderValue> {
    let header = || HeaderValue::try_from(format!("bytes={}-{}", range.start, range.end - 1)).ok();
    file.contains(range).then(header).flatten().ok_or_else(|| {
        let found = format!("a file of {} bytes", file.size);
        file.range_differs(server.origin().host().to_owned(), found, range)
    })
}

fn content_range(range: &Range<u64>, size: u64) -> String {
    format!("bytes {}-{}/{size}", range.start, range.end.saturating_sub(1))
}
