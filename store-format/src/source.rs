//! The sources that a user can pull from.
//!
//! A source is a reference to a model in a registry, a weights file in a repository at Hugging Face,
//! or the URL of a weights file. A text is a file's address only if its last part has the extension
//! of a known [`FileFormat`] and no `:`, so a full [`Reference`] is never mistaken for one. The address of
//! a model's page on a known web site is a reference too.

mod escapes;
mod hub;
mod pulled;

use std::borrow::Cow;
use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use self::escapes::{escaped, normalized, unescaped};
pub use self::hub::HubFile;
use self::hub::{hub_file, model_page};
pub use self::pulled::{Components, Draft, Projector, PulledSource};
use crate::derived_name::{DerivedName, IdPart, part, with_folders};
use crate::file_format::FileFormat;
use crate::file_type::ShardName;
use crate::host;
use crate::reference::{Reference, ReferenceError, Scheme};

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullSource {
    /// A registry that serves manifests.
    Registry(Reference),
    Hub(HubFile),
    Url(FileUrl),
}

#[derive(Clone, PartialEq, Eq)]
pub struct FileUrl {
    scheme: Scheme,
    host: String,
    /// With the leading `/`, with escapes where they are needed.
    path: String,
    /// The part after `?`, which may contain a secret signature.
    query: Option<String>,
}

impl PullSource {
    /// The model's default name in the store.
    pub fn name(&self) -> Result<Reference, ReferenceError> {
        match self {
            Self::Registry(reference) => Ok(reference.clone()),
            Self::Hub(file) => file.names().map(|names| names.first().clone()),
            Self::Url(url) => url.names().map(|names| names.first().clone()),
        }
    }

    /// The names that a file gets by its address; `None` for a model in a registry, which has a name.
    pub fn derived_name(&self) -> Result<Option<DerivedName>, ReferenceError> {
        match self {
            Self::Registry(_) => Ok(None),
            Self::Hub(file) => file.names().map(Some),
            Self::Url(url) => url.names().map(Some),
        }
    }

    /// The name of the file at the address; `None` for a model in a registry.
    pub fn file_name(&self) -> Option<Cow<'_, str>> {
        match self {
            Self::Registry(_) => None,
            Self::Hub(file) => Some(Cow::Borrowed(file_name(file.path()))),
            Self::Url(url) => Some(url.file_name()),
        }
    }

    /// The host in the name; mirrors may replace it.
    pub fn host(&self) -> &str {
        match self {
            Self::Registry(reference) => reference.host(),
            Self::Hub(_) => HubFile::HOST,
            Self::Url(url) => url.host(),
        }
    }

    pub const fn scheme(&self) -> Scheme {
        match self {
            Self::Registry(reference) => reference.scheme(),
            Self::Hub(_) => Scheme::Https,
            Self::Url(url) => url.scheme(),
        }
    }

    /// Whether both are the same file or the same model of a registry, at any commit. A model at Hugging Face may be named by
    /// its repository or by its file.
    pub fn is_same_model(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Hub(one), Self::Hub(other)) => {
                (one.repository(), one.path()) == (other.repository(), other.path())
            }
            (Self::Registry(model), Self::Hub(file)) | (Self::Hub(file), Self::Registry(model)) => {
                model.host() == HubFile::HOST && model.repository() == file.repository()
            }
            _ => self == other,
        }
    }

    /// Whether both are from one repository at Hugging Face, at any commit and whatever their files are called, or are
    /// [the same model](Self::is_same_model) elsewhere.
    pub fn is_same_repository(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Hub(one), Self::Hub(other)) => one.repository() == other.repository(),
            _ => self.is_same_model(other),
        }
    }

    /// Whether both are files of one commit of a repository at Hugging Face.
    pub fn is_same_commit(&self, other: &Self) -> bool {
        match (self, other) {
            (Self::Hub(one), Self::Hub(other)) => {
                let is_fixed = one.is_fixed() && one.revision() == other.revision();
                is_fixed && one.repository() == other.repository()
            }
            _ => false,
        }
    }

    /// Where a newer version of the model would be: at the same place, but not at a fixed commit. `None` if the
    /// source is fixed to a digest.
    pub fn latest(&self) -> Option<Self> {
        match self {
            Self::Registry(reference) => reference.digest().is_none().then(|| self.clone()),
            Self::Hub(file) => Some(Self::Hub(file.at_default_revision())),
            Self::Url(_) => Some(self.clone()),
        }
    }

    /// The source that a name pulled from here follows; a branch or tag stays. `None` if the source is fixed to a
    /// digest or a commit, which has no newer versions.
    pub fn followed(&self) -> Option<Self> {
        match self {
            Self::Hub(file) if file.is_fixed() => None,
            Self::Hub(file) if file.revision() != HubFile::DEFAULT_REVISION => Some(self.clone()),
            _ => self.latest(),
        }
    }

    /// The origin to record for repair and eviction. `None` for a URL with a query, which may expire and
    /// may contain a secret.
    pub fn origin(&self) -> Option<String> {
        match self {
            Self::Url(url) if url.query.is_some() => None,
            _ => Some(self.to_string()),
        }
    }
}

