//! The section `[quotas]`: how much of the disk may be charged to each user.

use std::collections::BTreeMap;
use std::fmt;

use blobd_store_format::size::exact_bytes;
use serde::de::value::MapAccessDeserializer;
use serde::de::{Error, MapAccess, Unexpected, Visitor};
use serde::{Deserialize, Deserializer};
use serde_json::{Map, Value, json};
use toml::Spanned;

use super::members::{Named, check_names};
use super::values::{Size, Value as _, optional_size};
use super::{Refusal, values};
use crate::names::Names;
use crate::quotas::{GroupQuota, Quotas, UserQuota};
use crate::user_set::{Member, NameOrNumber, UserSet};

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub(crate) struct QuotasConfig {
    default: QuotaLimits,
    #[serde(deserialize_with = "of_users")]
    users: Vec<(Named, QuotaLimits)>,
    #[serde(deserialize_with = "of_groups")]
    groups: Vec<(Named, GroupLimits)>,
}

/// Sizes are strings such as `"200 GiB"`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(
    deny_unknown_fields,
    default,
    expecting = "a table such as { soft = \"80 GiB\", hard = \"100 GiB\" }"
)]
struct QuotaLimits {
    #[serde(deserialize_with = "values::optional::<Size, _>")]
    soft: Option<u64>,
    #[serde(deserialize_with = "values::optional::<Size, _>")]
    hard: Option<u64>,
}

/// QuotaLimits of each member of a group, and of all members together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(
    deny_unknown_fields,
    default,
    expecting = "a table such as { hard = \"100 GiB\", together = \"1 TiB\" }"
)]
struct GroupLimits {
    #[serde(deserialize_with = "values::optional::<Size, _>")]
    soft: Option<u64>,
    #[serde(deserialize_with = "values::optional::<Size, _>")]
    hard: Option<u64>,
    together: Option<Together>,
}

/// A size, which is the hard limit, or both limits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct Together(QuotaLimits);

impl<'de> Deserialize<'de> for Together {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        deserializer.deserialize_any(TogetherVisitor)
    }
}

struct TogetherVisitor;

impl TogetherVisitor {
    fn hard<E: Error>(self, found: Unexpected<'_>, text: &str) -> Result<Together, E> {
        match Size::parse(text) {
            Ok(bytes) => Ok(Together(QuotaLimits { soft: None, hard: Some(bytes) })),
            Err(expected) if expected == Size::EXPECTED => Err(E::invalid_value(found, &self)),
            Err(expected) => Err(E::invalid_value(found, &&*expected)),
        }
    }
}

impl<'de> Visitor<'de> for TogetherVisitor {
    type Value = Together;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a size such as \"10 TiB\", or a table such as { soft = \"9 TiB\", hard = \"10 TiB\" }")
    }

    fn visit_i64<E: Error>(self, number: i64) -> Result<Together, E> {
        self.hard(Unexpected::Signed(number), &number.to_string())
    }

    fn visit_u64<E: Error>(self, number: u64) -> Result<Together, E> {
        self.hard(Unexpected::Unsigned(number), &number.to_string())
    }

    fn visit_str<E: Error>(self, text: &str) -> Result<Together, E> {
        self.hard(Unexpected::Str(text), text)
    }

    fn visit_map<M: MapAccess<'de>>(self, map: M) -> Result<Together, M::Error> {
        QuotaLimits::deserialize(MapAccessDeserializer::new(map)).map(Together)
    }
}

impl GroupLimits {
    const fn each(self) -> QuotaLimits {
        QuotaLimits { soft: self.soft, hard: self.hard }
    }

    fn together(self) -> QuotaLimits {
        self.together.unwrap_or_default().0
    }

    /// An entry that limits only the members together leaves each member's limits to other entries.
    fn quota(&self, named: &Named, names: &Names) -> GroupQuota {
        let is_about_each = self.together.is_none() || self.each() != QuotaLimits::default();
        GroupQuota {
            name: shown(named),
            members: UserSet::new([&named.member], names),
            each: is_about_each.then(|| self.each().quota()),
            together: self.together().quota(),
        }
    }

