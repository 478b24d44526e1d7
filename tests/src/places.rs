//! Where tests keep their files.

use std::path::Path;

use tempfile::TempDir;

/// A temporary directory in memory if the machine has one with room: what most tests ask is
/// whether the right thing happens, and hundreds of `fsync`s on a busy disk take minutes. With
/// `TMPDIR` set, all tests run there.
///
/// # Panics
/// When there is no place for it.
#[must_use]
pub fn fast_folder() -> TempDir {
    const ROOM_BYTES: u64 = 1 << 30;
    let memory = Path::new("/dev/shm");
    let free = |stat: rustix::fs::StatVfs| stat.f_bavail.saturating_mul(stat.f_frsize);
    let has_room = rustix::fs::statvfs(memory).is_ok_and(|stat| free(stat) >= ROOM_BYTES);
    let in_memory = std::env::var_os("TMPDIR").is_none() && has_room;
    let folder = if in_memory { tempfile::tempdir_in(memory) } else { tempfile::tempdir() };
    folder.or_else(|_| tempfile::tempdir()).expect("a temporary directory")
}

/// A temporary directory where the system keeps such things: usually on a disk.
///
/// # Panics
/// When there is no place for it.
#[must_use]
pub fn disk_folder() -> TempDir {
    tempfile::tempdir().expect("a temporary directory")
}
