//! The heap of a process that lives long.
#![allow(unsafe_code)]

/// Heaps of the C library. By default there are eight for each processor, and what one thread frees in
/// its heap no other thread uses: a burst of requests on many threads would leave each heap as large as
/// it has ever been.
#[cfg(target_env = "gnu")]
const MAX_HEAPS: libc::c_int = 2;

/// Allocations from this size on are mapped by themselves and unmapped when they are freed. Without a
/// fixed value the C library raises it up to 32 MiB as it sees larger ones, and large buffers stay in the
/// heap.
#[cfg(target_env = "gnu")]
const MAPPED_FROM_BYTES: libc::c_int = 256 << 10;

/// Keeps the heap's size near what is in use. For the daemon, which lives long.
pub(crate) fn limit_heaps() {
    #[cfg(target_env = "gnu")]
    // SAFETY: needed because no safe crate has the call; sound because it takes no pointer and sets
    // parameters of the heap that may change at any time. A value that is refused changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, MAX_HEAPS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES);
    }
}
