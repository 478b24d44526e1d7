//! What is answered to a request, before it is known to hyper: a document, a file, or a refusal.

use std::ops::Range;

use bytes::Bytes;
use hyper::header::{
    ACCEPT_RANGES, CACHE_CONTROL, CONTENT_LENGTH, CONTENT_RANGE, CONTENT_TYPE, ETAG, HeaderMap, HeaderName,
    HeaderValue,
};
use hyper::http::request::Parts;
use hyper::{Method, StatusCode};

use super::range::{Selected, has_version, selected};
use super::source::Source;
use crate::ops::OpError;

pub(super) struct Answer {
    pub(super) status: StatusCode,
    pub(super) headers: HeaderMap,
    pub(super) content: AnswerContent,
}

pub(super) enum AnswerContent {
    Nothing,
    Document(Bytes),
    Part(Source, Range<u64>),
}

pub(super) type Answered = Result<Answer, OpError>;

impl Answer {
    pub(super) fn new(status: StatusCode, media_type: &str, content: impl Into<Bytes>) -> Self {
        let answer =
            Self { status, headers: HeaderMap::new(), content: AnswerContent::Document(content.into()) };
        answer.with(CONTENT_TYPE, media_type)
    }

    pub(super) fn json(status: StatusCode, value: &serde_json::Value) -> Self {
        Self::new(status, "application/json", value.to_string())
    }

    /// A value that is not allowed in a header is left out.
    pub(super) fn with(mut self, name: HeaderName, value: impl AsRef<str>) -> Self {
        if let Ok(value) = HeaderValue::from_str(value.as_ref()) {
            self.headers.insert(name, value);
        }
        self
    }

    /// Makes the answer one for a client that may have this version already.
    pub(super) fn versioned(self, request: &Parts, etag: &str) -> Self {
        let answer = self.with(ETAG, etag);
        match has_version(&request.headers, etag) {
            true => Self { status: StatusCode::NOT_MODIFIED, content: AnswerContent::Nothing, ..answer },
            false => answer,
        }
    }

    /// The part of a file that the request selects.
    pub(super) fn file(request: &Parts, file: impl Into<Source>, media_type: &str, etag: &str) -> Self {
        let file = file.into();
        let length = file.size();
        let answer =
            Self { status: StatusCode::OK, headers: HeaderMap::new(), content: AnswerContent::Nothing }
                .with(ACCEPT_RANGES, "bytes")
                .with(ETAG, etag);
        if has_version(&request.headers, etag) {
            return Self { status: StatusCode::NOT_MODIFIED, ..answer };
        }
        let answer = answer.with(CONTENT_TYPE, media_type);
        match selected(&request.headers, etag, length) {
            Selected::Whole => Self { content: AnswerContent::Part(file, 0..length), ..answer },
            Selected::Part(part) => {
                let range = format!("bytes {}-{}/{length}", part.start, part.end.saturating_sub(1));
                let answer = answer.with(CONTENT_RANGE, range);
                Self {
                    status: StatusCode::PARTIAL_CONTENT,
                    content: AnswerContent::Part(file, part),
                    ..answer
                }
            }
            Selected::Nothing => {
                let answer = answer.with(CONTENT_RANGE, format!("bytes */{length}"));
                Self { status: StatusCode::RANGE_NOT_SATISFIABLE, ..answer }
            }
        }
    }

    /// What a cache may keep: that of a digest never changes.
    pub(super) fn cached(self, is_by_digest: bool) -> Self {
        // Who may see it can change.
        self.with(CACHE_CONTROL, if is_by_digest { "private, max-age=86400" } else { "no-cache" })
    }

    /// Sets the length, and removes the content if the request asks only for the headers.
    pub(super) fn for_method(mut self, method: &Method) -> Self {
        let length = match &self.content {
            AnswerContent::Nothing => 0,
            AnswerContent::Document(bytes) => bytes.len() as u64,
            AnswerContent::Part(_, part) => part.end.saturating_sub(part.start),
        };
        if self.status != StatusCode::NOT_MODIFIED {
            self.headers.insert(CONTENT_LENGTH, length.into());
        }
        if method == Method::HEAD {
            self.content = AnswerContent::Nothing;
        }
        self
    }
}

/// The value of a parameter of a request's query.
pub(super) fn parameter(request: &Parts, name: &str) -> Option<String> {
    let pairs = request.uri.query()?.split('&').filter_map(|pair| pair.split_once('='));
    let value = pairs.filter(|(key, _)| *key == name).map(|(_, value)| value.replace('+', " ")).next()?;
    Some(percent_encoding::percent_decode_str(&value).decode_utf8().ok()?.into_owned())
}
