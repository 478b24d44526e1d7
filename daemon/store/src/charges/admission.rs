//! Compares what a user's transactions will take on disk with the user's quota.
//!
//! A transaction counts as what was reserved for it, or as what it has taken if that is more, until it ends. So the
//! transactions of a user are admitted together, and what is admitted can be completed.

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use crate::index::{Claim, ClaimKind};
use crate::transactions::Held;
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
        self.within_quota(transaction, |held| {
            let files = held.taken.saturating_add(bytes);
            held.reserved = held.reserved.max(files.saturating_add(held.recipes));
        })
    }

    /// Has later reservations include a recipe of about `bytes`.
    pub(crate) fn expect_recipe(&self, transaction: &str, bytes: u64) {
        if let Some(state) = self.transactions.lock().get_mut(transaction) {
            state.held.recipes = state.held.recipes.saturating_add(bytes);
        }
    }

    fn within_quota(&self, transaction: &str, change: impl Fn(&mut Held)) -> Result<(), StoreError> {
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
                let of_user = transactions.values().filter(|state| state.uid == Some(uid));
                let in_progress = of_user.map(|state| state.held.bytes()).fold(0, u64::saturating_add);
                let used_bytes = charged_now.saturating_add(in_progress);
                if growth > limit_bytes.saturating_sub(used_bytes) {
                    return Err(StoreError::OverQuota { uid, needed_bytes: growth, used_bytes, limit_bytes });
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

    /// A transaction continues the download of a file, and has taken what the file has on disk already.
    pub(crate) fn adopt_download(&self, transaction: &str, file: Digest) -> Result<(), StoreError> {
        let mut bytes = self.bytes_of_partial(file)?;
        if let Some(bytes) = &mut bytes {
            for node in self.download_needs(file)? {
                *bytes = bytes.saturating_add(node.bytes_on_disk(self)?.unwrap_or_default());
            }
        }
        let mut transactions = self.transactions.lock();
        let Some(state) = transactions.get_mut(transaction) else { return Ok(()) };
        if state.downloads.insert(file)
            && let Some(bytes) = bytes
        {
            state.held.taken = state.held.taken.saturating_add(bytes);
            // From now on only the transaction counts it.
            self.note_charges_changed();
        }
        Ok(())
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
        let mut transactions = self.transactions.lock();
        match account {
            Some(account) => {
                let files: Vec<Digest> = manifest.digests().into_iter().collect();
                let time = std::time::UNIX_EPOCH;
                self.note_claim(&Claim::of_files(ClaimKind::Tag, Some(account), time, &files));
            }
            None => self.note_charges_changed(),
        }
        if let Some(state) = transactions.get_mut(transaction) {
            state.held = Held::default();
            state.published.clear();
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
