//! The records of the audit log, one JSON document per line.

use std::io;
use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::access::Right;
use blobd_client::protocol::audit::{AuditRecord, LogEnd, LogParams};
use blobd_client::protocol::error::{ErrorBody, ErrorCode, ErrorResponse};
use blobd_client::protocol::event::Event;
use blobd_client::protocol::route::{Events, Route};
use tokio::sync::mpsc::{self, Sender};
use tokio::sync::watch;
use tokio::time::sleep;
use tracing::Instrument as _;

use super::Caller;
use super::body::{Line, Params, Reply, lines_response};
use crate::audit::{BATCH_MEMORY, Batch, Filter, LIFECYCLE_VERBS, Latest, LogDirectory, LogEvent, LogReader};
use crate::ops::OpError;
use crate::principal::Principal;
use crate::request_record;
use crate::state::Daemon;

const DEFAULT_LIMIT: u64 = 1000;
/// Records that may wait for a client. Their batch is counted until the last of them is sent.
const RECORDS_WAITING: usize = 8;
/// The shortest time between two reads of a follower: many records within it are one batch.
const FOLLOW_INTERVAL: Duration = Duration::from_millis(100);

/// Users who do not administer the store get their own records.
pub(super) async fn log(
    caller: &Caller,
    params: Params<LogParams>,
) -> Result<Reply<Events<Box<AuditRecord>, LogEnd>>, ErrorBody> {
    let own_uid = (!caller.rights.include(Right::Administer)).then_some(caller.peer.uid);
    let filter = filter(caller, &params, own_uid).await??;
    let (daemon, peer) = (Arc::clone(&caller.daemon), caller.peer.clone());
    let (Some(directory), Some(written)) = (daemon.audit.directory(), daemon.audit.written()) else {
        return Err(is_off());
    };
    let latest = Latest {
        limit: params.limit.unwrap_or(DEFAULT_LIMIT),
        count_earlier: LogEnd::MAX_EARLIER,
        up_to: last_written(&written),
    };
    let follower = params.follow.then(|| daemon.limits.log_follower_for(peer.uid)).transpose()?;
    let lasting = caller.lasting()?;
    let (events, waiting) = mpsc::channel(RECORDS_WAITING);
    let record = Arc::clone(&caller.record);
    record.defer();
    let stream = LogStream { daemon, peer, events: events.clone(), own_only: own_uid.is_some() };
    let follow = params.follow.then_some(written);
    let work = async move {
        let last = match stream.run(Search { directory, filter, latest }, follow).await {
            Ok(end) => Event::Done(end),
            Err(Stop::ClientHasGone) => return record.cancelled(),
            Err(Stop::Failed(error)) => Event::Failed(ErrorResponse { error: record.failed(error) }),
        };
        record.succeeded();
        let _ = events.send(Line { event: last, memory: None }).await;
    };
    tokio::spawn(work.in_current_span());
    Ok(lines_response(waiting, None, [Some(lasting), follower].into_iter().flatten().collect()))
}

const OF_DAEMON: [&str; 3] = ["evict", "scrub", "audit"];

/// The verbs that a record of the audit log can have.
fn recorded_verbs() -> impl Iterator<Item = &'static str> {
    request_record::verbs().chain(OF_DAEMON).chain(LIFECYCLE_VERBS)
}

fn recorded_results() -> impl Iterator<Item = &'static str> {
    request_record::results().chain(LogEvent::ALL.map(LogEvent::name))
}

/// On a thread that may block, in the user's turn: the name of a user may be asked for at a directory server, and looking
/// for what a wrong verb may have meant takes time.
async fn filter(
    caller: &Caller,
    params: &LogParams,
    own_uid: Option<u32>,
) -> Result<Result<Filter, ErrorBody>, ErrorBody> {
    let params = params.clone();
    let parse = move |_: &Daemon| Ok(checked_filter(&params, own_uid));
    caller.daemon.blocking(caller.turn().await, parse).await.map_err(|error| error.body())
}

