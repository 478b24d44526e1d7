//! A pipeline of two threads: one brings a file's bytes in order and writes them if needed, the other hashes
//! them, which takes about as long. A fixed number of buffers bounds the memory for a file of any size.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ScopedJoinHandle};

use super::hash::{BlobSink, FileHasher};
use super::{Assembler, HashedFile};
use crate::StoreError;

/// Bytes per read and write. Writes of this size and alignment let the page cache build 2 MiB folios, which
/// makes the first access to a mapped blob ten times cheaper.
pub const CHUNK_BYTES: usize = 4 << 20;
/// One buffer in use by each thread, and two waiting.
const CHUNK_COUNT: usize = 4;

/// Bytes per read when bytes that have arrived are read back.
const READ_BACK_BYTES: usize = 1 << 20;
/// One buffer in use by each thread, and two waiting.
const READ_BACK_COUNT: usize = 4;

/// Fills a buffer with the bytes of a file from an offset on.
pub type ReadAt<'r, E> = dyn FnMut(u64, &mut [u8]) -> Result<(), E> + 'r;

struct Chunk {
    buffer: Vec<u8>,
    length: usize,
}

impl Chunk {
    fn bytes(&self) -> &[u8] {
        self.buffer.get(..self.length).unwrap_or_default()
    }
}

/// The channels of the thread that brings the bytes. The hasher ends when this is dropped.
struct Feed {
    to_hasher: Sender<Chunk>,
    empty: Receiver<Vec<u8>>,
}

impl Feed {
    /// Passes a chunk on; returns false when the hasher has failed.
    fn send(&self, buffer: Vec<u8>, length: usize) -> bool {
        self.to_hasher.send(Chunk { buffer, length }).is_ok()
    }
}

impl Assembler {
    /// Writes and hashes a file that is read in order, and passes each blob to `sink` when it is complete.
    /// Fails as `read`, [`Self::write`] and `sink` do.
    pub fn store_in_order<E: From<StoreError>>(
        &self,
        read: &mut ReadAt<'_, E>,
        sink: &mut BlobSink<'_>,
    ) -> Result<HashedFile, E> {
        thread::scope(|scope| {
            let (to_hasher, written) = channel();
            // A small file is one chunk: filling four buffers of 4 MiB with zeros would take most of the
            // time.
            let size = usize::try_from(self.plan.file_size()).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let (to_reader, empty) = buffers(CHUNK_COUNT, || vec![0; size]);
            let hasher = scope.spawn(move || self.hash_chunks(&written, &to_reader, sink));
            let read = self.write_in_order(&Feed { to_hasher, empty }, read);
            let hashed = join(hasher);
            // When this has failed, the hasher fails too, because bytes are missing.
            read?;
            hashed.map_err(E::from)
        })
    }

    /// Hashes a file while other threads write it, and passes each blob to `sink` when it is complete.
    /// `wait` waits until the byte at an offset has arrived and returns the end of the run of bytes there.
    /// If it returns `None`, hashing stops and the result is `None`. Fails as reading and `sink` do.
    pub fn hash_as_it_arrives(
        &self,
        wait: &mut dyn FnMut(u64) -> Option<u64>,
        sink: &mut BlobSink<'_>,
    ) -> Result<Option<HashedFile>, StoreError> {
        thread::scope(|scope| {
            let (to_hasher, full) = channel();
            let (to_reader, empty) = buffers(READ_BACK_COUNT, Vec::new);
            let hasher = scope.spawn(move || self.hash_chunks(&full, &to_reader, sink));
            let read = self.read_arrived(&Feed { to_hasher, empty }, wait);
            let hashed = join(hasher);
            // When the reader has stopped early, the hasher fails, because bytes are missing.
            if read? { hashed.map(Some) } else { Ok(None) }
        })
    }

    /// Reads and writes the whole file, or stops when the hasher has failed.
    fn write_in_order<E: From<StoreError>>(&self, feed: &Feed, read: &mut ReadAt<'_, E>) -> Result<(), E> {
        let mut offset = 0;
        while offset < self.plan.file_size() {
            let Ok(mut buffer) = feed.empty.recv() else { break };
            let end = self.plan.chunk_end(offset, CHUNK_BYTES as u64);
            let length = usize::try_from(end - offset).unwrap_or(CHUNK_BYTES);
            let bytes = buffer.get_mut(..length).unwrap_or_default();
            read(offset, bytes)?;
            // While they are in the processor's cache.
            self.write(offset, bytes)?;
            if !feed.send(buffer, length) {
                break;
            }
            offset = end;
        }
        Ok(())
    }

    /// Returns false if `wait` stopped it.
    fn read_arrived(
        &self,
        feed: &Feed,
        wait: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Result<bool, StoreError> {
        let mut offset = 0;
        while offset < self.plan.file_size() {
            let Some(arrived) = wait(offset) else { return Ok(false) };
            // The hasher has failed; its error is returned.
            let Ok(mut buffer) = feed.empty.recv() else { return Ok(true) };
            let arrived = usize::try_from(arrived.saturating_sub(offset)).unwrap_or(READ_BACK_BYTES);
            let length = arrived.min(READ_BACK_BYTES);
            buffer.resize(length, 0);
            self.read(offset, &mut buffer)?;
            if !feed.send(buffer, length) {
                return Ok(true);
            }
            offset = offset.saturating_add(length as u64);
        }
        Ok(true)
    }

    fn hash_chunks(
        &self,
        written: &Receiver<Chunk>,
        to_reader: &Sender<Vec<u8>>,
        sink: &mut BlobSink<'_>,
    ) -> Result<HashedFile, StoreError> {
        let mut hasher = FileHasher::new(self);
        for chunk in written {
            hasher.push(chunk.bytes(), sink)?;
            // The reader has ended when it needs no more buffers.
            let _ = to_reader.send(chunk.buffer);
        }
        hasher.finish(sink)
    }
}

/// A channel with `count` buffers in it.
fn buffers(count: usize, new: impl Fn() -> Vec<u8>) -> (Sender<Vec<u8>>, Receiver<Vec<u8>>) {
    let (sender, receiver) = channel();
    for _ in 0..count {
        // The receiver is in scope, so this cannot fail.
        let _ = sender.send(new());
    }
    (sender, receiver)
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
