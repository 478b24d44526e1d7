//! Computes the digests of a file and of its blobs in one pass from its first byte to its last.

use std::collections::BTreeMap;

use blobd_sha256::{Sha256, update_both};
use blobd_store_format::digest::Digest;
use blobd_store_format::split::{BlobContent, Part, Target};

use super::{Assembler, HashedFile};
use crate::bounded_read::read_exact;
use crate::seal::StagedBlob;
use crate::{StoreError, lock};

/// Receives the blobs of a file when they are completely hashed.
pub trait BlobSink: Send {
    /// Whether a blob is there already, so that no file is needed for it. Only asked for small blobs, of files that are
    /// stored in order.
    fn has(&mut self, digest: Digest, size: u64) -> Result<bool, StoreError>;

    fn add(&mut self, blob: StagedBlob) -> Result<(), StoreError>;
}

impl<F: FnMut(StagedBlob) -> Result<(), StoreError> + Send> BlobSink for F {
    fn has(&mut self, _digest: Digest, _size: u64) -> Result<bool, StoreError> {
        Ok(false)
    }

    fn add(&mut self, blob: StagedBlob) -> Result<(), StoreError> {
        self(blob)
    }
}

/// Hashes a file that an assembler has written, or that is read from the store.
pub(super) struct FileHasher<'a> {
    assembler: &'a Assembler,
    file: Sha256,
    position: u64,
    /// Blobs that are partly hashed: one, or as many as there are expert groups with interleaved members, here or in the
    /// files before.
    open: BTreeMap<usize, BlobHash>,
    digests: Vec<Option<Digest>>,
    literals: Vec<Vec<u8>>,
    /// Whether small blobs have no file yet.
    stores_small: bool,
}

/// The digest of a blob in progress. The members of an expert group may be in the file in any order, so bytes that come
/// too early are read back later from the blob's file.
#[derive(Debug, Default)]
pub(super) struct BlobHash {
    hash: Sha256,
    hashed: u64,
    /// Offsets and lengths of bytes that came too early.
    ahead: BTreeMap<u64, u64>,
}

impl<'a> FileHasher<'a> {
    /// Blobs that are read from the store have their digest already. If one is not what the file needs, the digest of
    /// the whole file will be wrong.
    pub(super) fn new(assembler: &'a Assembler, stores_small: bool) -> Self {
        let (plan, stored) = (assembler.plan(), assembler.stored());
        Self {
            assembler,
            file: Sha256::new(),
            position: 0,
            open: std::mem::take(&mut lock(&assembler.state).hashes),
            digests: (0..plan.blobs().len()).map(|blob| stored.get(&blob).copied()).collect(),
            literals: vec![Vec::new(); plan.literal_count()],
            stores_small,
        }
    }

    /// Hashes the next bytes, which must be in their blobs' files already, except those of small blobs.
    pub(super) fn push(&mut self, bytes: &[u8], sink: &mut dyn BlobSink) -> Result<(), StoreError> {
        let parts = self.assembler.parts(self.position, bytes)?;
        self.position = self.position.saturating_add(bytes.len() as u64);
        parts.iter().try_for_each(|part| self.push_part(part, sink))
    }

    fn push_part(&mut self, part: &Part<'_>, sink: &mut dyn BlobSink) -> Result<(), StoreError> {
        match part.target {
            Target::Blob { blob, .. } if self.stores_small && self.assembler.is_small(part) => {
                self.push_small(blob, part, sink)
            }
            Target::Blob { blob, offset_in_blob } if self.needs_own_hash(blob) => {
                self.push_to_blob(blob, offset_in_blob, part.bytes, sink)
            }
            Target::Blob { .. } => {
                self.file.update(part.bytes);
                Ok(())
            }
            Target::Literal { literal } => {
                self.file.update(part.bytes);
                if let Some(literal) = self.literals.get_mut(literal) {
                    literal.extend_from_slice(part.bytes);
                }
                Ok(())
            }
        }
    }

