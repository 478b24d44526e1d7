//! The table of open sessions: which process has which model open.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::SystemTime;

use blobd_client::protocol::response::{SessionList, SessionSummary};
use blobd_store::index::ModelUse;
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use tokio::sync::{Notify, watch};
use tracing_mutex::stdsync::Mutex;

use crate::locks::lock;
use crate::names::Names;
use crate::ops::rfc3339;
use crate::peer_process::PeerProcess;
use crate::principal::Principal;
use crate::requester::Requester;

/// The open sessions, and when each model was last opened.
#[derive(Clone, Debug, Default)]
pub(crate) struct Sessions(Arc<Mutex<Table>>);

#[derive(Debug, Default)]
struct Table {
    next_id: u64,
    open: BTreeMap<u64, OpenSession>,
    /// With the manifest that the name had: it may belong to another model since.
    last_opened: BTreeMap<Reference, (Digest, ModelUse)>,
}

#[derive(Clone, Debug)]
struct OpenSession {
    /// The names of the user and the model, which may change, are set later.
    summary: SessionSummary,
    model: Reference,
    manifest: Digest,
    stop: Arc<Notify>,
    ended: watch::Receiver<()>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum SessionSelector {
    Process(i32),
    Model(Reference),
}

#[derive(Debug, Default)]
pub(crate) struct Ending {
    pub(crate) sessions: Vec<SessionSummary>,
    pub(crate) denied: usize,
    ended: Vec<watch::Receiver<()>>,
}

impl Ending {
    pub(crate) async fn ended(&mut self) {
        for ended in &mut self.ended {
            // Fails when the sender is dropped, which is the end of the session.
            let _ = ended.changed().await;
        }
    }
}

impl Sessions {
    /// Records that a peer has opened a model whose blobs have `bytes` in total.
    pub(crate) fn begin(
        &self,
        peer: &Principal,
        model: Reference,
        manifest: Digest,
        bytes: u64,
    ) -> SessionGuard {
        let since = SystemTime::now();
        let PeerProcess { command, engine, container } = peer.process();
        let summary = SessionSummary {
            pid: peer.pid,
            uid: peer.uid,
            user: None,
            command,
            engine,
            container,
            model: String::new(),
            since: rfc3339(since),
            bytes_mapped: bytes,
            model_bytes: None,
            resident_bytes: None,
        };
        let (stop, (ending, ended)) = (Arc::new(Notify::new()), watch::channel(()));
        let mut table = lock(&self.0);
        let id = table.next_id;
        table.next_id += 1;
        table.note_opened(model.clone(), manifest, ModelUse { at: since, uid: Some(peer.uid) });
        let session = OpenSession { summary, model, manifest, stop: Arc::clone(&stop), ended };
        table.open.insert(id, session);
        SessionGuard { sessions: self.clone(), id, stop, _ending: ending }
    }

    /// Requests that sessions end: those of the caller's own user, or all if the caller is an administrator. Uses the
    /// name service.
    pub(crate) fn end(&self, which: &SessionSelector, caller: Requester) -> Ending {
        let matching: Vec<OpenSession> =
            lock(&self.0).open.values().filter(|session| session.matches(which)).cloned().collect();
        let may_end = |session: &OpenSession| session.summary.uid == caller.uid() || caller.may_administer();
        let (matching, denied): (Vec<_>, Vec<_>) = matching.into_iter().partition(may_end);
        matching.iter().for_each(|session| session.stop.notify_one());
        let ended = matching.iter().map(|session| session.ended.clone()).collect();
        Ending { sessions: summaries(&matching), denied: denied.len(), ended }
    }

    /// Uses the name service.
    pub(crate) fn list(&self) -> SessionList {
        // The table is not locked while the summaries are made: finding the names of users takes time.
        let open: Vec<OpenSession> = lock(&self.0).open.values().cloned().collect();
        SessionList { sessions: summaries(&open) }
    }

    /// As [`Self::list`], each with the name and the manifest of its model.
    pub(crate) fn models(&self) -> Vec<(Reference, Digest, SessionSummary)> {
        let open: Vec<OpenSession> = lock(&self.0).open.values().cloned().collect();
        let summaries = summaries(&open);
        let models = open.into_iter().map(|session| (session.model, session.manifest));
        models.zip(summaries).map(|((model, manifest), summary)| (model, manifest, summary)).collect()
    }

    pub(crate) fn keep_opened(&self, exists: impl Fn(&Reference) -> bool) {
        lock(&self.0).last_opened.retain(|model, _| exists(model));
    }

    /// Renames a model in its open sessions and in the times of last use. Sessions of another model that had the name
    /// before keep it.
    pub(crate) fn rename(&self, old: &Reference, new: &Reference, manifest: Digest) {
        let mut table = lock(&self.0);
        let is_it =
            |session: &&mut OpenSession| session.model.same_model(old) && session.manifest == manifest;
        table.open.values_mut().filter(is_it).for_each(|session| session.model = new.clone());
        let name = table.last_opened.keys().find(|model| model.same_model(old)).cloned();
        if let Some(opened) = name.and_then(|name| table.last_opened.remove(&name)) {
            table.last_opened.insert(new.clone(), opened);
        }
    }

    /// When a model was last opened by this name since the daemon started, and by whom.
    pub(crate) fn last_opened(&self, model: &Reference, manifest: Digest) -> Option<ModelUse> {
        let opened = lock(&self.0).last_opened.get(model).copied();
        opened.filter(|(of, _)| *of == manifest).map(|(_, opened)| opened)
    }

