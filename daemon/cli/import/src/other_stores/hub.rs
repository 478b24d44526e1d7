//! The cache of Hugging Face's libraries: `models--ORG--NAME/{refs,snapshots,blobs,trees}`.
//!
//! The layout is that of huggingface_hub 1.x and 2.x: a file of a snapshot is a link into `blobs/` of its repository, which
//! may itself be a link into `blobs/` of the cache, or it is a regular file where links are not available. A link that leads
//! out of the cache is not followed unasked. Every commit in the cache is imported, that of `main` under the repository's name.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use blobd_cli_common::file_error;
use blobd_cli_common::output::counted;
use blobd_store_format::derived_name::name_part;
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::FileFormat;
use blobd_store_format::model_folder::{FolderFile, ListedFolder, Selection, is_never_taken};
use blobd_store_format::source::{HubFile, PullSource};
use serde::Deserialize;

use super::boundary::Boundary;
use super::claims::Claim;
use super::file_list::FileList;
use super::found_model::{FoundFile, FoundModel, Problem};
use super::{ScanOptions, cache_home, python_variable, read_small};
use crate::ErrorBody;

/// A kind of repositories in the cache.
#[derive(Debug)]
struct Repositories {
    /// What the names of their folders begin with.
    prefix: &'static str,
    /// What the names of their models begin with.
    host: &'static str,
    /// Whether the host serves them by these names.
    is_source: bool,
}

const HUB: Repositories = Repositories { prefix: "models--", host: "hf.co", is_source: true };
/// Lemonade keeps models of ModelScope beside those of the hub. Their revisions are not those of ModelScope.
const MODEL_SCOPE: Repositories =
    Repositories { prefix: "modelscope--models--", host: "modelscope", is_source: false };

/// A repository has an owner and a name, or only a name.
const HUB_NAME_PARTS: usize = 2;
/// The most entries of a snapshot, folders included.
const MAX_ENTRIES: usize = 100_000;
/// The greatest depth of folders.
const MAX_DEPTH: usize = 16;

/// Where the cache may be, in the order in which huggingface_hub looks for it.
pub(super) fn default_folders() -> Vec<PathBuf> {
    let set = ["HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"].into_iter().filter_map(python_variable);
    let home = python_variable("HF_HOME").map(|home| home.join("hub"));
    let cache = python_variable("XDG_CACHE_HOME").or_else(cache_home);
    let own = cache.map(|cache| cache.join("huggingface/hub"));
    set.chain(home).chain(own).collect()
}

/// Whether the folder is a cache, or that of one repository in it.
pub(super) fn is_store(folder: &Path) -> bool {
    HUB.has_any(folder)
}