    fn value(self) -> Value {
        let mut value = self.each().value();
        if let (Some(Together(limits)), Some(entry)) = (self.together, value.as_object_mut()) {
            let together = match limits {
                QuotaLimits { soft: None, hard: hard @ Some(_) } => optional_size(hard),
                limits => limits.value(),
            };
            entry.insert("together".to_owned(), together);
        }
        value
    }
}

/// The name as the file has it.
fn shown(named: &Named) -> String {
    named.member.to_string().trim_start_matches('@').to_owned()
}

impl QuotaLimits {
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
        let whose = of.map_or_else(String::new, |named| format!("{}: ", &named.member));
        let (soft, hard) = (exact_bytes(soft), exact_bytes(hard));
        let what = format!("{whose}expected soft to be at most hard, found soft {soft} and hard {hard}");
        Err(Refusal { start: of.map(|named| named.start), ..Refusal::new(key, what) })
    }
}

impl QuotasConfig {
    pub(super) fn quotas(&self) -> Quotas {
        if *self == Self::default() {
            return Quotas::default();
        }
        let names = Names::system();
        let uid = |named: &Named| match &named.member {
            Member::User(NameOrNumber::Number(uid)) => Some(*uid),
            Member::User(NameOrNumber::Name(name)) => names.uid_of(name).ok(),
            _ => None,
        };
        let users = self.users.iter().filter_map(|(named, limits)| Some((uid(named)?, limits.quota())));
        let groups = self.groups.iter().map(|(named, limits)| limits.quota(named, &names)).collect();
        Quotas { default: self.default.quota(), users: users.collect(), groups, names }
    }

    pub(super) fn check(&self, names: impl Fn() -> Names) -> Result<(), Refusal> {
        self.default.check("quotas.default", None)?;
        self.users.iter().try_for_each(|(named, limits)| limits.check("quotas.users", Some(named)))?;
        for (named, limits) in &self.groups {
            for limits in [limits.each(), limits.together()] {
                limits.check("quotas.groups", Some(named))?;
            }
        }
        let users = self.users.iter().map(|(named, _)| named.clone()).collect();
        let groups = self.groups.iter().map(|(named, _)| named.clone()).collect();
        check_names([("quotas.users", &users), ("quotas.groups", &groups)].into_iter(), names)
    }

