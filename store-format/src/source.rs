//! The sources that a user can pull from.
//!
//! A source is a reference to a model in a registry, a weights file in a repository at Hugging Face,
//! or the URL of a weights file. A text is a file's address only if its last part has the extension
//! of a known [`FileFormat`] and no `:`, so a full [`Reference`] is never mistaken for one.

use std::fmt;
use std::str::FromStr;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

use crate::file_format::FileFormat;
use crate::file_type::split_file_type;
use crate::manifest::is_file_name;
use crate::reference::{Reference, ReferenceError, Scheme};

/// A source to pull a model from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PullSource {
    /// A registry that serves manifests.
    Registry(Reference),
    /// A file of a repository at Hugging Face.
    Hub(HubFile),
    /// A file on a web server.
    Url(FileUrl),
}

/// A weights file in a repository at Hugging Face.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct HubFile {
    repository: String,
    revision: Option<String>,
    path: String,
}

/// A weights file on a web server.
#[derive(Clone, PartialEq, Eq)]
pub struct FileUrl {
    scheme: Scheme,
    host: String,
    /// With the leading `/`, percent-encoded as the user wrote it.
    path: String,
    /// The part after `?`, which may contain a secret signature.
    query: Option<String>,
}

impl PullSource {
    /// The model's default name in the store.
    ///
    /// # Errors
    /// [`ReferenceError`] when the parts of a file's address are not a valid name.
    pub fn name(&self) -> Result<Reference, ReferenceError> {
        match self {
            Self::Registry(reference) => Ok(reference.clone()),
            Self::Hub(file) => file.name(),
            Self::Url(url) => url.name(),
        }
    }

    /// The origin to record for repair and eviction. `None` for a URL with a query, which may expire and
    /// may contain a secret.
    #[must_use]
    pub fn origin(&self) -> Option<String> {
        match self {
            Self::Url(url) if url.query.is_some() => None,
            _ => Some(self.to_string()),
        }
    }
}

impl HubFile {
    /// The host in names; the API is at [`Self::API_HOST`].
    pub const HOST: &str = "hf.co";
    /// The host of the API, which lists and serves files.
    pub const API_HOST: &str = "huggingface.co";
    /// The branch of a file without a revision.
    pub const DEFAULT_REVISION: &str = "main";

    /// Makes a source from three parts, each checked.
    ///
    /// # Errors
    /// [`SourceError`] when one is malformed.
    pub fn new(repository: &str, revision: Option<&str>, path: &str) -> Result<Self, SourceError> {
        let refused =
            |part, found: &str| SourceError::Part { part, found: found.chars().take(100).collect() };
        let is_repository = repository.split('/').count() == 2 && repository.split('/').all(is_hub_name);
        if !is_repository {
            return Err(refused("repository", repository));
        }
        if let Some(revision) = revision.filter(|revision| !is_revision(revision)) {
            return Err(refused("revision", revision));
        }
        // `?` and `#` would end the path when the URL is parsed again.
        if !is_file_name(path) || !is_file_address(path) || path.contains(['?', '#']) {
            return Err(refused("file", path));
        }
        let revision = revision.map(str::to_owned);
        Ok(Self { repository: repository.to_owned(), revision, path: path.to_owned() })
    }

    /// `user/repo`.
    #[must_use]
    pub fn repository(&self) -> &str {
        &self.repository
    }

    /// The branch, tag or commit.
    #[must_use]
    pub fn revision(&self) -> &str {
        self.revision.as_deref().unwrap_or(Self::DEFAULT_REVISION)
    }

    /// The file's path in the repository.
    #[must_use]
    pub fn path(&self) -> &str {
        &self.path
    }

    /// `hf.co/user/repo:Q4_K_M` if the file is named after the repository; otherwise the tag is the
    /// file's name.
    fn name(&self) -> Result<Reference, ReferenceError> {
        let (user, repository) = self.repository.split_once('/').unwrap_or_default();
        let stem = ShardName::stem_of(file_name(&self.path));
        let subject = repository.strip_suffix("-GGUF").or_else(|| repository.strip_suffix("-gguf"));
        let tag = match split_file_type(stem) {
            Some((model, file_type)) if model.eq_ignore_ascii_case(subject.unwrap_or(repository)) => {
                file_type
            }
            _ => stem,
        };
        Reference::from_parts(Self::HOST, user, repository, &tidied(tag))
    }
}

impl FileUrl {
    /// The scheme of the URL.
    #[must_use]
    pub const fn scheme(&self) -> Scheme {
        self.scheme
    }

    /// The server, with its port if it has one.
    #[must_use]
    pub fn host(&self) -> &str {
        &self.host
    }

