//! Which server sent which bytes of a file.

use std::ops::Range;
use std::sync::Arc;

use blobd_registry::Sender;
use rangemap::RangeMap;

/// The senders of ranges of a file. Neighbouring ranges of one sender are one.
#[derive(Clone, Debug, Default)]
pub(super) struct Senders {
    /// Few: the mirrors, and the hosts to which they redirect.
    known: Vec<Arc<Sender>>,
    /// The places in `known`.
    ranges: RangeMap<u64, usize>,
}

impl Senders {
    /// Notes who sent a range. What was sent before stays: it is what was written.
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

    /// All senders.
    pub(super) fn all(&self) -> impl Iterator<Item = &Sender> {
        self.known.iter().map(|sender| &**sender)
    }

    /// Who sent a range, for people; `None` if that is unknown.
    pub(super) fn of(&self, range: &Range<u64>) -> Option<String> {
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
