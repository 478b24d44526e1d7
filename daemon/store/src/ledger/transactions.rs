//! Transactions in progress and their directories in `staging/`.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::ledger::Ledger;
use crate::ledger::charge_limit::ChargeLimit;
use crate::lock;
use crate::node::Node;

#[derive(Debug, Default)]
pub(crate) struct Transactions {
    /// The transactions in progress, by the names of their directories.
    in_progress: Mutex<BTreeMap<String, Transaction>>,
}

/// A transaction in progress, and the user that it runs for.
#[derive(Debug)]
pub(crate) struct Transaction {
    /// `None` until it is known.
    pub(crate) uid: Option<u32>,
    /// What may be charged to the user, and to the user's groups. They do not change while it runs.
    pub(crate) limits: Arc<[ChargeLimit]>,
    pub(crate) held: Held,
    /// The blobs and recipes that it has published. No name needs them yet.
    pub(crate) published: BTreeSet<Node>,
    /// The files whose downloads it continues.
    pub(crate) downloads: BTreeSet<Digest>,
}

/// Bytes that count against a user's quota until the transaction ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Held {
    /// The bytes that it will take at most, if that is known.
    pub(crate) reserved: u64,
    /// The bytes that its files have taken.
    pub(crate) taken: u64,
    /// An estimate for recipes, the manifest and the history of the name, which are written at the end.
    pub(crate) records: u64,
    /// Stored bytes that no name pays for yet, and that the name will.
    pub(crate) claimed: u64,
}

impl Held {
    pub(crate) fn reserve(&mut self, bytes: u64) {
        let files = self.taken.saturating_add(bytes);
        self.reserved = self.reserved.max(files.saturating_add(self.records));
    }

    pub(crate) fn bytes(self) -> u64 {
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
    /// Only changes in memory are made while it is locked.
    pub(crate) fn lock(&self) -> MutexGuard<'_, BTreeMap<String, Transaction>> {
        lock(&self.in_progress)
    }
}

impl Ledger {
    /// Begins a transaction with this directory in `staging/`, until [`Self::end_transaction`].
    pub(crate) fn begin_transaction(&self, name: &str) {
        self.transactions.lock().insert(name.to_owned(), Transaction::default());
    }

    pub(crate) fn end_transaction(&self, name: &str) {
        let ended = self.transactions.lock().remove(name);
        let downloads = ended.map(|ended| ended.downloads).unwrap_or_default();
        let is_left = |file: &Digest| {
            self.content.root.status(&layout::partial(*file)).is_ok_and(|left| left.is_some())
        };
        // What is left is charged to the download from now on.
        if downloads.iter().any(is_left) {
            self.note_charges_changed();
        }
    }

    /// Sets the user that a transaction runs for.
    pub(crate) fn set_user_of_transaction(&self, name: &str, uid: u32) {
        if let Some(transaction) = self.transactions.lock().get_mut(name) {
            transaction.uid = Some(uid);
        }
    }

    /// Adds limits of what may be charged to the user of a transaction, or to the user's groups.
    pub(crate) fn add_limits_of_transaction(
        &self,
        name: &str,
        limits: impl IntoIterator<Item = ChargeLimit>,
    ) {
        if let Some(transaction) = self.transactions.lock().get_mut(name) {
            transaction.limits = transaction.limits.iter().cloned().chain(limits).collect();
        }
    }

    pub(crate) fn user_of_transaction(&self, name: &str) -> Option<u32> {
        self.transactions.lock().get(name)?.uid
    }

    /// Whether a transaction continues the download of this file.
    pub(crate) fn is_downloading(&self, file: Digest) -> bool {
        self.transactions.lock().values().any(|transaction| transaction.downloads.contains(&file))
    }

    /// Notes a blob or recipe that a transaction has published.
    pub(crate) fn note_published(&self, name: &str, node: Node) {
        if let Some(transaction) = self.transactions.lock().get_mut(name) {
            transaction.published.insert(node);
        }
    }

    /// What each transaction in progress has published, with its user.
    pub(crate) fn published_in_transactions(&self) -> Vec<(u32, Vec<Node>)> {
        let transactions = self.transactions.lock();
        let published = transactions.values().map(|of| (of.uid, &of.published));
        published.filter_map(|(uid, nodes)| Some((uid?, nodes.iter().copied().collect()))).collect()
    }

    /// Has later reservations include a small file of about `bytes` that is written at the end.
    pub(crate) fn expect_record(&self, transaction: &str, bytes: u64) {
        if let Some(state) = self.transactions.lock().get_mut(transaction) {
            state.held.records = state.held.records.saturating_add(bytes);
        }
    }

    /// A file of a transaction was removed, or takes less than was counted.
    pub(crate) fn give_back_of_quota(&self, transaction: &str, bytes: u64) {
        if let Some(state) = self.transactions.lock().get_mut(transaction) {
            state.held.taken = state.held.taken.saturating_sub(bytes);
        }
    }

    /// All files of a transaction are written: it counts as what they have taken, and no longer as what was reserved.
    pub(crate) fn end_reservation(&self, transaction: &str) {
        if let Some(state) = self.transactions.lock().get_mut(transaction) {
            state.held.reserved = 0;
        }
    }

    /// The unfinished download of `file` was removed, which took `bytes`.
    pub(crate) fn note_partial_removed(&self, file: Digest, bytes: u64) {
        let mut transactions = self.transactions.lock();
        match transactions.values_mut().find(|state| state.downloads.contains(&file)) {
            Some(state) => state.held.taken = state.held.taken.saturating_sub(bytes),
            None => self.note_charges_changed(),
        }
    }
}
