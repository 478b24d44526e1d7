//! The writing half of an intake: parts of the file go to their blobs.

use std::collections::BTreeMap;

use blobd_store_format::digest::Digest;
use blobd_store_format::split::{Part, SplitPlan, Splitter, Target};

use super::{IntakeError, Parts};
use crate::store::{Ingest, StagedWriter};

/// Walks a plan over the file's chunks and stages what they are made of.
pub(super) struct Stager<'i> {
    ingest: &'i mut Ingest,
    plan: &'i SplitPlan,
    splitter: Splitter<'i>,
    /// Blobs that are begun and not complete: one, or as many as there are expert groups whose
    /// members are interleaved.
    open: BTreeMap<usize, Unfinished>,
    current: Option<usize>,
    digests: Vec<Option<Digest>>,
    literals: Vec<Vec<u8>>,
}

struct Unfinished {
    writer: StagedWriter,
    missing: u64,
}

impl<'i> Stager<'i> {
    pub(super) fn new(ingest: &'i mut Ingest, plan: &'i SplitPlan) -> Self {
        Self {
            ingest,
            plan,
            splitter: Splitter::new(plan),
            open: BTreeMap::new(),
            current: None,
            digests: vec![None; plan.blobs().len()],
            literals: vec![Vec::new(); plan.literal_count()],
        }
    }

    /// Takes the next bytes of the file.
    pub(super) fn push(&mut self, chunk: &[u8]) -> Result<(), IntakeError> {
        for part in self.splitter.push(chunk)? {
            match part.target {
                Target::Blob { blob, offset_in_blob } => self.write(blob, offset_in_blob, &part)?,
                Target::Literal { literal } => {
                    if let Some(literal) = self.literals.get_mut(literal) {
                        literal.extend_from_slice(part.bytes);
                    }
                }
            }
        }
        Ok(())
    }

    /// Ends the file: every blob is complete.
    pub(super) fn finish(self) -> Result<Parts, IntakeError> {
        self.splitter.finish()?;
        // The plan's segments fill every blob, so each has a digest once all bytes have come.
        Ok(Parts { blobs: self.digests.into_iter().flatten().collect(), literals: self.literals })
    }

    fn write(&mut self, blob: usize, offset: u64, part: &Part<'_>) -> Result<(), IntakeError> {
        self.switch_to(blob);
        let mut unfinished = match self.open.remove(&blob) {
            Some(unfinished) => unfinished,
            None => self.begin(blob)?,
        };
        unfinished.writer.write_at(offset, part.bytes)?;
        unfinished.missing = unfinished.missing.saturating_sub(part.bytes.len() as u64);
        if unfinished.missing > 0 {
            self.open.insert(blob, unfinished);
            return Ok(());
        }
        let digest = self.ingest.add_blob(unfinished.writer.finish()?)?;
        if let Some(place) = self.digests.get_mut(blob) {
            *place = Some(digest);
        }
        Ok(())
    }

    fn begin(&mut self, blob: usize) -> Result<Unfinished, IntakeError> {
        let missing = self.plan.blobs().get(blob).map_or(0, |planned| planned.size);
        Ok(Unfinished { writer: self.ingest.stage(missing)?, missing })
    }

    /// Keeps one descriptor open at a time.
    fn switch_to(&mut self, blob: usize) {
        let previous = self.current.replace(blob).filter(|previous| *previous != blob);
        if let Some(unfinished) = previous.and_then(|previous| self.open.get_mut(&previous)) {
            unfinished.writer.suspend();
        }
    }
}
