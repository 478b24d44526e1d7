//! Compares two downloads of a file after the first had a wrong digest, and says who sent which bytes.

use std::collections::BTreeMap;
use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use blobd_client::protocol::pull::{CorrectedFile, DifferingRange};
use blobd_registry::{RemoteFile, Sender};
use blobd_store::Differences;
use blobd_store_format::digest::Digest;
use blobd_store_format::split::{SplitPlan, Target};
use rangemap::RangeMap;

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
            first_from: first.senders.names_for(&difference.range),
            second_from: second.senders.names_for(&difference.range),
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

    pub(super) fn with_tensors_of(mut self, plan: &SplitPlan) -> Self {
        for range in &mut self.ranges {
            range.tensors = tensors_in(plan, range.offset..range.offset.saturating_add(range.length));
        }
        self
    }

    pub(crate) fn are_equal(&self) -> bool {
        self.first == self.second
    }

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
    let tensors = plan.tensors().filter(|tensor| {
        let parts = tensor.blob.and_then(|blob| in_blobs.get(&blob));
        parts.is_some_and(|parts| has(tensor.offset_in_blob, tensor.size, parts))
    });
    tensors.take(MAX_TENSORS).map(|tensor| tensor.name.to_owned()).collect()
}

/// The senders of ranges of a file. Neighbouring ranges of one sender are one.
#[derive(Clone, Debug, Default)]
pub(super) struct Senders {
    /// Few: the mirrors, and the hosts to which they redirect.
    known: Vec<Arc<Sender>>,
    ranges: RangeMap<u64, usize>,
}

impl Senders {
    /// Notes who sent a range. Earlier senders of its parts stay: their bytes are those that were written.
    pub(super) fn note(&mut self, range: &Range<u64>, sender: &Arc<Sender>) {
        if range.is_empty() {
            return;
        }
        let known = self.known.iter().position(|known| known == sender);
        let place = known.unwrap_or_else(|| {
            self.known.push(Arc::clone(sender));
            self.known.len().saturating_sub(1)
        });
        let gaps: Vec<_> = self.ranges.gaps(range).collect();
        gaps.into_iter().for_each(|gap| self.ranges.insert(gap, place));
    }

    pub(super) fn all(&self) -> impl Iterator<Item = &Sender> {
        self.known.iter().map(|sender| &**sender)
    }

    /// Who sent a range, for people; `None` if that is unknown.
    pub(super) fn names_for(&self, range: &Range<u64>) -> Option<String> {
        let mut places: Vec<usize> = self.ranges.overlapping(range).map(|(_, place)| *place).collect();
        places.sort_unstable();
        places.dedup();
        let names: Vec<_> =
            places.iter().filter_map(|place| Some(self.known.get(*place)?.to_string())).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }

    /// All senders, for people; `None` if there are none.
    pub(super) fn names(&self) -> Option<String> {
        let names: Vec<_> = self.known.iter().map(ToString::to_string).collect();
        (!names.is_empty()).then(|| names.join(", "))
    }
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
