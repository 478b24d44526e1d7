//! Hugging Face's own API: the files of a repository and their digests.
//!
//! Hugging Face's registry API has no sharded models and no files without a quantisation in their names; this
//! one has all files.

use blobd_store_format::source::HubFile;
use hyper::HeaderMap;
use hyper::header::LINK;
use url::Url;

use super::error::RegistryError;
use super::listing::{TreeFile, is_commit, parse_refs, parse_tree};
use super::mirrors::first_of;
use super::origin::Registry;
use super::request::{Response, Target};
use super::{RegistryClient, redirect};

/// The weight files of a repository at one commit.
pub(super) struct Listed {
    pub(super) commit: String,
    pub(super) files: Vec<TreeFile>,
}

impl RegistryClient {
    /// Lists the weight files of a repository at the commit that a branch, tag or commit means.
    pub(super) async fn list(&self, repository: &str, revision: &str) -> Result<Listed, RegistryError> {
        let servers = &self.shared.mirrors.of_hub()?;
        let list = |server| async move {
            let api = Api { client: self, server, repository, address: address(repository) };
            api.list(revision).await
        };
        self.retried(|| first_of(servers, HubFile::API_HOST, list)).await
    }
}

struct Api<'a> {
    client: &'a RegistryClient,
    server: &'a Registry,
    repository: &'a str,
    address: String,
}

impl Api<'_> {
    async fn list(&self, revision: &str) -> Result<Listed, RegistryError> {
        let commit = self.commit(revision).await?;
        let path = format!("/api/models/{}/tree/{commit}?recursive=true", self.repository);
        let mut target = self.target(&path)?;
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let response = self.client.shared.get(&target).await?;
            let next = next_page(&response.url, response.headers());
            let (host, page) = self.document(response).await?;
            files.extend(parse_tree(&page).map_err(|what| list_refused(host, &what))?);
            match next {
                None => return Ok(Listed { commit, files }),
                // The request for the next page has the same credentials, so the origin must be the same.
                Some(url) => {
                    let moved = target.moved(url);
                    target = moved.ok_or_else(|| self.refused("the next page is on another host"))?;
                }
            }
        }
        Err(self.refused("more pages than the limit"))
    }

    async fn commit(&self, revision: &str) -> Result<String, RegistryError> {
        if is_commit(revision) {
            return Ok(revision.to_owned());
        }
        let target = self.target(&format!("/api/models/{}/refs", self.repository))?;
        let (host, document) = self.document(self.client.shared.get(&target).await?).await?;
        match parse_refs(&document, revision) {
            Ok(Some(commit)) => Ok(commit),
            Ok(None) => {
                let subject = format!("{}, revision {revision}", self.address);
                Err(RegistryError::NotFound { subject, host })
            }
            Err(what) => Err(list_refused(host, &what)),
        }
    }

    async fn document(&self, response: Response) -> Result<(String, Vec<u8>), RegistryError> {
        if let Some(page) = response.web_page() {
            return Err(page);
        }
        let (host, time_limit) = (response.host(), self.client.shared.limits.document);
        Ok((host, response.document("list of files", MAX_PAGE_BYTES, time_limit).await?))
    }

    fn target(&self, path: &str) -> Result<Target<'_>, RegistryError> {
        Target::of_file(self.server, &self.address, self.repository, path)
    }

    fn refused(&self, what: &str) -> RegistryError {
        list_refused(self.server.origin().host(), what)
    }
}

fn list_refused(host: impl Into<String>, what: &str) -> RegistryError {
    RegistryError::unusable(host, format!("list of files refused: {what}"))
}

/// A page has a thousand entries of some 300 bytes.
const MAX_PAGE_BYTES: u64 = 4 << 20;
/// At a thousand files each.
const MAX_PAGES: usize = 16;

/// The name of a repository in messages.
pub(super) fn address(repository: &str) -> String {
    format!("{}/{repository}", HubFile::HOST)
}

fn next_page(from: &Url, headers: &HeaderMap) -> Option<Url> {
    let links = headers.get(LINK)?.to_str().ok()?;
    let next = links.split(',').find(|link| link.contains("rel=\"next\""))?;
    let (_, rest) = next.split_once('<')?;
    redirect::resolve(from, rest.split_once('>')?.0)
}
