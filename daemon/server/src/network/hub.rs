//! The hub's API, as far as its clients need it to download models that are stored: what a repository has, and its files.
//! All files are announced as stored outside of git, so that their digests are those of their content. No answer mentions
//! Xet, so clients download over HTTP.

use std::collections::BTreeSet;

use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use hyper::StatusCode;
use hyper::header::HeaderName;
use hyper::http::request::Parts;
use serde_json::{Value, json};

use super::answer::{Answer, Answered, parameter};
use crate::ops::{Found, HubFile, Snapshot, View};
use crate::state::Daemon;

const API: &str = "/api/models/";
const RESOLVE: &str = "/resolve/";

const COMMIT: HeaderName = HeaderName::from_static("x-repo-commit");
const LINKED_SIZE: HeaderName = HeaderName::from_static("x-linked-size");
const LINKED_ETAG: HeaderName = HeaderName::from_static("x-linked-etag");
const ERROR_CODE: HeaderName = HeaderName::from_static("x-error-code");
const ERROR_MESSAGE: HeaderName = HeaderName::from_static("x-error-message");

/// `None` if the path is none of the hub's. `path` is decoded.
pub(super) fn answer(daemon: &Daemon, view: &View, request: &Parts, path: &str) -> Option<Answered> {
    let asked = |repository, revision, what| Asked { daemon, view, request, repository, revision, what };
    if let Some(rest) = path.strip_prefix(API) {
        if let Some((repository, rest)) = rest.split_once("/tree/") {
            let (revision, folder) = split_revision(rest);
            return Some(asked(repository, revision, What::Tree(folder)).answer());
        }
        if let Some((repository, revision)) = rest.split_once("/revision/") {
            return Some(asked(repository, revision, What::Model).answer());
        }
        return Some(match rest.strip_suffix("/refs") {
            Some(repository) => asked(repository, MAIN, What::Refs).answer(),
            None => asked(rest, MAIN, What::Model).answer(),
        });
    }
    let (repository, rest) = path.strip_prefix('/')?.split_once(RESOLVE)?;
    let (revision, file) = split_revision(rest);
    Some(asked(repository, revision, What::File(file)).answer())
}

const MAIN: &str = "main";

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
    File(&'p str),
}

struct Asked<'a> {
    daemon: &'a Daemon,
    view: &'a View,
    request: &'a Parts,
    repository: &'a str,
    revision: &'a str,
    what: What<'a>,
}

impl Asked<'_> {
    fn answer(&self) -> Answered {
        let store = &self.daemon.store;
        let tags = self.view.hub_tags(store, self.repository)?;
        if tags.is_empty() {
            let message = format!(
                "{}: no such model is stored here; nothing is fetched from another hub",
                self.repository
            );
            return Ok(missing("RepoNotFound", &message));
        }
        let Some(snapshot) = self.view.snapshot(store, &tags, self.revision)? else {
            let message = format!("{}: no revision {:?}", self.repository, self.revision);
            return Ok(missing("RevisionNotFound", &message));
        };
        match self.what {
            What::Model => Ok(self.model(&snapshot)),
            What::Refs => self.refs(&snapshot, &tags),
            What::Tree(folder) => Ok(self.tree(&snapshot, folder)),
            What::File(path) => self.file(&snapshot, &tags, path),
        }
    }

    fn model(&self, snapshot: &Snapshot) -> Answer {
        let sibling = |(path, file): (&String, &HubFile)| json!({ "rfilename": path, "size": file.size, "blobId": file.git_id().to_string(), "lfs": lfs(file) });
        let siblings: Vec<Value> = snapshot.files.iter().map(sibling).collect();
        let (name, commit) = (self.repository, snapshot.commit());
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
        let branches = json!([{ "name": MAIN, "ref": "refs/heads/main", "targetCommit": commit }]);
        let refs = json!({ "branches": branches, "tags": of_tags, "converts": [] });
        Ok(self.listing(&refs, &commit))
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
                let id = file.git_id().to_string();
                entries.push(json!({
                    "type": "file", "path": path, "size": file.size, "oid": id, "lfs": lfs(file),
                }));
            }
        }
        if entries.is_empty() && folders.is_empty() {
            return missing("EntryNotFound", &format!("{}: no folder {folder:?}", self.repository));
        }
        let commit = snapshot.commit();
        let folder = |path: &String| json!({ "type": "directory", "path": path, "size": 0, "oid": commit });
        let all: Vec<Value> = folders.iter().map(folder).chain(entries).collect();
        self.listing(&json!(all), &commit)
    }

    fn file(&self, snapshot: &Snapshot, tags: &[Reference], path: &str) -> Answered {
        let commit = snapshot.commit();
        let unknown = |message: String| missing("EntryNotFound", &message).with(COMMIT, &commit);
        let Some(file) = snapshot.files.get(path) else {
            return Ok(unknown(format!("{}: no file {path:?}", self.repository)));
        };
        let found = match self.view.file(&self.daemon.store, tags, file.digest)? {
            Found::There(found) => found,
            Found::Missing => return Ok(unknown(format!("{}: {path:?} was removed", self.repository))),
            Found::Withheld(reason) => return Ok(unknown(reason)),
        };
        let etag = format!("\"{}\"", file.digest.to_hex());
        let answer = Answer::file(self.request, found, "application/octet-stream", &etag);
        let answer = answer.with(COMMIT, &commit).with(LINKED_ETAG, &etag);
        let is_by_commit = self.revision == commit;
        Ok(answer.with(LINKED_SIZE, file.size.to_string()).cached(is_by_commit))
    }

    fn listing(&self, value: &Value, commit: &str) -> Answer {
        Answer::json(StatusCode::OK, value).with(COMMIT, commit).cached(self.revision == commit)
    }
}

fn lfs(file: &HubFile) -> Value {
    let hex = Digest::to_hex(file.digest);
    json!({ "oid": hex, "sha256": hex, "size": file.size, "pointerSize": file.pointer().len() })
}

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
}
