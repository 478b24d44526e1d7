//! Files at Hugging Face, and addresses of models' pages on web sites, as they are copied from a browser.

use std::borrow::Cow;
use std::fmt;

use super::escapes::{escaped, unescaped};
use super::{SourceError, is_file_address, is_weights, names_weights};
use crate::derived_name::{DerivedName, IdPart, part, with_folders};
use crate::file_type::{ShardName, split_file_type};
use crate::host;
use crate::manifest::is_file_name;
use crate::reference::{Reference, ReferenceError, Scheme};

/// A weights file in a repository at Hugging Face.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    repository: String,
    revision: Option<String>,
    path: String,
}

impl HubFile {
    /// The host in names; the API is at [`Self::API_HOST`].
    pub const HOST: &str = "hf.co";
    /// The host of the API, which lists and serves files.
    pub const API_HOST: &str = "huggingface.co";
    /// The branch of a file without a revision.
    pub const DEFAULT_REVISION: &str = "main";

    /// Makes a source from three parts, each checked.
    pub fn new(repository: &str, revision: Option<&str>, path: &str) -> Result<Self, SourceError> {
        let refused =
            |part, found: &str| SourceError::Part { part, found: found.chars().take(100).collect() };
        let is_repository = repository.split('/').count() <= 2 && repository.split('/').all(is_hub_name);
        if !is_repository {
            return Err(refused("repository", repository));
        }
        if let Some(revision) = revision.filter(|revision| !is_revision(revision)) {
            return Err(refused("revision", revision));
        }
        if !is_file_name(path) || !is_weights(path) {
            return Err(refused("file", path));
        }
        let revision = revision.map(str::to_owned);
        Ok(Self { repository: repository.to_owned(), revision, path: path.to_owned() })
    }

    /// `user/repo`; the oldest repositories, such as `gpt2`, have no user.
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The branch, tag or commit.
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(Self::DEFAULT_REVISION)
    }

    /// Whether the revision is a commit, which always has the same content.
    pub(super) fn is_fixed(&self) -> bool {
        is_commit(self.revision())
    }

    /// The same file on the default branch.
    pub(super) fn at_default_revision(&self) -> Self {
        Self { revision: None, ..self.clone() }
    }

    /// The file's path in the repository, without escapes.
    pub fn path(&self) -> &str {
        &self.path
    }

    /// `hf.co/user/repo:Q4_K_M` if the file is named after the repository; otherwise the tag is the file's name. The
    /// others have the file's whole name and its folders in the tag.
    pub(super) fn names(&self) -> Result<DerivedName, ReferenceError> {
        let owned = self.repository.split_once('/');
        let (user, repository) = owned.unwrap_or((host::NO_NAMESPACE, &self.repository));
        let mut folders: Vec<&str> = self.path.split('/').collect();
        let stem = ShardName::stem_of(folders.pop().unwrap_or_default());
        let subject = repository.strip_suffix("-GGUF").or_else(|| repository.strip_suffix("-gguf"));
        let tag = match split_file_type(stem) {
            Some((model, file_type)) if model.eq_ignore_ascii_case(subject.unwrap_or(repository)) => {
                file_type
            }
            _ => stem,
        };
        let name = |tag: &str| Reference::from_parts(Self::HOST, user, repository, &part(tag));
        let mut names = DerivedName::new(name(tag)?, IdPart::Tag);
        names.add_by_file_name(name(stem));
        for text in with_folders(&folders, tag) {
            names.add(name(&text));
        }
        Ok(names)
    }
}

impl fmt::Display for HubFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (host, repository, path) = (Self::API_HOST, &self.repository, escaped(&self.path));
        match &self.revision {
            Some(revision) => write!(f, "https://{host}/{repository}/resolve/{revision}/{path}"),
            // In the short form, the first folder would be the repository.
            None if !repository.contains('/') => {
                write!(f, "https://{host}/{repository}/resolve/{}/{path}", Self::DEFAULT_REVISION)
            }
            None => write!(f, "{}/{repository}/{path}", Self::HOST),
        }
    }
}

/// Parses the address of a file at Hugging Face, with or without a scheme, as a link or in short form.
pub(super) fn hub_file(text: &str) -> Option<Result<HubFile, SourceError>> {
    if let Some(file) = file_without_owner(text) {
        return Some(file);
    }
    let (repository, place, query) = split_address(text)?;
    let (revision, file) = match place.map(|place| place.splitn(3, '/').collect::<Vec<_>>()).as_deref() {
        // These are files, whatever characters their names have.
        Some(["resolve" | "blob" | "raw" | "tree", revision, file]) if names_weights(file) => {
            (Some(*revision), Cow::Borrowed(*file))
        }
        _ => match place.filter(|file| is_file_address(file)) {
            Some(file) => (None, Cow::Borrowed(file)),
            // The page of a repository that shows a file.
            None => (None, shown_file(query)?),
        },
    };
    Some(unescaped(&file).and_then(|file| HubFile::new(repository, revision, &file)))
}

