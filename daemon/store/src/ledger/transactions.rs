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

    pub(crate) fn set_user_of_transaction(&self, name: &str, uid: u32) {
        self.change_transaction(name, |transaction| transaction.uid = Some(uid));
    }

    pub(crate) fn add_limits_of_transaction(
        &self,
        name: &str,
        limits: impl IntoIterator<Item = ChargeLimit>,
    ) {
        self.change_transaction(name, |transaction| {
            transaction.limits = transaction.limits.iter().cloned().chain(limits).collect();
        });
    }

    fn change_transaction(&self, name: &str, change: impl FnOnce(&mut Transaction)) {
        if let Some(transaction) = self.transactions.lock().get_mut(name) {
            change(transaction);
        }
    }

    pub(crate) fn user_of_transaction(&self, name: &str) -> Option<u32> {
        self.transactions.lock().get(name)?.uid
    }

    pub(crate) fn is_downloading(&self, file: Digest) -> bool {
        self.transactions.lock().values().any(|transaction| transaction.downloads.contains(&file))
    }

    pub(crate) fn note_published(&self, name: &str, node: Node) {
        self.change_transaction(name, |transaction| transaction.published.extend([node]));
    }

    /// What each transaction in progress has published, with its user.
    pub(crate) fn published_in_transactions(&self) -> Vec<(u32, Vec<Node>)> {
        let transactions = self.transactions.lock();
        let published = transactions.values().map(|of| (of.uid, &of.published));
        published.filter_map(|(uid, nodes)| Some((uid?, nodes.iter().copied().collect()))).collect()
    }

    /// Has later reservations include a small file of about `bytes` that is written at the end.
    pub(crate) fn expect_record(&self, transaction: &str, bytes: u64) {
        self.change_transaction(transaction, |state| {
            state.held.records = state.held.records.saturating_add(bytes);
        });
    }

    /// A file of a transaction was removed, or takes less than was counted.
    pub(crate) fn give_back_of_quota(&self, transaction: &str, bytes: u64) {
        self.change_transaction(transaction, |state| {
            state.held.taken = state.held.taken.saturating_sub(bytes);
        });
    }

    /// All files of a transaction are written: it counts as what they have taken, and no longer as what was reserved.
    pub(crate) fn end_reservation(&self, transaction: &str) {
        self.change_transaction(transaction, |state| state.held.reserved = 0);
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::new_store;
    use crate::{Payer, Store};

    fn held(store: &Store) -> Held {
        store.ledger.transactions.lock()["t"].held
    }

    fn changes(store: &Store) -> u64 {
        lock(&store.ledger.totals.state).changes
    }

    #[test]
    fn transaction_counts_as_the_greater_of_reserved_and_taken_bytes() {
        for (reserved, taken, claimed, bytes) in
            [(0, 0, 0, 0), (10, 3, 0, 10), (3, 10, 0, 10), (10, 3, 5, 15)]
        {
            assert_eq!(Held { reserved, taken, records: 100, claimed }.bytes(), bytes);
        }
        let mut held = Held { taken: 20, records: 3, ..Held::default() };
        held.reserve(10);
        assert_eq!(held.reserved, 33, "beside what is taken, with the records");
        held.reserve(5);
        assert_eq!(held.reserved, 33, "never less than before");
        held.reserve(11);
        assert_eq!(held.reserved, 34);
    }

    #[test]
    fn bytes_that_are_given_back_no_longer_count_as_taken() {
        let (_folder, store) = new_store();
        store.ledger.begin_transaction("t");
        store.ledger.change_transaction("t", |state| state.held.taken = 10);
        store.ledger.expect_record("t", 4);
        store.ledger.expect_record("t", 3);
        store.ledger.give_back_of_quota("t", 6);
        assert_eq!(held(&store), Held { taken: 4, records: 7, ..Held::default() });
        store.ledger.give_back_of_quota("t", 6);
        store.ledger.give_back_of_quota("unknown", 6);
        assert_eq!(held(&store).taken, 0);
        store.ledger.change_transaction("t", |state| state.held.reserved = 10);
        store.ledger.end_reservation("t");
        assert_eq!(held(&store).reserved, 0);
    }

    #[test]
    fn removed_download_is_given_back_to_the_transaction_that_continues_it() {
        let (_folder, store) = new_store();
        let (file, other) = (Digest::of(b"file"), Digest::of(b"other"));
        store.ledger.begin_transaction("t");
        store.ledger.change_transaction("t", |state| {
            state.downloads.insert(file);
            state.held.taken = 10;
        });
        assert!(store.ledger.is_downloading(file) && !store.ledger.is_downloading(other));
        let before = changes(&store);
        store.ledger.note_partial_removed(file, 4);
        assert_eq!((held(&store).taken, changes(&store)), (6, before));
        store.ledger.note_partial_removed(other, 4);
        assert_eq!((held(&store).taken, changes(&store)), (6, before + 1), "it was charged to its user");
    }

    #[test]
    fn download_that_a_transaction_leaves_is_charged_anew() {
        let (_folder, store) = new_store();
        let file = Digest::of(b"file");
        for (is_left, counts_anew) in [(false, 0), (true, 1)] {
            store.ledger.begin_transaction("t");
            store.ledger.change_transaction("t", |state| {
                state.downloads.insert(file);
            });
            if is_left {
                std::fs::create_dir_all(store.path(layout::partial(file))).unwrap();
            }
            let before = changes(&store);
            store.ledger.end_transaction("t");
            assert_eq!(changes(&store) - before, counts_anew, "{is_left}");
            assert!(!store.ledger.is_downloading(file));
        }
    }

    #[test]
    fn limits_and_published_data_are_those_of_the_transaction() {
        let (_folder, store) = new_store();
        store.ledger.begin_transaction("t");
        store.ledger.add_limits_of_transaction("t", [ChargeLimit::for_user(7, 100)]);
        store.ledger.add_limits_of_transaction("t", [ChargeLimit::for_user(8, 200)]);
        let limits = Arc::clone(&store.ledger.transactions.lock()["t"].limits);
        let limits: Vec<_> = limits.iter().map(|limit| (limit.payer.includes(7), limit.bytes)).collect();
        assert_eq!(limits, [(true, 100), (false, 200)]);
        assert!(matches!(ChargeLimit::for_user(7, 1).payer, Payer::User(7)));
        let node = Node::Blob(Digest::of(b"blob"));
        store.ledger.note_published("t", node);
        assert!(store.ledger.published_in_transactions().is_empty(), "its user is not known");
        store.ledger.set_user_of_transaction("t", 7);
        assert_eq!(store.ledger.published_in_transactions(), [(7, vec![node])]);
    }
}
