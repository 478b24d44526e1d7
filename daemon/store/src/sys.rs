//! Kernel calls that no safe crate wraps; the crate's only `unsafe`.

#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::marker::PhantomData;
use std::os::fd::{AsFd, AsRawFd as _};
use std::sync::Once;

use rustix::io::Errno;

/// Accesses files as another user until it is dropped (`setfsuid`, `setfsgid`). Safe crates omit these calls because
/// they change one thread only, which is what is needed here: the value belongs to the thread that has made it.
#[derive(Debug)]
#[must_use]
pub struct FileIdentity {
    /// The user and group before.
    before: (u32, u32),
    _of_this_thread: PhantomData<*const ()>,
}

impl FileIdentity {
    /// Accesses files as this user and group from now on. Threads that this thread starts do so too. Fails without
    /// `CAP_SETUID` and `CAP_SETGID`, or if the user namespace has no such user.
    pub(crate) fn assume(uid: u32, gid: u32) -> io::Result<Self> {
        // The group first, because it may need a capability of the user. Dropped on failure, which restores both.
        let identity = Self { before: (set_uid(NONE), set_gid(NONE)), _of_this_thread: PhantomData };
        set_gid(gid);
        set_uid(uid);
        // The calls do not report failure.
        let found = (set_uid(NONE), set_gid(NONE));
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

/// No user or group has this number, so setting it changes nothing and returns the present one.
const NONE: u32 = u32::MAX;

/// Returns the user before.
fn set_uid(uid: u32) -> u32 {
    // SAFETY: needed because neither std nor rustix has this call. It takes no pointers. It changes this thread only:
    // glibc and musl do not apply it to other threads, unlike `setuid`.
    unsafe { libc::setfsuid(uid) }.cast_unsigned()
}

fn set_gid(gid: u32) -> u32 {
    // SAFETY: as for `set_uid`.
    unsafe { libc::setfsgid(gid) }.cast_unsigned()
}

/// Whether the file is open or mapped elsewhere, by a kernel lease (`F_SETLEASE`). `file` must be the caller's only
/// description of it.
pub(crate) fn is_in_use(file: &File) -> io::Result<bool> {
    ignore_lease_breaks();
    let fd = file.as_raw_fd();
    // SAFETY: needed because neither std nor rustix has this call. It takes no pointers, and `fd` is open as long as
    // `file` is borrowed.
    let granted = unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_WRLCK) };
    if granted == 0 {
        // SAFETY: as above. It cannot fail for a lease that is held; closing would end it too.
        unsafe { libc::fcntl(fd, libc::F_SETLEASE, libc::F_UNLCK) };
        return Ok(false);
    }
    match io::Error::last_os_error() {
        error if error.kind() == io::ErrorKind::WouldBlock => Ok(true),
        error => Err(error),
    }
}

/// A process that opens the file while it is leased makes the kernel send SIGIO, which would end this process.
fn ignore_lease_breaks() {
    static ONCE: Once = Once::new();
    // SAFETY: SIG_IGN runs no code of ours, and nothing else in the daemon uses SIGIO.
    ONCE.call_once(|| unsafe {
        libc::signal(libc::SIGIO, libc::SIG_IGN);
    });
}

/// Takes some milliseconds. After gigabytes of recipes, a quarter of the daemon's memory is free but not returned.
pub fn give_back_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: needed because no safe crate has the call; sound because it takes no pointer, only unmaps pages that hold
    // no allocation, and locks the heap against other threads meanwhile.
    unsafe {
        libc::malloc_trim(0);
    }
}

/// Has the kernel start writing a file's dirty pages, and does not wait (`sync_file_range`). Only a hint that makes the
/// later sync cheap, so failure is ignored: it makes nothing durable (`docs/STORE-FORMAT.md`, commit order).
pub(crate) fn start_writeback(file: impl AsFd, offset: u64, length: u64) {
    let (Ok(offset), Ok(length)) = (i64::try_from(offset), i64::try_from(length)) else { return };
    let fd = file.as_fd().as_raw_fd();
    // SAFETY: needed because neither std nor rustix has this call. It is sound because it takes no pointers and `fd`
    // stays open while `file` is borrowed.
    unsafe { libc::sync_file_range(fd, offset, length, libc::SYNC_FILE_RANGE_WRITE) };
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::{MetadataExt as _, chown};

    use super::*;

    #[test]
    fn files_belong_to_the_assumed_user_and_later_ones_to_the_process() {
        const OTHER: u32 = 65534;
        if !rustix::process::geteuid().is_root() {
            blobd_fixtures::skipped::skipped("only root can act as another user");
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
            blobd_fixtures::skipped::skipped("root can act as anybody");
            return;
        }
        let error = FileIdentity::assume(own.as_raw() + 1, rustix::process::getegid().as_raw()).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(set_uid(NONE), own.as_raw());
    }

    #[test]
    fn file_is_in_use_while_another_description_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("f");
        std::fs::write(&path, "x").unwrap();
        let probe = || is_in_use(&File::open(&path).unwrap()).unwrap();
        assert!(!probe());
        let reader = File::open(&path).unwrap();
        assert!(probe());
        drop(reader);
        assert!(!probe());
    }
}
