//! How many connections there may be, and how many models on their way.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use blobd_client::protocol::MAX_FDS_PER_BATCH;
use rustix::process::{Resource, getrlimit};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};

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

/// Room for models that are on their way to clients. Each has up to two batches of descriptors in the
/// daemon until its client takes them, and one who never does must leave some for the others.
#[derive(Debug)]
pub(crate) struct OpenSlots {
    per_uid: usize,
    users: Mutex<BTreeMap<u32, Arc<Semaphore>>>,
}

impl OpenSlots {
    /// As many for each user as use up a quarter of the files that this process may have open.
    pub(crate) fn new() -> Self {
        const BATCHES: usize = 2;
        let files = getrlimit(Resource::Nofile).current.and_then(|limit| usize::try_from(limit).ok());
        let files = files.unwrap_or(usize::MAX).min(MAX_CONNECTIONS_PER_UID * BATCHES * MAX_FDS_PER_BATCH);
        Self { per_uid: (files / 4 / BATCHES / MAX_FDS_PER_BATCH).max(1), users: Mutex::default() }
    }

    /// A slot for a user's open; nothing if none becomes free in time.
    pub(crate) async fn take(&self, uid: u32) -> Option<OwnedSemaphorePermit> {
        /// A client that does not take its descriptors loses its connection after ten seconds.
        const PATIENCE: Duration = Duration::from_secs(12);
        let slots = {
            let mut users = self.users.lock().unwrap_or_else(PoisonError::into_inner);
            users.retain(|_, slots| Arc::strong_count(slots) > 1);
            let slots = || Arc::new(Semaphore::new(self.per_uid));
            Arc::clone(users.entry(uid).or_insert_with(slots))
        };
        tokio::time::timeout(PATIENCE, slots.acquire_owned()).await.ok()?.ok()
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_fills_all_own_slots_leaves_those_of_others() {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            let slots = OpenSlots { per_uid: 2, users: Mutex::default() };
            let (first, _second) = (slots.take(1).await.unwrap(), slots.take(1).await.unwrap());
            let third = slots.take(1);
            tokio::pin!(third);
            let moment = Duration::from_millis(20);
            assert!(tokio::time::timeout(moment, third.as_mut()).await.is_err(), "it waits");
            assert!(slots.take(2).await.is_some());
            drop(first);
            assert!(third.await.is_some());
        });
    }

    #[test]
    fn all_slots_of_a_user_are_a_part_of_the_files_that_may_be_open() {
        let slots = OpenSlots::new();
        let files = getrlimit(Resource::Nofile).current.unwrap_or(u64::MAX);
        let taken = (slots.per_uid * 2 * MAX_FDS_PER_BATCH) as u64;
        assert!(slots.per_uid == 1 || taken <= files / 4, "{taken} of {files}");
    }
}
