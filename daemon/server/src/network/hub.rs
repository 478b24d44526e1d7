//! The hub's API, as far as its clients need it to download models that are stored: what a repository has, and its files.
//! All files of stored models are announced as stored outside of git, so that their digests are those of their content. No
//! answer mentions Xet, so clients download over HTTP.

use std::collections::BTreeSet;

use blobd_store_format::reference::Reference;
use bytes::Bytes;
use hyper::StatusCode;
use hyper::header::HeaderName;
use hyper::http::request::Parts;
use serde_json::{Value, json};

use super::answer::{Answer, Answered, parameter};
use super::source::Source;
use crate::ops::{Found, HubContent, HubFile, Snapshot, View};
use crate::state::Daemon;

mod asked_paths;

use self::asked_paths::{AskedPaths, PATHS_INFO};
pub(super) use self::asked_paths::{has_paths, receive_paths};

const API: &str = "/api/models/";
/// What may stand between a repository and the revision of a file.
const OF_FILES: [&str; 2] = ["/resolve/", "/raw/"];

const COMMIT: HeaderName = HeaderName::from_static("x-repo-commit");
const LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");
const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");
const ERROR_CODE: HeaderName = HeaderName::from_static("x-error-code");
const ERROR_MESSAGE: HeaderName = HeaderName::from_static("x-error-message");

/// `None` if the path is none of the hub's. `path` is decoded.
pub(super) fn answer(daemon: &Daemon, view: &View, request: &Parts, path: &str) -> Option<Answered> {
    Some(Asked { daemon, view, request, resource: resource(path)? }.answer())
}

/// The content of a file that is not in the snapshot of a stored model.
pub(super) enum HubBody {
    File(Source),
    Document(Bytes),
}

/// The answer about a repository that is not, or not wholly, stored. `body` makes the content of a file.
pub(super) fn answer_for(
    (daemon, view, request, path): (&Daemon, &View, &Parts, &str),
    snapshot: &Snapshot,
    body: impl FnOnce(HubFile) -> Option<HubBody>,
) -> Option<Answer> {
    let asked = Asked { daemon, view, request, resource: resource(path)? };
    let revision = asked.resource.revision.trim_start_matches("refs/heads/");
    if revision != MAIN && revision != snapshot.commit() {
        return Some(asked.no_revision());
    }
    Some(match asked.resource.what {
        What::Model => asked.model(snapshot),
        What::Refs => asked.listing(&refs(&snapshot.commit(), &[]), &snapshot.commit()),
        What::Tree(folder) => asked.tree(snapshot, folder),
        What::Paths => asked.paths(snapshot),
        What::File(path) => {
            let found = snapshot.files.get(path).and_then(|known| Some((*known, body(*known)?)));
            match found {
                Some((known, HubBody::File(file))) => asked.file_answer(snapshot, known, file),
                Some((known, HubBody::Document(content))) => asked.document_answer(snapshot, known, content),
                None => asked.no_file(snapshot, &format!("no file {path:?}")),
            }
        }
    })
}

/// The repository, the revision and, if a file is asked for, its path.
pub(super) fn asked_file(path: &str) -> Option<(&str, &str, Option<&str>)> {
    let Resource { repository, revision, what } = resource(path)?;
    let file = if let What::File(file) = what { Some(file) } else { None };
    Some((repository, revision.trim_start_matches("refs/heads/"), file))
}

/// Whether the repository that was asked for is not stored.
pub(super) fn is_unknown_repository(answer: &Answer) -> bool {
    answer.headers.get(ERROR_CODE).is_some_and(|code| code == NO_REPOSITORY)
}

/// The error for a model that cannot be pulled from the hub.
pub(super) fn failure(message: &str) -> Answer {
    Answer::json(StatusCode::BAD_GATEWAY, &json!({ "error": message })).with(ERROR_MESSAGE, message)
}

/// What a path asks for.
struct Resource<'p> {
    repository: &'p str,
    revision: &'p str,
    what: What<'p>,
}

