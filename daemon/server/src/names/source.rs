//! Where names come from: the system, and in tests files.

use std::io;

use blobd_client::name_service::{self, Group, User};

/// Answers questions about users and groups. May block.
pub(super) trait Source: Send + Sync {
    fn user_by_id(&self, uid: u32) -> io::Result<Option<User>>;
    fn user_by_name(&self, name: &str) -> io::Result<Option<User>>;
    fn group_by_name(&self, name: &str) -> io::Result<Option<Group>>;
    fn groups_of(&self, uid: u32) -> io::Result<Option<Vec<u32>>>;
    fn local_users(&self) -> Vec<String>;
    fn local_groups(&self) -> Vec<String>;
}

pub(super) struct System;

impl Source for System {
    fn user_by_id(&self, uid: u32) -> io::Result<Option<User>> {
        name_service::user_by_id(uid)
    }

    fn user_by_name(&self, name: &str) -> io::Result<Option<User>> {
        name_service::user_by_name(name)
    }

    fn group_by_name(&self, name: &str) -> io::Result<Option<Group>> {
        name_service::group_by_name(name)
    }

    fn groups_of(&self, uid: u32) -> io::Result<Option<Vec<u32>>> {
        name_service::groups_of(uid)
    }

    fn local_users(&self) -> Vec<String> {
        name_service::local_names("/etc/passwd")
    }

    fn local_groups(&self) -> Vec<String> {
        name_service::local_names("/etc/group")
    }
}

/// The content of files as `/etc/passwd` and `/etc/group`.
#[cfg(test)]
#[derive(Default)]
pub(super) struct Files {
    users: Vec<User>,
    groups: Vec<(Group, Vec<String>)>,
}

#[cfg(test)]
impl Files {
    pub(super) fn parse(passwd: &str, group: &str) -> Self {
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
}

#[cfg(test)]
impl Source for Files {
    fn user_by_id(&self, uid: u32) -> io::Result<Option<User>> {
        Ok(self.users.iter().find(|user| user.uid == uid).cloned())
    }

    fn user_by_name(&self, name: &str) -> io::Result<Option<User>> {
        Ok(self.users.iter().find(|user| user.name == name).cloned())
    }

    fn group_by_name(&self, name: &str) -> io::Result<Option<Group>> {
        Ok(self.groups.iter().map(|(group, _)| group).find(|group| group.name == name).cloned())
    }

    fn groups_of(&self, uid: u32) -> io::Result<Option<Vec<u32>>> {
        let Some(user) = self.user_by_id(uid)? else { return Ok(None) };
        let has_user = |(_, members): &&(Group, Vec<String>)| members.contains(&user.name);
        let listed = self.groups.iter().filter(has_user).map(|(group, _)| group.gid);
        Ok(Some(std::iter::once(user.primary_group).chain(listed).collect()))
    }

    fn local_users(&self) -> Vec<String> {
        self.users.iter().map(|user| user.name.clone()).collect()
    }

    fn local_groups(&self) -> Vec<String> {
        self.groups.iter().map(|(group, _)| group.name.clone()).collect()
    }
}
