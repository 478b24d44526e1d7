//! What is charged to each user, in memory.
//!
//! A new name adds what it is the first to keep, in time proportional to its own blobs. What removes or replaces
//! something, such as `rm`, only invalidates the sums: they are counted again, over the catalog, when a transaction of
//! a user with a quota is admitted next. A removal reads every manifest itself, so that count adds little to it.

use std::collections::{BTreeMap, BTreeSet};

use tracing_mutex::stdsync::Mutex;

use crate::index::{Claim, Payers};
use crate::ledger::Ledger;
use crate::{ChargeLimit, Payer, lock};

/// The sums by user. Nothing is read or written on the disk while `state` is locked.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    pub(crate) state: Mutex<State>,
    /// Held while the sums are counted: a caller that waits for it needs the same ones.
    pub(crate) counting: Mutex<()>,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    /// The number of changes so far.
    pub(crate) changes: u64,
    /// `None` until a user with a quota needs them.
    pub(crate) counted: Option<Counted>,
}

#[derive(Debug)]
pub(crate) struct Counted {
    /// The number of changes that it includes.
    pub(crate) changes: u64,
    pub(crate) payers: Payers,
    /// Bytes on disk of unfinished downloads, of records in the trash and of those of names.
    pub(crate) others: BTreeMap<u32, u64>,
}

impl Counted {
    pub(crate) fn charged_to(&self, uid: u32) -> u64 {
        let others = self.others.get(&uid).copied().unwrap_or_default();
        self.payers.charged_to(Some(uid)).saturating_add(others)
    }

    pub(crate) fn charged_to_each(&self, limits: &[ChargeLimit]) -> Vec<u64> {
        limits.iter().map(|limit| self.charged_to_payer(&limit.payer)).collect()
    }

    pub(crate) fn users(&self) -> BTreeSet<u32> {
        self.payers.users().chain(self.others.keys().copied()).collect()
    }

    pub(crate) fn charged_to_payer(&self, payer: &Payer) -> u64 {
        match payer {
            Payer::User(uid) => self.charged_to(*uid),
            Payer::Pool(pool) => {
                let members = self.users().into_iter().filter(|uid| pool.members.contains(*uid));
                members.map(|uid| self.charged_to(uid)).fold(0, u64::saturating_add)
            }
        }
    }
}

impl Ledger {
    /// What is charged to each of the payers, if nothing must be counted for it.
    pub(crate) fn charged_to_now(&self, limits: &[ChargeLimit]) -> Option<Vec<u64>> {
        self.read_charges_now(|counted| counted.charged_to_each(limits))
    }

    pub(crate) fn read_charges_now<T>(&self, read: impl FnOnce(&Counted) -> T) -> Option<T> {
        let state = lock(&self.totals.state);
        let counted = state.counted.as_ref().filter(|counted| counted.changes == state.changes)?;
        let is_current =
            self.content.index().catalog_now().is_some_and(|catalog| counted.payers.are_of(&catalog));
        is_current.then(|| read(counted))
    }

    /// The charges have changed in a way that needs a new count.
    pub(crate) fn note_charges_changed(&self) {
        lock(&self.totals.state).changes += 1;
    }

    /// A name was set that did not exist before, whose records take `record_bytes`.
    pub(crate) fn note_claim(&self, claim: &Claim, record_bytes: u64) {
        let mut state = lock(&self.totals.state);
        let before = state.changes;
        state.changes += 1;
        let (after, catalog) = (state.changes, self.content.index().catalog_now());
        if let Some((counted, catalog)) = state.counted.as_mut().zip(catalog)
            && counted.changes == before
            && counted.payers.are_of(&catalog)
            && counted.payers.add_latest(&catalog, claim)
        {
            counted.changes = after;
            if let Some(uid) = claim.uid {
                let sum = counted.others.entry(uid).or_default();
                *sum = sum.saturating_add(record_bytes);
            }
        }
    }
}
