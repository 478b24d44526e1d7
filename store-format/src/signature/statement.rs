//! The statement that is signed: an in-toto statement that lists the files of a model with their SHA-256.

use std::collections::{BTreeMap, BTreeSet};

use serde::{Deserialize, Serialize};

use super::{SignatureError, SignedFile};
use crate::digest::{Digest, Hasher};
use crate::manifest::is_file_name;
use crate::text::quoted;

/// A file of the model that a statement is compared with.
#[derive(Clone, Copy, Debug)]
pub struct ModelFile<'f> {
    /// Its name in the manifest.
    pub name: Option<&'f str>,
    /// Its path in an export.
    pub path: &'f str,
    pub digest: Digest,
}

/// How a model differs from what was signed.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Difference {
    #[error("file {}: not the signed content: expected {expected}, found {found}", quoted(path))]
    Altered { path: String, expected: Digest, found: Digest },
    #[error("file {}: not signed", quoted(path))]
    Additional { path: String },
}

/// A checked statement.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Statement {
    model: String,
    files: Vec<SignedFile>,
}

impl Statement {
    /// The media type of a statement in its envelope.
    pub const PAYLOAD_TYPE: &str = "application/vnd.in-toto+json";
    const TYPE: &str = "https://in-toto.io/Statement/v1";
    pub(super) const PREDICATE_TYPE: &str = "https://model_signing/signature/v1.0";
    const ALGORITHM: &str = "sha256";
    const METHOD: &str = "files";
    /// The path of a model that is one file.
    const SINGLE: &str = ".";

    /// The statement about a model with these files.
    ///
    /// # Errors
    /// [`SignatureError`] if there are none, or two have one path.
    pub fn new(model: &str, mut files: Vec<SignedFile>) -> Result<Self, SignatureError> {
        // As paths and not as texts: verifiers may compute the digest of the list in this order.
        files.sort_by(|one, other| one.path.split('/').cmp(other.path.split('/')));
        files.dedup();
        Self::checked(model.to_owned(), files)
    }

    fn checked(model: String, files: Vec<SignedFile>) -> Result<Self, SignatureError> {
        let mut seen = BTreeSet::new();
        for SignedFile { path, .. } in &files {
            let is_single = path == Self::SINGLE && files.len() == 1;
            if !is_single && !is_file_name(path) {
                return Err(SignatureError::Path { name: shortened(path) });
            }
            if !seen.insert(path.as_str()) {
                return Err(SignatureError::Twice { name: shortened(path) });
            }
        }
        if files.is_empty() { Err(SignatureError::NoFiles) } else { Ok(Self { model, files }) }
    }

    /// The bytes to sign.
    ///
    /// # Errors
    /// [`SignatureError::Statement`] if they cannot be written as JSON.
    pub fn to_json(&self) -> Result<Vec<u8>, SignatureError> {
        let resource = |file: &SignedFile| Resource {
            name: file.path.clone(),
            algorithm: Self::ALGORITHM.to_owned(),
            digest: file.digest.to_hex(),
        };
        let document = Document {
            kind: Self::TYPE.to_owned(),
            subject: vec![Subject {
                name: self.model.clone(),
                digest: BTreeMap::from([(Self::ALGORITHM.to_owned(), self.root().to_hex())]),
            }],
            predicate_type: Self::PREDICATE_TYPE.to_owned(),
            predicate: Predicate {
                serialization: Serialization {
                    method: Self::METHOD.to_owned(),
                    hash_type: Self::ALGORITHM.to_owned(),
                    allow_symlinks: false,
                    ignore_paths: Vec::new(),
                },
                resources: self.files.iter().map(resource).collect(),
            },
        };
        serde_json::to_vec(&document).map_err(SignatureError::Statement)
    }

