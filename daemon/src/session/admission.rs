//! How many connections there may be.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Connections of all users together. Each costs a few kilobytes and a descriptor.
const MAX_CONNECTIONS: usize = 8192;
/// Connections of one user, so that none can keep the others out.
const MAX_CONNECTIONS_PER_UID: usize = 1024;
/// How often refusals are logged: whoever connects ten thousand times must not fill the disk.
const REFUSALS_LOGGED_EVERY: Duration = Duration::from_secs(60);

/// Counts connections by user.
#[derive(Clone, Debug, Default)]
pub(crate) struct Connections(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    counts: BTreeMap<u32, usize>,
    refusal_logged: Option<Instant>,
}

/// There are too many connections.
#[derive(Debug)]
pub(crate) struct Refused {
    /// Whether the log has not been told for a while.
    pub(crate) is_news: bool,
}

impl Connections {
    /// Counts one more, unless the user or all users together have too many.
    pub(crate) fn admit(&self, uid: u32) -> Result<Permit, Refused> {
        let mut table = self.lock();
        let all: usize = table.counts.values().sum();
        let own = table.counts.entry(uid).or_default();
        if all < MAX_CONNECTIONS && *own < MAX_CONNECTIONS_PER_UID {
            *own += 1;
            return Ok(Permit { connections: self.clone(), uid });
        }
        let is_news = table.refusal_logged.is_none_or(|since| since.elapsed() > REFUSALS_LOGGED_EVERY);
        if is_news {
            table.refusal_logged = Some(Instant::now());
        }
        Err(Refused { is_news })
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Every change of the table is complete before anything could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// One counted connection.
#[derive(Debug)]
pub(crate) struct Permit {
    connections: Connections,
    uid: u32,
}

impl Drop for Permit {
    fn drop(&mut self) {
        let counts = &mut self.connections.lock().counts;
        if let Some(count) = counts.get_mut(&self.uid) {
            *count = count.saturating_sub(1);
        }
        counts.retain(|_, count| *count > 0);
    }
}
