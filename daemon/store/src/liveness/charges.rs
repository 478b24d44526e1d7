//! Charges each byte of the store on disk to one user, or to none.
//!
//! There is no ledger on disk: charges are computed from what keeps data ([`crate::liveness::gc::walk`]) and from the
//! histories of names, which say who added each name. A blob is charged to the user whose name keeps it and is the
//! oldest. When that name goes, the next one pays. What only a model in the trash, an unfinished download or a
//! transaction keeps is charged to its user. The manifest and the history of a name are charged to the user who added
//! the name. Everything else is charged to no user: other records, directories, the index, what nothing needs, and
//! names of earlier versions, which did not record who set them.
//!
//! [`crate::ledger::totals`] has the sums in memory, `claims` lists what keeps data with its users, and `admission`
//! compares what a user's transactions will take with the user's quota.

use std::collections::{BTreeMap, BTreeSet, HashSet};
use std::sync::Arc;

use crate::index::{Claim, ClaimKind, Payers, user_shares};
use crate::ledger::charge_limit::{Account, Payer};
use crate::ledger::totals::Counted;
use crate::liveness::Liveness;
use crate::liveness::claims::{Scope, add_to_user};
use crate::node::Node;
use crate::{ChargeLimit, OtherFiles, StoreError, TagSummary, lock};

impl Liveness {
    /// Bytes on disk that are charged to a user, without transactions in progress.
    pub fn charged_bytes(&self, uid: u32) -> Result<u64, StoreError> {
        self.charged_bytes_of(&Payer::User(uid))
    }

    /// Like [`Self::charged_bytes`], for a user or all members of a group.
    pub fn charged_bytes_of(&self, payer: &Payer) -> Result<u64, StoreError> {
        self.read_charges(|counted| counted.charged_to_payer(payer))
    }

    /// Like [`Self::charged_bytes_of`]; `None` while the index is built: nobody waits for that.
    pub fn charged_bytes_unless_building(&self, payer: &Payer) -> Result<Option<u64>, StoreError> {
        let read = |counted: &Counted| counted.charged_to_payer(payer);
        if let Some(bytes) = self.ledger.read_charges_now(read) {
            return Ok(Some(bytes));
        }
        // Not in the condition itself: the catalog would stay locked, and the count locks it.
        let is_complete = self.content.index().catalog_unless_building()?.is_some();
        is_complete.then(|| self.read_charges(read)).transpose()
    }

    pub(crate) fn charged_users(&self) -> Result<BTreeSet<u32>, StoreError> {
        self.read_charges(Counted::users)
    }

    /// Bytes on disk of what these roots keep that no name pays for, and that are not charged to the user either. What
    /// the user's own transactions have published is left out: they count it. The name with the account `replaced` pays
    /// for nothing: it is about to get other content.
    pub(crate) fn unpaid_bytes(
        &self,
        uid: u32,
        roots: Vec<Node>,
        replaced: Option<Account>,
    ) -> Result<u64, StoreError> {
        self.charged_bytes(uid)?;
        let published = self.ledger.published_in_transactions().into_iter().filter(|(user, _)| *user == uid);
        let own: HashSet<Node> = published.flat_map(|(_, nodes)| nodes).collect();
        let claim = Claim { kind: ClaimKind::Ingest, since: 0, uid: Some(uid), roots };
        // Locked in this order everywhere. The index was complete for the count above.
        let state = lock(&self.ledger.totals.state);
        let counted = state.counted.as_ref().zip(self.content.index().catalog_now());
        let replaced = replaced.map(|account| (account.uid, account.since));
        Ok(counted
            .map_or(0, |(counted, catalog)| counted.payers.unpaid_by_names(&catalog, &claim, &own, replaced)))
    }

