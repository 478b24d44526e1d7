//! What an interrupted `--move` has begun to delete.
//!
//! A model of several files can be half deleted when the command is killed: it is stored, its program does not find it any
//! more, and nobody knows that the rest of its files belong to it. So the files are noted before the first is deleted. The
//! next command with `--move` deletes what is left of them, if the store still has the model.

use std::collections::BTreeSet;
use std::fs::{self, File, OpenOptions};
use std::io::{self, BufRead as _, BufReader, Read as _, Write as _};
use std::os::unix::fs::{MetadataExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use blobd_store_format::digest::Digest;
use rustix::fs::{FlockOperation, flock};
use serde::{Deserialize, Serialize};

use super::deletion::{Deleted, Deletion, Doomed, ModelLocation, Stage};
use crate::local_folder::Identity;
use crate::other_stores::{self, state_folder};

const ENDING: &str = "json-lines";
/// The most that is read of a journal.
const MAX_BYTES: u64 = 64 << 20;

/// A model whose deletion has begun.
#[derive(Debug, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Entry {
    /// The manifest of the stored model.
    manifest: Digest,
    /// The program in whose store the files are, and the folder of that store or of the model.
    program: Option<String>,
    folder: Option<PathBuf>,
    files: Vec<Doomed>,
}

/// The journal of this command. It is locked as long as the command runs, and deleted at its end.
#[derive(Debug, Default)]
pub(super) struct Journal {
    is_tried: bool,
    file: Option<(PathBuf, File)>,
}

impl Journal {
    /// Notes what is deleted next. Without a journal, because the user has no home directory or the disk is full, a crash
    /// loses no model either: files that no program finds stay.
    pub(super) fn add(&mut self, manifest: Digest, deletion: &Deletion) {
        if !self.is_tried {
            self.is_tried = true;
            self.file = create().ok();
        }
        let Some((_, file)) = &mut self.file else { return };
        let (program, folder) = match &deletion.place {
            ModelLocation::Anywhere => (None, None),
            ModelLocation::Folder(folder) => (None, Some(folder.clone())),
            ModelLocation::Store(program, root) => (Some(program.key.to_owned()), Some(root.clone())),
        };
        let entry = Entry { manifest, program, folder, files: deletion.files.clone() };
        let Ok(mut line) = serde_json::to_vec(&entry) else { return };
        line.push(b'\n');
        let _ = file.write_all(&line).and_then(|()| file.sync_all());
    }
}

impl Drop for Journal {
    /// Everything that was noted was deleted, or reported.
    fn drop(&mut self) {
        if let Some((path, _)) = &self.file {
            let _ = fs::remove_file(path);
        }
    }
}

fn folder() -> Option<PathBuf> {
    state_folder().map(|state| state.join("moves"))
}

/// The file is locked before it has its name, so that no other command takes it for an interrupted one.
fn create() -> io::Result<(PathBuf, File)> {
    let folder = folder().ok_or(io::ErrorKind::NotFound)?;
    fs::create_dir_all(&folder)?;
    let started = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap_or_default();
    let name = format!("{}-{}", std::process::id(), started.as_nanos());
    let (temporary, path) = (folder.join(format!("{name}.tmp")), folder.join(format!("{name}.{ENDING}")));
    let file = OpenOptions::new().append(true).create_new(true).mode(0o600).open(&temporary)?;
    flock(&file, FlockOperation::NonBlockingLockExclusive)?;
    fs::rename(&temporary, &path)?;
    File::open(&folder)?.sync_all()?;
    Ok((path, file))
}

/// The journals of commands that were interrupted.
#[derive(Debug, Default)]
pub(crate) struct Interrupted(Vec<(PathBuf, File, Vec<Entry>)>);

