//! `setfsuid(2)` and `setfsgid(2)`: the user and group with which this thread accesses files, and to which the files
//! that it creates belong. Safe crates omit them because they change one thread only, which is what is needed here.
#![allow(unsafe_code)]

use std::io;
use std::marker::PhantomData;

use rustix::io::Errno;

/// Accesses files as another user until it is dropped. It belongs to the thread that has made it.
#[derive(Debug)]
#[must_use]
pub struct FileIdentity {
    /// The user and group before.
    before: (u32, u32),
    _of_this_thread: PhantomData<*const ()>,
}

impl FileIdentity {
    /// Accesses files as this user and group from now on. Threads that this thread starts do so too.
    ///
    /// # Errors
    /// `EPERM` without the capabilities `CAP_SETUID` and `CAP_SETGID`, or if the user namespace has no such user.
    pub(crate) fn assume(uid: u32, gid: u32) -> io::Result<Self> {
        // The group first, because it may need a capability of the user. Dropped on failure, which restores both.
        let identity = Self { before: (uid_of_thread(), gid_of_thread()), _of_this_thread: PhantomData };
        set_gid(gid);
        set_uid(uid);
        // The calls do not report failure.
        let found = (uid_of_thread(), gid_of_thread());
        if found == (uid, gid) { Ok(identity) } else { Err(Errno::PERM.into()) }
    }
}

impl Drop for FileIdentity {
    fn drop(&mut self) {
        let (uid, gid) = self.before;
        set_uid(uid);
        set_gid(gid);
    }
}

/// No user or group has this number, so nothing is changed and the present one is returned.
const NONE: u32 = u32::MAX;

fn uid_of_thread() -> u32 {
    set_uid(NONE)
}

fn gid_of_thread() -> u32 {
    set_gid(NONE)
}

/// Returns the user before.
fn set_uid(uid: u32) -> u32 {
    // SAFETY: needed because neither std nor rustix has this call. It takes no pointers. It changes this thread only:
    // glibc and musl do not apply it to other threads, unlike `setuid`.
    unsafe { libc::setfsuid(uid) }.cast_unsigned()
}

/// Returns the group before.
fn set_gid(gid: u32) -> u32 {
    // SAFETY: as for `set_uid`.
    unsafe { libc::setfsgid(gid) }.cast_unsigned()
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, chown};

    use super::*;

    #[test]
    fn files_belong_to_the_assumed_user_and_later_ones_to_the_process() {
        const OTHER: u32 = 65534;
        if !rustix::process::geteuid().is_root() {
            println!("skipped: only root can act as another user");
            return;
        }
        let folder = tempfile::tempdir().unwrap();
        chown(folder.path(), Some(OTHER), Some(OTHER)).unwrap();
        let create = |name: &str| {
            let path = folder.path().join(name);
            std::fs::write(&path, "").unwrap();
            let found = path.metadata().unwrap();
            (found.uid(), found.gid())
        };
        let own = create("before");
        let identity = FileIdentity::assume(OTHER, OTHER).unwrap();
        assert_eq!(create("as-other"), (OTHER, OTHER));
        let elsewhere = std::thread::scope(|scope| scope.spawn(|| create("of-a-new-thread")).join().unwrap());
        assert_eq!(elsewhere, (OTHER, OTHER));
        drop(identity);
        assert_eq!(create("after"), own);
    }

    #[test]
    fn ordinary_user_cannot_act_as_another_and_remains_itself() {
        let own = rustix::process::geteuid();
        if own.is_root() {
            println!("skipped: root can act as anybody");
            return;
        }
        let error = FileIdentity::assume(own.as_raw() + 1, rustix::process::getegid().as_raw()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(uid_of_thread(), own.as_raw());
    }
}
