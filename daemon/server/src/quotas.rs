//! How much of the disk may be charged to each user, and to the members of groups together.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use blobd_client::protocol::space::{QuotaState, UserLimits};

use blobd_store::{Members, Pool};
use tracing_mutex::stdsync::RwLock;

use crate::locks::{read, write};
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

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct GroupQuota {
    pub(crate) name: String,
    pub(crate) members: UserSet,
    /// Of each member; `None` if the entry says nothing about that.
    pub(crate) each: Option<UserQuota>,
    pub(crate) together: UserQuota,
}

/// The quotas of all users. By default there are none.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Quotas {
    pub(crate) default: UserQuota,
    pub(crate) users: BTreeMap<u32, UserQuota>,
    pub(crate) groups: Vec<GroupQuota>,
    pub(crate) names: Names,
}

impl Quotas {
    /// The user's own entry; else the largest of those of its groups; else the default. Administrators have a quota only
    /// by an entry of their own.
    pub(crate) fn quota_of(&self, principal: &Principal, may_administer: bool) -> UserQuota {
        if let Some(own) = self.users.get(&principal.uid) {
            return *own;
        }
        if may_administer {
            return UserQuota::default();
        }
        let of_groups = self.groups.iter().filter(|group| group.members.contains(principal));
        let of_members = of_groups.filter_map(|group| group.each);
        of_members.max_by_key(|quota| quota.order()).unwrap_or(self.default)
    }

    /// A user without a connection, with the groups that the name service knows. Waits a moment.
    pub(crate) fn absent(&self, uid: u32) -> Principal {
        absent(&self.names, uid)
    }

    /// The limits of what the members of each group may store together. A user whose processes had the group when they
    /// connected is a member in `earlier` pools, and stays one.
    pub(crate) fn pools(&self, earlier: &[GroupPool]) -> Vec<GroupPool> {
        let pooled = self.groups.iter().filter(|group| group.together != UserQuota::default());
        let pool = |group: &GroupQuota| {
            let before = earlier.iter().find(|pool| pool.members.set == group.members);
            let seen = before.map(|pool| read(&pool.members.seen).clone()).unwrap_or_default();
            let (set, names) = (group.members.clone(), self.names.clone());
            let (listed, seen) = (RwLock::default(), RwLock::new(seen));
            let members = Arc::new(PoolMembers { set, names, listed, seen });
            GroupPool { name: group.name.clone(), quota: group.together, members }
        };
        pooled.map(pool).collect()
    }
}

fn absent(names: &Names, uid: u32) -> Principal {
    // All of them are here; the largest number means no group.
    Principal {
        pid: 0,
        uid,
        groups: Groups { primary: u32::MAX, supplementary: names.groups_of(uid) },
        namespaces: Namespaces::default(),
    }
}

#[derive(Clone, Debug)]
pub(crate) struct GroupPool {
    name: String,
    quota: UserQuota,
    members: Arc<PoolMembers>,
}

impl GroupPool {
    pub(crate) fn store_pool(&self) -> Pool {
        let UserQuota { soft: soft_bytes, hard: hard_bytes } = self.quota;
        let members = Arc::<PoolMembers>::clone(&self.members);
        Pool { name: self.name.clone(), soft_bytes, hard_bytes, members }
    }

    /// Counts the user as a member from now on if its process has the group: the system may not list all groups that
    /// processes have.
    pub(crate) fn note(&self, principal: &Principal) {
        self.members.note(principal);
    }
}

/// The members of a group: those that the system lists, and those whose processes had the group. A process without the
/// group does not end the membership of its user, who could otherwise add data outside of the pool.
#[derive(Debug)]
struct PoolMembers {
    set: UserSet,
    names: Names,
    /// The system's last answer, whether it lists a user.
    listed: RwLock<BTreeMap<u32, bool>>,
    seen: RwLock<BTreeSet<u32>>,
}

impl PoolMembers {
    /// The most members by their processes; more are not recorded.
    const MAX_SEEN: usize = 65_536;

    /// Does not use the name service: requests are counted here before their turn.
    fn note(&self, principal: &Principal) {
        if !self.set.contains(principal) || read(&self.seen).contains(&principal.uid) {
            return;
        }
        let mut seen = write(&self.seen);
        if seen.len() < Self::MAX_SEEN {
            seen.insert(principal.uid);
        }
    }
}

impl Members for PoolMembers {
    fn contains(&self, uid: u32) -> bool {
        if read(&self.seen).contains(&uid) {
            return true;
        }
        if let Some(is_listed) = read(&self.listed).get(&uid) {
            return *is_listed;
        }
        self.prepare(&[uid]);
        read(&self.listed).get(&uid).is_some_and(|is_listed| *is_listed)
    }

