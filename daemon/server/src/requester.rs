//! The user on whose behalf a verb runs.

use blobd_client::protocol::access::Right;
use blobd_store::{Actor, ChangeId, ChargeLimit, Ingest, NameUser, Pinner, Store, Verb};

use crate::access::Rights;
use crate::principal::Principal;
use crate::quotas::UserQuota;

/// The user on whose behalf a verb runs, for the log and for what only administrators may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requester {
    uid: u32,
    pid: i32,
    may_administer: bool,
    quota: UserQuota,
    /// All names that the request changes are one change in their histories.
    change: ChangeId,
    undoes: Option<ChangeId>,
}

impl Requester {
    /// This process itself.
    pub fn own() -> Self {
        let pid = rustix::process::getpid().as_raw_nonzero().get();
        Self {
            uid: rustix::process::geteuid().as_raw(),
            pid,
            may_administer: true,
            quota: UserQuota::default(),
            change: ChangeId::next(),
            undoes: None,
        }
    }

    pub(crate) fn new(peer: &Principal, rights: Rights) -> Self {
        let may_administer = rights.include(Right::Administer);
        let (quota, change) = (UserQuota::default(), ChangeId::next());
        Self { uid: peer.uid, pid: peer.pid, may_administer, quota, change, undoes: None }
    }

    pub(crate) const fn within(self, quota: UserQuota) -> Self {
        Self { quota, ..self }
    }

    /// Records what the request changes as the reversal of an earlier change.
    pub(crate) const fn undoing(self, change: ChangeId) -> Self {
        Self { undoes: Some(change), ..self }
    }

    pub(crate) const fn quota(self) -> UserQuota {
        self.quota
    }

    /// Makes the requester the one who changes a name by this transaction, within its quotas and those of its groups.
    pub(crate) fn acting(self, ingest: Ingest, verb: Verb) -> Ingest {
        let ingest = ingest.on_behalf_of(self.doing(verb)).within_quota(self.quota.hard);
        if self.may_administer { ingest } else { ingest.within_pools() }
    }

    /// The hard limits of what may be charged to the requester and to its groups.
    pub(crate) fn limits(self, store: &Store) -> Vec<ChargeLimit> {
        let own = self.quota.hard.map(|bytes| ChargeLimit::for_user(self.uid, bytes));
        let of_groups = (!self.may_administer).then(|| store.ledger().pool_limits_of(self.uid));
        own.into_iter().chain(of_groups.into_iter().flatten()).collect()
    }

    pub(crate) const fn uid(self) -> u32 {
        self.uid
    }

    pub(crate) const fn doing(self, verb: Verb) -> Actor {
        Actor { uid: self.uid, verb, change: Some(self.change), undoes: self.undoes }
    }

    pub(crate) const fn pid(self) -> i32 {
        self.pid
    }

    pub(crate) const fn name_user(self) -> NameUser {
        NameUser { uid: self.uid, is_administrator: self.may_administer }
    }

    pub(crate) const fn pinner(self) -> Pinner {
        if self.may_administer { Pinner::Administrator } else { Pinner::User(self.uid) }
    }

    pub(crate) const fn may_administer(self) -> bool {
        self.may_administer
    }
}