    pub(super) fn values(&self) -> [(&'static str, Value); 3] {
        let users = self.users.iter().map(|(named, limits)| (shown(named), limits.value()));
        let groups = self.groups.iter().map(|(named, limits)| (shown(named), limits.value()));
        [
            ("quotas.default", self.default.value()),
            ("quotas.users", json!(users.collect::<BTreeMap<_, _>>())),
            ("quotas.groups", json!(groups.collect::<BTreeMap<_, _>>())),
        ]
    }
}

fn of_users<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(Named, QuotaLimits)>, D::Error> {
    entries(deserializer, "a user or a uid", str::to_owned)
}

fn of_groups<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<(Named, GroupLimits)>, D::Error> {
    entries(deserializer, "a group or a gid", |name| format!("@{}", name.strip_prefix('@').unwrap_or(name)))
}

fn entries<'de, D: Deserializer<'de>, L: Deserialize<'de>>(
    deserializer: D,
    expected: &str,
    member: impl Fn(&str) -> String,
) -> Result<Vec<(Named, L)>, D::Error> {
    let table = BTreeMap::<Spanned<String>, L>::deserialize(deserializer)?;
    let entry = |(key, limits): (Spanned<String>, L)| {
        let wrong = || D::Error::invalid_value(Unexpected::Str(key.get_ref()), &expected);
        let member = Member::from_text(&member(key.get_ref())).filter(|member| *member != Member::Everyone);
        Ok((Named { member: member.ok_or_else(wrong)?, start: key.span().start }, limits))
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
                       [quotas.users]\nann = { hard = '5 B' }\n1007 = {}\n\
                       [quotas.groups.staff]\nsoft = \"1 TiB\"\n[quotas.groups.\"@9\"]\nhard = '3 B'\n";

    #[test]
    fn quotas_are_of_everyone_of_users_and_of_groups() {
        let config = parse(ALL);
        let values: BTreeMap<_, _> = config.values().into_iter().collect();
        assert_eq!(values["quotas.default"], json!({ "soft": "80 GiB", "hard": "100 GiB" }));
        assert_eq!(values["quotas.users"], json!({ "ann": { "hard": "5 B" }, "1007": {} }));
        assert_eq!(values["quotas.groups"], json!({ "staff": { "soft": "1 TiB" }, "9": { "hard": "3 B" } }));
        config.check(names).unwrap();
        assert_eq!(config.quotas().users.get(&1007), Some(&UserQuota::default()));
        assert_eq!(parse("").quotas(), Quotas::default());
        parse("[quotas.default]\nhard = '1 B'").check(|| panic!("the names are not needed")).unwrap();
    }

    #[test]
    fn group_has_limits_of_each_member_and_of_all_together() {
        let text = "[quotas.groups]\nlab = { hard = \"1 GiB\", together = \"10 TiB\" }\n\
                    1008 = { together = { soft = '5 B', hard = '6 B' } }\n1009 = {}\n1010 = { together = '7 B' }\n";
        let config = parse(text);
        let groups = config.quotas().groups;
        let limits = |soft, hard| UserQuota { soft, hard };
        let found = |name: &str| {
            let group = groups.iter().find(|group| group.name == name).unwrap();
            (group.each, group.together)
        };
        assert_eq!(found("lab"), (Some(limits(None, Some(1 << 30))), limits(None, Some(10 << 40))));
        assert_eq!(found("1008"), (None, limits(Some(5), Some(6))));
        assert_eq!(found("1009"), (Some(limits(None, None)), limits(None, None)), "no limit");
        assert_eq!(found("1010"), (None, limits(None, Some(7))));
        let shown = config.values().into_iter().find(|(key, _)| *key == "quotas.groups").unwrap().1;
        assert_eq!(shown["lab"], json!({ "hard": "1 GiB", "together": "10 TiB" }));
        assert_eq!(shown["1008"]["together"]["soft"], json!("5 B"));
        assert_eq!(shown["1010"]["together"], json!("7 B"));
    }

    #[test]
    fn unknown_names_are_refused_with_the_nearest_one() {
        for (text, key, name, what, hint) in [
            ("[quotas.users]\nbarbra = {}", "quotas.users", "barbra", "no such user: ", "\"barbara\"?"),
            ("[quotas.groups.staf]\nhard = '1 B'", "quotas.groups", "staf", "no such group: ", "\"@staff\"?"),
        ] {
            let refusal = parse(text).check(names).unwrap_err();
            assert_eq!(refusal.key, key);
            assert!(refusal.what.starts_with(what), "{}", refusal.what);
            let found = refusal.what.split_once(", found ").unwrap().1;
            assert_eq!(found.trim_matches(['"', '@']), name, "{}", refusal.what);
            assert!(refusal.hint.clone().unwrap().contains(hint), "{:?}", refusal.hint);
            assert!(text[refusal.start.unwrap()..].starts_with(name), "{text}");
        }
    }

    #[test]
    fn mistakes_are_named_with_their_place() {
        for (text, message) in [
            ("[quotas]\ndefault = 5", "c:2:11: quotas.default: expected a table such as"),
            ("[quotas.default]\nhrad = 5", "c:2:1: unknown key \"hrad\""),
            ("[quotas.default]\nhard = \"much\"", "c:2:8: quotas.default.hard: expected a size such as"),
            ("[quotas.users]\n\" a\" = {}", "expected a user or a uid, found \" a\""),
            (
                "[quotas.users.0]\nsoft = '2 B'\nhard = '1 B'",
                "c:1:15: quotas.users: 0: expected soft to be at most hard, found soft 2 B and hard 1 B",
            ),
            (
                "[quotas.groups.0]\ntogether = { soft = '2 B', hard = '1 B' }",
                "quotas.groups: @0: expected soft to be at most hard, found soft 2 B and hard 1 B",
            ),
            (
                "[quotas.groups.0]\ntogether = true",
                "c:2:12: quotas.groups.0.together: expected a size such as \"10 TiB\", or a table",
            ),
            ("[quotas.groups.0]\ntogether = { hrad = 1 }", "c:2:14: unknown key \"hrad\""),
            (
                "[quotas.default]\nsoft = \"5 GiB\"\nhard = \"1 GiB\"",
                "quotas.default: expected soft to be at most hard, found soft 5 GiB and hard 1 GiB",
            ),
        ] {
            let error = Config::parse(Path::new("c"), text).unwrap_err().to_string();
            assert!(error.contains(message), "{error}");
        }
    }
}
