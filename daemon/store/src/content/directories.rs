//! Checks and creates the directories of a store, and allocates the names in `staging/`.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use blobd_store_format::layout;
use rustix::fs::FileType;
use tracing_mutex::stdsync::Mutex;

use crate::content::Content;
use crate::root::Entry;
use crate::{StoreError, lock, root};

/// Directories of the store other than those of blobs and recipes.
pub(crate) const RECORDS: [&str; 11] = [
    layout::MANIFESTS,
    layout::ORIGINS,
    layout::SIGNATURES,
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
    /// Checks that the essential directories exist: a collection would delete everything if it treated a missing
    /// one as empty.
    pub(crate) fn check_directories(&self) -> Result<(), StoreError> {
        self.essential.iter().try_for_each(|name| self.root.existing_directory(name).map(drop))
    }

    /// Errors about files and directories in the root that have the wrong type or are missing.
    pub fn misplaced(&self) -> Vec<StoreError> {
        const FILES: [&str; 4] =
            [layout::STORE_FILE, layout::LOCK_FILE, layout::RESERVE_FILE, layout::SCRUB_FILE];
        let missing = self.essential.iter().filter_map(|name| self.root.existing_directory(name).err());
        let others = RECORDS.iter().filter(|name| !self.essential.contains(name));
        let others = others.filter_map(|name| self.root.find_directory(Path::new(name)).err());
        let files = FILES.iter().filter_map(|name| self.odd_file(Path::new(name)));
        missing.chain(others).chain(files).collect()
    }

    /// The directory of the audit log, which is created if it does not exist. Its files are written without the store's
    /// disk: a fault of one must not stop the other.
    pub fn audit_directory(&self) -> Result<File, StoreError> {
        let path = Path::new(layout::AUDIT);
        self.create_directories(path)?;
        let directory = self.root.existing_directory(layout::AUDIT)?;
        directory.file.try_clone().map_err(StoreError::io("open directory", self.root.full(path)))
    }

    /// Checks whether the file system can give a file a name without replacing another one. If it cannot, the
    /// store refuses changes from now on: otherwise an import would fail only after it has read everything.
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

    /// Creates a directory and its parents, durably. A missing essential one is not created, because its
    /// content is lost too.
    pub(crate) fn create_directories(&self, relative: &Path) -> Result<(), StoreError> {
        let top = relative.iter().next().and_then(|top| top.to_str());
        if let Some(top) = self.essential.iter().find(|name| Some(**name) == top) {
            drop(self.root.existing_directory(top)?);
        }
        self.disk.create_dir_all(relative)
    }
}

#[derive(Debug, Default)]
pub(crate) struct StagingNames {
    next_number: AtomicU64,
    in_use: Mutex<BTreeSet<String>>,
}

impl StagingNames {
    fn is_in_use(&self, name: &OsStr) -> bool {
        name.to_str().is_some_and(|name| lock(&self.in_use).contains(name))
    }
}

impl Content {
    /// A new name in `staging/`, which counts as in use until [`Self::release_staging_name`].
    pub(crate) fn new_staging_name(&self) -> String {
        let number = self.staging_names.next_number.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        lock(&self.staging_names.in_use).insert(name.clone());
        name
    }

    pub(crate) fn release_staging_name(&self, name: &str) {
        lock(&self.staging_names.in_use).remove(name);
    }

    /// Entries of `staging/` that belong to no transaction in progress, with their bytes on disk. No other process uses
    /// them: this one holds the store's lock.
    pub(crate) fn abandoned_staging(&self) -> Result<Vec<(OsString, u64)>, StoreError> {
        let Some(staging) = self.root.find_directory(Path::new(layout::STAGING))? else {
            return Ok(Vec::new());
        };
        let mut abandoned = Vec::new();
        for entry in staging.entries()? {
            let Entry { name, kind, .. } = entry?;
            // Checked after the listing: a transaction is registered before its directory exists.
            if self.staging_names.is_in_use(&name) {
                continue;
            }
            // Checked last: a transaction removes its directory before it is unregistered.
            let Some(status) = staging.status(&name)? else { continue };
            let below = match kind {
                FileType::Directory => staging.find_directory(&name)?.map(|directory| directory.tree_bytes()),
                _ => None,
            };
            abandoned.push((name, status.allocated_bytes().saturating_add(below.unwrap_or_default())));
        }
        Ok(abandoned)
    }

