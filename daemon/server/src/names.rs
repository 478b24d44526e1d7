//! The names of users and groups, remembered.
//!
//! [`blobd_client::name_service`] asks the system, which may block for as long as a directory server does not answer.
//! Here a few threads ask, answers are kept for some minutes, and nobody waits for longer than a limit: without an answer
//! the last known one is used, and without one of those a user is shown as its number.

mod lookups;
mod source;

use std::fmt;
use std::io;
use std::sync::{Arc, OnceLock};
use std::time::Duration;

use blobd_client::protocol::space::UserId;

use self::lookups::{Answer, Key, Lookups};
use self::source::{Source, System};

/// How long a report waits for a name that is not known yet.
const WAIT_TO_SHOW: Duration = Duration::from_millis(500);
/// How long a configuration or a request that depends on a name waits for it. A directory server in reach answers within
/// a second; its client library tries the next one after some seconds.
const WAIT_TO_DECIDE: Duration = Duration::from_secs(10);

/// Users and groups by name and by number.
#[derive(Clone)]
pub(crate) struct Names(Arc<Lookups>);

/// Why a name has no number.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum NameError {
    /// There is no user or group of this name.
    Unknown,
    /// The name service did not answer, for this reason.
    Unavailable(String),
}

impl Names {
    /// Those of this system. Every call returns the same.
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

    /// The name of a user if it is known; never waits. An answer that is missing or old is asked for in the background.
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

    /// The number of a user. Waits for some seconds at most.
    pub(crate) fn uid_of(&self, name: &str) -> Result<u32, NameError> {
        match self.0.ask(&Key::UserName(name.to_owned()), WAIT_TO_DECIDE) {
            Answer::User(user) => Ok(user.uid),
            other => Err(other.into()),
        }
    }

    /// As [`Self::uid_of`].
    pub(crate) fn gid_of(&self, name: &str) -> Result<u32, NameError> {
        match self.0.ask(&Key::GroupName(name.to_owned()), WAIT_TO_DECIDE) {
            Answer::Group(group) => Ok(group.gid),
            other => Err(other.into()),
        }
    }

    /// The groups of a user who has no connection, whose groups the kernel would report. Waits as [`Self::name_of`].
    pub(crate) fn groups_of(&self, uid: u32) -> Option<Arc<[u32]>> {
        match self.0.ask(&Key::GroupsOf(uid), WAIT_TO_SHOW) {
            Answer::Groups(groups) => Some(groups),
            _ => None,
        }
    }

    /// The names of users to suggest for a mistyped one: only those in the system's own file.
    pub(crate) fn local_users(&self) -> Vec<String> {
        self.0.source().local_users()
    }

    /// As [`Self::local_users`].
    pub(crate) fn local_groups(&self) -> Vec<String> {
        self.0.source().local_groups()
    }

    /// Asks again for everything before it is next used. Old answers are kept for the time until then.
    pub(crate) fn refresh(&self) {
        self.0.expire();
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

/// What is remembered makes no difference.
impl PartialEq for Names {
    fn eq(&self, other: &Self) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl Eq for Names {}

/// Whether the name service answers, and within which limit: for `doctor`.
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
    use super::source::Files;
    use super::*;

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
