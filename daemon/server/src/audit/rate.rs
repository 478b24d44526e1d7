//! Limits the records that a user can cause at will, and counts those that are left out: otherwise one user could
//! replace a whole class of records.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use tracing_mutex::stdsync::Mutex;

use crate::locks::lock;

/// Records of one user in one interval. A long record counts as several.
const MAX_IN_INTERVAL: usize = 1000;
const INTERVAL: Duration = Duration::from_secs(10);
/// The longest record that counts as one. Most have 300 to 400 bytes; with long messages they would fill the log
/// many times faster.
const BYTES_OF_ONE: usize = 512;
/// Changes of one user that are recorded with those of the others: this many at once, and one more in each interval.
/// With 80 MiB of records of changes, a user needs 8 weeks to displace those of other users.
const CHANGES_AT_ONCE: u32 = 2000;
const CHANGE_INTERVAL: Duration = Duration::from_secs(30);
/// Users that are counted one by one. One person may have 65,536 of them, with a user namespace.
const MAX_USERS: usize = 1024;
/// Kinds that are counted separately, of one user and of all users.
const MAX_KINDS_OF_USER: usize = 256;
const MAX_KINDS: usize = 8192;

#[derive(Debug, Default)]
pub(super) struct RateLimit {
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    /// `None` stands for all users above [`MAX_USERS`], which share one limit.
    users: BTreeMap<Option<u32>, User>,
    kinds: usize,
}

#[derive(Debug)]
struct User {
    since: Instant,
    records: usize,
    omitted: u64,
    /// The records that were left out, by kind. One record of each kind was written.
    kinds: BTreeMap<String, u64>,
}

#[derive(Debug, PartialEq, Eq)]
pub(super) struct Omission {
    /// `None` for users that were not counted one by one.
    pub(super) uid: Option<u32>,
    pub(super) records: u64,
    /// The number of records of each kind, the most frequent kind first. Records of other kinds may be missing.
    pub(super) kinds: Vec<(String, u64)>,
}

/// Finds users that make very many changes.
#[derive(Debug, Default)]
pub(super) struct ChangeBudget {
    /// `None` stands for all users above [`MAX_USERS`].
    users: Mutex<BTreeMap<Option<u32>, Changes>>,
}

/// Counts the recent changes of a user. The count drops by one in each interval.
#[derive(Debug)]
struct Changes {
    count: u32,
    /// The time of the last reduction of the count.
    until: Instant,
}

impl ChangeBudget {
    /// Whether the record of a change is written to the files of changes.
    pub(super) fn admit(&self, uid: u32, bytes: usize) -> bool {
        self.admit_at(uid, bytes, Instant::now())
    }

    fn admit_at(&self, uid: u32, bytes: usize, now: Instant) -> bool {
        let mut users = lock(&self.users);
        if users.len() >= MAX_USERS {
            users.retain(|_, changes| changes.count_at(now) > 0);
        }
        let is_known = users.contains_key(&Some(uid)) || users.len() < MAX_USERS;
        let changes = users.entry(is_known.then_some(uid)).or_insert(Changes { count: 0, until: now });
        let units = u32::try_from(bytes.div_ceil(BYTES_OF_ONE).max(1)).unwrap_or(u32::MAX);
        let count = changes.count_at(now).saturating_add(units);
        let is_admitted = count <= CHANGES_AT_ONCE;
        if is_admitted {
            changes.count = count;
        }
        is_admitted
    }
}

impl Changes {
    fn count_at(&mut self, now: Instant) -> u32 {
        let passed = now.duration_since(self.until).as_secs() / CHANGE_INTERVAL.as_secs();
        let passed = u32::try_from(passed).unwrap_or(u32::MAX);
        self.count = self.count.saturating_sub(passed);
        self.until = if self.count == 0 { now } else { self.until + CHANGE_INTERVAL.saturating_mul(passed) };
        self.count
    }
}

impl RateLimit {
    /// Whether the record is written. `kind` says what the record is about: when a user's limit is used up, one more
    /// record of each kind is written, so that a rare one cannot hide among many others.
    pub(super) fn admit(&self, uid: u32, kind: &str, bytes: usize) -> bool {
        lock(&self.state).admit(uid, kind, bytes, Instant::now())
    }

    pub(super) fn is_idle(&self) -> bool {
        lock(&self.state).users.is_empty()
    }

    /// What was left out in intervals that have ended, or until now.
    pub(super) fn take_omissions(&self, until_now: bool) -> Vec<Omission> {
        lock(&self.state).take_omissions(until_now, Instant::now())
    }
}

impl State {
    fn admit(&mut self, uid: u32, kind: &str, bytes: usize, now: Instant) -> bool {
        let is_known = self.users.contains_key(&Some(uid)) || self.users.len() < MAX_USERS;
        let new = || User { since: now, records: 0, omitted: 0, kinds: BTreeMap::new() };
        let user = self.users.entry(is_known.then_some(uid)).or_insert_with(new);
        if user.omitted == 0 && user.kinds.is_empty() && now.duration_since(user.since) >= INTERVAL {
            *user = new();
        }
        user.records = user.records.saturating_add(bytes.div_ceil(BYTES_OF_ONE).max(1));
        if user.records <= MAX_IN_INTERVAL {
            return true;
        }
        let known = user.kinds.get_mut(kind);
        if known.is_none() && user.kinds.len() < MAX_KINDS_OF_USER && self.kinds < MAX_KINDS {
            user.kinds.insert(kind.to_owned(), 0);
            self.kinds = self.kinds.saturating_add(1);
            return true;
        }
        if let Some(omitted) = user.kinds.get_mut(kind) {
            *omitted = omitted.saturating_add(1);
        }
        user.omitted = user.omitted.saturating_add(1);
        false
    }

