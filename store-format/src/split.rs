//! Splitting a model file into one blob per tensor or expert group, one for the header, and fillers.
//!
//! A [`SplitPlan`] is made from a [`FileLayout`](crate::file_layout::FileLayout). Its segments cover the
//! file exactly once, in order, so the file can be rebuilt bit for bit. [`Splitter`] maps the file's bytes
//! to their targets; it neither hashes nor writes.
//!
//! Shards of a model may have experts of one group in several files: [`ExpertsOfFiles`] finds such groups, whose blob
//! the files then share.

mod experts_of_files;
mod joined;
mod plan;
#[cfg(test)]
mod tests;

pub use experts_of_files::{ExpertsOfFiles, PlaceInFiles, SharedGroups, SharedPart};
pub use plan::{BlobContent, BlobPlaces, PlannedBlob, PlannedTensor, Segment, SplitPlan, Target};

/// Maps a file's bytes, in order, to their targets.
#[derive(Clone, Debug)]
pub struct Splitter<'p> {
    plan: &'p SplitPlan,
    /// The number of bytes received.
    position: u64,
}

/// Bytes with one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part<'c> {
    /// The target of the first byte.
    pub target: Target,
    /// The bytes; never empty.
    pub bytes: &'c [u8],
    /// Whether they are the last of their segment.
    pub completes: bool,
}

impl<'p> Splitter<'p> {
    pub fn new(plan: &'p SplitPlan) -> Self {
        Self { plan, position: 0 }
    }

    /// Takes the next bytes of the file.
    ///
    /// # Errors
    /// [`SplitError::TooLong`] when they extend beyond the end of the file; none are taken then.
    pub fn push<'c>(&mut self, chunk: &'c [u8]) -> Result<Vec<Part<'c>>, SplitError> {
        let parts = self.plan.parts(self.position, chunk)?;
        self.position = self.position.saturating_add(chunk.len() as u64);
        Ok(parts)
    }

    /// Checks that the file is complete.
    pub fn finish(self) -> Result<(), SplitError> {
        let (found, file_size) = (self.position, self.plan.file_size());
        if found == file_size { Ok(()) } else { Err(SplitError::TooShort { found, file_size }) }
    }
}

impl SplitPlan {
    /// Cuts the bytes at `offset_in_file` at segment boundaries. For ranges in any order; use
    /// [`Splitter`] for a whole file.
    pub fn parts<'c>(&self, offset_in_file: u64, bytes: &'c [u8]) -> Result<Vec<Part<'c>>, SplitError> {
        let end = offset_in_file.checked_add(bytes.len() as u64);
        if end.is_none_or(|end| end > self.file_size()) {
            return Err(SplitError::TooLong { file_size: self.file_size() });
        }
        let (mut rest, mut position, mut parts) = (bytes, offset_in_file, Vec::new());
        for segment in self.segments().get(self.segment_index(position)..).unwrap_or_default() {
            let part = cut(segment, position, rest);
            if part.bytes.is_empty() {
                break;
            }
            rest = rest.get(part.bytes.len()..).unwrap_or_default();
            position = position.saturating_add(part.bytes.len() as u64);
            parts.push(part);
        }
        Ok(parts)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum SplitError {
    #[error("file: continues after its {file_size} bytes")]
    TooLong { file_size: u64 },
    #[error("file: ends after {found} of its {file_size} bytes")]
    TooShort { found: u64, file_size: u64 },
}

/// The part of the bytes at `position` that lies in `segment`, which contains the first.
fn cut<'c>(segment: &Segment, position: u64, bytes: &'c [u8]) -> Part<'c> {
    let left_of_segment = segment.end().saturating_sub(position);
    let length = usize::try_from(left_of_segment).unwrap_or(usize::MAX).min(bytes.len());
    let bytes = bytes.get(..length).unwrap_or_default();
    let done = position.saturating_sub(segment.offset_in_file);
    Part { target: segment.target.advanced(done), bytes, completes: length as u64 == left_of_segment }
}