    /// Checks the bytes of a statement.
    ///
    /// # Errors
    /// [`SignatureError`] if it is of another kind, lists no files, or lists paths that lead out of the model.
    pub fn parse(json: &[u8]) -> Result<Self, SignatureError> {
        // The kind first: other kinds have other fields.
        let kinds: Kinds = serde_json::from_slice(json).map_err(SignatureError::Statement)?;
        expect("type of the statement", Self::TYPE, &kinds.kind)?;
        expect("type of the predicate", Self::PREDICATE_TYPE, &kinds.predicate_type)?;
        let Document { subject, predicate, .. } =
            serde_json::from_slice(json).map_err(SignatureError::Statement)?;
        expect("method of the statement", Self::METHOD, &predicate.serialization.method)?;
        let [Subject { name, mut digest }] = <[Subject; 1]>::try_from(subject)
            .map_err(|found| SignatureError::Count { what: "subjects", found: found.len() })?;
        let files = predicate.resources.into_iter().map(listed).collect::<Result<Vec<_>, _>>()?;
        let statement = Self::checked(shortened(&name), files)?;
        let (expected, found) =
            (digest.remove(Self::ALGORITHM).unwrap_or_default(), statement.root().to_hex());
        match expected.eq_ignore_ascii_case(&found) {
            true => Ok(statement),
            false => Err(SignatureError::Root { expected: shortened(&expected), found }),
        }
    }

    /// The name that the signer has given the model. Nothing depends on it.
    pub fn model(&self) -> &str {
        &self.model
    }

    pub fn files(&self) -> &[SignedFile] {
        &self.files
    }

    /// The digest of the digests of all files in their order.
    fn root(&self) -> Digest {
        let mut hasher = Hasher::new();
        self.files.iter().for_each(|file| hasher.update(file.digest.as_bytes()));
        hasher.finish()
    }

    /// Checks that each file of a model is signed. Returns the paths of signed files that the model lacks.
    ///
    /// A file that has a path of its own must be signed under it. A name that was made from the model's changes with
    /// that, so such a file is known by its content alone, and so is that of a model with one file.
    ///
    /// # Errors
    /// [`Difference`] for the first file that was not signed, or signed with other content.
    pub fn compare(&self, files: &[ModelFile<'_>]) -> Result<Vec<&str>, Difference> {
        let by_path: BTreeMap<&str, Digest> =
            self.files.iter().map(|file| (file.path.as_str(), file.digest)).collect();
        let mut used = BTreeSet::new();
        let is_single = files.len() == 1;
        for ModelFile { name, path, digest } in files {
            let paths = || name.iter().copied().chain([*path]);
            if let Some(same) = paths().find(|path| by_path.get(path) == Some(digest)) {
                used.insert(same);
                continue;
            }
            let alike = self.files.iter().filter(|file| file.digest == *digest);
            let alike: Vec<_> = alike.map(|file| file.path.as_str()).collect();
            if !alike.is_empty() && (name.is_none() || is_single) {
                used.extend(alike);
                continue;
            }
            // A pull may leave out the folder of a file.
            let has_name = |signed: &&&str| {
                signed.rsplit_once('/').is_some_and(|(_folder, file)| paths().any(|path| path == file))
            };
            if let Some(same) = alike.iter().find(has_name)
                && paths().all(|path| !by_path.contains_key(path))
            {
                used.insert(same);
                continue;
            }
            let path = name.unwrap_or(path).to_owned();
            return Err(match paths().find_map(|path| by_path.get(path)) {
                Some(expected) => Difference::Altered { path, expected: *expected, found: *digest },
                None => Difference::Additional { path },
            });
        }
        Ok(by_path.into_keys().filter(|path| !used.contains(path)).collect())
    }
}

fn listed(Resource { name, algorithm, digest }: Resource) -> Result<SignedFile, SignatureError> {
    expect("digest algorithm", Statement::ALGORITHM, &algorithm)?;
    match Digest::from_hex(&digest.to_ascii_lowercase()) {
        Ok(digest) => Ok(SignedFile { path: name, digest }),
        Err(_malformed) => Err(SignatureError::Digest { name: shortened(&name), found: shortened(&digest) }),
    }
}

pub(super) fn expect(what: &'static str, expected: &'static str, found: &str) -> Result<(), SignatureError> {
    match found == expected {
        true => Ok(()),
        false => Err(SignatureError::Kind { what, expected, found: shortened(found) }),
    }
}

/// A text of a bundle for an error.
fn shortened(text: &str) -> String {
    const MAX_CHARS: usize = 200;
    text.chars().take(MAX_CHARS).collect()
}

#[derive(Deserialize)]
#[serde(rename_all = "camelCase")]
struct Kinds {
    #[serde(rename = "_type")]
    kind: String,
    predicate_type: String,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Document {
    #[serde(rename = "_type")]
    kind: String,
    subject: Vec<Subject>,
    predicate_type: String,
    predicate: Predicate,
}

#[derive(Serialize, Deserialize)]
struct Subject {
    name: String,
    digest: BTreeMap<String, String>,
}

#[derive(Serialize, Deserialize)]
struct Predicate {
    serialization: Serialization,
    resources: Vec<Resource>,
}

#[derive(Serialize, Deserialize)]
struct Serialization {
    method: String,
    hash_type: String,
    #[serde(default)]
    allow_symlinks: bool,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    ignore_paths: Vec<String>,
}

#[derive(Serialize, Deserialize)]
struct Resource {
    name: String,
    algorithm: String,
    digest: String,
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    fn file(path: &str, content: u8) -> SignedFile {
        SignedFile { path: path.to_owned(), digest: Digest::of(&[content]) }
    }

