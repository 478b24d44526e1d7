//! Which users have which rights.

use std::collections::BTreeSet;
use std::fmt;
use std::path::PathBuf;

use blobd_client::protocol::access::OwnAccess;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};

use crate::principal::{GroupNames, Principal, UserNames};

/// What a user may do. Each right includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Right {
    /// List and open models.
    Read,
    /// Add models.
    Pull,
    /// Remove and rename models, collect.
    Administer,
}

impl Right {
    const ALL: [Self; 3] = [Self::Read, Self::Pull, Self::Administer];

    /// Its name in the configuration and in the protocol.
    pub(crate) const fn name(self) -> &'static str {
        match self {
            Self::Read => "read",
            Self::Pull => "pull",
            Self::Administer => "admin",
        }
    }
}

/// The rights of one user.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
    /// The one that includes all others.
    highest: Option<Right>,
}

impl Rights {
    pub(crate) fn include(self, right: Right) -> bool {
        self.highest >= Some(right)
    }

    fn names(self) -> Vec<String> {
        let included = Right::ALL.into_iter().filter(|right| self.include(*right));
        included.map(|right| right.name().to_owned()).collect()
    }
}

/// A member of a list of users in the configuration.
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

impl fmt::Display for NameOrNumber {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Name(name) => f.write_str(name),
            Self::Number(number) => number.fmt(f),
        }
    }
}

/// The names of users and groups that the configuration may use.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Names {
    pub(crate) users: UserNames,
    pub(crate) groups: GroupNames,
}

impl Names {
    pub(crate) fn read() -> Self {
        Self { users: UserNames::read(), groups: GroupNames::read() }
    }

    /// Whether the member exists. Numbers need no name.
    pub(crate) fn know(&self, member: &Member) -> bool {
        match member {
            Member::User(NameOrNumber::Name(name)) => self.users.uid_of(name).is_some(),
            Member::Group(NameOrNumber::Name(name)) => self.groups.gid_of(name).is_some(),
            _ => true,
        }
    }
}

/// A set of users.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UserSet {
    has_everyone: bool,
    uids: BTreeSet<u32>,
    gids: BTreeSet<u32>,
    /// The members of these groups by `/etc/group`, for kernels that do not report the groups of a process.
    listed: BTreeSet<u32>,
}

impl UserSet {
    /// Names that do not exist mean nobody.
    pub(crate) fn new<'m>(members: impl IntoIterator<Item = &'m Member>, names: &Names) -> Self {
        let mut set = Self::default();
        for member in members {
            match member {
                Member::Everyone => set.has_everyone = true,
                Member::User(NameOrNumber::Number(uid)) => drop(set.uids.insert(*uid)),
                Member::User(NameOrNumber::Name(name)) => set.uids.extend(names.users.uid_of(name)),
                Member::Group(NameOrNumber::Number(gid)) => drop(set.gids.insert(*gid)),
                Member::Group(NameOrNumber::Name(name)) => set.gids.extend(names.groups.gid_of(name)),
            }
        }
        let listed = set.gids.iter().flat_map(|gid| names.groups.members_of(*gid));
        set.listed = listed.filter_map(|name| names.users.uid_of(name)).collect();
        set
    }

    pub(crate) fn contains(&self, principal: &Principal) -> bool {
        let Principal { uid, groups, .. } = principal;
        self.has_everyone
            || self.uids.contains(uid)
            || self.gids.iter().any(|gid| groups.contains(*gid))
            || groups.supplementary.is_none() && self.listed.contains(uid)
    }
}

/// Who has which rights. By default only the owners of the store have any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) read: UserSet,
    pub(crate) pull: UserSet,
    pub(crate) administer: UserSet,
    /// The names when the configuration was read: finding them needs no file.
    pub(crate) users: UserNames,
    /// The configuration file, for errors.
    pub(crate) file: Option<PathBuf>,
}