/// The models of the cache in `folder`, by name. A model that cannot be imported is listed with the reason.
///
/// # Errors
/// That of the folder if it cannot be listed.
pub(super) fn models(folder: &Path, options: &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody> {
    HUB.models(folder, options)
}

/// Whether the cache has models that Lemonade has downloaded from ModelScope.
pub(super) fn is_lemonade_store(folder: &Path) -> bool {
    MODEL_SCOPE.has_any(folder)
}

pub(super) fn lemonade_models(
    folder: &Path,
    options: &ScanOptions<'_>,
) -> Result<Vec<FoundModel>, ErrorBody> {
    MODEL_SCOPE.models(folder, options)
}

impl Repositories {
    fn has_any(&self, folder: &Path) -> bool {
        self.list(folder).is_ok_and(|repositories| !repositories.is_empty())
    }

    fn models(&self, folder: &Path, options: &ScanOptions<'_>) -> Result<Vec<FoundModel>, ErrorBody> {
        let failed = |error: io::Error| file_error(&folder.display().to_string(), &error);
        let root = fs::canonicalize(folder).map_err(failed)?;
        let mut boundary = Boundary::new(&root, options.links).map_err(failed)?;
        if self.is_repository(&root) || self.is_repository(folder) {
            // Where a repository of a cache has its shared files.
            boundary = boundary.with(&root.with_file_name("blobs"));
        }
        let mut found = Vec::new();
        for (name, path) in self.list(folder).map_err(failed)? {
            let has_parts = name.split('/').count() <= HUB_NAME_PARTS;
            let name = format!("{}/{name}", self.host);
            if self.is_source && !has_parts {
                found.push(FoundModel::unusable(
                    name,
                    Problem::name(&path, "wrong name: expected OWNER/NAME"),
                ));
                continue;
            }
            match boundary.folder(&path).and_then(|()| commits(&path)) {
                Ok(commits) => {
                    for commit in commits {
                        match Snapshot::scan(&boundary, &name, &path, &commit) {
                            Ok(snapshot) => {
                                found.extend(snapshot.named_models(self.is_source, options.selection));
                            }
                            Err(problem) => found.push(FoundModel::unusable(name.clone(), problem)),
                        }
                    }
                }
                Err(problem) => found.push(FoundModel::unusable(name, problem)),
            }
        }
        found.sort_by(|a, b| a.name.cmp(&b.name));
        Ok(found)
    }

    /// Whether a path without links is that of one repository.
    fn is_repository(&self, folder: &Path) -> bool {
        let name = folder.file_name().and_then(|name| name.to_str());
        name.is_some_and(|name| name.starts_with(self.prefix)) && folder.join("snapshots").is_dir()
    }

    /// The folders of models, by the names of their repositories: those in a cache, or this one if it is one.
    fn list(&self, folder: &Path) -> io::Result<BTreeMap<String, PathBuf>> {
        let mut found = BTreeMap::new();
        let mut add = |path: PathBuf| {
            let name = path.file_name().and_then(|name| name.to_str());
            if let Some(repository) = name.and_then(|name| name.strip_prefix(self.prefix)) {
                found.insert(repository.replace("--", "/"), path);
            }
        };
        let own = fs::canonicalize(folder)?;
        // A link to a repository has the name, and its target may have another one.
        if let Some(repository) = [own.as_path(), folder].into_iter().find(|place| self.is_repository(place))
        {
            add(repository.to_owned());
            return Ok(found);
        }
        for entry in fs::read_dir(&own)? {
            let entry = entry?;
            let kind = entry.file_type()?;
            // One that was moved to another disk is a link, which may lead nowhere now.
            if kind.is_dir() || (kind.is_symlink() && !entry.path().is_file()) {
                add(entry.path());
            }
        }
        Ok(found)
    }
}

/// A commit, or another snapshot, of a repository that is in the cache.
struct Commit {
    /// The name of its folder in `snapshots/`.
    id: String,
    /// At least one: each gives its models a name.
    revisions: Vec<Revision>,
}

#[derive(Clone, Debug, Default)]
struct Revision {
    /// What tells its models from those of `main`; `None` for `main` itself.
    name: Option<String>,
    /// When the reference to the commit was set.
    updated: Option<SystemTime>,
}

/// The commits of a repository. That of `main`, or the only one, has a revision without a name.
fn commits(repository: &Path) -> Result<Vec<Commit>, Problem> {
    let refs = references(&repository.join("refs"))?;
    let snapshots = repository.join("snapshots");
    let listed = match fs::read_dir(&snapshots) {
        // Nothing was downloaded in full, or everything was moved.
        Err(error) if error.kind() == io::ErrorKind::NotFound => None,
        listed => Some(listed.map_err(Problem::unreadable(&snapshots))?),
    };
    let names = listed.into_iter().flatten().filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut ids: Vec<String> = names.filter(|name| is_snapshot(name)).collect();
    ids.sort_unstable();
    let main = refs.get("main").map(|(id, _)| id.clone());
    if let Some(main) = main.as_ref().filter(|main| !ids.contains(main)) {
        ids.push(main.clone());
    }
    let is_only = ids.len() == 1;
    let commits = ids.into_iter().map(|id| {
        let is_main = main.as_ref() == Some(&id) || main.is_none() && is_only;
        Commit { revisions: revisions(&refs, &id, is_main), id }
    });
    Ok(commits.collect())
}

/// The revisions that mean a commit, pull requests last; without any, its first digits.
fn revisions(refs: &References, id: &str, is_main: bool) -> Vec<Revision> {
    let named = refs.iter().filter(|(name, (of, _))| of == id && *name != HubFile::DEFAULT_REVISION);
    let mut named: Vec<_> = named.map(|(name, (_, updated))| (name, *updated)).collect();
    named.sort_by_key(|(name, _)| name.starts_with("refs/"));
    let mut revisions = Vec::new();
    if is_main {
        let main = refs.get(HubFile::DEFAULT_REVISION).map(|(_, updated)| *updated);
        let updated = main.or_else(|| named.first().map(|(_, updated)| *updated)).flatten();
        revisions.push(Revision { name: None, updated });
    }
    for (name, updated) in named {
        let name = Some(name.replace('/', "-"));
        if revisions.iter().all(|known: &Revision| known.name != name) {
            revisions.push(Revision { name, updated });
        }
    }
    if revisions.is_empty() {
        revisions.push(Revision { name: Some(short(id)), updated: None });
    }
    revisions
}

/// The commit of each branch and tag by its name, and when it was set.
type References = BTreeMap<String, (String, Option<SystemTime>)>;

/// The references in a folder. Those whose content is not the name of a snapshot are left out.
fn references(refs: &Path) -> Result<References, Problem> {
    let (mut found, mut left) = (BTreeMap::new(), vec![(PathBuf::new(), 0)]);
    while let Some((folder, depth)) = left.pop() {
        let path = refs.join(&folder);
        let listed = match fs::read_dir(&path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            listed => listed.map_err(Problem::unreadable(&path))?,
        };
        for entry in listed.take(MAX_ENTRIES).flatten() {
            let place = folder.join(entry.file_name());
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                if depth < MAX_DEPTH {
                    left.push((place, depth + 1));
                }
                continue;
            }
            let text = read_small(&entry.path()).and_then(|bytes| String::from_utf8(bytes).ok());
            let id = text.map(|text| text.trim().to_owned()).filter(|id| is_snapshot(id));
            if let (Some(id), Some(name)) = (id, place.to_str()) {
                let updated = entry.metadata().ok().and_then(|data| data.modified().ok());
                found.insert(name.to_owned(), (id, updated));
            }
        }
    }
    Ok(found)
}

