//! Reads request bodies, and builds responses.

use std::marker::PhantomData;
use std::ops::{Deref, DerefMut};
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use blobd_client::protocol::audit::escape_controls;
use blobd_client::protocol::error::{ErrorBody, ErrorCode, ErrorResponse};
use blobd_client::protocol::event::Event;
use blobd_client::protocol::route::{Document, Events};
use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, Incoming, SizeHint};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use serde::Serialize;
use tokio::sync::{mpsc, oneshot};
use tokio::time::timeout;

use super::details::DetailsStream;
use crate::limits::RequestLimits;
use crate::permits::Permit;

pub(crate) type HttpResponse = Response<ResponseBody>;

/// A response whose answer has this form and these types.
pub(super) struct Reply<A>(HttpResponse, PhantomData<fn() -> A>);

pub(super) type Answer<T> = Result<Reply<Document<T>>, ErrorBody>;

impl<A> Reply<A> {
    /// The caller knows that the bytes of the response are of this type.
    pub(super) const fn new(response: HttpResponse) -> Self {
        Self(response, PhantomData)
    }

    pub(super) fn into_response(self) -> HttpResponse {
        self.0
    }
}

/// The body of a response, with the permits that it holds until hyper has taken all of it. The permit for a part's
/// memory belongs to the part ([`counted`]): hyper takes parts long before their client receives them, and then drops
/// the body.
pub(crate) struct ResponseBody {
    content: Content,
    permits: Vec<Arc<Permit>>,
}

enum Content {
    Whole(Option<Bytes>),
    Parts(Box<NextPart>),
}

/// Returns the next part of a body. An error ends the connection, so that no client takes the last part for the end.
type NextPart = dyn FnMut(&mut Context<'_>) -> Poll<Option<Result<Bytes, IncompleteResponse>>> + Send;

#[derive(Debug, thiserror::Error)]
#[error("the response cannot be completed")]
pub(crate) struct IncompleteResponse;

/// A part of a response. `_memory` counts the part's memory until its last byte is written or its client has gone: a
/// [`Permit`], or the model that it describes.
struct Counted<M> {
    bytes: Vec<u8>,
    _memory: Arc<M>,
}

impl<M> AsRef<[u8]> for Counted<M> {
    fn as_ref(&self) -> &[u8] {
        &self.bytes
    }
}

pub(super) fn counted<M: Send + Sync + 'static>(bytes: Vec<u8>, memory: Option<Arc<M>>) -> Bytes {
    match memory {
        Some(memory) => Bytes::from_owner(Counted { bytes, _memory: memory }),
        None => bytes.into(),
    }
}

/// How long the body of a request may be, and how much memory that takes.
#[derive(Clone, Copy, Debug)]
pub(super) struct BodyLimit {
    pub(super) bytes: usize,
    /// Memory for each byte of the body: the text and the parsed values.
    pub(super) memory_per_byte: usize,
}

impl BodyLimit {
    /// For requests that contain only names of models and tensors. A list of short names needs the most memory.
    pub(super) const OF_NAMES: Self = Self { bytes: 1 << 20, memory_per_byte: 16 };
}

/// How long a client may take to send a request's body.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// The parameters of a request, with the permit that counts their memory as long as they exist.
#[derive(Debug)]
pub(super) struct Params<P> {
    params: P,
    _memory: Option<Permit>,
}

impl<P> Deref for Params<P> {
    type Target = P;

    fn deref(&self) -> &P {
        &self.params
    }
}

impl<P> DerefMut for Params<P> {
    fn deref_mut(&mut self) -> &mut P {
        &mut self.params
    }
}

impl<P> Params<P> {
    pub(super) const fn new(params: P, memory: Option<Permit>) -> Self {
        Self { params, _memory: memory }
    }
}

pub(super) async fn read_body(
    request: Request<Incoming>,
    limits: &RequestLimits,
    uid: u32,
    limit: BodyLimit,
) -> Result<(Vec<u8>, Option<Permit>), ErrorBody> {
    let received = receive_body(request, limits, uid, limit);
    timeout(BODY_TIMEOUT, received).await.map_err(|_elapsed| invalid("not received in time"))?
}

