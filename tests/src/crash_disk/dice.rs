//! What decides which state is found after a crash.

/// Decisions that follow from a seed.
#[derive(Clone, Debug)]
pub struct Dice {
    state: u64,
    mood: Mood,
}

/// What a crash does to what was not synced. The extremes lie far apart, so that throws alone would
/// rarely come near them.
#[derive(Clone, Copy, Debug)]
enum Mood {
    KeepsAll,
    LosesAll,
    Throws,
}

impl Dice {
    /// Dice of this seed; one in four keeps all, one in four loses all.
    #[must_use]
    pub const fn new(seed: u64) -> Self {
        let mood = match seed % 4 {
            0 => Mood::KeepsAll,
            1 => Mood::LosesAll,
            _ => Mood::Throws,
        };
        Self { state: seed | 1, mood }
    }

    /// Dice that lose all that was not synced.
    #[must_use]
    pub const fn losing() -> Self {
        Self { state: 1, mood: Mood::LosesAll }
    }

    /// A number below `limit`, which is not 0, the next every time.
    pub const fn below(&mut self, limit: u64) -> u64 {
        self.state ^= self.state << 13;
        self.state ^= self.state >> 7;
        self.state ^= self.state << 17;
        // The lowest bits of such a generator are its worst.
        (self.state >> 16) % limit
    }

    /// One of `versions`, which begin with the durable one and end with the newest.
    pub(super) fn choose<T: Copy>(&mut self, versions: &[T]) -> Option<T> {
        match self.mood {
            Mood::KeepsAll => versions.last().copied(),
            Mood::LosesAll => versions.first().copied(),
            Mood::Throws => {
                let index = self.below(versions.len().max(1) as u64);
                versions.get(usize::try_from(index).ok()?).copied()
            }
        }
    }
}
