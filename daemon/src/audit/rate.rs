//! Limits the records of requests that change nothing, which any user may repeat: otherwise one user could replace the
//! whole log by its own records.

use std::collections::BTreeMap;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use blobd_client::protocol::audit::AuditRecord;

use super::lock;

/// Such records of one user in one interval.
const MAX_IN_INTERVAL: u64 = 1000;
const INTERVAL: Duration = Duration::from_secs(10);
/// From this number of users on, those without a record in the last interval are forgotten.
const MAX_USERS_REMEMBERED: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct RateLimit {
    users: Mutex<BTreeMap<u32, User>>,
}

#[derive(Debug)]
struct User {
    since: Instant,
    records: u64,
    omitted: u64,
}

impl RateLimit {
    /// `None` if the record is omitted; otherwise how many of its user's records were omitted before it.
    pub(super) fn admit(&self, record: &AuditRecord) -> Option<u64> {
        self.admit_at(record, Instant::now())
    }

    fn admit_at(&self, record: &AuditRecord, now: Instant) -> Option<u64> {
        if changes_something(record) {
            return Some(0);
        }
        let mut users = lock(&self.users);
        if users.len() >= MAX_USERS_REMEMBERED {
            users.retain(|_, user| user.omitted > 0 || now.duration_since(user.since) < INTERVAL);
        }
        let user = users.entry(record.uid).or_insert(User { since: now, records: 0, omitted: 0 });
        if now.duration_since(user.since) >= INTERVAL {
            let omitted = user.omitted;
            *user = User { since: now, records: 1, omitted: 0 };
            return Some(omitted);
        }
        user.records = user.records.saturating_add(1);
        if user.records <= MAX_IN_INTERVAL {
            return Some(0);
        }
        user.omitted = user.omitted.saturating_add(1);
        None
    }
}

fn changes_something(record: &AuditRecord) -> bool {
    record.result == "ok" && !record.dry_run && !matches!(record.verb.as_str(), "open" | "release" | "verify")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(uid: u32, verb: &str, result: &str) -> AuditRecord {
        AuditRecord { uid, verb: verb.to_owned(), result: result.to_owned(), ..AuditRecord::default() }
    }

    #[test]
    fn changes_are_always_recorded_and_the_rest_at_a_limited_rate() {
        let (limit, now) = (RateLimit::default(), Instant::now());
        for _ in 0..MAX_IN_INTERVAL {
            assert_eq!(limit.admit_at(&record(1, "rm", "denied"), now), Some(0));
        }
        assert_eq!(limit.admit_at(&record(1, "open", "ok"), now), None);
        assert_eq!(limit.admit_at(&record(1, "rm", "denied"), now), None);
        assert_eq!(limit.admit_at(&record(1, "rm", "ok"), now), Some(0), "a change");
        assert_eq!(limit.admit_at(&record(2, "open", "ok"), now), Some(0), "another user");
        assert_eq!(limit.admit_at(&record(1, "open", "ok"), now + INTERVAL), Some(2));
        assert_eq!(limit.admit_at(&record(1, "open", "ok"), now + INTERVAL), Some(0));
    }
}
