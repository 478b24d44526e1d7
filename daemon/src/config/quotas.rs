//! The section `[quotas]`: how much of the disk may be charged to each user.

use std::collections::BTreeMap;

use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use toml::Spanned;

use super::members::{Named, check_names};
use super::settings::{optional_size, size_text};
use super::{Refusal, values};
use crate::names::Names;
use crate::quotas::{Quotas, UserQuota};
use crate::user_set::{Member, NameOrNumber, UserSet};

/// Limits of everyone, of users and of groups.
#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct QuotasConfig {
    default: Limits,
    #[serde(deserialize_with = "of_users")]
    users: Vec<(Named, Limits)>,
    #[serde(deserialize_with = "of_groups")]
    groups: Vec<(Named, Limits)>,
}

/// Sizes are numbers of bytes or strings such as `"200 GiB"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(
    deny_unknown_fields,
    default,
    expecting = "a table such as { soft = \"80 GiB\", hard = \"100 GiB\" }"
)]
struct Limits {
    #[serde(deserialize_with = "values::size")]
    soft: Option<u64>,
    #[serde(deserialize_with = "values::size")]
    hard: Option<u64>,
}

impl Limits {
    const fn quota(self) -> UserQuota {
        UserQuota { soft: self.soft, hard: self.hard }
    }

    fn value(self) -> Value {
        let sizes = [("soft", self.soft), ("hard", self.hard)];
        let given = sizes.into_iter().filter(|(_, size)| size.is_some());
        given.map(|(name, size)| (name.to_owned(), optional_size(size))).collect::<Map<_, _>>().into()
    }

    fn check(self, key: &'static str, of: Option<&Named>) -> Result<(), Refusal> {
        let (Some(soft), Some(hard)) = (self.soft, self.hard) else { return Ok(()) };
        if soft <= hard {
            return Ok(());
        }
        let whose = of.map_or_else(String::new, |named| format!("{}: ", named.member()));
        let (soft, hard) = (size_text(soft), size_text(hard));
        let what = format!("{whose}soft {soft}, hard {hard}, the soft one not above the hard one expected");
        Err(Refusal { start: of.map(Named::start), ..Refusal::new(key, what) })
    }
}

impl QuotasConfig {
    /// Reads the names of users and groups if any quota is set.
    pub(super) fn quotas(&self) -> Quotas {
        if *self == Self::default() {
            return Quotas::default();
        }
        let names = Names::system();
        let uid = |named: &Named| match named.member() {
            Member::User(NameOrNumber::Number(uid)) => Some(*uid),
            Member::User(NameOrNumber::Name(name)) => names.uid_of(name).ok(),
            _ => None,
        };
        let users = self.users.iter().filter_map(|(named, limits)| Some((uid(named)?, limits.quota())));
        let group =
            |(named, limits): &(Named, Limits)| (UserSet::new([named.member()], &names), limits.quota());
        let groups = self.groups.iter().map(group).collect();
        Quotas { default: self.default.quota(), users: users.collect(), groups, names }
    }

    /// Refuses names that do not exist, and limits that contradict each other.
    pub(super) fn check(&self, names: impl Fn() -> Names) -> Result<(), Refusal> {
        self.default.check("quotas.default", None)?;
        let tables = [("quotas.users", &self.users), ("quotas.groups", &self.groups)];
        for (key, table) in tables {
            table.iter().try_for_each(|(named, limits)| limits.check(key, Some(named)))?;
        }
        let lists = tables
            .map(|(key, table)| (key, table.iter().map(|(named, _)| named.clone()).collect::<Vec<_>>()));
        check_names(lists.iter().map(|(key, list)| (*key, list)), names)
    }

