//! The names of users and groups, remembered.
//!
//! [`blobd_client::name_service`] asks the system, which may block for as long as a directory server does not answer.
//! Here a few threads ask, answers are kept for some minutes, and nobody waits for longer than a limit: without an answer
//! the last known one is used, and without one of those a user is shown as its number.

mod lookups;

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blobd_client::name_service;
use blobd_client::protocol::space::UserId;

use self::lookups::{Answer, Key, Lookups, Source};

/// How long a report waits for a name that is not known yet.
const WAIT_TO_SHOW: Duration = Duration::from_millis(500);
/// How long a configuration or a request that depends on a name waits for it. A directory server in reach answers within
/// a second; its client library tries the next one after some seconds.
const WAIT_TO_DECIDE: Duration = Duration::from_secs(10);

#[derive(Clone)]
pub(crate) struct Names(Arc<Lookups>);

/// Why a name has no number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NameError {
    Unknown,
    /// Why the name service did not answer.
    Unavailable(String),
}

impl Names {
    pub(crate) fn system() -> Self {
        static SYSTEM: OnceLock<Names> = OnceLock::new();
        SYSTEM.get_or_init(|| Self::from_source(Box::new(System))).clone()
    }

    fn from_source(source: Box<dyn Source>) -> Self {
        Self(Lookups::new(source))
    }

    /// The name of a user, for a report. Waits a moment if it is not known yet: not for a thread of the runtime.
    pub(crate) fn name_of(&self, uid: u32) -> Option<String> {
        user_name(self.0.ask(&Key::Uid(uid), WAIT_TO_SHOW))
    }

    /// Never waits. A missing or old answer is requested in the background.
    pub(crate) fn known_name_of(&self, uid: u32) -> Option<String> {
        user_name(self.0.ask(&Key::Uid(uid), Duration::ZERO))
    }

    /// Whether asking for the name of a user would not wait.
    pub(crate) fn knows(&self, uid: u32) -> bool {
        self.0.is_fresh(&Key::Uid(uid))
    }

    pub(crate) fn user_id(&self, uid: u32) -> UserId {
        UserId { uid, user: self.name_of(uid) }
    }

    /// `user ann (uid 7)`, or `uid 7`. Never waits.
    pub(crate) fn describe(&self, uid: u32) -> String {
        match self.known_name_of(uid) {
            Some(name) => format!("user {name} (uid {uid})"),
            None => format!("uid {uid}"),
        }
    }

    pub(crate) fn uid_of(&self, name: &str) -> Result<u32, NameError> {
        match self.0.ask(&Key::UserName(name.to_owned()), WAIT_TO_DECIDE) {
            Answer::User(user) => Ok(user.uid),
            other => Err(other.into()),
        }
    }

    pub(crate) fn gid_of(&self, name: &str) -> Result<u32, NameError> {
        match self.0.ask(&Key::GroupName(name.to_owned()), WAIT_TO_DECIDE) {
            Answer::Group(group) => Ok(group.gid),
            other => Err(other.into()),
        }
    }

    /// The groups of a user without a connection, for which the kernel would report them. Waits as [`Self::name_of`].
    pub(crate) fn groups_of(&self, uid: u32) -> Option<Arc<[u32]>> {
        match self.0.ask(&Key::GroupsOf(uid), WAIT_TO_SHOW) {
            Answer::Groups(groups) => Some(groups),
            _ => None,
        }
    }

    /// Names to suggest for a mistyped one: only those in the system's own file.
    pub(crate) fn local_users(&self) -> Vec<String> {
        self.0.source.local_users()
    }

    pub(crate) fn local_groups(&self) -> Vec<String> {
        self.0.source.local_groups()
    }

    /// Requests every answer again before it is next used. Old answers stay until then.
    pub(crate) fn refresh(&self) {
        self.0.expire();
    }
}

struct System;

impl Source for System {
    fn find(&self, key: &Key) -> io::Result<Option<Answer>> {
        Ok(match key {
            Key::Uid(uid) => name_service::user_by_id(*uid)?.map(Answer::User),
            Key::UserName(name) => name_service::user_by_name(name)?.map(Answer::User),
            Key::GroupName(name) => name_service::group_by_name(name)?.map(Answer::Group),
            Key::GroupsOf(uid) => name_service::groups_of(*uid)?.map(|groups| Answer::Groups(groups.into())),
        })
    }

    fn local_users(&self) -> Vec<String> {
        name_service::local_names("/etc/passwd")
    }

    fn local_groups(&self) -> Vec<String> {
        name_service::local_names("/etc/group")
    }
}

fn user_name(answer: Answer) -> Option<String> {
    match answer {
        Answer::User(user) => Some(user.name),
        _ => None,
    }
}

impl From<Answer> for NameError {
    fn from(answer: Answer) -> Self {
        match answer {
            Answer::Unavailable(reason) => Self::Unavailable(reason.to_string()),
            _ => Self::Unknown,
        }
    }
}

