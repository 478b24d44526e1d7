//! What programs say about the files of their models: sizes and digests.
//!
//! A file that its program describes must be as described, or its model is damaged. What is said about a file that is not
//! there says nothing.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use blobd_store_format::digest::Digest;
use blobd_store_format::git_id::GitId;
use serde::Deserialize;

use super::found_model::{FoundFile, Problem};
use crate::local_folder::Folder;

/// What a list of a program says about a file.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) size: Option<u64>,
    pub(super) digest: Option<Digest>,
    /// Git's SHA-1, which a hub gives to files that are not in Git LFS.
    pub(super) git_id: Option<GitId>,
}

impl Claim {
    /// The digest that the hub's ETag gives: the SHA-256 for a file of Git LFS, Git's SHA-1 for any other file. An ETag of
    /// another form gives none.
    pub(super) fn of_etag(etag: &str) -> Self {
        let etag = etag.trim().trim_start_matches("W/").trim_matches('"');
        Self { size: None, digest: Digest::from_hex(etag).ok(), git_id: etag.parse().ok() }
    }

    /// Compares a file with what `list` says about it, and adds the digests that its content must have.
    pub(super) fn check(&self, file: FoundFile, list: &Path) -> Result<FoundFile, Problem> {
        let wrong = |what: String| Problem::new(&file.source, what);
        let list = list.display();
        if let Some(expected) = self.size.filter(|size| *size != file.size) {
            let found = file.size;
            return Err(wrong(format!("wrong size: expected {expected} bytes by {list}, found {found}")));
        }
        if let Some((expected, found)) = self.digest.zip(file.certain).filter(|(listed, own)| listed != own) {
            return Err(wrong(format!(
                "wrong digest: expected {expected} by {list}, found a link to {found}"
            )));
        }
        if let Some((expected, found)) = self.git_id.zip(file.git_id).filter(|(listed, own)| listed != own) {
            return Err(wrong(format!(
                "wrong digest: expected the git object {expected} by {list}, found a link to {found}"
            )));
        }
        let certain = self.digest.or(file.certain);
        let claimed = certain.or(file.claimed);
        Ok(FoundFile { claimed, certain, git_id: self.git_id.or(file.git_id), ..file })
    }
}

/// What the lists in a folder say.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// What is said about files, and where, by their paths in the folder.
    pub(super) files: BTreeMap<String, (Claim, PathBuf)>,
    /// The files of models that are elsewhere, by the paths of the lists.
    pub(super) elsewhere: BTreeMap<String, PathBuf>,
}

impl Claims {
    /// Adds what a list of the folder says about a file. What was said first counts.
    pub(super) fn add(&mut self, file: String, claim: Claim, list: PathBuf) {
        self.files.entry(file).or_insert((claim, list));
    }
}

/// The longest list that is read.
pub(super) const MAX_BYTES: u64 = 64 << 10;

/// The text of a small file of a folder; `None` if it cannot be read.
pub(super) fn text(folder: &Folder, path: &str) -> Option<String> {
    folder.read(path, MAX_BYTES).ok().and_then(|bytes| String::from_utf8(bytes).ok())
}

/// What the hub's library has noted about the files that it has downloaded into a folder (`hf download --local-dir`).
pub(super) fn downloaded(folder: &Folder) -> Claims {
    let mut claims = Claims::default();
    for (path, list) in notes(folder, ".cache/huggingface/download/", ".metadata") {
        if let Some(claim) = downloaded_claim(folder, &path, list) {
            claims.add(path, claim, folder.path().join(list));
        }
    }
    claims
}

/// The SHA-256 that the hub's library has noted about a file in a folder.
pub(crate) fn downloaded_digest(folder: &Folder, path: &str) -> Option<Digest> {
    let starts = path.match_indices('/').map(|(at, _)| at + 1);
    std::iter::once(0).chain(starts).find_map(|start| {
        let (place, file) = path.split_at_checked(start)?;
        let list = format!("{place}.cache/huggingface/download/{file}.metadata");
        downloaded_claim(folder, path, &list)?.digest
    })
}

/// `None` if the file was changed after it was downloaded, as the library decides it.
fn downloaded_claim(folder: &Folder, path: &str, list: &str) -> Option<Claim> {
    /// The times of files may have steps.
    const MARGIN_SECONDS: f64 = 1.0;
    folder.identity(list).ok()?;
    let text = text(folder, list)?;
    let [_commit, etag, downloaded] = text.lines().collect::<Vec<_>>()[..] else { return None };
    let modified = folder.identity(path).ok()?.modified_seconds();
    let is_unchanged = modified - MARGIN_SECONDS <= downloaded.trim().parse::<f64>().ok()?;
    is_unchanged.then(|| Claim::of_etag(etag))
}

