//! llama.cpp's own folder of downloads: `ORG_REPO_FILE.gguf`, and for each model `manifest=ORG=REPO=TAG.json`.
//!
//! Newer versions use the cache of Hugging Face's libraries, in the same folder or in theirs.

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

use blobd_client::protocol::request::SidecarComponent;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_type::ShardName;
use blobd_store_format::model_file::check_paths;
use blobd_store_format::model_folder::{Selection, is_never_taken};
use blobd_store_format::source::PullSource;
use serde::Deserialize;

use super::claims::Claim;
use super::file_list::FileList;
use super::folders::{self, LLAMA_CPP};
use super::found_model::{FoundFile, FoundModel, Problem, not_of_folder};
use super::hub;
use super::{ScanOptions, read_small, variable};
use crate::local_folder::Folder;
use crate::{ErrorBody, Reference};

pub(super) fn default_folders() -> Vec<PathBuf> {
    let own = super::cache_home().map(|cache| cache.join("llama.cpp"));
    variable("LLAMA_CACHE").into_iter().chain(own).chain(hub::default_folders()).collect()
}

pub(super) fn is_store(folder: &Path) -> bool {
    hub::is_store(folder) || folders::has_model(folder, &LLAMA_CPP)
}

/// What llama.cpp has noted about a model that it has downloaded by its name.
#[derive(Deserialize)]
struct Manifest {
    #[serde(rename = "ggufFile")]
    model: Option<RepositoryFile>,
    #[serde(rename = "mmprojFile")]
    projector: Option<RepositoryFile>,
}

#[derive(Deserialize)]
struct RepositoryFile {
    rfilename: String,
    size: Option<u64>,
    lfs: Option<Lfs>,
}

#[derive(Deserialize)]
struct Lfs {
    sha256: Option<String>,
    size: Option<u64>,
}

impl RepositoryFile {
    fn claim(&self) -> Claim {
        let lfs = self.lfs.as_ref();
        let digest = lfs.and_then(|lfs| Digest::from_hex(lfs.sha256.as_deref()?).ok());
        Claim { size: lfs.and_then(|lfs| lfs.size).or(self.size), digest, git_id: None }
    }
}

