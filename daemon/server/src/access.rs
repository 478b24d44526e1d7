//! Which users have which rights.

use std::path::PathBuf;

use blobd_client::protocol::access::{OwnAccess, Right};
use blobd_client::protocol::error::{ErrorBody, ErrorCode};

use crate::names::Names;
use crate::peer_process::Namespaces;
use crate::principal::Principal;
use crate::user_set::UserSet;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Rights {
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

/// What root may do on the socket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Deserialize, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum RootRights {
    /// Everything.
    #[default]
    Administer,
    /// Everything, if the process is in the user and PID namespaces and in the container of the daemon.
    Host,
    /// What the lists give it, as any user.
    User,
}

/// Who has which rights. By default only the owners of the store have any.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Access {
    pub(crate) read: UserSet,
    pub(crate) pull: UserSet,
    pub(crate) administer: UserSet,
    pub(crate) root: RootRights,
    pub(crate) names: Names,
    /// The configuration file, for errors.
    pub(crate) file: Option<PathBuf>,
}

impl Access {
    pub(crate) fn rights_of(&self, principal: &Principal) -> Rights {
        let has = |right| match right {
            Right::Administer => self.owns_store(principal) || self.administer.contains(principal),
            Right::Pull => self.pull.contains(principal),
            Right::Read => self.read.contains(principal),
        };
        Rights { highest: Right::ALL.into_iter().rev().find(|right| has(*right)) }
    }

    /// Whether this is the daemon's own user, or root as far as the configuration lets it. They have all rights,
    /// because they own the files and could change the store without the daemon. Root of a container cannot if it has
    /// nothing but the socket. The only place that treats root in a special way.
    pub(crate) fn owns_store(&self, principal: &Principal) -> bool {
        match (principal.uid, self.root) {
            (0, RootRights::Administer) => true,
            (0, RootRights::Host) => principal.namespaces == Namespaces::Own,
            (0, RootRights::User) => false,
            (uid, _) => uid == rustix::process::geteuid().as_raw(),
        }
    }

    pub(crate) fn own_access(&self, principal: &Principal) -> OwnAccess {
        OwnAccess {
            uid: principal.uid,
            user: self.names.known_name_of(principal.uid),
            groups: principal.groups.all().into_iter().collect(),
            rights: self.rights_of(principal).names(),
        }
    }

    /// The error of a request whose user lacks a right. `what` is its command.
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
        let hint =
            format!("access.{right} in {file} says who has it{}; SIGHUP applies a change", self.besides());
        ErrorBody::new(ErrorCode::Denied, message).with_hint(hint)
    }
}

impl Access {
    /// Who has all rights without being listed, as the end of a phrase. A daemon of root's has no other own user.
    fn besides(&self) -> &'static str {
        match (self.root, rustix::process::geteuid().is_root()) {
            (RootRights::Administer, _) => " besides root and the daemon's own user",
            (RootRights::Host, true) => " besides root outside of containers",
            (RootRights::Host, false) => " besides the daemon's own user and root outside of containers",
            (RootRights::User, true) => "",
            (RootRights::User, false) => " besides the daemon's own user",
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::principal::tests::principal;
    use crate::user_set::tests::{name, names};
    use crate::user_set::{Member, NameOrNumber};

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
    fn root_of_a_container_is_an_ordinary_user_if_the_configuration_says_so() {
        let root = |namespaces| Principal { namespaces, ..principal(0, 0, Some(&[])) };
        let (host, container) = (root(Namespaces::Own), root(Namespaces::Other));
        for (setting, of_host, of_container) in [
            (RootRights::Administer, true, true),
            (RootRights::Host, true, false),
            (RootRights::User, false, false),
        ] {
            let access = Access { root: setting, ..Access::default() };
            assert_eq!(access.owns_store(&host), of_host, "{setting:?}");
            assert_eq!(access.owns_store(&container), of_container, "{setting:?}");
            // A list can name root like any other user.
            let listed = UserSet::new(&[Member::User(NameOrNumber::Number(0))], &names());
            let access = Access { administer: listed, ..access };
            assert!(access.rights_of(&container).include(Right::Administer));
        }
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
        // The daemon's own user is not restricted, whether it is root of a container or of the machine.
        let access = Access { root: RootRights::User, ..access };
        let hint = access.refusal(&principal(0, 1, None), Right::Read, "df").hint.unwrap();
        let owner = " besides the daemon's own user; SIGHUP";
        assert_eq!(hint.contains(owner), !rustix::process::geteuid().is_root(), "{hint}");
    }
}