fn checked_filter(params: &LogParams, own_uid: Option<u32>) -> Result<Filter, ErrorBody> {
    for verb in &params.verbs {
        check("verb", verb, "pull, rm or evict", recorded_verbs)?;
    }
    for result in &params.results {
        check("result", result, "ok or denied", recorded_results)?;
    }
    let invalid = |refusal| ErrorBody::new(ErrorCode::InvalidRequest, format!("log: {refusal}"));
    Filter::new(params, own_uid).map_err(invalid)
}

/// Refuses a verb or a result that no record can have.
fn check<K: Iterator<Item = &'static str>>(
    key: &str,
    given: &str,
    examples: &str,
    known: fn() -> K,
) -> Result<(), ErrorBody> {
    /// No verb or result is nearly as long, and comparing takes as long as the text is.
    const MAX_COMPARED_BYTES: usize = 64;
    if known().any(|known| known == given) {
        return Ok(());
    }
    let message = format!("log: {key}: expected one such as {examples}, found {given:?}");
    let distance = |known: &&str| strsim::osa_distance(given, known);
    let near = if given.len() <= MAX_COMPARED_BYTES { known().min_by_key(distance) } else { None };
    let hint = match near.filter(|near| distance(near) <= 1 + given.len() / 4) {
        Some(near) => format!("did you mean {near}?"),
        None => format!("docs/USERS.md lists each {key} that is recorded"),
    };
    Err(ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint(hint))
}

fn is_off() -> ErrorBody {
    ErrorBody::new(ErrorCode::NotFound, "log: the audit log of this store is off")
        .with_hint("audit.enabled in the configuration turns it on")
}

struct Search {
    directory: Arc<LogDirectory>,
    filter: Filter,
    latest: Latest,
}

#[derive(Clone, Copy, Debug)]
enum Step {
    Found,
    /// Those that were written since, up to a number.
    Written {
        up_to: u64,
    },
}

impl Step {
    fn read(self, reader: &mut LogReader) -> io::Result<Batch> {
        match self {
            Self::Found => reader.next_found(),
            Self::Written { up_to } => reader.next_written(up_to),
        }
    }
}

/// The number of the last record that is written. Before the first one nothing is being written.
fn last_written(written: &watch::Receiver<u64>) -> u64 {
    match *written.borrow() {
        0 => u64::MAX,
        last => last,
    }
}

enum Stop {
    ClientHasGone,
    Failed(ErrorBody),
}

impl From<ErrorBody> for Stop {
    fn from(error: ErrorBody) -> Self {
        Self::Failed(error)
    }
}

impl From<OpError> for Stop {
    fn from(error: OpError) -> Self {
        Self::Failed(error.body())
    }
}

struct LogStream {
    daemon: Arc<Daemon>,
    peer: Principal,
    events: Sender<Line<Event<Box<AuditRecord>, LogEnd>>>,
    own_only: bool,
}

impl LogStream {
    async fn run(mut self, search: Search, follow: Option<watch::Receiver<u64>>) -> Result<LogEnd, Stop> {
        let reader = self.find(search).await?;
        let mut reader = self.send_all(reader, Step::Found).await?;
        if let Some(written) = follow {
            reader = self.follow(reader, written).await?;
        }
        let LogReader { unreadable_lines, earlier_records, .. } = reader;
        Ok(LogEnd { unreadable_lines, own_only: self.own_only, earlier_records })
    }

    async fn find(&self, search: Search) -> Result<LogReader, Stop> {
        let turn = self.unless_gone(self.daemon.work.surveys.acquire(self.peer.uid)).await?;
        let events = self.events.clone();
        let find = move |_: &Daemon| {
            let is_wanted = || !events.is_closed();
            let Search { directory, filter, latest } = search;
            LogReader::find(directory, filter, latest, &is_wanted).map_err(|error| failed(&error))
        };
        self.daemon.blocking(turn.into(), find).await?.ok_or(Stop::ClientHasGone)
    }

