//! `POST /v1/release`: ends leases.

use std::time::Duration;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::ReleaseParams;
use blobd_client::protocol::response::Released;
use blobd_store::Store;
use tokio::time::timeout;

use super::Caller;
use super::body::{HttpResponse, Params};
use crate::access::Right;
use crate::open_sessions::SessionSelector;
use crate::ops::OpError;
use crate::state::Daemon;

/// How long the response waits for the leases to end. They end in any case, and the response does not wait
/// until the space of removed models is freed.
const RELEASE_TIMEOUT: Duration = Duration::from_secs(5);

pub(super) async fn release(
    caller: &Caller,
    params: Params<ReleaseParams>,
) -> Result<HttpResponse, ErrorBody> {
    let (selector, subject) = selector(&params)?;
    let requester = caller.requester();
    let end = move |daemon: &Daemon| Ok(daemon.sessions.end(&stored(&daemon.store, selector), requester));
    let ending = caller.daemon.blocking(caller.turn().await, end).await;
    let mut ending = ending.map_err(|error: OpError| error.body())?;
    if ending.sessions.is_empty() {
        return Err(nothing_ended(caller, &subject, ending.denied));
    }
    // On a timeout the leases still end, only later.
    let _ = timeout(RELEASE_TIMEOUT, ending.ended()).await;
    let released = Released { released: ending.sessions };
    caller.record.finished(&released);
    caller.answer(&released).await
}

/// The same with the stored name of the model; a model that was removed may still be in use under its old one.
fn stored(store: &Store, selector: SessionSelector) -> SessionSelector {
    match selector {
        SessionSelector::Model(model) => SessionSelector::Model(store.resolve(&model).unwrap_or(model)),
        process => process,
    }
}

/// Which sessions to end, and their description for messages.
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
    caller.daemon.access().refusal(&caller.peer, Right::Administer, &request)
}
