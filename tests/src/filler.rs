//! Fills a small file system.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use rustix::fs::{FallocateFlags, fallocate, statvfs, syncfs};

/// A file that takes up space until this is dropped. It is in the store's directory; blobd does not use its
/// name.
#[derive(Debug)]
pub struct Filler(PathBuf);

impl Filler {
    /// Takes all free space on the file system of `root` except this many bytes, in whole blocks. If other
    /// processes write at the same time, less stays free.
    ///
    /// # Panics
    /// When the file cannot be made.
    #[must_use]
    pub fn leaving_free(root: &Path, bytes: u64) -> Self {
        const BLOCK: u64 = 4096;
        let path = root.join("filler");
        let file = File::create(&path).unwrap();
        let (mut step, mut taken) = (1 << 20, 0);
        while step >= BLOCK {
            let free = free_bytes(root).saturating_sub(bytes);
            if free < step || fallocate(&file, FallocateFlags::KEEP_SIZE, taken, step).is_err() {
                step /= 4;
            } else {
                taken += step;
            }
        }
        Self(path)
    }
}

impl Drop for Filler {
    fn drop(&mut self) {
        // After a failed test the mount may be gone that the path leads through.
        let _ = fs::remove_file(&self.0);
    }
}

/// The free space on the file system of `root` after a sync.
///
/// # Panics
/// When the file system cannot be inspected.
#[must_use]
pub fn free_bytes(root: &Path) -> u64 {
    syncfs(File::open(root).unwrap()).unwrap();
    let stat = statvfs(root).unwrap();
    stat.f_bavail * stat.f_frsize
}
