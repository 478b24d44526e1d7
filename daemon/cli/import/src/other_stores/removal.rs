//! How a moved model is taken out of its program's store, so that what is left there stays whole.
//!
//! A model has entries, by which its program finds it (a manifest, the links of a snapshot), links between them and its
//! files, and files. They are deleted in this order. A link or a file stays as long as anything else leads to it: that is
//! looked up in the store itself, not in what the program has noted about it.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::MetadataExt as _;
use std::path::{Path, PathBuf};

use blobd_cli_common::file_error;
use blobd_store_format::manifest::Manifest;
use rustix::fs::{CWD, FlockOperation, Mode, OFlags, flock, openat};

use super::{ollama, read_small};
use crate::local_folder::Inode;
use crate::{ErrorBody, ErrorCode};

/// The variables of a process that are paths.
type Variables<'v> = dyn Fn(&str) -> Option<PathBuf> + 'v;

/// How the models of a program are deleted.
#[derive(Debug)]
pub(crate) struct Removal {
    /// The links and files that anything in the store leads to, apart from the paths in the set.
    pub(crate) used: fn(&Path, gone: &BTreeSet<PathBuf>) -> Result<BTreeSet<Inode>, ErrorBody>,
    /// The file that the program locks while it downloads a file to this path.
    lock_of: fn(&Path, &Path) -> Option<PathBuf>,
    /// Deletes what says something about these paths, which are deleted, and folders that are empty now.
    pub(crate) tidy: fn(&Path, paths: &[&Path]),
    /// The names of the program's processes, if it may not run while its models are deleted.
    pub(crate) processes: &'static [&'static str],
    /// The store that a process with these variables uses; `None` if that cannot be told.
    pub(crate) store_of: fn(&Variables<'_>) -> Option<PathBuf>,
}

pub(super) const OLLAMA: Removal = Removal {
    used: used_by_manifests,
    lock_of: |_, _| None,
    tidy: tidy_ollama,
    processes: &["ollama"],
    store_of: |variable| {
        variable("OLLAMA_MODELS").or_else(|| variable("HOME").map(|home| home.join(".ollama/models")))
    },
};

pub(super) const HUB: Removal =
    Removal { used: linked, lock_of: hub_lock, tidy: tidy_hub, processes: &[], store_of: |_| None };

pub(super) const FILES: Removal =
    Removal { used: linked, lock_of: |_, _| None, tidy: tidy_files, processes: &[], store_of: |_| None };

pub(super) const LM_STUDIO: Removal = Removal { processes: &["lm-studio", "LM Studio", "llmster"], ..FILES };

/// llama.cpp's own files, or the cache of the hub.
pub(super) const LLAMA_CPP: Removal = Removal {
    tidy: |root, paths| {
        // What llama.cpp has noted about a download.
        for path in paths.iter().filter(|path| path.parent() == Some(root)) {
            [".etag", ".json"].iter().for_each(|ending| delete(&with_ending(path, ending)));
        }
        tidy_hub(root, paths);
    },
    ..HUB
};

/// The most entries of a store that are looked at.
const MAX_ENTRIES: usize = 1_000_000;

/// Calls `visit` with every path below a folder that is not itself a folder. Links are not followed. Returns the folders,
/// each before those in it.
fn walk(root: &Path, mut visit: impl FnMut(&fs::DirEntry)) -> io::Result<Vec<PathBuf>> {
    let (mut left, mut entries, mut folders) = (vec![root.to_owned()], 0_usize, Vec::new());
    while let Some(folder) = left.pop() {
        folders.push(folder.clone());
        let listed = match fs::read_dir(&folder) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => continue,
            listed => listed?,
        };
        for entry in listed {
            let entry = entry?;
            entries = entries.saturating_add(1);
            if entries > MAX_ENTRIES {
                return Err(io::Error::other(format!("more than {MAX_ENTRIES} files")));
            }
            match entry.file_type()?.is_dir() {
                true => left.push(entry.path()),
                false => visit(&entry),
            }
        }
    }
    Ok(folders)
}

/// What the links of a store lead to, link by link.
fn linked(root: &Path, gone: &BTreeSet<PathBuf>) -> Result<BTreeSet<Inode>, ErrorBody> {
    let mut used = BTreeSet::new();
    let walked = walk(root, |entry| {
        if entry.file_type().is_ok_and(|kind| kind.is_symlink()) && !gone.contains(&entry.path()) {
            add_targets(&entry.path(), &mut used);
        }
    });
    walked.map_err(|error| file_error(&root.display().to_string(), &error))?;
    Ok(used)
}

