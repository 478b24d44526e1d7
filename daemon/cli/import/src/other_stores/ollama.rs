//! Ollama's models folder: `manifests/HOST/NAMESPACE/MODEL/TAG` and `blobs/sha256-…`. A later layout has `manifests-v2/`, in
//! which a tag is a link to its manifest in `blobs/`.
//!
//! A manifest is imported as it is, so the model keeps its digest, and a later pull of the same name finds everything
//! there. Ollama names a blob by its SHA-256, but only checks that when it downloads one: the daemon computes it again.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use blobd_cli_common::file_error;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use blobd_store_format::{host, layout};
use serde::Deserialize;

use super::boundary::Boundary;
use super::found_model::{FoundModel, Problem};
use super::{ScanOptions, registry_stores, variable};
use crate::ErrorBody;

/// The folders of tags. If both have a tag, that of the first counts.
pub(super) const MANIFESTS: [&str; 2] = ["manifests-v2", "manifests"];
/// Directories between such a folder and a tag.
const DEPTH: usize = 3;
/// The most entries of all directories that are looked at.
const MAX_ENTRIES: usize = 100_000;

/// Where the models may be, in this order: `OLLAMA_MODELS`, the user's folder, the system service's.
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
pub(super) fn models(folder: &Path, options: &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody> {
    let boundary = registry_stores::boundary(folder, options)?;
    let (mut found, mut seen) = (Vec::new(), BTreeSet::new());
    for manifests in MANIFESTS.map(|name| folder.join(name)).iter().filter(|manifests| manifests.is_dir()) {
        let places = tag_places(manifests, boundary.follows_all());
        let places = places.map_err(|error| file_error(&manifests.display().to_string(), &error))?;
        for place in places.links {
            let problem = leads_elsewhere(&manifests.join(&place));
            found.push(FoundModel::unusable(place.display().to_string(), problem));
        }
        for place in places.tags {
            let Some(name) = name_of(&place).filter(|name| seen.insert(name.short())) else { continue };
            let path = manifests.join(&place);
            found.push(match registry_stores::read_manifest(&boundary, &path) {
                Ok(manifest) => {
                    let model = model(&boundary, folder, name, manifest);
                    FoundModel { entries: vec![path.clone()], ..with_weights(&path, model) }
                }
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

/// What is below `manifests`.
#[derive(Default)]
struct Places {
    /// Where tags can be.
    tags: Vec<PathBuf>,
    /// Links to directories, which are not followed.
    links: Vec<PathBuf>,
}

/// Links to directories are followed only on request: nothing in Ollama makes them.
fn tag_places(manifests: &Path, follows_links: bool) -> io::Result<Places> {
    let mut places = Places { tags: vec![PathBuf::new()], links: Vec::new() };
    let mut entries = 0;
    for depth in 0..=DEPTH {
        let mut next = Vec::new();
        for place in &places.tags {
            for entry in fs::read_dir(manifests.join(place))? {
                let entry = entry?;
                entries += 1;
                if entries > MAX_ENTRIES {
                    return Err(io::Error::other(format!("more than {MAX_ENTRIES} entries")));
                }
                let (kind, path) = (entry.file_type()?, place.join(entry.file_name()));
                let is_link = || kind.is_symlink() && entry.path().is_dir();
                match depth == DEPTH || kind.is_dir() {
                    true => next.push(path),
                    false if is_link() && follows_links => next.push(path),
                    false if is_link() => places.links.push(path),
                    false => {}
                }
            }
        }
        places.tags = next;
    }
    Ok(places)
}

fn leads_elsewhere(path: &Path) -> Problem {
    let what = "wrong kind of file: expected a directory of manifests, found a link to one";
    Problem::new(path, what).with_hint("`--follow` follows it")
}

/// Leaves a model out whose weights are on another machine.
fn with_weights(path: &Path, model: FoundModel) -> FoundModel {
    let Some(manifest) = &model.manifest else { return model };
    if manifest.layers().iter().any(|layer| ["model", "tensor"].contains(&layer.media_type.component())) {
        return model;
    }
    let config = model.files.first().filter(|file| file.size < MAX_CONFIG_BYTES);
    let config = config.and_then(|file| serde_json::from_slice::<Config>(&file.read().ok()?).ok());
    let host = config.and_then(|config| config.remote_host).filter(|host| !host.is_empty());
    let what = match host {
        Some(host) => format!("has no weights here: it runs at {host}"),
        None if manifest.layers().is_empty() => "has no files".to_owned(),
        None => return model,
    };
    FoundModel::unusable(model.name, Problem::left_out(path, what))
}

const MAX_CONFIG_BYTES: u64 = 1 << 20;

/// The configuration of a model.
#[derive(Deserialize)]
struct Config {
    remote_host: Option<String>,
}

fn model(boundary: &Boundary, folder: &Path, name: Reference, manifest: Manifest) -> FoundModel {
    registry_stores::model(boundary, name, manifest, |digest| blob_places(folder, digest).into())
}

/// Where the blob with a digest may be.
pub(super) fn blob_places(folder: &Path, digest: Digest) -> [PathBuf; 2] {
    // Versions before 0.1.18 have a colon in the names.
    let names = [layout::blob_name(digest), format!("sha256:{}", digest.to_hex())];
    names.map(|name| folder.join("blobs").join(name))
}
