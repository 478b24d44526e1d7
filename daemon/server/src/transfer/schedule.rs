//! Decides which bytes are downloaded next, without clock or network.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

#[derive(Debug, Default)]
pub(super) struct Schedule {
    /// Unclaimed ranges, in the order in which they are needed.
    waiting: VecDeque<Range<u64>>,
    active: BTreeMap<u64, Range<u64>>,
    next_id: u64,
    /// One stream delivers everything from front to back: the server does not support ranges.
    is_sequential: bool,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) struct Claim {
    pub(super) id: u64,
    pub(super) range: Range<u64>,
}

impl Schedule {
    /// Schedules these ranges. Two ranges with at most `nearest` bytes between them become one.
    pub(super) fn new(missing: impl IntoIterator<Item = Range<u64>>, nearest: u64) -> Self {
        let mut schedule = Self::default();
        for range in missing {
            match schedule.waiting.back_mut() {
                Some(last) if range.start.saturating_sub(last.end) <= nearest => last.end = range.end,
                _ => schedule.waiting.push_back(range),
            }
        }
        schedule
    }

    /// The next range of at most `length` bytes; `None` when all are claimed.
    pub(super) fn claim(&mut self, length: u64) -> Option<Claim> {
        if self.is_sequential {
            return None;
        }
        let first = self.waiting.front_mut()?;
        let end = first.end.min(first.start.saturating_add(length.max(1)));
        let range = first.start..end;
        first.start = end;
        if first.is_empty() {
            self.waiting.pop_front();
        }
        Some(self.activate(range))
    }

    /// When all ranges are claimed, takes the second half of the one with the most left, if each half has at least this
    /// size.
    pub(super) fn divide(&mut self, least: u64) -> Option<Claim> {
        if self.is_sequential || !self.waiting.is_empty() {
            return None;
        }
        let largest = self.active.values_mut().max_by_key(|range| range.end - range.start)?;
        let half = (largest.end - largest.start) / 2;
        if half < least {
            return None;
        }
        let range = largest.end - half..largest.end;
        largest.end = range.start;
        Some(self.activate(range))
    }

    fn activate(&mut self, range: Range<u64>) -> Claim {
        self.next_id += 1;
        self.active.insert(self.next_id, range.clone());
        Claim { id: self.next_id, range }
    }

    /// Whether bytes of a claim are missing. Its range may have become shorter.
    pub(super) fn is_active(&self, id: u64) -> bool {
        self.active.contains_key(&id)
    }

    /// Claims everything for one sequential stream; false if another stream has claimed it.
    pub(super) fn claim_all(&mut self) -> bool {
        !std::mem::replace(&mut self.is_sequential, true)
    }

    /// Makes these ranges claimable again after the sequential stream has failed.
    pub(super) fn reopen(&mut self, missing: impl IntoIterator<Item = Range<u64>>) {
        self.waiting = missing.into_iter().collect();
        // The numbers of earlier claims are never used again, so those have no effect.
        self.active.clear();
        self.is_sequential = false;
    }

    pub(super) fn advance(&mut self, id: u64, position: u64) {
        if let Some(range) = self.active.get_mut(&id) {
            range.start = position.min(range.end);
            if range.is_empty() {
                self.active.remove(&id);
            }
        }
    }

    /// Returns the rest of a claim, which is then needed first.
    pub(super) fn give_back(&mut self, id: u64) {
        if let Some(range) = self.active.remove(&id) {
            let place = self.waiting.partition_point(|waiting| waiting.start < range.start);
            self.waiting.insert(place, range);
        }
    }

    pub(super) fn is_done(&self) -> bool {
        self.waiting.is_empty() && self.active.is_empty()
    }

    pub(super) fn left_bytes(&self) -> u64 {
        let ranges = self.waiting.iter().chain(self.active.values());
        ranges.map(|range| range.end - range.start).fold(0, u64::saturating_add)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn near_ranges_become_one_request() {
        let mut schedule = Schedule::new([0..10, 14..20, 30..40], 4);
        assert_eq!(schedule.claim(100).unwrap().range, 0..20);
        assert_eq!(schedule.claim(100).unwrap().range, 30..40);
        assert_eq!(schedule.claim(100), None);
    }

    #[test]
    fn rest_of_a_broken_range_comes_next() {
        let mut schedule = Schedule::new(std::iter::once(0..100), 0);
        let (first, second) = (schedule.claim(40).unwrap(), schedule.claim(40).unwrap());
        schedule.advance(first.id, 15);
        schedule.give_back(first.id);
        assert_eq!(schedule.claim(40).unwrap().range, 15..40);
        assert!(!schedule.is_done());
        schedule.advance(second.id, 80);
        assert_eq!(schedule.left_bytes(), 25 + 20);
    }

    #[test]
    fn half_of_a_claimed_range_is_taken_when_nothing_else_is_left() {
        let mut schedule = Schedule::new(std::iter::once(0..100), 0);
        let first = schedule.claim(60).unwrap();
        assert_eq!(schedule.divide(10), None, "there is a range that nobody has claimed");
        let second = schedule.claim(60).unwrap();
        schedule.advance(first.id, 20);
        assert_eq!(schedule.divide(21), None, "the halves are too small");
        let halves = [schedule.divide(20), schedule.divide(20)].map(|half| half.unwrap().range);
        assert_eq!(halves, [80..100, 40..60]);
        schedule.advance(first.id, 41);
        assert!(!schedule.is_active(first.id) && schedule.is_active(second.id));
        assert_eq!(schedule.left_bytes(), 20 + 20 + 20);
    }

    #[test]
    fn one_stream_is_enough_where_there_are_no_ranges() {
        let mut schedule = Schedule::new(std::iter::once(0..100), 0);
        assert!(schedule.claim_all());
        assert!(!schedule.claim_all());
        assert_eq!(schedule.claim(10), None);
    }

    proptest! {
        #[test]
        fn every_byte_is_fetched_once_even_if_connections_break(
            steps in prop::collection::vec((1u64..50, 0u64..60, any::<bool>()), 1..200),
        ) {
            let mut schedule = Schedule::new([3..200, 250..300], 0);
            let mut fetched = Vec::new();
            let endless = std::iter::repeat((50, 50, false));
            for (length, arrives, breaks) in steps.into_iter().chain(endless) {
                let Some(claim) = schedule.claim(length) else { break };
                let position = claim.range.end.min(claim.range.start + arrives);
                fetched.extend(claim.range.start..position);
                schedule.advance(claim.id, position);
                if breaks || position < claim.range.end {
                    schedule.give_back(claim.id);
                }
            }
            prop_assert!(schedule.is_done());
            fetched.sort_unstable();
            prop_assert_eq!(fetched, (3..200).chain(250..300).collect::<Vec<_>>());
        }
    }
}