    /// Reads the sums. Counts them first, if they are out of date.
    fn read_charges<T>(&self, read: impl Fn(&Counted) -> T) -> Result<T, StoreError> {
        if let Some(value) = self.ledger.read_charges_now(&read) {
            return Ok(value);
        }
        let _counting = lock(&self.ledger.totals.counting);
        if let Some(value) = self.ledger.read_charges_now(&read) {
            return Ok(value);
        }
        // What changes from now on may be missing in the count, so it makes the count invalid.
        let changes = lock(&self.ledger.totals.state).changes;
        let tags = self.names.summaries()?;
        let (claims, others) = (self.claims(Scope::AtRest, &tags), self.other_charges_at_rest(&tags)?);
        let payers = Payers::count(&*self.content.index().catalog()?, &claims);
        let counted = Counted { changes, payers, others };
        let value = read(&counted);
        lock(&self.ledger.totals.state).counted = Some(counted);
        Ok(value)
    }

    fn other_charges_at_rest(&self, tags: &[Arc<TagSummary>]) -> Result<BTreeMap<u32, u64>, StoreError> {
        let mut others = BTreeMap::new();
        let mut add = |uid, bytes| add_to_user(&mut others, uid, bytes);
        for partial in
            self.content.partials()?.into_iter().filter(|partial| !self.ledger.is_downloading(partial.file))
        {
            add(self.content.download_about(partial.file).map(|about| about.uid), partial.bytes);
        }
        for (record, uid) in self.users_of_trash() {
            add(uid, self.names.trashed_bytes(record)?);
        }
        for tag in tags {
            add(tag.account.map(|account| account.uid), tag.record_bytes);
        }
        Ok(others)
    }

    pub(crate) fn charged_to(&self, limits: &[ChargeLimit]) -> Result<Vec<u64>, StoreError> {
        self.read_charges(|counted| counted.charged_to_each(limits))
    }
}

/// What is charged to one user, or to none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserCharge {
    pub uid: Option<u32>,
    /// Bytes on disk that this user pays for. The sum over all users and none is what the store takes on disk.
    pub charged_bytes: u64,
    /// Bytes of blobs and recipes that only this user's models and downloads keep.
    pub unique_bytes: u64,
    /// Bytes of blobs and recipes that other users' models and downloads keep too, whoever pays for them.
    pub shared_bytes: u64,
    pub models: u64,
}

impl Liveness {
    /// The charges by user id, no user first. `others` are the files that the catalog does not count, counted just
    /// before. With `only`, unique and shared bytes are those of this user only, which takes less time.
    pub fn charges(&self, others: &OtherFiles, only: Option<u32>) -> Result<Vec<UserCharge>, StoreError> {
        let tags = self.names.summaries()?;
        let (claims, of_others) = (self.claims(Scope::All, &tags), self.users_of(others, &tags));
        let mut models: BTreeMap<Option<u32>, u64> = BTreeMap::new();
        claims.iter().filter(|claim| claim.is_tag()).for_each(|claim| {
            *models.entry(claim.uid).or_default() += 1;
        });
        let catalog = self.content.index().catalog()?;
        let (payers, shares) = (Payers::count(&catalog, &claims), user_shares(&catalog, &claims, only));
        let (blobs, of_users) = (catalog.used_bytes(), payers.charged_to_users());
        drop(catalog);
        let others_of_users = of_others.values().copied().fold(0, u64::saturating_add);
        let of_nobody =
            (blobs.saturating_sub(of_users)).saturating_add(others.total().saturating_sub(others_of_users));
        let mut users: BTreeSet<Option<u32>> = claims.iter().map(|claim| claim.uid).chain([None]).collect();
        users.extend(of_others.keys().map(|uid| Some(*uid)));
        let charge = |uid: Option<u32>| {
            let share = shares.get(&uid).copied().unwrap_or_default();
            let other_bytes = uid.and_then(|uid| of_others.get(&uid)).copied().unwrap_or_default();
            UserCharge {
                uid,
                charged_bytes: match uid {
                    Some(_) => payers.charged_to(uid).saturating_add(other_bytes),
                    None => of_nobody,
                },
                unique_bytes: share.unique_bytes,
                shared_bytes: share.shared_bytes,
                models: models.get(&uid).copied().unwrap_or_default(),
            }
        };
        Ok(users.into_iter().map(charge).collect())
    }
}

#[cfg(test)]
mod tests;