    fn statement(files: &[(&str, u8)]) -> Statement {
        Statement::new("m", files.iter().map(|(path, content)| file(path, *content)).collect()).unwrap()
    }

    fn part<'p>(name: Option<&'p str>, path: &'p str, content: u8) -> ModelFile<'p> {
        ModelFile { name, path, digest: Digest::of(&[content]) }
    }

    #[test]
    fn statement_reads_back_with_its_files_in_the_order_of_paths() {
        let signed = statement(&[("b", 1), ("a/x", 2), ("a-b", 3), ("a/x", 2)]);
        let paths: Vec<_> = signed.files().iter().map(|file| file.path.as_str()).collect();
        assert_eq!(paths, ["a/x", "a-b", "b"]);
        assert_eq!(Statement::parse(&signed.to_json().unwrap()).unwrap(), signed);
    }

    #[test]
    fn model_is_signed_if_each_file_is() {
        let signed = statement(&[("w.safetensors", 1), ("config.json", 2), ("README.md", 3)]);
        let compare = |files: &[ModelFile<'_>]| {
            let missing = signed.compare(files);
            missing.map(|missing| missing.join(" ")).map_err(|difference| difference.to_string())
        };
        let weights = part(Some("w.safetensors"), "w.safetensors", 1);
        let config = part(Some("config.json"), "config.json", 2);
        let readme = part(Some("README.md"), "README.md", 3);
        assert_eq!(compare(&[weights, config, readme]).unwrap(), "");
        assert_eq!(compare(&[weights, config]).unwrap(), "README.md");
        let altered = part(Some("config.json"), "config.json", 9);
        assert!(compare(&[weights, altered]).unwrap_err().contains("config.json: not the signed content"));
        let added = part(Some("evil.py"), "evil.py", 9);
        assert!(compare(&[weights, config, added]).unwrap_err().contains("evil.py: not signed"));
        let moved = part(Some("sub/config.json"), "sub/config.json", 2);
        assert!(compare(&[weights, moved]).is_err(), "a file with a path of its own is signed under it");
        let swapped =
            [part(Some("w.safetensors"), "w.safetensors", 2), part(Some("config.json"), "config.json", 1)];
        assert!(compare(&swapped).is_err());
    }

