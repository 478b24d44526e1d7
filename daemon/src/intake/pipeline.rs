//! Three threads and the buffers that travel between them: one reads and hashes the whole file,
//! one writes its parts, one hashes them. With two cores or more, the slowest of the three sets
//! the pace, not their sum.

use std::collections::BTreeMap;
use std::io::Read;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::thread;

use blobd_store::{Ingest, StagedFile, StagedHash, Staging};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::split::{Part, SplitPlan, Splitter, Target};

use super::{CHUNK_BYTES, IntakeError, fill};

/// One buffer in each thread's hands and one waiting for each.
const CHUNK_COUNT: usize = 6;

/// What a file has become.
pub(super) struct Parts {
    pub(super) file: Digest,
    pub(super) blobs: Vec<Digest>,
    pub(super) literals: Vec<Vec<u8>>,
}

/// The next bytes of the file, and what has been begun with them.
struct Chunk {
    buffer: Vec<u8>,
    length: usize,
    begun: Vec<(usize, StagedHash)>,
}

impl Chunk {
    fn bytes(&self) -> &[u8] {
        self.buffer.get(..self.length).unwrap_or_default()
    }
}

/// Reads, hashes and stages a whole file by its plan.
pub(super) fn split(
    ingest: &mut Ingest,
    source: &mut dyn Read,
    plan: &SplitPlan,
    progress: &mut dyn FnMut(u64),
) -> Result<Parts, IntakeError> {
    thread::scope(|scope| {
        let (to_writer, full) = channel();
        let (to_hasher, written) = channel();
        let (to_reader, empty) = channel();
        // A small file is one chunk: six times 4 MiB of zeros would take longer than all the rest.
        let length = usize::try_from(plan.file_size()).map_or(CHUNK_BYTES, |size| size.min(CHUNK_BYTES));
        for _ in 0..CHUNK_COUNT {
            // The receiver lives in this very function.
            let _ = to_reader.send(vec![0; length]);
        }
        let staging = ingest.staging();
        let writer = scope.spawn(move || Writer::new(staging, plan).run(&full, &to_hasher));
        let hasher = scope.spawn(move || PartHasher::new(ingest, plan).run(&written, &to_reader));
        let read = read_chunks(source, plan, &to_writer, &empty, progress);
        drop(to_writer);
        let joined = |result: thread::Result<Result<_, _>>| {
            result.unwrap_or_else(|panic| std::panic::resume_unwind(panic))
        };
        writer.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
        let (blobs, literals) = joined(hasher.join())?;
        match read? {
            Some(file) => Ok(Parts { file, blobs, literals }),
            // Only a thread that has failed stops taking chunks, and that was returned above.
            None => Err(IntakeError::Truncated { found: 0, expected: plan.file_size() }),
        }
    })
}

/// Reads and hashes everything; `None` when a later thread has given up.
fn read_chunks(
    source: &mut dyn Read,
    plan: &SplitPlan,
    to_writer: &Sender<Chunk>,
    empty: &Receiver<Vec<u8>>,
    progress: &mut dyn FnMut(u64),
) -> Result<Option<Digest>, IntakeError> {
    let mut hasher = Hasher::new();
    let mut offset = 0;
    while offset < plan.file_size() {
        let Ok(mut buffer) = empty.recv() else { return Ok(None) };
        let end = plan.chunk_end(offset, CHUNK_BYTES as u64);
        let chunk = fill(source, &mut buffer, offset..end, plan.file_size())?;
        hasher.update(chunk);
        let length = chunk.len();
        if to_writer.send(Chunk { buffer, length, begun: Vec::new() }).is_err() {
            return Ok(None);
        }
        offset = end;
        progress(offset);
    }
    Ok(Some(hasher.finish()))
}

/// Puts the parts on disk.
struct Writer<'p> {
    staging: Staging,
    plan: &'p SplitPlan,
    splitter: Splitter<'p>,
    /// Files that are begun and not complete, with what they miss: one, or as many as there are
    /// expert groups whose members are interleaved.
    open: BTreeMap<usize, (StagedFile, u64)>,
}

impl<'p> Writer<'p> {
    fn new(staging: Staging, plan: &'p SplitPlan) -> Self {
        Self { staging, plan, splitter: Splitter::new(plan), open: BTreeMap::new() }
    }

