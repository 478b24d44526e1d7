//! Checks and creates the directories of a store.

use std::fs::File;
use std::path::Path;

use blobd_store_format::layout;
use rustix::fs::FileType;

use crate::content::Content;
use crate::{StoreError, root};

/// Directories of the store other than those of blobs and recipes.
pub(crate) const RECORDS: [&str; 10] = [
    layout::MANIFESTS,
    layout::ORIGINS,
    layout::HISTORY,
    layout::STAGING,
    layout::PARTIAL,
    layout::TRASH,
    layout::PINS,
    layout::QUARANTINE,
    layout::INDEX,
    layout::AUDIT,
];

impl Content {
    /// Checks that the essential directories exist. A collection that treated a missing one as empty
    /// would delete everything.
    pub(crate) fn check_directories(&self) -> Result<(), StoreError> {
        self.essential.iter().try_for_each(|name| self.root.existing_directory(name).map(drop))
    }

    /// Errors about files and directories in the root that have the wrong type or are missing.
    #[must_use]
    pub fn misplaced(&self) -> Vec<StoreError> {
        const FILES: [&str; 4] =
            [layout::STORE_FILE, layout::LOCK_FILE, layout::RESERVE_FILE, layout::SCRUB_FILE];
        let missing = self.essential.iter().filter_map(|name| self.root.existing_directory(name).err());
        let others = RECORDS.iter().filter(|name| !self.essential.contains(name));
        let others = others.filter_map(|name| self.root.find_directory(Path::new(name)).err());
        let files = FILES.iter().filter_map(|name| self.odd_file(Path::new(name)));
        missing.chain(others).chain(files).collect()
    }

    /// The directory of the audit log, which is created if it does not exist. Its files are not the store's: they are
    /// written without the store's disk, because a fault of the log must not end all changes of the store, nor the
    /// other way round.
    ///
    /// # Errors
    /// [`StoreError::Io`] if it cannot be created or opened.
    pub fn audit_directory(&self) -> Result<File, StoreError> {
        let path = Path::new(layout::AUDIT);
        self.create_directories(path)?;
        let directory = self.root.existing_directory(layout::AUDIT)?;
        directory.file().try_clone().map_err(StoreError::io("open directory", self.root.full(path)))
    }

    /// Tries whether the file system can give a file a name without replacing another one. If it cannot, the store
    /// refuses changes from now on: an import would fail when everything is read.
    ///
    /// # Errors
    /// [`StoreError::NoSafeRename`]; others if the trial could not be made.
    pub fn try_renames(&self) -> Result<(), StoreError> {
        let path = |name| Path::new(layout::STAGING).join(name);
        // Not the name of a transaction. What a crash leaves is removed as abandoned.
        let (from, to) = (path("trial"), path("trial.renamed"));
        self.create_directories(Path::new(layout::STAGING))?;
        self.disk.remove_file(&to)?;
        self.disk.write_file(&from, b"", 0o600)?;
        let renamed = self.disk.publish(&from, &to);
        self.disk.remove_file(&from)?;
        self.disk.remove_file(&to)?;
        renamed.map(drop).inspect_err(|error| {
            if matches!(error, StoreError::NoSafeRename { .. }) {
                self.disk.refuse_changes(&error.to_string());
            }
        })
    }

    /// Whether the store has the directory of an audit log.
    #[must_use]
    pub fn has_audit_directory(&self) -> bool {
        matches!(self.root.find_directory(Path::new(layout::AUDIT)), Ok(Some(_)))
    }

    fn odd_file(&self, path: &Path) -> Option<StoreError> {
        let found = match self.root.status(path) {
            Ok(status) => status.filter(|status| !status.is_file())?.kind(),
            Err(error) => return Some(error),
        };
        let (found, expected) = (root::describe(found).to_owned(), root::describe(FileType::RegularFile));
        Some(StoreError::UnexpectedFile { path: self.root.full(path), found, expected })
    }

    /// Creates a directory and its parents, and makes their names durable. A missing essential directory
    /// is not created again, since its content was removed with it.
    pub(crate) fn create_directories(&self, relative: &Path) -> Result<(), StoreError> {
        let top = relative.iter().next().and_then(|top| top.to_str());
        if let Some(top) = self.essential.iter().find(|name| Some(**name) == top) {
            drop(self.root.existing_directory(top)?);
        }
        self.disk.create_dir_all(relative)
    }
}
