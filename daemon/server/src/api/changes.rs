//! Requests that change the store or the daemon: leases, names, unfinished downloads, and the limit of pulls.

use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::access::Right;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::naming::{Removed, Renamed, UndoParams, Undone};
use blobd_client::protocol::params::NoParams;
use blobd_client::protocol::request::{LimitParams, ReleaseParams, RemoveParams, RenameParams};
use blobd_client::protocol::response::Released;
use blobd_client::protocol::signatures::{SignParams, Signed};
use blobd_client::protocol::space::{DroppedDownloads, RemovePartialsParams};
use blobd_client::protocol::upkeep::PullLimit;
use blobd_store::Store;
use tokio::time::timeout;

use super::body::{Answer, Params};
use super::{Caller, Change};
use crate::open_sessions::SessionSelector;
use crate::ops::{self, OpError};
use crate::state::Daemon;
use crate::verb_log::NewPullLimit;

/// More than a removed model or a refused name takes in the answer, as a value and as JSON, without its name.
const REMOVED_BYTES: usize = 2 << 10;

pub(super) async fn remove(caller: &Caller, params: Params<RemoveParams>) -> Answer<Removed> {
    let is_selection = params.unused || params.older_than_seconds.is_some() || !params.patterns.is_empty();
    let selected = if is_selection { caller.store_size().await.models(REMOVED_BYTES) } else { 0 };
    let given = (params.references.len() + params.patterns.len()).saturating_mul(REMOVED_BYTES);
    let memory = caller.reserve(selected.saturating_add(given)).await?;
    let (requester, record) = (caller.requester(), Arc::clone(&caller.record));
    let remove = move |daemon: &Daemon| {
        let removed = ops::remove(&daemon.store, &*daemon.last_opened, requester, &params);
        removed.inspect(|removed| record.finished(removed))
    };
    caller.respond_within(memory, (caller.turns)(&caller.daemon), remove).await
}

pub(super) fn rename(change: &Change<'_, RenameParams>) -> Result<Renamed, OpError> {
    let renamed = ops::rename(change.store, change.requester, change.policy, change.params)?;
    // The source may have been given by its ID.
    if let Ok(old) = renamed.from.parse() {
        change.daemon.sessions.rename(&old, &change.params.target, renamed.digest);
    }
    Ok(renamed)
}

pub(super) fn undo(change: &Change<'_, UndoParams>) -> Result<Undone, OpError> {
    let undone = ops::undo(change.store, change.requester, change.policy, change.params)?;
    for name in undone.names.iter().filter(|_| !undone.dry_run) {
        let renamed =
            name.renamed_from.as_ref().and_then(|old| Some((old.parse().ok()?, name.name.parse().ok()?)));
        if let Some(((old, new), digest)) = renamed.zip(name.digest) {
            change.daemon.sessions.rename(&old, &new, digest);
        }
    }
    Ok(undone)
}

pub(super) fn sign(change: &Change<'_, SignParams>) -> Result<Signed, OpError> {
    ops::sign(change.store, change.policy, change.params)
}

pub(super) fn remove_partials(
    change: &Change<'_, RemovePartialsParams>,
) -> Result<DroppedDownloads, OpError> {
    let (uid, may_drop_all) = (change.requester.uid(), change.requester.may_administer());
    ops::remove_partials(change.store, &change.daemon.transfers, change.params, uid, may_drop_all)
}

pub(super) async fn limit(caller: &Caller, _: Params<NoParams>) -> Answer<PullLimit> {
    caller.answer(&pull_limit(&caller.daemon)).await
}

pub(super) async fn set_limit(caller: &Caller, params: Params<LimitParams>) -> Answer<PullLimit> {
    let before = pull_limit(&caller.daemon);
    caller.daemon.transfers.limit.set(params.bytes_per_second);
    let limit = pull_limit(&caller.daemon);
    caller.record.finished(&NewPullLimit { limit, before });
    caller.answer(&limit).await
}

fn pull_limit(daemon: &Daemon) -> PullLimit {
    PullLimit { bytes_per_second: daemon.transfers.limit.get() }
}

/// How long a response waits for the leases to end. It does not wait for the space of removed models to be freed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) async fn release(caller: &Caller, params: Params<ReleaseParams>) -> Answer<Released> {
    let (selector, subject) = selector(&params)?;
    let requester = caller.requester();
    let end = move |daemon: &Daemon| Ok(daemon.sessions.end(&stored(&daemon.store, selector), requester));
    let mut ending = caller.daemon.blocking(caller.turn().await, end).await?;
    if ending.sessions.is_empty() {
        return Err(nothing_ended(caller, &subject, ending.denied));
    }
    // On a timeout the leases still end, only later.
    let _ = timeout(RELEASE_TIMEOUT, ending.ended()).await;
    let released = Released { released: ending.sessions };
    caller.record.finished(&released);
    caller.answer(&released).await
}

/// Uses the stored name of the model. A model that was removed may still be in use under its old one.
fn stored(store: &Store, selector: SessionSelector) -> SessionSelector {
    match selector {
        SessionSelector::Model(model) => {
            SessionSelector::Model(store.names().resolve(&model).unwrap_or(model))
        }
        process => process,
    }
}

fn selector(params: &ReleaseParams) -> Result<(SessionSelector, String), ErrorBody> {
    match (params.pid, params.reference.clone()) {
        (Some(pid), None) if pid > 0 => Ok((SessionSelector::Process(pid), format!("process {pid}"))),
        (None, Some(model)) => {
            let subject = format!("model {}", model.short());
            Ok((SessionSelector::Model(model), subject))
        }
        _ => {
            let message = "release: wrong parameters: expected either a pid above 0 or a reference";
            Err(ErrorBody::new(ErrorCode::InvalidRequest, message))
        }
    }
}

fn nothing_ended(caller: &Caller, subject: &str, denied: usize) -> ErrorBody {
    if denied == 0 {
        let message = format!("{subject}: no leases");
        return ErrorBody::new(ErrorCode::NotFound, message).with_hint("`blobd ps` lists them");
    }
    let request = format!("{subject}, {denied} leases of other users");
    caller.daemon.access.get().refusal(&caller.peer, Right::Administer, &request)
}