    /// Path and query, for a request.
    #[must_use]
    pub fn path_and_query(&self) -> String {
        match &self.query {
            Some(query) => format!("{}?{query}", self.path),
            None => self.path.clone(),
        }
    }

    /// The file's name.
    #[must_use]
    pub fn file_name(&self) -> &str {
        file_name(&self.path)
    }

    /// The same URL with another file name.
    ///
    /// # Errors
    /// [`SourceError`] when `name` is not a file name.
    pub fn with_file_name(&self, name: &str) -> Result<Self, SourceError> {
        let (directory, _) = self.path.rsplit_once('/').unwrap_or_default();
        let path = format!("{directory}/{name}");
        check_path(&path)?;
        Ok(Self { path, ..self.clone() })
    }

    fn name(&self) -> Result<Reference, ReferenceError> {
        let directory = self.path.rsplit('/').nth(1).unwrap_or_default();
        let namespace = tidied(directory).replace('.', "-");
        let namespace = if namespace.is_empty() { Reference::DEFAULT_NAMESPACE } else { namespace.as_str() };
        let model = tidied(ShardName::stem_of(self.file_name()));
        Reference::from_parts(&self.host, namespace, &model, Reference::DEFAULT_TAG)
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

impl fmt::Display for HubFile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (host, repository, path) = (Self::API_HOST, &self.repository, &self.path);
        match &self.revision {
            Some(revision) => write!(f, "https://{host}/{repository}/resolve/{revision}/{path}"),
            None => write!(f, "{}/{repository}/{path}", Self::HOST),
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
        let text = std::borrow::Cow::<'de, str>::deserialize(deserializer)?;
        text.parse().map_err(serde::de::Error::custom)
    }
}

/// The name of one shard: `STEM-00002-of-00003.gguf`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ShardName<'n> {
    stem: &'n str,
    number: usize,
    count: usize,
    extension: &'static str,
}

impl<'n> ShardName<'n> {
    /// The most shards of a model; a server is asked for each.
    pub const MAX_COUNT: usize = 512;

    /// Parses the path of a shard; `None` for another file.
    #[must_use]
    pub fn of(path: &'n str) -> Option<Self> {
        let (stem, format) = FileFormat::split_name(path)?;
        let (rest, count) = stem.rsplit_once("-of-")?;
        let (stem, number) = rest.rsplit_once('-')?;
        let read = |digits: &str| {
            let is_number = digits.len() == 5 && digits.bytes().all(|digit| digit.is_ascii_digit());
            is_number.then(|| digits.parse::<usize>().ok()).flatten()
        };
        let (number, count) = (read(number)?, read(count)?);
        let is_one = (1..=count).contains(&number) && count <= Self::MAX_COUNT;
        is_one.then_some(Self { stem, number, count, extension: format.extension() })
    }

    /// The number of the shard, from 1.
    #[must_use]
    pub const fn number(&self) -> usize {
        self.number
    }

    /// The paths of all shards of this model, in order.
    #[must_use]
    pub fn all(&self) -> Vec<String> {
        let Self { stem, count, extension, .. } = self;
        (1..=*count).map(|number| format!("{stem}-{number:05}-of-{count:05}{extension}")).collect()
    }

    /// A file name without extension and shard number.
    #[must_use]
    pub fn stem_of(name: &str) -> &str {
        match ShardName::of(name) {
            Some(shard) => shard.stem,
            None => FileFormat::split_name(name).map_or(name, |(stem, _format)| stem),
        }
    }
}

/// Why a text is not a source.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SourceError {
    /// Neither a reference nor a file's address.
    #[error(transparent)]
    Reference(#[from] ReferenceError),
    /// A malformed part of the address of a file at Hugging Face.
    #[error("source: {part} {found:?}: hf.co/USER/REPO/FILE.gguf expected")]
    Part {
        /// Which part.
        part: &'static str,
        /// The text found.
        found: String,
    },
    /// The URL is not a host, a path and a file name.
    #[error("source: {found:?}: https://HOST[:PORT]/PATH/FILE.gguf expected")]
    Url {
        /// The URL without its query.
        found: String,
    },
    /// The text is above the length limit.
    #[error("source: {length} bytes, at most {MAX_LENGTH} allowed")]
    TooLong {
        /// The length in bytes.
        length: usize,
    },
}

/// Signed URLs have about 2,000 bytes.
const MAX_LENGTH: usize = 8192;
/// The host names of Hugging Face.
const HUB_HOSTS: [&str; 3] = [HubFile::HOST, HubFile::API_HOST, "www.huggingface.co"];

