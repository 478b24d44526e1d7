//! Bodies of requests and answers.

use std::convert::Infallible;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use blobd_client::protocol::error::{ErrorAnswer, ErrorBody, ErrorCode};
use bytes::Bytes;
use http_body_util::{BodyExt as _, Either, Full, Limited};
use hyper::body::{Body, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue};
use hyper::{Request, Response, StatusCode};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio::time::timeout;

/// An answer: one JSON document, or lines as they come.
pub(crate) type Answer = Response<Either<Full<Bytes>, Lines>>;

/// No request has reason to be longer: it names models and tensors.
const MAX_REQUEST_BYTES: usize = 1 << 20;

/// How long a client may take to send it.
const BODY_TIMEOUT: Duration = Duration::from_secs(10);

/// Reads a request's JSON.
pub(super) async fn read_json<T: DeserializeOwned>(request: Request<Incoming>) -> Result<T, ErrorBody> {
    let invalid = |what: String| ErrorBody::new(ErrorCode::InvalidRequest, format!("request body: {what}"));
    let body = Limited::new(request.into_body(), MAX_REQUEST_BYTES).collect();
    let body = timeout(BODY_TIMEOUT, body).await.map_err(|_elapsed| invalid("too slow".to_owned()))?;
    let bytes = body.map_err(|error| invalid(error.to_string()))?.to_bytes();
    serde_json::from_slice(&bytes).map_err(|error| invalid(error.to_string()))
}

/// An answer of one JSON document.
pub(crate) fn json_answer(value: &impl Serialize) -> Answer {
    match serde_json::to_vec(value) {
        Ok(json) => answer(StatusCode::OK, Either::Left(Full::from(json))),
        Err(error) => error_answer(ErrorBody::new(ErrorCode::Internal, error)),
    }
}

/// An answer of one JSON document that is there already, byte for byte.
pub(super) fn raw_answer(json: Vec<u8>) -> Answer {
    answer(StatusCode::OK, Either::Left(Full::from(json)))
}

/// An answer that says what went wrong.
pub(super) fn error_answer(error: ErrorBody) -> Answer {
    let status = StatusCode::from_u16(error.code.http_status()).unwrap_or(StatusCode::INTERNAL_SERVER_ERROR);
    // Strings always serialise.
    let json = serde_json::to_vec(&ErrorAnswer { error }).unwrap_or_default();
    answer(status, Either::Left(Full::from(json)))
}

/// An answer of one JSON document per line.
pub(super) fn lines_answer(lines: Lines) -> Answer {
    let mut answer = answer(StatusCode::OK, Either::Right(lines));
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/x-ndjson"));
    answer
}

fn answer(status: StatusCode, body: Either<Full<Bytes>, Lines>) -> Answer {
    let mut answer = Response::new(body);
    *answer.status_mut() = status;
    answer.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
    answer
}

/// Lines from a channel; when the client goes, the channel's sender learns of it.
#[derive(Debug)]
pub(crate) struct Lines(pub(super) mpsc::Receiver<Bytes>);

impl Body for Lines {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, Infallible>>> {
        self.0.poll_recv(context).map(|line| line.map(|line| Ok(Frame::data(line))))
    }
}
