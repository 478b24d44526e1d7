//! Heap settings for a long-running process.
#![allow(unsafe_code)]

/// The number of heaps of the C library. The default is eight for each processor, and other threads do not
/// reuse the memory that one thread frees in its heap: after a burst of requests on many threads, each heap
/// would keep its largest size.
#[cfg(target_env = "gnu")]
const MAX_HEAPS: libc::c_int = 2;

/// Allocations from this size on get their own mapping, which is unmapped when they are freed. Without a
/// fixed value the C library raises the threshold up to 32 MiB, and large buffers stay in the heap.
#[cfg(target_env = "gnu")]
const MAPPED_FROM_BYTES: libc::c_int = 256 << 10;

pub(crate) fn limit_heaps() {
    #[cfg(target_env = "gnu")]
    // SAFETY: needed because no safe crate has the call; sound because it takes no pointer and sets
    // parameters of the heap that may change at any time. A value that is refused changes nothing.
    unsafe {
        libc::mallopt(libc::M_ARENA_MAX, MAX_HEAPS);
        libc::mallopt(libc::M_MMAP_THRESHOLD, MAPPED_FROM_BYTES);
    }
}
