//! Users and groups that the configuration names.

use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use toml::Spanned;

use super::{Refusal, values};
use crate::names::{NameError, Names};
use crate::user_set::{Member, NameOrNumber};

/// The group whose members administer by default, if there is such a group.
const ADMIN_GROUP: &str = "blobd-admin";

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    pub(super) member: Member,
    /// The offset in the file, in bytes.
    pub(super) start: usize,
}

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(transparent)]
        struct Text(#[serde(deserialize_with = "values::required::<Member, _>")] Member);

        let text = Spanned::<Text>::deserialize(deserializer)?;
        let start = text.span().start;
        Ok(Self { member: text.into_inner().0, start })
    }
}

pub(super) fn admin_group() -> Member {
    Member::Group(NameOrNumber::Name(ADMIN_GROUP.to_owned()))
}

/// Refuses names that do not exist, and those that the name service does not know at present. `lists` has keys and their
/// members; `names` is called if there are any.
pub(super) fn check_names<'n>(
    lists: impl Iterator<Item = (&'static str, &'n Vec<Named>)>,
    names: impl Fn() -> Names,
) -> Result<(), Refusal> {
    let mut known = None;
    for (key, list) in lists {
        for Named { member, start } in list {
            // The group of the default need not exist, so neither in a file that has the default.
            let is_default = *member == admin_group();
            let known = known.get_or_insert_with(&names);
            match member.check(known) {
                Err(error) if !is_default => {
                    let refusal = refusal(key, member, &error, known);
                    return Err(Refusal { start: Some(*start), ..refusal });
                }
                _ => {}
            }
        }
    }
    Ok(())
}

pub(super) fn socket_gid(group: &NameOrNumber, names: impl Fn() -> Names) -> Result<u32, Refusal> {
    let name = match group {
        NameOrNumber::Number(gid) => return Ok(*gid),
        NameOrNumber::Name(name) => name,
    };
    names().gid_of(name).map_err(|error| {
        let key = "socket_group";
        if let NameError::Unavailable(reason) = error {
            return unavailable(key, name, &reason);
        }
        let what = format!("no such group: expected a group that `getent group` finds, found {name:?}");
        let hint = format!("create it with `groupadd {name}`, or give the number of a group");
        Refusal { hint: Some(hint), ..Refusal::new(key, what) }
    })
}

pub(super) fn members(listed: &[Named]) -> Vec<Member> {
    listed.iter().map(|named| named.member.clone()).collect()
}

pub(super) fn value(member: &Member) -> Value {
    match member {
        Member::User(NameOrNumber::Number(uid)) => json!(uid),
        member => json!(member.to_string()),
    }
}

fn refusal(key: &'static str, member: &Member, error: &NameError, names: &Names) -> Refusal {
    let found = member.to_string();
    if let NameError::Unavailable(reason) = error {
        return unavailable(key, &found, reason);
    }
    let (what, database) = match member {
        Member::Group(_) => ("group", "group"),
        _ => ("user", "passwd"),
    };
    let hint = match nearest(member, names) {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("give the number of a {what} without a name; groups begin with @"),
    };
    let what = format!("no such {what}: expected a {what} that `getent {database}` finds, found {found:?}");
    Refusal { hint: Some(hint), ..Refusal::new(key, what) }
}

/// Without an answer it is unknown which user a rule or a right is for.
fn unavailable(key: &'static str, name: &str, reason: &str) -> Refusal {
    let hint = "wait for the directory service, or give numbers, which need no name service";
    let what = format!("{name:?}: {reason}");
    Refusal { hint: Some(hint.to_owned()), is_temporary: true, ..Refusal::new(key, what) }
}

/// The most similar local name of a user or a group: the @ may have been forgotten.
fn nearest(member: &Member, names: &Names) -> Option<String> {
    let written = member.to_string();
    let name = written.trim_start_matches('@');
    let groups = names.local_groups().into_iter().map(|group| (group.clone(), format!("@{group}")));
    let users = names.local_users().into_iter().map(|user| (user.clone(), user));
    let near = users.chain(groups).map(|(known, as_member)| {
        // Prefers names of the same kind if they are equally similar.
        let is_other_kind = as_member.starts_with('@') != written.starts_with('@');
        ((strsim::levenshtein(name, &known), is_other_kind), as_member)
    });
    let near = near.filter(|((distance, _), _)| *distance <= 1 + name.len() / 4);
    near.min().map(|(_, as_member)| as_member)
}
