//! Giving memory back.
#![allow(unsafe_code)]

/// Gives what is free in the heap back to the system. After gigabytes of recipes have gone through
/// it, a quarter of a daemon's memory is holes. Takes some milliseconds.
pub fn give_back_memory() {
    #[cfg(target_env = "gnu")]
    // SAFETY: needed because no safe crate has the call; sound because it takes no pointer, only
    // unmaps pages that hold no allocation, and locks the heap against other threads meanwhile.
    unsafe {
        libc::malloc_trim(0);
    }
}
