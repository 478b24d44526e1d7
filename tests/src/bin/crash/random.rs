//! Choices that a seed repeats.

/// A stream of numbers. Which numbers they are depends on the seed and the purpose alone.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The stream of one seed for one purpose, such as `ext4 state 17`: a single state can be
    /// looked at again without all those before it.
    pub(crate) fn new(seed: u64, purpose: &str) -> Self {
        let mix = |state: u64, byte: u8| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(purpose.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, mix))
    }

    /// A stream of its own for one of several that draw at the same time.
    pub(crate) fn fork(&mut self, number: usize) -> Self {
        Self::new(self.next(), &number.to_string())
    }

    /// A number below `bound`; 0 if there is none.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.next() % bound).unwrap_or_default()
    }

    /// True in one of `count` cases.
    pub(crate) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// Any of the items.
    ///
    /// # Panics
    /// When there is none.
    pub(crate) fn pick<'i, T>(&mut self, items: &'i [T]) -> &'i T {
        assert!(!items.is_empty(), "nothing to choose from");
        &items[self.below(items.len())]
    }

    /// Steele, Lea and Flood's SplitMix64.
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stream_depends_on_seed_and_purpose() {
        let first = |seed, purpose| Random::new(seed, purpose).next();
        assert_eq!(first(1, "a"), first(1, "a"));
        assert_ne!(first(1, "a"), first(2, "a"));
        assert_ne!(first(1, "a"), first(1, "b"));
    }
}
