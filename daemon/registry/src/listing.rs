//! Hugging Face's lists of a repository's files.
//!
//! The lists come from a server and are not trusted: every entry is checked. A bad entry does not hide the others: a file
//! with one is refused when a model needs it.

use std::borrow::Cow;

use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::git_id::GitId;
use blobd_store_format::json_error::reason;
use blobd_store_format::manifest::is_file_name;
use blobd_store_format::tensor::TensorFormat;
use serde::Deserialize;
use serde_json::value::RawValue;

/// A file of a repository.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TreeFile {
    pub path: String,
    pub size: u64,
    /// The content's digest; absent for a small file that is stored in git itself.
    pub digest: Option<Digest>,
    /// Git's ID of the content; only for a file without a digest.
    pub git_id: Option<GitId>,
    /// What is wrong with its entry. The file is not left out of a model in silence: it is refused when it is chosen.
    pub fault: Option<String>,
}

impl TreeFile {
    /// The format by the file's name, if it is one whose files are split.
    pub(super) fn format(&self) -> Option<TensorFormat> {
        FileFormat::split_name(&self.path).map(|(_stem, format)| format.tensor_format())
    }
}

/// The files on a page of `/api/models/{repository}/tree/{commit}`. Entries that cannot be pulled, such as one
/// with a path that is not allowed, are skipped: the other files do not depend on them.
pub(super) fn parse_tree(json: &[u8]) -> Result<Vec<TreeFile>, String> {
    let json = text_of(json);
    // Each entry is parsed separately, because one of them may contain text that is not Unicode.
    let entries: Vec<&RawValue> = serde_json::from_str(&json).map_err(|error| reason(&error))?;
    if entries.len() > MAX_ENTRIES {
        return Err(format!(
            "too many entries on a page: expected at most {MAX_ENTRIES}, found {}",
            entries.len()
        ));
    }
    let (mut files, mut first_fault, mut is_tree) = (Vec::new(), None, entries.is_empty());
    for entry in entries {
        let entry = match serde_json::from_str::<RawEntry>(entry.get()) {
            Ok(entry) => entry,
            Err(error) => {
                files.extend(unreadable_file(entry, reason(&error)));
                first_fault.get_or_insert(reason(&error));
                continue;
            }
        };
        is_tree = true;
        if entry.kind != "file" {
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

/// The commit of a branch, a tag or a pull request, from `/api/models/{repository}/refs`.
pub(super) fn parse_refs(json: &[u8], revision: &str) -> Result<Option<String>, String> {
    #[derive(Deserialize)]
    struct Refs<'j> {
        #[serde(default, borrow)]
        branches: Vec<&'j RawValue>,
        #[serde(default, borrow)]
        tags: Vec<&'j RawValue>,
        #[serde(default, borrow)]
        converts: Vec<&'j RawValue>,
        #[serde(default, borrow, rename = "pullRequests")]
        pull_requests: Vec<&'j RawValue>,
    }
    #[derive(Deserialize)]
    struct Ref {
        name: String,
        /// The whole name, such as `refs/pr/1`.
        #[serde(rename = "ref")]
        full_name: Option<String>,
        #[serde(rename = "targetCommit")]
        target_commit: String,
    }
    let json = text_of(json);
    let refs: Refs<'_> = serde_json::from_str(&json).map_err(|error| reason(&error))?;
    let all = [refs.branches, refs.tags, refs.converts, refs.pull_requests].into_iter().flatten();
    let mut all = all.filter_map(|known| serde_json::from_str::<Ref>(known.get()).ok());
    match all.find(|known| known.name == revision || known.full_name.as_deref() == Some(revision)) {
        Some(found) if is_commit(&found.target_commit) => Ok(Some(found.target_commit)),
        Some(_) => Err(format!("{revision} points to something that is not a commit")),
        None => Ok(None),
    }
}

/// The document as text without a byte order mark. Invalid UTF-8 is replaced, because the other entries are still
/// usable.
fn text_of(json: &[u8]) -> Cow<'_, str> {
    const BYTE_ORDER_MARK: &[u8] = b"\xef\xbb\xbf";
    String::from_utf8_lossy(json.strip_prefix(BYTE_ORDER_MARK).unwrap_or(json))
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
    oid: String,
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
        let Self { path, size, lfs, oid, .. } = self;
        // A name that is not UTF-8 cannot be requested.
        if !may_be_listed(&path) || path.contains(char::REPLACEMENT_CHARACTER) {
            return Err(format!("path {:?} is not allowed", path.chars().take(100).collect::<String>()));
        }
        let file = TreeFile { path, size, digest: None, git_id: None, fault: None };
        let Some(lfs) = lfs else {
            // Mirrors may leave it out.
            let is_absent = oid.is_empty();
            let git_id = oid.parse().ok();
            let fault = (git_id.is_none() && !is_absent).then(|| wrong("oid", "40 hexadecimal digits", &oid));
            return Ok(TreeFile { git_id, fault, ..file });
        };
        if size != lfs.size {
            let fault = Some(wrong("lfs.size", &format!("{size} as in size"), &lfs.size.to_string()));
            return Ok(TreeFile { fault, ..file });
        }
        let digest = lfs.oid.parse().or_else(|_| Digest::from_hex(&lfs.oid)).ok();
        let fault =
            digest.is_none().then(|| wrong("lfs.oid", "the 64 hexadecimal digits of a SHA-256", &lfs.oid));
        Ok(TreeFile { digest, fault, ..file })
    }
}