    pub(crate) fn count(&self) -> usize {
        lock(&self.0).open.len()
    }
}

impl Table {
    /// More models than one machine uses at a time. For forgotten models, the index has the time of the last use to the
    /// hour.
    const MAX_OPENED: usize = 4096;

    fn note_opened(&mut self, model: Reference, manifest: Digest, opened: ModelUse) {
        self.last_opened.insert(model, (manifest, opened));
        if self.last_opened.len() > Self::MAX_OPENED {
            let oldest = self.last_opened.iter().min_by_key(|(_, (_, opened))| opened.at);
            if let Some(oldest) = oldest.map(|(model, _)| model.clone()) {
                self.last_opened.remove(&oldest);
            }
        }
    }
}

fn summaries(sessions: &[OpenSession]) -> Vec<SessionSummary> {
    let users = Names::system();
    sessions.iter().map(|session| session.summary(&users)).collect()
}

impl OpenSession {
    fn matches(&self, which: &SessionSelector) -> bool {
        match which {
            SessionSelector::Process(pid) => {
                let SessionSummary { pid: own, engine, .. } = &self.summary;
                own == pid || engine.as_ref().is_some_and(|engine| engine.pid == *pid)
            }
            SessionSelector::Model(model) => self.model.same_model(model),
        }
    }

    fn summary(&self, users: &Names) -> SessionSummary {
        let user = users.name_of(self.summary.uid);
        SessionSummary { user, model: self.model.short(), ..self.summary.clone() }
    }
}

#[derive(Debug)]
#[must_use]
pub(crate) struct SessionGuard {
    sessions: Sessions,
    id: u64,
    stop: Arc<Notify>,
    /// Dropped with the guard, which wakes those that wait for the end of the session.
    _ending: watch::Sender<()>,
}

impl SessionGuard {
    pub(crate) async fn stopped(&self) {
        self.stop.notified().await;
    }
}

impl Drop for SessionGuard {
    fn drop(&mut self) {
        lock(&self.sessions.0).open.remove(&self.id);
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::access::Access;
    use crate::principal::tests::principal;

    fn peer(pid: i32, uid: u32) -> Principal {
        Principal { pid, ..principal(uid, 1, None) }
    }

    fn caller(uid: u32) -> Requester {
        let caller = peer(1, uid);
        Requester::new(&caller, Access::default().rights_of(&caller))
    }

    #[tokio::test]
    async fn caller_ends_sessions_of_its_own_user_and_an_administrator_those_of_all() {
        let own = rustix::process::geteuid().as_raw();
        let (sessions, model) = (Sessions::default(), "m".parse::<Reference>().unwrap());
        let first = sessions.begin(&peer(7, own + 1), model.clone(), Digest::of(b"m"), 1);
        let second = sessions.begin(&peer(8, own + 2), model.clone(), Digest::of(b"m"), 1);
        let of_model = SessionSelector::Model(model);
        let mut ending = sessions.end(&of_model, caller(own + 1));
        assert_eq!((ending.sessions.len(), ending.sessions[0].pid, ending.denied), (1, 7, 1));
        first.stopped().await;
        drop(first);
        ending.ended().await;
        assert_eq!(sessions.end(&SessionSelector::Process(7), caller(own)).sessions, []);
        let mut ending = sessions.end(&SessionSelector::Process(8), caller(own));
        assert_eq!((ending.sessions.len(), ending.denied), (1, 0));
        second.stopped().await;
        drop(second);
        ending.ended().await;
        assert!(sessions.list().sessions.is_empty());
    }

    #[test]
    fn another_model_with_the_name_is_neither_opened_nor_renamed_by_sessions_of_the_first() {
        let (sessions, name) = (Sessions::default(), "m".parse::<Reference>().unwrap());
        let (first, second) = (Digest::of(b"first"), Digest::of(b"second"));
        let guard = sessions.begin(&peer(7, 8), name.clone(), first, 1);
        assert!(sessions.last_opened(&name, first).is_some());
        assert!(sessions.last_opened(&name, second).is_none());
        let renamed: Reference = "n".parse().unwrap();
        sessions.rename(&name, &renamed, second);
        assert_eq!(sessions.list().sessions[0].model, "m:latest");
        sessions.rename(&name, &renamed, first);
        assert_eq!(sessions.list().sessions[0].model, "n:latest");
        drop(guard);
    }

    #[test]
    fn times_of_removed_models_and_the_oldest_of_too_many_are_forgotten() {
        let sessions = Sessions::default();
        let model = |number: usize| format!("m{number}").parse::<Reference>().unwrap();
        let digest = Digest::of(b"m");
        for number in 0..=Table::MAX_OPENED {
            let when = SystemTime::UNIX_EPOCH + Duration::from_secs(1 + number as u64);
            lock(&sessions.0).note_opened(model(number), digest, ModelUse { at: when, uid: Some(7) });
        }
        assert_eq!(lock(&sessions.0).last_opened.len(), Table::MAX_OPENED);
        assert!(sessions.last_opened(&model(0), digest).is_none(), "the oldest");
        sessions.keep_opened(|kept| *kept == model(7));
        assert!(sessions.last_opened(&model(7), digest).is_some());
        assert_eq!(lock(&sessions.0).last_opened.len(), 1);
    }
}
