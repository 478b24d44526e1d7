//! Upgrades a connection from HTTP to frames.

use blobd_client::protocol::UPGRADE;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use blobd_client::protocol::route::Frames;
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE as UPGRADE_HEADER};
use hyper::upgrade::OnUpgrade;
use hyper::{Request, StatusCode};
use tracing::Instrument as _;

use super::body::{Reply, empty_response};
use crate::session::FrameStream;
use crate::socket::{ClientSocket, HttpIo};

/// A requested upgrade.
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
        Reply::of(response)
    }
}

/// The socket without HTTP; `None` if the client has sent data before the upgrade, which the protocol
/// forbids.
async fn upgraded_socket(upgrade: OnUpgrade) -> Option<ClientSocket> {
    let parts = upgrade.await.ok()?.downcast::<HttpIo>().ok()?;
    parts.read_buf.is_empty().then(|| parts.io.into_socket())
}
