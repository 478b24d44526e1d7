//! Transactions in progress and their directories in `staging/`.

use std::collections::BTreeSet;
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicU64, Ordering};

use blobd_store_format::layout;
use rustix::fs::FileType;

use super::root::Entry;
use super::{Store, StoreError, lock};

#[derive(Debug, Default)]
pub(super) struct Transactions {
    next_number: AtomicU64,
    /// The names of the directories of the transactions in progress.
    in_progress: Mutex<BTreeSet<String>>,
}

impl Transactions {
    fn is_in_progress(&self, name: &OsStr) -> bool {
        name.to_str().is_some_and(|name| lock(&self.in_progress).contains(name))
    }
}

impl Store {
    /// Returns a name for a transaction's directory, which counts as in progress until
    /// [`Self::end_transaction`].
    pub(super) fn new_transaction(&self) -> String {
        let number = self.transactions.next_number.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        lock(&self.transactions.in_progress).insert(name.clone());
        name
    }

    pub(super) fn end_transaction(&self, name: &str) {
        lock(&self.transactions.in_progress).remove(name);
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
            if self.transactions.is_in_progress(&name) {
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
        if self.transactions.is_in_progress(name) {
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
    pub(super) fn sweep_staging(&self) {
        if self.read_only_reason().is_some() {
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
