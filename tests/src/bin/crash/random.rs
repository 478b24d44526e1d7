//! Pseudo-random choices that a seed reproduces.

/// A stream of numbers that depends only on the seed and the purpose.
#[derive(Clone, Debug)]
pub(crate) struct Random(u64);

impl Random {
    /// The stream for a seed and a purpose, such as `ext4 state 17`: one state can be checked again without
    /// the states before it.
    pub(crate) fn new(seed: u64, purpose: &str) -> Self {
        let mix = |state: u64, byte: u8| (state ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        Self(purpose.bytes().fold(seed ^ 0xcbf2_9ce4_8422_2325, mix))
    }

    /// A separate stream for one of several threads.
    pub(crate) fn fork(&mut self, number: usize) -> Self {
        Self::new(self.next(), &number.to_string())
    }

    /// A number below `bound`; 0 if `bound` is 0.
    pub(crate) fn below(&mut self, bound: usize) -> usize {
        let bound = u64::try_from(bound).unwrap_or(u64::MAX).max(1);
        usize::try_from(self.next() % bound).unwrap_or_default()
    }

    /// True with a probability of one in `count`.
    pub(crate) fn one_in(&mut self, count: usize) -> bool {
        self.below(count) == 0
    }

    /// A random item.
    ///
    /// # Panics
    /// When `items` is empty.
    pub(crate) fn pick<'i, T>(&mut self, items: &'i [T]) -> &'i T {
        assert!(!items.is_empty(), "no items to choose from");
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
