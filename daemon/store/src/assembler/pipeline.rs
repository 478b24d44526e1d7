//! The threads between which a file's bytes travel: one brings them in order, one writes them if that is
//! not done, one hashes them. The slowest sets the pace, not the sum; a fixed number of buffers bounds the
//! memory whatever the file's size.

use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread::{self, ScopedJoinHandle};

use super::hash::{BlobSink, FileHasher};
use super::{Assembler, HashedFile};
use crate::StoreError;

/// How much is read and written at once. Writes of this size and alignment let the page cache build 2 MiB
/// folios, which makes the first touch of a mapped blob ten times cheaper.
pub const CHUNK_BYTES: usize = 4 << 20;
/// One buffer in each thread's hands and one waiting for each.
const CHUNK_COUNT: usize = 6;

/// How much is read back at once of what has arrived.
const READ_BACK_BYTES: usize = 1 << 20;
/// One in each thread's hands, and two on the way.
const READ_BACK_COUNT: usize = 4;

/// Fills a buffer with a file's bytes from an offset on.
pub type ReadAt<'r, E> = dyn FnMut(u64, &mut [u8]) -> Result<(), E> + 'r;

/// The next bytes of a file.
struct Chunk {
    offset: u64,
    buffer: Vec<u8>,
    length: usize,
}

impl Chunk {
    fn bytes(&self) -> &[u8] {
        self.buffer.get(..self.length).unwrap_or_default()
    }
}

/// The two ends that the thread has which brings the bytes. The others end when this is dropped.
struct Feed {
    to_next: Sender<Chunk>,
    empty: Receiver<Vec<u8>>,
}

impl Feed {
    /// Passes a chunk on; false when a later thread has failed.
    fn send(&self, offset: u64, buffer: Vec<u8>, length: usize) -> bool {
        self.to_next.send(Chunk { offset, buffer, length }).is_ok()
    }
}

impl Assembler {
    /// Writes and hashes a file that is read in order. `sink` takes each blob as soon as it is complete.
    ///
    /// # Errors
    /// Those of `read`, of [`Self::write`] and of `sink`.
    pub fn store_in_order<E: From<StoreError>>(
        &self,
        read: &mut ReadAt<'_, E>,
        sink: &mut BlobSink<'_>,
    ) -> Result<HashedFile, E> {
        thread::scope(|scope| {
            let (to_hasher, written) = channel();
            let (to_writer, full) = channel();
            // A small file is one chunk: six times 4 MiB of zeros would take longer than all the rest.
            let size = usize::try_from(self.plan.file_size()).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
            let (to_reader, empty) = buffers(CHUNK_COUNT, || vec![0; size]);
            let writer = scope.spawn(move || self.write_chunks(&full, &to_hasher));
            let hasher = scope.spawn(move || self.hash_chunks(&written, &to_reader, sink));
            let read = self.read_in_order(&Feed { to_next: to_writer, empty }, read);
            join(writer)?;
            let hashed = join(hasher);
            // The hasher misses bytes when the reader has failed.
            read?;
            hashed.map_err(E::from)
        })
    }

    /// Hashes a file while it is written by others. `wait` waits for a byte at an offset and returns where
    /// the run of bytes ends that have arrived there; with `None`, hashing ends and so does this function.
    /// `sink` takes each blob as soon as it is complete.
    ///
    /// # Errors
    /// [`StoreError::Io`], those of `sink`.
    pub fn hash_as_it_arrives(
        &self,
        wait: &mut dyn FnMut(u64) -> Option<u64>,
        sink: &mut BlobSink<'_>,
    ) -> Result<Option<HashedFile>, StoreError> {
        thread::scope(|scope| {
            let (to_hasher, full) = channel();
            let (to_reader, empty) = buffers(READ_BACK_COUNT, Vec::new);
            let hasher = scope.spawn(move || self.hash_chunks(&full, &to_reader, sink));
            let read = self.read_arrived(&Feed { to_next: to_hasher, empty }, wait);
            let hashed = join(hasher);
            // The hasher misses bytes when the reader has ended early.
            if read? { hashed.map(Some) } else { Ok(None) }
        })
    }

    /// Reads all of it, or as much as the later threads take before they fail.
    fn read_in_order<E>(&self, feed: &Feed, read: &mut ReadAt<'_, E>) -> Result<(), E> {
        let mut offset = 0;
        while offset < self.plan.file_size() {
            let Ok(mut buffer) = feed.empty.recv() else { break };
            let end = self.plan.chunk_end(offset, CHUNK_BYTES as u64);
            let length = usize::try_from(end - offset).unwrap_or(CHUNK_BYTES);
            read(offset, buffer.get_mut(..length).unwrap_or_default())?;
            if !feed.send(offset, buffer, length) {
                break;
            }
            offset = end;
        }
        Ok(())
    }

    /// Whether all of it was read.
    fn read_arrived(
        &self,
        feed: &Feed,
        wait: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Result<bool, StoreError> {
        let mut offset = 0;
        while offset < self.plan.file_size() {
            let Some(arrived) = wait(offset) else { return Ok(false) };
            // Without a hasher that takes it, its error is what is returned.
            let Ok(mut buffer) = feed.empty.recv() else { return Ok(true) };
            let arrived = usize::try_from(arrived.saturating_sub(offset)).unwrap_or(READ_BACK_BYTES);
            let length = arrived.min(READ_BACK_BYTES);
            buffer.resize(length, 0);
            self.read(offset, &mut buffer)?;
            if !feed.send(offset, buffer, length) {
                return Ok(true);
            }
            offset = offset.saturating_add(length as u64);
        }
        Ok(true)
    }

    fn write_chunks(&self, full: &Receiver<Chunk>, to_hasher: &Sender<Chunk>) -> Result<(), StoreError> {
        for chunk in full {
            self.write(chunk.offset, chunk.bytes())?;
            if to_hasher.send(chunk).is_err() {
                break;
            }
        }
        Ok(())
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
            // Fails at the end, when the reader has all it needs.
            let _ = to_reader.send(chunk.buffer);
        }
        hasher.finish(sink)
    }
}

/// A channel that has `count` buffers in it.
fn buffers(count: usize, new: impl Fn() -> Vec<u8>) -> (Sender<Vec<u8>>, Receiver<Vec<u8>>) {
    let (sender, receiver) = channel();
    for _ in 0..count {
        // The receiver is here.
        let _ = sender.send(new());
    }
    (sender, receiver)
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
