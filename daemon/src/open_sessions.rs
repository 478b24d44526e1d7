//! The table of open sessions: which process has which model open.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use blobd_client::protocol::response::{SessionList, SessionSummary};
use blobd_store_format::reference::Reference;
use tokio::sync::{Notify, watch};

use crate::ops::rfc3339;
use crate::principal::{Peer, Right, UserNames};

/// Who has what open.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sessions(Arc<Mutex<Table>>);

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
    /// Tells the session to end.
    stop: Arc<Notify>,
    /// Closed when the session has ended.
    ended: watch::Receiver<()>,
}

/// Which sessions are meant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SessionSelector {
    /// Those of one process.
    Process(i32),
    /// Those that have one model open.
    Model(Reference),
}

/// Sessions that were told to end.
#[derive(Debug, Default)]
pub(crate) struct Ending {
    /// What they had open.
    pub(crate) sessions: Vec<SessionSummary>,
    /// How many more there are that the caller may not end.
    pub(crate) denied: usize,
    ended: Vec<watch::Receiver<()>>,
}

impl Ending {
    /// Waits until the last of them has ended.
    pub(crate) async fn ended(&mut self) {
        for ended in &mut self.ended {
            // An error: the sender is gone, and with it the session.
            let _ = ended.changed().await;
        }
    }
}

impl Sessions {
    /// Notes that a peer has opened a model with blobs of `bytes` in all.
    pub(crate) fn begin(&self, peer: &Peer, model: Reference, bytes: u64) -> SessionGuard {
        let (since, command) = (SystemTime::now(), peer.command());
        let mut table = self.lock();
        let id = table.next_id;
        table.next_id += 1;
        table.note_opened(model.clone(), since);
        let (stop, (ending, ended)) = (Arc::new(Notify::new()), watch::channel(()));
        let session =
            OpenSession { peer: peer.clone(), command, model, since, bytes, stop: Arc::clone(&stop), ended };
        table.open.insert(id, session);
        SessionGuard { sessions: self.clone(), id, stop, _ending: ending }
    }

    /// Tells sessions to end, if `caller` may: those of its own user, and all if it administers. Reads
    /// `/etc/passwd`.
    pub(crate) fn end(&self, which: &SessionSelector, caller: &Peer) -> Ending {
        let meant: Vec<OpenSession> =
            self.lock().open.values().filter(|session| session.is_meant(which)).cloned().collect();
        let may_end = |session: &OpenSession| session.peer.uid == caller.uid || caller.may(Right::Administer);
        let (meant, denied): (Vec<_>, Vec<_>) = meant.into_iter().partition(may_end);
        meant.iter().for_each(|session| session.stop.notify_one());
        let ended = meant.iter().map(|session| session.ended.clone()).collect();
        Ending { sessions: summaries(&meant), denied: denied.len(), ended }
    }

    /// Everything that is open now. Reads `/etc/passwd`.
    #[must_use]
    pub(crate) fn list(&self) -> SessionList {
        // Looking up users reads a file: not while others wait for the table.
        let open: Vec<OpenSession> = self.lock().open.values().cloned().collect();
        SessionList { sessions: summaries(&open) }
    }

    /// Forgets when models were opened that are not there any more.
    pub(crate) fn keep_opened(&self, is_there: impl Fn(&Reference) -> bool) {
        self.lock().last_opened.retain(|model, _| is_there(model));
    }

    /// When a model was last opened since the daemon started.
    #[must_use]
    pub(crate) fn last_opened(&self, model: &Reference) -> Option<String> {
        self.lock().last_opened.get(model).copied().map(rfc3339)
    }

    /// The same as a time.
    #[must_use]
    pub(crate) fn last_opened_at(&self, model: &Reference) -> Option<SystemTime> {
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

/// What people see of sessions.
fn summaries(sessions: &[OpenSession]) -> Vec<SessionSummary> {
    let users = UserNames::read();
    sessions.iter().map(|session| session.summary(&users)).collect()
}

impl OpenSession {
    fn is_meant(&self, which: &SessionSelector) -> bool {
        match which {
            SessionSelector::Process(pid) => self.peer.pid == *pid,
            SessionSelector::Model(model) => self.model.same_model(model),
        }
    }

    fn summary(&self, users: &UserNames) -> SessionSummary {
        SessionSummary {
            pid: self.peer.pid,
            uid: self.peer.uid,
            user: users.name_of(self.peer.uid),
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
    stop: Arc<Notify>,
    /// Dropped with the guard: those who wait for the end of the session learn of it.
    _ending: watch::Sender<()>,
}

impl SessionGuard {
    /// Waits until somebody wants the session to end.
    pub(crate) async fn stopped(&self) {
        self.stop.notified().await;
    }
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

    fn peer(pid: i32, uid: u32) -> Peer {
        Peer { pid, uid }
    }

    #[tokio::test]
    async fn caller_ends_sessions_of_its_own_user_and_an_administrator_those_of_all() {
        let own = rustix::process::geteuid().as_raw();
        let (sessions, model) = (Sessions::default(), "m".parse::<Reference>().unwrap());
        let first = sessions.begin(&peer(7, own + 1), model.clone(), 1);
        let second = sessions.begin(&peer(8, own + 2), model.clone(), 1);
        let of_model = SessionSelector::Model(model);
        let mut ending = sessions.end(&of_model, &peer(1, own + 1));
        assert_eq!((ending.sessions.len(), ending.sessions[0].pid, ending.denied), (1, 7, 1));
        first.stopped().await;
        drop(first);
        ending.ended().await;
        assert_eq!(sessions.end(&SessionSelector::Process(7), &peer(1, own)).sessions, []);
        let mut ending = sessions.end(&SessionSelector::Process(8), &peer(1, own));
        assert_eq!((ending.sessions.len(), ending.denied), (1, 0));
        second.stopped().await;
        drop(second);
        ending.ended().await;
        assert!(sessions.list().sessions.is_empty());
    }

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
