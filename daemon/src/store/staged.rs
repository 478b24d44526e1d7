//! One blob while it is being written: bytes go to disk and into the hash in one pass.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::os::unix::fs::{FileExt as _, OpenOptionsExt as _};
use std::path::{Path, PathBuf};

use blobd_store_format::digest::{Digest, Hasher};
use rustix::fs::Mode;

use super::error::StoreError;
use crate::sys::start_writeback;

/// A blob that is being staged. It has no name yet; its digest comes out at the end.
///
/// Bytes may come in any order, as the members of an expert group do: what arrives at the front
/// of the hash is hashed at once, what arrives ahead of it is read back when the front gets there.
#[derive(Debug)]
pub struct StagedWriter {
    path: PathBuf,
    /// Open only while it is written to: a hostile file may interleave thousands of groups.
    file: Option<File>,
    size: u64,
    hasher: Hasher,
    hashed: u64,
    ahead: BTreeMap<u64, u64>,
}

/// A blob that is completely written: content hashed, mode read-only, not yet durable.
#[derive(Debug)]
pub struct StagedBlob {
    /// Where it lies.
    pub path: PathBuf,
    /// The SHA-256 of its bytes.
    pub digest: Digest,
    /// How many they are.
    pub size: u64,
}

impl StagedWriter {
    pub(super) fn create(path: PathBuf, size: u64) -> Result<Self, StoreError> {
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .create_new(true)
            .mode(0o600)
            .open(&path)
            .map_err(StoreError::io("create", &path))?;
        Ok(Self { path, file: Some(file), size, hasher: Hasher::new(), hashed: 0, ahead: BTreeMap::new() })
    }

    /// Writes `bytes` at `offset`. The caller's plan guarantees that no byte is written twice.
    ///
    /// # Errors
    /// [`StoreError::Io`], a full disk among them.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let file = open_file(&mut self.file, &self.path)?;
        file.write_all_at(bytes, offset).map_err(StoreError::io("write", &self.path))?;
        start_writeback(&*file, offset, bytes.len() as u64);
        if offset == self.hashed {
            self.hasher.update(bytes);
            self.hashed += bytes.len() as u64;
            self.catch_up()
        } else {
            self.ahead.insert(offset, bytes.len() as u64);
            Ok(())
        }
    }

    /// Lets go of the descriptor until the next write.
    pub fn suspend(&mut self) {
        self.file = None;
    }

    /// Ends the blob: read-only from now on.
    ///
    /// # Errors
    /// [`StoreError::BlobSize`] when bytes are missing, [`StoreError::Io`].
    pub fn finish(mut self) -> Result<StagedBlob, StoreError> {
        let digest = self.hasher.finish();
        if self.hashed != self.size {
            return Err(StoreError::BlobSize { digest, found: self.hashed, expected: self.size });
        }
        let file = open_file(&mut self.file, &self.path)?;
        // Before the sync and the rename: a crash after those must not leave a writable blob.
        rustix::fs::fchmod(&*file, Mode::from_raw_mode(0o444))
            .map_err(StoreError::errno("make read-only", &self.path))?;
        Ok(StagedBlob { path: self.path, digest, size: self.size })
    }

    /// Hashes what had been written ahead and is now next.
    fn catch_up(&mut self) -> Result<(), StoreError> {
        const READ_BACK_BYTES: usize = 1 << 20;
        let mut buffer = Vec::new();
        while let Some(mut length) = self.ahead.remove(&self.hashed) {
            let file = open_file(&mut self.file, &self.path)?;
            while length > 0 {
                let step = usize::try_from(length).map_or(READ_BACK_BYTES, |length| length.min(READ_BACK_BYTES));
                buffer.resize(step, 0);
                file.read_exact_at(&mut buffer, self.hashed).map_err(StoreError::io("read back", &self.path))?;
                self.hasher.update(&buffer);
                self.hashed += step as u64;
                length -= step as u64;
            }
        }
        Ok(())
    }
}

fn open_file<'f>(file: &'f mut Option<File>, path: &Path) -> Result<&'f mut File, StoreError> {
    if file.is_none() {
        let reopened = OpenOptions::new().read(true).write(true).open(path);
        *file = Some(reopened.map_err(StoreError::io("reopen", path))?);
    }
    file.as_mut().ok_or_else(|| StoreError::io("reopen", path)(std::io::ErrorKind::NotFound.into()))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn stage(order: &[(u64, &[u8])], size: u64) -> Result<StagedBlob, StoreError> {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = StagedWriter::create(dir.path().join("b"), size)?;
        for (offset, bytes) in order {
            writer.write_at(*offset, bytes)?;
            writer.suspend();
        }
        writer.finish()
    }

    #[test]
    fn order_of_arrival_does_not_change_the_digest() {
        let expected = Digest::of(b"aabbccdd");
        let parts: [(u64, &[u8]); 4] = [(0, b"aa"), (2, b"bb"), (4, b"cc"), (6, b"dd")];
        for order in [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1], [1, 3, 0, 2]] {
            let blob = stage(&order.map(|index| parts[index]), 8).unwrap();
            assert_eq!((blob.digest, blob.size), (expected, 8));
        }
    }

    #[test]
    fn missing_bytes_are_noticed() {
        let error = stage(&[(0, b"aa"), (4, b"cc")], 6).unwrap_err();
        assert!(matches!(error, StoreError::BlobSize { found: 2, expected: 6, .. }), "{error}");
    }

    #[test]
    fn finished_blob_is_read_only() {
        let dir = tempfile::tempdir().unwrap();
        let mut writer = StagedWriter::create(dir.path().join("b"), 1).unwrap();
        writer.write_at(0, b"x").unwrap();
        let blob = writer.finish().unwrap();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&blob.path.metadata().unwrap().permissions()) & 0o777, 0o444);
    }
}
