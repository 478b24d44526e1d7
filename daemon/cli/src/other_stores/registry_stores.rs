//! Programs that keep models as a registry serves them: a manifest for each model, and blobs named by their digests.
//!
//! A manifest is imported as it is, so the model keeps its digest. The programs check a blob's digest only when they
//! download it: the daemon computes it again.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use serde::Deserialize;

use super::found::{FoundFile, FoundModel, Problem};
use super::{data_home, home, read_small, variable};
use crate::local_folder::{Identity, Links};
use crate::{ErrorBody, ErrorCode, Reference};

/// A model with this manifest. `places` says where the blob with a digest may be.
pub(super) fn model(
    name: Reference,
    manifest: Manifest,
    places: impl Fn(Digest) -> Vec<PathBuf>,
) -> FoundModel {
    let (short, size) = (name.short(), manifest.size());
    match blobs(&manifest, places) {
        Ok(files) => FoundModel { size, manifest: Some(manifest), ..FoundModel::new(name, files).pulled() },
        Err(problem) => FoundModel { size, ..FoundModel::unusable(short, problem) },
    }
}

/// The files that a manifest names, each once, in the order of the manifest.
fn blobs(manifest: &Manifest, places: impl Fn(Digest) -> Vec<PathBuf>) -> Result<Vec<FoundFile>, Problem> {
    let mut files: Vec<FoundFile> = Vec::new();
    let mut seen = BTreeSet::new();
    for file in manifest.files().filter(|file| seen.insert(file.digest)) {
        let places = places(file.digest);
        let found = places.iter().find_map(|path| fs::metadata(path).ok().map(|data| (path, data)));
        let Some((source, data)) = found else {
            return Err(Problem::new(places.first().map_or(Path::new(""), PathBuf::as_path), "is missing"));
        };
        if !data.is_file() || data.len() != file.size {
            let what = format!("expected a file of {} bytes, found {}", file.size, data.len());
            return Err(Problem::new(source, what));
        }
        let path = format!("sha256-{}", file.digest.to_hex());
        let found = FoundFile::new(path, source.clone(), Identity::from(&data));
        files.push(FoundFile { claimed: Some(file.digest), ..found });
    }
    Ok(files)
}

fn hex_place(folder: &Path, digest: Digest) -> PathBuf {
    folder.join("sha256").join(digest.to_hex())
}

pub(super) fn docker_places() -> Vec<PathBuf> {
    variable("MODELS_PATH").into_iter().chain(home().map(|home| home.join(".docker/models"))).collect()
}

pub(super) fn is_docker_store(folder: &Path) -> bool {
    folder.join("models.json").is_file() && folder.join("blobs").is_dir()
}

/// `models.json` of Docker Model Runner.
#[derive(Deserialize)]
struct DockerIndex {
    #[serde(default)]
    models: Vec<DockerModel>,
}

#[derive(Deserialize)]
struct DockerModel {
    /// The digest of its manifest.
    id: String,
    #[serde(default)]
    tags: Vec<String>,
}

/// The models of Docker Model Runner: `manifests/sha256/HEX` and `blobs/sha256/HEX`, and `models.json` with the names.
pub(super) fn docker_models(folder: &Path, _links: Links) -> Result<Vec<FoundModel>, ErrorBody> {
    let index = folder.join("models.json");
    let parsed = read_small(&index).and_then(|bytes| serde_json::from_slice::<DockerIndex>(&bytes).ok());
    let Some(parsed) = parsed else {
        let message = format!("{}: expected the list of models in JSON", index.display());
        return Err(ErrorBody::new(ErrorCode::InvalidInput, message));
    };
    let mut found = Vec::new();
    for DockerModel { id, tags } in parsed.models {
        // A model without a tag is what is left of one that was replaced.
        for tag in tags {
            found.push(named(&tag, &tag, read_manifest(&id, &folder.join("manifests")), |digest| {
                vec![hex_place(&folder.join("blobs"), digest)]
            }));
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

fn named(
    shown: &str,
    name: &str,
    manifest: Result<Manifest, Problem>,
    places: impl Fn(Digest) -> Vec<PathBuf>,
) -> FoundModel {
    let parsed = name.parse::<Reference>().map_err(|error| Problem::new(Path::new(name), error.to_string()));
    match parsed.and_then(|name| Ok((name, manifest?))) {
        Ok((name, manifest)) => model(name, manifest, places),
        Err(problem) => FoundModel::unusable(shown.to_owned(), problem),
    }
}

/// The manifest with this digest in a folder of manifests.
fn read_manifest(digest: &str, folder: &Path) -> Result<Manifest, Problem> {
    let digest: Digest =
        digest.parse().map_err(|error| Problem::new(folder, format!("{digest}: {error}")))?;
    let path = hex_place(folder, digest);
    let bytes = read_small(&path).ok_or_else(|| Problem::new(&path, "cannot be read"))?;
    Manifest::parse(bytes).map_err(|error| Problem::new(&path, error.to_string()))
}

pub(super) fn llmman_places() -> Vec<PathBuf> {
    data_home().map(|data| data.join("llmman")).into_iter().collect()
}

pub(super) fn is_llmman_store(folder: &Path) -> bool {
    folder.join("blobs/sha256").is_dir() && llmman_tags(folder).is_some()
}

fn llmman_tags(folder: &Path) -> Option<PathBuf> {
    ["manifests-v2", "manifests"].into_iter().map(|name| folder.join(name)).find(|folder| folder.is_dir())
}

/// The models of llmman: `blobs/sha256/HEX`, and a small file for each tag, with the manifest or its digest.
pub(super) fn llmman_models(folder: &Path, _links: Links) -> Result<Vec<FoundModel>, ErrorBody> {
    let Some(tags) = llmman_tags(folder) else { return Ok(Vec::new()) };
    let tags_folder = crate::local_folder::Folder::list(&tags, Links::Inside)?;
    let blobs = folder.join("blobs");
    let models = tags_folder.paths().filter_map(|path| {
        let (repository, tag) = path.rsplit_once('/')?;
        let text = read_small(&tags.join(path))?;
        let manifest = match std::str::from_utf8(&text)
            .ok()
            .and_then(|text| text.trim().parse::<Digest>().ok())
        {
            Some(digest) => read_manifest(&digest.to_string(), &blobs),
            None => Manifest::parse(text).map_err(|error| Problem::new(&tags.join(path), error.to_string())),
        };
        let name = format!("{repository}:{tag}");
        Some(named(&name, &name, manifest, |digest| vec![hex_place(&blobs, digest)]))
    });
    Ok(models.collect())
}
