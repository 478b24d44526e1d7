//! The user on whose behalf a verb runs.

use blobd_store::{Actor, Ingest, Verb};

use crate::access::{Right, Rights};
use crate::principal::Principal;
use crate::quotas::UserQuota;

/// The user on whose behalf a verb runs: for the log, and for what only administrators may do.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Requester {
    uid: u32,
    pid: i32,
    may_administer: bool,
    quota: UserQuota,
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
        }
    }

    pub(crate) fn of(peer: &Principal, rights: Rights) -> Self {
        let may_administer = rights.include(Right::Administer);
        Self { uid: peer.uid, pid: peer.pid, may_administer, quota: UserQuota::default() }
    }

    /// The same with a quota.
    pub(crate) const fn within(self, quota: UserQuota) -> Self {
        Self { quota, ..self }
    }

    pub(crate) const fn quota(self) -> UserQuota {
        self.quota
    }

    /// A transaction by which the requester changes a name, within the quota.
    pub(crate) fn acting(self, ingest: Ingest, verb: Verb) -> Ingest {
        ingest.on_behalf_of(self.doing(verb)).within_quota(self.quota.hard)
    }

    pub(crate) const fn uid(self) -> u32 {
        self.uid
    }

    /// The requester as the one who changes names by this verb.
    pub(crate) const fn doing(self, verb: Verb) -> Actor {
        Actor { uid: self.uid, verb }
    }

    pub(crate) const fn pid(self) -> i32 {
        self.pid
    }

    /// Whether the requester may change what administrators have pinned.
    pub(crate) const fn may_administer(self) -> bool {
        self.may_administer
    }
}
