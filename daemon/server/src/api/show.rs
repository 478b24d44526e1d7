//! Requests that describe one model.

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::fit::{FitParams, FitReport};
use blobd_client::protocol::response::ModelDetails;
use blobd_client::protocol::route::Bytes;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::Caller;
use super::answer::{json_length, json_of, reduced};
use super::body::{Answer, Params, Reply, details_response, raw_response};
use super::details::{DetailsStream, STREAM_BYTES};
use super::read_model::{Reads, read_model};
use crate::large_models::{ReadPermit, ResponseMemory};
use crate::ops;
use crate::state::Daemon;

/// A description that is sent at once or part by part.
enum Described {
    Whole(Vec<u8>),
    Parts(Box<DetailsStream>),
}

impl Described {
    fn bytes(&self) -> usize {
        match self {
            Self::Whole(json) => json.len(),
            Self::Parts(details) => details.head_bytes() + STREAM_BYTES,
        }
    }
}

pub(super) async fn show(caller: &Caller, reference: Params<Reference>) -> Answer<ModelDetails> {
    let (named, policy) = (reference.clone(), caller.policy());
    let read = move |daemon: &Daemon| {
        let mut shown = ops::outline(&daemon.store, &named)?;
        let decision = policy.decision(&daemon.store, &named)?;
        if !decision.allowed {
            // It can have whole texts, such as the template.
            shown.details.metadata.clear();
        }
        shown.details.policy = Some(decision);
        let mut details = DetailsStream::new(shown);
        Ok(match details.whole() {
            Some(json) => Described::Whole(json),
            None => Described::Parts(Box::new(details)),
        })
    };
    let count = async |described: &Described, _: &_| caller.memory(described.bytes()).await;
    let (described, permit, memory) = read_model(caller, &reference, Reads::Headers, read, count).await?;
    Ok(Reply::of(match described {
        Described::Whole(json) => raw_response(json, memory),
        Described::Parts(details) => details_response(details.within(permit), memory),
    }))
}

/// What the model needs to run, by its headers and the settings in the query.
pub(super) async fn fit(caller: &Caller, params: Params<(Reference, FitParams)>) -> Answer<FitReport> {
    let (reference, params) = (*params).clone();
    let (named, policy, holder) = (reference.clone(), caller.policy(), caller.peer.description());
    let read = move |daemon: &Daemon| {
        policy.check_named(&daemon.store, &named)?;
        match ops::fit(&daemon.store, &named, &params, holder.clone())? {
            Ok(report) => json_of(&report, json_length(&report)?).map(Ok),
            Err(refused) => Ok(Err(refused)),
        }
    };
    let count = async |json: &Result<Vec<u8>, ErrorBody>, model: &ReadPermit| {
        if let Some(response) = model.claim_response() {
            return Ok(Some(ResponseMemory::WithModel { _response: response }));
        }
        let permit = caller.memory(json.as_ref().map_or(0, Vec::len)).await?;
        Ok(permit.map(|permit| ResponseMemory::Own { _permit: permit }))
    };
    let (json, _read, memory) = read_model(caller, &reference, Reads::AllHeaders, read, count).await?;
    Ok(Reply::of(raw_response(json?, memory)))
}

/// Memory of a request for each byte of a manifest: the text, and what it is parsed into.
const BYTES_PER_MANIFEST_BYTE: usize = 4;

pub(super) async fn manifest(
    caller: &Caller,
    reference: Params<Reference>,
) -> Result<Reply<Bytes<Manifest>>, ErrorBody> {
    let daemon = &caller.daemon;
    let named = reference.clone();
    let weigh = move |daemon: &Daemon| Ok(daemon.store.names().manifest_length(&named)?);
    let length = daemon.blocking(caller.turn().await, weigh).await.map_err(|error| error.body())?;
    let length = usize::try_from(length).unwrap_or(usize::MAX);
    let memory = caller.memory(length.saturating_mul(BYTES_PER_MANIFEST_BYTE)).await?;
    let read = move |daemon: &Daemon| {
        Ok(daemon.store.names().manifest(&daemon.store.names().resolve(&reference)?)?.raw().to_vec())
    };
    let json = daemon.blocking(caller.turn().await, read).await.map_err(|error| error.body())?;
    let memory = reduced(memory, json.len());
    Ok(Reply::of(raw_response(json, memory)))
}
