//! What the kernel says about the process that has connected, and no safe crate asks for: its supplementary groups
//! (`SO_PEERGROUPS`, Linux 4.13) and a descriptor of it (`SO_PEERPIDFD`, Linux 6.5).
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd};

/// The options' numbers on all architectures except two that blobd does not support (parisc and sparc).
const SO_PEERGROUPS: libc::c_int = 59;
const SO_PEERPIDFD: libc::c_int = 77;
/// The kernel's limit of a process's groups.
const MAX_GROUPS: usize = 65536;

/// The supplementary groups that the peer had when it connected. Fails with `ENOPROTOOPT` on older kernels.
pub(crate) fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups: Vec<u32> = vec![0; 32];
    loop {
        let bytes = groups.len().saturating_mul(size_of::<u32>());
        let mut length = libc::socklen_t::try_from(bytes).map_err(io::Error::other)?;
        // SAFETY: needed because no safe crate has the option. The kernel writes at most `length` bytes to the
        // pointer, which is the size of the vector's initialised elements, and the length that it has or needs.
        let result = unsafe {
            libc::getsockopt(
                socket.as_fd().as_raw_fd(),
                libc::SOL_SOCKET,
                SO_PEERGROUPS,
                groups.as_mut_ptr().cast(),
                &raw mut length,
            )
        };
        let count = usize::try_from(length).unwrap_or_default() / size_of::<u32>();
        if result == 0 {
            groups.truncate(count);
            return Ok(groups);
        }
        let error = io::Error::last_os_error();
        // There are more groups than fit: the kernel has set the length to that of all.
        let grows = groups.len() < count && count <= MAX_GROUPS;
        if error.raw_os_error() != Some(libc::ERANGE) || !grows {
            return Err(error);
        }
        groups.resize(count, 0);
    }
}

/// A descriptor of the process that connected. It stays that process's when its number is another's. Fails with
/// `ENOPROTOOPT` on older kernels, and after the process was reaped on some.
pub(crate) fn peer_pidfd(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut descriptor: libc::c_int = -1;
    let mut length = libc::socklen_t::try_from(size_of::<libc::c_int>()).map_err(io::Error::other)?;
    // SAFETY: needed because no safe crate has the option. The kernel writes at most `length` bytes to the pointer,
    // which is the size of `descriptor`.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PEERPIDFD,
            (&raw mut descriptor).cast(),
            &raw mut length,
        )
    };
    if result != 0 {
        return Err(io::Error::last_os_error());
    }
    if descriptor < 0 {
        return Err(io::ErrorKind::NotFound.into());
    }
    // SAFETY: the kernel has just opened this descriptor for the caller, and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixStream;

    use super::*;

    #[test]
    fn groups_of_the_peer_are_those_of_its_process() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let mut expected: Vec<u32> =
            rustix::process::getgroups().unwrap().into_iter().map(rustix::fs::Gid::as_raw).collect();
        match peer_groups(&ours) {
            Err(error) => println!("skipped, the kernel has no SO_PEERGROUPS: {error}"),
            Ok(mut found) => {
                found.sort_unstable();
                expected.sort_unstable();
                assert_eq!(found, expected);
            }
        }
    }
}