async fn receive_body(
    request: Request<Incoming>,
    limits: &RequestLimits,
    uid: u32,
    limit: BodyLimit,
) -> Result<(Vec<u8>, Option<Permit>), ErrorBody> {
    let (mut body, mut bytes, mut permit) = (request.into_body(), Vec::new(), None);
    while let Some(frame) = body.frame().await {
        let frame = frame.map_err(|error| invalid(&error.to_string()))?;
        let Ok(data) = frame.into_data() else { continue };
        if bytes.len() + data.len() > limit.bytes {
            return Err(invalid("length limit exceeded"));
        }
        if permit.is_none() && bytes.len() + data.len() > UNCOUNTED_BODY_BYTES {
            // For the announced size, or the maximum: requests that wait for more while they hold some could block each
            // other for ever.
            let announced = body.size_hint().upper().and_then(|more| usize::try_from(more).ok());
            let most = announced.map_or(limit.bytes, |more| bytes.len() + data.len() + more);
            let most = most.min(limit.bytes).saturating_mul(limit.memory_per_byte);
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

pub(super) fn raw_response<M: Send + Sync + 'static>(bytes: Vec<u8>, memory: Option<M>) -> HttpResponse {
    response(StatusCode::OK, Content::Whole(Some(counted(bytes, memory.map(Arc::new)))))
}

pub(super) fn text_response(text: String, media_type: &'static str, memory: Option<Permit>) -> HttpResponse {
    let mut response = raw_response(text.into_bytes(), memory);
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(media_type));
    response
}

/// The longest message of an error, which can quote what the client has sent, such as a name of a megabyte, and is not
/// counted.
const MAX_MESSAGE_BYTES: usize = 4 << 10;

pub(super) fn error_response(error: ErrorBody) -> HttpResponse {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // Strings can always be serialised.
    let json = serde_json::to_vec(&ErrorResponse { error: shortened(error) }).unwrap_or_default();
    response(status, Content::Whole(Some(json.into())))
}

fn shortened(mut error: ErrorBody) -> ErrorBody {
    if error.message.len() > MAX_MESSAGE_BYTES {
        let end = error.message.floor_char_boundary(MAX_MESSAGE_BYTES);
        error.message.truncate(end);
        error.message.push('…');
    }
    error
}

pub(super) struct Line<E> {
    pub(super) event: E,
    pub(super) memory: Option<Arc<Permit>>,
}

impl<P, D> From<P> for Line<Event<P, D>> {
    fn from(progress: P) -> Self {
        Self { event: Event::Progress(progress), memory: None }
    }
}

impl<E: Serialize> Line<E> {
    fn bytes(self) -> Bytes {
        let mut line = escape_controls(serde_json::to_string(&self.event).unwrap_or_default());
        line.push('\n');
        counted(line.into_bytes(), self.memory)
    }
}

/// One JSON document per line: all `events`, then `last`. `events` is closed when the client disconnects.
pub(super) fn lines_response<P: Serialize + Send + 'static, D: Serialize + Send + 'static>(
    mut events: mpsc::Receiver<impl Into<Line<Event<P, D>>> + Send + 'static>,
    mut last: Option<oneshot::Receiver<Line<Event<P, D>>>>,
    permits: Vec<Arc<Permit>>,
) -> Reply<Events<P, D>> {
    let next = move |context: &mut Context<'_>| {
        if let Some(event) = ready!(events.poll_recv(context)) {
            return Poll::Ready(Some(Ok(event.into().bytes())));
        }
        let Some(receiver) = &mut last else { return Poll::Ready(None) };
        let line = ready!(Pin::new(receiver).poll(context));
        last = None;
        // There is no last line if the work has ended without one.
        Poll::Ready(line.ok().map(|line| Ok(line.bytes())))
    };
    let mut response = response(StatusCode::OK, Content::Parts(Box::new(next)));
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(LINES));
    response.body_mut().permits = permits;
    Reply::new(response)
}

const LINES: &str = "application/x-ndjson";

