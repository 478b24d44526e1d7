//! The scrubber's progress, kept in a file in the store's root, so that a pass continues after a restart.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

use crate::{Store, StoreError};

/// A pass over all blobs, in the order of their digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cursor {
    /// When the current or last pass began, in Unix seconds.
    pub began: u64,
    /// Whether it has begun and not ended. The times cannot show this, because clocks are set.
    pub running: bool,
    /// The last blob up to which all were read; `None` at the start and after the end of a pass.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<Digest>,
    pub blobs: u64,
    pub bytes: u64,
    /// When the last complete pass ended, in Unix seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
}

/// The last second of the year 9999. Later dates cannot be written.
const LAST_SECOND: u64 = 253_402_300_799;

impl Cursor {
    /// The saved cursor; one at the start if there is none or it is damaged.
    pub fn load(store: &Store) -> Self {
        let json = store.content.scrub_record().unwrap_or_else(|error| {
            tracing::warn!("{error}; the scrub starts from the beginning");
            None
        });
        let Some(json) = json else { return Self::default() };
        let mut cursor: Self = serde_json::from_slice(&json).unwrap_or_else(|error| {
            tracing::warn!("{}: {error}; the scrub starts from the beginning", layout::SCRUB_FILE);
            Self::default()
        });
        // A file with an impossible time is ignored as a whole.
        if cursor.began.max(cursor.ended.unwrap_or_default()) > LAST_SECOND {
            return Self::default();
        }
        // Earlier versions of blobd did not write `running`.
        cursor.running |= cursor.last.is_some();
        cursor
    }

    /// Saves the cursor in the store.
    pub fn save(&self, store: &Store) -> Result<(), StoreError> {
        store.content.set_scrub_record(&StoreError::encode(self, layout::SCRUB_FILE)?)
    }

    /// How long to wait at `now` before a pass begins or continues.
    pub(crate) fn due_in(&self, now: u64, period: Duration) -> Duration {
        // If it began in the future, the clock was wrong then or is wrong now.
        if self.running || self.began > now {
            return Duration::ZERO;
        }
        Duration::from_secs(self.began.saturating_add(period.as_secs()).saturating_sub(now))
    }

    /// Begins a pass, unless one is running.
    pub fn begin(&mut self, now: u64) {
        if !self.running {
            *self = Self { began: now, running: true, ended: self.ended, ..Self::default() };
        }
    }

    /// Records that this blob and all before it were read.
    pub fn advance(&mut self, digest: Digest) {
        self.last = Some(digest);
        self.blobs = self.blobs.saturating_add(1);
    }

    /// Ends the pass.
    pub fn end(&mut self, now: u64) {
        (self.running, self.last, self.ended) = (false, None, Some(now));
    }

    /// When the last complete pass ended; `None` if that is after `now`, because then the clock was wrong.
    pub fn ended_by(&self, now: u64) -> Option<u64> {
        self.ended.filter(|ended| *ended <= now)
    }
}

/// The current time in seconds since 1970, by the machine's clock.
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86400);

    #[test]
    fn saved_cursor_is_loaded() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        assert_eq!(Cursor::load(&store), Cursor::default());
        let mut cursor = Cursor::default();
        cursor.begin(1000);
        cursor.advance(Digest::of(b"x"));
        cursor.save(&store).unwrap();
        assert_eq!(Cursor::load(&store), cursor);
        assert!(!store.path("scrub.json.new").exists());
        std::fs::write(store.path("scrub.json"), "{\"last\":7").unwrap();
        assert_eq!(Cursor::load(&store), Cursor::default());
    }

    #[test]
    fn interrupted_pass_continues_immediately() {
        let mut cursor = Cursor::default();
        cursor.begin(1000);
        assert_eq!(cursor.due_in(1001, DAY), Duration::ZERO, "before the first blob");
        cursor.advance(Digest::of(b"x"));
        let before = cursor;
        cursor.begin(2000);
        assert_eq!(cursor, before);
        assert_eq!(cursor.due_in(1001, DAY), Duration::ZERO);
    }

    #[test]
    fn next_pass_begins_a_period_after_the_last_one_did() {
        let mut cursor = Cursor::default();
        assert_eq!(cursor.due_in(1_000_000, DAY), Duration::ZERO);
        cursor.begin(1_000_000);
        cursor.end(1_000_500);
        assert_eq!(cursor.due_in(1_000_600, DAY), DAY - Duration::from_secs(600));
        assert_eq!(cursor.due_in(2_000_000, DAY), Duration::ZERO);
        assert_eq!(cursor.due_in(999_000, DAY), Duration::ZERO, "the clock was set back");
        cursor.begin(2_000_000);
        assert_eq!((cursor.blobs, cursor.ended), (0, Some(1_000_500)));
    }

    #[test]
    fn pass_continues_and_ends_with_any_clock() {
        // The last pass ended in 2100, by a wrong clock.
        let mut cursor = Cursor { began: 1_000_000, ended: Some(4_102_444_800), ..Cursor::default() };
        assert_eq!(cursor.ended_by(2_000_000), None);
        cursor.begin(2_000_000);
        cursor.advance(Digest::of(b"x"));
        assert_eq!(cursor.due_in(2_000_001, DAY), Duration::ZERO);
        cursor.begin(2_000_001);
        assert_eq!(cursor.blobs, 1, "it is the same pass");
        cursor.end(2_000_002);
        assert_eq!(cursor.ended_by(2_000_002), Some(2_000_002));
        // A pass that begins and ends within a second is complete.
        cursor.begin(3_000_000);
        cursor.end(3_000_000);
        assert_eq!(cursor.due_in(3_000_000, DAY), DAY);
        // A pass that began in the future is followed by another.
        cursor.begin(4_102_444_800);
        cursor.end(4_000_000);
        assert_eq!(cursor.due_in(4_000_000, DAY), Duration::ZERO);
        cursor.begin(4_000_000);
        assert_eq!(cursor.began, 4_000_000);
    }

    #[test]
    fn cursor_with_impossible_times_is_ignored() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        for json in [
            r#"{"began":18446744073709551615}"#,
            r#"{"began":1,"ended":253402300800,"blobs":7}"#,
            r#"{"began":-1,"blobs":7}"#,
            r#"{"began":1e300}"#,
            r#"{"began":"yesterday"}"#,
            r#"{"last":"x"}"#,
            "[]",
            "",
        ] {
            std::fs::write(store.path("scrub.json"), json).unwrap();
            assert_eq!(Cursor::load(&store), Cursor::default(), "{json}");
        }
        let last = Digest::of(b"x");
        std::fs::write(store.path("scrub.json"), format!(r#"{{"began":5,"last":"{last}","blobs":3}}"#))
            .unwrap();
        assert_eq!(
            Cursor::load(&store),
            Cursor { began: 5, running: true, last: Some(last), blobs: 3, ..Cursor::default() },
            "earlier versions did not write `running`"
        );
    }

    #[test]
    fn last_possible_time_is_accepted() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        for cursor in [
            Cursor { began: LAST_SECOND, ..Cursor::default() },
            Cursor { ended: Some(LAST_SECOND), blobs: 3, ..Cursor::default() },
        ] {
            cursor.save(&store).unwrap();
            assert_eq!(Cursor::load(&store), cursor);
        }
        let waiting = Cursor { began: 100, ..Cursor::default() };
        assert_eq!(waiting.due_in(100, DAY), DAY);
        assert!(unix_seconds() > 1_700_000_000);
    }
}