    /// Hashes a whole small blob, and writes its file only if the blob is new.
    fn push_small(
        &mut self,
        blob: usize,
        part: &Part<'_>,
        sink: &mut dyn BlobSink,
    ) -> Result<(), StoreError> {
        let mut hash = Sha256::new();
        update_both(&mut self.file, part.bytes, &mut hash, part.bytes);
        let digest = Digest::from_bytes(hash.finish());
        if sink.has(digest, part.bytes.len() as u64)? {
            if let Some(entry) = self.digests.get_mut(blob) {
                *entry = Some(digest);
            }
            return Ok(());
        }
        // Its only part, so its place in the file does not matter.
        self.assembler.write_part(0, part)?;
        self.complete(blob, digest, sink)
    }

    /// False if the digest is known, or if the blob is the whole file.
    fn needs_own_hash(&self, blob: usize) -> bool {
        let content = self.assembler.plan().blobs().get(blob).map(|planned| planned.content);
        content != Some(BlobContent::File) && self.digests.get(blob) == Some(&None)
    }

    fn push_to_blob(
        &mut self,
        blob: usize,
        offset: u64,
        bytes: &[u8],
        sink: &mut dyn BlobSink,
    ) -> Result<(), StoreError> {
        let open = self.open.entry(blob).or_default();
        if offset == open.hashed {
            update_both(&mut self.file, bytes, &mut open.hash, bytes);
            open.hashed = open.hashed.saturating_add(bytes.len() as u64);
            open.catch_up(self.assembler, blob)?;
        } else {
            self.file.update(bytes);
            open.ahead.insert(offset, bytes.len() as u64);
        }
        let size = self.assembler.plan().blobs().get(blob).map(|planned| planned.size);
        if Some(open.hashed) == size
            && let Some(complete) = self.open.remove(&blob)
        {
            self.complete(blob, Digest::from_bytes(complete.hash.finish()), sink)?;
        }
        Ok(())
    }

    fn complete(&mut self, blob: usize, digest: Digest, sink: &mut dyn BlobSink) -> Result<(), StoreError> {
        if let Some(entry) = self.digests.get_mut(blob) {
            *entry = Some(digest);
        }
        sink.add(self.assembler.staged_blob(blob, digest)?)
    }

    pub(super) fn finish(mut self, sink: &mut dyn BlobSink) -> Result<HashedFile, StoreError> {
        let expected = self.assembler.plan().file_size();
        if self.position != expected {
            return Err(StoreError::FileSize { found: self.position, expected });
        }
        let digest = Digest::from_bytes(std::mem::take(&mut self.file).finish());
        let is_whole =
            self.assembler.plan().blobs().first().is_some_and(|blob| blob.content == BlobContent::File);
        if is_whole && self.digests.first() == Some(&None) {
            self.complete(0, digest, sink)?;
        }
        // The plan's segments fill every blob, so each has a digest now, except those that other files have parts of.
        lock(&self.assembler.state).hashes = self.open;
        Ok(HashedFile { digest, blobs: self.digests, literals: self.literals })
    }
}

impl BlobHash {
    /// Hashes bytes that came too early and are next now.
    fn catch_up(&mut self, assembler: &Assembler, blob: usize) -> Result<(), StoreError> {
        const READ_BACK_BYTES: u64 = 1 << 20;
        let Some(mut length) = self.ahead.remove(&self.hashed) else { return Ok(()) };
        let path = assembler.path_of(blob)?;
        let file = assembler.store().content.root.open_file(&path)?;
        let mut buffer = Vec::new();
        loop {
            while length > 0 {
                let step = length.min(READ_BACK_BYTES);
                buffer.resize(usize::try_from(step).unwrap_or_default(), 0);
                read_exact(&file, &mut buffer, self.hashed).map_err(StoreError::io("read back", &path))?;
                self.hash.update(&buffer);
                self.hashed = self.hashed.saturating_add(step);
                length -= step;
            }
            match self.ahead.remove(&self.hashed) {
                Some(next) => length = next,
                None => return Ok(()),
            }
        }
    }
}
