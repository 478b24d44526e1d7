//! The proof: a file is read from the front while it arrives, and hashed with its parts.

use std::collections::BTreeMap;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use blobd_store::{Partial, StagedBlob, StagedHash, StoreError};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::split::{Splitter, Target};

use super::arrival::Arrival;

/// What a file turned out to be.
#[derive(Debug)]
pub(super) struct Hashed {
    pub(super) file: Digest,
    /// The planned blobs' digests, in order.
    pub(super) blobs: Vec<Digest>,
    /// Those of them that have arrived; the others are in the store.
    pub(super) staged: Vec<StagedBlob>,
    pub(super) literals: Vec<Vec<u8>>,
}

/// How much is read at once.
const CHUNK_BYTES: usize = 1 << 20;
/// One in each thread's hands, and two on the way.
const CHUNK_COUNT: usize = 4;

/// Reads and hashes all of it as it arrives; `None` when it does not, or `look`, which is told now and
/// then how far that is, says that it is to end.
///
/// # Errors
/// [`StoreError::Io`].
pub(super) fn hash(
    arrival: &Arrival,
    look: &mut dyn FnMut(u64) -> bool,
) -> Result<Option<Hashed>, StoreError> {
    let partial = arrival.partial();
    thread::scope(|scope| {
        let (to_parts, read) = channel();
        let (to_reader, empty) = channel();
        for _ in 0..CHUNK_COUNT {
            // The receiver lives in this very function.
            let _ = to_reader.send(Vec::new());
        }
        let parts = scope.spawn(move || PartHasher::new(partial).run(&read, &to_reader));
        let file = read_file(arrival, look, &to_parts, &empty);
        drop(to_parts);
        let parts = parts.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let Some(file) = file? else { return Ok(None) };
        let PartHasher { digests, literals, staged, .. } = parts;
        Ok(Some(Hashed { file, blobs: digests.into_iter().flatten().collect(), staged, literals }))
    })
}

fn read_file(
    arrival: &Arrival,
    look: &mut dyn FnMut(u64) -> bool,
    to_parts: &Sender<Vec<u8>>,
    empty: &Receiver<Vec<u8>>,
) -> Result<Option<Digest>, StoreError> {
    let (partial, mut hasher, mut offset) = (arrival.partial(), Hasher::new(), 0);
    while offset < partial.plan().file_size() {
        let Some(arrived) = arrival.wait_for(offset, || look(offset)) else { return Ok(None) };
        let Ok(mut buffer) = empty.recv() else { return Ok(None) };
        let length = usize::try_from(arrived - offset).unwrap_or(CHUNK_BYTES).min(CHUNK_BYTES);
        buffer.resize(length, 0);
        partial.read(offset, &mut buffer)?;
        hasher.update(&buffer);
        offset += length as u64;
        if to_parts.send(buffer).is_err() || !look(offset) {
            return Ok(None);
        }
    }
    Ok(Some(hasher.finish()))
}

/// Hashes the parts that have arrived. What is read from the store has its digest already: if it
/// is not what the file needs, the whole file's digest shows it.
struct PartHasher<'p> {
    partial: &'p Partial,
    splitter: Splitter<'p>,
    stored: BTreeMap<usize, Digest>,
    open: BTreeMap<usize, StagedHash>,
    digests: Vec<Option<Digest>>,
    literals: Vec<Vec<u8>>,
    staged: Vec<StagedBlob>,
}

impl<'p> PartHasher<'p> {
    fn new(partial: &'p Partial) -> Self {
        let (plan, stored) = (partial.plan(), partial.stored());
        let digests = (0..plan.blobs().len()).map(|blob| stored.get(&blob).copied()).collect();
        Self {
            partial,
            splitter: Splitter::new(plan),
            stored,
            open: BTreeMap::new(),
            digests,
            literals: vec![Vec::new(); plan.literal_count()],
            staged: Vec::new(),
        }
    }

    fn run(mut self, read: &Receiver<Vec<u8>>, to_reader: &Sender<Vec<u8>>) -> Result<Self, StoreError> {
        for chunk in read {
            // The reader reads no more than the plan has.
            for part in self.splitter.push(&chunk).unwrap_or_default() {
                match part.target {
                    Target::Literal { literal } => {
                        if let Some(literal) = self.literals.get_mut(literal) {
                            literal.extend_from_slice(part.bytes);
                        }
                    }
                    Target::Blob { blob, offset_in_blob } => {
                        self.hash_part(blob, offset_in_blob, part.bytes)?;
                    }
                }
            }
            // Fails at the end, when the reader has all it needs.
            let _ = to_reader.send(chunk);
        }
        Ok(self)
    }

    fn hash_part(&mut self, blob: usize, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        if self.stored.contains_key(&blob) {
            return Ok(());
        }
        let Some(mut hash) = self.open.remove(&blob).or_else(|| self.partial.hash(blob)) else {
            return Ok(());
        };
        hash.update(offset, bytes)?;
        if !hash.is_complete() {
            self.open.insert(blob, hash);
            return Ok(());
        }
        let staged = hash.finish()?;
        if let Some(place) = self.digests.get_mut(blob) {
            *place = Some(staged.digest);
        }
        self.staged.push(staged);
        Ok(())
    }
}
