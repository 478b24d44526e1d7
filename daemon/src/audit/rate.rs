//! Limits the records of requests that change nothing, which any user may repeat: otherwise one user could replace the
//! whole log by its own records.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tracing_mutex::stdsync::Mutex;

use super::lock;

/// Such records of one user in one interval. A long record counts as several.
const MAX_IN_INTERVAL: usize = 1000;
const INTERVAL: Duration = Duration::from_secs(10);
/// The longest record that counts as one. Most have 300 to 400 bytes; with long messages they would fill the log
/// many times faster.
const BYTES_OF_ONE: usize = 512;
/// From this number of users on, those without a record in the last interval are forgotten.
const MAX_USERS_REMEMBERED: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct RateLimit {
    users: Mutex<BTreeMap<u32, User>>,
}

#[derive(Debug)]
struct User {
    since: Instant,
    records: usize,
    omitted: u64,
}

/// Whether a record is written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Admission {
    /// Some of its user's records were omitted before it.
    Admitted {
        omitted: u64,
    },
    Omitted,
}

impl RateLimit {
    pub(super) fn admit(&self, uid: u32, bytes: usize) -> Admission {
        self.admit_at(uid, bytes, Instant::now())
    }

    fn admit_at(&self, uid: u32, bytes: usize, now: Instant) -> Admission {
        let mut users = lock(&self.users);
        if users.len() >= MAX_USERS_REMEMBERED {
            users.retain(|_, user| user.omitted > 0 || now.duration_since(user.since) < INTERVAL);
        }
        let count = bytes.div_ceil(BYTES_OF_ONE).max(1);
        let user = users.entry(uid).or_insert(User { since: now, records: 0, omitted: 0 });
        if now.duration_since(user.since) >= INTERVAL {
            let omitted = user.omitted;
            *user = User { since: now, records: count, omitted: 0 };
            return Admission::Admitted { omitted };
        }
        user.records = user.records.saturating_add(count);
        if user.records <= MAX_IN_INTERVAL {
            return Admission::Admitted { omitted: 0 };
        }
        user.omitted = user.omitted.saturating_add(1);
        Admission::Omitted
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const ADMITTED: Admission = Admission::Admitted { omitted: 0 };

    #[test]
    fn records_of_each_user_are_limited_and_those_that_were_omitted_are_counted() {
        let (limit, now) = (RateLimit::default(), Instant::now());
        for _ in 0..MAX_IN_INTERVAL {
            assert_eq!(limit.admit_at(1, 300, now), ADMITTED);
        }
        assert_eq!(limit.admit_at(1, 300, now), Admission::Omitted);
        assert_eq!(limit.admit_at(1, 300, now), Admission::Omitted);
        assert_eq!(limit.admit_at(2, 300, now), ADMITTED, "another user");
        assert_eq!(limit.admit_at(1, 300, now + INTERVAL), Admission::Admitted { omitted: 2 });
        assert_eq!(limit.admit_at(1, 300, now + INTERVAL), ADMITTED);
    }

    #[test]
    fn long_records_count_as_several() {
        let (limit, now) = (RateLimit::default(), Instant::now());
        let bytes = (0..MAX_IN_INTERVAL).map(|_| 16 << 10);
        let admitted: usize = bytes.filter(|bytes| limit.admit_at(1, *bytes, now) == ADMITTED).sum();
        assert!(admitted <= MAX_IN_INTERVAL * BYTES_OF_ONE, "{admitted}");
    }
}