fn resource(path: &str) -> Option<Resource<'_>> {
    let resource = |repository, revision, what| {
        let revision = if matches!(revision, "" | "HEAD") { MAIN } else { revision };
        Some(Resource { repository, revision, what })
    };
    let Some(rest) = path.strip_prefix(API) else {
        let path = path.strip_prefix('/')?;
        let (repository, rest) = OF_FILES.iter().find_map(|between| path.split_once(between))?;
        let (revision, file) = split_revision(rest);
        return resource(repository, revision, What::File(file));
    };
    let of_model = |part: &str| {
        rest.match_indices(part).find_map(|(at, _)| {
            let (repository, after) = (rest.get(..at)?, rest.get(at.saturating_add(part.len())..)?);
            (after.is_empty() || after.starts_with('/')).then(|| (repository, after.trim_start_matches('/')))
        })
    };
    if let Some((repository, rest)) = of_model("/tree") {
        let (revision, folder) = split_revision(rest);
        return resource(repository, revision, What::Tree(folder));
    }
    if let Some((repository, revision)) = of_model(PATHS_INFO) {
        return resource(repository, revision, What::Paths);
    }
    if let Some((repository, revision)) = of_model("/revision") {
        return resource(repository, revision, What::Model);
    }
    match rest.strip_suffix("/refs") {
        Some(repository) => resource(repository, MAIN, What::Refs),
        None => resource(rest, MAIN, What::Model),
    }
}

const MAIN: &str = "main";
/// The code of the error for a repository that is not there.
const NO_REPOSITORY: &str = "RepoNotFound";

/// A revision and the path after it. Only `refs/heads/…` and `refs/tags/…` have slashes.
fn split_revision(text: &str) -> (&str, &str) {
    let parts = if text.starts_with("refs/") { 3 } else { 1 };
    let end = text.match_indices('/').nth(parts - 1).map_or(text.len(), |(at, _)| at);
    let (revision, rest) = text.split_at_checked(end).unwrap_or((text, ""));
    (revision, rest.trim_start_matches('/'))
}

enum What<'p> {
    Model,
    Refs,
    Tree(&'p str),
    /// Files and folders whose paths are in the request's body.
    Paths,
    File(&'p str),
}

struct Asked<'a> {
    daemon: &'a Daemon,
    view: &'a View,
    request: &'a Parts,
    resource: Resource<'a>,
}

