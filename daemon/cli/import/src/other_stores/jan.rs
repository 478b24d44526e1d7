//! What Jan says about the files of its models: `model.yml` in the folder of each.
//!
//! A model may be a file elsewhere on the machine, which is its user's own. The files are found by their place, so
//! `model.yml` only says what the content of a file must be, and which models are elsewhere.

use std::path::{Path, PathBuf};

use blobd_store_format::digest::Digest;
use blobd_store_format::file_type::ShardName;

use super::claims::{self, Claim, Claims};
use crate::local_folder::Folder;

const LIST: &str = "model.yml";
/// The keys of a file and of its digest, the model first.
const FILES: [(&str, &str); 2] = [("model_path", "model_sha256"), ("mmproj_path", "mmproj_sha256")];

/// Reads the lists of all models. One that cannot be read says nothing.
pub(super) fn claims(folder: &Folder) -> Claims {
    let mut claims = claims::downloaded(folder);
    let lists: Vec<&str> = folder.paths().filter(|path| path.rsplit('/').next() == Some(LIST)).collect();
    for list in lists {
        let Some(text) = claims::text(folder, list) else { continue };
        let places =
            FILES.map(|(path, _)| value(&text, path).and_then(|path| place(folder, Path::new(path))));
        let size = model_size(folder, &text, &places);
        for ((path, digest), (place, size)) in FILES.into_iter().zip(places.into_iter().zip([size, None])) {
            let Some(path) = value(&text, path).map(PathBuf::from) else { continue };
            match place {
                Some(place) => {
                    let digest = value(&text, digest).and_then(|hex| Digest::from_hex(hex).ok());
                    let claim = Claim { size, digest, git_id: None };
                    claims.add(place, claim, folder.path().join(list));
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

/// The size that the model's file must have. A list says that of all files of the model, with the projector; of shards, it
/// may be that of the first.
fn model_size(folder: &Folder, text: &str, [model, projector]: &[Option<String>; 2]) -> Option<u64> {
    let model = model.as_ref().filter(|model| ShardName::from_path(model).is_none())?;
    let size = |path: &str| folder.identity(path).ok().map(|file| file.size());
    let listed = value(text, "size_bytes")?.parse::<u64>().ok()?;
    let projector = projector.as_deref().and_then(size).unwrap_or_default();
    let is_alone = size(model) == Some(listed);
    Some(if is_alone { listed } else { listed.saturating_sub(projector) })
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
    use std::collections::BTreeMap;
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
        let sizes = "model_path: ann/e/model.gguf\nmmproj_path: ann/e/mmproj.gguf\nsize_bytes: 9\n";
        list("e", sizes.to_owned());
        fs::write(models.join("ann/e/mmproj.gguf"), "GGUF.").unwrap();
        list("f", sizes.replace("ann/e", "ann/f").replace('9', "8"));
        fs::write(models.join("ann/f/mmproj.gguf"), "GGUF.").unwrap();
        let claims = claims(&Folder::list(&models, Links::Inside).unwrap());
        let said = claims.files.iter().map(|(path, (claim, _))| (path.as_str(), (claim.size, claim.digest)));
        let expected = [
            ("ann/a/model.gguf", (None, Digest::from_hex(&hex).ok())),
            ("ann/d/model.gguf", (None, None)),
            ("ann/e/mmproj.gguf", (None, None)),
            ("ann/e/model.gguf", (Some(4), None)),
            ("ann/f/mmproj.gguf", (None, None)),
            ("ann/f/model.gguf", (Some(3), None)),
        ];
        assert_eq!(said.collect::<BTreeMap<_, _>>(), expected.into());
        let elsewhere = [("ann/b/model.yml".to_owned(), PathBuf::from("/elsewhere/b.gguf"))];
        assert_eq!(claims.elsewhere, elsewhere.into());
    }
}
