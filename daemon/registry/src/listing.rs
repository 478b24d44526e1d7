//! Hugging Face's lists of a repository's files, and which files make a model.
//!
//! The lists contain paths, sizes and digests from a server: every entry is checked, and a bad one is skipped.

use std::collections::BTreeMap;

use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::file_type::split_file_type;
use blobd_store_format::manifest::is_file_name;
use blobd_store_format::source::ShardName;
use serde::Deserialize;
use serde_json::Value;

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct TreeFile {
    pub(super) path: String,
    pub(super) size: u64,
    /// The content's digest; absent for a small file that is stored in git itself.
    pub(super) digest: Option<Digest>,
}

/// The weight files on a page of `/api/models/{repository}/tree/{commit}`. Entries that cannot be pulled, such as one
/// with a path that is not allowed, are skipped: the other files do not depend on them.
pub(super) fn parse_tree(json: &[u8]) -> Result<Vec<TreeFile>, String> {
    let entries: Vec<Value> = serde_json::from_slice(json).map_err(|error| error.to_string())?;
    if entries.len() > MAX_ENTRIES {
        return Err(format!("{} entries on a page, at most {MAX_ENTRIES} allowed", entries.len()));
    }
    let (mut files, mut first_fault, mut is_tree) = (Vec::new(), None, entries.is_empty());
    for entry in entries {
        let entry = match serde_json::from_value::<RawEntry>(entry) {
            Ok(entry) => entry,
            Err(error) => {
                first_fault.get_or_insert(error.to_string());
                continue;
            }
        };
        is_tree = true;
        if entry.kind != "file" || FileFormat::split_name(&entry.path).is_none() {
            continue;
        }
        match entry.into_file() {
            Ok(file) => files.push(file),
            Err(what) => tracing::debug!("an entry of a list of files is skipped: {what}"),
        }
    }
    match first_fault {
        Some(fault) if !is_tree => Err(fault),
        _ => Ok(files),
    }
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

/// The file `path`, or all shards of the model if it is a shard.
pub(super) fn with_shards(files: &[TreeFile], path: &str) -> Result<Vec<TreeFile>, Lack> {
    let by_path: BTreeMap<&str, &TreeFile> = files.iter().map(|file| (file.path.as_str(), file)).collect();
    let paths = ShardName::of(path).map_or_else(|| vec![path.to_owned()], |shard| shard.all());
    let is_there = by_path.contains_key(path);
    let find = |path: String| match by_path.get(path.as_str()) {
        Some(file) => Ok((*file).clone()),
        None if is_there => Err(Lack::Shard(path)),
        None => Err(Lack::File),
    };
    paths.into_iter().map(find).collect()
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Lack {
    File,
    /// The file exists, but this shard of the same model does not.
    Shard(String),
}

/// The file, or the first shard, for a tag: a file name with or without extension, or the quantisation at the
/// end of a name. `latest` follows Hugging Face's rule.
pub(super) fn path_of_tag<'f>(files: &'f [TreeFile], tag: &str) -> Option<&'f str> {
    let heads: Vec<&str> = heads(files).collect();
    let with_end = |end: &str| heads.iter().copied().find(|path| ends_in(path, end));
    if tag.eq_ignore_ascii_case("latest") {
        return with_end("Q4_K_M").or_else(|| with_end("Q4_0")).or_else(|| heads.first().copied());
    }
    with_end(tag)
}

/// The tags that [`path_of_tag`] finds.
pub(super) fn tags(files: &[TreeFile]) -> Vec<String> {
    let tag = |path| {
        let stem = ShardName::stem_of(file_name(path));
        split_file_type(stem).map_or(stem, |(_model, file_type)| file_type).to_owned()
    };
    heads(files).map(tag).collect()
}

/// The projector of a repository that has exactly one; several cannot be told apart.
pub(super) fn projector(files: &[TreeFile]) -> Option<TreeFile> {
    let mut projectors = files.iter().filter(|file| is_projector(&file.path));
    match (projectors.next(), projectors.next()) {
        (Some(only), None) => Some(only.clone()),
        _ => None,
    }
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
        if !is_file_name(&path) {
            return Err(format!("path {:?} is not allowed", path.chars().take(100).collect::<String>()));
        }
        let Some(lfs) = lfs else { return Ok(TreeFile { path, size, digest: None }) };
        let digest = lfs.oid.parse().or_else(|_| Digest::from_hex(&lfs.oid));
        let digest = digest.map_err(|_no_digest| format!("{path}: oid is not a SHA-256"))?;
        if size != lfs.size {
            return Err(format!("{path}: sizes {size} and {}", lfs.size));
        }
        Ok(TreeFile { path, size, digest: Some(digest) })
    }
}

