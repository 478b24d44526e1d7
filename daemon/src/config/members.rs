//! Users and groups that the configuration names.

use serde::{Deserialize, Deserializer};
use serde_json::{Value, json};
use toml::Spanned;

use super::{Refusal, SocketGroup, values};
use crate::user_set::{Member, NameOrNumber, Names};

/// The group whose members administer by default, if there is such a group.
const ADMIN_GROUP: &str = "blobd-admin";

/// A user or a group, and where the file names it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Named {
    member: Member,
    /// The offset in the file, in bytes.
    start: usize,
}

impl<'de> Deserialize<'de> for Named {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        #[derive(Deserialize)]
        #[serde(transparent)]
        struct Text(#[serde(deserialize_with = "values::member")] Member);

        let text = Spanned::<Text>::deserialize(deserializer)?;
        let start = text.span().start;
        Ok(Self { member: text.into_inner().0, start })
    }
}

impl Named {
    pub(super) const fn new(member: Member, start: usize) -> Self {
        Self { member, start }
    }

    pub(super) const fn member(&self) -> &Member {
        &self.member
    }

    pub(super) const fn start(&self) -> usize {
        self.start
    }
}

pub(super) fn admin_group() -> Member {
    Member::Group(NameOrNumber::Name(ADMIN_GROUP.to_owned()))
}

/// Refuses names that do not exist. `lists` has keys and their members; `names` is called if there are any.
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
            if !is_default && !known.know(member) {
                return Err(Refusal { start: Some(*start), ..unknown(key, member, known) });
            }
        }
    }
    Ok(())
}

/// Refuses a group that does not exist.
pub(super) fn check_socket_group(
    group: Option<&SocketGroup>,
    names: impl Fn() -> Names,
) -> Result<(), Refusal> {
    let Some(SocketGroup::Name(name)) = group else { return Ok(()) };
    if names().groups.gid_of(name).is_some() {
        return Ok(());
    }
    let what = format!("{name:?}, a group in /etc/group expected");
    let hint = format!("create it with `groupadd {name}`, or give its number if /etc/group does not list it");
    Err(Refusal { hint: Some(hint), ..Refusal::new("socket_group", what) })
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

fn unknown(key: &'static str, member: &Member, names: &Names) -> Refusal {
    let (what, file) = match member {
        Member::Group(_) => ("group", "/etc/group"),
        _ => ("user", "/etc/passwd"),
    };
    let hint = match nearest(member, names) {
        Some(near) => format!("did you mean {near:?}?"),
        None => format!("give the number of a {what} that {file} does not list; groups begin with @"),
    };
    let what = format!("{:?}, a {what} in {file} expected", member.to_string());
    Refusal { hint: Some(hint), ..Refusal::new(key, what) }
}

/// The most similar name, of a user or of a group: the @ may have been forgotten.
fn nearest(member: &Member, names: &Names) -> Option<String> {
    let written = member.to_string();
    let name = written.trim_start_matches('@');
    let groups = names.groups.names().map(|group| (group, format!("@{group}")));
    let users = names.users.names().map(|user| (user, user.to_owned()));
    let near = users.chain(groups).map(|(known, as_member)| {
        // Of equally similar names the one of the same kind.
        let is_other_kind = as_member.starts_with('@') != written.starts_with('@');
        ((strsim::levenshtein(name, known), is_other_kind), as_member)
    });
    let near = near.filter(|((distance, _), _)| *distance <= 1 + name.len() / 4);
    near.min().map(|(_, as_member)| as_member)
}