/// What exo has noted about the files that it has downloaded.
pub(super) fn of_exo(folder: &Folder) -> Claims {
    #[derive(Deserialize)]
    struct Note {
        etag: Option<String>,
        size: Option<u64>,
    }
    let mut claims = downloaded(folder);
    for (path, list) in notes(folder, ".exo/download_metadata/", ".json") {
        let note = text(folder, list).and_then(|text| serde_json::from_str::<Note>(&text).ok());
        if let Some(Note { etag, size }) = note {
            let claim = Claim { size, ..etag.as_deref().map(Claim::of_etag).unwrap_or_default() };
            claims.add(path, claim, folder.path().join(list));
        }
    }
    claims
}

/// The notes that lie in `place` of a folder below, and the paths of the files that they are about.
fn notes<'f>(folder: &'f Folder, place: &str, end: &str) -> Vec<(String, &'f str)> {
    let about = |list: &'f str| {
        let at = list
            .find(place)
            .filter(|at| *at == 0 || list.get(..*at).is_some_and(|part| part.ends_with('/')))?;
        let file = list.get(at + place.len()..)?.strip_suffix(end)?;
        Some((format!("{}{file}", list.get(..at)?), list))
    };
    folder.paths().filter_map(about).collect()
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::local_folder::Links;

    const NEVER: &str = "99999999999.5";

    fn folder(files: &[(&str, String)]) -> (tempfile::TempDir, Folder) {
        let place = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let file = place.path().join(path);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        }
        let listed = Folder::list(place.path(), Links::Inside).unwrap();
        (place, listed)
    }

    #[test]
    fn etag_is_a_sha_256_or_a_git_object() {
        let (sha256, sha1) = ("ab".repeat(32), "cd".repeat(20));
        for text in [sha256.clone(), format!("\"{sha256}\""), format!("W/\"{sha256}\"\n")] {
            let digest = Digest::from_hex(&sha256).ok();
            assert_eq!(Claim::of_etag(&text), Claim { digest, ..Claim::default() }, "{text}");
        }
        assert_eq!(Claim::of_etag(&sha1).git_id, sha1.parse().ok());
        for text in ["", "\"0x8DC\"", "abc"] {
            assert_eq!(Claim::of_etag(text), Claim::default(), "{text}");
        }
    }

    #[test]
    fn notes_of_the_hubs_library_count_until_the_file_is_changed() {
        let hex = "ab".repeat(32);
        let note = |time: &str| format!("{}\n{hex}\n{time}\n", "0".repeat(40));
        let (_place, folder) = folder(&[
            ("a.gguf", "GGUF".to_owned()),
            ("sub/b.gguf", "GGUF".to_owned()),
            ("own/c.gguf", "GGUF".to_owned()),
            ("old.gguf", "GGUF".to_owned()),
            (".cache/huggingface/download/a.gguf.metadata", note(NEVER)),
            (".cache/huggingface/download/sub/b.gguf.metadata", note(NEVER)),
            (".cache/huggingface/download/old.gguf.metadata", note("1000.0")),
            (".cache/huggingface/download/gone.gguf.metadata", note(NEVER)),
            ("own/.cache/huggingface/download/c.gguf.metadata", note(NEVER)),
        ]);
        let claims = downloaded(&folder);
        let said: Vec<&String> = claims.files.keys().collect();
        assert_eq!(said, ["a.gguf", "own/c.gguf", "sub/b.gguf"]);
        let digest = Digest::from_hex(&hex).unwrap();
        for path in ["a.gguf", "own/c.gguf", "sub/b.gguf"] {
            assert_eq!(downloaded_digest(&folder, path), Some(digest), "{path}");
        }
        for path in ["old.gguf", "gone.gguf", "sub/none.gguf"] {
            assert_eq!(downloaded_digest(&folder, path), None, "{path}");
        }
    }

    #[test]
    fn notes_of_exo_say_size_and_digest() {
        let hex = "ab".repeat(32);
        let note = |path: &str| format!("me--tiny/.exo/download_metadata/{path}.json");
        let (_place, folder) = folder(&[
            (&note("model.safetensors"), format!(r#"{{"etag":"{hex}","size":5}}"#)),
            (&note("sub/config.json"), r#"{"etag":null,"size":2}"#.to_owned()),
            (&note("broken.txt"), "{".to_owned()),
        ]);
        let claims = of_exo(&folder);
        let claim = |size, digest| Claim { size: Some(size), digest, git_id: None };
        let said: Vec<_> = claims.files.iter().map(|(path, (claim, _))| (path.as_str(), *claim)).collect();
        let digest = Digest::from_hex(&hex).ok();
        let expected =
            [("me--tiny/model.safetensors", claim(5, digest)), ("me--tiny/sub/config.json", claim(2, None))];
        assert_eq!(said, expected);
    }
}
