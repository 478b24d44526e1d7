//! One blob while it is being written.
//!
//! It has two halves, so that one thread can write while another hashes: [`StagedFile`] puts
//! bytes on disk, [`StagedHash`] computes the digest. [`StagedWriter`] is both at once.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt as _;
use std::path::PathBuf;

use blobd_store_format::digest::{Digest, Hasher};

use super::error::StoreError;
use super::staging::{Room, Staging};

/// A blob that is being staged. It has no name yet; its digest comes out at the end.
#[derive(Debug)]
pub struct StagedWriter {
    file: StagedFile,
    hash: StagedHash,
}

/// The bytes of a blob on their way to the disk.
#[derive(Debug)]
pub struct StagedFile {
    staging: Staging,
    path: PathBuf,
}

/// The digest of a blob in the making.
///
/// Bytes may come in any order, as the members of an expert group do: what arrives at the front
/// of the hash is hashed at once, what arrives ahead of it is read back from the staged file when
/// the front gets there. So a byte must be on disk before it is hashed.
#[derive(Debug)]
pub struct StagedHash {
    path: PathBuf,
    room: Room,
    size: u64,
    hasher: Hasher,
    hashed: u64,
    ahead: BTreeMap<u64, u64>,
}

/// A blob that is completely written: content hashed, not yet durable.
#[derive(Debug)]
pub struct StagedBlob {
    /// Where it lies in the store.
    pub(super) path: PathBuf,
    /// The SHA-256 of its bytes.
    pub digest: Digest,
    /// How many they are.
    pub size: u64,
    /// What it takes of the disk, until it is gone or published.
    pub(super) room: Room,
}

impl StagedWriter {
    pub(super) fn new(staging: Staging, path: PathBuf, room: Room, size: u64) -> Self {
        let hash = StagedHash::of(path.clone(), room, size);
        Self { file: StagedFile { staging, path }, hash }
    }

    /// Writes and hashes `bytes` at `offset`. The caller's plan guarantees that no byte is
    /// written twice.
    ///
    /// # Errors
    /// [`StoreError::Io`], a full disk among them.
    pub fn write_at(&mut self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        self.file.write_at(offset, bytes)?;
        self.hash.update(offset, bytes)
    }

    /// Ends the blob.
    ///
    /// # Errors
    /// [`StoreError::BlobSize`] when bytes are missing.
    pub fn finish(self) -> Result<StagedBlob, StoreError> {
        self.file.finish();
        self.hash.finish()
    }

    /// For one thread that writes and another that hashes what has been written.
    #[must_use]
    pub fn into_halves(self) -> (StagedFile, StagedHash) {
        (self.file, self.hash)
    }
}

impl StagedFile {
    /// Writes `bytes` at `offset` and has the kernel start to put them on disk.
    ///
    /// # Errors
    /// [`StoreError::Io`], a full disk among them.
    pub fn write_at(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let file = self.staging.written().writer(&self.path)?;
        self.staging.disk().write_at(&self.path, &file, bytes, offset)
    }

    /// All of it is written.
    pub fn finish(self) {
        self.staging.written().complete(&self.path);
    }
}

impl StagedHash {
    /// The digest of the `size` bytes that are being written to `path`.
    pub(super) fn of(path: PathBuf, room: Room, size: u64) -> Self {
        Self { path, room, size, hasher: Hasher::new(), hashed: 0, ahead: BTreeMap::new() }
    }

    /// Takes `bytes`, which have been written at `offset`.
    ///
    /// # Errors
    /// [`StoreError::Io`] when what came ahead cannot be read back.
    pub fn update(&mut self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        if offset != self.hashed {
            self.ahead.insert(offset, bytes.len() as u64);
            return Ok(());
        }
        self.hasher.update(bytes);
        self.hashed += bytes.len() as u64;
        self.catch_up()
    }

    /// Whether all bytes have come.
    #[must_use]
    pub const fn is_complete(&self) -> bool {
        self.hashed == self.size
    }

    /// Ends the blob.
    ///
    /// # Errors
    /// [`StoreError::BlobSize`] when bytes are missing.
    pub fn finish(self) -> Result<StagedBlob, StoreError> {
        let digest = self.hasher.finish();
        if self.hashed != self.size {
            return Err(StoreError::BlobSize { digest, found: self.hashed, expected: self.size });
        }
        Ok(StagedBlob { path: self.path, digest, size: self.size, room: self.room })
    }

    /// Hashes what had come ahead and is now next.
    fn catch_up(&mut self) -> Result<(), StoreError> {
        const READ_BACK_BYTES: u64 = 1 << 20;
        let Some(mut length) = self.ahead.remove(&self.hashed) else { return Ok(()) };
        let file = self.room.open_file(&self.path)?;
        let mut buffer = Vec::new();
        loop {
            while length > 0 {
                let step = length.min(READ_BACK_BYTES);
                buffer.resize(usize::try_from(step).unwrap_or_default(), 0);
                file.read_exact_at(&mut buffer, self.hashed)
                    .map_err(StoreError::io("read back", &self.path))?;
                self.hasher.update(&buffer);
                self.hashed += step;
                length -= step;
            }
            match self.ahead.remove(&self.hashed) {
                Some(next) => length = next,
                None => return Ok(()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;

    fn staging() -> (tempfile::TempDir, Staging) {
        let folder = tempfile::tempdir().unwrap();
        let store = Arc::new(super::super::Store::open(folder.path().join("store")).unwrap());
        let staging = Staging::begin(&store).unwrap();
        (folder, staging)
    }

    fn stage(order: &[(u64, &[u8])], size: u64) -> Result<StagedBlob, StoreError> {
        let (_folder, staging) = staging();
        let mut writer = staging.stage(size)?;
        for (offset, bytes) in order {
            writer.write_at(*offset, bytes)?;
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
}
