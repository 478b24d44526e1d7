//! Frames: the messages on a connection after the upgrade from HTTP.
//!
//! A frame is the length of its JSON as four little-endian bytes, then the JSON. This module encodes
//! and decodes [`Frame`]s and does not use sockets. A length is compared with [`MAX_FRAME_BYTES`]
//! before the frame is buffered.

use serde::{Deserialize, Serialize};

use super::error::ErrorBody;
use super::event::ImportProgress;
use super::pull::Imported;
use super::response::{OpenHead, OpenPiece, TensorLocation};

/// The longest frame. It limits the memory that a peer can make the receiver use; lists that do not
/// fit are split into several frames.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

/// The most literal bytes in one piece of the response to an open: in base64, together with the other
/// pieces of its frame, they stay well below [`MAX_FRAME_BYTES`].
pub const MAX_LITERAL_BYTES: usize = 256 << 10;

/// One message after the upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Frame {
    /// Open, daemon to client, first: the model, and how many tensors and descriptors follow.
    Open(OpenHead),
    /// Open, daemon to client: some of a layer's pieces, in file order.
    Pieces {
        /// The number of the layer.
        layer: u32,
        /// The next of the layer's pieces.
        pieces: Vec<OpenPiece>,
    },
    /// Open, daemon to client: some of the tensors.
    Tensors(Vec<TensorLocation>),
    /// Descriptors are attached to the first byte of this frame. Open, daemon to client; import, client
    /// to daemon.
    Fds {
        /// The number of the first descriptor: how many were sent before.
        first: u32,
        /// How many are attached, from 1 to [`MAX_FDS_PER_BATCH`](super::MAX_FDS_PER_BATCH).
        count: u32,
    },
    /// Open, client to daemon: the descriptors have arrived.
    Ack {
        /// How many have been received in all.
        received: u32,
    },
    /// Import of several files, daemon to client: the client sends the descriptors of these files in one
    /// `fds` frame with the same numbers.
    Want {
        /// The number of the first file. A file is wanted once, and its number is the next.
        first: u32,
        /// How many files, from 1 to [`MAX_WANTED_FILES`](super::MAX_WANTED_FILES).
        count: u32,
    },
    /// Import, daemon to client: its progress.
    Progress(ImportProgress),
    /// Import, daemon to client: the import has succeeded; nothing follows.
    Imported(Imported),
    /// Daemon to client: the request failed; nothing follows.
    Error(ErrorBody),
}

impl Frame {
    /// The frame's bytes, starting with the length.
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let mut out = Vec::new();
        self.encode_into(&mut out)?;
        Ok(out)
    }

    /// Appends the frame's bytes to `out`; on an error `out` is unchanged.
    pub fn encode_into(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        let start = begin_frame(out);
        append_json(self, out)?;
        end_frame(out, start)
    }

    /// The frame's kind, for messages.
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Open(_) => "open",
            Self::Pieces { .. } => "pieces",
            Self::Tensors(_) => "tensors",
            Self::Fds { .. } => "fds",
            Self::Ack { .. } => "ack",
            Self::Want { .. } => "want",
            Self::Progress(_) => "progress",
            Self::Imported(_) => "imported",
            Self::Error(_) => "error",
        }
    }
}

/// Appends tensors to `out`, in as many `tensors` frames as they need. The bytes depend on nothing
/// else, so the daemon may reuse them for other clients.
///
/// # Errors
/// [`FrameError::TooLong`] when one tensor is nearly as long as a frame.
pub fn encode_tensors<'a>(
    tensors: impl IntoIterator<Item = &'a TensorLocation>,
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    encode_list(r#"{"tensors":["#, tensors, "]}", out)
}

/// Appends a layer's pieces to `out`, in as many `pieces` frames as they need.
///
/// # Errors
/// [`FrameError::TooLong`] when one piece is nearly as long as a frame; [`cut_literals`] prevents
/// that.
pub fn encode_pieces<'a>(
    layer: u32,
    pieces: impl IntoIterator<Item = &'a OpenPiece>,
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    encode_list(&format!(r#"{{"pieces":{{"layer":{layer},"pieces":["#), pieces, "]}}", out)
}

/// The same pieces, with every literal longer than [`MAX_LITERAL_BYTES`] split into several pieces. The
/// `piece_count` in the head of the response is the number after this split.
pub fn cut_literals(pieces: Vec<OpenPiece>) -> Vec<OpenPiece> {
    let cut = |piece| match piece {
        OpenPiece::Literal { literal } if literal.len() > MAX_LITERAL_BYTES => {
            let parts = literal.chunks(MAX_LITERAL_BYTES);
            parts.map(|part| OpenPiece::Literal { literal: part.to_vec() }).collect()
        }
        piece => vec![piece],
    };
    pieces.into_iter().flat_map(cut).collect()
}

/// Decodes frames from bytes that arrive in parts of any size.
///
/// Call [`next_frame`](Self::next_frame) until it returns `None` before pushing more; then at most one
/// frame and one part are buffered.
#[derive(Clone, Debug)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    start: usize,
    max_bytes: usize,
}

