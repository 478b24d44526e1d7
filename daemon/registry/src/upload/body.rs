//! The body of a request that sends a part of a file, chunk by chunk, with a known length.

use std::pin::Pin;
use std::task::{Context, Poll, ready};

use bytes::Bytes;
use http_body_util::BodyExt as _;
use hyper::body::{Body, Frame, SizeHint};
use tokio::sync::mpsc::Receiver;

use crate::connector::BoxError;
use crate::transport::RequestBody;

/// Ends with an error if the sender of the chunks is dropped early, so that the connection breaks and the registry does
/// not take what has arrived for the whole.
#[derive(Debug)]
pub(super) struct UploadBody {
    chunks: Receiver<Bytes>,
    left: u64,
}

impl UploadBody {
    /// A body of `length` bytes.
    pub(super) const fn new(chunks: Receiver<Bytes>, length: u64) -> Self {
        Self { chunks, left: length }
    }

    pub(super) fn boxed(self) -> RequestBody {
        self.boxed_unsync()
    }
}

impl Body for UploadBody {
    type Data = Bytes;
    type Error = BoxError;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
    ) -> Poll<Option<Result<Frame<Bytes>, BoxError>>> {
        if self.left == 0 {
            return Poll::Ready(None);
        }
        let chunk = ready!(self.chunks.poll_recv(context));
        Poll::Ready(Some(match chunk {
            Some(bytes) => {
                self.left = self.left.saturating_sub(bytes.len() as u64);
                Ok(Frame::data(bytes))
            }
            None => Err("the upload was stopped".into()),
        }))
    }

    fn is_end_stream(&self) -> bool {
        self.left == 0
    }

    fn size_hint(&self) -> SizeHint {
        SizeHint::with_exact(self.left)
    }
}