/// Whether a folder of `snapshots/` can have this name. The hub's libraries name them by commits, Lemonade by fingerprints of
/// its own, and who fills a cache by hand by a branch.
fn is_snapshot(name: &str) -> bool {
    const MAX_BYTES: usize = 255;
    let is_allowed = |c: char| !c.is_control() && c != '/';
    (1..=MAX_BYTES).contains(&name.len()) && !name.starts_with('.') && name.chars().all(is_allowed)
}

fn is_commit(text: &str) -> bool {
    !text.is_empty() && text.len() <= 64 && text.bytes().all(|byte| byte.is_ascii_hexdigit())
}

/// The tag of a snapshot that no reference means.
fn short(id: &str) -> String {
    if is_commit(id) { id.get(..12).unwrap_or(id).to_owned() } else { name_part(id) }
}

/// The files of a repository at one commit.
struct Snapshot {
    files: FileList,
    tree: Option<Tree>,
    /// The repository's name at the hub, and the commit.
    repository: String,
    commit: String,
    revisions: Vec<Revision>,
}

/// What the hub said about the files of a commit.
#[derive(Deserialize)]
struct Tree {
    format_version: u64,
    files: BTreeMap<String, TreeFile>,
}

#[derive(Deserialize)]
struct TreeFile {
    size: u64,
    /// Git's SHA-1, which is that of the file only if it is not in Git LFS.
    blob_id: Option<String>,
    lfs_sha256: Option<String>,
    lfs_size: Option<u64>,
}

impl Snapshot {
    fn scan(boundary: &Boundary, name: &str, repository: &Path, commit: &Commit) -> Result<Self, Problem> {
        let snapshot = repository.join("snapshots").join(&commit.id);
        if !snapshot.is_dir() {
            let what = "is missing: expected the folder of the commit that `refs/main` names";
            return Err(Problem::new(&snapshot, what));
        }
        let mut files = FileList::new(name.to_owned(), snapshot.clone());
        let mut folders = vec![(PathBuf::new(), 0)];
        let mut entries = 0_usize;
        while let Some((folder, depth)) = folders.pop() {
            let path = snapshot.join(&folder);
            let listed = fs::read_dir(&path).map_err(Problem::unreadable(&path))?;
            for entry in listed {
                let entry = entry.map_err(Problem::unreadable(&snapshot))?;
                entries = entries.saturating_add(1);
                if entries > MAX_ENTRIES || depth > MAX_DEPTH {
                    let what =
                        format!("expected at most {MAX_ENTRIES} files, in at most {MAX_DEPTH} folders");
                    return Err(
                        Problem::new(&snapshot, what).with_hint("import the folders in it one by one")
                    );
                }
                let place = folder.join(entry.file_name());
                if entry.file_type().map_err(Problem::unreadable(&entry.path()))?.is_dir() {
                    folders.push((place, depth + 1));
                } else {
                    files.add(place.to_string_lossy().into_owned(), file(boundary, &snapshot, &place));
                }
            }
        }
        let list = repository.join("trees").join(format!("{}.json", commit.id));
        let tree = read_tree(&list);
        for (path, listed) in tree.iter().flat_map(|tree| &tree.files) {
            files.check(path, |file| listed.claim().check(file, &list));
        }
        let repository = name.split_once('/').map_or(name, |(_host, repository)| repository).to_owned();
        Ok(Self { files, tree, repository, commit: commit.id.clone(), revisions: commit.revisions.clone() })
    }

