//! Resolves a source to a manifest or to files.

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::source::{Components, HubFile, PullSource};

use super::error::Result;
use super::remote::{KnownFile, RemoteFile, RemoteModel, is_at_hub};
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
                Ok(RemoteModel::Published(self.manifest(reference).await?.into()))
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
                return Ok(found.ok().flatten().unwrap_or_else(|| RemoteFile::layer(reference, file)));
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
}
