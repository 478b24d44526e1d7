//! Sets of byte ranges.

use std::collections::BTreeMap;
use std::ops::Range;

/// Which bytes of a file are there: ranges that neither overlap nor touch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Extents {
    /// The ranges' starts and ends.
    ranges: BTreeMap<u64, u64>,
    /// How many bytes they have: asked for with every piece that arrives.
    total: u64,
}

impl Extents {
    /// Adds a range; what of it is in the set already changes nothing.
    pub fn insert(&mut self, range: Range<u64>) {
        let Range { mut start, mut end } = range;
        if start >= end {
            return;
        }
        // From the last one that may touch it back to the first.
        while let Some((&first, &last)) = self.ranges.range(..=end).next_back() {
            if last < start {
                break;
            }
            (start, end) = (start.min(first), end.max(last));
            self.take(first);
        }
        self.put(start, end);
    }

    /// Takes a range out of the set.
    pub fn remove(&mut self, range: Range<u64>) {
        while let Some((&first, &last)) = self.ranges.range(..range.end).next_back() {
            if last <= range.start || range.is_empty() {
                break;
            }
            self.take(first);
            if last > range.end {
                self.put(range.end, last);
            }
            if first < range.start {
                self.put(first, range.start);
            }
        }
    }

    fn put(&mut self, start: u64, end: u64) {
        self.ranges.insert(start, end);
        self.total = self.total.saturating_add(end.saturating_sub(start));
    }

    fn take(&mut self, start: u64) {
        if let Some(end) = self.ranges.remove(&start) {
            self.total = self.total.saturating_sub(end.saturating_sub(start));
        }
    }

    /// Where the run of bytes that are there ends which begins at `offset`; `offset` itself when
    /// the byte there is missing.
    #[must_use]
    pub fn end_of_run(&self, offset: u64) -> u64 {
        let before = self.ranges.range(..=offset).next_back();
        before.map_or(offset, |(_, end)| (*end).max(offset))
    }

    /// What of `range` is missing, in order.
    #[must_use]
    pub fn gaps(&self, range: Range<u64>) -> Vec<Range<u64>> {
        let mut gaps = Vec::new();
        let mut position = self.end_of_run(range.start);
        for (&start, &end) in self.ranges.range(range.start..range.end) {
            if start > position {
                gaps.push(position..start);
            }
            position = position.max(end);
        }
        if position < range.end {
            gaps.push(position..range.end);
        }
        gaps
    }

    /// How many bytes are there.
    #[must_use]
    pub const fn total(&self) -> u64 {
        self.total
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn set_agrees_with_one_of_single_bytes(
            steps in prop::collection::vec((any::<bool>(), 0u64..64, 0u64..24), 0..24),
            asked in (0u64..64, 0u64..64),
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
            let asked = asked.0.min(asked.1)..asked.0.max(asked.1);
            let missing: Vec<u64> = extents.gaps(asked.clone()).into_iter().flatten().collect();
            let expected: Vec<u64> = asked.clone().filter(|byte| !bytes.contains(byte)).collect();
            prop_assert_eq!(missing, expected);
            let run_end = (asked.start..).find(|byte| !bytes.contains(byte)).unwrap();
            prop_assert_eq!(extents.end_of_run(asked.start), run_end);
        }
    }
}
