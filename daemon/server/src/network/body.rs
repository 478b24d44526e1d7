//! The bodies of answers: documents, and files that are read chunk by chunk while they are sent.

use std::ops::Range;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use hyper::body::{Body, Frame, SizeHint};

use super::access_log::AccessRecord;
use super::source::Source;
use crate::ops::OpError;
use crate::state::Daemon;

/// The bytes that are read at once. A connection holds at most two chunks: one that its client has not taken yet, and one
/// that is read.
const CHUNK_BYTES: u64 = 128 << 10;

pub(super) struct AnswerBody {
    content: Content,
    /// Written to the log when the body is dropped.
    record: AccessRecord,
}

pub(super) enum Content {
    Document(Bytes),
    File(FileContent),
}

/// A part of a file.
pub(super) struct FileContent {
    daemon: Arc<Daemon>,
    /// Absent while it is read.
    source: Option<Source>,
    left: Range<u64>,
    /// Reads of one client take turns with those of others.
    client: u32,
    reading: Option<Reading>,
}

type Reading = Pin<Box<dyn Future<Output = (Result<Bytes, OpError>, Source)> + Send>>;

impl FileContent {
    pub(super) fn new(daemon: &Arc<Daemon>, source: Source, part: Range<u64>, client: u32) -> Self {
        Self { daemon: Arc::clone(daemon), source: Some(source), left: part, client, reading: None }
    }

    const fn length(&self) -> u64 {
        self.left.end.saturating_sub(self.left.start)
    }

    fn read_next(&mut self) -> Option<Reading> {
        let start = self.left.start;
        let end = start.saturating_add(CHUNK_BYTES).min(self.left.end);
        let (daemon, client, mut source) = (Arc::clone(&self.daemon), self.client, self.source.take()?);
        Some(Box::pin(async move {
            let bytes = source.read(&daemon, client, start..end).await;
            (bytes, source)
        }))
    }

    fn poll_chunk(&mut self, context: &mut Context<'_>) -> Poll<Option<Result<Bytes, OpError>>> {
        if self.left.is_empty() {
            return Poll::Ready(None);
        }
        let Some(mut reading) = self.reading.take().or_else(|| self.read_next()) else {
            return Poll::Ready(None);
        };
        match reading.as_mut().poll(context) {
            Poll::Pending => {
                self.reading = Some(reading);
                Poll::Pending
            }
            Poll::Ready((Ok(bytes), source)) => {
                self.source = Some(source);
                self.left.start = self.left.start.saturating_add(bytes.len() as u64);
                Poll::Ready(Some(Ok(bytes)))
            }
            // It ends the connection, so that no client takes what it has got for the whole.
            Poll::Ready((Err(error), _)) => Poll::Ready(Some(Err(error))),
        }
    }
}

impl AnswerBody {
    pub(super) const fn new(content: Content, record: AccessRecord) -> Self {
        Self { content, record }
    }
}

impl Body for AnswerBody {
    type Data = Bytes;
    type Error = OpError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, OpError>>> {
        let chunk = match &mut self.content {
            Content::Document(bytes) => {
                let bytes = std::mem::take(bytes);
                if bytes.is_empty() { None } else { Some(Ok(bytes)) }
            }
            Content::File(file) => ready!(file.poll_chunk(context)),
        };
        match &chunk {
            Some(Ok(bytes)) => self.record.add_sent(bytes.len() as u64),
            Some(Err(error)) => self.record.note_failure(error),
            None => {}
        }
        Poll::Ready(chunk.map(|chunk| chunk.map(Frame::data)))
    }

    fn is_end_stream(&self) -> bool {
        self.size_hint().exact() == Some(0)
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(match &self.content {
            Content::Document(bytes) => bytes.len() as u64,
            Content::File(file) => file.length(),
        })
    }
}
