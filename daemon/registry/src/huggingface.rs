//! Hugging Face's own API: the files of a repository and their digests.
//!
//! Hugging Face's registry API has no sharded models and no files without a quantisation in their names; this
//! one has all files. Files are requested at a commit, so that they are the listed ones.

use blobd_store_format::descriptor::MediaType;
use blobd_store_format::host;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::HubFile;
use hyper::HeaderMap;
use hyper::header::LINK;
use percent_encoding::{AsciiSet, utf8_percent_encode};

use super::error::RegistryError;
use super::listing::{
    Lack, TreeFile, is_commit, parse_refs, parse_tree, path_of_tag, projector, tags, with_shards,
};
use super::mirrors::first_of;
use super::origin::{ESCAPED, Registry};
use super::remote::{RemoteFile, RemoteModel, WebFile};
use super::request::{Response, Target};
use super::server_reason::ServerReason;
use super::{RegistryClient, redirect, tags::nearest};

struct Listed {
    commit: String,
    files: Vec<TreeFile>,
}

impl RegistryClient {
    /// The model of a file, including the other shards.
    pub(super) async fn hub_model(&self, file: &HubFile) -> Result<RemoteModel, RegistryError> {
        let listed = self.list(file.repository(), file.revision()).await?;
        let chosen = with_shards(&listed.files, file.path()).map_err(|lack| lacking(file, &listed, lack))?;
        self.hub_pull(file.repository(), &listed, &chosen, None)
    }

    /// The same files and the projector, without an origin: for a repair.
    pub(super) async fn hub_files(&self, file: &HubFile) -> Result<Vec<RemoteFile>, RegistryError> {
        let listed = self.list(file.repository(), file.revision()).await?;
        let mut chosen =
            with_shards(&listed.files, file.path()).map_err(|lack| lacking(file, &listed, lack))?;
        chosen.extend(projector(&listed.files));
        chosen.into_iter().map(|chosen| self.hub_remote(file.repository(), &listed.commit, &chosen)).collect()
    }

    /// Finds a model by its quantisation after the registry API failed with `error`: the model may be
    /// sharded. Otherwise the error names the tags that exist.
    pub(super) async fn hub_model_of_tag(
        &self,
        reference: &Reference,
        error: RegistryError,
    ) -> Result<RemoteModel, RegistryError> {
        let host = reference.host();
        let is_hub = host::canonical(host).eq_ignore_ascii_case(HubFile::HOST);
        let knows_no_tag = matches!(
            error.main(),
            RegistryError::Status { status: 400, .. }
                | RegistryError::NotFound { .. }
                | RegistryError::NoSuchName { .. }
                | RegistryError::NoSuchTag { .. }
        );
        if !is_hub || !knows_no_tag || reference.digest().is_some() {
            return Err(error);
        }
        let repository = reference.repository();
        // If the list fails too, the first error explains more.
        let Ok(listed) = self.list(&repository, HubFile::DEFAULT_REVISION).await else { return Err(error) };
        let chosen = path_of_tag(&listed.files, reference.tag())
            .and_then(|path| with_shards(&listed.files, path).ok());
        let Some(chosen) = chosen else {
            if listed.files.is_empty() {
                let hint = format!(
                    "{} has no model file that blobd knows: pull a GGUF variant",
                    address(&repository)
                );
                return Err(error.explained(hint));
            }
            let nearest = nearest(reference.tag(), &tags(&listed.files));
            let (subject, host) = (format!("model {reference}"), host.to_owned());
            let reason = error.reason();
            return Err(RegistryError::NoSuchName { subject, host, reason, nearest });
        };
        self.hub_pull(&repository, &listed, &chosen, projector(&listed.files).as_ref())
    }

    fn hub_pull(
        &self,
        repository: &str,
        listed: &Listed,
        chosen: &[TreeFile],
        projector: Option<&TreeFile>,
    ) -> Result<RemoteModel, RegistryError> {
        let first = chosen.first().map(|file| file.path.as_str()).unwrap_or_default();
        let origin = HubFile::new(repository, Some(&listed.commit), first).ok().map(|file| file.to_string());
        let files = chosen.iter().chain(projector);
        let files = files.map(|file| self.hub_remote(repository, &listed.commit, file));
        Ok(RemoteModel::Files { files: files.collect::<Result<_, _>>()?, origin })
    }