/// The models of the folder: those of the hub's layout, those with a manifest, and the other files by their names.
pub(super) fn models(root: &Path, options: &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody> {
    let mut models = if hub::is_store(root) { hub::models(root, options)? } else { Vec::new() };
    // The cache of the hub has models for other programs, too.
    models.retain(FoundModel::is_gguf);
    let folder = Folder::list(root, options.links)?;
    let mut taken = BTreeSet::new();
    for path in folder.paths().filter(|path| path.starts_with("manifest=")) {
        let named = path.strip_suffix(".json").map(|name| name.split('=').collect::<Vec<_>>());
        let Some(["manifest", org, repository, tag]) = named.as_deref() else { continue };
        let place = root.join(path);
        let manifest = read_small(&place).and_then(|bytes| serde_json::from_slice(&bytes).ok());
        let name = format!("hf.co/{org}/{repository}:{tag}");
        models.push(match manifest {
            Some(manifest) => {
                let listed = listed_files(&format!("{org}_{repository}_"), &manifest);
                // The files of a damaged model do not become models of their own either.
                taken.extend(listed.iter().map(|file| file.path.clone()));
                let model = of_manifest(&folder, &name, (&manifest, &listed), &place);
                FoundModel { entries: vec![place], ..model }
            }
            None => {
                FoundModel::unusable(name, Problem::new(&place, "wrong content: expected a manifest in JSON"))
            }
        });
    }
    models.extend(without_manifest(&folder, &taken, options.selection));
    Ok(models)
}

/// A file that a manifest lists.
struct ListedFile {
    path: String,
    /// Its path in the repository, which the model's files are called by.
    original: String,
    component: Option<SidecarComponent>,
    claim: Claim,
}

/// The files of a manifest, by their paths in the folder. Of shards, the manifest describes the first.
fn listed_files(start: &str, manifest: &Manifest) -> Vec<ListedFile> {
    let parts = [(&manifest.model, None), (&manifest.projector, Some(SidecarComponent::Projector))];
    let of_part = |(listed, component): (&Option<RepositoryFile>, Option<SidecarComponent>)| {
        let listed = listed.as_ref()?;
        let first = &listed.rfilename;
        let all = ShardName::from_path(first).map_or_else(|| vec![first.clone()], |shard| shard.all());
        let files = all.into_iter().map(|original| {
            let path = format!("{start}{}", original.replace('/', "_"));
            let claim = if original == *first { listed.claim() } else { Claim::default() };
            let original = if check_paths([original.as_str()]).is_ok() { original } else { path.clone() };
            ListedFile { path, original, component, claim }
        });
        Some(files.collect::<Vec<_>>())
    };
    parts.into_iter().filter_map(of_part).flatten().collect()
}

fn of_manifest(
    folder: &Folder,
    name: &str,
    (manifest, listed): (&Manifest, &[ListedFile]),
    list: &Path,
) -> FoundModel {
    let mut files = Vec::new();
    for ListedFile { path, original, component, claim } in listed {
        match file(folder, path).and_then(|file| claim.check(file, list)) {
            Ok(file) => files.push(FoundFile { path: original.clone(), component: *component, ..file }),
            Err(problem) => return FoundModel::unusable(name.to_owned(), problem),
        }
    }
    let named =
        name.parse::<Reference>().map_err(|error| Problem::name(folder.path(), format!("{name}: {error}")));
    match named {
        Ok(target) if manifest.model.is_some() => FoundModel::new(target, files).pulled(),
        Ok(_) => {
            FoundModel::unusable(name.to_owned(), Problem::new(folder.path(), "its manifest names no model"))
        }
        Err(problem) => FoundModel::unusable(name.to_owned(), problem),
    }
}

fn file(folder: &Folder, path: &str) -> Result<FoundFile, Problem> {
    let place = folder.path().join(path);
    match folder.identity(path) {
        Ok(identity) => Ok(FoundFile::new(path.to_owned(), place, identity)),
        Err("nothing") => Err(Problem::new(&place, "is missing: expected a file")),
        Err(found) => Err(not_of_folder(&place, found)),
    }
}

/// Files that no manifest names. An older record beside a file says where it is from.
fn without_manifest(folder: &Folder, taken: &BTreeSet<String>, selection: &Selection) -> Vec<FoundModel> {
    let mut lists: BTreeMap<String, FileList> = BTreeMap::new();
    let paths = folder.paths().filter(|path| !path.contains('/') && !is_never_taken(path));
    for path in paths.filter(|path| !taken.contains(*path)) {
        let Some((_, name)) = LLAMA_CPP.place_of(path) else { continue };
        let name = format!("{}/{name}", LLAMA_CPP.prefix());
        let list = lists.entry(name.clone());
        let list = list.or_insert_with(|| FileList::new(name, folder.path().to_owned()));
        list.add(path.to_owned(), file(folder, path));
    }
    let models = lists.into_values().flat_map(|list| folders::with_plain_tag(list.models(selection)));
    models.map(|model| with_record(folder, model)).collect()
}

#[derive(Deserialize)]
struct ImportedModels {
    url: String,
}

fn with_record(folder: &Folder, mut model: FoundModel) -> FoundModel {
    let first = model.files.first().map(|file| format!("{}.json", file.path)).unwrap_or_default();
    let record = read_small(&folder.path().join(first));
    let record = record.and_then(|bytes| serde_json::from_slice::<ImportedModels>(&bytes).ok());
    let source = record.and_then(|record| record.url.parse::<PullSource>().ok());
    if let Some((source, name)) = source.and_then(|source| Some((source.clone(), source.name().ok()?))) {
        model.rename(name);
        model.source = Some(source);
    }
    model
}