    fn prepare(&self, uids: &[u32]) {
        let asked: Vec<_> = uids.iter().map(|uid| absent(&self.names, *uid)).collect();
        let mut listed = write(&self.listed);
        for user in asked {
            // While the name service does not answer, what it said before counts.
            if user.groups.supplementary.is_some() || !listed.contains_key(&user.uid) {
                listed.insert(user.uid, self.set.contains(&user));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::principal::tests::principal;
    use crate::user_set::{Member, NameOrNumber};

    fn names() -> Names {
        let users = "ann:x:70001:80003::/:\nbob:x:70002:70002::/:\n";
        Names::from_files(users, "staff:x:80001:bob\nlab:x:80003:\n")
    }

    fn quotas() -> Quotas {
        let hard = |hard| UserQuota { soft: None, hard: Some(hard) };
        let group = |gid, each| GroupQuota {
            name: format!("{gid}"),
            members: UserSet::new(&[Member::Group(NameOrNumber::Number(gid))], &names()),
            each: Some(each),
            together: UserQuota::default(),
        };
        Quotas {
            default: hard(1),
            users: BTreeMap::from([(7, UserQuota::default()), (0, hard(9))]),
            groups: vec![group(80001, hard(20)), group(80003, hard(30)), group(80004, UserQuota::default())],
            names: names(),
        }
    }

    #[test]
    fn own_entry_counts_before_groups_and_groups_before_the_default() {
        let quotas = quotas();
        let of = |uid, gids: &[u32]| quotas.quota_of(&principal(uid, 1, Some(gids)), false).hard;
        assert_eq!(of(5, &[]), Some(1));
        assert_eq!(of(5, &[80001]), Some(20));
        assert_eq!(of(5, &[80003, 80001]), Some(30), "the largest");
        assert_eq!(of(5, &[80003, 80004]), None, "no limit is the largest");
        assert_eq!(of(7, &[80001]), None, "an entry without limits");
    }

    #[test]
    fn administrators_have_a_quota_only_by_their_own_entry() {
        let quotas = quotas();
        let of = |uid| quotas.quota_of(&quotas.absent(uid), true).hard;
        assert_eq!((of(0), of(5), of(70001)), (Some(9), None, None));
    }

    #[test]
    fn groups_of_absent_users_are_those_of_the_name_service() {
        let quotas = quotas();
        let of = |uid| quotas.quota_of(&quotas.absent(uid), false).hard;
        assert_eq!((of(70001), of(70002), of(70003)), (Some(30), Some(20), Some(1)));
    }

    fn pooled(gid: u32, each: Option<UserQuota>, together: u64) -> GroupQuota {
        let members = UserSet::new(&[Member::Group(NameOrNumber::Number(gid))], &names());
        let together = UserQuota { soft: None, hard: Some(together) };
        GroupQuota { name: format!("g{gid}"), members, each, together }
    }

    fn members(pool: &GroupPool, uids: &[u32]) -> Vec<u32> {
        let pool = pool.store_pool();
        uids.iter().copied().filter(|uid| pool.members.contains(*uid)).collect()
    }

    #[test]
    fn entry_about_a_whole_group_leaves_the_quota_of_each_member_to_other_entries() {
        let quotas = Quotas { groups: vec![pooled(80003, None, 50)], ..quotas() };
        assert_eq!(quotas.quota_of(&quotas.absent(70001), false).hard, Some(1), "the default");
        let pools = quotas.pools(&[]);
        let shared: Vec<_> =
            pools.iter().map(|pool| (pool.store_pool().name, pool.store_pool().hard_bytes)).collect();
        assert_eq!(shared, [("g80003".to_owned(), Some(50))]);
    }

    #[test]
    fn members_of_a_pool_are_those_that_the_system_lists_and_those_whose_processes_had_the_group() {
        let quotas = Quotas { groups: vec![pooled(80001, None, 50), pooled(80003, None, 50)], ..quotas() };
        let pools = quotas.pools(&[]);
        let uids = [70001, 70002, 70003];
        assert_eq!((members(&pools[0], &uids), members(&pools[1], &uids)), (vec![70002], vec![70001]));
        let process = |uid, gids: &[u32]| principal(uid, 1, Some(gids));
        pools.iter().for_each(|pool| pool.note(&process(70003, &[80001])));
        assert_eq!(members(&pools[0], &uids), [70002, 70003]);
        // Without the group, its process would store outside of the pool.
        pools.iter().for_each(|pool| pool.note(&process(70003, &[])));
        pools.iter().for_each(|pool| pool.note(&process(70002, &[])));
        let reloaded = quotas.pools(&pools);
        assert_eq!(members(&reloaded[0], &uids), [70002, 70003]);
        assert_eq!(members(&reloaded[1], &uids), [70001]);
    }

    #[test]
    fn state_says_which_limit_is_reached() {
        let quota = UserQuota { soft: Some(10), hard: Some(20) };
        let states = [10, 11, 19, 20].map(|bytes| quota.state(bytes));
        assert_eq!(states, [QuotaState::Ok, QuotaState::OverSoft, QuotaState::OverSoft, QuotaState::Full]);
        assert_eq!(UserQuota::default().state(u64::MAX), QuotaState::None);
    }
}
