//! Which files are deleted, in which order, and their deletion.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::OsStr;
use std::fs::File;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use blobd_cli_common::output::{counted, human_bytes, printable};
use rustix::fs::{AtFlags, CWD, Mode, OFlags, ResolveFlags, Stat, fsync, openat, openat2, statat, unlinkat};
use rustix::io::Errno;
use serde::{Deserialize, Serialize};

use super::in_use::user_of_store;
use crate::ErrorBody;
use crate::local_folder::{Identity, Inode};
use crate::other_stores::{Program, tidy_files};

/// The files of a stored model that nothing else needs, in the order in which they are deleted.
#[derive(Debug, Default)]
pub(super) struct Deletion {
    pub(super) place: ModelLocation,
    pub(super) files: Vec<Doomed>,
}

/// A file that is deleted if it still is the one that was imported.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Doomed {
    pub(super) path: PathBuf,
    pub(super) stage: Stage,
    pub(super) identity: Identity,
}

/// The order in which the files of a model are deleted. After a crash in between, its program does not find the model.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Stage {
    /// Where its program finds it.
    Entry,
    /// A link between an entry and a file.
    Link,
    Content,
}

impl Stage {
    pub(super) const ALL: [Self; 3] = [Self::Entry, Self::Link, Self::Content];
}

/// Where the files of a model are.
#[derive(Clone, Debug, Default)]
pub(super) enum ModelLocation {
    #[default]
    Anywhere,
    /// The folder that is the model. It is deleted if nothing is left in it.
    Folder(PathBuf),
    /// Another program's store, by its path without links.
    Store(&'static Program, PathBuf),
}

/// What was deleted, and why files were not.
#[derive(Debug, Default)]
pub(super) struct Deleted {
    pub(super) paths: BTreeSet<PathBuf>,
    /// What that has freed.
    pub(super) bytes: u64,
    pub(super) kept: Vec<String>,
    /// The sizes of the files that have other hard links, so that their bytes stay.
    linked: BTreeMap<Inode, u64>,
}

impl Deletion {
    /// Deletes the files, stage by stage. Each stage is durable before the next, so that also after a power cut nothing leads
    /// to a file that is gone. A stage that fails is the last.
    pub(super) fn execute(&self) -> Deleted {
        let mut done = Deleted::default();
        for stage in Stage::ALL {
            let mut folders = BTreeSet::new();
            for Doomed { path, identity, .. } in self.files.iter().filter(|file| file.stage == stage) {
                match delete(path, *identity) {
                    Ok(links_left) => {
                        if stage == Stage::Content {
                            done.add_content(identity, links_left);
                        }
                        done.paths.insert(path.clone());
                        folders.extend(path.parent());
                    }
                    Err(reason) => done.kept.push(not_deleted(path, &reason)),
                }
            }
            if !done.kept.is_empty() {
                break;
            }
            folders.into_iter().for_each(make_durable);
        }
        self.place.tidy(&done.paths.iter().map(PathBuf::as_path).collect::<Vec<_>>());
        done
    }
}

impl Deleted {
    fn add_content(&mut self, file: &Identity, links_left: u64) {
        if links_left > 0 {
            self.linked.insert(file.inode(), file.size());
        } else {
            self.linked.remove(&file.inode());
            self.bytes = self.bytes.saturating_add(file.size());
        }
    }

    /// What was done, for the user.
    pub(super) fn notes(self) -> Vec<String> {
        let kept = self.linked.values().copied().fold(0, u64::saturating_add);
        let kept = match self.linked.len() {
            0 => String::new(),
            1 => format!("; {} stay: the file has another hard link", human_bytes(kept)),
            _ => format!("; {} stay: the files have other hard links", human_bytes(kept)),
        };
        let files = counted(self.paths.len(), "imported file");
        let deleted = format!("{files} deleted, {}{kept}", human_bytes(self.bytes));
        let deleted = (!self.paths.is_empty()).then_some(deleted);
        deleted.into_iter().chain(self.kept).collect()
    }
}

impl ModelLocation {
    /// What other paths than those in `gone` lead to.
    pub(super) fn used(&self, gone: &BTreeSet<PathBuf>) -> Result<BTreeSet<Inode>, ErrorBody> {
        match self {
            Self::Store(program, root) => (program.removal()?.used)(root, gone),
            Self::Anywhere | Self::Folder(_) => Ok(BTreeSet::new()),
        }
    }

    /// Keeps downloads of the program away from these files.
    pub(super) fn lock<'p>(&self, paths: impl Iterator<Item = &'p Path>) -> Result<Vec<File>, String> {
        let Self::Store(program, root) = self else { return Ok(Vec::new()) };
        let removal = program.removal().map_err(|error| error.message)?;
        if let Some(user) = user_of_store(removal, root) {
            return Err(format!("the store is in use by {user}"));
        }
        removal.lock(root, paths)
    }

    /// The files that the program locks while it downloads to these paths.
    pub(super) fn locks<'p>(&self, paths: impl Iterator<Item = &'p Path>) -> BTreeSet<PathBuf> {
        match self {
            Self::Store(program, root) => {
                program.removal().map(|removal| removal.locks(root, paths)).unwrap_or_default()
            }
            Self::Anywhere | Self::Folder(_) => BTreeSet::new(),
        }
    }

    pub(super) fn tidy(&self, paths: &[&Path]) {
        match self {
            Self::Anywhere => {}
            Self::Folder(folder) => {
                tidy_files(folder, paths);
                // Refused for a folder that has anything in it.
                let _ = std::fs::remove_dir(folder);
            }
            Self::Store(program, root) => {
                if let Ok(removal) = program.removal() {
                    (removal.tidy)(root, paths);
                }
            }
        }
    }
}

pub(super) fn not_deleted(path: &Path, reason: &str) -> String {
    format!("{}: not deleted: {reason}", printable(&path.display().to_string()))
}

/// Without this, a power cut can bring an entry back whose file is gone. If it fails, only that is at risk.
fn make_durable(folder: &Path) {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let _ = openat(CWD, folder, flags, Mode::empty()).and_then(fsync);
}

/// Returns how many hard links the file has still.
fn delete(path: &Path, before: Identity) -> Result<u64, String> {
    let failed = |error: Errno| std::io::Error::from(error).to_string();
    let (folder, name, stat) = find(path).map_err(failed)?;
    if !Identity::new(&stat).is_content_of(&before) {
        return Err("it changed while it was imported".to_owned());
    }
    unlinkat(folder, name, AtFlags::empty()).map_err(failed)?;
    Ok(stat.st_nlink.saturating_sub(1))
}

/// What is at a path, and its folder. The folder's path must have no links: whoever owns a part of it could put one there,
/// and have a file of the same name elsewhere deleted.
pub(super) fn find(path: &Path) -> rustix::io::Result<(OwnedFd, &OsStr, Stat)> {
    let (folder, name) = path.parent().zip(path.file_name()).ok_or(Errno::INVAL)?;
    let flags = OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC;
    let folder = openat2(CWD, folder, flags, Mode::empty(), ResolveFlags::NO_SYMLINKS)?;
    let stat = statat(&folder, name, AtFlags::SYMLINK_NOFOLLOW)?;
    Ok((folder, name, stat))
}