impl Access {
    pub(crate) fn rights_of(&self, principal: &Principal) -> Rights {
        let has = |right| match right {
            Right::Administer => principal.owns_store() || self.administer.contains(principal),
            Right::Pull => self.pull.contains(principal),
            Right::Read => self.read.contains(principal),
        };
        Rights { highest: Right::ALL.into_iter().rev().find(|right| has(*right)) }
    }

    pub(crate) fn own_access(&self, principal: &Principal) -> OwnAccess {
        OwnAccess {
            uid: principal.uid,
            user: self.users.name_of(principal.uid),
            groups: principal.groups.all().into_iter().collect(),
            rights: self.rights_of(principal).names(),
        }
    }

    /// The error of a request that needs a right that its user does not have.
    pub(crate) fn refusal(&self, principal: &Principal, right: Right, request: &str) -> ErrorBody {
        let (who, right) = (self.describe(principal), right.name());
        let message = format!("{request}: {who} does not have the right \"{right}\"");
        let file = self
            .file
            .as_ref()
            .map_or_else(|| "the daemon's configuration".to_owned(), |file| file.display().to_string());
        let hint = format!(
            "root and the daemon's own user have it, and those that access.{right} in {file} names; SIGHUP applies \
             a change"
        );
        ErrorBody::new(ErrorCode::Denied, message).with_hint(hint)
    }

    /// `user ann (uid 7)`, or `uid 7`.
    pub(crate) fn describe(&self, principal: &Principal) -> String {
        let uid = principal.uid;
        match self.users.name_of(uid) {
            Some(name) => format!("user {name} (uid {uid})"),
            None => format!("uid {uid}"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::principal::Groups;

    fn principal(uid: u32, primary: u32, supplementary: Option<&[u32]>) -> Principal {
        let supplementary = supplementary.map(std::sync::Arc::from);
        Principal { pid: 1, uid, groups: Groups { primary, supplementary } }
    }

    fn names() -> Names {
        let users = UserNames::parse("ann:x:70001:70001::/:\nbob:x:70002:70002::/:\n");
        Names { users, groups: GroupNames::parse("staff:x:80001:bob\nadmins:x:80002:\n") }
    }

    fn name(name: &str) -> NameOrNumber {
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
            (70002, 1, None, true),
            (70004, 1, None, false),
        ] {
            assert_eq!(set.contains(&principal(uid, gid, groups)), is_member, "{uid} {gid} {groups:?}");
        }
        let everyone = UserSet::new(&[Member::Everyone], &names());
        assert!(everyone.contains(&principal(5, 5, None)));
    }

    #[test]
    fn each_right_includes_the_lower_ones_and_owners_have_all() {
        let set = |member: &str| UserSet::new(&[Member::User(name(member))], &names());
        let access = Access { pull: set("ann"), administer: set("bob"), ..Access::default() };
        let rights = |uid| access.own_access(&principal(uid, 1, Some(&[]))).rights;
        assert_eq!(rights(70001), ["read", "pull"]);
        assert_eq!(rights(70002), ["read", "pull", "admin"]);
        assert_eq!(rights(0), ["read", "pull", "admin"]);
        assert_eq!(rights(rustix::process::geteuid().as_raw()), ["read", "pull", "admin"]);
        assert!(rights(70003).is_empty());
    }

    #[test]
    fn refusal_names_user_right_and_key() {
        let file = Some("/etc/blobd/config.toml".into());
        let access = Access { users: names().users, file, ..Access::default() };
        let error = access.refusal(&principal(70001, 1, None), Right::Administer, "/v1/gc");
        assert_eq!(error.code, ErrorCode::Denied);
        assert_eq!(error.message, "/v1/gc: user ann (uid 70001) does not have the right \"admin\"");
        assert!(error.hint.unwrap().contains("access.admin in /etc/blobd/config.toml"));
        let error = access.refusal(&principal(7, 1, None), Right::Read, "/v1/df");
        assert!(error.message.starts_with("/v1/df: uid 7 does"), "{error}");
    }
}