/// The file that an entry is about whose other values cannot be read.
fn unreadable_file(entry: &RawValue, fault: String) -> Option<TreeFile> {
    #[derive(Deserialize)]
    struct Named {
        #[serde(rename = "type")]
        kind: String,
        path: String,
    }
    let Named { kind, path } = serde_json::from_str(entry.get()).ok()?;
    let is_file = kind == "file" && may_be_listed(&path) && !path.contains(char::REPLACEMENT_CHARACTER);
    is_file.then_some(TreeFile { path, size: 0, digest: None, git_id: None, fault: Some(fault) })
}

/// What is wrong with a value of an entry.
fn wrong(key: &str, expected: &str, found: &str) -> String {
    let found: String = found.chars().take(100).collect();
    format!("wrong {key}: expected {expected}, found {found:?}")
}

/// Whether a path is that of a file that can be pulled, or only too long for that. Such a file of a folder must be known,
/// so that the model is refused and not pulled without it.
fn may_be_listed(path: &str) -> bool {
    is_file_name(path) || (path.split('/').all(is_file_name) && FileFormat::GGUF.stem_of(path).is_none())
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
    fn files_of_a_tree_have_the_digest_that_the_hub_knows() {
        let tree = files(&["a/x.gguf"]);
        assert_eq!((tree[0].path.as_str(), tree[0].size), ("a/x.gguf", 9));
        assert_eq!((tree[0].digest, tree[0].git_id), (Some(Digest::of(b"a/x.gguf")), None));
        let id = GitId::of(b"# A");
        let in_git =
            |oid: &str| json!([{ "type": "file", "oid": oid, "size": 3, "path": "README.md" }]).to_string();
        let readme = |oid: &str| parse_tree(in_git(oid).as_bytes()).unwrap().remove(0);
        assert_eq!((readme(&id.to_string()).digest, readme(&id.to_string()).git_id), (None, Some(id)));
        assert_eq!(readme("1f").git_id, None);
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
    fn invalid_entries_do_not_hide_the_others() {
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
        for (pointer, value) in [("/path", 7.into()), ("/type", Json::Null)] {
            assert_eq!(with(pointer, value), ["good.gguf"], "{pointer}");
        }
        assert_eq!(beside(json!({ "type": "submodule", "path": "x.gguf", "size": "big" })), ["good.gguf"]);
    }

    #[test]
    fn file_with_a_wrong_entry_is_listed_with_what_is_wrong() {
        let fault = |entry: &Json| {
            let tree = Json::from(vec![entry.clone(), self::entry("good.gguf")]).to_string();
            let files = parse_tree(tree.as_bytes()).unwrap();
            assert_eq!((files[0].path.as_str(), files[0].digest, files[0].git_id), ("x.gguf", None, None));
            assert_eq!((files.len(), &files[1].fault), (2, &None));
            files[0].fault.clone().unwrap()
        };
        for (pointer, value, expected) in [
            ("/lfs/oid", "../../etc/passwd".into(), "SHA-256, found \"../../etc/passwd\""),
            ("/lfs/size", 10.into(), "wrong lfs.size: expected 9 as in size, found \"10\""),
            ("/size", (-1).into(), "wrong value: expected"),
            ("/size", Json::Null, "wrong value: expected"),
            ("/lfs", "x".into(), "wrong value: expected"),
        ] {
            let mut wrong = entry("x.gguf");
            *wrong.pointer_mut(pointer).unwrap() = value;
            let fault = fault(&wrong);
            assert!(fault.contains(expected), "{pointer}: {fault}");
        }
        let in_git = json!({ "type": "file", "oid": "1f", "size": 3, "path": "x.gguf" });
        assert_eq!(fault(&in_git), "wrong oid: expected 40 hexadecimal digits, found \"1f\"");
    }

    #[test]
    fn path_that_is_too_long_is_known_unless_the_file_is_a_model_of_its_own() {
        let long = format!("{}/z.json", "d".repeat(255));
        assert_eq!(beside(entry(&long)), [&long, "good.gguf"]);
        assert_eq!(beside(entry(&long.replace(".json", ".gguf"))), ["good.gguf"]);
    }

    #[test]
    fn text_that_is_not_unicode_does_not_hide_the_other_files() {
        let good = entry("good.gguf").to_string();
        let with = |path: &[u8]| {
            let odd = [br#"{"type":"file","size":1,"path":""#, path, br#""}"#].concat();
            let json = [b"\xef\xbb\xbf[", &odd[..], b",", good.as_bytes(), b"]"].concat();
            let files = parse_tree(&json).unwrap();
            files.into_iter().map(|file| file.path).collect::<Vec<_>>()
        };
        for path in [&br"caf\ud800.md"[..], br"caf\ud800.gguf", br"\udc00\ud800.gguf", b"caf\xe9.md"] {
            assert_eq!(with(path), ["good.gguf"], "{}", path.escape_ascii());
        }
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
    fn branches_lead_to_commits() {
        let commit = "0123456789abcdef0123456789abcdef01234567";
        let refs = |target: &str| {
            json!({ "tags": [], "branches": [{ "name": "main", "ref": "x", "targetCommit": target }] })
                .to_string()
        };
        assert_eq!(parse_refs(refs(commit).as_bytes(), "main"), Ok(Some(commit.to_owned())));
        assert_eq!(parse_refs(refs(commit).as_bytes(), "v2"), Ok(None));
        let odd = refs(commit).replace("[]", r#"[{"name":"\ud800","targetCommit":"x"}]"#);
        assert_eq!(parse_refs(format!("\u{feff}{odd}").as_bytes(), "main"), Ok(Some(commit.to_owned())));
        assert!(parse_refs(refs("../../x").as_bytes(), "main").is_err());
        assert!(parse_refs(b"<html>", "main").is_err());
    }
}
