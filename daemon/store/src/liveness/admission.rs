//! Compares what transactions will take on disk with the quotas of their users, and of the groups of these.
//!
//! A transaction counts as what was reserved for it, or as what it has taken if that is more, until it ends. So the
//! transactions of a user or group are admitted together, and what is admitted can be completed.
//!
//! What is stored already costs nothing if a name pays for it. Else, such as data of a model in the trash or of the
//! unfinished download of another user, the new name will pay for it, so it counts too.

use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use crate::index::{Claim, ClaimKind};
use crate::ledger::charge_limit::Account;
use crate::ledger::transactions::{Held, Transaction};
use crate::liveness::Liveness;
use crate::liveness::gc::{Node, displaced_bytes, drop_displaced};
use crate::names::summaries::record_bytes;
use crate::{ChargeLimit, Payer, StoreError};

/// Why a transaction may not take more.
enum Refused {
    /// It would exceed the limit of `payer` by `excess_bytes`.
    Exceeded {
        payer: Payer,
        excess_bytes: u64,
        error: Box<StoreError>,
    },
    Failed(StoreError),
}

impl From<StoreError> for Refused {
    fn from(error: StoreError) -> Self {
        Self::Failed(error)
    }
}

impl From<Refused> for StoreError {
    fn from(refused: Refused) -> Self {
        match refused {
            Refused::Exceeded { error, .. } => *error,
            Refused::Failed(error) => error,
        }
    }
}

impl Refused {
    fn check(limit: &ChargeLimit, uid: Option<u32>, held: Held, used_bytes: u64) -> Result<(), Self> {
        let (needed_bytes, limit_bytes, payer) = (held.bytes(), limit.bytes, limit.payer.clone());
        if needed_bytes <= limit_bytes.saturating_sub(used_bytes) {
            return Ok(());
        }
        let excess_bytes = needed_bytes.saturating_add(used_bytes).saturating_sub(limit_bytes);
        let (uid, group) = (uid.unwrap_or_default(), payer.group().map(str::to_owned));
        let error = StoreError::OverQuota { uid, group, needed_bytes, used_bytes, limit_bytes };
        Err(Self::Exceeded { payer, excess_bytes, error: Box::new(error) })
    }
}

/// What these transactions count against a limit.
fn bytes_in_progress<'t>(payer: &Payer, transactions: impl Iterator<Item = &'t Transaction>) -> u64 {
    let counted = transactions.filter(|state| state.uid.is_some_and(|uid| payer.includes(uid)));
    counted.map(|state| state.held.bytes()).fold(0, u64::saturating_add)
}

/// Checks are repeated when the sums have changed. The last one may use sums that are milliseconds out of date.
const MAX_TRIES: usize = 3;

impl Liveness {
    /// Counts `bytes` more as taken by a transaction. Counts nothing if that exceeds a limit.
    pub(crate) fn take_of_quota(&self, transaction: &str, bytes: u64) -> Result<(), StoreError> {
        self.within_quota(transaction, |held| held.taken = held.taken.saturating_add(bytes))
    }

    /// Reserves `bytes` for a transaction, beside what it has taken.
    pub(crate) fn reserve_of_quota(&self, transaction: &str, bytes: u64) -> Result<(), StoreError> {
        // Of a file that has nothing new the recipe is stored too.
        if bytes == 0 {
            return Ok(());
        }
        self.within_quota(transaction, |held| held.reserve(bytes))
    }

    /// Like [`Self::reserve_of_quota`], but deletes nothing to make that possible: the caller can do with less.
    pub(crate) fn reserve_free_quota(&self, transaction: &str, bytes: u64) -> Result<(), StoreError> {
        match bytes {
            0 => Ok(()),
            bytes => Ok(self.within_free_quota(transaction, &|held| held.reserve(bytes))?),
        }
    }

    /// Applies `change` if that is within all limits. If not, deletes displaced models that count against the limit
    /// from the trash and tries again, unless that cannot suffice.
    fn within_quota(&self, transaction: &str, change: impl Fn(&mut Held)) -> Result<(), StoreError> {
        loop {
            let (payer, excess_bytes, error) = match self.within_free_quota(transaction, &change) {
                Err(Refused::Exceeded { payer, excess_bytes, error }) => (payer, excess_bytes, *error),
                admitted => return Ok(admitted?),
            };
            if displaced_bytes(self, Some(&payer))? < excess_bytes {
                return Err(error);
            }
            let used_before = self.charged_bytes_of(&payer)?;
            let is_enough = || Ok(used_before.saturating_sub(self.charged_bytes_of(&payer)?) >= excess_bytes);
            if drop_displaced(self, Some(&payer), &is_enough)?.0.is_empty() {
                return Err(error);
            }
        }
    }

    fn within_free_quota(&self, transaction: &str, change: &dyn Fn(&mut Held)) -> Result<(), Refused> {
        self.prepare_pools(transaction)?;
        let mut counted = None;
        for attempt in 1..=MAX_TRIES {
            let mut transactions = self.ledger.transactions.lock();
            let Some(state) = transactions.get(transaction) else { return Ok(()) };
            let (limits, mut held) = (Arc::clone(&state.limits), state.held);
            change(&mut held);
            if held.bytes() > state.held.bytes() && !limits.is_empty() {
                let now = self.ledger.charged_to_now(&limits);
                let Some(charged) = now.or_else(|| counted.take().filter(|_| attempt == MAX_TRIES)) else {
                    drop(transactions);
                    counted = Some(self.charged_to(&limits)?);
                    continue;
                };
                for (limit, charged_bytes) in limits.iter().zip(charged) {
                    let others = transactions.iter().filter(|(name, _)| *name != transaction);
                    let in_progress = bytes_in_progress(&limit.payer, others.map(|(_, state)| state));
                    Refused::check(limit, state.uid, held, charged_bytes.saturating_add(in_progress))?;
                }
            }
            if let Some(state) = transactions.get_mut(transaction) {
                state.held = held;
            }
            return Ok(());
        }
        Ok(())
    }

