//! `/v2/`: models as repositories of a registry, read only, by OCI's distribution specification 1.1. `_catalog` and the
//! `Location` of blobs are not in it: the first is Docker's, and stock Ollama needs the second.

use std::str::FromStr as _;

use blobd_store_format::descriptor::MediaType;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::served_name;
use hyper::header::{HeaderName, LINK, LOCATION, WWW_AUTHENTICATE};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};
use serde_json::json;

use super::answer::{Answer, Answered, parameter};
use super::source::Source;
use crate::ops::{Found, OpError, View, Wanted};
use crate::state::Daemon;

/// The first part of all paths.
pub(super) const PREFIX: &str = "/v2/";

const CONTENT_DIGEST: HeaderName = HeaderName::from_static("docker-content-digest");
const API_VERSION: HeaderName = HeaderName::from_static("docker-distribution-api-version");
const FILTERS_APPLIED: HeaderName = HeaderName::from_static("oci-filters-applied");

/// What a path means.
enum Resource<'p> {
    Base,
    Catalog,
    Tags,
    Manifest(&'p str),
    Blob(&'p str),
    Referrers(&'p str),
}

/// Reads the store. `path` is decoded.
pub(super) fn answer(daemon: &Daemon, view: &View, request: &Parts, path: &str) -> Answered {
    let Some((name, resource)) = resource(path) else {
        return Ok(refusal(StatusCode::NOT_FOUND, "NAME_UNKNOWN", "no such path of a registry"));
    };
    let asked = Asked { daemon, view, request, name };
    let answer = match resource {
        Resource::Base => Ok(Answer::json(StatusCode::OK, &json!({}))),
        Resource::Catalog => asked.catalog(),
        Resource::Tags => asked.tags(),
        Resource::Manifest(wanted) => asked.manifest(wanted),
        Resource::Blob(digest) => asked.blob(digest),
        Resource::Referrers(digest) => asked.referrers(digest),
    };
    Ok(answer?.with(API_VERSION, "registry/2.0"))
}

/// What a path asks for that a registry may have if it is not stored.
pub(super) enum Part<'p> {
    Manifest(&'p str),
    Blob(Digest),
}

/// The name of the repository, and what of it is asked for. `path` is decoded.
pub(super) fn part(path: &str) -> Option<(&str, Part<'_>)> {
    let (name, resource) = resource(path)?;
    match resource {
        Resource::Manifest(wanted) => Some((name, Part::Manifest(wanted))),
        Resource::Blob(wanted) => Some((name, Part::Blob(wanted.parse().ok()?))),
        _ => None,
    }
}

/// A manifest, with its bytes as its registry has sent them.
pub(super) fn manifest(request: &Parts, manifest: &Manifest, is_by_digest: bool) -> Answer {
    let media_type = manifest.media_type().unwrap_or_else(|| MediaType::new(MediaType::OCI_MANIFEST));
    let digest = manifest.digest().to_string();
    let answer = Answer::new(StatusCode::OK, media_type.as_str(), manifest.raw().to_vec());
    let answer = answer.with(CONTENT_DIGEST, &digest).with(API_VERSION, "registry/2.0").cached(is_by_digest);
    answer.versioned(request, &format!("\"{digest}\""))
}

/// A file of a repository.
pub(super) fn blob(request: &Parts, digest: Digest, file: impl Into<Source>) -> Answer {
    let digest = digest.to_string();
    let answer = Answer::file(request, file, "application/octet-stream", &format!("\"{digest}\""));
    let answer = answer.with(CONTENT_DIGEST, &digest).with(API_VERSION, "registry/2.0");
    answer.with(LOCATION, request.uri.path()).cached(true)
}

fn resource(path: &str) -> Option<(&str, Resource<'_>)> {
    let rest = path.strip_prefix(PREFIX).or_else(|| (path == "/v2").then_some(""))?;
    match rest {
        "" => return Some(("", Resource::Base)),
        "_catalog" => return Some(("", Resource::Catalog)),
        _ => {}
    }
    let (before, last) = rest.rsplit_once('/')?;
    let (name, kind) = before.rsplit_once('/')?;
    let resource = match kind {
        "tags" if last == "list" => Resource::Tags,
        "manifests" => Resource::Manifest(last),
        "blobs" => Resource::Blob(last),
        "referrers" => Resource::Referrers(last),
        _ => return None,
    };
    Some((name, resource))
}

struct Asked<'a> {
    daemon: &'a Daemon,
    view: &'a View,
    request: &'a Parts,
    /// The name of the repository.
    name: &'a str,
}

impl Asked<'_> {
    fn catalog(&self) -> Answered {
        let models = self.view.models(&self.daemon.store)?;
        let mut names: Vec<String> = models.iter().map(served_name::repository).collect();
        names.sort();
        names.dedup();
        let Page { names, next } = match self.page(names) {
            Ok(page) => page,
            Err(refusal) => return Ok(*refusal),
        };
        Ok(self.linked(Answer::json(StatusCode::OK, &json!({ "repositories": names })), next))
    }

    fn tags(&self) -> Answered {
        let tags = self.shown_tags()?;
        if tags.is_empty() {
            return Ok(self.unknown_name());
        }
        let mut names: Vec<String> = tags.iter().map(|tag| tag.tag().to_owned()).collect();
        names.sort();
        let Page { names, next } = match self.page(names) {
            Ok(page) => page,
            Err(refusal) => return Ok(*refusal),
        };
        Ok(self.linked(Answer::json(StatusCode::OK, &json!({ "name": self.name, "tags": names })), next))
    }

    fn manifest(&self, wanted: &str) -> Answered {
        let by_digest = match digest(wanted) {
            _ if !wanted.contains(':') => None,
            Ok(digest) => Some(digest),
            Err(refusal) => return Ok(*refusal),
        };
        let wanted_manifest = by_digest.map_or_else(|| Wanted::Tag(wanted.to_owned()), Wanted::Digest);
        let tags = self.shown_tags()?;
        if tags.is_empty() {
            return Ok(self.unknown_name());
        }
        let store = &self.daemon.store;
        let manifest = match self.view.manifest(store, &tags, &wanted_manifest)? {
            Found::There(manifest) => manifest,
            Found::Withheld(reason) => {
                return Ok(refusal(StatusCode::NOT_FOUND, "MANIFEST_UNKNOWN", &reason));
            }
            Found::Missing => {
                if let Wanted::Digest(digest) = wanted_manifest
                    && let Some(signature) = self.view.signature(store, &tags, digest)?
                {
                    return Ok(self::manifest(self.request, &signature, true));
                }
                let tags: Vec<&str> = tags.iter().map(Reference::tag).take(MAX_NAMED).collect();
                let message = format!("no manifest {wanted:?} of {:?}; tags: {}", self.name, tags.join(", "));
                return Ok(refusal(StatusCode::NOT_FOUND, "MANIFEST_UNKNOWN", &message));
            }
        };
        if self.request.method == Method::GET {
            let own = rustix::process::geteuid().as_raw();
            store.content().index().note_use(manifest.digest(), own);
        }
        Ok(self::manifest(self.request, &manifest, by_digest.is_some()))
    }

    fn blob(&self, wanted: &str) -> Answered {
        let digest = match digest(wanted) {
            Ok(digest) => digest,
            Err(refusal) => return Ok(*refusal),
        };
        let tags = self.shown_tags()?;
        if tags.is_empty() {
            return Ok(self.unknown_name());
        }
        let unknown = |message: &str| refusal(StatusCode::NOT_FOUND, "BLOB_UNKNOWN", message);
        let file = match self.view.file(&self.daemon.store, &tags, digest)? {
            Found::There(file) => file,
            Found::Withheld(reason) => return Ok(unknown(&reason)),
            Found::Missing => return Ok(unknown(&format!("no blob {digest} of {:?}", self.name))),
        };
        Ok(self::blob(self.request, digest, file))
    }

    fn referrers(&self, wanted: &str) -> Answered {
        let subject = match digest(wanted) {
            Ok(digest) => digest,
            Err(refusal) => return Ok(*refusal),
        };
        let tags = self.shown_tags()?;
        if tags.is_empty() {
            return Ok(self.unknown_name());
        }
        let mut manifests = self.view.referrers(&self.daemon.store, &tags, subject)?;
        let filter = parameter(self.request, "artifactType");
        if let Some(wanted) = &filter {
            manifests.retain(|manifest| manifest.artifact_type.as_ref() == Some(wanted));
        }
        let index = json!({ "schemaVersion": 2, "mediaType": MediaType::OCI_INDEX, "manifests": manifests });
        let answer = Answer::new(StatusCode::OK, MediaType::OCI_INDEX, index.to_string()).cached(false);
        Ok(if filter.is_some() { answer.with(FILTERS_APPLIED, "artifactType") } else { answer })
    }

    fn shown_tags(&self) -> Result<Vec<Reference>, OpError> {
        // The registry that a mirror's client would have asked.
        let host = parameter(self.request, "ns");
        self.view.tags(&self.daemon.store, self.name, host.as_deref())
    }

    fn unknown_name(&self) -> Answer {
        refusal(StatusCode::NOT_FOUND, "NAME_UNKNOWN", &format!("no repository {:?}", self.name))
    }

    /// The part of a sorted list that the parameters `n` and `last` select.
    fn page(&self, mut names: Vec<String>) -> Result<Page, Box<Answer>> {
        if let Some(last) = parameter(self.request, "last") {
            names.retain(|name| *name > last);
        }
        let Some(most) = parameter(self.request, "n") else { return Ok(Page { names, next: None }) };
        let Ok(most) = most.parse::<usize>() else {
            let message = "n: expected a number";
            return Err(Box::new(refusal(StatusCode::BAD_REQUEST, "PAGINATION_NUMBER_INVALID", message)));
        };
        let has_more = names.len() > most;
        names.truncate(most);
        let last = names.last().filter(|_| has_more);
        let next = last.map(|last| format!("n={most}&last={}", encoded(last)));
        Ok(Page { names, next })
    }

    fn linked(&self, answer: Answer, next: Option<String>) -> Answer {
        let answer = answer.cached(false);
        match next {
            Some(query) => answer.with(LINK, format!("<{}?{query}>; rel=\"next\"", self.request.uri.path())),
            None => answer,
        }
    }
}

