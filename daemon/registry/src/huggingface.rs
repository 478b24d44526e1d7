//! Hugging Face's own API: the files of a repository and their digests.
//!
//! Hugging Face's registry API omits sharded models and files without a quantisation in their names; this API lists all
//! files.

use blobd_store_format::digest::Digest;
use blobd_store_format::git_id::GitId;
use blobd_store_format::source::HubFile;
use blobd_store_format::tensor::TensorFormat;
use hyper::HeaderMap;
use hyper::header::LINK;
use percent_encoding::{AsciiSet, utf8_percent_encode};

use super::RegistryClient;
use super::error::{RegistryError, Result};
use super::listing::{TreeFile, is_commit, parse_refs, parse_tree};
use super::mirrors::first_of;
use super::origin::{ESCAPED, Registry};
use super::remote::RemoteFile;
use super::request::{Response, Target, resolve_location};
use super::server_reason::ServerReason;
use super::web_file::WebFile;

/// The files of a repository at one commit.
#[derive(Clone, Debug)]
pub struct HubListing {
    pub commit: String,
    pub files: Vec<TreeFile>,
}

impl HubListing {
    /// The files of weights, of formats that are split.
    pub(super) fn weights(&self) -> impl Iterator<Item = &TreeFile> {
        self.files.iter().filter(|file| file.format().is_some())
    }

    pub fn gguf(&self) -> impl Iterator<Item = &TreeFile> {
        self.files.iter().filter(|file| file.format() == Some(TensorFormat::Gguf))
    }
}

impl RegistryClient {
    /// Lists the files of a repository at the commit to which a branch, tag or commit ID resolves.
    pub async fn list(&self, repository: &str, revision: &str) -> Result<HubListing> {
        let servers = &self.shared.mirrors.for_hub()?;
        let list = |server| async move {
            let api = Api { client: self, server, repository, address: address(repository) };
            api.list(revision).await
        };
        self.retried(|| first_of(servers, HubFile::API_HOST, list)).await
    }
}

impl RegistryClient {
    /// A file of a repository, at the commit that was listed.
    pub(super) fn remote_of_hub(
        &self,
        (repository, commit): (&str, &str),
        file: &TreeFile,
        media_type: &str,
        name: &str,
    ) -> Result<RemoteFile> {
        if let Some(fault) = &file.fault {
            let what = format!("list of files refused: {}: {fault}", file.path);
            return Err(RegistryError::unusable(address(repository), what));
        }
        let servers = self.shared.mirrors.for_hub()?;
        let path = format!("/{repository}/resolve/{commit}/{}", encoded(&file.path));
        let web = WebFile::new(&servers, path, repository, format!("{}/{}", address(repository), file.path));
        let file_of_hub = RemoteFile::web(web.of_hub(), media_type, name, file.size, file.digest);
        Ok(file_of_hub.with_git_id(file.git_id))
    }

    /// The content of a small file of a repository, compared with its digest or its name in git.
    pub async fn small_hub_file(
        &self,
        (repository, commit): (&str, &str),
        file: &TreeFile,
        max_bytes: u64,
    ) -> Result<Vec<u8>> {
        let refused =
            |what: &str| RegistryError::unusable(address(repository), format!("{}: {what}", file.path));
        if file.size > max_bytes {
            return Err(refused(&format!("{} bytes are more than the limit of {max_bytes}", file.size)));
        }
        let remote =
            self.remote_of_hub((repository, commit), file, "application/octet-stream", &file.path)?;
        let (mut stream, mut content) = (self.open(&remote).await?, Vec::new());
        while let Some(bytes) = stream.next().await? {
            content.extend_from_slice(&bytes);
            if content.len() as u64 > max_bytes {
                return Err(refused("is longer than its list of files says"));
            }
        }
        let is_right = match (file.digest, file.git_id) {
            (Some(digest), _) => Digest::of(&content) == digest,
            (None, Some(id)) => GitId::of(&content) == id,
            (None, None) => content.len() as u64 == file.size,
        };
        if is_right { Ok(content) } else { Err(refused("has other content than its list of files says")) }
    }
}

struct Api<'a> {
    client: &'a RegistryClient,
    server: &'a Registry,
    repository: &'a str,
    address: String,
}

