//! Returns free heap memory to the system.
#![allow(unsafe_code)]

/// Returns free heap memory to the system; takes some milliseconds. After gigabytes of recipes have been
/// parsed, a quarter of the daemon's memory is free but not returned.
pub fn give_back_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: needed because no safe crate has the call; sound because it takes no pointer, only
    // unmaps pages that hold no allocation, and locks the heap against other threads meanwhile.
    unsafe {
        libc::malloc_trim(0);
    }
}
