//! Bodies of requests and responses.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use blobd_client::protocol::error::{ErrorAnswer, ErrorBody, ErrorCode};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::details::DetailsStream;
use crate::limits::RequestLimits;
use crate::permits::Permit;

/// A response: one JSON document, or lines as they come.
pub(crate) type Answer = Response<ResponseBody>;

/// The body of a response, and what it is counted by until it is written or its client goes.
#[derive(Debug)]
pub(crate) struct ResponseBody {
    content: Content,
    _permits: Vec<Arc<Permit>>,
}

#[derive(Debug)]
enum Content {
    /// Everything, until it is taken.
    Whole(Option<Bytes>),
    /// Lines from a channel.
    Lines(Lines),
    /// A model in depth, put into words as it is written.
    Details(Box<DetailsStream>),
}

/// No request has reason to be longer: it names models and tensors.
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// How long a client may take to send it.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Memory that a request takes for each byte of its body: the text, and what it is parsed into. A list of
/// short names is the worst.
const BYTES_PER_BODY_BYTE: usize = 16;

/// Reads a request's JSON. The permit counts what it takes in memory.
pub(super) async fn read_json<T: DeserializeOwned>(
    request: Request<Incoming>,
    limits: &RequestLimits,
    uid: u32,
) -> Result<(T, Option<Permit>), ErrorBody> {
    let received = receive_body(request, limits, uid);
    let received = timeout(BODY_TIMEOUT, received).await.map_err(|_elapsed| invalid("too slow"))?;
    let (bytes, permit) = received?;
    let params = serde_json::from_slice(&bytes).map_err(|error| invalid(&error.to_string()))?;
    Ok((params, permit))
}

async fn receive_body(
    request: Request<Incoming>,
    limits: &RequestLimits,
    uid: u32,
) -> Result<(Vec<u8>, Option<Permit>), ErrorBody> {
    let (mut body, mut bytes, mut permit) = (request.into_body(), Vec::new(), None);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| invalid(&error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > MAX_REQUEST_BYTES {
            return Err(invalid("length limit exceeded"));
        }
        if permit.is_none() && bytes.len() + data.len() > UNCOUNTED_BODY_BYTES {
            // For as much as it may become: one that waits for more while it holds some could wait for ever.
            let announced = body.size_hint().upper().and_then(|more| usize::try_from(more).ok());
            let most = announced.map_or(MAX_REQUEST_BYTES, |more| bytes.len() + data.len() + more);
            let most = most.min(MAX_REQUEST_BYTES).saturating_mul(BYTES_PER_BODY_BYTE);
            permit = limits.memory_for(uid, most).await?;
        }
        bytes.extend_from_slice(&data);
    }
    Ok((bytes, permit))
}

/// Bodies up to this length are not counted.
const UNCOUNTED_BODY_BYTES: usize = 4 << 10;

fn invalid(what: &str) -> ErrorBody {
    ErrorBody::new(ErrorCode::InvalidRequest, format!("request body: {what}"))
}

/// A response of one JSON document, which is short.
pub(crate) fn json_answer(value: &impl Serialize) -> Answer {
    match serde_json::to_vec(value) {
        Ok(json) => raw_answer(json, None),
        Err(error) => error_answer(ErrorBody::new(ErrorCode::Internal, error)),
    }
}

/// A response of one JSON document that is there already, byte for byte.
pub(super) fn raw_answer(json: Vec<u8>, permit: Option<Permit>) -> Answer {
    let permits = permit.into_iter().map(Arc::new).collect();
    answer(StatusCode::OK, Content::Whole(Some(json.into())), permits)
}

/// A response that says what went wrong.
pub(super) fn error_answer(error: ErrorBody) -> Answer {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // Strings always serialise.
    let json = serde_json::to_vec(&ErrorAnswer { error }).unwrap_or_default();
    answer(status, Content::Whole(Some(json.into())), Vec::new())
}

/// A response of one JSON document per line.
pub(super) fn lines_answer(lines: Lines) -> Answer {
    let mut answer = answer(StatusCode::OK, Content::Lines(lines), Vec::new());
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    answer
}

/// A response that describes a large model.
pub(super) fn details_answer(details: DetailsStream, permit: Option<Permit>) -> Answer {
    let permits = permit.into_iter().map(Arc::new).collect();
    answer(StatusCode::OK, Content::Details(Box::new(details)), permits)
}

/// A response without a body.
pub(super) fn empty_answer(status: StatusCode) -> Answer {
    let mut answer = answer(status, Content::Whole(None), Vec::new());
    answer.headers_mut().remove(CONTENT_TYPE);
    answer
}

fn answer(status: StatusCode, content: Content, permits: Vec<Arc<Permit>>) -> Answer {
    let mut answer = Response::new(ResponseBody { content, _permits: permits });
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

impl ResponseBody {
    /// Keeps `permit` until the body is written or dropped.
    pub(super) fn hold(&mut self, permit: Arc<Permit>) {
        self._permits.push(permit);
    }
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        let bytes = match &mut self.content {
            Content::Whole(bytes) => Poll::Ready(bytes.take()),
            Content::Lines(Lines(lines)) => lines.poll_recv(context),
            Content::Details(details) => Poll::Ready(details.next_part()),
        };
        bytes.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.content, Content::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Content::Lines(_) | Content::Details(_) => SizeHint::default(),
        }
    }
}

/// Lines from a channel; when the client goes, the channel's sender learns of it.
#[derive(Debug)]
pub(crate) struct Lines(pub(super) mpsc::Receiver<Bytes>);
