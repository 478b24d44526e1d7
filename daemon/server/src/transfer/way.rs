//! How the rest of a file is requested: by ranges, or the whole file again.
//!
//! Some servers accept a range and send nothing of it, and others break every long stream at the same place. A request
//! that has failed twice without progress would fail again, so the next one is made in the other way.

/// How the next request is made.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct Way {
    is_whole: bool,
    fruitless: u32,
    /// How much had been received when the last attempt failed.
    received_bytes: u64,
}

/// After this many attempts in a row without progress the way is changed.
const MAX_FRUITLESS: u32 = 2;

impl Way {
    /// Whether the whole file is requested.
    pub(super) const fn is_whole(self) -> bool {
        self.is_whole
    }

    /// Records an attempt in which the response began and failed, and how much has been received in all. An attempt
    /// without a response says nothing about the way.
    pub(super) const fn note_failure(&mut self, received_bytes: u64) {
        if received_bytes > self.received_bytes {
            (self.fruitless, self.received_bytes) = (0, received_bytes);
        }
        self.fruitless += 1;
        if self.fruitless >= MAX_FRUITLESS {
            (self.fruitless, self.is_whole) = (0, !self.is_whole);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn way_is_changed_after_two_attempts_without_progress() {
        let mut way = Way::default();
        let ways: Vec<bool> = [0, 0, 0, 0, 9, 20, 20, 20]
            .map(|received| {
                way.note_failure(received);
                way.is_whole()
            })
            .to_vec();
        assert_eq!(ways, [false, true, true, false, false, false, true, true]);
    }
}
