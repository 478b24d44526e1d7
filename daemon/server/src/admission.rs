//! Limits on the number of connections, and the order in which they are begun.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Bound;
use std::sync::Arc;

use rustix::process::{Resource, getrlimit};
use tracing_mutex::stdsync::Mutex;

use crate::locks::lock;

/// Connections of all users. Each costs a few kilobytes and a descriptor.
const MAX_CONNECTIONS: usize = 8192;
/// Connections of one user, so that one user cannot block the others.
const MAX_CONNECTIONS_PER_UID: usize = 1024;
/// Connections reserved for root and the daemon's own user, so that they can always administer the daemon.
const ADMIN_CONNECTIONS: usize = 64;

/// Derived from the number of files that this process may have open.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct ConnectionLimits {
    pub(crate) total: usize,
    /// The part of `total` that only administrators may use.
    pub(crate) reserved: usize,
    pub(crate) per_uid: usize,
    /// Long-lived connections of one user: open models, imports, pulls. The others remain for short
    /// requests, such as those that end a lease.
    pub(crate) lasting_per_uid: usize,
    /// Long-lived connections of all users.
    pub(crate) lasting_total: usize,
}

impl ConnectionLimits {
    pub(crate) fn for_process() -> Self {
        let files = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
        Self::for_files(files.unwrap_or(usize::MAX))
    }

    /// At most half of all files are connections; blobs, downloads and the store need the others.
    fn for_files(files: usize) -> Self {
        let total = (files / 2).clamp(8, MAX_CONNECTIONS);
        let reserved = (total / 8).min(ADMIN_CONNECTIONS);
        let per_uid = (total - total / 4).min(MAX_CONNECTIONS_PER_UID);
        let (lasting_per_uid, lasting_total) = (per_uid - per_uid / 8, total - reserved - total / 8);
        Self { total, reserved, per_uid, lasting_per_uid, lasting_total }
    }
}

#[derive(Clone, Debug)]
pub(crate) struct Connections(Arc<Shared>);

#[derive(Debug)]
struct Shared {
    limits: ConnectionLimits,
    counts: Mutex<BTreeMap<u32, usize>>,
}

impl Connections {
    pub(crate) fn new(limits: ConnectionLimits) -> Self {
        Self(Arc::new(Shared { limits, counts: Mutex::default() }))
    }

    /// Counts one more connection, unless the user or all users together have too many. Owners also get the reserved
    /// ones.
    pub(crate) fn admit(&self, uid: u32, is_owner: bool) -> Option<ConnectionPermit> {
        let ConnectionLimits { total, reserved, per_uid, .. } = self.0.limits;
        let limit = if is_owner { total } else { total - reserved };
        let mut counts = lock(&self.0.counts);
        let all: usize = counts.values().sum();
        let own = counts.get(&uid).copied().unwrap_or_default();
        if all >= limit || own >= per_uid {
            return None;
        }
        counts.insert(uid, own + 1);
        Some(ConnectionPermit { connections: self.clone(), uid })
    }
}

/// Counts one connection until it is dropped.
#[derive(Debug)]
pub(crate) struct ConnectionPermit {
    connections: Connections,
    uid: u32,
}

impl Drop for ConnectionPermit {
    fn drop(&mut self) {
        let mut counts = lock(&self.connections.0.counts);
        if let Some(count) = counts.get_mut(&self.uid) {
            *count = count.saturating_sub(1);
        }
        counts.retain(|_, count| *count > 0);
    }
}

/// Connections that wait for their turn: one user after the other, each user's own in their order.
#[derive(Debug)]
pub(crate) struct Turns<T> {
    waiting: BTreeMap<u32, VecDeque<T>>,
    /// The user whose turn was last.
    last: u32,
}

impl<T> Default for Turns<T> {
    fn default() -> Self {
        Self { waiting: BTreeMap::new(), last: 0 }
    }
}

impl<T> Turns<T> {
    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.is_empty()
    }

    pub(crate) fn add(&mut self, uid: u32, one: T) {
        self.waiting.entry(uid).or_default().push_back(one);
    }

    pub(crate) fn next(&mut self) -> Option<T> {
        let after = self.waiting.range((Bound::Excluded(self.last), Bound::Unbounded)).next();
        let uid = *after.or_else(|| self.waiting.first_key_value())?.0;
        self.last = uid;
        let of_user = self.waiting.get_mut(&uid)?;
        let next = of_user.pop_front();
        if of_user.is_empty() {
            self.waiting.remove(&uid);
        }
        next
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn users_take_turns_however_many_of_one_wait() {
        let mut turns = Turns::default();
        for (uid, one) in [(7, "a"), (7, "b"), (7, "c"), (0, "d"), (9, "e")] {
            turns.add(uid, one);
        }
        let begun: Vec<_> = std::iter::from_fn(|| turns.next()).take(3).collect();
        assert_eq!(begun, ["a", "e", "d"]);
        turns.add(8, "f");
        let rest: Vec<_> = std::iter::from_fn(|| turns.next()).collect();
        assert_eq!(rest, ["b", "f", "c"]);
        assert!(turns.is_empty());
    }

    #[test]
    fn limits_follow_from_the_files_that_may_be_open() {
        for files in [0, 20, 100, 1024, 4096, 20_000, usize::MAX] {
            let limits = ConnectionLimits::for_files(files);
            assert!(limits.total <= 8.max(files / 2) && limits.reserved > 0, "{limits:?}");
            assert!(limits.per_uid <= limits.total - limits.reserved, "{limits:?}");
            assert!(limits.lasting_per_uid <= limits.per_uid, "{limits:?}");
            assert!(limits.lasting_total < limits.total - limits.reserved, "{limits:?}");
        }
        let limits = ConnectionLimits::for_files(1 << 20);
        assert_eq!((limits.total, limits.per_uid), (MAX_CONNECTIONS, MAX_CONNECTIONS_PER_UID));
        assert!(limits.lasting_per_uid + 100 < limits.per_uid, "plain requests are still possible");
    }

    #[test]
    fn last_connections_are_reserved_for_administrators() {
        let limits =
            ConnectionLimits { total: 6, reserved: 2, per_uid: 3, lasting_per_uid: 2, lasting_total: 3 };
        let connections = Connections::new(limits);
        let own = rustix::process::geteuid().as_raw();
        let others = [own + 1, own + 1, own + 1, own + 2];
        let held: Vec<_> = others.map(|uid| connections.admit(uid, false).unwrap()).into();
        assert!(connections.admit(own + 1, false).is_none(), "its share");
        assert!(connections.admit(own + 2, false).is_none(), "the total without the reserved part");
        let _own = [connections.admit(own, true).unwrap(), connections.admit(0, true).unwrap()];
        assert!(connections.admit(own, true).is_none(), "the total");
        drop(held);
        assert!(connections.admit(own + 2, false).is_some());
    }
}
