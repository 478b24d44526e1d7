//! RamaLama's store: `TRANSPORT/ORG/MODEL/{refs/TAG.json,blobs/sha256-HEX,snapshots/HASH/FILE}`.

use std::fs;
use std::path::{Path, PathBuf};

use blobd_store_format::derived_name::name_part;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::model_folder::Selection;
use serde::Deserialize;

use super::boundary::Boundary;
use super::file_list::FileList;
use super::found_model::{FoundFile, FoundModel, Problem};
use super::{ScanOptions, data_home, read_small, registry_stores};
use crate::{ErrorBody, Reference};

/// Folders between the store and a model.
const MAX_DEPTH: usize = 8;
/// The most entries of all folders that are looked at.
const MAX_ENTRIES: usize = 100_000;

pub(super) fn default_folders() -> Vec<PathBuf> {
    let own = data_home().map(|data| data.join("ramalama/store"));
    own.into_iter().chain([PathBuf::from("/var/lib/ramalama/store")]).collect()
}

pub(super) fn is_store(folder: &Path) -> bool {
    !model_folders(folder).is_empty()
}

/// What a reference says about the files of a model. Older references are lines of text.
#[derive(Deserialize)]
struct Ref {
    hash: String,
    #[serde(default)]
    files: Vec<RefFile>,
}

#[derive(Deserialize)]
struct RefFile {
    hash: String,
    name: String,
    #[serde(default, rename = "type")]
    kind: String,
}

impl RefFile {
    /// Its path in the model, from which the other parts of an import tell what it is. Only the reference says that of some
    /// files: models of Ollama's registry have names such as `smollm`, and a projector may have any name.
    fn path(&self) -> String {
        let path = match FileFormat::split_name(&self.name) {
            None if self.is_weights() => format!("{}{}", self.name, FileFormat::GGUF.extension()),
            _ => self.name.clone(),
        };
        let (folder, file) =
            path.rsplit_once('/').map_or(("", path.as_str()), |(folder, file)| (folder, file));
        if self.kind != "mmproj" || file.to_ascii_lowercase().contains("mmproj") {
            return path;
        }
        let separator = if folder.is_empty() { "" } else { "/" };
        format!("{folder}{separator}mmproj-{file}")
    }

    fn is_weights(&self) -> bool {
        ["gguf", "safetensor", "mmproj"].contains(&self.kind.as_str())
    }

    /// The SHA-256 of its content, if RamaLama knows it. Files other than weights, and weights that it has not downloaded
    /// from a registry, have that of a name instead.
    fn digest(&self) -> Option<Digest> {
        self.blob().filter(|digest| self.is_weights() && *digest != Digest::of(self.name.as_bytes()))
    }

    /// What its blob is named by.
    fn blob(&self) -> Option<Digest> {
        let hex = self.hash.strip_prefix("sha256").unwrap_or(&self.hash).trim_start_matches(['-', ':']);
        Digest::from_hex(hex).ok()
    }
}

pub(super) fn models(folder: &Path, options: &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody> {
    let boundary = registry_stores::boundary(folder, options)?;
    let mut found = Vec::new();
    for place in model_folders(folder) {
        let parts = place.strip_prefix(folder).unwrap_or(&place).iter();
        let parts: Vec<String> = parts.map(|part| name_part(&part.to_string_lossy())).collect();
        let name = format!("ramalama/{}", parts.join("/"));
        for entry in fs::read_dir(place.join("refs")).into_iter().flatten().flatten() {
            let Ok(file_name) = entry.file_name().into_string() else { continue };
            let tag = name_part(file_name.strip_suffix(".json").unwrap_or(&file_name));
            let parsed = read_small(&entry.path()).and_then(|bytes| parse(&bytes));
            match parsed {
                Some(parsed) => {
                    found.extend(of_ref(&boundary, &place, (&name, &tag), (&parsed, options.selection)));
                }
                None => {
                    let problem =
                        Problem::new(&entry.path(), "wrong content: expected a reference of RamaLama");
                    found.push(FoundModel::unusable(format!("{name}:{tag}"), problem));
                }
            }
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn parse(bytes: &[u8]) -> Option<Ref> {
    if let Ok(parsed) = serde_json::from_slice(bytes) {
        return Some(parsed);
    }
    // A hash, then `NAME---model`, `NAME---chat`, `NAME---mmproj`, or `NAME---` for another file.
    let mut lines = std::str::from_utf8(bytes).ok()?.lines();
    let hash = lines.next()?.to_owned();
    let file = |line: &str| {
        let (name, kind) = line.rsplit_once("---")?;
        let kind = if kind == "model" { "gguf" } else { kind };
        Some(RefFile { hash: String::new(), name: name.to_owned(), kind: kind.to_owned() })
    };
    let files: Vec<RefFile> = lines.filter_map(file).collect();
    (!files.is_empty()).then_some(Ref { hash, files })
}

/// The model of a reference, or one for each GGUF file if there are several.
fn of_ref(
    boundary: &Boundary,
    place: &Path,
    (name, tag): (&str, &str),
    (listed, selection): (&Ref, &Selection),
) -> Vec<FoundModel> {
    let mut files = FileList::new(name.to_owned(), place.to_owned());
    for file in &listed.files {
        files.add(file.path(), found_file(boundary, place, (&listed.hash, file)));
    }
    let mut models = files.models(selection);
    if let [only] = models.as_mut_slice()
        && let Ok(target) = format!("{name}:{tag}").parse::<Reference>()
    {
        match only.target {
            Some(_) => only.rename(target),
            None => only.name = target.short(),
        }
    }
    models
}

fn found_file(
    boundary: &Boundary,
    place: &Path,
    (snapshot, file): (&str, &RefFile),
) -> Result<FoundFile, Problem> {
    let blob = file.blob().map(|digest| place.join("blobs").join(format!("sha256-{}", digest.to_hex())));
    let snapshot = place.join("snapshots").join(snapshot.replace(':', "-")).join(&file.name);
    let path = blob.filter(|blob| blob.exists()).unwrap_or(snapshot);
    let (source, identity) = boundary.file(&path)?;
    let certain = file.digest();
    Ok(FoundFile { claimed: certain, certain, ..FoundFile::new(file.path(), source, identity) })
}

/// The folders with references, sorted. Links are not followed.
fn model_folders(root: &Path) -> Vec<PathBuf> {
    let (mut found, mut left, mut entries) = (Vec::new(), vec![(root.to_owned(), 0)], 0_usize);
    while let Some((folder, depth)) = left.pop() {
        if depth > 0 && folder.join("refs").is_dir() && folder.join("snapshots").is_dir() {
            found.push(folder);
            continue;
        }
        for entry in fs::read_dir(&folder).into_iter().flatten().flatten() {
            entries = entries.saturating_add(1);
            let is_folder = entry.file_type().is_ok_and(|kind| kind.is_dir());
            if is_folder && depth < MAX_DEPTH && entries < MAX_ENTRIES {
                left.push((entry.path(), depth + 1));
            }
        }
    }
    found.sort_unstable();
    found
}