impl Api<'_> {
    async fn list(&self, revision: &str) -> Result<HubListing> {
        let commit = self.commit(revision).await?;
        let path = format!("{API_PATH}{}/tree/{commit}?recursive=true", self.repository);
        let mut target = self.target(&path)?;
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let response = self.client.shared.get(&target).await?;
            let next = self.next_page(&response, &path)?;
            let (host, page) = self.document(response).await?;
            files.extend(parse_tree(&page).map_err(|what| list_refused(host, &what))?);
            match next {
                None => return Ok(HubListing { commit, files }),
                // The same credentials are sent again, but only to this server.
                Some(next) => target = self.target(&next)?,
            }
        }
        Err(self.refused("more pages than the limit"))
    }

    /// The path and query of the next page. It is requested from the same server, whatever host the link names: a
    /// mirror often passes on the link of the host that it mirrors.
    fn next_page(&self, response: &Response, path: &str) -> Result<Option<String>> {
        let Some(link) = next_link(response.headers()) else { return Ok(None) };
        let url = resolve_location(&response.url, &link)
            .ok_or_else(|| self.refused("the next page is not a URL"))?;
        if let Some(own) = self.server.path_of(&url) {
            return Ok(Some(own));
        }
        let path = path.split_once('?').map_or(path, |(path, _query)| path);
        let foreign = url.path();
        match (foreign.find(API_PATH).and_then(|start| foreign.get(start..)), url.query()) {
            (Some(path), Some(query)) => Ok(Some(format!("{path}?{query}"))),
            (Some(path), None) => Ok(Some(path.to_owned())),
            (None, Some(query)) => Ok(Some(format!("{path}?{query}"))),
            (None, None) => Err(self.refused("the next page is on another host")),
        }
    }

    async fn commit(&self, revision: &str) -> Result<String> {
        if is_commit(revision) {
            return Ok(revision.to_owned());
        }
        // Pull requests are listed only on request: a repository may have thousands.
        let query = if revision.starts_with("refs/pr/") { "?include_prs=1" } else { "" };
        let target = self.target(&format!("{API_PATH}{}/refs{query}", self.repository))?;
        let (host, document) = self.document(self.client.shared.get(&target).await?).await?;
        match parse_refs(&document, revision) {
            Ok(Some(commit)) => Ok(commit),
            Ok(None) => {
                let subject = format!("{}, revision {revision}", self.address);
                Err(RegistryError::NotFound { subject, host, reason: ServerReason::default() })
            }
            Err(what) => Err(list_refused(host, &what)),
        }
    }

    async fn document(&self, response: Response) -> Result<(String, Vec<u8>)> {
        if let Some(page) = response.web_page() {
            return Err(page);
        }
        let (host, time_limit) = (response.host(), self.client.shared.limits.document);
        Ok((host, response.document("list of files", MAX_PAGE_BYTES, time_limit).await?))
    }

    fn target(&self, path: &str) -> Result<Target<'_>> {
        Target::for_file(self.server, &self.address, self.repository, path)
    }

    fn refused(&self, what: &str) -> RegistryError {
        list_refused(self.server.origin().host(), what)
    }
}

fn list_refused(host: impl Into<String>, what: &str) -> RegistryError {
    RegistryError::unusable(host, format!("list of files refused: {what}"))
}

/// The prefix of all paths in the API.
const API_PATH: &str = "/api/models/";
/// A page has a thousand entries of about 300 bytes.
const MAX_PAGE_BYTES: u64 = 4 << 20;
/// A page lists a thousand files.
const MAX_PAGES: usize = 16;

fn encoded(path: &str) -> String {
    const PATH: &AsciiSet = &ESCAPED.remove(b'/');
    utf8_percent_encode(path, PATH).to_string()
}

/// The name of a repository in messages.
pub(super) fn address(repository: &str) -> String {
    format!("{}/{repository}", HubFile::HOST)
}

/// The target of the link to the next page (RFC 8288).
fn next_link(headers: &HeaderMap) -> Option<String> {
    let values =
        headers.get_all(LINK).iter().map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    values.collect::<Vec<_>>().iter().find_map(|value| {
        let mut rest = value.as_str();
        loop {
            let (target, after) = rest.split_once('<')?.1.split_once('>')?;
            // A comma outside quotation marks ends the parameters. Relation names contain no commas.
            let (parameters, others) = after.split_once(',').unwrap_or((after, ""));
            if parameters.split(';').any(is_next) {
                return Some(target.trim().to_owned());
            }
            rest = others;
        }
    })
}

/// Whether a parameter of a link is `rel=next`, with or without quotation marks, perhaps beside other relations.
fn is_next(parameter: &str) -> bool {
    let Some((name, value)) = parameter.split_once('=') else { return false };
    let value = value.trim().trim_matches(['"', '\'']);
    name.trim().eq_ignore_ascii_case("rel")
        && value.split_ascii_whitespace().any(|relation| relation.eq_ignore_ascii_case("next"))
}

#[cfg(test)]
mod tests {
    use hyper::header::HeaderValue;

    use super::*;

    #[test]
    fn link_to_the_next_page_is_found_in_every_form() {
        for (values, expected) in [
            (&["<https://h/x?cursor=a>; rel=\"next\""][..], Some("https://h/x?cursor=a")),
            (&["</x?cursor=a>;rel=next"], Some("/x?cursor=a")),
            (&["</x>; REL='Next'"], Some("/x")),
            (&["</p>; rel=\"prev\", </n>; rel=\"last next\"; title=\"x\""], Some("/n")),
            (&["</p?a=1,2>; rel=prev, </n?a=1,2>; rel=next"], Some("/n?a=1,2")),
            (&["</p>; rel=prev", "</n>; rel=next"], Some("/n")),
            (&["</p>; rel=nextish"], None),
            (&["</p>; title=next"], None),
            (&["next", "<", "</n; rel=next"], None),
            (&[], None),
        ] {
            let mut headers = HeaderMap::new();
            for value in values {
                headers.append(LINK, HeaderValue::from_str(value).unwrap());
            }
            assert_eq!(next_link(&headers).as_deref(), expected, "{values:?}");
        }
    }
}
