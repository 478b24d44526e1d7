//! Memory that two processes of this program share.
#![allow(unsafe_code)]

use std::fs::File;
use std::io;

use memmap2::{MmapMut, MmapOptions};
use rustix::fs::{MemfdFlags, SealFlags, fcntl_add_seals, memfd_create};

/// An anonymous file of `bytes` zeros in memory, whose size nobody can change.
pub(crate) fn shared_memory(bytes: usize) -> io::Result<File> {
    let create = |flag| memfd_create("blobd-import", MemfdFlags::CLOEXEC | flag);
    // Some systems require the first flag (`vm.memfd_noexec`); Linux before 6.3 does not know it.
    let memory = create(MemfdFlags::NOEXEC_SEAL).or_else(|_| create(MemfdFlags::ALLOW_SEALING))?;
    let memory = File::from(memory);
    memory.set_len(bytes as u64)?;
    fcntl_add_seals(&memory, SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL)?;
    Ok(memory)
}

/// Maps shared memory as consecutive slots of `slot_bytes`. To be called once per process. A process uses a
/// slot only while the other one has handed it over and has not asked for it back.
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
