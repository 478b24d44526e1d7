//! Ollama's models folder: `manifests/HOST/NAMESPACE/MODEL/TAG` and `blobs/sha256-…`. A later layout has `manifests-v2/`, in
//! which a tag is a link to its manifest in `blobs/`.
//!
//! A manifest is imported as it is, so the model keeps its digest, and a later pull of the same name finds everything
//! there. Ollama names a blob by its SHA-256, but only checks that when it downloads one: the daemon computes it again.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, Read as _};
use std::path::{Path, PathBuf};

use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::{host, layout};

use super::found::{FoundModel, Problem};
use super::{registry_stores, variable};
use crate::local_folder::Links;
use crate::{ErrorBody, file_error};

/// The folders of tags. What the first has counts.
pub(super) const MANIFESTS: [&str; 2] = ["manifests-v2", "manifests"];
/// Directories between such a folder and a tag.
const DEPTH: usize = 3;
/// The most entries of all directories that are looked at.
const MAX_ENTRIES: usize = 100_000;

/// Where the models may be, the first place first: `OLLAMA_MODELS`, the user's, the system service's.
pub(super) fn default_folders() -> Vec<PathBuf> {
    let set = variable("OLLAMA_MODELS");
    let own = super::home().map(|home| home.join(".ollama/models"));
    set.into_iter().chain(own).chain([PathBuf::from("/usr/share/ollama/.ollama/models")]).collect()
}

pub(super) fn is_store(folder: &Path) -> bool {
    MANIFESTS.iter().any(|name| folder.join(name).is_dir()) && folder.join("blobs").is_dir()
}

/// The models of the store in `folder`, by name. A model that cannot be imported is listed with the reason.
///
/// # Errors
/// That of a directory of manifests that cannot be listed.
pub(super) fn models(folder: &Path, _links: Links) -> Result<Vec<FoundModel>, ErrorBody> {
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    for manifests in MANIFESTS.map(|name| folder.join(name)).iter().filter(|manifests| manifests.is_dir()) {
        let places = tag_places(manifests);
        let places = places.map_err(|error| file_error(&manifests.display().to_string(), &error))?;
        for place in places {
            let Some(name) = name_of(&place).filter(|name| seen.insert(name.short())) else { continue };
            let path = manifests.join(&place);
            found.push(match read_manifest(folder, &path) {
                Ok(manifest) => model(folder, name, manifest),
                Err(problem) => FoundModel::unusable(name.short(), problem),
            });
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// The name of the model with this tag. Ollama's registry has two hosts.
fn name_of(place: &Path) -> Option<Reference> {
    let name = layout::parse_tag_place(place)?;
    let host = host::canonical(name.host());
    Reference::from_parts(host, name.namespace(), name.model(), name.tag()).ok()
}

/// The paths below `manifests` at which tags can be. Links to directories are not followed.
fn tag_places(manifests: &Path) -> io::Result<Vec<PathBuf>> {
    let mut level = vec![PathBuf::new()];
    let mut entries = 0;
    for depth in 0..=DEPTH {
        let mut next = Vec::new();
        for place in &level {
            for entry in fs::read_dir(manifests.join(place))? {
                let entry = entry?;
                entries += 1;
                if entries > MAX_ENTRIES {
                    return Err(io::Error::other(format!("more than {MAX_ENTRIES} entries")));
                }
                if depth == DEPTH || entry.file_type()?.is_dir() {
                    next.push(place.join(entry.file_name()));
                }
            }
        }
        level = next;
    }
    Ok(level)
}

/// Reads the manifest of a tag, which may be a link to that of another tag, or to a blob.
fn read_manifest(folder: &Path, path: &Path) -> Result<Manifest, Problem> {
    let unreadable = Problem::unreadable(path);
    let target = fs::canonicalize(path).map_err(&unreadable)?;
    if !target.starts_with(fs::canonicalize(folder).map_err(&unreadable)?) {
        return Err(Problem::new(path, "is a link to a file outside of the store"));
    }
    let file = File::open(&target).map_err(&unreadable)?;
    if !file.metadata().map_err(&unreadable)?.is_file() {
        return Err(Problem::new(path, "wrong kind of file: expected a manifest"));
    }
    let mut raw = Vec::new();
    file.take(Manifest::MAX_BYTES + 1).read_to_end(&mut raw).map_err(&unreadable)?;
    Manifest::parse(raw).map_err(|error| Problem::new(path, error.to_string()))
}

fn model(folder: &Path, name: Reference, manifest: Manifest) -> FoundModel {
    registry_stores::model(name, manifest, |digest| {
        // Versions before 0.1.18 have a colon in the names.
        let names = [layout::blob_name(digest), format!("sha256:{}", digest.to_hex())];
        names.map(|name| folder.join("blobs").join(name)).into()
    })
}