impl FileUrl {
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The server, with its port if it has one.
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Path and query, for a request.
    pub fn path_and_query(&self) -> String {
        match &self.query {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        }
    }

    /// The file's name, without escapes.
    pub fn file_name(&self) -> Cow<'_, str> {
        let name = file_name(&self.path);
        unescaped(name).unwrap_or(Cow::Borrowed(name))
    }

    /// The same URL with another file name.
    pub fn with_file_name(&self, name: &str) -> Result<Self, SourceError> {
        let (directory, _) = self.path.rsplit_once('/').unwrap_or_default();
        // A `/` in a file's name was an escape.
        let path = format!("{directory}/{}", escaped(name).replace('/', "%2F"));
        check_path(&path)?;
        Ok(Self { path, ..self.clone() })
    }

    /// `host/folder/stem:latest`; the others have more of the folders.
    fn names(&self) -> Result<DerivedName, ReferenceError> {
        let path = unescaped(&self.path).unwrap_or(Cow::Borrowed(&self.path));
        let mut folders: Vec<&str> = path.split('/').filter(|part| !part.is_empty()).collect();
        let stem = ShardName::stem_of(folders.pop().unwrap_or_default());
        let name = |folders: &str| {
            let namespace = part(folders).replace('.', "-");
            let namespace =
                if namespace.is_empty() { Reference::DEFAULT_NAMESPACE } else { namespace.as_str() };
            let host = host::canonical(&self.host);
            Reference::from_parts(host, namespace, &part(stem), Reference::DEFAULT_TAG)
        };
        let nearest = folders.pop().unwrap_or_default();
        let mut names = DerivedName::new(name(nearest)?, IdPart::Model);
        for text in with_folders(&folders, nearest) {
            names.add(name(&text));
        }
        Ok(names)
    }
}

impl FromStr for PullSource {
    type Err = SourceError;

    fn from_str(text: &str) -> Result<Self, SourceError> {
        if text.len() > MAX_LENGTH {
            return Err(SourceError::TooLong { length: text.len() });
        }
        if let Some(hub) = hub_file(text) {
            return hub.map(Self::Hub);
        }
        if let Some(page) = model_page(text) {
            return page.map(Self::Registry);
        }
        match file_url(text) {
            Some(url) => url.map(Self::Url),
            None => Ok(Self::Registry(text.parse()?)),
        }
    }
}

/// Without the query of a URL, which may be a secret.
impl fmt::Display for PullSource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Registry(reference) => reference.fmt(f),
            Self::Hub(file) => file.fmt(f),
            Self::Url(url) => url.fmt(f),
        }
    }
}

impl fmt::Display for FileUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme.as_str(), self.host, self.path)
    }
}

/// Without the query, which may be a secret.
impl fmt::Debug for FileUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "FileUrl({self})")
    }
}

/// With the query, for the daemon.
impl Serialize for PullSource {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Url(url) if url.query.is_some() => serializer.collect_str(&format_args!(
                "{}://{}{}",
                url.scheme.as_str(),
                url.host,
                url.path_and_query()
            )),
            other => serializer.collect_str(other),
        }
    }
}