impl Asked<'_> {
    fn answer(&self) -> Answered {
        let store = &self.daemon.store;
        let Resource { repository, revision, what } = &self.resource;
        let tags = self.view.hub_tags(store, repository)?;
        if tags.is_empty() {
            let message = format!("{repository}: no such model is stored here");
            return Ok(missing(NO_REPOSITORY, &message));
        }
        let Some(snapshot) = self.view.snapshot(store, &tags, revision)? else {
            return Ok(self.no_revision());
        };
        match *what {
            What::Model => Ok(self.model(&snapshot)),
            What::Refs => self.refs(&snapshot, &tags),
            What::Tree(folder) => Ok(self.tree(&snapshot, folder)),
            What::Paths => Ok(self.paths(&snapshot)),
            What::File(path) => self.file(&snapshot, &tags, path),
        }
    }

    fn model(&self, snapshot: &Snapshot) -> Answer {
        let sibling = |(path, file): (&String, &HubFile)| json!({ "rfilename": path, "size": file.size, "blobId": file.git_id().to_string(), "lfs": lfs(file) });
        let siblings: Vec<Value> = snapshot.files.iter().map(sibling).collect();
        let (name, commit) = (self.resource.repository, snapshot.commit());
        let model = json!({
            "_id": commit.get(..24), "id": name, "modelId": name, "sha": commit, "siblings": siblings,
            "private": false, "gated": false, "disabled": false, "tags": [], "downloads": 0, "likes": 0,
        });
        self.listing(&model, &commit)
    }

    fn refs(&self, main: &Snapshot, tags: &[Reference]) -> Answered {
        let commit = main.commit();
        let mut of_tags = Vec::new();
        for tag in tags {
            let name = tag.tag();
            let own = self.view.snapshot(&self.daemon.store, std::slice::from_ref(tag), MAIN)?;
            let commit = own.map(|own| own.commit());
            of_tags.push(json!({ "name": name, "ref": format!("refs/tags/{name}"), "targetCommit": commit }));
        }
        Ok(self.listing(&refs(&commit, &of_tags), &commit))
    }

    /// The files below a folder; without `recursive`, only what is directly in it.
    fn tree(&self, snapshot: &Snapshot, folder: &str) -> Answer {
        let is_recursive =
            parameter(self.request, "recursive").is_some_and(|value| value.eq_ignore_ascii_case("true"));
        let start =
            if folder.is_empty() { String::new() } else { format!("{}/", folder.trim_end_matches('/')) };
        let (mut entries, mut folders) = (Vec::new(), BTreeSet::new());
        for (path, file) in &snapshot.files {
            let Some(rest) = path.strip_prefix(&start) else { continue };
            let inner: Vec<usize> =
                rest.match_indices('/').map(|(at, _)| start.len().saturating_add(at)).collect();
            let depth = if is_recursive { inner.len() } else { inner.len().min(1) };
            for end in inner.iter().take(depth) {
                folders.extend(path.get(..*end).map(str::to_owned));
            }
            if is_recursive || inner.is_empty() {
                entries.push(entry(path, file));
            }
        }
        if entries.is_empty() && folders.is_empty() {
            return self.no_file(snapshot, &format!("no folder {folder:?}"));
        }
        let commit = snapshot.commit();
        let folders = folders.iter().map(|path| folder_entry(path, &commit));
        let all: Vec<Value> = folders.chain(entries).collect();
        self.listing(&json!(all), &commit)
    }

    /// What is at the paths that the client asks about; without those at which nothing is.
    fn paths(&self, snapshot: &Snapshot) -> Answer {
        let asked = self.request.extensions.get::<AskedPaths>().map_or(&[][..], |asked| &asked.0);
        let commit = snapshot.commit();
        let has_folder = |path: &str| {
            let start = format!("{path}/");
            let after = snapshot.files.range(start.clone()..).next();
            after.is_some_and(|(file, _)| file.starts_with(&start))
        };
        let found = |path: &String| {
            let path = path.trim_matches('/');
            match snapshot.files.get(path) {
                Some(file) => Some(entry(path, file)),
                None => has_folder(path).then(|| folder_entry(path, &commit)),
            }
        };
        let found: Vec<Value> = asked.iter().filter_map(found).collect();
        self.listing(&json!(found), &commit)
    }

    fn file(&self, snapshot: &Snapshot, tags: &[Reference], path: &str) -> Answered {
        let Some(file) = snapshot.files.get(path) else {
            return Ok(self.no_file(snapshot, &format!("no file {path:?}")));
        };
        // Every stored file has one.
        let Some(digest) = file.digest() else { return Ok(self.no_file(snapshot, "has no digest")) };
        Ok(match self.view.file(&self.daemon.store, tags, digest)? {
            Found::There(found) => self.file_answer(snapshot, *file, found),
            Found::Missing => self.no_file(snapshot, &format!("{path:?} was removed")),
            Found::Withheld(reason) => self.no_file(snapshot, &reason),
        })
    }

    fn file_answer(&self, snapshot: &Snapshot, file: HubFile, content: impl Into<Source>) -> Answer {
        let answer = Answer::file(self.request, content, FILE, &etag(file));
        self.of_file(snapshot, file, answer)
    }

    fn document_answer(&self, snapshot: &Snapshot, file: HubFile, content: Bytes) -> Answer {
        let answer = Answer::new(StatusCode::OK, FILE, content).versioned(self.request, &etag(file));
        self.of_file(snapshot, file, answer)
    }

    fn of_file(&self, snapshot: &Snapshot, file: HubFile, answer: Answer) -> Answer {
        let commit = snapshot.commit();
        let answer = answer.with(COMMIT, &commit).with(LINKED_ETAG, etag(file));
        answer.with(LINKED_SIZE, file.size.to_string()).cached(self.resource.revision == commit)
    }

    fn no_file(&self, snapshot: &Snapshot, reason: &str) -> Answer {
        let message = format!("{}: {reason}", self.resource.repository);
        missing("EntryNotFound", &message).with(COMMIT, snapshot.commit())
    }

    fn no_revision(&self) -> Answer {
        let Resource { repository, revision, .. } = self.resource;
        missing("RevisionNotFound", &format!("{repository}: no revision {revision:?}"))
    }

    fn listing(&self, value: &Value, commit: &str) -> Answer {
        let is_by_commit = self.resource.revision == commit;
        Answer::json(StatusCode::OK, value).with(COMMIT, commit).cached(is_by_commit)
    }
}

