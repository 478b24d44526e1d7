//! Users and groups as the system's name service knows them: `/etc/passwd` and `/etc/group`, and whatever
//! `/etc/nsswitch.conf` names besides, such as LDAP, SSSD, Active Directory or systemd-homed.
//!
//! No other module calls it. A call may block for as long as a directory server does not answer, so the daemon asks on
//! threads of its own and remembers the answers.

use std::ffi::CString;
use std::fs;
use std::io;

use nix::errno::Errno;
use nix::unistd::{Gid, Uid};

/// Whether only `/etc/passwd` and `/etc/group` are read. musl has no modules for other sources.
pub const READS_FILES_ONLY: bool = cfg!(target_env = "musl");

/// A user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct User {
    /// The number.
    pub uid: u32,
    /// Safe to print; control characters are replaced.
    pub name: String,
    /// The group that the user's processes have first.
    pub primary_group: u32,
}

/// A group of users.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Group {
    /// The number.
    pub gid: u32,
    /// As for [`User::name`].
    pub name: String,
}

/// The user with this number; `None` if there is none.
///
/// # Errors
/// If the name service does not answer. The same holds for all functions of this module.
pub fn user_by_id(uid: u32) -> io::Result<Option<User>> {
    answer(nix::unistd::User::from_uid(Uid::from_raw(uid))).map(|found| found.as_ref().map(user))
}

/// The user with this name; `None` if there is none.
pub fn user_by_name(name: &str) -> io::Result<Option<User>> {
    if !is_possible(name) {
        return Ok(None);
    }
    answer(nix::unistd::User::from_name(name)).map(|found| found.as_ref().map(user))
}

/// The group with this number; `None` if there is none.
pub fn group_by_id(gid: u32) -> io::Result<Option<Group>> {
    answer(nix::unistd::Group::from_gid(Gid::from_raw(gid))).map(|found| found.as_ref().map(group))
}

/// The group with this name; `None` if there is none.
pub fn group_by_name(name: &str) -> io::Result<Option<Group>> {
    if !is_possible(name) {
        return Ok(None);
    }
    answer(nix::unistd::Group::from_name(name)).map(|found| found.as_ref().map(group))
}

/// The groups that a process of this user gets when the user logs in. Groups of a running process may be others.
pub fn groups_of(uid: u32) -> io::Result<Option<Vec<u32>>> {
    // Not by way of `User`, whose name is made printable.
    let Some(found) = answer(nix::unistd::User::from_uid(Uid::from_raw(uid)))? else { return Ok(None) };
    let Ok(name) = CString::new(found.name) else { return Ok(None) };
    let groups = nix::unistd::getgrouplist(&name, found.gid).map_err(io::Error::from)?;
    Ok(Some(groups.into_iter().map(Gid::as_raw).collect()))
}

/// The names in the file `/etc/passwd` (users) or `/etc/group` (groups), to suggest one of them. A directory may have
/// millions of names, and many refuse to list them.
pub fn local_names(file: &str) -> Vec<String> {
    /// Files of this size are made by hand.
    const MAX_BYTES: u64 = 1 << 20;
    let is_small = fs::metadata(file).is_ok_and(|found| found.len() <= MAX_BYTES);
    let content = if is_small { fs::read(file).unwrap_or_default() } else { Vec::new() };
    let lines = String::from_utf8_lossy(&content);
    let names = lines.lines().filter_map(|line| line.split_once(':')).map(|(name, _)| printable(name));
    names.filter(|name| !name.is_empty()).collect()
}

/// A name as it can be shown and compared: not in UTF-8 or with control characters in it, these are replaced.
fn printable(name: &str) -> String {
    name.chars().map(|c| if c.is_control() { char::REPLACEMENT_CHARACTER } else { c }).collect()
}

fn user(found: &nix::unistd::User) -> User {
    let name = printable(&found.name);
    User { uid: found.uid.as_raw(), name, primary_group: found.gid.as_raw() }
}

fn group(found: &nix::unistd::Group) -> Group {
    Group { gid: found.gid.as_raw(), name: printable(&found.name) }
}

/// Whether the C library can look up the name.
fn is_possible(name: &str) -> bool {
    !name.is_empty() && !name.contains('\0')
}

/// Errors that mean "no such user or group": see `getpwnam(3)`.
fn answer<T>(found: nix::Result<Option<T>>) -> io::Result<Option<T>> {
    match found {
        Err(Errno::ENOENT | Errno::ESRCH | Errno::EBADF | Errno::EPERM) => Ok(None),
        // Some modules report a failure without a number.
        Err(Errno::UnknownErrno) => Err(io::Error::other("the name service reports an unknown error")),
        other => other.map_err(io::Error::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn root_is_found_by_name_and_by_number() {
        let root = user_by_id(0).unwrap().unwrap();
        assert_eq!((root.name.as_str(), root.primary_group), ("root", 0));
        assert_eq!(user_by_name("root").unwrap(), Some(root));
        assert_eq!(group_by_name("root").unwrap(), group_by_id(0).unwrap());
        assert!(groups_of(0).unwrap().unwrap().contains(&0));
        assert!(local_names("/etc/passwd").contains(&"root".to_owned()));
    }

    #[test]
    fn names_that_cannot_exist_are_not_found() {
        for name in ["", "a\0b", "no-such-user-of-blobd", "DOMAIN\\no-such", "no@such.example", "a b"] {
            assert_eq!((user_by_name(name).unwrap(), group_by_name(name).unwrap()), (None, None), "{name:?}");
        }
        assert_eq!((user_by_id(3_999_999_999).unwrap(), groups_of(3_999_999_999).unwrap()), (None, None));
    }

    #[test]
    fn control_characters_of_a_name_are_replaced() {
        assert_eq!(printable("DOMAIN\\ann b@c\x1b[2J\n"), "DOMAIN\\ann b@c\u{fffd}[2J\u{fffd}");
    }

    #[test]
    fn failure_of_the_name_service_differs_from_an_unknown_user() {
        assert!(answer::<()>(Err(Errno::ECONNREFUSED)).is_err());
        assert!(answer::<()>(Err(Errno::UnknownErrno)).is_err());
        assert_eq!(answer::<()>(Err(Errno::ESRCH)).unwrap(), None);
    }
}
