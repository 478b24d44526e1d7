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
        table.last_opened.insert(model.clone(), since);
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