impl fmt::Debug for Names {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Names")
    }
}

impl Default for Names {
    fn default() -> Self {
        Self::system()
    }
}

/// The cached answers make no difference.
impl PartialEq for Names {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Names {}

/// Whether the name service answers in time, for `doctor`.
pub(crate) fn check_service() -> io::Result<()> {
    let names = Names::system();
    let own = rustix::process::geteuid().as_raw();
    names.refresh();
    match names.0.ask(&Key::Uid(own), WAIT_TO_DECIDE) {
        Answer::Unavailable(reason) => Err(io::Error::other(reason.to_string())),
        _ if names.0.is_fresh(&Key::Uid(own)) => Ok(()),
        _ => Err(io::Error::other(lookups::NO_ANSWER)),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use blobd_client::name_service::{Group, User};

    use super::*;

    /// The content of files like `/etc/passwd` and `/etc/group`.
    struct Files {
        users: Vec<User>,
        groups: Vec<(Group, Vec<String>)>,
    }

    impl Files {
        fn parse(passwd: &str, group: &str) -> Self {
            let fields = |line: &str| line.split(':').map(str::to_owned).collect::<Vec<_>>();
            let user = |line: &str| {
                let fields = fields(line);
                let (uid, primary_group) = (fields.get(2)?.parse().ok()?, fields.get(3)?.parse().ok()?);
                Some(User { uid, name: fields.first()?.clone(), primary_group })
            };
            let group_and_members = |line: &str| {
                let fields = fields(line);
                let group = Group { gid: fields.get(2)?.parse().ok()?, name: fields.first()?.clone() };
                Some((group, fields.get(3)?.split(',').map(str::to_owned).collect()))
            };
            Self {
                users: passwd.lines().filter_map(user).collect(),
                groups: group.lines().filter_map(group_and_members).collect(),
            }
        }

        fn groups_of(&self, uid: u32) -> Option<Answer> {
            let user = self.users.iter().find(|user| user.uid == uid)?;
            let has_user = |(_, members): &&(Group, Vec<String>)| members.contains(&user.name);
            let listed = self.groups.iter().filter(has_user).map(|(group, _)| group.gid);
            Some(Answer::Groups(std::iter::once(user.primary_group).chain(listed).collect()))
        }
    }

    impl Source for Files {
        fn find(&self, key: &Key) -> io::Result<Option<Answer>> {
            let user =
                |is_it: &dyn Fn(&&User) -> bool| self.users.iter().find(is_it).cloned().map(Answer::User);
            let mut groups = self.groups.iter().map(|(group, _)| group);
            Ok(match key {
                Key::Uid(uid) => user(&|user| user.uid == *uid),
                Key::UserName(name) => user(&|user| user.name == *name),
                Key::GroupName(name) => groups.find(|group| group.name == *name).cloned().map(Answer::Group),
                Key::GroupsOf(uid) => self.groups_of(*uid),
            })
        }

        fn local_users(&self) -> Vec<String> {
            self.users.iter().map(|user| user.name.clone()).collect()
        }

        fn local_groups(&self) -> Vec<String> {
            self.groups.iter().map(|(group, _)| group.name.clone()).collect()
        }
    }

    impl Names {
        /// The users and groups of files in the form of `/etc/passwd` and `/etc/group`.
        pub(crate) fn from_files(passwd: &str, group: &str) -> Self {
            Self::from_source(Box::new(Files::parse(passwd, group)))
        }
    }

    fn names() -> Names {
        let passwd = "ann:x:7:70::/:\nDOMAIN\\bob:x:8:70::/:\nc d@example.com:x:9:71::/:\nbad:x:y:\n";
        Names::from_files(passwd, "staff:x:80:ann,DOMAIN\\bob\ndomain users:x:81:\n")
    }

    #[test]
    fn users_and_groups_have_names_numbers_and_members() {
        let names = names();
        assert_eq!(names.name_of(8).as_deref(), Some("DOMAIN\\bob"));
        assert_eq!(names.uid_of("c d@example.com"), Ok(9));
        assert_eq!(names.gid_of("domain users"), Ok(81));
        assert_eq!((names.name_of(5), names.uid_of("bad")), (None, Err(NameError::Unknown)));
        assert_eq!(names.groups_of(7).as_deref(), Some(&[70, 80][..]));
        assert_eq!((names.groups_of(9).as_deref(), names.groups_of(5)), (Some(&[71][..]), None));
    }

    #[test]
    fn name_is_in_a_description_as_soon_as_it_is_known() {
        let names = names();
        assert!(!names.knows(7));
        assert_eq!(names.user_id(7).user.as_deref(), Some("ann"));
        assert!(names.knows(7));
        assert_eq!((names.describe(7), names.describe(5)), ("user ann (uid 7)".into(), "uid 5".into()));
    }
}
