//! `SO_PASSRIGHTS`: whether a Unix socket accepts descriptors. Linux 6.16 and later.
#![allow(unsafe_code)]

use std::io;
use std::os::fd::{AsFd, AsRawFd as _};

/// The option's number on all architectures except two that blobd does not support (parisc and sparc).
const SO_PASSRIGHTS: libc::c_int = 83;

/// Sets whether `socket` accepts descriptors. If not, a sender gets `EPERM`. Accepted connections inherit
/// the setting of the listening socket. Fails with `ENOPROTOOPT` on kernels older than 6.16, where every
/// Unix socket accepts descriptors.
pub(crate) fn set_takes_descriptors(socket: impl AsFd, takes: bool) -> io::Result<()> {
    let value = libc::c_int::from(takes);
    let length = libc::socklen_t::try_from(size_of_val(&value)).unwrap_or_default();
    // SAFETY: needed because no safe crate has the option. The pointer and the length are those of
    // `value`, which lives until the call returns, and the descriptor is open while it is borrowed.
    let result = unsafe {
        libc::setsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            SO_PASSRIGHTS,
            (&raw const value).cast(),
            length,
        )
    };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// How many of the sent bytes the peer has not received yet, including their overhead. 0 after the peer has
/// closed, because its unread data is then discarded.
pub(crate) fn unreceived_bytes(socket: impl AsFd) -> io::Result<u64> {
    let mut bytes: libc::c_int = 0;
    // SAFETY: needed because no safe crate has the call. It writes one integer to the pointer, which is
    // that of `bytes`, and the descriptor is open while it is borrowed.
    let result = unsafe { libc::ioctl(socket.as_fd().as_raw_fd(), libc::TIOCOUTQ, &raw mut bytes) };
    if result == 0 { Ok(u64::try_from(bytes).unwrap_or_default()) } else { Err(io::Error::last_os_error()) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use blobd_client::protocol::connection::send_message;

    use super::*;

    #[test]
    fn socket_that_takes_no_descriptors_refuses_them_to_the_sender() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        if let Err(error) = set_takes_descriptors(&ours, false) {
            println!("skipped, the kernel has no SO_PASSRIGHTS: {error}");
            return;
        }
        let file = std::fs::File::open("/dev/null").unwrap();
        let send = || send_message(&theirs, b"x", &[file.as_fd()]);
        assert_eq!(send().unwrap_err().kind(), io::ErrorKind::PermissionDenied);
        assert_eq!(send_message(&theirs, b"x", &[]).unwrap(), 1, "bytes without descriptors are accepted");
        set_takes_descriptors(&ours, true).unwrap();
        assert_eq!(send().unwrap(), 1);
    }

    #[test]
    fn sent_bytes_count_until_they_are_received_or_the_peer_closes() {
        let (mut ours, mut theirs) = UnixStream::pair().unwrap();
        assert_eq!(unreceived_bytes(&ours).unwrap(), 0);
        ours.write_all(b"x").unwrap();
        assert!(unreceived_bytes(&ours).unwrap() > 0);
        theirs.read_exact(&mut [0]).unwrap();
        assert_eq!(unreceived_bytes(&ours).unwrap(), 0);
        ours.write_all(b"x").unwrap();
        drop(theirs);
        assert_eq!(unreceived_bytes(&ours).unwrap(), 0);
    }
}
