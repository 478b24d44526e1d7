//! Uploads files and manifests to a registry.
//!
//! A file is one request: registries differ in what they make of several. Amazon's keeps the first chunk alone and reports
//! success, GitHub's and Google's refuse others. Only if the connection broke, and the registry says that it has kept a
//! part, the rest follows as a second request.

use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use bytes::Bytes;
use hyper::header::{ACCEPT, CONTENT_LENGTH, CONTENT_TYPE, HeaderValue};
use hyper::{Method, StatusCode};
use url::form_urlencoded;

use self::session::Session;
use super::error::{RegistryError, Result};
use super::manifest::{MANIFEST_TYPES, announced_digest};
use super::origin::Registry;
use super::remote::is_at_hub;
use super::request::{Response, Target};
use super::{RegistryClient, Shared};

mod body;
mod session;

/// The bytes of a file that is uploaded.
pub trait UploadContent {
    /// Why they cannot be read.
    type Error;

    /// Reads the bytes from `offset` on, at least one. May wait, for a rate limit for example: `offset` bytes have been passed
    /// on. After a failure the next call may have an earlier offset.
    fn read(&mut self, offset: u64) -> impl Future<Output = Result<Bytes, Self::Error>>;
}

/// Why an upload failed.
#[derive(Debug)]
pub enum UploadError<E> {
    /// The registry, or the connection to it.
    Registry(RegistryError),
    /// The file cannot be read.
    Content(E),
}

impl<E> From<RegistryError> for UploadError<E> {
    fn from(error: RegistryError) -> Self {
        Self::Registry(error)
    }
}

/// How a registry got a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Delivery {
    /// It had the file.
    Present,
    /// It took the file from another of its repositories.
    Mounted,
    /// It received the bytes.
    Sent,
}

/// A name at a registry, under which a model is published.
#[derive(Clone, Debug)]
pub struct Destination {
    reference: Reference,
    registry: Registry,
    /// A repository of the registry that has the files too, perhaps.
    source: Option<String>,
    /// What a token must allow.
    scopes: Vec<String>,
}

impl Destination {
    /// Takes files from this repository of the same registry where it can.
    #[must_use]
    pub fn mounting_from(mut self, repository: String) -> Self {
        if repository != self.reference.repository() {
            self.scopes.push(format!("repository:{repository}:pull"));
            self.source = Some(repository);
        }
        self
    }

    /// The name.
    pub const fn reference(&self) -> &Reference {
        &self.reference
    }

    pub(crate) fn target(
        &self,
        method: Method,
        path: &str,
        accepted: &'static [StatusCode],
    ) -> Result<Target<'_>> {
        let url = self.registry.url(&format!("{}/{path}", self.reference.repository()))?;
        Ok(self.target_at(method, url, accepted))
    }

    fn target_at(&self, method: Method, url: url::Url, accepted: &'static [StatusCode]) -> Target<'_> {
        let subject = format!("push to {}", self.reference);
        // A token to pull only would be refused.
        let target = Target::at(self.registry.origin(), subject, self.scopes.join(" "), url);
        Target { method, accepted, scopes: self.scopes.clone(), ..target }
    }
}

impl RegistryClient {
    /// The place of `reference` at its own host; mirrors get nothing. `is_plain_http` is whether the host does without TLS.
    ///
    /// # Errors
    /// [`RegistryError::Host`] if the host is malformed; [`RegistryError::NoUploads`] if it is Hugging Face's.
    pub fn destination(&self, reference: &Reference, is_plain_http: bool) -> Result<Destination> {
        if is_at_hub(reference) {
            return Err(RegistryError::NoUploads { host: reference.host().to_owned() });
        }
        let registry = self.shared.mirrors.own(reference, is_plain_http)?;
        let scopes = vec![format!("repository:{}:pull,push", reference.repository())];
        Ok(Destination { reference: reference.clone(), registry, source: None, scopes })
    }

    /// The digest of the manifest that the name has now, if the registry says it.
    pub async fn pushed_manifest(&self, destination: &Destination) -> Result<Option<Digest>> {
        self.find_manifest(destination, destination.reference.tag()).await
    }

