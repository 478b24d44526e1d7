//! From HTTP to frames.

use blobd_client::protocol::UPGRADE;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE as UPGRADE_HEADER};
use hyper::upgrade::OnUpgrade;
use hyper::{Request, StatusCode};

use super::body::{Answer, empty_answer};
use crate::session::FrameStream;
use crate::socket::{ClientSocket, HttpIo};

/// A request that asks for frames.
pub(super) struct Upgrade {
    switched: OnUpgrade,
}

impl Upgrade {
    /// Takes the connection's future from the request, whose body can still be read after.
    pub(super) fn requested(request: &mut Request<Incoming>) -> Result<Self, ErrorBody> {
        let asked_for = request.headers().get(UPGRADE_HEADER);
        if asked_for.is_some_and(|protocol| protocol.as_bytes().eq_ignore_ascii_case(UPGRADE.as_bytes())) {
            return Ok(Self { switched: hyper::upgrade::on(request) });
        }
        let message = format!("{}: needs `Upgrade: {UPGRADE}`", request.uri().path());
        Err(ErrorBody::new(ErrorCode::InvalidRequest, message).with_hint("docs/PROTOCOL.md shows how"))
    }

    /// Answers 101 and serves the connection once it has switched. `max_fds` is how many
    /// descriptors the client may send.
    pub(super) fn accept<S>(
        self,
        max_fds: usize,
        serve: impl FnOnce(FrameStream) -> S + Send + 'static,
    ) -> Answer
    where
        S: Future<Output = ()> + Send,
    {
        let Self { switched } = self;
        tokio::spawn(async move {
            match bare_socket(switched).await {
                Some(socket) => serve(FrameStream::new(socket, max_fds)).await,
                None => tracing::debug!("a peer did not switch to {UPGRADE} as it had asked"),
            }
        });
        let mut answer = empty_answer(StatusCode::SWITCHING_PROTOCOLS);
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        answer.headers_mut().insert(UPGRADE_HEADER, HeaderValue::from_static(UPGRADE));
        answer
    }
}

/// The bare socket. A client that sends before the switch does not keep to the protocol, and is not served.
async fn bare_socket(upgrade: OnUpgrade) -> Option<ClientSocket> {
    let parts = upgrade.await.ok()?.downcast::<HttpIo>().ok()?;
    parts.read_buf.is_empty().then(|| parts.io.into_socket())
}
