//! Resolves a source to a manifest or to files.

use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::source::PullSource;

use super::remote::{KnownFile, RemoteFile, RemoteModel};
use super::{RegistryClient, RegistryError, ServerReason};

impl RegistryClient {
    /// The manifest of `source`, or its files if it has none.
    ///
    /// # Errors
    /// [`RegistryError`] when the source does not exist or its server fails.
    pub async fn resolve(&self, source: &PullSource) -> Result<RemoteModel, RegistryError> {
        self.resolve_known(source, &[]).await
    }

    /// The same. For a URL, files that are `known` are compared with their version then
    /// ([`RemoteFile::unchanged`]).
    ///
    /// # Errors
    /// As for [`Self::resolve`].
    pub async fn resolve_known(
        &self,
        source: &PullSource,
        known: &[KnownFile],
    ) -> Result<RemoteModel, RegistryError> {
        match source {
            PullSource::Registry(reference) => match self.manifest(reference).await {
                Ok(manifest) => Ok(RemoteModel::Published(manifest)),
                Err(error) => self.hub_model_of_tag(reference, error).await,
            },
            PullSource::Hub(file) => self.hub_model(file).await,
            PullSource::Url(url) => {
                Ok(RemoteModel::Files { files: self.web_files(url, known).await?, origin: source.origin() })
            }
        }
    }

    /// The file with this content at a model's origin.
    ///
    /// # Errors
    /// [`RegistryError`] as for [`Self::resolve`], and when the origin has other files now.
    pub async fn locate(&self, origin: &PullSource, file: &Descriptor) -> Result<RemoteFile, RegistryError> {
        let files = match origin {
            PullSource::Registry(reference) => return Ok(RemoteFile::layer(reference, file)),
            PullSource::Hub(hub) => self.hub_files(hub).await?,
            PullSource::Url(url) => self.web_files(url, &[]).await?,
        };
        let is_it = |found: &RemoteFile| {
            found.size() == file.size && found.digest().is_none_or(|digest| digest == file.digest)
        };
        let found = files.into_iter().find(is_it);
        found.map(|found| found.with_digest(file.digest)).ok_or_else(|| RegistryError::NotFound {
            subject: format!("{origin} with digest {}", file.digest),
            host: "its server".to_owned(),
            reason: ServerReason::default(),
        })
    }
}
