//! Reads request bodies, and builds responses.

use std::convert::Infallible;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll};
use std::time::Duration;

use blobd_client::protocol::audit::escape_controls;
use blobd_client::protocol::error::{ErrorBody, ErrorCode, ErrorResponse};
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

pub(crate) type HttpResponse = Response<ResponseBody>;

/// The body of a response, with the permits that it holds until it is written or dropped.
pub(crate) struct ResponseBody {
    content: Content,
    _permits: Vec<Arc<Permit>>,
}

enum Content {
    /// The whole body, until it is taken.
    Whole(Option<Bytes>),
    /// A body that is serialised as it is written.
    Parts(Box<NextPart>),
}

/// Returns the next part of a body, if any.
type NextPart = dyn FnMut(&mut Context<'_>) -> Poll<Option<Bytes>> + Send;

/// Requests contain only names of models and tensors.
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// How long a client may take to send a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Memory that a request takes for each byte of its body: the text, and the parsed values. A list of short
/// names needs the most.
const BYTES_PER_BODY_BYTE: usize = 16;

/// Reads a request's JSON. The permit counts its memory.
pub(super) async fn read_json<T: DeserializeOwned>(
    request: Request<Incoming>,
    limits: &RequestLimits,
    uid: u32,
) -> Result<(T, Option<Permit>), ErrorBody> {
    let received = receive_body(request, limits, uid);
    let received =
        timeout(BODY_TIMEOUT, received).await.map_err(|_elapsed| invalid("not received in time"))?;
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
            // For the announced size, or the maximum: requests that wait for more while they hold some
            // could block each other for ever.
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

/// A short JSON document, which is not counted.
pub(crate) fn json_response(value: &impl Serialize) -> HttpResponse {
    match serde_json::to_vec(value) {
        Ok(json) => raw_response(json, None),
        Err(error) => error_response(ErrorBody::new(ErrorCode::Internal, error)),
    }
}

/// A text that is not JSON and not counted.
pub(super) fn text_response(text: String, media_type: &'static str) -> HttpResponse {
    let mut response = response(StatusCode::OK, Content::Whole(Some(text.into())), Vec::new());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

/// A JSON document that is already serialised.
pub(super) fn raw_response(json: Vec<u8>, permit: Option<Permit>) -> HttpResponse {
    let permits = permit.into_iter().map(Arc::new).collect();
    response(StatusCode::OK, Content::Whole(Some(json.into())), permits)
}

pub(super) fn error_response(error: ErrorBody) -> HttpResponse {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // Strings can always be serialised.
    let json = serde_json::to_vec(&ErrorResponse { error }).unwrap_or_default();
    response(status, Content::Whole(Some(json.into())), Vec::new())
}

/// One JSON document per line. `events` is closed when the client disconnects.
pub(super) fn lines_response<E: Serialize + Send + 'static>(mut events: mpsc::Receiver<E>) -> HttpResponse {
    let line = |event: E| {
        let mut line = escape_controls(serde_json::to_string(&event).unwrap_or_default());
        line.push('\n');
        Bytes::from(line)
    };
    let next = move |context: &mut Context<'_>| events.poll_recv(context).map(|event| event.map(line));
    let mut response = response(StatusCode::OK, Content::Parts(Box::new(next)), Vec::new());
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(LINES));
    response
}

/// The media type of a response with a line for each event.
const LINES: &str = "application/x-ndjson";

/// Whether the response consists of the events of work in progress.
pub(crate) fn reports_progress(response: &HttpResponse) -> bool {
    response.headers().get(CONTENT_TYPE).is_some_and(|media_type| media_type == LINES)
}

pub(super) fn details_response(mut details: DetailsStream, permit: Option<Permit>) -> HttpResponse {
    let permits = permit.into_iter().map(Arc::new).collect();
    let next = move |_: &mut Context<'_>| Poll::Ready(details.next_part());
    response(StatusCode::OK, Content::Parts(Box::new(next)), permits)
}

pub(super) fn empty_response(status: StatusCode) -> HttpResponse {
    let mut response = response(status, Content::Whole(None), Vec::new());
    response.headers_mut().remove(CONTENT_TYPE);
    response
}

fn response(status: StatusCode, content: Content, permits: Vec<Arc<Permit>>) -> HttpResponse {
    let mut response = Response::new(ResponseBody { content, _permits: permits });
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

impl ResponseBody {
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
            Content::Parts(next) => next(context),
        };
        bytes.map(|bytes| bytes.map(|bytes| Ok(Frame::data(bytes))))
    }

    fn is_end_stream(&self) -> bool {
        matches!(self.content, Content::Whole(None))
    }

    fn size_hint(&self) -> SizeHint {
        match &self.content {
            Content::Whole(bytes) => SizeHint::with_exact(bytes.as_ref().map_or(0, Bytes::len) as u64),
            Content::Parts(_) => SizeHint::default(),
        }
    }
}