    async fn follow(
        &mut self,
        mut reader: LogReader,
        mut written: watch::Receiver<u64>,
    ) -> Result<LogReader, Stop> {
        loop {
            written.mark_unchanged();
            let up_to = last_written(&written);
            reader = self.send_all(reader, Step::Written { up_to }).await?;
            self.unless_gone(sleep(FOLLOW_INTERVAL)).await?;
            self.unless_gone(written.changed()).await?.map_err(|_stopped| Stop::ClientHasGone)?;
        }
    }

    async fn send_all(&mut self, mut reader: LogReader, step: Step) -> Result<LogReader, Stop> {
        loop {
            let (returned, may_have_more) = self.send_batch(reader, step).await?;
            if !may_have_more {
                return Ok(returned);
            }
            reader = returned;
        }
    }

    /// Reads some records on a thread that may block, and sends them. Returns whether there may be more.
    async fn send_batch(&mut self, mut reader: LogReader, step: Step) -> Result<(LogReader, bool), Stop> {
        let uid = self.peer.uid;
        let memory = self.unless_gone(self.daemon.limits.memory_for(uid, BATCH_MEMORY)).await??;
        let memory = memory.map(Arc::new);
        self.check_rights(&mut reader)?;
        let work = move |_: &Daemon| {
            let batch = step.read(&mut reader).map_err(|error| failed(&error))?;
            Ok((reader, batch))
        };
        let (reader, batch) = self.daemon.disk_work(uid, work).await?;
        for record in batch.records {
            let line = Line { event: Event::Progress(Box::new(record)), memory: memory.clone() };
            self.events.send(line).await.map_err(|_closed| Stop::ClientHasGone)?;
        }
        if self.events.is_closed() { Err(Stop::ClientHasGone) } else { Ok((reader, batch.may_have_more)) }
    }

    /// The rights may have changed since the request was made.
    fn check_rights(&mut self, reader: &mut LogReader) -> Result<(), ErrorBody> {
        let access = self.daemon.access.get();
        let rights = access.rights_of(&self.peer);
        if !rights.include(Right::Read) {
            return Err(access.refusal(&self.peer, Right::Read, Route::Log.verb()));
        }
        if !rights.include(Right::Administer) {
            self.own_only = true;
            reader.restrict_to(self.peer.uid);
        }
        Ok(())
    }

    async fn unless_gone<T>(&self, work: impl Future<Output = T>) -> Result<T, Stop> {
        tokio::select! {
            done = work => Ok(done),
            () = self.events.closed() => Err(Stop::ClientHasGone),
        }
    }
}

fn failed(error: &io::Error) -> OpError {
    OpError::Internal(format!("the audit log cannot be read: {error}"))
}

#[cfg(test)]
mod tests {
    use blobd_client::protocol::lists::MAX_LOG_CHOICES;

    use super::*;

    #[test]
    fn each_verb_and_result_that_a_record_can_have_may_be_asked_for() {
        let documented = include_str!("../../../../docs/USERS.md");
        let results = ["ok", "cancelled", "unacknowledged", "on", "off", "dropped", "omitted", "removed"];
        for result in results {
            assert!(documented.contains(&format!("`{result}`")), "{result}");
            assert!(recorded_results().any(|known| known == result), "{result}");
        }
        let params =
            |verbs: Vec<String>, results: Vec<String>| LogParams { verbs, results, ..LogParams::default() };
        let verbs: Vec<_> = recorded_verbs().map(str::to_owned).collect();
        let results: Vec<_> = recorded_results().map(str::to_owned).collect();
        assert!(verbs.len() <= MAX_LOG_CHOICES && results.len() <= MAX_LOG_CHOICES);
        checked_filter(&params(verbs, results), None).unwrap();
    }

    #[test]
    fn wrong_result_is_refused_with_the_nearest_one_however_long_it_is() {
        let refusal = |result: &str| check("result", result, "ok or denied", recorded_results).unwrap_err();
        assert_eq!(refusal("remved").hint.as_deref(), Some("did you mean removed?"));
        let long = refusal(&"removed".repeat(100_000));
        assert_eq!(long.hint.as_deref(), Some("docs/USERS.md lists each result that is recorded"));
    }
}
