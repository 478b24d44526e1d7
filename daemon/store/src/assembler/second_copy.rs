//! A second copy of a file is received over the first, whose digest is wrong: the two are compared, and only what
//! differs is written.
//!
//! The first copy stays readable until the byte in its place arrives again, so no additional space is needed.

use std::ops::Range;

use blobd_store_format::digest::Digest;

use super::Assembler;
use crate::content::downloads::extents::Extents;
use crate::{StoreError, lock};

/// The first copy of a file.
#[derive(Debug)]
pub(super) struct FirstCopy {
    digest: Digest,
    /// What of it is on disk.
    held: Extents,
    differences: Differences,
}

impl FirstCopy {
    pub(super) const fn new(digest: Digest, held: Extents, differences: Differences) -> Self {
        Self { digest, held, differences }
    }
}

/// A range where two copies of a file differ.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Difference {
    /// From the first byte that differs to the last; a few in between may be the same.
    pub range: Range<u64>,
    pub bytes: u64,
}

impl Difference {
    pub const fn length(&self) -> u64 {
        self.range.end.saturating_sub(self.range.start)
    }

    fn absorb(&mut self, other: &Self) {
        self.range = self.range.start.min(other.range.start)..self.range.end.max(other.range.end);
        // A range that was noted twice, before and after a crash, must not count for more than it has.
        self.bytes = self.bytes.saturating_add(other.bytes).min(self.length());
    }
}

/// Where two copies of a file differ: ranges in order, not adjacent, at most [`Self::MAX_RANGES`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Differences {
    ranges: Vec<Difference>,
    inserted: usize,
}

impl Differences {
    /// More become fewer, larger ranges. A report of more helps nobody, and another file differs everywhere.
    pub const MAX_RANGES: usize = 256;
    /// Ranges with at most this many equal bytes in between become one: damage comes in pages and packets.
    const NEAR_BYTES: u64 = 4 << 10;
    /// The most ranges that a download's journal records.
    const MAX_NOTED: usize = 4 * Self::MAX_RANGES;

    /// Compares two copies of the bytes at `offset` in a file, up to the length of the shorter one.
    pub fn between(first: &[u8], second: &[u8], offset: u64) -> Self {
        const BLOCK_BYTES: usize = 512;
        let mut found = Self::default();
        let blocks = first.chunks(BLOCK_BYTES).zip(second.chunks(BLOCK_BYTES));
        for (number, (first, second)) in blocks.enumerate() {
            // Almost all blocks are the same, which is compared fast.
            if first == second {
                continue;
            }
            let start = offset.saturating_add((number * BLOCK_BYTES) as u64);
            let pairs = first.iter().zip(second).enumerate();
            for (place, _) in pairs.filter(|(_, (first, second))| first != second) {
                let place = start.saturating_add(place as u64);
                found.push_byte(place);
            }
        }
        found
    }

    fn push_byte(&mut self, place: u64) {
        let end = place.saturating_add(1);
        match self.ranges.last_mut() {
            Some(last) if place.saturating_sub(last.range.end) <= Self::NEAR_BYTES => {
                last.range.end = end;
                last.bytes = last.bytes.saturating_add(1);
            }
            _ => self.insert(Difference { range: place..end, bytes: 1 }),
        }
    }

    pub(super) fn insert(&mut self, difference: Difference) {
        self.inserted = self.inserted.saturating_add(1);
        let place = self.ranges.partition_point(|other| other.range.start < difference.range.start);
        self.ranges.insert(place, difference);
        // Only the new range can be near its neighbours, the following one first.
        self.join(place, Self::NEAR_BYTES);
        if let Some(before) = place.checked_sub(1) {
            self.join(before, Self::NEAR_BYTES);
        }
        if self.ranges.len() > Self::MAX_RANGES {
            let gap = |place: &usize| self.gap_after(*place);
            if let Some(nearest) = (0..self.ranges.len().saturating_sub(1)).min_by_key(gap) {
                self.join(nearest, u64::MAX);
            }
        }
    }

    /// Joins ranges with the one at `place` as long as there are at most `nearest` bytes in between.
    fn join(&mut self, place: usize, nearest: u64) {
        let next = place.saturating_add(1);
        while self.gap_after(place) <= nearest && next < self.ranges.len() {
            let following = self.ranges.remove(next);
            if let Some(difference) = self.ranges.get_mut(place) {
                difference.absorb(&following);
            }
            if nearest == u64::MAX {
                return;
            }
        }
    }

