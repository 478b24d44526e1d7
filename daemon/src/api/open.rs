//! `POST /v1/open` and `POST /v1/import`, which upgrade the connection.

use std::sync::Arc;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{ImportParams, OpenParams, OpenPurpose};
use hyper::Request;
use hyper::body::Incoming;

use super::Caller;
use super::body::HttpResponse;
use super::upgrade::Upgrade;
use crate::ops::{self, Located};
use crate::permits::Exhausted;
use crate::principal::Principal;
use crate::read_model::{Reads, read_model};
use crate::session::{serve_import, serve_open};
use crate::state::Daemon;

/// Opens a model, and sends its descriptors after the upgrade.
pub(super) async fn open(caller: &Caller, mut request: Request<Incoming>) -> Result<HttpResponse, ErrorBody> {
    let upgrade = Upgrade::requested(&mut request)?;
    let (daemon, peer) = (Arc::clone(&caller.daemon), caller.peer.clone());
    let lasting = caller.lasting()?;
    let (params, params_permit): (OpenParams, _) = caller.counted_params(request).await?;
    let opening = daemon.limits.opening_for(peer.uid).await?;
    let (reference, holder) = (params.reference.clone(), peer.description());
    // The cache of responses does not depend on the purpose.
    let params = Arc::new(OpenParams { purpose: OpenPurpose::default(), ..params });
    let (uid, policy) = (peer.uid, caller.policy());
    let open = move |daemon: &Daemon| {
        ops::open(&daemon.store, &daemon.open_cache, &params, &policy, uid, holder.clone())
    };
    let limits = &daemon.limits;
    // Concurrent opens of one large model share one response, which is counted once.
    let count = async |located: &Located| {
        let response = &located.response;
        if response.memory.get().is_none()
            && let Some(permit) = limits.memory_for(peer.uid, response.bytes()).await?
        {
            // Not set meanwhile: one request at a time reads the model.
            let _ = response.memory.set(permit);
        }
        Ok(())
    };
    let (located, model) = read_model(&daemon, peer.uid, &reference, Reads::Recipes, open, count).await?;
    drop(params_permit);
    let memory = match model.is_counted() {
        true => None,
        false => limits.memory_for(peer.uid, located.response.bytes()).await?,
    };
    let permits = (opening, memory, model);
    let (serving, record) = (Arc::clone(&daemon), Arc::clone(&caller.record));
    record.defer();
    Ok(upgrade.accept(0, move |stream| serve_open(serving, stream, peer, record, located, permits, lasting)))
}

/// Imports a file whose descriptor the client sends after the upgrade.
pub(super) async fn import(
    caller: &Caller,
    mut request: Request<Incoming>,
) -> Result<HttpResponse, ErrorBody> {
    let upgrade = Upgrade::requested(&mut request)?;
    let (daemon, peer) = (Arc::clone(&caller.daemon), caller.peer.clone());
    let lasting = caller.lasting()?;
    let params: ImportParams = caller.params(request).await?;
    let requested = daemon.work.requested_imports.try_acquire(peer.uid);
    let requested = requested.map_err(|Exhausted| too_many_imports(&peer))?;
    caller.socket.take_descriptors();
    let record = Arc::clone(&caller.record);
    record.defer();
    let serve = async move |stream| {
        serve_import(daemon, stream, peer, record, params, requested).await;
        drop(lasting);
    };
    Ok(upgrade.accept(1, serve))
}

fn too_many_imports(peer: &Principal) -> ErrorBody {
    let message = format!("import: uid {} has too many imports waiting for their turn", peer.uid);
    ErrorBody::new(ErrorCode::Busy, message).with_hint("wait until some of them are done")
}
