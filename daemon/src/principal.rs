//! The user at the other end of a connection, and the names of users and groups.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::sync::Arc;

use blobd_client::protocol::space::UserId;

use crate::sys::peer_groups;

/// Who has sent a request. Rights depend on the user and its groups only, not on how they were found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Principal {
    /// 0 where the kernel does not report it.
    pub(crate) pid: i32,
    pub(crate) uid: u32,
    pub(crate) groups: Groups,
}

/// The groups that a process had when it connected.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct Groups {
    pub(crate) primary: u32,
    /// `None` if the kernel does not report them. Then `/etc/group` says who is a member.
    pub(crate) supplementary: Option<Arc<[u32]>>,
}

impl Groups {
    /// Sorted and without duplicates.
    pub(crate) fn all(&self) -> BTreeSet<u32> {
        let supplementary = self.supplementary.iter().flat_map(|gids| gids.iter().copied());
        supplementary.chain([self.primary]).collect()
    }

    pub(crate) fn contains(&self, gid: u32) -> bool {
        self.primary == gid || self.supplementary.as_ref().is_some_and(|gids| gids.contains(&gid))
    }
}

impl Principal {
    /// The process that has connected, as the kernel reports it.
    pub(crate) fn of(stream: &tokio::net::UnixStream) -> io::Result<Self> {
        let credentials = stream.peer_cred()?;
        let groups =
            Groups { primary: credentials.gid(), supplementary: peer_groups(stream).ok().map(Arc::from) };
        Ok(Self { pid: credentials.pid().unwrap_or_default(), uid: credentials.uid(), groups })
    }

    /// Whether this is root or the daemon's own user. These have all rights, because they own the files: they could
    /// change the store without the daemon.
    pub(crate) fn owns_store(&self) -> bool {
        self.uid == 0 || self.uid == rustix::process::geteuid().as_raw()
    }

    /// The name of its command, as `ps` shows it; `None` after it has ended.
    pub(crate) fn command(&self) -> Option<String> {
        let name = fs::read_to_string(format!("/proc/{}/comm", self.pid)).ok()?;
        Some(name.trim_end().chars().filter(|c| !c.is_control()).collect())
    }

    /// The process's name in `rm` and in the log.
    pub(crate) fn description(&self) -> String {
        match self.command() {
            Some(command) => format!("process {} ({command})", self.pid),
            None => format!("process {}", self.pid),
        }
    }
}

/// The names of users from `/etc/passwd`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct UserNames(BTreeMap<u32, User>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct User {
    name: String,
    /// The primary group, if the line has one.
    gid: Option<u32>,
}

impl UserNames {
    /// Without names if the file cannot be read.
    pub(crate) fn read() -> Self {
        Self::parse(&fs::read_to_string("/etc/passwd").unwrap_or_default())
    }

    pub(crate) fn parse(passwd: &str) -> Self {
        let mut names = BTreeMap::new();
        for line in passwd.lines() {
            let mut fields = line.split(':');
            if let (Some(name), Some(Ok(uid))) = (fields.next(), fields.nth(1).map(str::parse)) {
                let gid = fields.next().and_then(|gid| gid.parse().ok());
                // The first entry of a user counts.
                names.entry(uid).or_insert_with(|| User { name: name.to_owned(), gid });
            }
        }
        Self(names)
    }

    pub(crate) fn name_of(&self, uid: u32) -> Option<String> {
        self.0.get(&uid).map(|user| user.name.clone())
    }

    pub(crate) fn user_id(&self, uid: u32) -> UserId {
        UserId { uid, user: self.name_of(uid) }
    }

    pub(crate) fn primary_group_of(&self, uid: u32) -> Option<u32> {
        self.0.get(&uid)?.gid
    }

    /// `user ann (uid 7)`, or `uid 7`.
    pub(crate) fn describe(&self, uid: u32) -> String {
        match self.name_of(uid) {
            Some(name) => format!("user {name} (uid {uid})"),
            None => format!("uid {uid}"),
        }
    }

    pub(crate) fn uid_of(&self, name: &str) -> Option<u32> {
        self.0.iter().find_map(|(uid, known)| (known.name == name).then_some(*uid))
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.values().map(|user| user.name.as_str())
    }
}

/// The groups in `/etc/group`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct GroupNames(Vec<Group>);

#[derive(Clone, Debug, PartialEq, Eq)]
struct Group {
    name: String,
    gid: u32,
    /// The names of users.
    members: Vec<String>,
}

impl GroupNames {
    /// Without groups if the file cannot be read.
    pub(crate) fn read() -> Self {
        Self::parse(&fs::read_to_string("/etc/group").unwrap_or_default())
    }

    pub(crate) fn parse(groups: &str) -> Self {
        let group = |line: &str| {
            let mut fields = line.split(':');
            let (name, gid) = (fields.next()?.to_owned(), fields.nth(1)?.parse().ok()?);
            let members = fields.next().unwrap_or_default().split(',').map(str::trim);
            let members = members.filter(|member| !member.is_empty()).map(str::to_owned).collect();
            Some(Group { name, gid, members })
        };
        Self(groups.lines().filter_map(group).collect())
    }

    pub(crate) fn gid_of(&self, name: &str) -> Option<u32> {
        self.0.iter().find(|group| group.name == name).map(|group| group.gid)
    }

    pub(crate) fn names(&self) -> impl Iterator<Item = &str> {
        self.0.iter().map(|group| group.name.as_str())
    }

    /// The names of the users that the file lists as members.
    pub(crate) fn members_of(&self, gid: u32) -> impl Iterator<Item = &str> {
        let groups = self.0.iter().filter(move |group| group.gid == gid);
        groups.flat_map(|group| group.members.iter().map(String::as_str))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn first_name_of_a_user_counts() {
        let users = UserNames::parse("root:x:0:0::/root:/bin/sh\ntoor:x:0:0::/:\nno\nb:x:y:\nann:x:7:7:::\n");
        assert_eq!(users.name_of(0).as_deref(), Some("root"));
        assert_eq!(users.name_of(7).as_deref(), Some("ann"));
        assert_eq!(users.name_of(8), None);
        assert_eq!((users.uid_of("ann"), users.uid_of("an")), (Some(7), None));
    }

    #[test]
    fn groups_have_a_number_and_members() {
        let groups = GroupNames::parse("models-x:x:5:\nno\nmodels:x:7:ann, bob\nbad:x:y:ann\n");
        assert_eq!(groups.gid_of("models"), Some(7));
        assert_eq!((groups.gid_of("model"), groups.gid_of("bad")), (None, None));
        assert_eq!(groups.members_of(7).collect::<Vec<_>>(), ["ann", "bob"]);
        assert_eq!(groups.members_of(5).count(), 0);
    }

    #[tokio::test]
    async fn own_process_is_at_the_other_end_of_a_socket_pair() {
        let (ours, _theirs) = tokio::net::UnixStream::pair().unwrap();
        let found = Principal::of(&ours).unwrap();
        assert_eq!(found.uid, rustix::process::geteuid().as_raw());
        assert_eq!(found.groups.primary, rustix::process::getegid().as_raw());
        assert!(found.owns_store() && found.groups.contains(found.groups.primary));
        assert!(found.groups.all().contains(&found.groups.primary));
    }
}