    fn gap_after(&self, place: usize) -> u64 {
        let pair = self.ranges.get(place).zip(self.ranges.get(place.saturating_add(1)));
        pair.map_or(u64::MAX, |(before, after)| after.range.start.saturating_sub(before.range.end))
    }

    pub fn extend(&mut self, other: Self) {
        other.ranges.into_iter().for_each(|difference| self.insert(difference));
    }

    pub fn ranges(&self) -> &[Difference] {
        &self.ranges
    }

    pub fn bytes(&self) -> u64 {
        self.ranges.iter().map(|difference| difference.bytes).fold(0, u64::saturating_add)
    }
}

impl Assembler {
    pub fn is_second_copy(&self) -> bool {
        lock(&self.state).first.is_some()
    }

    /// The digest of the first copy, and where what has arrived differs from it.
    pub fn differences(&self) -> Option<(Digest, Differences)> {
        let state = lock(&self.state);
        state.first.as_ref().map(|first| (first.digest, first.differences.clone()))
    }

    /// Writes the bytes that differ from those of the first copy, or that it does not have.
    pub(super) fn replace_first_copy(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let mut place = offset;
        for chunk in bytes.chunks(COMPARED_BYTES) {
            self.replace_chunk(place, chunk)?;
            place = place.saturating_add(chunk.len() as u64);
        }
        Ok(())
    }

    fn replace_chunk(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        let range = offset..offset.saturating_add(bytes.len() as u64);
        let held = |range: Range<u64>| match &lock(&self.state).first {
            Some(first) => first.held.gaps(range),
            None => vec![range],
        };
        let mut position = range.start;
        for missing in held(range.clone()) {
            self.compare(position, part(bytes, offset, position..missing.start))?;
            self.write_all(missing.start, part(bytes, offset, missing.clone()))?;
            position = missing.end;
        }
        self.compare(position, part(bytes, offset, position..range.end))
    }

    /// Compares bytes with those of the first copy, all of which are on disk, and replaces what differs.
    fn compare(&self, offset: u64, bytes: &[u8]) -> Result<(), StoreError> {
        if bytes.is_empty() {
            return Ok(());
        }
        let mut first = vec![0; bytes.len()];
        if let Err(error) = self.read(offset, &mut first) {
            // What cannot be read is replaced, which may even repair a sector of the disk.
            tracing::warn!("{error}; it is replaced");
            return self.write_all(offset, bytes);
        }
        for difference in Differences::between(&first, bytes, offset).ranges {
            // Before the bytes are replaced: after a crash in between they are compared again.
            self.note_difference(&difference)?;
            let Range { start, end } = difference.range;
            self.write_all(start, part(bytes, offset, start..end))?;
        }
        Ok(())
    }

    fn note_difference(&self, difference: &Difference) -> Result<(), StoreError> {
        let mut is_noted = false;
        if let Some(first) = &mut lock(&self.state).first {
            first.differences.insert(difference.clone());
            // A file that differs everywhere must not fill the journal.
            is_noted = first.differences.inserted <= Differences::MAX_NOTED;
        }
        match &self.partial {
            Some(partial) if is_noted => partial.note_difference(difference),
            _ => Ok(()),
        }
    }
}

/// How much of the first copy is read into memory at once.
const COMPARED_BYTES: usize = 1 << 20;

