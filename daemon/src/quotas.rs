//! How much of the disk may be charged to each user.

use std::collections::BTreeMap;

use blobd_client::protocol::accounts::{QuotaState, UserLimits};

use crate::names::Names;
use crate::peer_process::Namespaces;
use crate::principal::{Groups, Principal};
use crate::user_set::UserSet;

/// The limits of one user in bytes; without both there is no quota.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct UserQuota {
    /// Above it, requests succeed with a note.
    pub(crate) soft: Option<u64>,
    /// Nothing is added that would exceed it.
    pub(crate) hard: Option<u64>,
}

impl UserQuota {
    pub(crate) fn state(self, charged_bytes: u64) -> QuotaState {
        if self == Self::default() {
            QuotaState::None
        } else if self.hard.is_some_and(|hard| charged_bytes >= hard) {
            QuotaState::Full
        } else if self.soft.is_some_and(|soft| charged_bytes > soft) {
            QuotaState::OverSoft
        } else {
            QuotaState::Ok
        }
    }

    pub(crate) fn limits(self) -> Option<UserLimits> {
        let limits = UserLimits { soft_bytes: self.soft, hard_bytes: self.hard };
        (self != Self::default()).then_some(limits)
    }

    /// Larger limits come last; no limit is the largest.
    fn order(self) -> (u64, u64) {
        (self.hard.unwrap_or(u64::MAX), self.soft.unwrap_or(u64::MAX))
    }
}

/// The quotas of all users. By default there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quotas {
    pub(crate) default: UserQuota,
    /// By uid.
    pub(crate) users: BTreeMap<u32, UserQuota>,
    /// The members of each group.
    pub(crate) groups: Vec<(UserSet, UserQuota)>,
    /// For the groups of users without a connection.
    pub(crate) names: Names,
}

impl Quotas {
    /// The user's own entry; else the largest of those of its groups; else the default. Administrators have a quota only
    /// by an entry of their own.
    pub(crate) fn of(&self, principal: &Principal, may_administer: bool) -> UserQuota {
        if let Some(own) = self.users.get(&principal.uid) {
            return *own;
        }
        if may_administer {
            return UserQuota::default();
        }
        let of_groups = self.groups.iter().filter(|(members, _)| members.contains(principal));
        of_groups.map(|(_, quota)| *quota).max_by_key(|quota| quota.order()).unwrap_or(self.default)
    }

    /// A user without a connection, with the groups that the name service knows. Waits a moment if that does not
    /// answer.
    pub(crate) fn absent(&self, uid: u32) -> Principal {
        let groups = self.names.groups_of(uid);
        // All of them are here; the largest number means no group.
        Principal {
            pid: 0,
            uid,
            groups: Groups { primary: u32::MAX, supplementary: groups },
            namespaces: Namespaces::default(),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::user_set::{Member, NameOrNumber};

    fn names() -> Names {
        let users = "ann:x:70001:80003::/:\nbob:x:70002:70002::/:\n";
        Names::from_files(users, "staff:x:80001:bob\nlab:x:80003:\n")
    }

    fn quotas() -> Quotas {
        let hard = |hard| UserQuota { soft: None, hard: Some(hard) };
        let group = |gid| UserSet::new(&[Member::Group(NameOrNumber::Number(gid))], &names());
        Quotas {
            default: hard(1),
            users: BTreeMap::from([(7, UserQuota::default()), (0, hard(9))]),
            groups: vec![
                (group(80001), hard(20)),
                (group(80003), hard(30)),
                (group(80004), UserQuota::default()),
            ],
            names: names(),
        }
    }

    #[test]
    fn own_entry_counts_before_groups_and_groups_before_the_default() {
        let quotas = quotas();
        let of = |uid, gids: &[u32]| {
            let groups = Groups { primary: 1, supplementary: Some(gids.into()) };
            quotas.of(&Principal { pid: 1, uid, groups, namespaces: Namespaces::default() }, false).hard
        };
        assert_eq!(of(5, &[]), Some(1));
        assert_eq!(of(5, &[80001]), Some(20));
        assert_eq!(of(5, &[80003, 80001]), Some(30), "the largest");
        assert_eq!(of(5, &[80003, 80004]), None, "no limit is the largest");
        assert_eq!(of(7, &[80001]), None, "an entry without limits");
    }

    #[test]
    fn administrators_have_a_quota_only_by_their_own_entry() {
        let quotas = quotas();
        let of = |uid| quotas.of(&quotas.absent(uid), true).hard;
        assert_eq!((of(0), of(5), of(70001)), (Some(9), None, None));
    }

    #[test]
    fn groups_of_absent_users_are_those_of_the_name_service() {
        let quotas = quotas();
        let of = |uid| quotas.of(&quotas.absent(uid), false).hard;
        assert_eq!((of(70001), of(70002), of(70003)), (Some(30), Some(20), Some(1)));
    }

    #[test]
    fn state_says_which_limit_is_reached() {
        let quota = UserQuota { soft: Some(10), hard: Some(20) };
        let states = [10, 11, 19, 20].map(|bytes| quota.state(bytes));
        assert_eq!(states, [QuotaState::Ok, QuotaState::OverSoft, QuotaState::OverSoft, QuotaState::Full]);
        assert_eq!(UserQuota::default().state(u64::MAX), QuotaState::None);
    }
}
