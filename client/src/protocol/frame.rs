//! Frames: what the connection carries after the upgrade from HTTP.
//!
//! A frame is the length of its JSON as four bytes, least significant first, then the JSON. This
//! module turns [`Frame`]s into bytes and bytes into frames; it knows nothing of sockets. A
//! length is compared with [`MAX_FRAME_BYTES`] before anything is kept for it.

use serde::{Deserialize, Serialize};

use super::error::ErrorBody;
use super::response::{Imported, OpenHead, OpenPiece, TensorLocation};

/// The longest frame. It bounds what a peer can make the other keep; lists that do not fit are
/// cut into several frames.
pub const MAX_FRAME_BYTES: usize = 1 << 20;

/// The most literal bytes that one piece of an open answer may carry: in base64 and with its
/// neighbours it stays well below [`MAX_FRAME_BYTES`].
pub const MAX_LITERAL_BYTES: usize = 256 << 10;

/// One message after the upgrade.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[non_exhaustive]
pub enum Frame {
    /// Open, daemon to client, first: the model, and how much follows.
    Open(OpenHead),
    /// Open, daemon to client: more of a layer's pieces, in file order.
    Pieces {
        /// The number of the layer.
        layer: u32,
        /// The next of its pieces.
        pieces: Vec<OpenPiece>,
    },
    /// Open, daemon to client: more of the tensor table.
    Tensors(Vec<TensorLocation>),
    /// Descriptors come with the first byte of this frame.
    Fds {
        /// The number of the first: how many came before.
        first: u32,
        /// How many, from 1 to [`MAX_FDS_PER_BATCH`](super::MAX_FDS_PER_BATCH).
        count: u32,
    },
    /// Open, client to daemon: the descriptors have arrived.
    Ack {
        /// How many in all.
        received: u32,
    },
    /// Import, daemon to client: how far it is.
    Progress {
        /// How many bytes of the file have been read.
        completed: u64,
        /// How many it has.
        total: u64,
    },
    /// Import, daemon to client: it is done; nothing follows.
    Imported(Imported),
    /// It failed; nothing follows.
    Error(ErrorBody),
}

impl Frame {
    /// The frame's bytes, its length in front.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] above [`MAX_FRAME_BYTES`].
    pub fn encode(&self) -> Result<Vec<u8>, FrameError> {
        let mut out = Vec::new();
        self.encode_into(&mut out)?;
        Ok(out)
    }

    /// Appends the frame's bytes to `out`; on an error `out` is as it was.
    ///
    /// # Errors
    /// [`FrameError::TooLong`] above [`MAX_FRAME_BYTES`].
    pub fn encode_into(&self, out: &mut Vec<u8>) -> Result<(), FrameError> {
        let start = begin_frame(out);
        append_json(self, out)?;
        end_frame(out, start)
    }

    /// The frame's kind, for messages.
    #[must_use]
    pub const fn kind(&self) -> &'static str {
        match self {
            Self::Open(_) => "open",
            Self::Pieces { .. } => "pieces",
            Self::Tensors(_) => "tensors",
            Self::Fds { .. } => "fds",
            Self::Ack { .. } => "ack",
            Self::Progress { .. } => "progress",
            Self::Imported(_) => "imported",
            Self::Error(_) => "error",
        }
    }
}

/// Appends a tensor table to `out`, as many `tensors` frames as it needs. The bytes depend on
/// nothing else, so a daemon may keep them for the next client.
///
/// # Errors
/// [`FrameError::TooLong`] when one tensor is nearly as long as a frame.
pub fn encode_tensors<'a>(
    tensors: impl IntoIterator<Item = &'a TensorLocation>,
    out: &mut Vec<u8>,
) -> Result<(), FrameError> {
    encode_list(r#"{"tensors":["#, tensors, "]}", out)
}

/// Appends a layer's pieces to `out`, as many `pieces` frames as they need.
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

/// The same pieces with every literal above [`MAX_LITERAL_BYTES`] cut into several. The head of
/// an open answer counts the pieces as they are after this.
#[must_use]
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

/// Puts frames together from bytes that arrive in any portions.
///
/// Call [`next_frame`](Self::next_frame) until it has none before pushing more: then no more
/// than one frame and one portion is ever kept.
#[derive(Clone, Debug)]
pub struct FrameDecoder {
    buffer: Vec<u8>,
    /// Where in `buffer` the next frame starts.
    start: usize,
    /// The longest frame that is put together.
    max_bytes: usize,
}

impl Default for FrameDecoder {
    fn default() -> Self {
        Self::with_limit(MAX_FRAME_BYTES)
    }
}

impl FrameDecoder {
    /// A decoder that has seen nothing.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same for a peer all of whose frames are short: longer ones are refused before they arrive.
    #[must_use]
    pub const fn with_limit(max_bytes: usize) -> Self {
        Self { buffer: Vec::new(), start: 0, max_bytes }
    }

    /// Takes the next bytes.
    pub fn push(&mut self, bytes: &[u8]) {
        self.buffer.drain(..self.start);
        self.start = 0;
        self.buffer.extend_from_slice(bytes);
    }

    /// The next frame, or `None` while it is not complete.
    ///
    /// # Errors
    /// [`FrameError`] for a frame that is too long or is not one of [`Frame`]; the stream cannot
    /// be read any further, and every later call says so again.
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

    /// Whether the bytes end in the middle of a frame.
    #[must_use]
    pub fn is_inside_frame(&self) -> bool {
        !self.pending().is_empty()
    }

    fn pending(&self) -> &[u8] {
        self.buffer.get(self.start..).unwrap_or_default()
    }
}

/// Why bytes are no frame, or a frame cannot be sent.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum FrameError {
    /// Longer than a frame may be.
    #[error("frame: {found} bytes, at most {limit} allowed")]
    TooLong {
        /// Its length.
        found: usize,
        /// The most that is allowed.
        limit: usize,
    },
    /// No JSON, or JSON of another form.
    #[error("frame: {reason}")]
    Malformed {
        /// What the JSON parser says.
        reason: String,
    },
}

impl FrameError {
    fn malformed(error: &serde_json::Error) -> Self {
        Self::Malformed { reason: error.to_string() }
    }
}

/// Writes the items one by one and starts a new frame whenever one is long enough, so that
/// nothing has to be measured or copied beforehand.
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

/// Leaves room for the length; returns where the frame starts.
fn begin_frame(out: &mut Vec<u8>) -> usize {
    let start = out.len();
    out.extend_from_slice(&[0; LENGTH_BYTES]);
    start
}

/// Fills in the length of the frame that starts at `start` and ends where `out` ends.
fn end_frame(out: &mut Vec<u8>, start: usize) -> Result<(), FrameError> {
    let found = out.len() - start - LENGTH_BYTES;
    match u32::try_from(found) {
        Ok(length) if found <= MAX_FRAME_BYTES => {
            if let Some(room) = out.get_mut(start..start + LENGTH_BYTES) {
                room.copy_from_slice(&length.to_le_bytes());
            }
            Ok(())
        }
        _ => {
            out.truncate(start);
            Err(FrameError::TooLong { found, limit: MAX_FRAME_BYTES })
        }
    }
}

/// How many bytes the length in front of a frame takes.
const LENGTH_BYTES: usize = 4;

/// How long a frame with a list gets before the next is started: long enough for few frames,
/// short enough that the receiver can parse one while the next is on its way.
const LIST_FRAME_BYTES: usize = 64 << 10;

#[cfg(test)]
mod tests;
