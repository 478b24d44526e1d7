//! Limits the rate of log lines that clients cause.

use std::collections::BTreeMap;
use std::fmt;
use std::time::{Duration, Instant};

use tracing_mutex::stdsync::Mutex;

use crate::locks::lock;

/// Admits one line per user and interval, and counts the others.
#[derive(Debug)]
pub(crate) struct LogLimit {
    interval: Duration,
    users: Mutex<BTreeMap<u32, User>>,
}

#[derive(Debug)]
struct User {
    last_line: Instant,
    omitted: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Omitted(u64);

/// From this number of users on, those without a line in the last interval are forgotten.
const MAX_USERS_REMEMBERED: usize = 1024;

impl LogLimit {
    pub(crate) const fn every(interval: Duration) -> Self {
        Self { interval, users: Mutex::new(BTreeMap::new()) }
    }

    /// `Some` if a line that the user `uid` has caused may be written now.
    pub(crate) fn admit(&self, uid: u32) -> Option<Omitted> {
        let mut users = lock(&self.users);
        let now = Instant::now();
        if let Some(user) = users.get_mut(&uid) {
            if now.duration_since(user.last_line) < self.interval {
                user.omitted = user.omitted.saturating_add(1);
                return None;
            }
            user.last_line = now;
            return Some(Omitted(std::mem::take(&mut user.omitted)));
        }
        if users.len() >= MAX_USERS_REMEMBERED {
            users.retain(|_, user| now.duration_since(user.last_line) < self.interval);
        }
        users.insert(uid, User { last_line: now, omitted: 0 });
        Some(Omitted(0))
    }
}

impl fmt::Display for Omitted {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} more lines of this user were omitted)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_user_and_interval_says_how_many_were_omitted() {
        let log = LogLimit::every(Duration::from_secs(3600));
        assert_eq!(log.admit(1), Some(Omitted(0)));
        assert_eq!((log.admit(1), log.admit(1)), (None, None));
        assert_eq!(log.admit(2), Some(Omitted(0)), "another user");
        let past = LogLimit { interval: Duration::ZERO, ..log };
        let line = past.admit(1).expect("the interval is over").to_string();
        assert_eq!(line, " (2 more lines of this user were omitted)");
        assert_eq!(past.admit(1).map(|omitted| omitted.to_string()), Some(String::new()));
    }

    #[test]
    fn users_without_recent_lines_are_forgotten() {
        let log = LogLimit::every(Duration::ZERO);
        for uid in 0..10_000 {
            assert!(log.admit(uid).is_some());
        }
        assert!(log.users.lock().unwrap().len() <= MAX_USERS_REMEMBERED);
    }
}
