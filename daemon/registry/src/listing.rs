//! Hugging Face's lists of a repository's files.
//!
//! The lists contain paths, sizes and digests from a server: every entry is checked, and one bad entry
//! refuses the list.

use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::manifest::is_file_name;
use serde::Deserialize;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TreeFile {
    pub(super) path: String,
    pub(super) size: u64,
    /// The content's digest; absent for a small file that is stored in git itself.
    pub(super) digest: Option<Digest>,
}

/// The weight files on a page of `/api/models/{repository}/tree/{commit}`.
pub(super) fn parse_tree(json: &[u8]) -> Result<Vec<TreeFile>, String> {
    let entries: Vec<RawEntry> = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    if entries.len() > MAX_ENTRIES {
        return Err(format!("{} entries on a page, at most {MAX_ENTRIES} allowed", entries.len()));
    }
    let mut files = Vec::new();
    for entry in entries {
        if !is_file_name(&entry.path) {
            return Err(format!(
                "path {:?} is not allowed",
                entry.path.chars().take(100).collect::<String>()
            ));
        }
        if entry.kind == "file" && FileFormat::split_name(&entry.path).is_some() {
            files.push(entry.into_file()?);
        }
    }
    Ok(files)
}

/// The commit of a branch or tag, from `/api/models/{repository}/refs`.
pub(super) fn parse_refs(json: &[u8], revision: &str) -> Result<Option<String>, String> {
    #[derive(Deserialize)]
    struct Refs {
        #[serde(default)]
        branches: Vec<Ref>,
        #[serde(default)]
        tags: Vec<Ref>,
    }
    #[derive(Deserialize)]
    struct Ref {
        name: String,
        #[serde(rename = "targetCommit")]
        target_commit: String,
    }
    let refs: Refs = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    let mut all = refs.branches.into_iter().chain(refs.tags);
    match all.find(|known| known.name == revision) {
        Some(found) if is_commit(&found.target_commit) => Ok(Some(found.target_commit)),
        Some(_) => Err(format!("{revision} points to something that is not a commit")),
        None => Ok(None),
    }
}

pub(super) fn is_commit(revision: &str) -> bool {
    revision.len() == 40 && revision.bytes().all(|byte| matches!(byte, b'0'..=b'9' | b'a'..=b'f'))
}

/// A page has at most a thousand entries by default.
const MAX_ENTRIES: usize = 20_000;

#[derive(Deserialize)]
struct RawEntry {
    #[serde(rename = "type")]
    kind: String,
    path: String,
    #[serde(default)]
    size: u64,
    lfs: Option<RawLfs>,
}

#[derive(Deserialize)]
struct RawLfs {
    oid: String,
    size: u64,
}

impl RawEntry {
    fn into_file(self) -> Result<TreeFile, String> {
        let Self { path, size, lfs, .. } = self;
        let Some(lfs) = lfs else { return Ok(TreeFile { path, size, digest: None }) };
        let digest = lfs.oid.parse().or_else(|_| Digest::from_hex(&lfs.oid));
        let digest = digest.map_err(|_no_digest| format!("{path}: oid is not a SHA-256"))?;
        if size != lfs.size {
            return Err(format!("{path}: sizes {size} and {}", lfs.size));
        }
        Ok(TreeFile { path, size, digest: Some(digest) })
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value as Json, json};

    use super::*;

    fn entry(path: &str) -> Json {
        let oid = Digest::of(path.as_bytes()).to_string().replace("sha256:", "");
        json!({ "type": "file", "oid": "1f", "size": 9, "path": path, "lfs": { "oid": oid, "size": 9, "pointerSize": 1 } })
    }

    fn files(paths: &[&str]) -> Vec<TreeFile> {
        let entries: Vec<Json> = paths.iter().map(|path| entry(path)).collect();
        parse_tree(Json::from(entries).to_string().as_bytes()).unwrap()
    }

    fn refused(entry: &Json) -> String {
        parse_tree(json!([entry]).to_string().as_bytes()).expect_err("was accepted")
    }

    #[test]
    fn only_weight_files_are_taken_from_a_tree() {
        let tree = files(&["README.md", "a/x.gguf"]);
        assert_eq!(tree.len(), 1);
        assert_eq!((tree[0].path.as_str(), tree[0].size), ("a/x.gguf", 9));
        assert_eq!(tree[0].digest, Some(Digest::of(b"a/x.gguf")));
        let small =
            parse_tree(br#"[{"type":"file","size":5,"path":"x.gguf"},{"type":"directory","path":"a"}]"#);
        assert_eq!(small.unwrap()[0].digest, None);
    }

    #[test]
    fn hostile_trees_are_refused() {
        for path in
            ["../x.gguf", "/x.gguf", "a/../../x.gguf", "", "a\u{1b}[31m.gguf", "a//b.gguf", "..", "a\\b.gguf"]
        {
            assert!(refused(&entry(path)).starts_with("path "), "{path:?}");
        }
        let with = |pointer: &str, value: Json| {
            let mut entry = entry("x.gguf");
            *entry.pointer_mut(pointer).unwrap() = value;
            refused(&entry)
        };
        assert!(with("/lfs/oid", "../../etc/passwd".into()).contains("not a SHA-256"));
        assert!(with("/lfs/size", 10.into()).contains("sizes 9 and 10"));
        assert!(!with("/size", (-1).into()).is_empty());
        for json in ["", "{}", "<html>", "[1]"] {
            assert!(parse_tree(json.as_bytes()).is_err(), "{json}");
        }
        let many = Json::from(vec![json!({ "type": "file", "path": "x" }); 20_001]).to_string();
        assert!(parse_tree(many.as_bytes()).is_err());
    }

    #[test]
    fn branches_lead_to_commits() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let refs = |target: &str| {
            json!({ "tags": [], "branches": [{ "name": "main", "ref": "x", "targetCommit": target }] })
                .to_string()
        };
        assert_eq!(parse_refs(refs(commit).as_bytes(), "main"), Ok(Some(commit.to_owned())));
        assert_eq!(parse_refs(refs(commit).as_bytes(), "v2"), Ok(None));
        assert!(parse_refs(refs("../../x").as_bytes(), "main").is_err());
        assert!(parse_refs(b"<html>", "main").is_err());
    }
}
