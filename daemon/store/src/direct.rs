//! Direct I/O: reads and writes that bypass the page cache.

use std::fs::File;

use rustix::fs::{AtFlags, OFlags, StatxFlags, fcntl_getfl, fcntl_setfl, statx};

/// The alignment where the kernel reports none, and the least that is used: no disk has larger sectors, and some
/// kernels report what the disk needs, not what they need.
const DEFAULT_ALIGNMENT: usize = 4096;

/// Sets `O_DIRECT` if the file system allows it. Returns the alignment that offsets, lengths and memory then need, in
/// bytes: a power of two of at most `limit`.
pub(super) fn set_direct(file: &File, limit: usize) -> Option<usize> {
    let reported = statx(file, "", AtFlags::EMPTY_PATH, StatxFlags::DIOALIGN).ok();
    let reported = reported.filter(|stat| stat.stx_mask & StatxFlags::DIOALIGN.bits() != 0);
    let alignment = match reported {
        Some(stat) if stat.stx_dio_offset_align == 0 => return None,
        Some(stat) => usize::try_from(stat.stx_dio_offset_align.max(stat.stx_dio_mem_align)).ok()?,
        None => DEFAULT_ALIGNMENT,
    };
    let alignment = alignment.max(DEFAULT_ALIGNMENT);
    if !alignment.is_power_of_two() || alignment > limit {
        return None;
    }
    let flags = fcntl_getfl(file).ok()?;
    fcntl_setfl(file, flags | OFlags::DIRECT).ok()?;
    Some(alignment)
}

/// Undoes [`set_direct`].
pub(super) fn unset_direct(file: &File) {
    if let Ok(flags) = fcntl_getfl(file) {
        let _ = fcntl_setfl(file, flags - OFlags::DIRECT);
    }
}