    /// Has the pools of a transaction know all users whose charges may count, before anything is locked.
    fn prepare_pools(&self, transaction: &str) -> Result<(), StoreError> {
        let limits = self.ledger.transactions.lock().get(transaction).map(|state| Arc::clone(&state.limits));
        let limits = limits.unwrap_or_else(|| Arc::new([]));
        let pools: Vec<_> = limits.iter().filter_map(|limit| limit.payer.pool()).collect();
        if pools.is_empty() {
            return Ok(());
        }
        let mut uids = self.charged_users()?;
        uids.extend(self.ledger.transactions.lock().values().filter_map(|state| state.uid));
        let uids: Vec<u32> = uids.into_iter().collect();
        pools.into_iter().for_each(|pool| pool.members.prepare(&uids));
        Ok(())
    }

    /// A transaction continues a download and has taken what is on disk; another user's must be within the quota.
    pub(crate) fn adopt_download(&self, transaction: &str, file: Digest) -> Result<(), StoreError> {
        let bytes = self.bytes_of_download(file)?;
        let adopt = |held: &mut Held| {
            // Beside what is reserved, which is for the rest of the file.
            held.taken = held.taken.saturating_add(bytes);
            held.reserved = held.reserved.saturating_add(bytes);
        };
        let user = self.ledger.user_of_transaction(transaction);
        let is_own = self.content.download_about(file).is_some_and(|about| Some(about.uid) == user);
        if bytes > 0 && !is_own && !self.has_adopted(transaction, file) {
            self.within_quota(transaction, adopt)?;
        }
        let mut transactions = self.ledger.transactions.lock();
        let Some(state) = transactions.get_mut(transaction) else { return Ok(()) };
        if state.downloads.insert(file) && bytes > 0 {
            if is_own {
                adopt(&mut state.held);
            }
            // From now on only the transaction counts it.
            self.ledger.note_charges_changed();
        }
        Ok(())
    }

    fn has_adopted(&self, transaction: &str, file: Digest) -> bool {
        self.ledger.transactions.lock().get(transaction).is_some_and(|state| state.downloads.contains(&file))
    }

    /// What an unfinished download takes on disk, with the blobs that it has published; 0 if there is none.
    fn bytes_of_download(&self, file: Digest) -> Result<u64, StoreError> {
        let Some(mut bytes) = self.content.bytes_of_partial(file)? else { return Ok(0) };
        for node in self.content.download_needs(file)? {
            bytes = bytes.saturating_add(self.content.bytes_on_disk(node)?.unwrap_or_default());
        }
        Ok(bytes)
    }

    /// What the unfinished download of a file takes on disk, if it is charged to this user.
    pub(crate) fn own_download_bytes(&self, uid: u32, file: Digest) -> Result<u64, StoreError> {
        match self.content.download_about(file).is_some_and(|about| about.uid == uid) {
            true => self.bytes_of_download(file),
            false => Ok(0),
        }
    }

    /// Counts as taken what these files keep that is stored and no name pays for. The name with the account `replaced`
    /// is about to pay for nothing any more.
    pub(crate) fn claim_of_quota(
        &self,
        transaction: &str,
        files: &BTreeSet<Digest>,
        replaced: Option<Account>,
    ) -> Result<(), StoreError> {
        let limited = |state: &Transaction| state.uid.filter(|_| !state.limits.is_empty());
        let Some(uid) = self.ledger.transactions.lock().get(transaction).and_then(limited) else {
            return Ok(());
        };
        let files = files.iter().copied().flat_map(Node::both).collect();
        let unpaid_bytes = self.unpaid_bytes(uid, files, replaced)?;
        self.within_quota(transaction, |held| held.claimed = held.claimed.max(unpaid_bytes))
    }

    /// The most bytes that may be charged beside what is charged already and in progress, for each of the limits.
    pub fn quotas_left(&self, limits: &[ChargeLimit]) -> Result<Vec<u64>, StoreError> {
        let charged = self.charged_to(limits)?;
        let transactions = self.ledger.transactions.lock();
        let left = |(limit, charged): (&ChargeLimit, u64)| {
            let in_progress = bytes_in_progress(&limit.payer, transactions.values());
            limit.bytes.saturating_sub(charged.saturating_add(in_progress))
        };
        Ok(limits.iter().zip(charged).map(left).collect())
    }

    /// A transaction has set a name: what it has taken is charged to the name. `is_new`: the name kept nothing before.
    pub(crate) fn settle_quota(
        &self,
        transaction: &str,
        name: &Reference,
        manifest: &Manifest,
        is_new: bool,
    ) {
        let account = self.names.account_of(name, manifest.digest()).filter(|_| is_new);
        let record_bytes = account.and_then(|_| record_bytes(&self.content.root, name).ok());
        let mut transactions = self.ledger.transactions.lock();
        match account.zip(record_bytes) {
            Some((account, record_bytes)) => {
                let files: Vec<Digest> = manifest.digests().into_iter().collect();
                let time = std::time::UNIX_EPOCH;
                self.ledger
                    .note_claim(&Claim::for_files(ClaimKind::Tag, Some(account), time, &files), record_bytes);
            }
            None => self.ledger.note_charges_changed(),
        }
        if let Some(state) = transactions.get_mut(transaction) {
            state.held = Held::default();
            state.published.clear();
        }
    }
}
