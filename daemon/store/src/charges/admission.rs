//! Compares what a user's transactions will take on disk with the user's quota.
//!
//! A transaction counts as what was reserved for it, or as what it has taken if that is more, until it ends. So the
//! transactions of a user are admitted together, and what is admitted can be completed.
//!
//! What is stored already costs nothing if a name pays for it. Else, such as data of a model in the trash or of the
//! unfinished download of another user, the new name will pay for it, so it counts too.

use std::collections::BTreeSet;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use crate::gc::{Node, displaced_bytes, drop_displaced};
use crate::index::{Claim, ClaimKind};
use crate::summaries::record_bytes;
use crate::transactions::{Held, Transaction};
use crate::{Store, StoreError};

/// How often a check is repeated because the sums have changed meanwhile. The last one uses sums that may be out of
/// date by a few milliseconds.
const MAX_TRIES: usize = 3;

impl Store {
    /// Counts `bytes` more as taken by a transaction.
    ///
    /// # Errors
    /// [`StoreError::OverQuota`]; then nothing is counted. Those of [`Self::charged_bytes`].
    pub(crate) fn take_of_quota(&self, transaction: &str, bytes: u64) -> Result<(), StoreError> {
        self.within_quota(transaction, |held| held.taken = held.taken.saturating_add(bytes))
    }

    /// Reserves `bytes` for a transaction, beside what it has taken.
    ///
    /// # Errors
    /// As for [`Self::take_of_quota`].
    pub(crate) fn reserve_of_quota(&self, transaction: &str, bytes: u64) -> Result<(), StoreError> {
        // Of a file that has nothing new the recipe is stored too.
        if bytes == 0 {
            return Ok(());
        }
        self.within_quota(transaction, |held| held.reserve(bytes))
    }

    /// Like [`Self::reserve_of_quota`], but deletes nothing to make that possible: the caller can do with less.
    ///
    /// # Errors
    /// As for [`Self::take_of_quota`].
    pub(crate) fn reserve_free_quota(&self, transaction: &str, bytes: u64) -> Result<(), StoreError> {
        match bytes {
            0 => Ok(()),
            bytes => self.within_free_quota(transaction, &|held| held.reserve(bytes)),
        }
    }

    /// Has later reservations include a small file of about `bytes` that is written at the end.
    pub(crate) fn expect_record(&self, transaction: &str, bytes: u64) {
        if let Some(state) = self.transactions.lock().get_mut(transaction) {
            state.held.records = state.held.records.saturating_add(bytes);
        }
    }

    /// Applies `change` if that is within the user's quota. If it is not, deletes models from the trash that are
    /// charged to the user and whose names other models have taken: they must not keep anything out. Nothing is deleted
    /// if that cannot suffice.
    fn within_quota(&self, transaction: &str, change: impl Fn(&mut Held)) -> Result<(), StoreError> {
        loop {
            let refused = match self.within_free_quota(transaction, &change) {
                Err(refused) => refused,
                Ok(()) => return Ok(()),
            };
            let StoreError::OverQuota { uid, needed_bytes, used_bytes, limit_bytes } = refused else {
                return Err(refused);
            };
            let excess = needed_bytes.saturating_add(used_bytes).saturating_sub(limit_bytes);
            if displaced_bytes(self, Some(uid))? < excess {
                return Err(refused);
            }
            let used_before = self.charged_bytes(uid)?;
            let is_enough = || Ok(used_before.saturating_sub(self.charged_bytes(uid)?) >= excess);
            if drop_displaced(self, Some(uid), &is_enough)?.0.is_empty() {
                return Err(refused);
            }
        }
    }

    fn within_free_quota(&self, transaction: &str, change: &dyn Fn(&mut Held)) -> Result<(), StoreError> {
        let mut charged = None;
        for attempt in 1..=MAX_TRIES {
            let mut transactions = self.transactions.lock();
            let Some(state) = transactions.get(transaction) else { return Ok(()) };
            let mut held = state.held;
            change(&mut held);
            let growth = held.bytes().saturating_sub(state.held.bytes());
            if let Some((uid, limit_bytes)) = state.limit().filter(|_| growth > 0) {
                let now = self.charged_bytes_now(uid).or(charged.filter(|_| attempt == MAX_TRIES));
                let Some(charged_now) = now else {
                    drop(transactions);
                    charged = Some(self.count_charges(uid)?);
                    continue;
                };
                let others = transactions.iter().filter(|(name, _)| *name != transaction);
                let of_user = others.map(|(_, state)| state).filter(|state| state.uid == Some(uid));
                let in_progress = of_user.map(|state| state.held.bytes()).fold(0, u64::saturating_add);
                let (needed_bytes, used_bytes) = (held.bytes(), charged_now.saturating_add(in_progress));
                if needed_bytes > limit_bytes.saturating_sub(used_bytes) {
                    return Err(StoreError::OverQuota { uid, needed_bytes, used_bytes, limit_bytes });
                }
            }
            if let Some(state) = transactions.get_mut(transaction) {
                state.held = held;
            }
            return Ok(());
        }
        Ok(())
    }