    pub(crate) fn remove_abandoned(&self, name: &OsStr) -> Result<(), StoreError> {
        if self.staging_names.is_in_use(name) {
            return Ok(());
        }
        let path = Path::new(layout::STAGING).join(name);
        match self.root.status(&path)? {
            Some(status) if status.is_dir() => self.disk.remove_tree(&path),
            Some(_) => self.disk.remove_file(&path).map(drop),
            None => Ok(()),
        }
    }

    /// Removes all abandoned entries of `staging/`. A failure is only logged, because `gc` tries again.
    pub(crate) fn sweep_staging(&self) {
        if self.refuses_changes() {
            return;
        }
        let warn = |error| tracing::warn!("{error}; `blobd gc` tries again");
        match self.abandoned_staging() {
            Err(error) => warn(error),
            Ok(abandoned) => {
                let failures = abandoned.iter().filter_map(|(name, _)| self.remove_abandoned(name).err());
                failures.for_each(warn);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::fs;
    use std::os::unix::fs::symlink;

    use super::*;
    use crate::testing::new_store;

    #[test]
    fn entry_of_staging_is_abandoned_when_its_name_is_released() {
        let (_folder, store) = new_store();
        let abandoned = || store.content.abandoned_staging().unwrap();
        let name = store.content.new_staging_name();
        assert_ne!(store.content.new_staging_name(), name);
        let path = store.path(layout::STAGING).join(&name);
        fs::create_dir(&path).unwrap();
        fs::write(path.join("0"), vec![7; 9000]).unwrap();
        assert_eq!(abandoned(), []);
        store.content.remove_abandoned(OsStr::new(&name)).unwrap();
        store.content.sweep_staging();
        assert!(path.join("0").exists());
        store.content.release_staging_name(&name);
        let bytes = [Path::new(&name).to_path_buf(), Path::new(&name).join("0")]
            .map(|path| store.content.root.allocated_bytes(&Path::new(layout::STAGING).join(path)).unwrap());
        assert_eq!(abandoned(), [(OsString::from(&name), bytes[0] + bytes[1])]);
        store.content.remove_abandoned(OsStr::new(&name)).unwrap();
        store.content.remove_abandoned(OsStr::new(&name)).unwrap();
        assert!(!path.exists());
    }

    #[test]
    fn sweep_leaves_a_store_that_refuses_changes_as_it_is() {
        let (_folder, store) = new_store();
        let path = store.path(layout::STAGING).join("left");
        fs::write(&path, "").unwrap();
        store.content.disk.refuse_changes("a test");
        store.content.sweep_staging();
        assert!(path.exists());
    }

    #[test]
    fn missing_entries_and_wrong_types_are_named() {
        let (_folder, store) = new_store();
        let found = || store.content.misplaced().iter().map(ToString::to_string).collect::<Vec<_>>();
        assert_eq!(found(), [""; 0]);
        store.content.check_directories().unwrap();
        fs::create_dir(store.path(layout::RESERVE_FILE)).unwrap();
        fs::write(store.path(layout::PINS), "").unwrap();
        fs::remove_dir(store.path(layout::TRASH)).unwrap();
        fs::remove_file(store.path(layout::STORE_FILE)).unwrap();
        symlink("elsewhere", store.path(layout::STORE_FILE)).unwrap();
        let found = found();
        let named = |name: &str| {
            found.iter().filter(|error| error.starts_with(&store.path(name).display().to_string())).count()
        };
        assert_eq!(
            (found.len(), [layout::RESERVE_FILE, layout::PINS, layout::TRASH, layout::STORE_FILE].map(named)),
            (4, [1; 4]),
            "{found:?}"
        );
        let missing = store.content.check_directories();
        assert!(matches!(missing, Err(StoreError::MissingDirectory { .. })), "{missing:?}");
        let refused = store.content.create_directories(&Path::new(layout::TRASH).join("x"));
        assert!(matches!(refused, Err(StoreError::MissingDirectory { .. })), "its content is gone too");
    }

    #[test]
    fn trial_of_a_rename_leaves_nothing() {
        let (_folder, store) = new_store();
        fs::write(store.path("staging/trial.renamed"), "left by a crash").unwrap();
        store.content.try_renames().unwrap();
        assert_eq!(fs::read_dir(store.path(layout::STAGING)).unwrap().count(), 0);
        assert_eq!(store.content.disk.failure(), None);
        drop(store.content.audit_directory().unwrap());
        assert!(store.content.has_audit_directory());
        fs::remove_dir(store.path(layout::STAGING)).unwrap();
        fs::write(store.path(layout::STAGING), "").unwrap();
        assert!(store.content.try_renames().is_err());
    }
}
