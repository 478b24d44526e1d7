//! The bytes of blobs that a model's tensors have: a stack of experts and its experts as single tensors are the same
//! bytes of one blob.

use std::collections::BTreeMap;
use std::ops::Range;

use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::TensorEntry;

use super::DiffTensor;

/// Per blob the ranges in ascending order. They are not empty and do not touch each other.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct BlobRanges(BTreeMap<Digest, Vec<Range<u64>>>);

impl BlobRanges {
    pub(super) fn of<'t>(tensors: impl IntoIterator<Item = &'t DiffTensor>) -> Self {
        let mut blobs: BTreeMap<Digest, Vec<Range<u64>>> = BTreeMap::new();
        for tensor in tensors.into_iter().filter(|tensor| tensor.size > 0) {
            blobs.entry(tensor.digest).or_default().push(range_of(tensor));
        }
        blobs.values_mut().for_each(|ranges| *ranges = joined(std::mem::take(ranges)));
        Self(blobs)
    }

    pub(super) fn bytes(&self) -> u64 {
        self.0.values().flatten().map(length).fold(0, u64::saturating_add)
    }

    /// The bytes that are in both.
    pub(super) fn shared_bytes(&self, other: &Self) -> u64 {
        let both = self.0.iter().filter_map(|(digest, ranges)| Some((ranges, other.0.get(digest)?)));
        both.map(|(a, b)| overlap(a, b)).fold(0, u64::saturating_add)
    }

    /// Whether all bytes of the tensor are in the ranges; not of a tensor without bytes.
    pub(super) fn contain(&self, tensor: &TensorEntry<'_>) -> bool {
        let wanted = range_of(tensor);
        let ranges = self.0.get(&tensor.digest).map(Vec::as_slice).unwrap_or_default();
        // The only one that may contain it is the last one that starts at or before it.
        let place = ranges.partition_point(|range| range.start <= wanted.start);
        let before = place.checked_sub(1).and_then(|place| ranges.get(place));
        tensor.size > 0 && before.is_some_and(|range| wanted.end <= range.end)
    }
}

const fn range_of(tensor: &TensorEntry<'_>) -> Range<u64> {
    tensor.offset..tensor.offset.saturating_add(tensor.size)
}

const fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

fn joined(mut ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    ranges.sort_by_key(|range| range.start);
    let mut joined: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for range in ranges {
        match joined.last_mut().filter(|last| range.start <= last.end) {
            Some(last) => last.end = last.end.max(range.end),
            None => joined.push(range),
        }
    }
    joined
}

/// The bytes that two ascending lists have in common.
fn overlap(mut a: &[Range<u64>], mut b: &[Range<u64>]) -> u64 {
    let mut bytes = 0_u64;
    while let ([first, rest_of_a @ ..], [second, rest_of_b @ ..]) = (a, b) {
        let common = first.start.max(second.start)..first.end.min(second.end);
        bytes = bytes.saturating_add(length(&common));
        if first.end < second.end {
            a = rest_of_a;
        } else {
            b = rest_of_b;
        }
    }
    bytes
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;
    use blobd_store_format::tensor::TensorFormat;

    fn tensor(blob: u8, offset: u64, size: u64) -> DiffTensor {
        let entry = TensorEntry {
            name: "".into(),
            type_name: "I8".into(),
            shape: vec![size].into(),
            digest: Digest::of(&[blob]),
            offset,
            size,
            experts: None,
        };
        let file = std::sync::Arc::new(crate::diff::TensorFile::new("model", None));
        DiffTensor { format: TensorFormat::Gguf, file, entry }
    }

    fn bytes_of(tensors: &[DiffTensor]) -> BTreeSet<(Digest, u64)> {
        let bytes = |tensor: &DiffTensor| {
            let digest = tensor.digest;
            range_of(tensor).map(move |place| (digest, place))
        };
        tensors.iter().flat_map(bytes).collect()
    }

    proptest! {
        #[test]
        fn bytes_are_those_of_the_sets(
            a in vec((0..3_u8, 0..20_u64, 0..9_u64), 0..8),
            b in vec((0..3_u8, 0..20_u64, 0..9_u64), 0..8),
            one in (0..3_u8, 0..20_u64, 0..9_u64),
        ) {
            let tensors = |parts: &[(u8, u64, u64)]| -> Vec<_> {
                parts.iter().map(|(blob, offset, size)| tensor(*blob, *offset, *size)).collect()
            };
            let (a, b, one) = (tensors(&a), tensors(&b), tensor(one.0, one.1, one.2));
            let (of_a, of_b) = (BlobRanges::of(&a), BlobRanges::of(&b));
            prop_assert_eq!(of_a.bytes(), bytes_of(&a).len() as u64);
            prop_assert_eq!(of_a.shared_bytes(&of_b), bytes_of(&a).intersection(&bytes_of(&b)).count() as u64);
            let contained = bytes_of(std::slice::from_ref(&one)).is_subset(&bytes_of(&a));
            prop_assert_eq!(of_a.contain(&one), one.size > 0 && contained);
        }
    }
}