    /// A file of a transaction was removed, or takes less than was counted.
    pub(crate) fn give_back_of_quota(&self, transaction: &str, bytes: u64) {
        if let Some(state) = self.transactions.lock().get_mut(transaction) {
            state.held.taken = state.held.taken.saturating_sub(bytes);
        }
    }

    /// A transaction continues the download of a file, and has taken what the file has on disk already. That of
    /// another user must be within the quota.
    pub(crate) fn adopt_download(&self, transaction: &str, file: Digest) -> Result<(), StoreError> {
        let bytes = self.bytes_of_download(file)?;
        let adopt = |held: &mut Held| {
            // Beside what is reserved, which is for the rest of the file.
            held.taken = held.taken.saturating_add(bytes);
            held.reserved = held.reserved.saturating_add(bytes);
        };
        let user = self.user_of_transaction(transaction);
        let is_own = self.download_about(file).is_some_and(|about| Some(about.uid) == user);
        if bytes > 0 && !is_own && !self.has_adopted(transaction, file) {
            self.within_quota(transaction, adopt)?;
        }
        let mut transactions = self.transactions.lock();
        let Some(state) = transactions.get_mut(transaction) else { return Ok(()) };
        if state.downloads.insert(file) && bytes > 0 {
            if is_own {
                adopt(&mut state.held);
            }
            // From now on only the transaction counts it.
            self.note_charges_changed();
        }
        Ok(())
    }

    fn has_adopted(&self, transaction: &str, file: Digest) -> bool {
        self.transactions.lock().get(transaction).is_some_and(|state| state.downloads.contains(&file))
    }

    /// What an unfinished download takes on disk, with the blobs that it has published; 0 if there is none.
    fn bytes_of_download(&self, file: Digest) -> Result<u64, StoreError> {
        let Some(mut bytes) = self.bytes_of_partial(file)? else { return Ok(0) };
        for node in self.download_needs(file)? {
            bytes = bytes.saturating_add(node.bytes_on_disk(self)?.unwrap_or_default());
        }
        Ok(bytes)
    }

    /// What the unfinished download of a file takes on disk, if it is charged to this user.
    pub(crate) fn own_download_bytes(&self, uid: u32, file: Digest) -> Result<u64, StoreError> {
        match self.download_about(file).is_some_and(|about| about.uid == uid) {
            true => self.bytes_of_download(file),
            false => Ok(0),
        }
    }

    /// Counts what these files keep as taken by a transaction, as far as it is stored and no name pays for it.
    ///
    /// # Errors
    /// As for [`Self::take_of_quota`].
    pub(crate) fn claim_of_quota(
        &self,
        transaction: &str,
        files: &BTreeSet<Digest>,
    ) -> Result<(), StoreError> {
        let limit = self.transactions.lock().get(transaction).and_then(Transaction::limit);
        let Some((uid, _)) = limit else { return Ok(()) };
        let files = files.iter().flat_map(|file| [Node::Blob(*file), Node::Recipe(*file)]).collect();
        let unpaid_bytes = self.unpaid_bytes(uid, files)?;
        self.within_quota(transaction, |held| held.claimed = held.claimed.max(unpaid_bytes))
    }

    /// The most bytes that may be charged to a user beside what is charged already and in progress.
    pub fn quota_left(&self, uid: u32, limit_bytes: u64) -> Result<u64, StoreError> {
        let charged = self.charged_bytes(uid)?;
        let transactions = self.transactions.lock();
        let of_user = transactions.values().filter(|state| state.uid == Some(uid));
        let in_progress = of_user.map(|state| state.held.bytes()).fold(0, u64::saturating_add);
        Ok(limit_bytes.saturating_sub(charged.saturating_add(in_progress)))
    }

    /// A transaction has set a name: what it has taken is charged to the name from now on. `is_new` says whether the
    /// name is new and kept nothing before.
    pub(crate) fn settle_quota(
        &self,
        transaction: &str,
        name: &Reference,
        manifest: &Manifest,
        is_new: bool,
    ) {
        let account = self.account_of(name, manifest.digest()).filter(|_| is_new);
        let record_bytes = account.and_then(|_| record_bytes(&self.root, name).ok());
        let mut transactions = self.transactions.lock();
        match account.zip(record_bytes) {
            Some((account, record_bytes)) => {
                let files: Vec<Digest> = manifest.digests().into_iter().collect();
                let time = std::time::UNIX_EPOCH;
                self.note_claim(&Claim::of_files(ClaimKind::Tag, Some(account), time, &files), record_bytes);
            }
            None => self.note_charges_changed(),
        }
        if let Some(state) = transactions.get_mut(transaction) {
            state.held = Held::default();
            state.published.clear();
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
