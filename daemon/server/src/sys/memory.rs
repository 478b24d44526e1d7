//! Heap settings for a long-running process.
#![allow(unsafe_code)]

/// The number of heaps of the C library. The default is eight for each processor, and other threads do not
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