struct Page {
    names: Vec<String>,
    /// The query of the next part.
    next: Option<String>,
}

/// The most tags that an error names.
const MAX_NAMED: usize = 10;

fn encoded(text: &str) -> String {
    percent_encoding::utf8_percent_encode(text, percent_encoding::NON_ALPHANUMERIC).to_string()
}

/// There is no blob with a digest of another algorithm.
fn digest(text: &str) -> Result<Digest, Box<Answer>> {
    Digest::from_str(text).map_err(|error| {
        let is_other = text.split_once(':').is_some_and(|(algorithm, encoded)| {
            let is_plain = |c: char| c.is_ascii_alphanumeric() || "=_-".contains(c);
            algorithm != "sha256"
                && algorithm.starts_with(|c: char| c.is_ascii_lowercase() || c.is_ascii_digit())
                && algorithm
                    .chars()
                    .all(|c| c.is_ascii_lowercase() || c.is_ascii_digit() || "+._-".contains(c))
                && !encoded.is_empty()
                && encoded.chars().all(is_plain)
        });
        Box::new(match is_other {
            true => refusal(StatusCode::NOT_FOUND, "BLOB_UNKNOWN", "only SHA-256 digests are stored"),
            false => refusal(StatusCode::BAD_REQUEST, "DIGEST_INVALID", &error.to_string()),
        })
    })
}

/// An error as registries send it.
pub(super) fn refusal(status: StatusCode, code: &str, message: &str) -> Answer {
    let error = json!({ "errors": [{ "code": code, "message": message, "detail": {} }] });
    let answer = Answer::json(status, &error).with(API_VERSION, "registry/2.0");
    match status {
        StatusCode::UNAUTHORIZED => answer.with(WWW_AUTHENTICATE, "Basic realm=\"blobd\", charset=\"UTF-8\""),
        _ => answer,
    }
}
