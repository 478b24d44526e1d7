//! `POST /v1/pull/plan`, `POST /v1/resolve` and `POST /v1/inspect`: what a registry has. Each ends soon after its client
//! disconnects.

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::request::PullParams;
use tokio::runtime::Handle;
use tokio::sync::mpsc;

use super::Caller;
use super::answer::{json_length, json_of, reduced};
use super::body::{HttpResponse, Params, raw_response};
use crate::memory_gauge::MemoryGauge;
use crate::ops;
use crate::state::Daemon;

/// Plans a pull.
pub(super) async fn plan_pull(
    caller: &Caller,
    params: Params<PullParams>,
) -> Result<HttpResponse, ErrorBody> {
    let (requester, policy, handle) = (caller.requester(), caller.policy(), Handle::current());
    let (events, _unless_dropped) = mpsc::channel(1);
    let plan = move |daemon: &Daemon| {
        let (registry, gauge) = (daemon.registry(), MemoryGauge::new(&daemon.limits.memory, requester.uid()));
        let pull = daemon.pull(&registry, &handle, requester, &policy, &params, &events);
        ops::plan_pull(ops::Pull { gauge: Some(&gauge), ..pull }, &*daemon.last_opened)
    };
    caller.respond(plan).await
}

/// Finds out which model a source names now.
pub(super) async fn resolve(caller: &Caller, params: Params<PullParams>) -> Result<HttpResponse, ErrorBody> {
    let (requester, policy, handle) = (caller.requester(), caller.policy(), Handle::current());
    let (events, _unless_dropped) = mpsc::channel(1);
    let resolve = move |daemon: &Daemon| {
        ops::resolve(daemon.pull(&daemon.registry(), &handle, requester, &policy, &params, &events))
    };
    caller.respond(resolve).await
}

/// Describes a model. Its headers are counted while they arrive, and their base64 with them.
pub(super) async fn inspect(caller: &Caller, params: Params<PullParams>) -> Result<HttpResponse, ErrorBody> {
    let (requester, policy, handle) = (caller.requester(), caller.policy(), Handle::current());
    let (events, _unless_dropped) = mpsc::channel(1);
    let inspect = move |daemon: &Daemon| {
        let (registry, gauge) = (daemon.registry(), MemoryGauge::new(&daemon.limits.memory, requester.uid()));
        let pull = daemon.pull(&registry, &handle, requester, &policy, &params, &events);
        let heads = ops::inspect(ops::Pull { gauge: Some(&gauge), ..pull })?;
        let length = json_length(&heads)?;
        let json = json_of(&heads, length)?;
        drop(heads);
        Ok((json, gauge.into_permit()))
    };
    let turn = caller.turn().await;
    let made = caller.daemon.blocking(turn.clone(), inspect).await;
    let (json, memory) = made.map_err(|error| error.body())?;
    let memory = match reduced(memory, json.len()) {
        None => caller.memory(json.len()).await?,
        counted => counted,
    };
    drop(turn);
    Ok(raw_response(json, memory))
}
