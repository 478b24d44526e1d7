//! Writes one blob from its start to its end, on one thread.

use blobd_sha256::Sha256;
use blobd_store_format::digest::Digest;
use blobd_store_format::split::SplitPlan;

use super::Assembler;
use crate::seal::StagedBlob;
use crate::{Staging, StoreError};

/// A blob that is being written in order. Its digest is known at the end.
#[derive(Debug)]
pub struct BlobWriter {
    assembler: Assembler,
    hash: Sha256,
    written: u64,
}

impl Staging {
    /// Starts a blob of `size` bytes that is written in order.
    #[must_use]
    pub fn stage(&self, size: u64) -> BlobWriter {
        let assembler = Assembler::new(self.clone(), SplitPlan::whole(size));
        BlobWriter { assembler, hash: Sha256::new(), written: 0 }
    }
}

impl BlobWriter {
    /// Writes and hashes the next bytes. Fails as [`Assembler::write`] does.
    pub fn append(&mut self, bytes: &[u8]) -> Result<(), StoreError> {
        self.assembler.write(self.written, bytes)?;
        self.hash.update(bytes);
        self.written = self.written.saturating_add(bytes.len() as u64);
        Ok(())
    }

    /// Ends the blob; [`StoreError::FileSize`] if bytes are missing.
    pub fn finish(self) -> Result<StagedBlob, StoreError> {
        let expected = self.assembler.plan().file_size();
        if self.written != expected {
            return Err(StoreError::FileSize { found: self.written, expected });
        }
        self.assembler.staged_blob(0, Digest::from_bytes(self.hash.finish()))
    }
}
