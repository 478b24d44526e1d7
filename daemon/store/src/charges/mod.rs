//! Whom the store's bytes on disk are charged to.
//!
//! There is no ledger on disk: charges are computed from what keeps data ([`crate::gc::walk`]) and from the histories
//! of names, which say who added each name. A blob is charged to the user whose name keeps it and is the oldest.
//! When that name goes, the next one pays. What only a model in the trash, an unfinished download or a transaction
//! keeps is charged to its user. The manifest and the history of a name are charged to the user who added the name.
//! Everything else is charged to no user: other records, directories, the index, what nothing needs, and names of earlier
//! versions, which did not record who set them.
//!
//! | file | responsibility |
//! |---|---|
//! | `claims` | lists what keeps data, with the users |
//! | `displaced` | what users have replaced by other models, until it is deleted |
//! | `totals` | the sums by user in memory, updated with each change |
//! | `admission` | compares what a user's transactions will take with the user's quota |

use std::collections::{BTreeMap, BTreeSet};

use crate::index::{Payers, user_shares};
use crate::{OtherFiles, Store, StoreError};

mod admission;
mod claims;
mod displaced;
#[cfg(test)]
mod tests;
mod totals;

use claims::Scope;
pub(crate) use displaced::DisplacedData;
pub(crate) use totals::Totals;

/// What is charged to one user, or to none.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct UserCharge {
    /// The user; `None` for what is charged to no user.
    pub uid: Option<u32>,
    /// Bytes on disk that this user pays for. The sum over all users and none is what the store takes on disk.
    pub charged_bytes: u64,
    /// Bytes of blobs and recipes that only this user's models and downloads keep.
    pub unique_bytes: u64,
    /// Bytes of blobs and recipes that other users' models and downloads keep too, whoever pays for them.
    pub shared_bytes: u64,
    /// The number of this user's tags.
    pub models: u64,
}

impl Store {
    /// What is charged to whom, in the order of the users, no user first. `others` are the files that the catalog does
    /// not count, counted just before.
    pub fn charges(&self, others: &OtherFiles) -> Result<Vec<UserCharge>, StoreError> {
        self.charges_with_shares(others, None)
    }

    /// The same with [`UserCharge::unique_bytes`] and [`UserCharge::shared_bytes`] of one user only, which takes less
    /// time.
    pub fn charges_for(&self, others: &OtherFiles, uid: u32) -> Result<Vec<UserCharge>, StoreError> {
        self.charges_with_shares(others, Some(uid))
    }

    fn charges_with_shares(
        &self,
        others: &OtherFiles,
        only: Option<u32>,
    ) -> Result<Vec<UserCharge>, StoreError> {
        let claims = self.claims(Scope::All)?;
        let of_others = self.users_of(others)?;
        let mut models: BTreeMap<Option<u32>, u64> = BTreeMap::new();
        claims.iter().filter(|claim| claim.is_tag()).for_each(|claim| {
            *models.entry(claim.uid).or_default() += 1;
        });
        let catalog = self.catalog()?;
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
