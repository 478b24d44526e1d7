//! Sessions: the peers of upgraded connections. The connection is the lease; when it closes, for
//! whatever reason, the lease ends.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use blobd_client::protocol::response::{SessionList, SessionSummary};
use blobd_store_format::reference::Reference;

use crate::ops::rfc3339;

mod admission;
mod connection;
mod import;
mod open;
mod peer;

pub(crate) use admission::{Connections, OpenSlots, Permit, Refused};
pub(crate) use connection::FrameStream;
pub(crate) use import::serve_import;
pub(crate) use open::serve_open;
pub use peer::{Peer, Right};

/// Who has what open.
#[derive(Clone, Debug, Default)]
pub struct Sessions(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    next_id: u64,
    open: BTreeMap<u64, OpenSession>,
    last_opened: BTreeMap<Reference, SystemTime>,
}

#[derive(Clone, Debug)]
struct OpenSession {
    peer: Peer,
    command: Option<String>,
    model: Reference,
    since: SystemTime,
    bytes: u64,
}

impl Sessions {
    /// Notes that a peer has opened a model with blobs of `bytes` in all.
    pub(crate) fn begin(&self, peer: &Peer, model: Reference, bytes: u64) -> SessionGuard {
        let (since, command) = (SystemTime::now(), peer.command());
        let mut table = self.lock();
        let id = table.next_id;
        table.next_id += 1;
        table.note_opened(model.clone(), since);
        table.open.insert(id, OpenSession { peer: peer.clone(), command, model, since, bytes });
        SessionGuard { sessions: self.clone(), id }
    }

    /// Everything that is open now. Reads `/etc/passwd`.
    #[must_use]
    pub fn list(&self) -> SessionList {
        // Looking up users reads a file: not while others wait for the table.
        let open: Vec<OpenSession> = self.lock().open.values().cloned().collect();
        SessionList { sessions: open.iter().map(OpenSession::summary).collect() }
    }

    /// Forgets when models were opened that are not there any more.
    pub(crate) fn keep_opened(&self, is_there: impl Fn(&Reference) -> bool) {
        self.lock().last_opened.retain(|model, _| is_there(model));
    }

    /// When a model was last opened since the daemon started.
    #[must_use]
    pub fn last_opened(&self, model: &Reference) -> Option<String> {
        self.lock().last_opened.get(model).copied().map(rfc3339)
    }

    /// The same as a time.
    #[must_use]
    pub fn last_opened_at(&self, model: &Reference) -> Option<SystemTime> {
        self.lock().last_opened.get(model).copied()
    }

    fn lock(&self) -> MutexGuard<'_, Table> {
        // Every change of the table is complete before anything could panic.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Table {
    /// More models than are in use on a machine at a time. Of those that are forgotten the index knows to
    /// an hour when they were used.
    const MAX_OPENED: usize = 4096;

    fn note_opened(&mut self, model: Reference, when: SystemTime) {
        self.last_opened.insert(model, when);
        if self.last_opened.len() > Self::MAX_OPENED {
            let oldest = self.last_opened.iter().min_by_key(|(_, when)| **when);
            if let Some(oldest) = oldest.map(|(model, _)| model.clone()) {
                self.last_opened.remove(&oldest);
            }
        }
    }
}

impl OpenSession {
    fn summary(&self) -> SessionSummary {
        SessionSummary {
            pid: self.peer.pid,
            uid: self.peer.uid,
            user: self.peer.user_name(),
            command: self.command.clone(),
            model: self.model.short(),
            since: rfc3339(self.since),
            bytes_mapped: self.bytes,
        }
    }
}

/// Ends the entry in the list when it is dropped.
#[derive(Debug)]
#[must_use]
pub(crate) struct SessionGuard {
    sessions: Sessions,
    id: u64,
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        self.sessions.lock().open.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn times_of_models_that_are_gone_or_of_too_many_are_forgotten() {
        let sessions = Sessions::default();
        let model = |number: usize| format!("m{number}").parse::<Reference>().unwrap();
        for number in 0..=Table::MAX_OPENED {
            let when = SystemTime::UNIX_EPOCH + Duration::from_secs(1 + number as u64);
            sessions.lock().note_opened(model(number), when);
        }
        assert_eq!(sessions.lock().last_opened.len(), Table::MAX_OPENED);
        assert!(sessions.last_opened_at(&model(0)).is_none(), "the oldest");
        sessions.keep_opened(|there| *there == model(7));
        assert!(sessions.last_opened_at(&model(7)).is_some());
        assert_eq!(sessions.lock().last_opened.len(), 1);
    }
}