    /// The digest of the manifest that has a tag or a digest in the repository, if the registry says it.
    pub(crate) async fn find_manifest(
        &self,
        destination: &Destination,
        name: &str,
    ) -> Result<Option<Digest>> {
        let target = destination.target(Method::HEAD, &format!("manifests/{name}"), &[])?;
        let target = target.with(ACCEPT, HeaderValue::from_static(MANIFEST_TYPES));
        match self.retried(|| self.shared.get(&target)).await {
            Ok(response) => Ok(announced_digest(&response)),
            Err(error) if is_absent(&error) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether the repository has a file.
    pub async fn has_blob(&self, destination: &Destination, digest: Digest) -> Result<bool> {
        self.retried(|| self.shared.has_blob(destination, digest)).await
    }

    /// Uploads a file that the repository may lack, unless another repository of the registry has it. Reads `content` from
    /// its start again after a failure, or from where the registry says that it has it.
    ///
    /// # Errors
    /// [`UploadError`]; then the registry may keep a part of the file for a while.
    pub async fn push_blob<C: UploadContent>(
        &self,
        destination: &Destination,
        file: &Descriptor,
        content: &mut C,
    ) -> Result<Delivery, UploadError<C::Error>> {
        let mut upload = Upload { shared: &self.shared, destination, file, broken: None, gained: 0, sent: 0 };
        let mut retry = self.retry();
        let mut is_first = true;
        loop {
            let error = match upload.attempt(content, is_first).await {
                Err(UploadError::Registry(error)) => error,
                done => return done,
            };
            is_first = false;
            retry.note_progress(upload.sent);
            // Bytes that have to be sent again after a failure do not count as progress.
            let wait = retry.wait_after(&error, std::mem::take(&mut upload.gained));
            self.note_failure(&error, wait.is_some());
            let Some(wait) = wait else { return Err(error.into()) };
            tracing::debug!("{error}; next attempt in {wait:?}");
            tokio::time::sleep(wait).await;
        }
    }

    /// Publishes a manifest under the name. The registry must have its files.
    pub async fn push_manifest(&self, destination: &Destination, manifest: &Manifest) -> Result<()> {
        let media_type = manifest.media_type().unwrap_or_else(|| MediaType::new(MediaType::OCI_MANIFEST));
        let name = destination.reference.tag();
        self.put_manifest(destination, name, &media_type, manifest.raw()).await.map(|_response| ())
    }

    /// Publishes a manifest or an image index under a tag or its digest.
    pub(crate) async fn put_manifest(
        &self,
        destination: &Destination,
        name: &str,
        media_type: &MediaType,
        raw: &[u8],
    ) -> Result<Response> {
        let invalid = |_error| RegistryError::unusable_model(&destination.reference, &"malformed media type");
        let content_type = HeaderValue::try_from(media_type.as_str()).map_err(invalid)?;
        let path = format!("manifests/{name}");
        let target = destination.target(Method::PUT, &path, STORED)?.with(CONTENT_TYPE, content_type);
        let body = Bytes::copy_from_slice(raw);
        let target = Target { body, ..target }.with(CONTENT_LENGTH, raw.len().into());
        let response = self.retried(|| self.shared.get(&target)).await;
        let response = response.map_err(|error| explained(error, media_type))?;
        check_stored(&response, Digest::of(raw), "manifest")?;
        Ok(response)
    }
}

/// The answers to a request whose content the registry has stored.
const STORED: &[StatusCode] = &[StatusCode::CREATED, StatusCode::NO_CONTENT];

/// Whether the registry has no such file, name or repository.
pub(super) fn is_absent(error: &RegistryError) -> bool {
    matches!(error.main(), RegistryError::NotFound { .. })
}

/// Refuses a response that names another digest than that of what was sent.
fn check_stored(response: &Response, expected: Digest, what: &str) -> Result<()> {
    match announced_digest(response).filter(|found| *found != expected) {
        None => Ok(()),
        Some(found) => Err(RegistryError::unusable(
            response.host(),
            format!("stored another {what}: expected {expected}, found {found}"),
        )),
    }
}

/// Says why a registry may refuse a type of manifest.
fn explained(error: RegistryError, media_type: &MediaType) -> RegistryError {
    match error {
        RegistryError::Status { status: 415, .. } if media_type.as_str() == MediaType::DOCKER_MANIFEST => {
            error.explained(
                "the registry takes no manifests of Docker's type, which Ollama's models have: zot takes them with \
                 \"compat\": [\"docker2s2\"] under \"http\" in its configuration"
                    .to_owned(),
            )
        }
        error => error,
    }
}

impl Shared {
    async fn has_blob(&self, destination: &Destination, digest: Digest) -> Result<bool> {
        let target = destination.target(Method::HEAD, &format!("blobs/{digest}"), &[])?;
        match self.get(&target).await {
            Ok(_found) => Ok(true),
            Err(error) if is_absent(&error) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// One file on its way to a registry.
struct Upload<'u> {
    shared: &'u Shared,
    destination: &'u Destination,
    file: &'u Descriptor,
    /// An upload whose connection broke, and how many bytes it had before.
    broken: Option<(Session, u64)>,
    /// Bytes that the registry has kept since the last failure.
    gained: u64,
    /// Bytes of the last attempt.
    sent: u64,
}

impl Upload<'_> {
    async fn attempt<C: UploadContent>(
        &mut self,
        content: &mut C,
        is_first: bool,
    ) -> Result<Delivery, UploadError<C::Error>> {
        self.sent = 0;
        if let Some((session, before)) = self.broken.take() {
            match self.resumed(session, before, content).await {
                Err(UploadError::Registry(error)) if is_refusal(&error) => {
                    tracing::debug!("{error}; uploaded from the start");
                }
                Ok(None) => {}
                Ok(Some(delivery)) => return Ok(delivery),
                Err(error) => return Err(error),
            }
        }
        // The response to a request that has stored the file may have been lost.
        if !is_first && self.shared.has_blob(self.destination, self.file.digest).await? {
            return Ok(Delivery::Present);
        }
        match self.begin().await? {
            None => Ok(Delivery::Mounted),
            Some(session) => self.send_last(session, 0, content).await,
        }
    }

    /// Opens an upload, or mounts the file from the other repository; `None` then.
    async fn begin(&self) -> Result<Option<Session>> {
        if let Some(source) = &self.destination.source {
            let digest = self.file.digest.to_string();
            let query = form_urlencoded::Serializer::new(String::new())
                .append_pair("mount", &digest)
                .append_pair("from", source)
                .finish();
            match self.post(&format!("?{query}")).await {
                Ok(response) if response.response.status() == StatusCode::CREATED => return Ok(None),
                Ok(response) => return Session::opened_by(&response).map(Some),
                // The user may have no right to that repository.
                Err(error) if is_refusal(&error) => tracing::debug!("{error}; uploaded instead of mounted"),
                Err(error) => return Err(error),
            }
        }
        Session::opened_by(&self.post("").await?).map(Some)
    }

    async fn post(&self, query: &str) -> Result<Response> {
        const OPENED: &[StatusCode] = &[StatusCode::ACCEPTED, StatusCode::CREATED];
        let target = self.destination.target(Method::POST, &format!("blobs/uploads/{query}"), OPENED)?;
        self.shared.get(&target.with(CONTENT_LENGTH, 0.into())).await
    }

    /// Continues an upload that had `before` bytes before its connection broke; `None` if the registry has kept nothing.
    async fn resumed<C: UploadContent>(
        &mut self,
        session: Session,
        before: u64,
        content: &mut C,
    ) -> Result<Option<Delivery>, UploadError<C::Error>> {
        let Some((session, kept)) = session.status(self.shared, self.destination).await? else {
            return Ok(None);
        };
        if kept > self.file.size {
            return Ok(None);
        }
        self.gained = kept.saturating_sub(before);
        if kept == self.file.size {
            return self.send_last(session, kept, content).await.map(Some);
        }
        let rest = kept..self.file.size;
        let target = session.patch(self.destination, &rest);
        let response = self.send(&session, target, rest, content).await?;
        let session = Session::opened_by(&response)?;
        self.send_last(session, self.file.size, content).await.map(Some)
    }

    /// Sends the bytes from `offset` on, and ends the upload.
    async fn send_last<C: UploadContent>(
        &mut self,
        session: Session,
        offset: u64,
        content: &mut C,
    ) -> Result<Delivery, UploadError<C::Error>> {
        let target = session.put(self.destination, self.file.digest);
        let response = self.send(&session, target, offset..self.file.size, content).await;
        let response = response.map_err(|error| match error {
            UploadError::Registry(error @ RegistryError::Status { status: 400, .. }) => {
                let hint = "if it found another digest, `blobd verify` says whether the stored file is damaged; if it is \
                            not, something changes data on its way";
                error.explained(hint.to_owned()).into()
            }
            error => error,
        })?;
        check_stored(&response, self.file.digest, "file")?;
        Ok(Delivery::Sent)
    }

    async fn send<C: UploadContent>(
        &mut self,
        session: &Session,
        target: Target<'_>,
        range: std::ops::Range<u64>,
        content: &mut C,
    ) -> Result<Response, UploadError<C::Error>> {
        let start = range.start;
        let response = self.shared.send_content(target, range, content, &mut self.sent).await;
        if matches!(&response, Err(UploadError::Registry(error)) if !is_refusal(error)) {
            self.broken = Some((session.clone(), start));
        }
        response
    }
}

/// Whether the registry has understood the request and refused it.
pub(super) fn is_refusal(error: &RegistryError) -> bool {
    match error.main() {
        RegistryError::NotFound { .. } | RegistryError::Denied { .. } | RegistryError::Unusable { .. } => {
            true
        }
        RegistryError::Status { status, .. } => (300..500).contains(status) && *status != 408,
        _ => false,
    }
}
