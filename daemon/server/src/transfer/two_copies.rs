//! The comparison of two downloads of a file, the first of which has a wrong digest.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;

use blobd_client::protocol::corrected::{CorrectedFile, DifferingRange};
use blobd_registry::RemoteFile;
use blobd_store::Differences;
use blobd_store_format::digest::Digest;
use blobd_store_format::split::{SplitPlan, Target};

use super::senders::Senders;

/// Two downloads of a file, and where they differ.
#[derive(Debug)]
pub struct TwoCopies {
    expected: Digest,
    first: Digest,
    second: Digest,
    /// Who sent the second; `None` if an earlier pull received all of it.
    second_from: Option<String>,
    differing_bytes: u64,
    ranges: Vec<DifferingRange>,
}

/// A copy that was downloaded.
#[derive(Debug)]
pub(super) struct Copy<'c> {
    pub(super) digest: Digest,
    pub(super) senders: &'c Senders,
}

impl TwoCopies {
    pub(super) fn new(expected: Digest, copies: [Copy<'_>; 2], differences: &Differences) -> Self {
        let [first, second] = copies;
        let ranges = differences.ranges().iter().map(|difference| DifferingRange {
            offset: difference.range.start,
            length: difference.length(),
            differing_bytes: difference.bytes,
            first_from: first.senders.of(&difference.range),
            second_from: second.senders.of(&difference.range),
            tensors: Vec::new(),
        });
        Self {
            expected,
            first: first.digest,
            second: second.digest,
            second_from: second.senders.names(),
            differing_bytes: differences.bytes(),
            ranges: ranges.collect(),
        }
    }

    /// Adds the tensors in the ranges.
    pub(super) fn with_tensors_of(mut self, plan: &SplitPlan) -> Self {
        for range in &mut self.ranges {
            range.tensors = tensors_in(plan, range.offset..range.offset.saturating_add(range.length));
        }
        self
    }

    /// Whether both have the same bytes.
    pub(crate) fn are_equal(&self) -> bool {
        self.first == self.second
    }

    /// Whether the second one is right.
    pub(super) fn is_corrected(&self) -> bool {
        self.second == self.expected
    }

    pub(super) fn into_corrected(self, file: &RemoteFile) -> CorrectedFile {
        let Self { expected: digest, first: first_digest, differing_bytes, ranges, .. } = self;
        let (name, size) = (file.label(), file.size());
        CorrectedFile { name, digest, size, first_digest, differing_bytes, ranges }
    }
}

impl fmt::Display for TwoCopies {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { expected, first, second, ranges, .. } = self;
        let from = self.second_from.as_ref().map_or_else(String::new, |from| format!(", from {from},"));
        if self.are_equal() {
            return write!(
                f,
                "wrong digest: expected {expected}, found {first}; a second download{from} has the same bytes"
            );
        }
        write!(
            f,
            "wrong digest: expected {expected}, found {first}; a second download{from} has the digest {second}"
        )?;
        if let [range, others @ ..] = ranges.as_slice() {
            let bytes = match self.differing_bytes {
                1 => "1 byte".to_owned(),
                bytes => format!("{bytes} bytes"),
            };
            let places =
                if others.is_empty() { String::new() } else { format!(" in {} ranges", ranges.len()) };
            write!(f, "; the two differ in {bytes}{places}, first at offset {}", range.offset)?;
        }
        Ok(())
    }
}

/// The most tensors that are named for one range.
const MAX_TENSORS: usize = 16;

/// The names of the tensors that have bytes in a range of the file, the first ones only.
fn tensors_in(plan: &SplitPlan, range: Range<u64>) -> Vec<String> {
    let end = |start: u64, length: u64| start.saturating_add(length);
    let segments = plan.segments();
    let before =
        segments.partition_point(|segment| end(segment.offset_in_file, segment.length) <= range.start);
    let mut in_blobs: BTreeMap<usize, Vec<Range<u64>>> = BTreeMap::new();
    for segment in segments.iter().skip(before).take_while(|segment| segment.offset_in_file < range.end) {
        let Target::Blob { blob, offset_in_blob } = segment.target else { continue };
        let skipped = range.start.saturating_sub(segment.offset_in_file);
        let until = segment.length.min(range.end.saturating_sub(segment.offset_in_file));
        let part = end(offset_in_blob, skipped)..end(offset_in_blob, until);
        in_blobs.entry(blob).or_default().push(part);
    }
    let has = |tensor_start: u64, size: u64, parts: &Vec<Range<u64>>| {
        parts.iter().any(|part| part.start < end(tensor_start, size) && tensor_start < part.end)
    };
    let tensors = plan.tensors().iter().filter(|tensor| {
        let parts = tensor.blob.and_then(|blob| in_blobs.get(&blob));
        parts.is_some_and(|parts| has(tensor.offset_in_blob, tensor.size, parts))
    });
    tensors.take(MAX_TENSORS).map(|tensor| tensor.name.clone()).collect()
}

#[cfg(test)]
mod tests {
    use blobd_store_format::gguf::{GgmlType, GgufWriter, Header};

    use super::*;

    #[test]
    fn tensors_of_a_range_are_found() {
        let mut writer = GgufWriter::new();
        for name in ["a", "b", "c"] {
            writer.tensor(name, GgmlType::I8, &[128]).unwrap();
        }
        let header = writer.header().unwrap();
        let (start, size) = (header.len() as u64, header.len() as u64 + 3 * 128);
        let plan = SplitPlan::new(Header::parse(&header).unwrap().file_layout(size).unwrap());
        for (range, names) in [
            (0..start, &[][..]),
            (start - 1..start + 1, &["a"]),
            (start + 127..start + 129, &["a", "b"]),
            (start + 128..start + 256, &["b"]),
            (0..size, &["a", "b", "c"]),
        ] {
            assert_eq!(tensors_in(&plan, range.clone()), names, "{range:?}");
        }
    }
}
