//! Kernel leases, `fcntl(F_SETLEASE)`: the only way to find out whether any process has a file open or
//! mapped.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd as _;
use std::sync::Once;

/// Whether the file is open or mapped elsewhere, in this or another process. `file` must be the only
/// description through which the caller has it open.
pub(crate) fn is_in_use(file: &File) -> io::Result<bool> {
    ignore_lease_breaks();
    let fd = file.as_raw_fd();
    // SAFETY: needed because neither std nor rustix has this call. It takes no pointers, and `fd`
    // is open as long as `file` is borrowed.
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

/// If another process opens the file while the lease is held, the kernel sends SIGIO, which would end
/// this process.
fn ignore_lease_breaks() {
    static ONCE: Once = Once::new();
    // SAFETY: SIG_IGN runs no code of ours, and nothing else in the daemon uses SIGIO.
    ONCE.call_once(|| unsafe {
        libc::signal(libc::SIGIO, libc::SIG_IGN);
    });
}

#[cfg(test)]
mod tests {
    use super::*;

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