impl Interrupted {
    pub(crate) fn load() -> Self {
        let listed = folder().and_then(|folder| fs::read_dir(folder).ok());
        let paths = listed.into_iter().flatten().flatten().map(|entry| entry.path());
        let paths = paths.filter(|path| path.extension().is_some_and(|ending| ending == ENDING));
        Self(paths.filter_map(|path| read(&path).map(|(file, entries)| (path, file, entries))).collect())
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Deletes the rest of the files of models that the store has. Returns which files those are.
    pub(crate) fn finish(self, stored: &BTreeSet<Digest>) -> Finished {
        let mut finished = Finished::default();
        for (path, _lock, entries) in self.0 {
            let mut is_done = true;
            for entry in entries {
                match entry.finish(stored) {
                    Some(deleted) => finished.add(&entry, &deleted),
                    // Of another store, or of a program that runs.
                    None => is_done &= entry.files.iter().all(|file| !is_there(file)),
                }
            }
            if is_done {
                let _ = fs::remove_file(path);
            }
        }
        finished
    }
}

/// What was left of interrupted commands.
#[derive(Debug, Default)]
pub(crate) struct Finished {
    pub(crate) files: usize,
    pub(crate) bytes: u64,
    /// The files of these models, and the folders that were models.
    paths: BTreeSet<PathBuf>,
}

impl Finished {
    fn add(&mut self, entry: &Entry, deleted: &Deleted) {
        self.files = self.files.saturating_add(deleted.paths.len());
        self.bytes = self.bytes.saturating_add(deleted.bytes);
        self.paths.extend(entry.files.iter().map(|file| file.path.clone()));
        self.paths.extend(entry.folder.clone());
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.paths.is_empty()
    }

    /// Whether the path was a file or the folder of a model that is moved, or of several.
    pub(crate) fn has(&self, path: &Path) -> bool {
        let path = super::sources::unique(path);
        self.paths.iter().any(|moved| moved.starts_with(&path))
    }
}

impl Entry {
    /// `None` if nothing can be deleted now.
    fn finish(&self, stored: &BTreeSet<Digest>) -> Option<Deleted> {
        if !stored.contains(&self.manifest) {
            return None;
        }
        let place = match (&self.program, &self.folder) {
            (Some(program), Some(root)) => {
                ModelLocation::Store(other_stores::program(program).ok()?, root.clone())
            }
            (None, Some(folder)) => ModelLocation::Folder(folder.clone()),
            (_, None) => ModelLocation::Anywhere,
        };
        let left = |stage| self.files.iter().filter(move |file| file.stage == stage && is_there(file));
        let _locks = place.lock(self.files.iter().map(|file| file.path.as_path())).ok()?;
        let mut gone: BTreeSet<PathBuf> = BTreeSet::new();
        let mut files: Vec<Doomed> = Vec::new();
        for stage in Stage::ALL {
            let used = if stage == Stage::Entry { BTreeSet::new() } else { place.used(&gone).ok()? };
            let free = left(stage).filter(|file| !used.contains(&file.identity.inode()));
            files.extend(free.cloned());
            gone.extend(files.iter().map(|file| file.path.clone()));
        }
        let all: BTreeSet<&Path> = self.files.iter().map(|file| file.path.as_path()).collect();
        let deletion = Deletion { place, files };
        let deleted = deletion.execute();
        // Also what was deleted before can have left folders.
        deletion.place.tidy(&all.into_iter().collect::<Vec<_>>());
        Some(deleted)
    }
}

fn is_there(file: &Doomed) -> bool {
    super::deletion::find(&file.path)
        .is_ok_and(|(_, _, stat)| Identity::new(&stat).is_content_of(&file.identity))
}

/// A journal that no command has locked. What follows a line that was not written in full is nothing.
fn read(path: &Path) -> Option<(File, Vec<Entry>)> {
    let file = File::open(path).ok()?;
    let data = file.metadata().ok()?;
    let is_own = data.is_file() && data.uid() == rustix::process::geteuid().as_raw();
    if !is_own || flock(&file, FlockOperation::NonBlockingLockExclusive).is_err() {
        return None;
    }
    let lines = BufReader::new((&file).take(MAX_BYTES)).lines().map_while(Result::ok);
    let entries = lines.map_while(|line| serde_json::from_str(&line).ok()).collect();
    Some((file, entries))
}
