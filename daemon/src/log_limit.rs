//! Log lines that clients cause: few, however often they cause them.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Lets one line pass per user and interval, and counts the others.
#[derive(Debug)]
pub(crate) struct LogLimit {
    interval: Duration,
    users: Mutex<BTreeMap<u32, User>>,
}

#[derive(Debug)]
struct User {
    last_line: Instant,
    left_out: u64,
}

/// How many lines were left out since the last one; written behind the line that is not.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LeftOut(u64);

/// From so many users on, those who have been silent for an interval are forgotten.
const MAX_USERS_REMEMBERED: usize = 1024;

impl LogLimit {
    /// One line per user and `interval`.
    pub(crate) const fn every(interval: Duration) -> Self {
        Self { interval, users: Mutex::new(BTreeMap::new()) }
    }

    /// Whether a line that the user `uid` has caused may be written now.
    pub(crate) fn admit(&self, uid: u32) -> Option<LeftOut> {
        // Every change is complete before anything could panic.
        let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Instant::now();
        if let Some(user) = users.get_mut(&uid) {
            if now.duration_since(user.last_line) < self.interval {
                user.left_out = user.left_out.saturating_add(1);
                return None;
            }
            user.last_line = now;
            return Some(LeftOut(std::mem::take(&mut user.left_out)));
        }
        if users.len() >= MAX_USERS_REMEMBERED {
            users.retain(|_, user| now.duration_since(user.last_line) < self.interval);
        }
        users.insert(uid, User { last_line: now, left_out: 0 });
        Some(LeftOut(0))
    }
}

impl fmt::Display for LeftOut {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            0 => Ok(()),
            count => write!(f, " ({count} more lines that this user has caused were left out)"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_line_per_user_and_interval_says_how_many_were_left_out() {
        let log = LogLimit::every(Duration::from_secs(3600));
        assert_eq!(log.admit(1), Some(LeftOut(0)));
        assert_eq!((log.admit(1), log.admit(1)), (None, None));
        assert_eq!(log.admit(2), Some(LeftOut(0)), "another user");
        let past = LogLimit { interval: Duration::ZERO, ..log };
        let line = past.admit(1).expect("the interval is over").to_string();
        assert_eq!(line, " (2 more lines that this user has caused were left out)");
        assert_eq!(past.admit(1).map(|left_out| left_out.to_string()), Some(String::new()));
    }

    #[test]
    fn users_who_are_silent_are_forgotten() {
        let log = LogLimit::every(Duration::ZERO);
        for uid in 0..10_000 {
            assert!(log.admit(uid).is_some());
        }
        assert!(log.users.lock().unwrap().len() <= MAX_USERS_REMEMBERED);
    }
}
