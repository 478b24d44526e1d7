//! Resolves a source to a manifest or to files.

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{Components, HubFile, PullSource};

use super::artifacts::may_have_artifacts;
use super::error::Result;
use super::published::RemoteModel;
use super::remote::{KnownFile, RemoteFile, is_at_hub};
use super::{RegistryClient, RegistryError, ServerReason};

impl RegistryClient {
    /// Resolves `source` to its manifest, or to its files if it has no manifest, including the components that belong
    /// to the model.
    pub async fn resolve(&self, source: &PullSource) -> Result<RemoteModel> {
        self.resolve_known(source, &Components::default(), &[]).await
    }

    /// Resolves `source` with chosen components. If `source` is a URL, files that were pulled before (`known`) are
    /// requested only if they have changed ([`RemoteFile::unchanged`]).
    ///
    /// # Errors
    /// As for [`Self::resolve`]; [`RegistryError::NoChoice`] when the source has no files to choose from.
    pub async fn resolve_known(
        &self,
        source: &PullSource,
        components: &Components,
        known: &[KnownFile],
    ) -> Result<RemoteModel> {
        match source {
            PullSource::Hub(file) => self.hub_model(file, components).await,
            PullSource::Registry(reference) if is_at_hub(reference) && reference.digest().is_none() => {
                self.hub_model_of_tag(reference, components).await
            }
            _ if !components.are_default() => Err(RegistryError::NoChoice { subject: source.to_string() }),
            PullSource::Registry(reference) => {
                let manifest = self.manifest(reference).await?;
                Ok(RemoteModel::Published(self.with_separate_blobs(reference, manifest).await?))
            }
            PullSource::Url(url) => {
                let (files, origin) = (self.web_files(url, known).await?, source.origin());
                Ok(RemoteModel::Files { files, origin, chosen: None })
            }
        }
    }

    /// Finds the file with this content at a model's origin. `path` is the one that it has in the model: a hub does not give
    /// the SHA-256 of files in git.
    ///
    /// # Errors
    /// [`RegistryError`] as for [`Self::resolve`], and when the origin has other files now.
    pub async fn locate(
        &self,
        origin: &PullSource,
        file: &Descriptor,
        path: Option<&str>,
    ) -> Result<RemoteFile> {
        let found = match origin {
            PullSource::Registry(reference) => {
                // A component of a model at the hub may be in the repository only.
                let is_component = matches!(file.media_type.component(), "projector" | "draft");
                let found = match is_component && is_at_hub(reference) {
                    true => {
                        let revision = HubFile::DEFAULT_REVISION;
                        self.hub_file(&reference.repository(), revision, (file, path)).await
                    }
                    false => Ok(None),
                };
                return Ok(match found.ok().flatten() {
                    Some(found) => found,
                    None => self.layer_or_blobs(reference, file).await,
                });
            }
            PullSource::Hub(hub) => self.hub_file(hub.repository(), hub.revision(), (file, path)).await?,
            PullSource::Url(url) => {
                let is_it = |found: &RemoteFile| {
                    found.size() == file.size && found.digest().is_none_or(|digest| digest == file.digest)
                };
                self.web_files(url, &[]).await?.into_iter().find(is_it)
            }
        };
        found.map(|found| found.with_digest(file.digest)).ok_or_else(|| RegistryError::NotFound {
            subject: format!("{origin} with digest {}", file.digest),
            host: "its server".to_owned(),
            reason: ServerReason::default(),
        })
    }

    /// A file of a model at its registry, which may have the file's blobs in its place.
    async fn layer_or_blobs(&self, reference: &Reference, file: &Descriptor) -> RemoteFile {
        let servers = self.shared.mirrors.for_model(reference);
        if !servers.is_ok_and(|servers| servers.iter().any(may_have_artifacts)) {
            return RemoteFile::layer(reference, file);
        }
        let published = async { self.with_separate_blobs(reference, self.manifest(reference).await?).await };
        match published.await {
            Ok(published) => published.remote(reference, file),
            Err(_elsewhere) => RemoteFile::layer(reference, file),
        }
    }
}