    pub(super) fn values(&self) -> [(&'static str, Value); 3] {
        let table = |entries: &[(Named, Limits)]| -> Value {
            let entry = |(named, limits): &(Named, Limits)| {
                (named.member().to_string().trim_start_matches('@').to_owned(), limits.value())
            };
            json!(entries.iter().map(entry).collect::<BTreeMap<_, _>>())
        };
        [
            ("quotas.default", self.default.value()),
            ("quotas.users", table(&self.users)),
            ("quotas.groups", table(&self.groups)),
        ]
    }
}

fn of_users<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(Named, Limits)>, D::Error> {
    entries(deserializer, "a user or a uid", str::to_owned)
}

fn of_groups<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(Named, Limits)>, D::Error> {
    entries(deserializer, "a group or a gid", |name| format!("@{}", name.strip_prefix('@').unwrap_or(name)))
}

/// The entries of a table whose keys name users or groups.
fn entries<'de, D: Deserializer<'de>>(
    deserializer: D,
    expected: &str,
    member: impl Fn(&str) -> String,
) -> Result<Vec<(Named, Limits)>, D::Error> {
    let table = BTreeMap::<Spanned<String>, Limits>::deserialize(deserializer)?;
    let entry = |(key, limits): (Spanned<String>, Limits)| {
        let wrong = || {
            let found = serde::de::Unexpected::Str(key.get_ref());
            <D::Error as serde::de::Error>::invalid_value(found, &expected)
        };
        let member = values::member_of(&member(key.get_ref())).filter(|member| *member != Member::Everyone);
        Ok((Named::new(member.ok_or_else(wrong)?, key.span().start), limits))
    };
    table.into_iter().map(entry).collect()
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::Config;
    use super::*;

    fn parse(text: &str) -> QuotasConfig {
        toml::from_str::<Config>(text).unwrap().quotas
    }

    fn names() -> Names {
        Names::from_files("ann:x:7:7::/:\nbarbara:x:8:8::/:\n", "staff:x:9:\n")
    }

    const ALL: &str = "[quotas]\ndefault = { soft = \"80 GiB\", hard = \"100 GiB\" }\n\
                       [quotas.users]\nann = { hard = 5 }\n1007 = {}\n\
                       [quotas.groups.staff]\nsoft = \"1 TiB\"\n[quotas.groups.\"@9\"]\nhard = 3\n";

    #[test]
    fn quotas_are_of_everyone_of_users_and_of_groups() {
        let config = parse(ALL);
        let values: BTreeMap<_, _> = config.values().into_iter().collect();
        assert_eq!(values["quotas.default"], json!({ "soft": "80 GiB", "hard": "100 GiB" }));
        assert_eq!(values["quotas.users"], json!({ "ann": { "hard": 5 }, "1007": {} }));
        assert_eq!(values["quotas.groups"], json!({ "staff": { "soft": "1 TiB" }, "9": { "hard": 3 } }));
        config.check(names).unwrap();
        assert_eq!(config.quotas().users.get(&1007), Some(&UserQuota::default()));
        assert_eq!(parse("").quotas(), Quotas::default());
        parse("[quotas.default]\nhard = 1").check(|| panic!("the names are not needed")).unwrap();
    }

    #[test]
    fn unknown_names_are_refused_with_the_nearest_one() {
        for (text, key, name, what, hint) in [
            ("[quotas.users]\nbarbra = {}", "quotas.users", "barbra", "no such user: ", "\"barbara\"?"),
            ("[quotas.groups.staf]\nhard = 1", "quotas.groups", "staf", "no such group: ", "\"@staff\"?"),
        ] {
            let refusal = parse(text).check(names).unwrap_err();
            assert_eq!(refusal.key, key);
            assert!(refusal.what.starts_with(what), "{}", refusal.what);
            assert!(refusal.hint.clone().unwrap().contains(hint), "{:?}", refusal.hint);
            assert!(text[refusal.start.unwrap()..].starts_with(name), "{text}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        for (text, message) in [
            ("[quotas]\ndefault = 5", "c:2:11: quotas.default: 5, a table such as"),
            ("[quotas.default]\nhrad = 5", "c:2:1: unknown key \"hrad\""),
            ("[quotas.default]\nhard = \"much\"", "c:2:8: quotas.default.hard: \"much\", a size such as"),
            ("[quotas.users]\n\" a\" = {}", "\" a\", a user or a uid expected"),
            (
                "[quotas.users.0]\nsoft = 2\nhard = 1",
                "c:1:15: quotas.users: 0: soft 2 bytes, hard 1 bytes, the soft one not above",
            ),
            (
                "[quotas.default]\nsoft = \"5 GiB\"\nhard = \"1 GiB\"",
                "quotas.default: soft 5 GiB, hard 1 GiB,",
            ),
        ] {
            let error = Config::parse(Path::new("c"), text).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
