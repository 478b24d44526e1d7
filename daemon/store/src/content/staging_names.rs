//! Names in `staging/` that are in use. What has another name there is left from a process that has died.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use blobd_store_format::layout;
use rustix::fs::FileType;
use tracing_mutex::stdsync::Mutex;

use crate::Content;
use crate::root::Entry;
use crate::{StoreError, lock};

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

    /// Entries of `staging/` that belong to no transaction in progress, with their bytes on disk.
    /// This process holds the store's lock, so no other process can be using them.
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

    /// Removes an entry that [`Self::abandoned_staging`] found.
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