    /// The models under the names of each revision. What cannot be imported is there once.
    fn named_models(mut self, is_source: bool, selection: &Selection) -> Vec<FoundModel> {
        let mut found = Vec::new();
        for Revision { name, updated } in std::mem::take(&mut self.revisions) {
            let is_first = found.is_empty();
            self.files.revision = name;
            let models = self.models(is_source, selection).into_iter();
            let models = models.filter(|model| is_first || model.problem.is_none());
            found.extend(models.map(|model| FoundModel { named: updated, ..model }));
        }
        found
    }

    fn models(&self, is_source: bool, selection: &Selection) -> Vec<FoundModel> {
        let mut models = self.files.models(selection);
        for folder in models.iter_mut().filter(|model| !model.is_gguf()) {
            folder.notes.extend(self.missing_files(selection));
        }
        let is_gguf = |model: &FoundModel| model.problem.is_none() && model.is_gguf();
        if models.iter().all(is_gguf)
            && let Some(first) = models.first_mut()
        {
            first.notes.extend(self.left_out());
        }
        let models = models.into_iter();
        let has_source = is_source && is_commit(&self.commit);
        models.map(|model| if has_source { self.with_source(model) } else { model }).collect()
    }

    /// Says which files are in no model, because all models here are GGUF files.
    fn left_out(&self) -> Option<String> {
        let is_left_out = |path: &&str| !is_never_taken(path) && FileFormat::GGUF.stem_of(path).is_none();
        let paths: Vec<&str> = self.files.paths().filter(is_left_out).collect();
        let (first, more) = paths.split_first()?;
        let more = if more.is_empty() {
            String::new()
        } else {
            format!(" and {}", counted(more.len(), "more file"))
        };
        let has_json = paths.iter().any(|path| path.ends_with(".json"));
        let option = if has_json { "; `--include '*'` also makes a folder of all files" } else { "" };
        Some(format!(
            "left out: {first}{more}: of a repository of GGUF files only these are imported{option}"
        ))
    }

    /// The source names the commit, so that a repair gets the same file and the mount shows the snapshot under its name.
    fn with_source(&self, model: FoundModel) -> FoundModel {
        let file = |path: &str| HubFile::new(&self.repository, Some(&self.commit), path).ok();
        match model.files.iter().find_map(|found| file(&found.path)) {
            Some(file) => FoundModel { source: Some(PullSource::Hub(file)), ..model },
            // Only what the reference `main` means has the name at its source.
            None if self.files.revision.is_none() => model.pulled(),
            None => model,
        }
    }

    /// Says how many files of the model are not in the snapshot, which may be what its user wanted.
    fn missing_files(&self, selection: &Selection) -> Option<String> {
        let tree = self.tree.as_ref()?;
        let listed = tree
            .files
            .iter()
            .map(|(path, file)| FolderFile { path: path.clone(), size: file.content_size() });
        let whole = ListedFolder::new(listed, selection).ok()?.plan(&BTreeMap::new()).ok()?;
        let missing = whole.files().iter().filter(|file| !self.files.has(&file.path)).count();
        let (files, are) = (counted(missing, "file"), if missing == 1 { "is" } else { "are" });
        (missing > 0).then(|| format!("partial: {files} of the repository {are} not here"))
    }
}

impl TreeFile {
    fn content_size(&self) -> u64 {
        self.lfs_size.unwrap_or(self.size)
    }

    fn claim(&self) -> Claim {
        let digest = self.lfs_sha256.as_deref().and_then(|hex| Digest::from_hex(hex).ok());
        let git_id = self.blob_id.as_deref().and_then(|id| id.parse().ok()).filter(|_| digest.is_none());
        Claim { size: Some(self.content_size()), digest, git_id }
    }
}

fn read_tree(path: &Path) -> Option<Tree> {
    let tree: Tree = serde_json::from_slice(&read_small(path)?).ok()?;
    (tree.format_version == 1).then_some(tree)
}

/// The file at `place` in a snapshot, which may be a link to a file in the cache.
fn file(boundary: &Boundary, snapshot: &Path, place: &Path) -> Result<FoundFile, Problem> {
    let path = snapshot.join(place);
    let name = place.to_str().ok_or_else(|| Problem::name(&path, "wrong name: expected UTF-8"))?;
    let (source, identity) = boundary.file(&path)?;
    // In `blobs/` of the repository, the files of Git LFS are named by their SHA-256, all others by Git's SHA-1. What a
    // name there links to, in `blobs/` of the cache, has the name of another hash.
    let link = fs::read_link(&path).ok();
    let etag = link.as_deref().and_then(Path::file_name).and_then(|name| name.to_str()).unwrap_or_default();
    let (certain, git_id) = (Digest::from_hex(etag).ok(), etag.parse().ok());
    let found = FoundFile::new(name.to_owned(), source, identity);
    Ok(FoundFile { claimed: certain, certain, git_id, place: path, ..found })
}
