//! Transactions in progress and their directories in `staging/`.

use std::collections::{BTreeMap, BTreeSet};
use std::ffi::{OsStr, OsString};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use rustix::fs::FileType;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use super::charge_limit::ChargeLimit;
use super::node::Node;
use super::root::Entry;
use super::{Store, StoreError, lock};

#[derive(Debug, Default)]
pub(super) struct Transactions {
    next_number: AtomicU64,
    /// The transactions in progress, by the names of their directories.
    in_progress: Mutex<BTreeMap<String, Transaction>>,
}

/// A transaction in progress, and the user that it runs for.
#[derive(Debug)]
pub(super) struct Transaction {
    /// `None` until it is known.
    pub(super) uid: Option<u32>,
    /// What may be charged to the user, and to the user's groups. They do not change while it runs.
    pub(super) limits: Arc<[ChargeLimit]>,
    pub(super) held: Held,
    /// The blobs and recipes that it has published. No name needs them yet.
    pub(super) published: BTreeSet<Node>,
    /// The files whose downloads it continues.
    pub(super) downloads: BTreeSet<Digest>,
}

/// Bytes that count against a user's quota until the transaction ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Held {
    /// The bytes that it will take at most, if that is known.
    pub(super) reserved: u64,
    /// The bytes that its files have taken.
    pub(super) taken: u64,
    /// An estimate for recipes, the manifest and the history of the name, which are written at the end.
    pub(super) records: u64,
    /// Stored bytes that no name pays for yet, and that the name will.
    pub(super) claimed: u64,
}

impl Held {
    pub(super) fn reserve(&mut self, bytes: u64) {
        let files = self.taken.saturating_add(bytes);
        self.reserved = self.reserved.max(files.saturating_add(self.records));
    }

    pub(super) fn bytes(self) -> u64 {
        self.reserved.max(self.taken).saturating_add(self.claimed)
    }
}

impl Default for Transaction {
    fn default() -> Self {
        Self {
            uid: None,
            limits: Arc::new([]),
            held: Held::default(),
            published: BTreeSet::new(),
            downloads: BTreeSet::new(),
        }
    }
}

impl Transactions {
    fn is_in_progress(&self, name: &OsStr) -> bool {
        name.to_str().is_some_and(|name| self.lock().contains_key(name))
    }

    /// Only changes in memory are made while it is locked.
    pub(super) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Transaction>> {
        lock(&self.in_progress)
    }
}

impl Store {
    /// Returns a name for a transaction's directory, which counts as in progress until
    /// [`Self::end_transaction`].
    pub(super) fn new_transaction(&self) -> String {
        let number = self.transactions.next_number.fetch_add(1, Ordering::Relaxed);
        let name = format!("{}-{number}", std::process::id());
        self.transactions.lock().insert(name.clone(), Transaction::default());
        name
    }

    pub(super) fn end_transaction(&self, name: &str) {
        let ended = self.transactions.lock().remove(name);
        let downloads = ended.map(|ended| ended.downloads).unwrap_or_default();
        let is_left =
            |file: &Digest| self.root.status(&layout::partial(*file)).is_ok_and(|left| left.is_some());
        // What is left is charged to the download from now on.
        if downloads.iter().any(is_left) {
            self.note_charges_changed();
        }
    }

    /// Sets the user that a transaction runs for.
    pub(super) fn set_user_of_transaction(&self, name: &str, uid: u32) {
        if let Some(transaction) = self.transactions.lock().get_mut(name) {
            transaction.uid = Some(uid);
        }
    }

    /// Adds limits of what may be charged to the user of a transaction, or to the user's groups.
    pub(super) fn add_limits_of_transaction(
        &self,
        name: &str,
        limits: impl IntoIterator<Item = ChargeLimit>,
    ) {
        if let Some(transaction) = self.transactions.lock().get_mut(name) {
            transaction.limits = transaction.limits.iter().cloned().chain(limits).collect();
        }
    }

    pub(super) fn user_of_transaction(&self, name: &str) -> Option<u32> {
        self.transactions.lock().get(name)?.uid
    }

    /// Whether a transaction continues the download of this file.
    pub(super) fn is_downloading(&self, file: Digest) -> bool {
        self.transactions.lock().values().any(|transaction| transaction.downloads.contains(&file))
    }

    /// Notes a blob or recipe that a transaction has published.
    pub(super) fn note_published(&self, name: &str, node: Node) {
        if let Some(transaction) = self.transactions.lock().get_mut(name) {
            transaction.published.insert(node);
        }
    }

    /// What each transaction in progress has published, with its user.
    pub(super) fn published_in_transactions(&self) -> Vec<(u32, Vec<Node>)> {
        let transactions = self.transactions.lock();
        let published = transactions.values().map(|of| (of.uid, &of.published));
        published.filter_map(|(uid, nodes)| Some((uid?, nodes.iter().copied().collect()))).collect()
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