    fn take_omissions(&mut self, until_now: bool, now: Instant) -> Vec<Omission> {
        let has_ended = |user: &User| until_now || now.duration_since(user.since) >= INTERVAL;
        let ended: Vec<_> = self.users.extract_if(.., |_, user| has_ended(user)).collect();
        self.kinds = self.users.values().map(|user| user.kinds.len()).sum();
        let omissions = ended.into_iter().filter(|(_, user)| user.omitted > 0);
        let omission = |(uid, user): (_, User)| {
            let mut kinds: Vec<_> = user.kinds.into_iter().filter(|(_, records)| *records > 0).collect();
            kinds.sort_by_key(|(_, records)| std::cmp::Reverse(*records));
            Omission { uid, records: user.omitted, kinds }
        };
        omissions.map(omission).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// How many of the records are written.
    fn admitted(state: &mut State, uid: u32, kind: &str, records: usize, now: Instant) -> usize {
        (0..records).filter(|_| state.admit(uid, kind, 300, now)).count()
    }

    #[test]
    fn records_of_each_user_are_limited_and_those_that_were_left_out_are_counted_by_kind() {
        let (mut state, now) = (State::default(), Instant::now());
        // One more is the first of its kind above the limit.
        assert_eq!(admitted(&mut state, 1, "a", MAX_IN_INTERVAL + 3, now), MAX_IN_INTERVAL + 1);
        assert_eq!(admitted(&mut state, 1, "b", 4, now), 1);
        assert_eq!(admitted(&mut state, 2, "a", 1, now), 1, "another user");
        assert_eq!(state.take_omissions(false, now), []);
        let kinds = vec![("b".to_owned(), 3), ("a".to_owned(), 2)];
        let omission = Omission { uid: Some(1), records: 5, kinds };
        assert_eq!(state.take_omissions(false, now + INTERVAL), [omission]);
        assert!(state.users.is_empty() && state.kinds == 0);
        assert_eq!(admitted(&mut state, 1, "a", 1, now + INTERVAL), 1);
    }

    #[test]
    fn interval_without_omissions_ends_by_itself() {
        let (mut state, now) = (State::default(), Instant::now());
        assert_eq!(admitted(&mut state, 1, "a", MAX_IN_INTERVAL, now), MAX_IN_INTERVAL);
        assert_eq!(admitted(&mut state, 1, "a", MAX_IN_INTERVAL, now + INTERVAL), MAX_IN_INTERVAL);
    }

    #[test]
    fn long_records_count_as_several() {
        let (mut state, now) = (State::default(), Instant::now());
        let bytes = (0..MAX_IN_INTERVAL).map(|_| 16 << 10);
        let admitted: usize = bytes.filter(|bytes| state.admit(1, "a", *bytes, now)).sum();
        assert!(admitted <= (MAX_IN_INTERVAL + 32) * BYTES_OF_ONE, "{admitted}");
    }

    #[test]
    fn changes_of_a_user_are_admitted_in_a_burst_and_then_slowly() {
        let (budget, now) = (ChangeBudget::default(), Instant::now());
        let admitted = |uid, count: u32, now| (0..count).filter(|_| budget.admit_at(uid, 300, now)).count();
        assert_eq!(admitted(1, CHANGES_AT_ONCE + 100, now), 2000);
        assert_eq!(admitted(2, 10, now), 10, "another user");
        assert_eq!(admitted(1, 10, now + CHANGE_INTERVAL * 3), 3);
        assert_eq!(admitted(1, 10, now + CHANGE_INTERVAL * 3), 0);
        assert_eq!(admitted(1, 3000, now + CHANGE_INTERVAL * 5000), 2000);
        for uid in 10..10 + 2 * MAX_USERS {
            budget.admit_at(uid.try_into().unwrap(), 300, now);
        }
        assert!(lock(&budget.users).len() <= MAX_USERS + 1);
    }

    #[test]
    fn many_users_and_kinds_take_a_limited_amount_of_memory_and_all_are_counted() {
        let (mut state, now) = (State::default(), Instant::now());
        let users = 3 * MAX_USERS;
        for uid in 0..users {
            state.admit(uid.try_into().unwrap(), "a", usize::MAX, now);
            for kind in 0..20 {
                state.admit(uid.try_into().unwrap(), &format!("{uid} {kind}"), 300, now);
            }
        }
        assert!(state.users.len() <= MAX_USERS + 1);
        assert!(state.users.values().map(|user| user.kinds.len()).sum::<usize>() <= MAX_KINDS);
        let written = state.kinds as u64;
        let omitted: u64 = state.take_omissions(true, now).iter().map(|omission| omission.records).sum();
        assert_eq!(written + omitted, users as u64 * 21);
    }
}
