//! What Jan says about the files of its models: `model.yml` in the folder of each.
//!
//! A model may be a file elsewhere on the machine, which is its user's own. The files are found by their place, so
//! `model.yml` only says what the content of a file must be, and which models are elsewhere.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use blobd_store_format::digest::Digest;

use crate::local_folder::Folder;

/// What the lists of a folder say.
#[derive(Debug, Default)]
pub(super) struct Claims {
    /// The digests of files, by their paths in the folder.
    pub(super) digests: BTreeMap<String, Digest>,
    /// The files of models that are elsewhere, by the paths of the lists.
    pub(super) elsewhere: BTreeMap<String, PathBuf>,
}

const LIST: &str = "model.yml";
/// The keys of a file and of its digest.
const FILES: [(&str, &str); 2] = [("model_path", "model_sha256"), ("mmproj_path", "mmproj_sha256")];

/// Reads the lists of all models. One that cannot be read says nothing.
pub(super) fn claims(folder: &Folder) -> Claims {
    const MAX_BYTES: u64 = 64 << 10;
    let mut claims = Claims::default();
    let lists: Vec<&str> = folder.paths().filter(|path| path.rsplit('/').next() == Some(LIST)).collect();
    for list in lists {
        let text = folder.read(list, MAX_BYTES).ok().and_then(|bytes| String::from_utf8(bytes).ok());
        let Some(text) = text else { continue };
        for (path, digest) in FILES {
            let Some(path) = value(&text, path).map(PathBuf::from) else { continue };
            match place(folder, &path) {
                Some(place) => {
                    let digest = value(&text, digest).and_then(|hex| Digest::from_hex(hex).ok());
                    claims.digests.extend(digest.map(|digest| (place, digest)));
                }
                None if path.is_absolute() => {
                    claims.elsewhere.entry(list.to_owned()).or_insert(path);
                }
                None => {}
            }
        }
    }
    claims
}

/// The path in the folder of a file that a list names by its path in Jan's data folder, or by its whole path.
fn place(folder: &Folder, path: &Path) -> Option<String> {
    if let Ok(inside) = path.strip_prefix(folder.path()) {
        return inside.to_str().map(str::to_owned);
    }
    let is_relative = !path.is_absolute();
    let found = folder.paths().find(|place| is_relative && folder.path().join(place).ends_with(path));
    found.map(str::to_owned)
}

/// The text of a key of the outermost map, which is all that these lists consist of.
fn value<'t>(yaml: &'t str, key: &str) -> Option<&'t str> {
    let of_key = |line: &'t str| line.strip_prefix(key)?.strip_prefix(':');
    let text = yaml.lines().find_map(of_key)?.trim();
    let quoted = |mark: char| text.strip_prefix(mark).and_then(|text| text.strip_suffix(mark));
    Some(quoted('"').or_else(|| quoted('\'')).unwrap_or(text)).filter(|text| !text.is_empty())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::local_folder::Links;

    #[test]
    fn lists_say_digests_and_which_files_are_elsewhere() {
        let data = tempfile::tempdir().unwrap();
        let models = data.path().join("llamacpp/models");
        let hex = "ab".repeat(32);
        let list = |name: &str, text: String| {
            let folder = models.join("ann").join(name);
            fs::create_dir_all(&folder).unwrap();
            fs::write(folder.join("model.gguf"), "GGUF").unwrap();
            fs::write(folder.join(LIST), text).unwrap();
        };
        list("a", format!("name: a\nmodel_path: llamacpp/models/ann/a/model.gguf\nmodel_sha256: '{hex}'\n"));
        list("b", format!("model_path: \"/elsewhere/b.gguf\"\nmodel_sha256: {hex}\n"));
        list("c", format!("model_path: ../../../c.gguf\nmodel_sha256: {hex}\n"));
        list(
            "d",
            "model_path: llamacpp/models/ann/d/model.gguf\nmodel_sha256: unknown\nmmproj_path:\n".to_owned(),
        );
        let claims = claims(&Folder::list(&models, Links::Inside).unwrap());
        assert_eq!(claims.digests, [("ann/a/model.gguf".to_owned(), Digest::from_hex(&hex).unwrap())].into());
        let elsewhere = [("ann/b/model.yml".to_owned(), PathBuf::from("/elsewhere/b.gguf"))];
        assert_eq!(claims.elsewhere, elsewhere.into());
    }
}
