//! Pulls that the page has begun. They go on when the page is closed or loaded again, and stop when the command ends.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError};
use std::thread;

use blobd_cli_common::connect::client_error;
use blobd_cli_common::internal;
use blobd_client::client::Stop;
use blobd_client::error::ClientError;
use blobd_client::protocol::pull::PullDone;
use blobd_client::protocol::request::PullParams;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::{Client, ErrorBody, ErrorCode};

/// At a time: the daemon lets further ones wait for their turn.
const MAX_RUNNING: usize = 16;
/// How many that have ended are listed.
const MAX_ENDED: usize = 20;

#[derive(Debug)]
pub(super) struct Pulls {
    client: Client,
    begun: Mutex<VecDeque<Begun>>,
}

/// A pull, as the page gets it.
#[derive(Clone, Debug, Serialize)]
struct Begun {
    id: u64,
    /// As the daemon's list of pulls has it.
    source: String,
    request: PullParams,
    #[serde(flatten)]
    outcome: Outcome,
    #[serde(skip)]
    stop: Stop,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(tag = "state", rename_all = "snake_case")]
enum Outcome {
    Running,
    Stopped,
    Failed { error: ErrorBody },
    Done { pulled: Box<PullDone> },
}

/// The pulls of this page, the oldest first.
#[derive(Debug, Serialize)]
pub(super) struct BegunPulls {
    /// The process that the daemon's list of pulls names.
    pid: u32,
    pulls: Vec<Begun>,
}

/// A pull that has begun, or is to be stopped.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(super) struct Started {
    id: u64,
}

impl Pulls {
    pub(super) fn new(client: Client) -> Arc<Self> {
        Arc::new(Self { client, begun: Mutex::default() })
    }

    /// Begins a pull with the parameters that the page has sent.
    pub(super) fn begin(self: &Arc<Self>, body: &[u8]) -> Result<Started, ErrorBody> {
        let request: PullParams = parsed(body)?;
        let (client, stop) = self.client.stoppable();
        let id = self.add(&request, stop.clone())?;
        let pulls = Arc::clone(self);
        let run = move || {
            let pulled = client.pull(&request, |_event| {});
            pulls.end(id, pulled, &stop);
        };
        match thread::Builder::new().name("pull".to_owned()).spawn(run) {
            Ok(_detached) => Ok(Started { id }),
            Err(error) => {
                self.lock().retain(|pull| pull.id != id);
                Err(internal(error))
            }
        }
    }

    /// Stops the pull whose number the page has sent. What it has received is kept.
    pub(super) fn stop(&self, body: &[u8]) -> Result<Started, ErrorBody> {
        let Started { id } = parsed(body)?;
        let begun = self.lock();
        let running = begun.iter().find(|pull| pull.id == id && pull.outcome == Outcome::Running);
        let Some(pull) = running else {
            return Err(ErrorBody::new(ErrorCode::NotFound, "pull: has ended already"));
        };
        pull.stop.stop();
        Ok(Started { id })
    }

    pub(super) fn stop_all(&self) {
        self.lock().iter().for_each(|pull| pull.stop.stop());
    }

    pub(super) fn list(&self) -> BegunPulls {
        BegunPulls { pid: std::process::id(), pulls: self.lock().iter().cloned().collect() }
    }

    fn add(&self, request: &PullParams, stop: Stop) -> Result<u64, ErrorBody> {
        let mut begun = self.lock();
        let running = begun.iter().filter(|pull| pull.outcome == Outcome::Running).count();
        if running >= MAX_RUNNING {
            let message = format!("pull: {running} pulls of this page are running");
            return Err(ErrorBody::new(ErrorCode::Busy, message).with_hint("wait until one has ended"));
        }
        let id = begun.back().map_or(1, |last| last.id.saturating_add(1));
        let (source, request) = (request.source.to_string(), request.clone());
        begun.push_back(Begun { id, source, request, outcome: Outcome::Running, stop });
        Ok(id)
    }

    fn end(&self, id: u64, pulled: Result<PullDone, ClientError>, stop: &Stop) {
        let outcome = match pulled {
            Ok(pulled) => Outcome::Done { pulled: Box::new(pulled) },
            Err(_) if stop.is_stopped() => Outcome::Stopped,
            Err(error) => Outcome::Failed { error: client_error(error) },
        };
        let mut begun = self.lock();
        if let Some(pull) = begun.iter_mut().find(|pull| pull.id == id) {
            pull.outcome = outcome;
            // Closes the connection.
            pull.stop = Stop::default();
        }
        while begun.iter().filter(|pull| pull.outcome != Outcome::Running).count() > MAX_ENDED {
            let oldest = begun.iter().position(|pull| pull.outcome != Outcome::Running);
            oldest.and_then(|place| begun.remove(place));
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Begun>> {
        self.begun.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn parsed<T: DeserializeOwned>(body: &[u8]) -> Result<T, ErrorBody> {
    let malformed = |error| ErrorBody::new(ErrorCode::InvalidRequest, format!("request body: {error}"));
    serde_json::from_slice(body).map_err(malformed)
}

#[cfg(test)]
mod tests {
    use std::io;
    use std::os::unix::net::UnixStream;

    use super::*;

    const BODY: &[u8] = br#"{"reference":"tiny"}"#;

    fn state(pulls: &Pulls, id: u64) -> Option<Outcome> {
        pulls.lock().iter().find(|pull| pull.id == id).map(|pull| pull.outcome.clone())
    }

    fn wait(is_so: impl Fn() -> bool) {
        while !is_so() {
            thread::yield_now();
        }
    }

    #[test]
    fn failed_pulls_are_listed_with_their_error_and_the_oldest_are_forgotten() {
        let pulls = Pulls::new(Client::with_connector(Arc::new(|| Err(io::ErrorKind::NotFound.into()))));
        assert_eq!(pulls.begin(b"{}").unwrap_err().code, ErrorCode::InvalidRequest);
        for expected in 1..=30 {
            let Started { id } = pulls.begin(BODY).unwrap();
            assert_eq!(id, expected);
            wait(|| matches!(state(&pulls, id), Some(Outcome::Failed { .. })));
        }
        let ids: Vec<_> = pulls.list().pulls.iter().map(|pull| pull.id).collect();
        assert_eq!(ids, (11..=30).collect::<Vec<_>>());
        assert_eq!(pulls.stop(br#"{"id":30}"#).unwrap_err().code, ErrorCode::NotFound);
    }

    /// A daemon that never responds.
    #[test]
    fn pulls_are_stopped_and_their_number_is_limited() {
        let (sender, _servers) = std::sync::mpsc::channel();
        let connector = move || {
            let (client, server) = UnixStream::pair()?;
            sender.send(server).map_err(io::Error::other)?;
            Ok(client)
        };
        let pulls = Pulls::new(Client::with_connector(Arc::new(connector)));
        for _ in 0..MAX_RUNNING {
            pulls.begin(BODY).unwrap();
        }
        assert_eq!(pulls.begin(BODY).unwrap_err().code, ErrorCode::Busy);
        pulls.stop(br#"{"id":2}"#).unwrap();
        wait(|| state(&pulls, 2) == Some(Outcome::Stopped));
        pulls.begin(BODY).unwrap();
        pulls.stop_all();
        wait(|| pulls.list().pulls.iter().all(|pull| pull.outcome == Outcome::Stopped));
    }
}