/// Whether the response consists of the events of work in progress.
pub(crate) fn reports_progress(response: &HttpResponse) -> bool {
    response.headers().get(CONTENT_TYPE).is_some_and(|media_type| media_type == LINES)
}

/// A JSON document that is made part by part as it is written. `memory` counts the part that is being written.
pub(super) fn details_response(mut details: DetailsStream, memory: Option<Permit>) -> HttpResponse {
    let memory = memory.map(Arc::new);
    let next = move |_: &mut Context<'_>| {
        Poll::Ready(details.next_part().map(|part| Ok(counted(part, memory.clone()))))
    };
    response(StatusCode::OK, Content::Parts(Box::new(next)))
}

/// A JSON document whose parts come from elsewhere. The receiver is dropped when the client disconnects.
pub(super) fn parts_response(mut parts: mpsc::Receiver<Result<Bytes, IncompleteResponse>>) -> HttpResponse {
    let next = move |context: &mut Context<'_>| parts.poll_recv(context);
    response(StatusCode::OK, Content::Parts(Box::new(next)))
}

pub(super) fn empty_response(status: StatusCode) -> HttpResponse {
    let mut response = response(status, Content::Whole(None));
    response.headers_mut().remove(CONTENT_TYPE);
    response
}

fn response(status: StatusCode, content: Content) -> HttpResponse {
    let mut response = Response::new(ResponseBody { content, permits: Vec::new() });
    *response.status_mut() = status;
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    response
}

impl Body for ResponseBody {
    type Data = Bytes;
    type Error = IncompleteResponse;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, IncompleteResponse>>> {
        let bytes = match &mut self.content {
            Content::Whole(bytes) => Poll::Ready(bytes.take().map(Ok)),
            Content::Parts(next) => next(context),
        };
        bytes.map(|bytes| bytes.map(|bytes| bytes.map(Frame::data)))
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::permits::{Limits, PermitPool};

    fn first_part(response: &mut HttpResponse) -> Bytes {
        let mut context = Context::from_waker(std::task::Waker::noop());
        let Poll::Ready(Some(Ok(frame))) = Pin::new(response.body_mut()).poll_frame(&mut context) else {
            panic!("no part");
        };
        frame.into_data().unwrap()
    }

    /// hyper takes the body as a whole, and drops it before the client has received anything.
    #[tokio::test]
    async fn response_is_counted_until_its_bytes_are_written() {
        let pool = PermitPool::new(Limits { per_principal: 8, total: 8 });
        let permit = pool.acquire_many(1, 5).await;
        let mut whole = raw_response(vec![7; 5000], Some(permit));
        let mut bytes = first_part(&mut whole);
        assert!(whole.body().is_end_stream());
        drop(whole);
        assert_eq!(pool.in_use(), 5, "not written yet");
        drop(bytes.split_to(4999));
        assert_eq!(pool.in_use(), 5, "one byte is left");
        drop(bytes);
        assert_eq!(pool.in_use(), 0);
    }

    #[tokio::test]
    async fn lines_are_counted_until_they_are_written() {
        let pool = PermitPool::new(Limits { per_principal: 8, total: 8 });
        let (events, waiting) = mpsc::channel::<Line<Event<&str, ()>>>(1);
        let memory = Some(Arc::new(pool.acquire_many(1, 3).await));
        events.try_send(Line { event: Event::Progress("record"), memory }).ok().unwrap();
        let mut lines = lines_response::<&str, ()>(waiting, None, Vec::new()).into_response();
        let line = first_part(&mut lines);
        drop((events, lines));
        assert_eq!((pool.in_use(), &*line), (3, &b"\"record\"\n"[..]));
        drop(line);
        assert_eq!(pool.in_use(), 0);
    }

    #[test]
    fn long_messages_are_cut_at_a_character() {
        let error = |message: String| shortened(ErrorBody::new(ErrorCode::InvalidRequest, message)).message;
        assert_eq!(error("short".to_owned()), "short");
        let cut = error("ä".repeat(MAX_MESSAGE_BYTES));
        assert!(cut.ends_with("ä…") && cut.len() <= MAX_MESSAGE_BYTES + '…'.len_utf8());
    }
}
