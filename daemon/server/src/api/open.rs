//! Requests that upgrade the connection to frames.

use std::sync::Arc;

use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::request::{ImportParams, OpenParams, OpenPurpose};
use blobd_client::protocol::response::{Imported, OpenHead};
use blobd_client::protocol::route::Frames;

use super::Caller;
use super::body::{Params, Reply};
use super::read_model::{Reads, read_model};
use super::upgrade::Upgrade;
use crate::large_models::{ReadPermit, ResponseMemory};
use crate::ops::{self, Located};
use crate::permits::Exhausted;
use crate::principal::Principal;
use crate::session::{serve_import, serve_open};
use crate::state::Daemon;

/// Opens a model, and sends its descriptors after the upgrade.
pub(super) async fn open(
    caller: &Caller,
    mut params: Params<OpenParams>,
    upgrade: Upgrade,
) -> Result<Reply<Frames<OpenHead>>, ErrorBody> {
    let (daemon, peer) = (Arc::clone(&caller.daemon), caller.peer.clone());
    let lasting = caller.lasting()?;
    let opening = daemon.limits.opening_for(peer.uid).await?;
    let (reference, holder) = (params.reference.clone(), peer.description());
    // The cache of responses does not depend on the purpose.
    params.purpose = OpenPurpose::default();
    let params = Arc::new(params);
    let (uid, policy) = (peer.uid, caller.policy());
    let open = move |daemon: &Daemon| {
        ops::open(&daemon.store, &daemon.open_cache, &params, &policy, uid, holder.clone())
    };
    let count = async |located: &Located, model: &ReadPermit| {
        let response = &located.response;
        // Concurrent opens of one model share one response, which is counted once.
        if let Some(memory) = response.memory() {
            return Ok(Some(memory));
        }
        let memory = match model.claim_response() {
            Some(response) => Some(ResponseMemory::WithModel { _response: response }),
            None => {
                let permit = caller.memory(response.bytes()).await?;
                permit.map(|permit| ResponseMemory::Own { _permit: permit })
            }
        };
        Ok(memory.map(Arc::new).inspect(|memory| response.account(memory)))
    };
    let (located, model, memory) =
        read_model(caller, &reference, Reads::RecipesForResponse, open, count).await?;
    let permits = (opening, model, memory);
    let (serving, record) = (Arc::clone(&daemon), Arc::clone(&caller.record));
    record.defer();
    Ok(upgrade.accept(0, move |stream| serve_open(serving, stream, peer, record, located, permits, lasting)))
}

/// Imports a file whose descriptor the client sends after the upgrade.
pub(super) async fn import(
    caller: &Caller,
    params: Params<ImportParams>,
    upgrade: Upgrade,
) -> Result<Reply<Frames<Imported>>, ErrorBody> {
    let (daemon, peer) = (Arc::clone(&caller.daemon), caller.peer.clone());
    let lasting = caller.lasting()?;
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
