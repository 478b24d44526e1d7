//! What is charged to each user, in memory.
//!
//! A new name adds what it is the first to keep, in time proportional to its own blobs. What removes or replaces
//! something, such as `rm`, only invalidates the sums: they are counted again, over the catalog, when a transaction
//! of a user with a quota is admitted next. A removal reads every manifest itself, so that count adds little to it.

use std::collections::{BTreeMap, BTreeSet, HashSet};

use tracing_mutex::stdsync::Mutex;

use super::claims::Scope;
use crate::gc::Node;
use crate::history::Account;
use crate::index::{Claim, ClaimKind, Payers};
use crate::{ChargeLimit, Payer, Store, StoreError, lock};

/// The sums by user. Nothing is read or written on the disk while `state` is locked.
#[derive(Debug, Default)]
pub(crate) struct Totals {
    state: Mutex<State>,
    /// Held while the sums are counted: a caller that waits for it needs the same ones.
    counting: Mutex<()>,
}

#[derive(Debug, Default)]
struct State {
    /// The number of changes so far.
    changes: u64,
    /// `None` until a user with a quota needs them.
    counted: Option<Counted>,
}

#[derive(Debug)]
struct Counted {
    /// The number of changes that it includes.
    changes: u64,
    payers: Payers,
    /// Bytes on disk of unfinished downloads, of records in the trash and of those of names.
    others: BTreeMap<u32, u64>,
}

impl Counted {
    fn charged_to(&self, uid: u32) -> u64 {
        let others = self.others.get(&uid).copied().unwrap_or_default();
        self.payers.charged_to(Some(uid)).saturating_add(others)
    }

    fn charged_to_each(&self, limits: &[ChargeLimit]) -> Vec<u64> {
        limits.iter().map(|limit| self.charged_to_payer(&limit.payer)).collect()
    }

    fn users(&self) -> BTreeSet<u32> {
        self.payers.users().chain(self.others.keys().copied()).collect()
    }

    fn charged_to_payer(&self, payer: &Payer) -> u64 {
        match payer {
            Payer::User(uid) => self.charged_to(*uid),
            Payer::Pool(pool) => {
                let members = self.users().into_iter().filter(|uid| pool.members.contains(*uid));
                members.map(|uid| self.charged_to(uid)).fold(0, u64::saturating_add)
            }
        }
    }
}

impl Store {
    /// Bytes on disk that are charged to a user, without transactions in progress.
    pub fn charged_bytes(&self, uid: u32) -> Result<u64, StoreError> {
        self.charged_bytes_of(&Payer::User(uid))
    }

    /// The same of a user or of all members of a group.
    pub fn charged_bytes_of(&self, payer: &Payer) -> Result<u64, StoreError> {
        self.read_charges(|counted| counted.charged_to_payer(payer))
    }

    /// The same; `None` while the index is built: nobody waits for that.
    pub fn charged_bytes_unless_building(&self, payer: &Payer) -> Result<Option<u64>, StoreError> {
        let read = |counted: &Counted| counted.charged_to_payer(payer);
        if let Some(bytes) = self.read_charges_now(read) {
            return Ok(Some(bytes));
        }
        // Not in the condition itself: the catalog would stay locked, and the count locks it.
        let is_complete = self.catalog_unless_building()?.is_some();
        is_complete.then(|| self.read_charges(read)).transpose()
    }

    /// What is charged to each of the payers, if nothing must be counted for it.
    pub(super) fn charged_to_now(&self, limits: &[ChargeLimit]) -> Option<Vec<u64>> {
        self.read_charges_now(|counted| counted.charged_to_each(limits))
    }

    /// The same; counts the sums if necessary.
    pub(super) fn charged_to(&self, limits: &[ChargeLimit]) -> Result<Vec<u64>, StoreError> {
        self.read_charges(|counted| counted.charged_to_each(limits))
    }

    /// The users whom something is charged to.
    pub(super) fn charged_users(&self) -> Result<BTreeSet<u32>, StoreError> {
        self.read_charges(Counted::users)
    }

    fn read_charges_now<T>(&self, read: impl FnOnce(&Counted) -> T) -> Option<T> {
        let state = lock(&self.totals.state);
        let counted = state.counted.as_ref().filter(|counted| counted.changes == state.changes)?;
        let is_current = self.catalog_now().is_some_and(|catalog| counted.payers.are_of(&catalog));
        is_current.then(|| read(counted))
    }

    /// Bytes on disk of what these roots keep that no name pays for, and that are not charged to the user either. What
    /// the user's own transactions have published is left out: they count it. The name with the account `replaced` pays
    /// for nothing: it is about to get other content.
    pub(super) fn unpaid_bytes(
        &self,
        uid: u32,
        roots: Vec<Node>,
        replaced: Option<Account>,
    ) -> Result<u64, StoreError> {
        self.charged_bytes(uid)?;
        let published = self.published_in_transactions().into_iter().filter(|(user, _)| *user == uid);
        let own: HashSet<Node> = published.flat_map(|(_, nodes)| nodes).collect();
        let claim = Claim { kind: ClaimKind::Ingest, since: 0, uid: Some(uid), roots };
        // In the order in which `charged_bytes_now` locks them. The index was complete for the count above.
        let state = lock(&self.totals.state);
        let counted = state.counted.as_ref().zip(self.catalog_now());
        let replaced = replaced.map(|account| (account.uid, account.since));
        Ok(counted
            .map_or(0, |(counted, catalog)| counted.payers.unpaid_by_names(&catalog, &claim, &own, replaced)))
    }

    /// Reads the sums. Counts them first, if they are out of date.
    fn read_charges<T>(&self, read: impl Fn(&Counted) -> T) -> Result<T, StoreError> {
        if let Some(value) = self.read_charges_now(&read) {
            return Ok(value);
        }
        let _counting = lock(&self.totals.counting);
        if let Some(value) = self.read_charges_now(&read) {
            return Ok(value);
        }
        // What changes from now on may be missing in the count, so it makes the count invalid.
        let changes = lock(&self.totals.state).changes;
        let (claims, others) = (self.claims(Scope::AtRest)?, self.other_charges_at_rest()?);
        let payers = Payers::count(&*self.catalog()?, &claims);
        let counted = Counted { changes, payers, others };
        let value = read(&counted);
        lock(&self.totals.state).counted = Some(counted);
        Ok(value)
    }

    fn other_charges_at_rest(&self) -> Result<BTreeMap<u32, u64>, StoreError> {
        let mut others = BTreeMap::new();
        let mut add = |uid: Option<u32>, bytes: u64| {
            if let Some(uid) = uid {
                let sum: &mut u64 = others.entry(uid).or_default();
                *sum = sum.saturating_add(bytes);
            }
        };
        for partial in self.partials()?.into_iter().filter(|partial| !self.is_downloading(partial.file)) {
            add(self.download_about(partial.file).map(|about| about.uid), partial.bytes);
        }
        for (record, uid) in self.users_of_trash() {
            add(uid, self.trashed_bytes(record)?);
        }
        for tag in self.summaries()? {
            add(tag.account.map(|account| account.uid), tag.record_bytes);
        }
        Ok(others)
    }

    /// Whom names are charged to has changed in a way that only a new count can follow.
    pub(crate) fn note_charges_changed(&self) {
        lock(&self.totals.state).changes += 1;
    }

    /// A name was set that did not exist before, whose records take `record_bytes`.
    pub(super) fn note_claim(&self, claim: &Claim, record_bytes: u64) {
        let mut state = lock(&self.totals.state);
        let before = state.changes;
        state.changes += 1;
        let (after, catalog) = (state.changes, self.catalog_now());
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
