//! A pipeline of two threads: one writes a file's bytes in order or reads them back, the other hashes them, which takes
//! about as long. A fixed number of chunks bounds the memory for a file of any size.

use std::collections::VecDeque;
use std::ops::Range;
use std::sync::mpsc::{Receiver, Sender, SyncSender, channel, sync_channel};
use std::thread::{self, ScopedJoinHandle};

use tracing::Span;

use super::hash::{BlobSink, FileHasher};
use super::{Assembler, HashedFile};
use crate::{CHUNK_BYTES, StoreError};

/// Ranges requested ahead: one being read, and one waiting to be written.
const REQUESTED_AHEAD: usize = 2;

/// Bytes per read when bytes that have arrived are read back.
const READ_BACK_BYTES: usize = 1 << 20;
/// Buffers read back that wait to be hashed.
const READ_BACK_WAITING: usize = 2;

/// Where the bytes of a file come from. Ranges are requested ahead and received in that order. A source bounds the
/// memory: when [`CHUNKS_IN_USE`] chunks exist, `request` waits until one is dropped.
pub trait RangeSource {
    type Chunk: AsRef<[u8]> + Send;
    type Error: From<StoreError>;

    fn request(&mut self, range: Range<u64>) -> Result<(), Self::Error>;

    /// Waits for the range that was requested first. All its bytes are there.
    fn receive(&mut self) -> Result<Self::Chunk, Self::Error>;
}

/// Chunks that a [`RangeSource`] has to provide at once: those requested ahead, one being written and one being hashed.
pub const CHUNKS_IN_USE: usize = REQUESTED_AHEAD + 2;

impl Assembler {
    /// Writes and hashes a whole file, and passes each blob to `sink` when it is complete. A small blob that `sink` has is
    /// not written: a quantised model has tens of thousands of scalars, most of them equal.
    pub fn store_in_order<S: RangeSource>(
        &self,
        source: &mut S,
        sink: &mut dyn BlobSink,
    ) -> Result<HashedFile, S::Error> {
        thread::scope(|scope| {
            let (to_hasher, written) = channel();
            let span = Span::current();
            let hasher = scope.spawn(move || span.in_scope(|| self.hash_chunks(&written, true, sink)));
            let wrote = self.write_in_order(source, &to_hasher);
            // So that the hasher ends.
            drop(to_hasher);
            let hashed = join(hasher);
            // When this has failed, the hasher fails too, because bytes are missing.
            wrote?;
            Ok(hashed?)
        })
    }

    /// Hashes a file while other threads write it, and passes each complete blob to `sink`. `wait` waits for the byte
    /// at an offset and returns the end of the run of bytes there, or `None` to stop; the result is `None` then.
    pub fn hash_as_it_arrives(
        &self,
        wait: &mut dyn FnMut(u64) -> Option<u64>,
        sink: &mut dyn BlobSink,
    ) -> Result<Option<HashedFile>, StoreError> {
        thread::scope(|scope| {
            let (to_hasher, arrived) = sync_channel(READ_BACK_WAITING);
            let span = Span::current();
            let hasher = scope.spawn(move || span.in_scope(|| self.hash_chunks(&arrived, false, sink)));
            let read = self.read_arrived(&to_hasher, wait);
            drop(to_hasher);
            let hashed = join(hasher);
            // When the reader has stopped early, the hasher fails, because bytes are missing.
            if read? { hashed.map(Some) } else { Ok(None) }
        })
    }

    /// Writes the whole file, or stops when the hasher has failed.
    fn write_in_order<S: RangeSource>(
        &self,
        source: &mut S,
        to_hasher: &Sender<S::Chunk>,
    ) -> Result<(), S::Error> {
        let (mut next, mut requested) = (0, VecDeque::with_capacity(REQUESTED_AHEAD));
        loop {
            while requested.len() < REQUESTED_AHEAD && next < self.plan.file_size() {
                let end = self.plan.chunk_end(next, CHUNK_BYTES as u64);
                source.request(next..end)?;
                requested.push_back(next);
                next = end;
            }
            let Some(offset) = requested.pop_front() else { return Ok(()) };
            let chunk = source.receive()?;
            self.write_all_but_small(offset, chunk.as_ref())?;
            if to_hasher.send(chunk).is_err() {
                return Ok(());
            }
        }
    }

    /// Returns false if `wait` stopped it.
    fn read_arrived(
        &self,
        to_hasher: &SyncSender<Vec<u8>>,
        wait: &mut dyn FnMut(u64) -> Option<u64>,
    ) -> Result<bool, StoreError> {
        let mut offset = 0;
        while offset < self.plan.file_size() {
            let Some(arrived) = wait(offset) else { return Ok(false) };
            let arrived = usize::try_from(arrived.saturating_sub(offset)).unwrap_or(READ_BACK_BYTES);
            let mut buffer = vec![0; arrived.min(READ_BACK_BYTES)];
            self.read(offset, &mut buffer)?;
            offset = offset.saturating_add(buffer.len() as u64);
            if to_hasher.send(buffer).is_err() {
                // The hasher has failed; its error is returned.
                break;
            }
        }
        Ok(true)
    }

    fn hash_chunks<C: AsRef<[u8]>>(
        &self,
        written: &Receiver<C>,
        stores_small: bool,
        sink: &mut dyn BlobSink,
    ) -> Result<HashedFile, StoreError> {
        let mut hasher = FileHasher::new(self, stores_small);
        for chunk in written {
            hasher.push(chunk.as_ref(), sink)?;
        }
        hasher.finish(sink)
    }
}

fn join<T>(thread: ScopedJoinHandle<'_, T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}