impl Default for FrameDecoder {
    fn default() -> Self {
        Self::with_limit(MAX_FRAME_BYTES)
    }
}

impl FrameDecoder {
    /// A decoder that accepts frames up to [`MAX_FRAME_BYTES`].
    pub fn new() -> Self {
        Self::default()
    }

    /// A decoder with a lower limit, for a peer that sends only short frames. A longer frame is an error as
    /// soon as its length has arrived.
    pub const fn with_limit(max_bytes: usize) -> Self {
        Self { buffer: Vec::new(), start: 0, max_bytes }
    }

    /// Adds received bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next frame, or `None` while it is not complete.
    ///
    /// # Errors
    /// [`FrameError`] for a frame that is too long or is not a [`Frame`]. The stream cannot be decoded
    /// any further, and every later call returns the same error.
    pub fn next_frame(&mut self) -> Result<Option<Frame>, FrameError> {
        let Some((length, rest)) = self.pending().split_first_chunk() else { return Ok(None) };
        let length = usize::try_from(u32::from_le_bytes(*length)).unwrap_or(usize::MAX);
        if length > self.max_bytes {
            return Err(FrameError::TooLong { found: length, limit: self.max_bytes });
        }
        let Some(json) = rest.get(..length) else { return Ok(None) };
        let frame = serde_json::from_slice(json).map_err(|error| FrameError::malformed(&error))?;
        self.start += LENGTH_BYTES + length;
        Ok(Some(frame))
    }

    /// Whether bytes of an incomplete frame, or of a frame not yet returned, are buffered.
    pub fn is_inside_frame(&self) -> bool {
        !self.pending().is_empty()
    }

    fn pending(&self) -> &[u8] {
        self.buffer.get(self.start..).unwrap_or_default()
    }
}

/// Why bytes cannot be decoded, or a frame cannot be encoded.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[expect(missing_docs, reason = "the messages say what the variants and their fields are")]
#[non_exhaustive]
pub enum FrameError {
    #[error("frame: too long: expected at most {limit} bytes, found {found}")]
    TooLong { found: usize, limit: usize },
    #[error("frame: {reason}")]
    Malformed { reason: String },
}

impl FrameError {
    fn malformed(error: &serde_json::Error) -> Self {
        Self::Malformed { reason: error.to_string() }
    }
}

/// Appends the items one by one and starts a new frame when the current one has reached
/// [`LIST_FRAME_BYTES`], so that the items need not be measured or copied first.
fn encode_list<'a, T: Serialize + 'a>(
    open: &str,
    items: impl IntoIterator<Item = &'a T>,
    close: &str,
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    let mut items = items.into_iter().peekable();
    while items.peek().is_some() {
        let start = begin_frame(out);
        out.extend_from_slice(open.as_bytes());
        let mut separator: &[u8] = b"";
        while out.len() - start < LIST_FRAME_BYTES
            && let Some(item) = items.next()
        {
            out.extend_from_slice(separator);
            append_json(item, out)?;
            separator = b",";
        }
        out.extend_from_slice(close.as_bytes());
        end_frame(out, start)?;
    }
    Ok(())
}

fn append_json(value: &impl Serialize, out: &mut Vec<u8>) -> Result<(), FrameError> {
    serde_json::to_writer(out, value).map_err(|error| FrameError::malformed(&error))
}

/// Reserves the bytes of the length; returns the frame's offset.
fn begin_frame(out: &mut Vec<u8>) -> usize {
    let start = out.len();
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    start
}

/// Fills in the length of the frame from offset `start` to the end of `out`. A frame that is too long is
/// removed.
fn end_frame(out: &mut Vec<u8>, start: usize) -> Result<(), FrameError> {
    let found = out.len() - start - LENGTH_BYTES;
    match u32::try_from(found) {
        Ok(length) if found <= MAX_FRAME_BYTES => {
            if let Some(prefix) = out.get_mut(start..start + LENGTH_BYTES) {
                prefix.copy_from_slice(&length.to_le_bytes());
            }
            Ok(())
        }
        _ => {
            out.truncate(start);
            Err(FrameError::TooLong { found, limit: MAX_FRAME_BYTES })
        }
    }
}

const LENGTH_BYTES: usize = 4;

/// The size from which a frame with a list takes no further item. Larger frames would prevent the
/// receiver from parsing one while the next is being sent; smaller ones would add overhead.
const LIST_FRAME_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
