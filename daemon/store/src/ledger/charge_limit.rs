//! Limits of the bytes that are charged to one user, or to the members of a group together.

use std::fmt;
use std::sync::Arc;
use std::time::{SystemTime, UNIX_EPOCH};

use serde::{Deserialize, Serialize};

use crate::ledger::Ledger;
use crate::lock;

/// Says which users are members of a group.
pub trait Members: fmt::Debug + Send + Sync {
    /// Whether this user is a member. Transactions wait while this is answered, so the answer comes from memory.
    fn contains(&self, uid: u32) -> bool;

    /// Finds out what [`Self::contains`] needs to know of these users. May take long: nothing is locked.
    fn prepare(&self, _uids: &[u32]) {}
}

/// The limits of what is charged to all members of a group together.
#[derive(Clone, Debug)]
pub struct Pool {
    /// The group, as the administrator has named it.
    pub name: String,
    /// Above it, requests succeed with a note.
    pub soft_bytes: Option<u64>,
    /// Nothing that a member adds may exceed it.
    pub hard_bytes: Option<u64>,
    pub members: Arc<dyn Members>,
}

/// Whose charges a limit counts.
#[derive(Clone, Debug)]
pub enum Payer {
    User(u32),
    Pool(Pool),
}

impl Payer {
    /// Whether what this user pays for counts.
    pub fn includes(&self, uid: u32) -> bool {
        match self {
            Self::User(user) => *user == uid,
            Self::Pool(pool) => pool.members.contains(uid),
        }
    }

    pub(crate) const fn pool(&self) -> Option<&Pool> {
        match self {
            Self::User(_) => None,
            Self::Pool(pool) => Some(pool),
        }
    }

    /// The name of the group; `None` for a user.
    pub fn group(&self) -> Option<&str> {
        self.pool().map(|pool| pool.name.as_str())
    }
}

/// The most bytes that may be charged.
#[derive(Clone, Debug)]
pub struct ChargeLimit {
    pub payer: Payer,
    /// The bytes on disk.
    pub bytes: u64,
}

impl ChargeLimit {
    pub const fn for_user(uid: u32, bytes: u64) -> Self {
        Self { payer: Payer::User(uid), bytes }
    }
}

impl Ledger {
    /// Replaces the pools, for transactions that begin from now on.
    pub fn set_pools(&self, pools: Vec<Pool>) {
        *lock(&self.pools) = pools.into();
    }

    pub fn pools(&self) -> Arc<[Pool]> {
        Arc::clone(&lock(&self.pools))
    }

    pub fn pool_limits_of(&self, uid: u32) -> Vec<ChargeLimit> {
        let pools = self.pools();
        pools.iter().for_each(|pool| pool.members.prepare(&[uid]));
        let of_user = pools.iter().filter(|pool| pool.members.contains(uid));
        let limit =
            |pool: &Pool| Some(ChargeLimit { bytes: pool.hard_bytes?, payer: Payer::Pool(pool.clone()) });
        of_user.filter_map(limit).collect()
    }
}

/// Who is charged for a name. A renamed or restored model stays with the user who added it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Account {
    /// Since when, in nanoseconds since 1970.
    pub since: u64,
    pub uid: u32,
    /// The user who added the name, if it is charged to another one, who has updated it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub added_by: Option<u32>,
}

impl Account {
    /// The user who may change the name.
    #[must_use]
    pub fn adder(&self) -> u32 {
        self.added_by.unwrap_or(self.uid)
    }
}

pub(crate) fn unix_nanos(time: SystemTime) -> u64 {
    let since = time.duration_since(UNIX_EPOCH).unwrap_or_default();
    u64::try_from(since.as_nanos()).unwrap_or(u64::MAX)
}
