//! Sets of byte ranges.

use std::ops::Range;

use rangemap::RangeSet;

/// The bytes of a file that have arrived.
#[derive(Clone, Debug, Default)]
pub(crate) struct Extents {
    ranges: RangeSet<u64>,
    /// Their total length: needed for every range that arrives, so it is not summed each time.
    total: u64,
}

impl Extents {
    pub(crate) fn insert(&mut self, range: Range<u64>) {
        let added = self.gaps(range.clone()).iter().map(length).fold(0, u64::saturating_add);
        self.total = self.total.saturating_add(added);
        // The set panics on an empty range.
        if !range.is_empty() {
            self.ranges.insert(range);
        }
    }

    pub(crate) fn remove(&mut self, range: Range<u64>) {
        if range.is_empty() {
            return;
        }
        let missing = self.gaps(range.clone()).iter().map(length).fold(0, u64::saturating_add);
        self.total = self.total.saturating_sub(length(&range).saturating_sub(missing));
        self.ranges.remove(range);
    }

    /// The end of the run of present bytes that begins at `offset`.
    pub(crate) fn end_of_run(&self, offset: u64) -> u64 {
        self.ranges.get(&offset).map_or(offset, |run| run.end)
    }

    pub(crate) fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        if range.is_empty() { Vec::new() } else { self.ranges.gaps(&range).collect() }
    }

    pub(crate) const fn total(&self) -> u64 {
        self.total
    }
}

fn length(range: &Range<u64>) -> u64 {
    range.end.saturating_sub(range.start)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn set_equals_a_set_of_single_bytes(
            steps in prop::collection::vec((any::<bool>(), 0u64..64, 0u64..24), 0..24),
            queried in (0u64..64, 0u64..64),
        ) {
            let (mut extents, mut bytes) = (Extents::default(), std::collections::BTreeSet::new());
            for (adds, start, length) in steps {
                let range = start..start + length;
                if adds {
                    extents.insert(range.clone());
                    bytes.extend(range);
                } else {
                    extents.remove(range.clone());
                    bytes.retain(|byte| !range.contains(byte));
                }
            }
            prop_assert_eq!(extents.total(), bytes.len() as u64);
            let queried = queried.0.min(queried.1)..queried.0.max(queried.1);
            let missing: Vec<u64> = extents.gaps(queried.clone()).into_iter().flatten().collect();
            let expected: Vec<u64> = queried.clone().filter(|byte| !bytes.contains(byte)).collect();
            prop_assert_eq!(missing, expected);
            let run_end = (queried.start..).find(|byte| !bytes.contains(byte)).unwrap();
            prop_assert_eq!(extents.end_of_run(queried.start), run_end);
        }
    }
}