/// Parses the address of a file in a repository without an owner: `huggingface.co/REPO/resolve/REVISION/FILE`.
fn file_without_owner(text: &str) -> Option<Result<HubFile, SourceError>> {
    let (path, _query) = path_at_hub(text)?;
    let [repository, "resolve" | "blob" | "raw", revision, file] =
        path.splitn(4, '/').collect::<Vec<_>>()[..]
    else {
        return None;
    };
    let revision = Some(revision).filter(|revision| *revision != HubFile::DEFAULT_REVISION);
    names_weights(file).then(|| unescaped(file).and_then(|file| HubFile::new(repository, revision, &file)))
}

/// Parses the address of a page of a repository: `hf.co/USER/REPO/tree/main` is the repository itself.
fn hub_page(text: &str) -> Option<Result<Reference, SourceError>> {
    if let [repository, "tree", HubFile::DEFAULT_REVISION] =
        path_at_hub(text)?.0.split('/').collect::<Vec<_>>()[..]
    {
        return Some(format!("{}/{repository}", HubFile::HOST).parse().map_err(SourceError::from));
    }
    let (repository, place, _query) = split_address(text)?;
    let refused =
        |part, found: &str| Some(Err(SourceError::Part { part, found: found.chars().take(100).collect() }));
    match place.map(|place| place.splitn(3, '/').collect::<Vec<_>>()).as_deref() {
        None | Some(["tree", HubFile::DEFAULT_REVISION]) => {
            let name = format!("{}/{repository}", HubFile::HOST);
            Some(name.parse().map_err(SourceError::from))
        }
        // A name has no revision, and a directory may have several models.
        Some(["tree", revision]) => refused("revision", revision),
        Some(["tree", _, directory]) => refused("directory", directory),
        Some(["resolve" | "blob" | "raw", _, file]) => refused("file", file),
        Some(_) => refused("page", place.unwrap_or_default()),
    }
}

/// Splits the address of something at Hugging Face into `user/repo`, what follows it, and the query.
fn split_address(text: &str) -> Option<(&str, Option<&str>, &str)> {
    let (path, query) = path_at_hub(text)?;
    let (user, rest) = path.split_once('/')?;
    match rest.find('/') {
        None => Some((path, None, query)),
        Some(end) => Some((path.get(..user.len() + 1 + end)?, rest.get(end + 1..), query)),
    }
}

/// The path and the query of an address at Hugging Face.
fn path_at_hub(text: &str) -> Option<(&str, &str)> {
    let (scheme, rest) = text.split_once("://").unwrap_or(("https", text));
    let (host, path) = rest.split_once('/')?;
    let scheme = match scheme {
        "https" => Scheme::Https,
        "http" => Scheme::Http,
        _ => return None,
    };
    if !host::is_of(HubFile::HOST, scheme.default_port(), host) {
        return None;
    }
    let path = path.split('#').next().unwrap_or_default();
    let (path, query) = path.split_once('?').unwrap_or((path, ""));
    Some((path.trim_end_matches('/'), query))
}

/// The file in the query of a page's address, which the page shows in a side bar. In a query, `+` is a space.
fn shown_file(query: &str) -> Option<Cow<'_, str>> {
    let file = query.split('&').find_map(|part| part.strip_prefix("show_file_info="))?;
    names_weights(file).then(|| Cow::Owned(file.replace('+', "%20")))
}

/// Whether Hugging Face allows this name for a user or repository.
fn is_hub_name(text: &str) -> bool {
    let allowed = |c: char| c.is_ascii_alphanumeric() || "_-.".contains(c);
    (1..=96).contains(&text.len())
        && text.chars().all(allowed)
        && text.starts_with(|c: char| c.is_ascii_alphanumeric() || c == '_')
        && !text.contains("..")
}

/// A branch, tag or commit without a `/`, which would need encoding.
/// Whether a revision is a commit, which always has the same content.
pub(super) fn is_commit(revision: &str) -> bool {
    const COMMIT_DIGITS: usize = 40;
    revision.len() == COMMIT_DIGITS && revision.chars().all(|c| c.is_ascii_hexdigit())
}

fn is_revision(text: &str) -> bool {
    is_hub_name(text)
}

/// The model whose page has this address; `None` for any other text.
pub(super) fn model_page(text: &str) -> Option<Result<Reference, SourceError>> {
    if let Some(page) = hub_page(text) {
        return Some(page);
    }
    let (_, rest) = text.split_once("://").filter(|(scheme, _)| *scheme == "https").unwrap_or(("", text));
    let (site, path) = rest.split(['?', '#']).next().unwrap_or_default().split_once('/')?;
    let parts: Vec<&str> = path.trim_end_matches('/').split('/').collect();
    let (site, port) = host::unaliased(site);
    if port.is_some_and(|port| port != Scheme::Https.default_port()) {
        return None;
    }
    let name = match (site.as_str(), &parts[..]) {
        (
            "ollama.com" | "www.ollama.com",
            [user, model] | [user, model, "tags"] | [user, model, "blobs", _],
        ) => {
            format!("{}/{user}/{model}", Reference::DEFAULT_HOST)
        }
        ("hub.docker.com", ["r", user, model] | ["r", user, model, "tags"]) => {
            format!("{}/{user}/{model}", host::DOCKER_HUB)
        }
        _ => return None,
    };
    Some(name.parse().map_err(SourceError::from))
}
