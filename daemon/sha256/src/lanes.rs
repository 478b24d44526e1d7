//! The compression function on two states at once.

use crate::{Block, State};

#[cfg(target_arch = "x86_64")]
mod x86;

/// Compresses the same number of blocks into each of two states.
pub(crate) fn compress_both(states: [&mut State; 2], blocks: [&[Block]; 2]) {
    let [first, second] = blocks;
    #[cfg(target_arch = "x86_64")]
    if are_available() {
        // SAFETY: the processor has the instructions, as `are_available` has just checked.
        #[expect(unsafe_code, reason = "functions that need instructions which not every processor has")]
        unsafe {
            if std::ptr::eq(first, second) {
                x86::compress_same(states, first);
            } else {
                x86::compress_different(states, blocks);
            }
        }
        return;
    }
    for (state, blocks) in states.into_iter().zip(blocks) {
        sha2::block_api::compress256(state, blocks);
    }
}

pub(crate) fn are_available() -> bool {
    #[cfg(target_arch = "x86_64")]
    return is_x86_feature_detected!("sha")
        && is_x86_feature_detected!("ssse3")
        && is_x86_feature_detected!("sse4.1");
    #[cfg(not(target_arch = "x86_64"))]
    false
}
