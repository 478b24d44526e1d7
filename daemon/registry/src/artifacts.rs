//! Artifacts beside a model at a registry: where they are looked up, and how one is published.
//!
//! A registry lists the manifests that refer to a model, or the tag that OCI's specification names for registries without
//! such a list is one. Which registries have no list is remembered, so that the next look-up is one request.

use std::collections::BTreeSet;
use std::convert::Infallible;
use std::sync::{Mutex, MutexGuard, PoisonError};

use blobd_store_format::artifact::{ArtifactError, ArtifactKind, Referrers};
use blobd_store_format::descriptor::{Descriptor, MediaType};
use blobd_store_format::digest::Digest;
use blobd_store_format::host;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::HubFile;
use bytes::Bytes;
use hyper::Method;
use hyper::header::{ACCEPT, HeaderValue};
use url::form_urlencoded;

use super::RegistryClient;
use super::error::{RegistryError, Result};
use super::origin::Registry;
use super::request::{Response, Target};
use super::upload::{Delivery, Destination, UploadContent, UploadError, is_absent, is_refusal};

/// An artifact that is published beside a model.
#[derive(Debug)]
pub(super) struct NewArtifact {
    kind: &'static ArtifactKind,
    subject: Digest,
    layers: Vec<Bytes>,
    /// The bytes of its manifest.
    raw: Vec<u8>,
}

impl NewArtifact {
    pub(super) const fn new(
        kind: &'static ArtifactKind,
        subject: Digest,
        layers: Vec<Bytes>,
        raw: Vec<u8>,
    ) -> Self {
        Self { kind, subject, layers, raw }
    }

    /// The bytes that it adds to the registry.
    pub(super) fn size(&self) -> u64 {
        let layers = self.layers.iter().map(Bytes::len).sum::<usize>();
        (layers + self.raw.len()) as u64
    }

    fn descriptor(&self) -> Descriptor {
        let media_type = MediaType::new(MediaType::OCI_MANIFEST);
        Descriptor { media_type, digest: Digest::of(&self.raw), size: self.raw.len() as u64 }
    }
}

/// A short file in memory.
struct InMemory(Bytes);

impl UploadContent for InMemory {
    type Error = Infallible;

    async fn read(&mut self, offset: u64) -> Result<Bytes, Infallible> {
        let start = usize::try_from(offset).unwrap_or(usize::MAX).min(self.0.len());
        Ok(self.0.slice(start..))
    }
}

impl RegistryClient {
    /// Whether the repository has this artifact.
    pub(super) async fn has_artifact(
        &self,
        destination: &Destination,
        artifact: &NewArtifact,
    ) -> Result<bool> {
        let digest = artifact.descriptor().digest;
        Ok(self.find_manifest(destination, &digest.to_string()).await? == Some(digest))
    }

    /// Publishes an artifact beside a model.
    pub(super) async fn push_artifact(
        &self,
        destination: &Destination,
        artifact: &NewArtifact,
    ) -> Result<Delivery> {
        let is_present = self.has_artifact(destination, artifact).await?;
        if !is_present {
            self.push_bytes(destination, ArtifactKind::EMPTY_CONFIG.into()).await?;
            for layer in &artifact.layers {
                self.push_bytes(destination, layer.clone()).await?;
            }
        }
        let own = artifact.descriptor();
        // Also if it is present: only the response says whether the registry lists it.
        let (name, media_type) = (own.digest.to_string(), &own.media_type);
        let stored = self.put_manifest(destination, &name, media_type, &artifact.raw).await?;
        if !stored.headers().contains_key("oci-subject") {
            self.list_artifact(destination, artifact, &own).await?;
        }
        Ok(if is_present { Delivery::Present } else { Delivery::Sent })
    }

    async fn push_bytes(&self, destination: &Destination, bytes: Bytes) -> Result<()> {
        let (digest, size) = (Digest::of(&bytes), bytes.len() as u64);
        if self.has_blob(destination, digest).await? {
            return Ok(());
        }
        let file = Descriptor { media_type: MediaType::new("application/octet-stream"), digest, size };
        match self.push_blob(destination, &file, &mut InMemory(bytes)).await {
            Ok(_delivery) => Ok(()),
            Err(UploadError::Registry(error)) => Err(error),
            Err(UploadError::Content(never)) => match never {},
        }
    }

    /// Adds an artifact to the list that a tag names, at a registry that makes no list itself.
    async fn list_artifact(
        &self,
        destination: &Destination,
        artifact: &NewArtifact,
        own: &Descriptor,
    ) -> Result<()> {
        let tag = Referrers::fallback_tag(artifact.subject);
        let target = destination.target(Method::GET, &format!("manifests/{tag}"), &[])?;
        let target = target.with(ACCEPT, HeaderValue::from_static(MediaType::OCI_INDEX));
        let earlier = self.retried(|| async { self.list_in(self.shared.get(&target).await?).await }).await;
        let earlier = match earlier {
            Ok(raw) => Some(raw),
            Err(error) if is_absent(&error) => None,
            Err(error) => return Err(error),
        };
        // Something else than a list is answered for the tag by registries that take it for the name of the model.
        let list = match Referrers::with_artifact(earlier.as_deref(), artifact.kind, own) {
            Err(ArtifactError::Json(_)) => Referrers::with_artifact(None, artifact.kind, own),
            list => list,
        };
        let unusable = |error| RegistryError::unusable_model(destination.reference(), &error);
        let Some(list) = list.map_err(unusable)? else { return Ok(()) };
        self.put_manifest(destination, &tag, &MediaType::new(MediaType::OCI_INDEX), &list).await?;
        Ok(())
    }