    #[test]
    fn files_without_a_path_of_their_own_are_known_by_their_content() {
        let signed = statement(&[("old-name.gguf", 1), ("old-name-template", 2)]);
        let renamed = [part(None, "new.gguf", 1), part(None, "new-template", 2)];
        assert_eq!(signed.compare(&renamed).unwrap(), Vec::<&str>::new());
        assert!(signed.compare(&[part(None, "old-name.gguf", 3)]).is_err());
        for single in [".", "sub/x.gguf"] {
            let signed = statement(&[(single, 1)]);
            assert!(signed.compare(&[part(Some("y.gguf"), "y.gguf", 1)]).unwrap().is_empty());
        }
        // A pull of one model of a repository leaves out the folder of its files.
        let folder = statement(&[("q4/x-1.gguf", 1), ("q4/x-2.gguf", 2), ("q8/x-2.gguf", 3)]);
        let shards =
            |second| [part(Some("x-1.gguf"), "x-1.gguf", 1), part(Some("x-2.gguf"), "x-2.gguf", second)];
        assert_eq!(folder.compare(&shards(2)).unwrap(), ["q8/x-2.gguf"]);
        assert!(folder.compare(&shards(1)).is_err());
        let both = statement(&[("config.json", 1), ("sub/config.json", 2), ("x", 3)]);
        let swapped = [part(Some("config.json"), "config.json", 2), part(Some("x"), "x", 3)];
        assert!(both.compare(&swapped).is_err(), "the path is that of another signed file");
        // A file with an own name that is safe only under another path in an export.
        let hidden = statement(&[("_.profile", 1), ("x", 2)]);
        assert!(hidden.compare(&[part(Some(".profile"), "_.profile", 1), part(Some("x"), "x", 2)]).is_ok());
    }

    #[test]
    fn hostile_statements_are_refused() {
        let valid: Value =
            serde_json::from_slice(&statement(&[("a", 1), ("b", 2)]).to_json().unwrap()).unwrap();
        let refusal = |change: &dyn Fn(&mut Value)| {
            let mut document = valid.clone();
            change(&mut document);
            Statement::parse(&serde_json::to_vec(&document).unwrap()).unwrap_err().to_string()
        };
        let resource = |document: &mut Value, key: &str, value: Value| {
            document["predicate"]["resources"][0][key] = value;
        };
        for path in ["../a", "/etc/passwd", "a/../../b", "a//b", "", ".", "..", "a\\b", "a\nb", "./a"] {
            let error = refusal(&|document| resource(document, "name", json!(path)));
            assert!(error.contains("expected a path below the model's folder"), "{path:?}: {error}");
        }
        assert!(refusal(&|document| resource(document, "name", json!("b"))).contains("\"b\": listed twice"));
        assert!(refusal(&|document| resource(document, "name", json!(5))).contains("statement: wrong value"));
        assert!(refusal(&|document| resource(document, "digest", json!("00"))).contains("wrong digest"));
        assert!(
            refusal(&|document| resource(document, "digest", json!("0".repeat(64))))
                .contains("list of files")
        );
        assert!(
            refusal(&|document| resource(document, "algorithm", json!("blake3")))
                .contains("found \"blake3\"")
        );
        assert!(refusal(&|document| document["predicate"]["resources"] = json!([])).contains("no files"));
        assert!(refusal(&|document| document["predicate"] = json!({})).contains("missing field"));
        assert!(
            refusal(&|document| document["predicate"]["serialization"]["method"] = json!("shards"))
                .contains("expected files, found \"shards\"")
        );
        assert!(refusal(&|document| document["_type"] = json!("x")).contains("type of the statement"));
        assert!(
            refusal(&|document| document["predicateType"] = json!("x")).contains("type of the predicate")
        );
        assert!(refusal(&|document| document["subject"] = json!([])).contains("expected 1, found 0"));
        let nested = format!("{}{}", "[".repeat(100_000), "]".repeat(100_000));
        assert!(Statement::parse(nested.as_bytes()).is_err());
    }
}
