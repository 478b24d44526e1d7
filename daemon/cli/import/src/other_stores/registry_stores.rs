//! Programs that keep models as a registry serves them: a manifest for each model, and blobs named by their digests.
//!
//! A manifest is imported as it is, so the model keeps its digest. The programs check a blob's digest only when they
//! download it: the daemon computes it again.

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::path::{Path, PathBuf};

use blobd_cli_common::file_error;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use serde::Deserialize;

use super::boundary::Boundary;
use super::found_model::{FoundFile, FoundModel, Problem};
use super::{ScanOptions, data_home, home, read_small, variable};
use crate::local_folder::open_listed;
use crate::{ErrorBody, ErrorCode, Reference};

/// A model with this manifest. `places` says where the blob with a digest may be.
pub(super) fn model(
    boundary: &Boundary,
    name: Reference,
    manifest: Manifest,
    places: impl Fn(Digest) -> Vec<PathBuf>,
) -> FoundModel {
    let (short, size) = (name.short(), manifest.size());
    match blobs(boundary, &manifest, places) {
        Ok(files) => FoundModel { size, manifest: Some(manifest), ..FoundModel::new(name, files).pulled() },
        Err(problem) => FoundModel { size, ..FoundModel::unusable(short, problem) },
    }
}

/// The files that a manifest names, each once, in the order of the manifest.
fn blobs(
    boundary: &Boundary,
    manifest: &Manifest,
    places: impl Fn(Digest) -> Vec<PathBuf>,
) -> Result<Vec<FoundFile>, Problem> {
    let mut files: Vec<FoundFile> = Vec::new();
    let mut seen = BTreeSet::new();
    for file in manifest.files().filter(|file| seen.insert(file.digest)) {
        let places = places(file.digest);
        let Some(place) = places.iter().find(|path| path.symlink_metadata().is_ok()) else {
            let place = places.first().map_or(Path::new(""), PathBuf::as_path);
            let what = format!("is missing: expected a file of {} bytes", file.size);
            return Err(Problem::new(place, what));
        };
        let (source, identity) = boundary.file(place)?;
        if identity.size() != file.size {
            let what = format!("wrong size: expected {} bytes, found {}", file.size, identity.size());
            return Err(Problem::new(place, what));
        }
        let found = FoundFile::new(format!("sha256-{}", file.digest.to_hex()), source, identity);
        files.push(FoundFile { claimed: Some(file.digest), ..found });
    }
    Ok(files)
}

/// The store in a folder that was looked at.
pub(super) fn boundary(folder: &Path, options: &ScanOptions<'_>) -> Result<Boundary, ErrorBody> {
    let failed = |error: std::io::Error| file_error(&folder.display().to_string(), &error);
    Boundary::new(folder, options.links).map_err(failed)
}

/// The manifest in a file.
pub(super) fn read_manifest(boundary: &Boundary, path: &Path) -> Result<Manifest, Problem> {
    let (source, identity) = boundary.file(path)?;
    if identity.size() > Manifest::MAX_BYTES {
        let (expected, found) = (Manifest::MAX_BYTES, identity.size());
        let what = format!("manifest: too long: expected at most {expected} bytes, found {found}");
        return Err(Problem::new(path, what));
    }
    let mut raw = Vec::new();
    let opened = open_listed(&source, identity);
    let read = opened.map(|file| file.take(Manifest::MAX_BYTES).read_to_end(&mut raw));
    match read {
        Ok(Ok(_)) => parsed(path, raw),
        Ok(Err(error)) => Err(Problem::unreadable(path)(error)),
        Err(_) => Err(Problem::new(path, "cannot be read, or changed meanwhile")),
    }
}

fn parsed(path: &Path, raw: Vec<u8>) -> Result<Manifest, Problem> {
    Manifest::parse(raw).map_err(|error| Problem::new(path, error.to_string()))
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
    /// `null` if there are none.
    models: Option<Vec<DockerModel>>,
}

#[derive(Deserialize)]
struct DockerModel {
    /// The digest of its manifest.
    id: String,
    /// `null` if it has none.
    tags: Option<Vec<String>>,
}