fn entry(path: &str, file: &HubFile) -> Value {
    let id = file.git_id().to_string();
    let mut entry = json!({ "type": "file", "path": path, "size": file.size, "oid": id });
    if let (Some(lfs), Some(entry)) = (lfs(file), entry.as_object_mut()) {
        entry.insert("lfs".to_owned(), lfs);
    }
    entry
}

fn folder_entry(path: &str, commit: &str) -> Value {
    json!({ "type": "directory", "path": path, "size": 0, "oid": commit })
}

fn refs(commit: &str, tags: &[Value]) -> Value {
    let branches = json!([{ "name": MAIN, "ref": "refs/heads/main", "targetCommit": commit }]);
    json!({ "branches": branches, "tags": tags, "converts": [] })
}

/// Null for a file in git.
fn lfs(file: &HubFile) -> Option<Value> {
    let (hex, pointer) = (file.digest()?.to_hex(), file.pointer()?);
    Some(json!({ "oid": hex, "sha256": hex, "size": file.size, "pointerSize": pointer.len() }))
}

/// The version of a file's content.
fn etag(file: HubFile) -> String {
    match file.content {
        HubContent::Digest(digest) => format!("\"{}\"", digest.to_hex()),
        HubContent::InGit(id) => format!("\"{id}\""),
    }
}

const FILE: &str = "application/octet-stream";

/// The hub's clients decide by this code.
fn missing(code: &str, message: &str) -> Answer {
    let answer = Answer::json(StatusCode::NOT_FOUND, &json!({ "error": message }));
    answer.with(ERROR_CODE, code).with(ERROR_MESSAGE, message)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn revision_ends_at_a_slash_except_in_refs() {
        assert_eq!(split_revision("main/a/b.gguf"), ("main", "a/b.gguf"));
        assert_eq!(split_revision("main"), ("main", ""));
        assert_eq!(split_revision("refs/heads/main/a"), ("refs/heads/main", "a"));
        assert_eq!(split_revision("refs/heads/main"), ("refs/heads/main", ""));
        assert_eq!(split_revision(""), ("", ""));
    }

    #[test]
    fn main_revision_is_meant_by_head_and_by_none() {
        for (path, repository, revision) in [
            ("/api/models/me/m", "me/m", "main"),
            ("/api/models/me/m/revision/HEAD", "me/m", "main"),
            ("/api/models/me/m/revision/abc", "me/m", "abc"),
            ("/api/models/me/m/tree", "me/m", "main"),
            ("/api/models/me/m/tree/", "me/m", "main"),
            ("/api/models/me/m/tree/abc/folder", "me/m", "abc"),
            ("/api/models/me/m/paths-info", "me/m", "main"),
            ("/api/models/me/m/paths-info/abc", "me/m", "abc"),
            ("/api/models/me/treehouse", "me/treehouse", "main"),
            ("/api/models/me/tree-m/tree/abc/folder", "me/tree-m", "abc"),
            ("/me/m/resolve/HEAD/a/b.gguf", "me/m", "main"),
            ("/me/m/raw/abc/a.json", "me/m", "abc"),
        ] {
            let found = resource(path).unwrap();
            assert_eq!((found.repository, found.revision), (repository, revision), "{path}");
        }
        assert!(resource("/me/m/blob/main/a").is_none() && resource("/").is_none());
    }
}
