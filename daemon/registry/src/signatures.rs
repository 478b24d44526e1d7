//! Signatures of models: beside a manifest at a registry, or in a file of a repository at a hub.

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::signature::{Bundle, SignatureArtifact};
use blobd_store_format::source::{Components, HubFile, PullSource};
use bytes::Bytes;

use super::RegistryClient;
use super::artifacts::{NewArtifact, may_have_artifacts};
use super::error::Result;
use super::mirrors::first_of;
use super::origin::Registry;
use super::published::RemoteModel;
use super::remote::is_at_hub;
use super::request::Target;
use super::upload::{Delivery, Destination, is_absent};

/// A signature that is published beside a model.
#[derive(Debug)]
pub struct NewSignature(NewArtifact);

impl NewSignature {
    /// `None` if its manifest cannot be composed.
    pub fn new(model: &Manifest, bundle: &Bundle) -> Option<Self> {
        let subject = model.descriptor();
        let raw = SignatureArtifact::compose(&subject, bundle).ok()?;
        let layer = Bytes::copy_from_slice(bundle.text().as_bytes());
        Some(Self(NewArtifact::new(&SignatureArtifact::KIND, subject.digest, vec![layer], raw)))
    }
}

/// The signatures of a model that a server has sent, as far as they are bundles.
#[derive(Clone, Debug, Default)]
pub struct FetchedSignatures {
    pub bundles: Vec<Bundle>,
    /// Why others cannot be used, for people.
    pub unusable: Option<String>,
}

impl FetchedSignatures {
    /// The most manifests that are looked at for signatures: bundles of other kinds have the same type.
    pub const MAX_CANDIDATES: usize = 16;
    /// The most signatures of a model: as many as a store keeps.
    pub const MAX_COUNT: usize = 8;
    /// The bytes of all signatures together: the largest that a model can have, and some usual ones.
    pub const MAX_TOTAL_BYTES: u64 = 2 * Bundle::MAX_BYTES as u64;

    fn add(&mut self, bytes: &[u8]) {
        match Bundle::parse(bytes) {
            Ok(bundle) => self.bundles.push(bundle),
            Err(error) => self.unusable = Some(error.to_string()),
        }
    }
}

impl RegistryClient {
    /// Whether the repository has this signature.
    pub async fn has_signature(&self, destination: &Destination, signature: &NewSignature) -> Result<bool> {
        self.has_artifact(destination, &signature.0).await
    }

    /// Publishes a signature beside a model.
    pub async fn push_signature(
        &self,
        destination: &Destination,
        signature: &NewSignature,
    ) -> Result<Delivery> {
        self.push_artifact(destination, &signature.0).await
    }

    /// The signatures of a model that a source has given. A file at a URL has none.
    ///
    /// # Errors
    /// [`RegistryError`](super::RegistryError) if no server has some, and one of them cannot be asked.
    pub async fn signatures(
        &self,
        source: &PullSource,
        components: &Components,
        remote: &RemoteModel,
    ) -> Result<FetchedSignatures> {
        let (repository, revision) = match (source, remote) {
            (PullSource::Url(_), _) => return Ok(FetchedSignatures::default()),
            (PullSource::Hub(file), _) => (file.repository().to_owned(), Some(file.revision())),
            (PullSource::Registry(reference), _) if is_at_hub(reference) => {
                (reference.repository(), components.revision.as_deref())
            }
            (PullSource::Registry(reference), RemoteModel::Published(model)) => {
                return self.signatures_beside(reference, model.manifest.digest()).await;
            }
            (PullSource::Registry(_), RemoteModel::Files { .. }) => return Ok(FetchedSignatures::default()),
        };
        // At the commit that was listed, which may not be the newest any more.
        let origin = match remote {
            RemoteModel::Files { origin, .. } => origin.as_ref().and_then(|origin| origin.parse().ok()),
            RemoteModel::Published(_) => None,
        };
        let commit = match &origin {
            Some(PullSource::Hub(file)) => Some(file.revision()),
            _ => None,
        };
        self.hub_signature(&repository, commit.or(revision).unwrap_or(HubFile::DEFAULT_REVISION)).await
    }

    /// The signatures beside a manifest at its registry, or at a mirror of that, the first that has some.
    async fn signatures_beside(&self, reference: &Reference, manifest: Digest) -> Result<FetchedSignatures> {
        let servers = self.shared.mirrors.for_model(reference)?;
        let mut failure = None;
        let mut found = FetchedSignatures::default();
        for server in servers.iter().filter(|server| may_have_artifacts(server)) {
            match self.retried(|| self.signatures_at(server, reference, manifest)).await {
                Ok(signatures) if !signatures.bundles.is_empty() => return Ok(signatures),
                Ok(signatures) => found.unusable = found.unusable.or(signatures.unusable),
                Err(error) => failure = failure.or(Some(error)),
            }
        }
        failure.map_or(Ok(found), Err)
    }

    async fn signatures_at(
        &self,
        server: &Registry,
        reference: &Reference,
        subject: Digest,
    ) -> Result<FetchedSignatures> {
        let kind = &SignatureArtifact::KIND;
        let list = self.referrers(server, reference, subject, kind).await?;
        let mut found = FetchedSignatures::default();
        let mut left = FetchedSignatures::MAX_TOTAL_BYTES;
        for candidate in list.candidates().iter().take(FetchedSignatures::MAX_CANDIDATES) {
            if found.bundles.len() >= FetchedSignatures::MAX_COUNT {
                break;
            }
            let raw = match self.artifact_manifest(server, reference, candidate, kind).await {
                // It was removed, and the list is older.
                Err(error) if is_absent(&error) => continue,
                raw => raw?,
            };
            let Some(Ok(artifact)) = raw.map(|raw| SignatureArtifact::parse(&raw, subject)) else { continue };
            let layer = artifact.bundle();
            let Some(rest) = left.checked_sub(layer.size).filter(|_| layer.size <= Bundle::MAX_BYTES as u64)
            else {
                found.unusable = Some(format!("signature of {} bytes: too long", layer.size));
                continue;
            };
            left = rest;
            found.add(&self.artifact_layer(reference, layer, "signature").await?);
        }
        Ok(found)
    }

    /// The signature in a repository at a hub.
    async fn hub_signature(&self, repository: &str, revision: &str) -> Result<FetchedSignatures> {
        let servers = &self.shared.mirrors.for_hub()?;
        let ask = |server| self.hub_signature_at(server, repository, revision);
        let bytes = match self.retried(|| first_of(servers, HubFile::HOST, ask)).await {
            Ok(bytes) => bytes,
            Err(error) if is_absent(&error) => return Ok(FetchedSignatures::default()),
            Err(error) => return Err(error),
        };
        let mut found = FetchedSignatures::default();
        found.add(&bytes);
        Ok(found)
    }

    async fn hub_signature_at(&self, server: &Registry, repository: &str, revision: &str) -> Result<Vec<u8>> {
        let path = format!("/{repository}/resolve/{revision}/{}", Bundle::FILE_NAME);
        let subject = format!("{}/{repository}/{}", HubFile::HOST, Bundle::FILE_NAME);
        let target = Target::for_file(server, &subject, repository, &path)?;
        let response = self.shared.get(&target).await?;
        response.document("signature", Bundle::MAX_BYTES as u64, self.shared.limits.document).await
    }
}