/// Adds the links and the file that a link leads to.
fn add_targets(link: &Path, used: &mut BTreeSet<Inode>) {
    /// As the kernel.
    const MAX_LINKS: usize = 40;
    let mut place = link.to_owned();
    for _ in 0..MAX_LINKS {
        let Ok(target) = fs::read_link(&place) else { return };
        place = place.parent().unwrap_or(Path::new("/")).join(target);
        let Ok(data) = fs::symlink_metadata(&place) else { return };
        used.insert((data.dev(), data.ino()));
    }
}

/// The blobs that manifests name. A manifest that cannot be read may name any of them, so nothing can be deleted then.
fn used_by_manifests(root: &Path, gone: &BTreeSet<PathBuf>) -> Result<BTreeSet<Inode>, ErrorBody> {
    let mut used = linked(root, gone)?;
    let mut unread = None;
    for manifests in ollama::MANIFESTS.map(|name| root.join(name)) {
        let walked = walk(&manifests, |entry| {
            let path = entry.path();
            // A link that leads nowhere is no manifest.
            if gone.contains(&path) || !path.exists() {
                return;
            }
            match read_small(&path).and_then(|raw| Manifest::parse(raw).ok()) {
                Some(manifest) => used.extend(blobs(root, &manifest)),
                None => unread = Some(path),
            }
        });
        walked.map_err(|error| file_error(&manifests.display().to_string(), &error))?;
    }
    let Some(path) = unread else { return Ok(used) };
    let message = format!("{}: cannot be read as a manifest, and may need any blob", path.display());
    let body = ErrorBody::new(ErrorCode::InvalidInput, message);
    Err(body.with_hint("delete or restore this model with Ollama, or import without --move"))
}

/// The blobs that a manifest names, and the links that they may be.
fn blobs(root: &Path, manifest: &Manifest) -> Vec<Inode> {
    let places = manifest.files().flat_map(|file| ollama::blob_places(root, file.digest));
    let found = places.flat_map(|place| [fs::symlink_metadata(&place), fs::metadata(&place)]);
    found.flatten().map(|data| (data.dev(), data.ino())).collect()
}

impl Removal {
    /// The files that the program locks while it downloads to these paths.
    pub(crate) fn locks<'p>(&self, root: &Path, paths: impl Iterator<Item = &'p Path>) -> BTreeSet<PathBuf> {
        paths.filter_map(|path| (self.lock_of)(root, path)).collect()
    }

    /// Keeps the program's downloads away from these paths for as long as the returned files are open.
    ///
    /// # Errors
    /// The reason, when one of them is locked or cannot be.
    pub(crate) fn lock<'p>(
        &self,
        root: &Path,
        paths: impl Iterator<Item = &'p Path>,
    ) -> Result<Vec<File>, String> {
        self.locks(root, paths).iter().map(|place| lock(place)).collect()
    }
}

/// Creates the file as the hub's libraries do: others may be allowed to lock it.
fn lock(place: &Path) -> Result<File, String> {
    let failed = |error: io::Error| format!("{}: {error}", place.display());
    fs::create_dir_all(place.parent().unwrap_or(Path::new("/"))).map_err(failed)?;
    let flags = OFlags::RDWR | OFlags::CREATE | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let file = openat(CWD, place, flags, Mode::from_raw_mode(0o666)).map_err(|error| failed(error.into()))?;
    let locked = flock(&file, FlockOperation::NonBlockingLockExclusive);
    locked.map_err(|_busy| format!("a download has locked {}", place.display()))?;
    Ok(File::from(file))
}

/// `.locks/REPOSITORY/ETAG.lock` for a file of a repository, and `HASH.lock` beside a file that repositories share.
fn hub_lock(root: &Path, path: &Path) -> Option<PathBuf> {
    match names(root, path)?.as_slice() {
        [repository, "blobs", etag] => {
            Some(root.join(".locks").join(repository).join(format!("{etag}.lock")))
        }
        ["blobs", start, hash] => Some(root.join("blobs").join(start).join(format!("{hash}.lock"))),
        _ => None,
    }
}

