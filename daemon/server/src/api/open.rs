//! Requests that upgrade the connection from HTTP to frames.

use std::sync::Arc;

use blobd_client::protocol::UPGRADE;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::pull::Imported;
use blobd_client::protocol::request::{ImportParams, OpenParams, OpenPurpose};
use blobd_client::protocol::response::OpenHead;
use blobd_client::protocol::route::Frames;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE as UPGRADE_HEADER};
use hyper::upgrade::OnUpgrade;
use hyper::{Request, StatusCode};
use tracing::Instrument as _;

use super::Caller;
use super::body::{Params, Reply, empty_response};
use super::read_model::{Reads, read_model};
use crate::large_models::{ReadPermit, ResponseMemory};
use crate::ops::{self, Located};
use crate::permits::Exhausted;
use crate::principal::Principal;
use crate::session::{FrameStream, serve_import, serve_open};
use crate::socket::{ClientSocket, HttpIo};
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

pub(super) struct Upgrade {
    switched: OnUpgrade,
}

impl Upgrade {
    /// Takes the upgrade from the request, whose body can still be read afterwards.
    pub(super) fn requested(request: &mut Request<Incoming>) -> Result<Self, ErrorBody> {
        let protocol = request.headers().get(UPGRADE_HEADER);
        if protocol.is_some_and(|protocol| protocol.as_bytes().eq_ignore_ascii_case(UPGRADE.as_bytes())) {
            return Ok(Self { switched: hyper::upgrade::on(request) });
        }
        let message = format!("{}: needs `Upgrade: {UPGRADE}`", request.uri().path());
        Err(ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint("docs/PROTOCOL.md shows how"))
    }

    /// Responds with 101, and serves the connection after the upgrade. The client may send up to `max_fds`
    /// descriptors.
    pub(super) fn accept<T, S>(
        self,
        max_fds: usize,
        serve: impl FnOnce(FrameStream) -> S + Send + 'static,
    ) -> Reply<Frames<T>>
    where
        S: Future<Output = ()> + Send,
    {
        let Self { switched } = self;
        let serving = async move {
            match upgraded_socket(switched).await {
                Some(socket) => serve(FrameStream::new(socket, max_fds)).await,
                None => tracing::debug!("peer requested {UPGRADE} but did not switch to it correctly"),
            }
        };
        tokio::spawn(serving.in_current_span());
        let mut response = empty_response(StatusCode::SWITCHING_PROTOCOLS);
        response.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        response.headers_mut().insert(UPGRADE_HEADER, HeaderValue::from_static(UPGRADE));
        Reply::new(response)
    }
}

/// The socket without HTTP; `None` if the client has sent data before the upgrade, which the protocol
/// forbids.
async fn upgraded_socket(upgrade: OnUpgrade) -> Option<ClientSocket> {
    let parts = upgrade.await.ok()?.downcast::<HttpIo>().ok()?;
    parts.read_buf.is_empty().then(|| parts.io.into_socket())
}