/// The bytes of a range of the file, of those that begin at `offset`.
fn part(bytes: &[u8], offset: u64, range: Range<u64>) -> &[u8] {
    let place = |at: u64| usize::try_from(at.saturating_sub(offset)).unwrap_or(usize::MAX);
    bytes.get(place(range.start)..place(range.end)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn differences(places: impl IntoIterator<Item = u64>) -> Differences {
        let mut found = Differences::default();
        places.into_iter().for_each(|place| found.insert(Difference { range: place..place + 1, bytes: 1 }));
        found
    }

    #[test]
    fn near_differences_become_one_range_with_exact_count() {
        let (first, mut second) = (vec![7; 40_000], vec![7; 40_000]);
        for place in [0, 1, 900, 30_000] {
            second[place] = 8;
        }
        let found = Differences::between(&first, &second, 100);
        let expected =
            [Difference { range: 100..1001, bytes: 3 }, Difference { range: 30_100..30_101, bytes: 1 }];
        assert_eq!((found.ranges(), found.bytes()), (&expected[..], 4));
        assert_eq!(Differences::between(&first, &first, 0), Differences::default());
    }

    #[test]
    fn number_of_ranges_is_limited_and_no_byte_is_lost() {
        let places = (0..1000).map(|number| number * 10_000);
        for found in [differences(places.clone()), differences(places.rev())] {
            assert_eq!((found.ranges().len(), found.bytes()), (Differences::MAX_RANGES, 1000));
            let last = found.ranges().last().unwrap();
            assert_eq!((found.ranges()[0].range.start, last.range.end), (0, 9_990_001));
        }
    }

    #[test]
    fn difference_that_is_noted_twice_counts_once() {
        let found = differences([5, 5]);
        assert_eq!(found.ranges(), [Difference { range: 5..6, bytes: 1 }]);
    }

    proptest! {
        #[test]
        fn all_bytes_that_differ_are_in_a_range_and_counted(
            flipped in prop::collection::btree_set(0usize..20_000, 0..40),
            offset in 0u64..1 << 40,
        ) {
            let (first, mut second) = (vec![0u8; 20_000], vec![0u8; 20_000]);
            flipped.iter().for_each(|place| second[*place] = 1);
            let found = Differences::between(&first, &second, offset);
            prop_assert_eq!(found.bytes(), flipped.len() as u64);
            for place in &flipped {
                let place = offset + *place as u64;
                prop_assert!(found.ranges().iter().any(|difference| difference.range.contains(&place)));
            }
            let gaps = found.ranges().windows(2).map(|pair| pair[1].range.start - pair[0].range.end);
            prop_assert!(gaps.into_iter().all(|gap| gap > Differences::NEAR_BYTES));
        }
    }

    #[test]
    fn differences_with_few_equal_bytes_in_between_are_one_range() {
        let near = Differences::NEAR_BYTES;
        for (gap, ranges) in [(near, 1), (near + 1, 2)] {
            assert_eq!(differences([100, 101 + gap]).ranges().len(), ranges, "{gap}");
            assert_eq!(differences([101 + gap, 100]).ranges().len(), ranges, "{gap}");
            let length = usize::try_from(gap).unwrap() + 2;
            let (first, mut second) = (vec![0; length], vec![0; length]);
            (second[0], second[length - 1]) = (1, 1);
            assert_eq!(Differences::between(&first, &second, 0).ranges().len(), ranges, "{gap}");
        }
        // One in between joins both.
        let joined = differences([0, near + 3, near / 2]);
        assert_eq!(joined.ranges(), [Difference { range: 0..near + 4, bytes: 3 }]);
        assert_eq!(joined.ranges()[0].length(), near + 4);
    }

    #[test]
    fn nearest_ranges_are_joined_when_there_are_too_many() {
        let most = Differences::MAX_RANGES as u64;
        let far = |number: u64| number * 100_000;
        let all = differences((0..most).map(far));
        assert_eq!(all.ranges().len(), Differences::MAX_RANGES);
        let mut joined = all.clone();
        joined.extend(differences([far(7) + 50_001 - 1000]));
        assert_eq!(joined.ranges().len(), Differences::MAX_RANGES);
        assert_eq!(joined.ranges()[7], Difference { range: far(7)..far(7) + 49_002, bytes: 2 });
        assert_eq!(joined.bytes(), most + 1);
    }

    #[test]
    fn bytes_up_to_the_end_of_the_shorter_copy_are_compared() {
        let long = vec![1; 2000];
        assert_eq!(
            Differences::between(&long, &[0; 3], 10).ranges(),
            [Difference { range: 10..13, bytes: 3 }]
        );
        assert_eq!(Differences::between(&long, &long[..700], 0), Differences::default());
        assert_eq!(part(b"abcdef", 10, 12..14), b"cd");
        assert_eq!((part(b"abcdef", 10, 12..17), part(b"abcdef", 10, 16..16)), (&b""[..], &b""[..]));
    }
}