    fn run(mut self, full: &Receiver<Chunk>, to_hasher: &Sender<Chunk>) -> Result<(), IntakeError> {
        for mut chunk in full {
            chunk.begun = self.write_chunk(chunk.bytes())?;
            if to_hasher.send(chunk).is_err() {
                break;
            }
        }
        Ok(())
    }

    fn write_chunk(&mut self, bytes: &[u8]) -> Result<Vec<(usize, StagedHash)>, IntakeError> {
        let mut begun = Vec::new();
        for part in self.splitter.push(bytes)? {
            if let Target::Blob { blob, offset_in_blob } = part.target {
                self.write_part(blob, offset_in_blob, &part, &mut begun)?;
            }
        }
        Ok(begun)
    }

    fn write_part(
        &mut self,
        blob: usize,
        offset: u64,
        part: &Part<'_>,
        begun: &mut Vec<(usize, StagedHash)>,
    ) -> Result<(), IntakeError> {
        let (file, missing) = match self.open.remove(&blob) {
            Some(unfinished) => unfinished,
            None => {
                let size = self.plan.blobs().get(blob).map_or(0, |planned| planned.size);
                let (file, hash) = self.staging.stage(size)?.into_halves();
                begun.push((blob, hash));
                (file, size)
            }
        };
        file.write_at(offset, part.bytes)?;
        match missing.saturating_sub(part.bytes.len() as u64) {
            0 => file.finish(),
            missing => {
                self.open.insert(blob, (file, missing));
            }
        }
        Ok(())
    }
}

/// Hashes the parts, which are on disk by then, and gives finished blobs to the ingest.
struct PartHasher<'i> {
    ingest: &'i mut Ingest,
    splitter: Splitter<'i>,
    open: BTreeMap<usize, (StagedHash, u64)>,
    plan: &'i SplitPlan,
    digests: Vec<Option<Digest>>,
    literals: Vec<Vec<u8>>,
}

impl<'i> PartHasher<'i> {
    fn new(ingest: &'i mut Ingest, plan: &'i SplitPlan) -> Self {
        Self {
            ingest,
            splitter: Splitter::new(plan),
            open: BTreeMap::new(),
            plan,
            digests: vec![None; plan.blobs().len()],
            literals: vec![Vec::new(); plan.literal_count()],
        }
    }

    fn run(
        mut self,
        written: &Receiver<Chunk>,
        to_reader: &Sender<Vec<u8>>,
    ) -> Result<(Vec<Digest>, Vec<Vec<u8>>), IntakeError> {
        for mut chunk in written {
            for (blob, hash) in std::mem::take(&mut chunk.begun) {
                let size = self.plan.blobs().get(blob).map_or(0, |planned| planned.size);
                self.open.insert(blob, (hash, size));
            }
            for part in self.splitter.push(chunk.bytes())? {
                self.hash_part(&part)?;
            }
            // Fails at the end, when the reader has all it needs.
            let _ = to_reader.send(chunk.buffer);
        }
        // The plan's segments fill every blob, so each has a digest once all bytes have come;
        // if some have not, the reader or the writer says why.
        Ok((self.digests.into_iter().flatten().collect(), self.literals))
    }

    fn hash_part(&mut self, part: &Part<'_>) -> Result<(), IntakeError> {
        match part.target {
            Target::Literal { literal } => {
                if let Some(literal) = self.literals.get_mut(literal) {
                    literal.extend_from_slice(part.bytes);
                }
                Ok(())
            }
            Target::Blob { blob, offset_in_blob } => self.hash_blob(blob, offset_in_blob, part.bytes),
        }
    }

    fn hash_blob(&mut self, blob: usize, offset: u64, bytes: &[u8]) -> Result<(), IntakeError> {
        let Some((mut hash, missing)) = self.open.remove(&blob) else { return Ok(()) };
        hash.update(offset, bytes)?;
        match missing.saturating_sub(bytes.len() as u64) {
            0 => {
                let digest = self.ingest.add_blob(hash.finish()?)?;
                if let Some(place) = self.digests.get_mut(blob) {
                    *place = Some(digest);
                }
            }
            missing => {
                self.open.insert(blob, (hash, missing));
            }
        }
        Ok(())
    }
}
