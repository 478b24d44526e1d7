//! The section `[access]`: who may read, pull and administer.

use std::path::Path;

use serde::Deserialize;
use serde_json::{Value, json};

use super::Refusal;
use super::members::{Named, admin_group, check_names, members, value};
use crate::access::{Access, RootRights};
use crate::names::Names;
use crate::user_set::{Member, UserSet};

/// Lists of users and groups: `"ann"`, `"@staff"`, 1007, `"*"`.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct AccessConfig {
    read: Option<Vec<Named>>,
    pull: Option<Vec<Named>>,
    admin: Option<Vec<Named>>,
    root: RootRights,
}

impl AccessConfig {
    pub(super) fn access(&self, file: Option<&Path>) -> Access {
        let names = Names::system();
        let set = |members: Vec<Member>| UserSet::new(&members, &names);
        Access {
            read: set(self.read_members()),
            pull: set(self.pull_members()),
            administer: set(self.admin_members()),
            root: self.root,
            file: file.map(Path::to_path_buf),
            names,
        }
    }

    /// Everyone by default: the mode of the socket already decides who can connect.
    fn read_members(&self) -> Vec<Member> {
        self.read.as_ref().map_or_else(|| vec![Member::Everyone], |listed| members(listed))
    }

    /// By default whoever may read: the right to pull includes that to read, so pulls of everyone would cancel a
    /// restriction of reads.
    fn pull_members(&self) -> Vec<Member> {
        self.pull.as_ref().map_or_else(|| self.read_members(), |listed| members(listed))
    }

    fn admin_members(&self) -> Vec<Member> {
        self.admin.as_ref().map_or_else(|| vec![admin_group()], |listed| members(listed))
    }

    /// Refuses names that do not exist: a mistyped one would silently give or deny rights.
    pub(super) fn check(&self, names: impl Fn() -> Names) -> Result<(), Refusal> {
        let lists = [("access.read", &self.read), ("access.pull", &self.pull), ("access.admin", &self.admin)];
        let lists = lists.into_iter().filter_map(|(key, list)| Some((key, list.as_ref()?)));
        check_names(lists, names)
    }

    pub(super) fn values(&self) -> [(&'static str, Value); 4] {
        let list = |members: Vec<Member>| members.iter().map(value).collect();
        [
            ("access.read", list(self.read_members())),
            ("access.pull", list(self.pull_members())),
            ("access.admin", list(self.admin_members())),
            ("access.root", json!(self.root)),
        ]
    }
}

#[cfg(test)]
mod tests {
    use super::super::Config;
    use super::*;

    fn parse(text: &str) -> AccessConfig {
        toml::from_str::<Config>(text).unwrap().access
    }

    fn names() -> Names {
        Names::from_files(
            "ann:x:7:7::/:\nbarbara:x:8:8::/:\nDOM\\eve:x:9:9::/:\n",
            "staff:x:9:\ndomain users:x:10:\n",
        )
    }

    fn of_default(key: &str, text: &str) -> Value {
        parse(text).values().into_iter().find(|(name, _)| *name == key).unwrap().1
    }

    #[test]
    fn everyone_reads_and_pulls_by_default_and_a_group_administers() {
        assert_eq!(of_default("access.read", ""), json!(["*"]));
        assert_eq!(of_default("access.pull", ""), json!(["*"]));
        assert_eq!(of_default("access.admin", ""), json!(["@blobd-admin"]));
        assert_eq!(of_default("access.root", ""), json!("administer"));
        assert_eq!(of_default("access.root", "[access]\nroot = \"host\""), json!("host"));
        let restricted = "[access]\nread = [\"@staff\"]";
        assert_eq!(of_default("access.pull", restricted), json!(["@staff"]), "pull includes read");
        assert_eq!(of_default("access.pull", "[access]\npull = []"), json!([]));
        parse("").check(|| panic!("the names are not needed")).unwrap();
    }

    #[test]
    fn members_are_names_and_numbers_of_users_and_groups() {
        let list = "[access]\nadmin = [\"ann\", 1007, \"1008\", \"@staff\", \"@9\", \"*\"]";
        assert_eq!(of_default("access.admin", list), json!(["ann", 1007, 1008, "@staff", "@9", "*"]));
        for wrong in [
            "[\"\"]",
            "[\"@\"]",
            "[\" a\"]",
            "[\"a\\n\"]",
            "[-1]",
            "[4294967295]",
            "\"*\"",
            "[1.5]",
            "[\"a:b\"]",
        ] {
            let error = toml::from_str::<Config>(&format!("[access]\nread = {wrong}")).unwrap_err();
            assert!(error.to_string().contains("expected"), "{wrong}: {error}");
        }
    }

    #[test]
    fn unknown_names_are_refused_with_the_nearest_one() {
        for (list, start, what, hint) in [
            (
                "[\"ann\", \"barbra\"]",
                24,
                "no such user: expected a user that `getent passwd` finds, found \"barbra\"",
                "\"barbara\"?",
            ),
            (
                "[\"@staf\"]",
                17,
                "no such group: expected a group that `getent group` finds, found \"@staf\"",
                "\"@staff\"?",
            ),
            (
                "[\"staff\"]",
                17,
                "no such user: expected a user that `getent passwd` finds, found \"staff\"",
                "\"@staff\"?",
            ),
            ("[\"zzzzz\"]", 17, "no such user: ", "give the number of a user"),
        ] {
            let refusal = parse(&format!("[access]\nread = {list}")).check(names).unwrap_err();
            assert_eq!((refusal.key, refusal.start), ("access.read", Some(start)), "{list}");
            assert!(refusal.what.starts_with(what), "{}", refusal.what);
            assert!(refusal.hint.clone().unwrap().contains(hint), "{:?}", refusal.hint);
        }
        parse("[access]\nread = [\"ann\", 99, \"@staff\", \"@99\", \"*\", \"@blobd-admin\"]")
            .check(names)
            .unwrap();
        parse("[access]\nread = ['DOM\\eve', \"@domain users\"]").check(names).unwrap();
    }
}