/// Parses the address of a file at Hugging Face, with or without a scheme, as a link or in short form.
fn hub_file(text: &str) -> Option<Result<HubFile, SourceError>> {
    let (_, rest) = text.split_once("://").filter(|(scheme, _)| *scheme == "https").unwrap_or(("", text));
    let (host, path) = rest.split_once('/')?;
    if !is_hub(host) {
        return None;
    }
    let path = path.split(['?', '#']).next().unwrap_or_default();
    let mut parts = path.splitn(3, '/');
    let (user, repository, file) = (parts.next()?, parts.next()?, parts.next()?);
    if !is_file_address(file) {
        return None;
    }
    let (revision, file) = match file.splitn(3, '/').collect::<Vec<_>>()[..] {
        ["resolve" | "blob" | "raw", revision, file] => (Some(revision), file),
        _ => (None, file),
    };
    Some(HubFile::new(&format!("{user}/{repository}"), revision, file))
}

fn is_hub(host: &str) -> bool {
    HUB_HOSTS.iter().any(|known| known.eq_ignore_ascii_case(host))
}

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
    // At Hugging Face, anything but a file's address is the name of a repository.
    if !is_file_address(path) || is_hub(host) {
        return None;
    }
    let refused =
        || SourceError::Url { found: format!("{}://{place}", scheme.as_str()).chars().take(200).collect() };
    let is_printable = |query: &str| query.bytes().all(|byte| byte.is_ascii_graphic());
    if !is_host(host) || !query.is_none_or(is_printable) {
        return Some(Err(refused()));
    }
    let url =
        FileUrl { scheme, host: host.to_owned(), path: path.to_owned(), query: query.map(str::to_owned) };
    Some(check_path(path).map(|()| url))
}

fn check_path(path: &str) -> Result<(), SourceError> {
    let relative = path.strip_prefix('/').unwrap_or(path);
    let is_url_text =
        relative.bytes().all(|byte| byte.is_ascii_graphic() && !b"\"<>\\^`{|}?#".contains(&byte));
    let parts_are_plain = relative.split('/').all(|part| !matches!(part, "" | "." | ".."));
    if is_url_text && parts_are_plain && is_weights(path) {
        return Ok(());
    }
    Err(SourceError::Url { found: path.chars().take(200).collect() })
}

/// Whether a reference may have this host: no user, no brackets.
fn is_host(text: &str) -> bool {
    Reference::from_parts(text, Reference::DEFAULT_NAMESPACE, "x", "x").is_ok()
}

/// Whether the last part of a path is a file name, not a model with a tag.
fn is_file_address(path: &str) -> bool {
    is_weights(path) && !file_name(path).contains([':', '@'])
}

