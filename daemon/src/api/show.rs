//! `GET /v1/models/…` and `GET /v1/heads/…`: describe one model.

use blobd_client::protocol::error::ErrorBody;
use blobd_store_format::reference::Reference;

use super::Caller;
use super::body::{HttpResponse, details_response, raw_response};
use super::details::{DetailsStream, STREAM_BYTES};
use crate::ops;
use crate::read_model::{Reads, read_model};
use crate::state::Daemon;

pub(super) async fn show(caller: &Caller, reference: Reference) -> Result<HttpResponse, ErrorBody> {
    let (daemon, uid, named) = (&caller.daemon, caller.peer.uid, reference.clone());
    let policy = caller.policy();
    let read = move |daemon: &Daemon| {
        let mut shown = ops::outline(&daemon.store, &named)?;
        let decision = policy.decision(&daemon.store, &named)?;
        if !decision.allowed {
            // It can have whole texts, such as the template.
            shown.details.metadata.clear();
        }
        shown.details.policy = Some(decision);
        Ok(shown)
    };
    let counted = async |_: &ops::Shown| Ok(());
    let (shown, permit) = read_model(daemon, uid, &reference, Reads::Headers, read, counted).await?;
    let mut details = DetailsStream::new(shown, permit);
    if let Some(json) = details.whole() {
        let memory = daemon.limits.memory_for(uid, json.len()).await?;
        return Ok(raw_response(json, memory));
    }
    let memory = daemon.limits.memory_for(uid, details.head_bytes() + STREAM_BYTES).await?;
    Ok(details_response(details, memory))
}

pub(super) async fn heads(caller: &Caller, reference: Reference) -> Result<HttpResponse, ErrorBody> {
    let (daemon, uid, named) = (&caller.daemon, caller.peer.uid, reference.clone());
    let policy = caller.policy();
    let read = move |daemon: &Daemon| {
        policy.check_named(&daemon.store, &named)?;
        let heads = ops::heads(&daemon.store, &named)?;
        serde_json::to_vec(&heads).map_err(|error| ops::OpError::Internal(error.to_string()))
    };
    let counted = async |_: &Vec<u8>| Ok(());
    let (json, _permit) = read_model(daemon, uid, &reference, Reads::Headers, read, counted).await?;
    let memory = daemon.limits.memory_for(uid, json.len()).await?;
    Ok(raw_response(json, memory))
}
