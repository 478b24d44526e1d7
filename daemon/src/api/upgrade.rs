//! From HTTP to frames.

use std::sync::Arc;

use blobd_client::protocol::UPGRADE;
use blobd_client::protocol::error::{ErrorBody, ErrorCode};
use bytes::Bytes;
use http_body_util::{Either, Full};
use hyper::body::Incoming;
use hyper::header::{CONNECTION, HeaderValue, UPGRADE as UPGRADE_HEADER};
use hyper::upgrade::OnUpgrade;
use hyper::{Request, Response, StatusCode};
use hyper_util::rt::TokioIo;
use tokio::net::UnixStream;

use super::body::Answer;
use crate::session::{FrameStream, Permit};

/// A request that asks for frames.
pub(super) struct Upgrade {
    switched: OnUpgrade,
    /// The connection counts for as long as it is open, also after HTTP.
    permit: Option<Arc<Permit>>,
}

impl Upgrade {
    /// Takes the connection's future from the request, whose body can still be read after.
    pub(super) fn requested(request: &mut Request<Incoming>) -> Result<Self, ErrorBody> {
        let asked_for = request.headers().get(UPGRADE_HEADER);
        if asked_for.is_some_and(|protocol| protocol.as_bytes().eq_ignore_ascii_case(UPGRADE.as_bytes())) {
            let permit = request.extensions().get::<Arc<Permit>>().cloned();
            return Ok(Self { switched: hyper::upgrade::on(request), permit });
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
        let Self { switched, permit } = self;
        tokio::spawn(async move {
            let _counted = permit;
            match bare_socket(switched).await {
                Some(stream) => serve(FrameStream::new(stream, max_fds)).await,
                None => tracing::info!("a peer did not switch to {UPGRADE} as it had asked"),
            }
        });
        let mut answer = Response::new(Either::Left(Full::new(Bytes::new())));
        *answer.status_mut() = StatusCode::SWITCHING_PROTOCOLS;
        answer.headers_mut().insert(CONNECTION, HeaderValue::from_static("upgrade"));
        answer.headers_mut().insert(UPGRADE_HEADER, HeaderValue::from_static(UPGRADE));
        answer
    }
}

/// The bare socket. Bytes that came before the switch would have lost their descriptors, so a
/// client that sends too early is not served.
async fn bare_socket(upgrade: OnUpgrade) -> Option<UnixStream> {
    let parts = upgrade.await.ok()?.downcast::<TokioIo<UnixStream>>().ok()?;
    parts.read_buf.is_empty().then(|| parts.io.into_inner())
}