fn is_weights(path: &str) -> bool {
    FileFormat::split_name(file_name(path)).is_some_and(|(stem, _format)| !stem.is_empty())
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
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
fn is_revision(text: &str) -> bool {
    is_hub_name(text)
}

/// A text with nothing in it that a part of a reference may not have.
fn tidied(text: &str) -> String {
    const MAX_CHARS: usize = 80;
    let allowed = |c: char| if c.is_ascii_alphanumeric() || "_-.".contains(c) { c } else { '-' };
    text.chars().map(allowed).skip_while(|c| "-.".contains(*c)).take(MAX_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn source(text: &str) -> PullSource {
        text.parse().unwrap_or_else(|error| panic!("{text}: {error}"))
    }

    #[test]
    fn names_of_models_stay_references() {
        for text in [
            "llama3:8b",
            "hf.co/me/repo-GGUF:Q4_K_M",
            "hf.co/me/model.gguf",
            "https://huggingface.co/me/model.gguf",
            "hf.co/me/repo:Model-Q4_K_M.gguf",
            "http://127.0.0.1:1/a/b.gguf:latest",
            "https://registry.example/a/b",
        ] {
            assert_eq!(source(text), PullSource::Registry(text.parse().unwrap()), "{text}");
        }
    }

    #[test]
    fn files_at_hugging_face_are_read_as_people_write_them() {
        for (text, revision, path, name) in [
            ("hf.co/me/x-GGUF/x-Q4_K_M.gguf", "main", "x-Q4_K_M.gguf", "hf.co/me/x-GGUF:Q4_K_M"),
            ("hf.co/me/x-GGUF/x-MXFP4.gguf", "main", "x-MXFP4.gguf", "hf.co/me/x-GGUF:MXFP4"),
            ("hf.co/me/x-GGUF/x-UD-IQ2_M.gguf", "main", "x-UD-IQ2_M.gguf", "hf.co/me/x-GGUF:UD-IQ2_M"),
            ("https://hf.co/me/x/y.Q8_0.gguf", "main", "y.Q8_0.gguf", "hf.co/me/x:y.Q8_0"),
            ("huggingface.co/me/x/a/b.gguf", "main", "a/b.gguf", "hf.co/me/x:b"),
            ("https://huggingface.co/me/x/blob/v1/b.gguf", "v1", "b.gguf", "hf.co/me/x:b"),
            (
                "https://huggingface.co/me/x/resolve/main/b.GGUF?download=true",
                "main",
                "b.GGUF",
                "hf.co/me/x:b",
            ),
            (
                "hf.co/me/x/Q4_0/x-Q4_0-00001-of-00003.gguf",
                "main",
                "Q4_0/x-Q4_0-00001-of-00003.gguf",
                "hf.co/me/x:Q4_0",
            ),
        ] {
            let PullSource::Hub(file) = source(text) else { panic!("{text}") };
            assert_eq!((file.revision(), file.path()), (revision, path), "{text}");
            assert_eq!(PullSource::Hub(file.clone()).name().unwrap().short(), name, "{text}");
            assert_eq!(source(&file.to_string()), PullSource::Hub(file));
        }
    }

    #[test]
    fn files_on_web_servers_get_a_name() {
        for (text, name) in [
            ("https://example.com/models/tiny.gguf", "example.com/models/tiny:latest"),
            ("http://127.0.0.1:80/tiny.gguf", "127.0.0.1:80/library/tiny:latest"),
            ("https://e.com/a/b.c/my%20model.GGUF", "e.com/b-c/my-20model:latest"),
            ("https://e.com/a/x-00001-of-00002.gguf?token=secret#part", "e.com/a/x:latest"),
        ] {
            let url = source(text);
            assert!(matches!(url, PullSource::Url(_)), "{text}");
            assert_eq!(url.name().unwrap().short(), name, "{text}");
            let json = serde_json::to_string(&url).unwrap();
            assert_eq!(serde_json::from_str::<PullSource>(&json).unwrap(), url);
        }
    }

    #[test]
    fn queries_are_sent_but_not_shown_and_not_written_down() {
        let url = source("https://example.com/models/tiny.gguf?signature=secret");
        assert!(!format!("{url} {url:?}").contains("secret"));
        assert_eq!(url.origin(), None);
        let PullSource::Url(file) = &url else { panic!("{url}") };
        assert_eq!(file.path_and_query(), "/models/tiny.gguf?signature=secret");
        assert!(source("https://example.com/models/tiny.gguf").origin().is_some());
    }

    #[test]
    fn addresses_that_lead_elsewhere_are_refused() {
        for text in [
            "hf.co/me/../x/y.gguf",
            "hf.co/me/x/../../y.gguf",
            "hf.co/me/x/resolve/../y.gguf",
            "hf.co/me/x//y.gguf",
            "hf.co/../x/y.gguf",
            "https://hf.co/me/x/a%0Ab/../y.gguf",
            "https://example.com/../y.gguf",
            "https://example.com/a/./y.gguf",
            "https://user:password@example.com/a/y.gguf",
            "https://[::1]/a/b/c/y.gguf",
            "https:///a/y.gguf",
            "https://example.com/a b/y.gguf",
            "https://example.com/a/b/y.gguf?a b",
            "file:///a/y.gguf",
            "ftp://example.com/a/y.gguf",
        ] {
            assert!(text.parse::<PullSource>().is_err(), "{text}");
        }
        assert!(format!("https://e/{}.gguf", "a".repeat(9000)).parse::<PullSource>().is_err());
    }

    #[test]
    fn shards_are_known_by_their_names() {
        let shard = ShardName::of("a/x-00002-of-00003.gguf").unwrap();
        assert_eq!(shard.number(), 2);
        assert_eq!(shard.all()[0], "a/x-00001-of-00003.gguf");
        assert_eq!(shard.all().len(), 3);
        for name in [
            "x.gguf",
            "x-1-of-3.gguf",
            "x-00004-of-00003.gguf",
            "x-00000-of-00003.gguf",
            "x-00001-of-99999.gguf",
            "x-00001-of-00003",
            "x-+0001-of-00003.gguf",
            "-of-.gguf",
        ] {
            assert_eq!(ShardName::of(name), None, "{name}");
        }
        assert_eq!(ShardName::stem_of("x-00001-of-00003.gguf"), "x");
    }

    proptest! {
        #[test]
        fn any_text_is_refused_or_reads_back(text in "(https?://|hf.co/)?[a-z./:?#@%-]{0,30}(.gguf)?") {
            if let Ok(source) = text.parse::<PullSource>() {
                let json = serde_json::to_string(&source).unwrap();
                prop_assert_eq!(serde_json::from_str::<PullSource>(&json).unwrap(), source);
            }
        }
    }
}