    fn hub_remote(
        &self,
        repository: &str,
        commit: &str,
        file: &TreeFile,
    ) -> Result<RemoteFile, RegistryError> {
        let servers = self.shared.mirrors.of_hub()?;
        let path = format!("/{repository}/resolve/{commit}/{}", encoded(&file.path));
        let address = format!("{}/{repository}/{}", HubFile::HOST, file.path);
        let is_projector = file.path.to_ascii_lowercase().contains("mmproj");
        let media_type = if is_projector { MediaType::OLLAMA_PROJECTOR } else { MediaType::OLLAMA_MODEL };
        let name = file.path.rsplit('/').next().unwrap_or_default();
        let web = WebFile::new(&servers, path, repository, address);
        Ok(RemoteFile::web(web, media_type, name, file.size, file.digest))
    }

    async fn list(&self, repository: &str, revision: &str) -> Result<Listed, RegistryError> {
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
        let path = format!("{API_PATH}{}/tree/{commit}?recursive=true", self.repository);
        let mut target = self.target(&path)?;
        let mut files = Vec::new();
        for _ in 0..MAX_PAGES {
            let response = self.client.shared.get(&target).await?;
            let next = self.next_page(&response, &path)?;
            let (host, page) = self.document(response).await?;
            files.extend(parse_tree(&page).map_err(|what| list_refused(host, &what))?);
            match next {
                None => return Ok(Listed { commit, files }),
                // With the same credentials, which go to this server only.
                Some(next) => target = self.target(&next)?,
            }
        }
        Err(self.refused("more pages than the limit"))
    }

    /// The path and query of the next page. It is requested from the same server, whatever host the link names: a
    /// mirror often passes on the link of the host that it mirrors.
    fn next_page(&self, response: &Response, path: &str) -> Result<Option<String>, RegistryError> {
        let Some(link) = next_link(response.headers()) else { return Ok(None) };
        let url = redirect::resolve(&response.url, &link)
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

    async fn commit(&self, revision: &str) -> Result<String, RegistryError> {
        if is_commit(revision) {
            return Ok(revision.to_owned());
        }
        let target = self.target(&format!("{API_PATH}{}/refs", self.repository))?;
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

/// What the paths of all requests to the API begin with.
const API_PATH: &str = "/api/models/";
/// A page has a thousand entries of some 300 bytes.
const MAX_PAGE_BYTES: u64 = 4 << 20;
/// At a thousand files each.
const MAX_PAGES: usize = 16;

fn address(repository: &str) -> String {
    format!("{}/{repository}", HubFile::HOST)
}

fn lacking(file: &HubFile, listed: &Listed, lack: Lack) -> RegistryError {
    let host = HubFile::HOST.to_owned();
    match lack {
        Lack::Shard(path) => {
            let subject = format!("{}/{path}, a shard of the same model", address(file.repository()));
            RegistryError::NotFound { subject, host, reason: ServerReason::default() }
        }
        Lack::File => {
            let paths: Vec<String> = listed.files.iter().map(|file| file.path.clone()).collect();
            let nearest = nearest(file.path(), &paths);
            RegistryError::NoSuchName {
                subject: file.to_string(),
                host,
                reason: ServerReason::default(),
                nearest,
            }
        }
    }
}

/// The target of the link to the next page (RFC 8288).
fn next_link(headers: &HeaderMap) -> Option<String> {
    let values =
        headers.get_all(LINK).iter().map(|value| String::from_utf8_lossy(value.as_bytes()).into_owned());
    values.collect::<Vec<_>>().iter().find_map(|value| {
        let mut rest = value.as_str();
        loop {
            let (target, after) = rest.split_once('<')?.1.split_once('>')?;
            // A comma outside quotation marks ends the parameters. No relation contains one.
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

fn encoded(path: &str) -> String {
    const PATH: &AsciiSet = &ESCAPED.remove(b'/');
    utf8_percent_encode(path, PATH).to_string()
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