/// One path for each model, that of the first shard. Projectors are not models.
fn heads(files: &[TreeFile]) -> impl Iterator<Item = &str> {
    let is_head =
        |path: &&str| !is_projector(path) && ShardName::of(path).is_none_or(|shard| shard.number() == 1);
    files.iter().map(|file| file.path.as_str()).filter(is_head)
}

fn is_projector(path: &str) -> bool {
    file_name(path).to_ascii_lowercase().contains("mmproj")
}

fn file_name(path: &str) -> &str {
    path.rsplit('/').next().unwrap_or(path)
}

/// Whether a file name ends in a tag. The tag must not begin in the middle of a word.
fn ends_in(path: &str, tag: &str) -> bool {
    let tag = tag.to_ascii_lowercase();
    let name = file_name(path).to_ascii_lowercase();
    let stem = ShardName::stem_of(&name);
    let before = stem.strip_suffix(tag.as_str());
    name == tag || before.is_some_and(|before| before.is_empty() || before.ends_with(['-', '.', '_']))
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

    /// The paths of the files in a list of `entry` and a good one.
    fn beside(entry: Json) -> Vec<String> {
        let tree = Json::from(vec![entry, self::entry("good.gguf")]);
        let files = parse_tree(tree.to_string().as_bytes()).unwrap();
        files.into_iter().map(|file| file.path).collect()
    }

    #[test]
    fn odd_entries_do_not_hide_the_others() {
        let long = format!("{}.gguf", "x".repeat(307));
        for path in [
            "../x.gguf",
            "/x.gguf",
            "a/../../x.gguf",
            "",
            "a\u{1b}[31m.gguf",
            "a//b.gguf",
            "..",
            "a\\b.gguf",
            "notes\\readme.md",
            &long,
        ] {
            assert_eq!(beside(entry(path)), ["good.gguf"], "{path:?}");
        }
        let with = |pointer: &str, value: Json| {
            let mut entry = entry("x.gguf");
            *entry.pointer_mut(pointer).unwrap() = value;
            beside(entry)
        };
        for (pointer, value) in [
            ("/lfs/oid", "../../etc/passwd".into()),
            ("/lfs/size", 10.into()),
            ("/size", (-1).into()),
            ("/size", Json::Null),
            ("/path", 7.into()),
            ("/type", Json::Null),
            ("/lfs", "x".into()),
        ] {
            assert_eq!(with(pointer, value), ["good.gguf"], "{pointer}");
        }
        assert_eq!(beside(json!({ "type": "submodule", "path": "x.gguf", "size": "big" })), ["good.gguf"]);
    }

    #[test]
    fn documents_that_are_not_lists_are_refused() {
        for json in ["", "{}", "<html>", "[1]", "[{}]"] {
            assert!(parse_tree(json.as_bytes()).is_err(), "{json}");
        }
        assert_eq!(parse_tree(b"[]"), Ok(Vec::new()));
        let many = Json::from(vec![json!({ "type": "file", "path": "x" }); 20_001]).to_string();
        assert!(parse_tree(many.as_bytes()).is_err());
    }

    #[test]
    fn shards_are_found_from_any_of_them() {
        let tree =
            files(&["x-00001-of-00002.gguf", "x-00002-of-00002.gguf", "y-00001-of-00002.gguf", "z.gguf"]);
        let found = |path: &str| {
            with_shards(&tree, path)
                .map(|files| files.iter().map(|file| file.path.clone()).collect::<Vec<_>>())
        };
        assert_eq!(
            found("x-00002-of-00002.gguf").unwrap(),
            ["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"]
        );
        assert_eq!(found("z.gguf").unwrap(), ["z.gguf"]);
        assert_eq!(found("y-00001-of-00002.gguf"), Err(Lack::Shard("y-00002-of-00002.gguf".into())));
        assert_eq!(found("absent.gguf"), Err(Lack::File));
    }

    #[test]
    fn tags_are_found_at_the_end_of_names() {
        let tree = files(&[
            "Q4_0/m-Q4_0-00001-of-00002.gguf",
            "Q4_0/m-Q4_0-00002-of-00002.gguf",
            "m-IQ3_M.gguf",
            "m-UD-Q4_K_XL.gguf",
            "mmproj-F16.gguf",
        ]);
        for (tag, path) in [
            ("q4_0", Some("Q4_0/m-Q4_0-00001-of-00002.gguf")),
            ("latest", Some("Q4_0/m-Q4_0-00001-of-00002.gguf")),
            ("m-IQ3_M.gguf", Some("m-IQ3_M.gguf")),
            ("UD-Q4_K_XL", Some("m-UD-Q4_K_XL.gguf")),
            ("3_M", None),
            ("F16", None),
            ("", None),
        ] {
            assert_eq!(path_of_tag(&tree, tag), path, "{tag}");
        }
        assert_eq!(tags(&tree), ["Q4_0", "IQ3_M", "UD-Q4_K_XL"]);
        assert_eq!(projector(&tree).unwrap().path, "mmproj-F16.gguf");
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