    async fn list_in(&self, response: Response) -> Result<Vec<u8>> {
        response.document("list of referrers", Referrers::MAX_BYTES, self.shared.limits.document).await
    }

    /// What the registry says refers to a manifest.
    pub(super) async fn referrers(
        &self,
        server: &Registry,
        reference: &Reference,
        subject: Digest,
        kind: &ArtifactKind,
    ) -> Result<Referrers> {
        if !self.shared.referrers.are_missing_at(server) {
            let wanted = form_urlencoded::byte_serialize(kind.artifact_type.as_bytes());
            let path = format!("referrers/{subject}?artifactType={}", wanted.collect::<String>());
            match self.referrers_at(server, reference, &path, kind).await {
                Err(error) if is_refusal(&error) => {
                    tracing::debug!("{error}; looking for the tag instead");
                    if is_absent(&error) {
                        self.shared.referrers.note_missing_at(server);
                    }
                }
                list => return list,
            }
        }
        let path = format!("manifests/{}", Referrers::fallback_tag(subject));
        match self.referrers_at(server, reference, &path, kind).await {
            Err(error) if is_refusal(&error) => Ok(Referrers::default()),
            list => list,
        }
    }

    async fn referrers_at(
        &self,
        server: &Registry,
        reference: &Reference,
        path: &str,
        kind: &ArtifactKind,
    ) -> Result<Referrers> {
        let target = Target::new(server, reference, path)?;
        let target = target.with(ACCEPT, HeaderValue::from_static(MediaType::OCI_INDEX));
        let raw = self.list_in(self.shared.get(&target).await?).await?;
        // Anything else that a server answers is not a list.
        Ok(Referrers::parse(&raw, kind).unwrap_or_default())
    }

    /// The bytes of the manifest of an artifact; `None` if they have another digest.
    pub(super) async fn artifact_manifest(
        &self,
        server: &Registry,
        reference: &Reference,
        artifact: &Descriptor,
        kind: &ArtifactKind,
    ) -> Result<Option<Vec<u8>>> {
        let path = format!("manifests/{}", artifact.digest);
        let target = Target::new(server, reference, &path)?;
        let target = target.with(ACCEPT, HeaderValue::from_static(MediaType::OCI_MANIFEST));
        let response = self.shared.get(&target).await?;
        let limits = (kind.max_manifest_bytes, self.shared.limits.document);
        let raw = response.document("artifact", limits.0, limits.1).await?;
        Ok(Some(raw).filter(|raw| Digest::of(raw) == artifact.digest))
    }

    /// Downloads a layer of an artifact, whose size its descriptor limits. `what` is its name in errors.
    pub(super) async fn artifact_layer(
        &self,
        reference: &Reference,
        layer: &Descriptor,
        what: &str,
    ) -> Result<Vec<u8>> {
        let mut stream = self.blob(reference, layer).await?;
        let mut bytes = Vec::new();
        while let Some(more) = stream.next().await? {
            bytes.extend_from_slice(&more);
        }
        let found = Digest::of(&bytes);
        match found == layer.digest {
            true => Ok(bytes),
            false => {
                let what = format!("{what}: wrong digest: expected {}, found {found}", layer.digest);
                Err(RegistryError::unusable_model(reference, &what))
            }
        }
    }
}

/// Whether artifacts can be at a server: not at those that take none, which are the most used ones.
pub(super) fn may_have_artifacts(server: &Registry) -> bool {
    !server.is_of(Reference::DEFAULT_HOST) && !server.is_of(HubFile::HOST)
}

impl Destination {
    /// Whether this registry takes artifacts beside models.
    pub fn takes_artifacts(&self) -> bool {
        let host = host::canonical(self.reference().host());
        ![Reference::DEFAULT_HOST, HubFile::HOST].iter().any(|known| host.eq_ignore_ascii_case(known))
    }
}

/// The servers that have no list of referrers, as far as they were asked.
#[derive(Debug, Default)]
pub(super) struct ReferrersLists {
    missing: Mutex<BTreeSet<String>>,
}

impl ReferrersLists {
    /// A program that asks more registries forgets earlier ones.
    const MAX_SERVERS: usize = 1000;

    fn are_missing_at(&self, server: &Registry) -> bool {
        self.lock().contains(server.name())
    }

    fn note_missing_at(&self, server: &Registry) {
        let mut missing = self.lock();
        if missing.len() >= Self::MAX_SERVERS {
            missing.clear();
        }
        missing.insert(server.name().to_owned());
    }

    fn lock(&self) -> MutexGuard<'_, BTreeSet<String>> {
        self.missing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
