//! How far the scrubber is: a file in the store's root, so that a restart goes on.

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use serde::{Deserialize, Serialize};

use crate::store::{Store, StoreError, disk};

/// A pass over all blobs, in the order of their digests.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Cursor {
    /// When the pass began that is running or was the last, Unix seconds.
    pub began: u64,
    /// The last blob that it has read; none at its start and after its end.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub last: Option<Digest>,
    /// How many blobs it has read.
    pub blobs: u64,
    /// How many bytes.
    pub bytes: u64,
    /// When the last complete pass ended, Unix seconds.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ended: Option<u64>,
}

impl Cursor {
    /// What the store remembers; a cursor at the start if that is nothing or damaged.
    #[must_use]
    pub fn load(store: &Store) -> Self {
        const MAX_BYTES: u64 = 4096;
        let path = store.path(layout::SCRUB_FILE);
        let json = disk::read_limited(&path, MAX_BYTES).ok().flatten();
        let parsed = json.map(|json| serde_json::from_slice(&json));
        parsed
            .transpose()
            .unwrap_or_else(|error| {
                tracing::warn!("{}: {error}; the scrub starts anew", path.display());
                None
            })
            .unwrap_or_default()
    }

    /// Has the store remember.
    ///
    /// # Errors
    /// [`StoreError::Io`].
    pub fn save(&self, store: &Store) -> Result<(), StoreError> {
        let path = store.path(layout::SCRUB_FILE);
        let temporary = path.with_extension("json.new");
        let json = serde_json::to_vec(self).map_err(|error| StoreError::io("encode", &path)(error.into()))?;
        store.disk().replace_file(&temporary, &path, &json, 0o644)
    }

    /// How long to wait at `now` before a pass is to begin or to go on. `period` is the time from
    /// the beginning of one pass to that of the next.
    #[must_use]
    pub fn due_in(&self, now: u64, period: Duration) -> Duration {
        // Begun in the future: the clock was wrong, then or now.
        if self.is_running() || self.began > now {
            return Duration::ZERO;
        }
        Duration::from_secs(self.began.saturating_add(period.as_secs()).saturating_sub(now))
    }

    /// Begins a pass, unless one is running.
    pub fn begin(&mut self, now: u64) {
        if !self.is_running() {
            *self = Self { began: now, last: None, blobs: 0, bytes: 0, ended: self.ended };
        }
    }

    /// Enters a blob that has been read.
    pub fn advance(&mut self, digest: Digest, bytes: u64) {
        self.last = Some(digest);
        self.blobs = self.blobs.saturating_add(1);
        self.bytes = self.bytes.saturating_add(bytes);
    }

    /// Ends the pass.
    pub fn end(&mut self, now: u64) {
        // Not before it began, should the clock have been set back meanwhile.
        (self.last, self.ended) = (None, Some(now.max(self.began)));
    }

    /// Whether a pass has begun and not ended.
    fn is_running(&self) -> bool {
        self.began > self.ended.unwrap_or_default()
    }
}

/// Seconds since 1970, by the machine's clock.
#[must_use]
pub fn unix_seconds() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86400);

    #[test]
    fn cursor_reads_back_as_it_was_saved() {
        let folder = tempfile::tempdir().unwrap();
        let store = Store::open(folder.path()).unwrap();
        assert_eq!(Cursor::load(&store), Cursor::default());
        let mut cursor = Cursor::default();
        cursor.begin(1000);
        cursor.advance(Digest::of(b"x"), 7);
        cursor.save(&store).unwrap();
        assert_eq!(Cursor::load(&store), cursor);
        assert!(!store.path("scrub.json.new").exists());
        std::fs::write(store.path("scrub.json"), "{\"last\":7").unwrap();
        assert_eq!(Cursor::load(&store), Cursor::default());
    }

    #[test]
    fn pass_that_was_interrupted_goes_on_at_once() {
        let mut cursor = Cursor::default();
        cursor.begin(1000);
        assert_eq!(cursor.due_in(1001, DAY), Duration::ZERO, "in front of the first blob");
        cursor.advance(Digest::of(b"x"), 7);
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
}
