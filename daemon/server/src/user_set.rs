//! Lists of users in the configuration, and whether a user is on one.

use std::collections::BTreeSet;
use std::fmt;

use crate::names::{NameError, Names};
use crate::principal::Principal;

/// An entry of a list of users in the configuration.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Member {
    /// All who can connect.
    Everyone,
    User(NameOrNumber),
    Group(NameOrNumber),
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NameOrNumber {
    Name(String),
    Number(u32),
}

impl fmt::Display for Member {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Everyone => f.write_str("*"),
            Self::User(user) => user.fmt(f),
            Self::Group(group) => write!(f, "@{group}"),
        }
    }
}

impl Member {
    /// Whether there is such a user or group. Numbers need no name.
    pub(crate) fn check(&self, names: &Names) -> Result<(), NameError> {
        match self {
            Self::User(NameOrNumber::Name(name)) => names.uid_of(name).map(drop),
            Self::Group(NameOrNumber::Name(name)) => names.gid_of(name).map(drop),
            _ => Ok(()),
        }
    }
}

impl fmt::Display for NameOrNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Number(number) => number.fmt(f),
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UserSet {
    has_everyone: bool,
    uids: BTreeSet<u32>,
    gids: BTreeSet<u32>,
}

impl UserSet {
    /// Names that do not exist mean nobody.
    pub(crate) fn new<'m>(members: impl IntoIterator<Item = &'m Member>, names: &Names) -> Self {
        let mut set = Self::default();
        for member in members {
            match member {
                Member::Everyone => set.has_everyone = true,
                Member::User(NameOrNumber::Number(uid)) => drop(set.uids.insert(*uid)),
                Member::User(NameOrNumber::Name(name)) => set.uids.extend(names.uid_of(name)),
                Member::Group(NameOrNumber::Number(gid)) => drop(set.gids.insert(*gid)),
                Member::Group(NameOrNumber::Name(name)) => set.gids.extend(names.gid_of(name)),
            }
        }
        set
    }

    pub(crate) const fn has_everyone(&self) -> bool {
        self.has_everyone
    }

    pub(crate) fn contains(&self, principal: &Principal) -> bool {
        let Principal { uid, groups, .. } = principal;
        self.has_everyone || self.uids.contains(uid) || self.gids.iter().any(|gid| groups.contains(*gid))
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use crate::principal::tests::principal;

    pub(crate) fn names() -> Names {
        let users = "ann:x:70001:70001::/:\nbob:x:70002:70002::/:\n";
        Names::from_files(users, "staff:x:80001:bob\nadmins:x:80002:\n")
    }

    pub(crate) fn name(name: &str) -> NameOrNumber {
        NameOrNumber::Name(name.to_owned())
    }

    #[test]
    fn users_are_members_by_name_by_number_and_by_group() {
        let members = [
            Member::User(name("ann")),
            Member::User(NameOrNumber::Number(70003)),
            Member::Group(name("staff")),
            Member::Group(NameOrNumber::Number(80009)),
            Member::User(name("nobody-of-this-name")),
        ];
        let set = UserSet::new(&members, &names());
        for (uid, gid, groups, is_member) in [
            (70001, 1, Some(&[][..]), true),
            (70003, 1, Some(&[]), true),
            (70004, 80001, Some(&[]), true),
            (70004, 1, Some(&[5, 80009]), true),
            (70004, 1, Some(&[5, 6]), false),
            // A user who was added to the group after the process got its groups.
            (70002, 1, Some(&[]), false),
            (70002, 1, None, false),
        ] {
            assert_eq!(set.contains(&principal(uid, gid, groups)), is_member, "{uid} {gid} {groups:?}");
        }
        let everyone = UserSet::new(&[Member::Everyone], &names());
        assert!(everyone.contains(&principal(5, 5, None)));
    }
}