/// The names of a path below a folder.
fn names<'p>(root: &Path, path: &'p Path) -> Option<Vec<&'p str>> {
    path.strip_prefix(root).ok()?.iter().map(|name| name.to_str()).collect()
}

/// Deletes what the cache has about commits and repositories of which nothing is left.
fn tidy_hub(root: &Path, paths: &[&Path]) {
    tidy_files(root, paths);
    let (mut commits, mut repositories) = (BTreeSet::new(), BTreeSet::new());
    for path in paths {
        match names(root, path).as_deref() {
            Some([repository, "snapshots", commit, ..]) => {
                commits.insert((root.join(repository), (*commit).to_owned()));
                repositories.insert(root.join(repository));
            }
            Some([repository, "blobs", _]) => drop(repositories.insert(root.join(repository))),
            Some(["blobs", _, _]) => {
                [".refs", ".lock", ".lock.soft"].iter().for_each(|ending| delete(&with_ending(path, ending)));
                tidy_files(root, &[*path]);
            }
            _ => {}
        }
    }
    for (repository, commit) in commits {
        if !repository.join("snapshots").join(&commit).exists() {
            tidy_commit(&repository, &commit);
        }
    }
    for repository in repositories {
        tidy_repository(root, &repository);
    }
}

/// Deletes the references to a commit, its list of files, and what it says about files that do not exist.
fn tidy_commit(repository: &Path, commit: &str) {
    let is_empty =
        |entry: &fs::DirEntry| entry.metadata().is_ok_and(|data| data.is_file() && data.len() == 0);
    let is_of_commit = |entry: &fs::DirEntry| {
        read_small(&entry.path()).is_some_and(|id| id.trim_ascii() == commit.as_bytes())
    };
    delete_below(&repository.join("refs"), is_of_commit);
    delete_below(&repository.join(".no_exist").join(commit), is_empty);
    delete(&repository.join("trees").join(format!("{commit}.json")));
}

/// Deletes the folders of a repository that has no files, and its locks.
fn tidy_repository(root: &Path, repository: &Path) {
    for name in ["snapshots", "blobs", "refs", "trees", ".no_exist"] {
        let _ = fs::remove_dir(repository.join(name));
    }
    let _ = fs::remove_dir(repository);
    if let (Some(name), false) = (repository.file_name(), repository.exists()) {
        let is_lock = |entry: &fs::DirEntry| entry.path().extension().is_some_and(|ending| ending == "lock");
        delete_below(&root.join(".locks").join(name), is_lock);
        let _ = fs::remove_dir(root.join(".locks"));
    }
}

/// Deletes the files of a folder that are chosen, and its folders that are empty then, with itself.
fn delete_below(folder: &Path, is_chosen: impl Fn(&fs::DirEntry) -> bool) {
    let walked = walk(folder, |entry| {
        if is_chosen(entry) {
            delete(&entry.path());
        }
    });
    for folder in walked.unwrap_or_default().iter().rev() {
        // Refused for a folder that has anything in it.
        let _ = fs::remove_dir(folder);
    }
}

/// Deletes the cached metadata of blobs, and folders of manifests.
fn tidy_ollama(root: &Path, paths: &[&Path]) {
    ollama::MANIFESTS.iter().for_each(|name| tidy_files(&root.join(name), paths));
    for path in paths.iter().filter(|path| path.parent() == Some(&root.join("blobs"))) {
        if let Some(name) = path.file_name() {
            delete(&with_ending(&root.join("metadata").join(name), ".json"));
        }
    }
}

/// Deletes the folders of these paths that are empty now, up to `root`, which stays.
pub(crate) fn tidy_files(root: &Path, paths: &[&Path]) {
    let folders = paths.iter().flat_map(|path| path.ancestors().skip(1));
    let folders: BTreeSet<&Path> =
        folders.filter(|folder| folder.starts_with(root) && *folder != root).collect();
    for folder in folders.iter().rev() {
        // Refused for a folder that has anything in it.
        let _ = fs::remove_dir(folder);
    }
}

fn with_ending(path: &Path, ending: &str) -> PathBuf {
    let mut name = path.as_os_str().to_owned();
    name.push(ending);
    PathBuf::from(name)
}

/// Deletes a file that nothing depends on.
fn delete(path: &Path) {
    let _ = fs::remove_file(path);
}