/// The models of Docker Model Runner: `manifests/sha256/HEX` and `blobs/sha256/HEX`, and `models.json` with the names.
pub(super) fn docker_models(folder: &Path, options: &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody> {
    let boundary = boundary(folder, options)?;
    let index = folder.join("models.json");
    let parsed = read_small(&index).and_then(|bytes| serde_json::from_slice::<DockerIndex>(&bytes).ok());
    let Some(parsed) = parsed else {
        let message = format!("{}: expected the list of models in JSON", index.display());
        return Err(ErrorBody::new(ErrorCode::InvalidInput, message));
    };
    let mut found = Vec::new();
    for DockerModel { id, tags } in parsed.models.into_iter().flatten() {
        // A model without a tag is what is left of one that was replaced.
        for tag in tags.into_iter().flatten() {
            let manifest = manifest_with_digest(&boundary, &id, &folder.join("manifests"));
            found.push(named(&boundary, &docker_name(&tag), manifest, &folder.join("blobs")));
        }
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// The whole name that a tag means to Docker: without a host one at Docker Hub.
fn docker_name(tag: &str) -> String {
    let is_host = |part: &str| part == "localhost" || part.contains(['.', ':']);
    match tag.split_once('/') {
        Some((first, _)) if !is_host(first) => format!("docker.io/{tag}"),
        _ => tag.to_owned(),
    }
}

/// A model by its name in its program, whose blobs are in a folder.
fn named(boundary: &Boundary, name: &str, manifest: Result<Manifest, Problem>, blobs: &Path) -> FoundModel {
    let parsed = name.parse::<Reference>().map_err(|error| Problem::name(Path::new(name), error));
    match parsed.and_then(|name| Ok((name, manifest?))) {
        Ok((name, manifest)) => model(boundary, name, manifest, |digest| vec![hex_place(blobs, digest)]),
        Err(problem) => FoundModel::unusable(name.to_owned(), problem),
    }
}

/// The manifest with this digest in a folder of manifests.
fn manifest_with_digest(boundary: &Boundary, digest: &str, folder: &Path) -> Result<Manifest, Problem> {
    let parsed = digest.parse::<Digest>();
    let digest = parsed.map_err(|error| Problem::new(folder, error.to_string()))?;
    read_manifest(boundary, &hex_place(folder, digest))
}

pub(super) fn llmman_places() -> Vec<PathBuf> {
    data_home().map(|data| data.join("llmman")).into_iter().collect()
}

pub(super) fn is_llmman_store(folder: &Path) -> bool {
    folder.join("blobs/sha256").is_dir() && llmman_tags(folder).next().is_some()
}

/// The folders of tags. Of a tag that is in both, the first counts.
fn llmman_tags(folder: &Path) -> impl Iterator<Item = PathBuf> {
    ["manifests-v2", "manifests"].into_iter().map(|name| folder.join(name)).filter(|folder| folder.is_dir())
}

/// The models of llmman: `blobs/sha256/HEX`, and a small file for each tag, with the manifest or its digest.
pub(super) fn llmman_models(folder: &Path, options: &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody> {
    let boundary = boundary(folder, options)?;
    let blobs = folder.join("blobs");
    let mut found = BTreeMap::new();
    for tags in llmman_tags(folder) {
        let listed = crate::local_folder::Folder::list(&tags, options.links)?;
        for path in listed.paths() {
            let Some((repository, tag)) = path.rsplit_once('/') else { continue };
            let name = format!("{repository}:{tag}");
            if let Entry::Vacant(place) = found.entry(name)
                && let Some(manifest) = llmman_manifest(&boundary, &tags.join(path), &blobs)
            {
                let model = named(&boundary, place.key(), manifest, &blobs);
                place.insert(model);
            }
        }
    }
    Ok(found.into_values().collect())
}

/// The manifest of a tag. `None` if the file is not that of a tag.
fn llmman_manifest(boundary: &Boundary, tag: &Path, blobs: &Path) -> Option<Result<Manifest, Problem>> {
    let text = boundary.file(tag).ok().and_then(|(source, _)| read_small(&source))?;
    let digest = std::str::from_utf8(&text).ok().and_then(|text| text.trim().parse::<Digest>().ok());
    Some(match digest {
        Some(digest) => manifest_with_digest(boundary, &digest.to_string(), blobs),
        None => parsed(tag, text),
    })
}
