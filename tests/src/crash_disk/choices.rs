//! Chooses the state after a crash.

/// Pseudo-random choices that depend only on a seed.
#[derive(Clone, Debug)]
pub struct CrashChoices {
    state: u64,
    mode: Mode,
}

/// What a crash does to unsynced data. The extremes have their own modes, because random choices rarely give
/// them.
#[derive(Clone, Copy, Debug)]
enum Mode {
    KeepsAll,
    LosesAll,
    Random,
}

impl CrashChoices {
    /// The choices of a seed. One seed in four keeps all unsynced data, one in four loses all of it.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        let mode = match seed % 4 {
            0 => Mode::KeepsAll,
            1 => Mode::LosesAll,
            _ => Mode::Random,
        };
        Self { state: seed | 1, mode }
    }

    /// Choices that lose all unsynced data.
    #[must_use]
    pub const fn losing_all() -> Self {
        Self { state: 1, mode: Mode::LosesAll }
    }

    /// The next number below `limit`, which must not be 0.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        // The lowest bits of an xorshift generator are the least random.
        (self.state >> 16) % limit
    }

    /// One of `versions`, which are sorted from the durable one to the newest.
    pub(super) fn choose<T: Copy>(&mut self, versions: &[T]) -> Option<T> {
        match self.mode {
            Mode::KeepsAll => versions.last().copied(),
            Mode::LosesAll => versions.first().copied(),
            Mode::Random => {
                let index = self.below(versions.len().max(1) as u64);
                versions.get(usize::try_from(index).ok()?).copied()
            }
        }
    }
}
