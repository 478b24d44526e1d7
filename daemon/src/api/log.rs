//! `POST /v1/log`: the records of the audit log, one JSON document per line.

use std::io;
use std::sync::Arc;

use blobd_client::protocol::audit::{AuditRecord, LogEnd, LogEvent, LogParams};
use blobd_client::protocol::error::{ErrorBody, ErrorCode, ErrorResponse};
use tokio::sync::mpsc::{self, Sender};
use tokio::sync::watch;
use tracing::Instrument as _;

use super::Caller;
use super::body::{HttpResponse, lines_response};
use crate::access::Right;
use crate::audit::{Filter, LogDirectory, LogReader};
use crate::ops::OpError;
use crate::state::Daemon;

/// Records without a limit in the request.
const DEFAULT_LIMIT: u64 = 1000;
/// The most records of one response, whose places are kept in memory.
const MAX_LIMIT: u64 = 100_000;
/// Records that may wait for a client.
const RECORDS_WAITING: usize = 64;

/// A user that does not administer the store gets its own records.
pub(super) fn log(caller: &Caller, params: &LogParams) -> Result<HttpResponse, ErrorBody> {
    let own_uid = (!caller.rights.include(Right::Administer)).then_some(caller.peer.uid);
    let invalid = |refusal| ErrorBody::new(ErrorCode::InvalidRequest, format!("log: {refusal}"));
    let filter = Filter::new(params, own_uid).map_err(invalid)?;
    let audit = &caller.daemon.audit;
    let (Some(directory), Some(written)) = (audit.directory(), audit.written()) else { return Err(is_off()) };
    let limit = params.limit.unwrap_or(DEFAULT_LIMIT).min(MAX_LIMIT);
    let reading = Reading {
        daemon: Arc::clone(&caller.daemon),
        uid: caller.peer.uid,
        directory,
        filter,
        limit: usize::try_from(limit).unwrap_or(usize::MAX),
        follow: params.follow.then_some(written),
        own_only: own_uid.is_some(),
    };
    let lasting = caller.lasting()?;
    let (events, waiting) = mpsc::channel(RECORDS_WAITING);
    let record = Arc::clone(&caller.record);
    record.defer();
    let work = async move {
        let last = match reading.run(&events).await {
            Ok(Some(end)) => LogEvent::Done(end),
            // The client has disconnected.
            Ok(None) => return record.cancelled(),
            Err(error) => LogEvent::Failed(ErrorResponse { error: record.failed(error.body()) }),
        };
        record.succeeded();
        let _ = events.send(last).await;
    };
    tokio::spawn(work.in_current_span());
    let mut response = lines_response(waiting);
    response.body_mut().hold(lasting);
    Ok(response)
}

fn is_off() -> ErrorBody {
    ErrorBody::new(ErrorCode::NotFound, "log: the audit log of this store is off")
        .with_hint("audit.enabled in the configuration turns it on")
}

struct Reading {
    daemon: Arc<Daemon>,
    uid: u32,
    directory: Arc<LogDirectory>,
    filter: Filter,
    limit: usize,
    follow: Option<watch::Receiver<()>>,
    own_only: bool,
}

impl Reading {
    /// Returns `None` if the client disconnects.
    async fn run(self, events: &Sender<LogEvent>) -> Result<Option<LogEnd>, OpError> {
        let Self { daemon, uid, directory, filter, limit, follow, own_only } = self;
        let turn = tokio::select! {
            turn = daemon.work.surveys.acquire(uid) => turn,
            () = events.closed() => return Ok(None),
        };
        let find =
            move |_: &Daemon| LogReader::find(directory, filter, limit).map_err(|error| failed(&error));
        let mut reader = daemon.blocking(find).await?;
        drop(turn);
        loop {
            let (returned, records) = step(&daemon, uid, reader, LogReader::next_found).await?;
            reader = returned;
            if records.is_empty() {
                break;
            }
            if !send(events, records).await {
                return Ok(None);
            }
        }
        match follow {
            Some(written) => follow_log(&daemon, uid, reader, written, events).await.map(|()| None),
            None => Ok(Some(LogEnd { unreadable_lines: reader.unreadable_lines, own_only })),
        }
    }
}

/// Sends what is written until the client disconnects.
async fn follow_log(
    daemon: &Arc<Daemon>,
    uid: u32,
    mut reader: LogReader,
    mut written: watch::Receiver<()>,
    events: &Sender<LogEvent>,
) -> Result<(), OpError> {
    loop {
        written.mark_unchanged();
        let (returned, (records, may_have_more)) = step(daemon, uid, reader, LogReader::next_written).await?;
        reader = returned;
        if !send(events, records).await {
            return Ok(());
        }
        if may_have_more {
            continue;
        }
        tokio::select! {
            changed = written.changed() => if changed.is_err() { return Ok(()) },
            () = events.closed() => return Ok(()),
        }
    }
}

/// Reads some records on a thread that may block.
async fn step<T: Send + 'static>(
    daemon: &Arc<Daemon>,
    uid: u32,
    mut reader: LogReader,
    read: impl FnOnce(&mut LogReader) -> io::Result<T> + Send + 'static,
) -> Result<(LogReader, T), OpError> {
    let work = move |_: &Daemon| {
        let records = read(&mut reader).map_err(|error| failed(&error))?;
        Ok((reader, records))
    };
    daemon.disk_work(uid, work).await
}

/// Returns whether the client is still connected.
async fn send(events: &Sender<LogEvent>, records: Vec<AuditRecord>) -> bool {
    for record in records {
        if events.send(LogEvent::Record(Box::new(record))).await.is_err() {
            return false;
        }
    }
    !events.is_closed()
}

fn failed(error: &io::Error) -> OpError {
    OpError::Internal(format!("the audit log cannot be read: {error}"))
}
