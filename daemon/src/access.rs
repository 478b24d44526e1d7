//! Which users have which rights.

use std::path::PathBuf;

use blobd_client::protocol::access::OwnAccess;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};

use crate::names::Names;
use crate::principal::Principal;
use crate::user_set::UserSet;

/// What a user may do. Each right includes those before it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum Right {
    /// List and open models.
    Read,
    /// Add models, and remove, rename and pin those that the user has added.
    Pull,
    /// Do the same with the models of all users, and collect.
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

/// Who has which rights. By default only the owners of the store have any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) read: UserSet,
    pub(crate) pull: UserSet,
    pub(crate) administer: UserSet,
    /// The names of users.
    pub(crate) names: Names,
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
            user: self.names.known_name_of(principal.uid),
            groups: principal.groups.all().into_iter().collect(),
            rights: self.rights_of(principal).names(),
        }
    }

    /// The error of a request that needs a right that its user does not have. `what` is its command.
    pub(crate) fn refusal(&self, principal: &Principal, right: Right, what: &str) -> ErrorBody {
        let (who, right) = (self.names.describe(principal.uid), right.name());
        let found = self.rights_of(principal).highest;
        let found = found.map_or_else(|| "none".to_owned(), |right| format!("{:?}", right.name()));
        let message =
            format!("{what}: not permitted for {who}: expected the right \"{right}\", found {found}");
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
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::user_set::Member;
    use crate::user_set::tests::{name, names, principal};

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
        let access = Access { names: names(), file, ..Access::default() };
        access.names.name_of(70001);
        let error = access.refusal(&principal(70001, 1, None), Right::Administer, "gc");
        assert_eq!(error.code, ErrorCode::Denied);
        let expected = "gc: not permitted for user ann (uid 70001): expected the right \"admin\", found none";
        assert_eq!(error.message, expected);
        assert!(error.hint.unwrap().contains("access.admin in /etc/blobd/config.toml"));
        let error = access.refusal(&principal(7, 1, None), Right::Read, "df");
        assert!(error.message.starts_with("df: not permitted for uid 7: expected"), "{error}");
    }
}
