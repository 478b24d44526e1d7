//! System calls without a safe wrapper: the only `unsafe` code in this crate.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd as _, FromRawFd as _, OwnedFd, RawFd};

use memmap2::{MmapMut, MmapOptions};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// Socket options, which have these numbers on all architectures except two that blobd does not support (parisc and
/// sparc). They need Linux 4.13, 6.5 and 6.16.
const SO_PEERGROUPS: libc::c_int = 59;
const SO_PEERPIDFD: libc::c_int = 77;
const SO_PASSRIGHTS: libc::c_int = 83;
/// The kernel's limit of a process's groups.
const MAX_GROUPS: usize = 65536;

/// The supplementary groups that the peer had when it connected.
pub(crate) fn peer_groups(socket: impl AsFd) -> io::Result<Vec<u32>> {
    let mut groups: Vec<u32> = vec![0; 32];
    loop {
        let (result, count) = socket_option(&socket, SO_PEERGROUPS, &mut groups);
        match result {
            Ok(()) => {
                groups.truncate(count);
                return Ok(groups);
            }
            // There are more groups than fit: the kernel has set the length to that of all.
            Err(error)
                if error.raw_os_error() == Some(libc::ERANGE)
                    && (groups.len() + 1..=MAX_GROUPS).contains(&count) =>
            {
                groups.resize(count, 0);
            }
            Err(error) => return Err(error),
        }
    }
}

/// A descriptor of the process that connected, which stays that process's when its number is reused. Fails on some kernels
/// after the process was reaped.
pub(crate) fn peer_pidfd(socket: impl AsFd) -> io::Result<OwnedFd> {
    let mut descriptor = [u32::MAX];
    socket_option(&socket, SO_PEERPIDFD, &mut descriptor).0?;
    let [descriptor] = descriptor;
    let descriptor = RawFd::try_from(descriptor).map_err(|_negative| io::ErrorKind::NotFound)?;
    // SAFETY: the kernel has just opened this descriptor for the caller, and nothing else knows it.
    Ok(unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Reads an option that consists of numbers. Also returns how many numbers it has, or needs space for.
fn socket_option(socket: &impl AsFd, option: libc::c_int, values: &mut [u32]) -> (io::Result<()>, usize) {
    let mut length = libc::socklen_t::try_from(size_of_val(values)).unwrap_or_default();
    // SAFETY: needed because no safe crate has these options. The kernel writes at most `length` bytes to the first pointer,
    // which is at most the size of the slice, and the length that the option has or needs to the second.
    let result = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            option,
            values.as_mut_ptr().cast(),
            &raw mut length,
        )
    };
    let count = usize::try_from(length).unwrap_or_default() / size_of::<u32>();
    (if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }, count)
}

/// Sets whether `socket` accepts descriptors. If not, a sender gets `EPERM`. Accepted connections inherit the setting of
/// the listening socket. Where this fails with `ENOPROTOOPT`, every Unix socket accepts descriptors.
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

/// An anonymous file of `bytes` zeros in memory, to share with another process of this program. Nobody can change its size.
pub(crate) fn shared_memory(bytes: usize) -> io::Result<File> {
    let create = |flag| memfd_create("blobd-import", MemfdFlags::CLOEXEC | flag);
    // Some systems require the first flag (`vm.memfd_noexec`); Linux before 6.3 does not know it.
    let memory = create(MemfdFlags::NOEXEC_SEAL).or_else(|_| create(MemfdFlags::ALLOW_SEALING))?;
    let memory = File::from(memory);
    memory.set_len(bytes as u64)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// Maps [`shared_memory`] as consecutive slots of `slot_bytes`. To be called once per process. A process uses a slot only
/// while the other one has handed it over and has not requested it back.
pub(crate) fn map_shared(memory: &File, slot_count: usize, slot_bytes: usize) -> io::Result<Vec<MmapMut>> {
    let map = |slot: usize| {
        let mut options = MmapOptions::new();
        options.offset((slot * slot_bytes) as u64).len(slot_bytes);
        // SAFETY: the file is sealed, so it cannot be truncated. No slot is mapped twice in this process, and
        // the other process, which runs the same program, changes a slot only while this one does not use it.
        unsafe { options.map_mut(memory) }
    };
    (0..slot_count).map(map).collect()
}

/// Standard input, output and error as owned descriptors, for a process whose parent passed other files in
/// their place. To be called once, by a process that prints nothing.
pub(crate) fn take_standard_descriptors() -> [OwnedFd; 3] {
    // SAFETY: the standard library ensures that the three are open from the start of the process on, and
    // the caller is their only user.
    [0, 1, 2].map(|fd| unsafe { OwnedFd::from_raw_fd(fd) })
}

/// The number of the first descriptor after the standard ones.
const FIRST_PASSED: RawFd = 3;

/// The first descriptor that a service manager has passed. To be called at most once, by a process that was told about
/// it and has opened no file itself. Fails if there is none.
pub(crate) fn take_first_passed_descriptor() -> io::Result<OwnedFd> {
    // SAFETY: needed because no safe call asks about a number; sound because it takes no pointer and reads a flag.
    if unsafe { libc::fcntl(FIRST_PASSED, libc::F_GETFD) } == -1 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: the descriptor is open, and the caller is its only user: the process was started with it.
    Ok(unsafe { OwnedFd::from_raw_fd(FIRST_PASSED) })
}

/// Heaps of the C library. The default is eight for each processor, and other threads do not
/// reuse the memory that one thread frees in its heap: after a burst of requests on many threads, each heap
/// would keep its largest size.
#[cfg(target_env = "gnu")]
const MAX_HEAPS: libc::c_int = 2;

/// Allocations from this size on get their own mapping, which is unmapped when they are freed. Without a
/// fixed value the C library raises the threshold up to 32 MiB, and large buffers stay in the heap. The
/// buffers that responses of registries are read into are smaller: a pull needs a thousand of them for each
/// 400 MiB, and mapping fresh pages for each would take a quarter of its processor time.
#[cfg(target_env = "gnu")]
const MAPPED_FROM_BYTES: libc::c_int = 1 << 20;

/// Free memory at the end of a heap is returned to the system from this size on: several of the buffers
/// above, so that it is not unmapped and mapped again with each of them.
#[cfg(target_env = "gnu")]
const TRIMMED_FROM_BYTES: libc::c_int = 16 << 20;

pub(crate) fn limit_heaps() {
    #[cfg(target_env = "gnu")]
    // SAFETY: needed because no safe crate has the call; sound because it takes no pointer and sets
    // parameters of the heap that may change at any time. A value that is refused changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, MAX_HEAPS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES);
        libc::mallopt(libc::M_TRIM_THRESHOLD, TRIMMED_FROM_BYTES);
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read as _, Write as _};
    use std::os::unix::net::UnixStream;

    use blobd_client::protocol::connection::send_message;

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
