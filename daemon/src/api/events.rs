//! Responses that report events, one JSON document per line.

use bytes::Bytes;
use serde::Serialize;
use tokio::sync::mpsc;

use super::body::{HttpResponse, Lines, lines_response};
use crate::permits::{Permit, PermitPool};

/// Lines that may wait for a client. Further progress is dropped, but never the last line.
const LINES_WAITING: usize = 64;

/// Starts `run` and responds with its events. Their receiver is dropped when the client disconnects, which
/// stops the work.
pub(super) fn event_response<E, R>(run: impl FnOnce(mpsc::Sender<E>) -> R) -> HttpResponse
where
    E: Serialize + Send + 'static,
    R: Future<Output = ()> + Send + 'static,
{
    let (events, waiting) = mpsc::channel(LINES_WAITING);
    let (lines, body) = mpsc::channel(LINES_WAITING);
    tokio::spawn(run(events));
    tokio::spawn(write_lines(waiting, lines));
    lines_response(Lines(body))
}

/// Waits for a permit, after sending `waiting` if none is free; `None` when the client disconnects.
pub(super) async fn permit_for<E>(
    pool: &PermitPool,
    uid: u32,
    events: &mpsc::Sender<E>,
    waiting: impl FnOnce() -> E,
) -> Option<Permit> {
    if let Ok(permit) = pool.try_acquire(uid) {
        return Some(permit);
    }
    let _ = events.try_send(waiting());
    tokio::select! {
        permit = pool.acquire(uid) => Some(permit),
        () = events.closed() => None,
    }
}

/// Ends when the client disconnects, and drops `events`, which stops the work.
async fn write_lines<E: Serialize>(mut events: mpsc::Receiver<E>, lines: mpsc::Sender<Bytes>) {
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = lines.closed() => return,
        };
        let Some(event) = event else { return };
        let mut line = serde_json::to_vec(&event).unwrap_or_default();
        line.push(b'\n');
        if lines.send(line.into()).await.is_err() {
            return;
        }
    }
}