impl<'de> Deserialize<'de> for PullSource {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    #[error(
        "source: wrong {part}: expected hf.co/USER/REPO[:TAG] or hf.co/USER/REPO/FILE.gguf, found {found:?}"
    )]
    Part { part: &'static str, found: String },
    #[error("source: wrong address: expected https://HOST[:PORT]/PATH/FILE.gguf, found {found:?}")]
    Url { found: String },
    #[error("source: {found:?}: expected percent-escapes of UTF-8 text, such as %20, found {escape:?}")]
    Escape { escape: String, found: String },
    #[error("source: too long: expected at most {MAX_LENGTH} bytes, found {length}")]
    TooLong { length: usize },
}

/// Signed URLs have about 2,000 bytes.
const MAX_LENGTH: usize = 8192;

fn file_url(text: &str) -> Option<Result<FileUrl, SourceError>> {
    let (scheme, rest) = text.split_once("://")?;
    let scheme = match scheme {
        "https" => Scheme::Https,
        "http" => Scheme::Http,
        _ => return None,
    };
    let (place, query) = match rest.split('#').next().unwrap_or_default().split_once('?') {
        Some((place, query)) => (place, Some(query)),
        None => (rest.split('#').next().unwrap_or_default(), None),
    };
    let (host, path) = place.find('/').map(|at| place.split_at(at))?;
    if !is_file_address(path) {
        return None;
    }
    let refused = || {
        let found = format!("{}://{place}", scheme.as_str());
        SourceError::Url { found: without_userinfo(&found).chars().take(200).collect() }
    };
    let is_printable = |query: &str| query.bytes().all(|byte| byte.is_ascii_graphic());
    if !is_host(host) || !query.is_none_or(is_printable) {
        return Some(Err(refused()));
    }
    let url = |path: String| {
        check_path(&path)?;
        Ok(FileUrl { scheme, host: host.to_owned(), path, query: query.map(str::to_owned) })
    };
    Some(normalized(path).and_then(url))
}

/// Checks a path in its usual form: no part may lead elsewhere, with or without escapes.
fn check_path(path: &str) -> Result<(), SourceError> {
    let text = unescaped(path)?;
    let parts_are_plain = |text: &str| {
        text.strip_prefix('/').unwrap_or(text).split('/').all(|part| !matches!(part, "" | "." | ".."))
    };
    if parts_are_plain(path) && parts_are_plain(&text) && !text.contains('\\') && is_weights(&text) {
        return Ok(());
    }
    Err(SourceError::Url { found: path.chars().take(200).collect() })
}

/// A URL, or a host with a port, without user and password, for errors. Everything before the last `@` counts as
/// these, because a password that is not encoded may contain any character.
pub fn without_userinfo(text: &str) -> Cow<'_, str> {
    let (scheme, rest) = text.split_once("://").unwrap_or(("", text));
    match rest.rsplit_once('@') {
        None => Cow::Borrowed(text),
        Some((_, host)) if scheme.is_empty() => Cow::Owned(format!("…@{host}")),
        Some((_, host)) => Cow::Owned(format!("{scheme}://…@{host}")),
    }
}

/// Whether a reference may have this host: no user. What follows a colon must be a port.
fn is_host(text: &str) -> bool {
    let port = text.rsplit_once(':').filter(|_| !text.ends_with(']')).map(|(_, port)| port.parse::<u16>());
    port.is_none_or(|port| port.is_ok())
        && Reference::from_parts(text, Reference::DEFAULT_NAMESPACE, "x", "x").is_ok()
}

/// Whether the last part of a path is a file name, not a model with a tag.
fn is_file_address(path: &str) -> bool {
    names_weights(path) && !file_name(path).contains([':', '@'])
}

/// Whether a path with escapes has the extension of weights. With a wrong escape the text itself decides, so that the
/// error is about the escape.
fn names_weights(path: &str) -> bool {
    unescaped(path).map_or_else(|_refused| is_weights(path), |text| is_weights(&text))
}

fn is_weights(path: &str) -> bool {
    FileFormat::split_name(file_name(path)).is_some_and(|(stem, _format)| !stem.is_empty())
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

#[cfg(test)]
mod tests;
