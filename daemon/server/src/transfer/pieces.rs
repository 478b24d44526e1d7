//! Received bytes on their way to the writer thread, collected into pieces that are worth a write.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use blobd_registry::{ByteStream, RegistryError, Sender};
use blobd_store::StoreError;
use bytes::Bytes;
use tokio::sync::mpsc;
use tokio::time::Instant;

use super::TransferError;
use super::shared_assembler::SharedAssembler;

#[derive(Debug)]
pub(super) struct Piece {
    offset: u64,
    frames: Vec<Bytes>,
    length: usize,
    sender: Arc<Sender>,
}

/// How much is written, and recorded in the journal, at once.
const PIECE_BYTES: usize = 1 << 20;
/// Frames of at least this size on average are written one by one.
const LARGE_FRAME_BYTES: usize = 128 << 10;
/// How long the bytes of a slow connection wait at most to be written.
const PIECE_TIMEOUT: Duration = Duration::from_millis(200);

pub(super) struct Pieces {
    /// Where the collected frames belong in the file.
    pub(super) offset: u64,
    frames: Vec<Bytes>,
    length: usize,
    since: Instant,
    sender: Arc<Sender>,
}

impl Pieces {
    pub(super) fn new(offset: u64, sender: &Arc<Sender>) -> Self {
        let sender = Arc::clone(sender);
        Self { offset, frames: Vec::new(), length: 0, since: Instant::now(), sender }
    }

    /// The next bytes of a stream; empty when collected frames have waited long enough, or nothing has arrived for
    /// `patience`.
    pub(super) async fn next_of(
        &self,
        stream: &mut ByteStream,
        patience: Duration,
    ) -> Result<Option<Bytes>, RegistryError> {
        let is_waiting = !self.frames.is_empty();
        let until = if is_waiting { self.since + PIECE_TIMEOUT } else { Instant::now() + patience };
        let next = tokio::time::timeout_at(until, stream.next()).await;
        next.unwrap_or_else(|_elapsed| Ok(Some(Bytes::new())))
    }

    pub(super) fn push(&mut self, bytes: Bytes) {
        if bytes.is_empty() {
            return;
        }
        if self.frames.is_empty() {
            self.since = Instant::now();
        }
        self.length += bytes.len();
        self.frames.push(bytes);
    }

    pub(super) fn is_full(&self) -> bool {
        self.length >= PIECE_BYTES
    }

    pub(super) fn left(&self, range: &Range<u64>) -> u64 {
        range.end.saturating_sub(self.offset).saturating_sub(self.length as u64)
    }

    pub(super) fn take(&mut self) -> Option<Piece> {
        let (frames, length) = (std::mem::take(&mut self.frames), std::mem::take(&mut self.length));
        let (offset, sender) = (self.offset, Arc::clone(&self.sender));
        self.offset += length as u64;
        (length > 0).then_some(Piece { offset, frames, length, sender })
    }
}

/// Writes pieces until the channel is closed or a write fails.
pub(super) fn write_pieces(shared: &SharedAssembler, mut pieces: mpsc::Receiver<Piece>) {
    let mut joined = Vec::new();
    while let Some(piece) = pieces.blocking_recv() {
        if let Err(error) = write_piece(shared, &piece, &mut joined) {
            shared.fail(error.into());
            return;
        }
    }
    // Ends the wait of readers for bytes that will never arrive.
    if !shared.assembler().missing().is_empty() {
        shared.fail(TransferError::Incomplete);
    }
}

/// Writes large frames one by one, which saves a copy, and small ones joined, which saves writes and records in the
/// journal. `joined` is a buffer that is used again.
fn write_piece(shared: &SharedAssembler, piece: &Piece, joined: &mut Vec<u8>) -> Result<(), StoreError> {
    if piece.length >= piece.frames.len().saturating_mul(LARGE_FRAME_BYTES) {
        let mut offset = piece.offset;
        return piece.frames.iter().try_for_each(|frame| {
            shared.write(offset, frame, &piece.sender)?;
            offset = offset.saturating_add(frame.len() as u64);
            Ok(())
        });
    }
    joined.clear();
    joined.reserve(piece.length);
    piece.frames.iter().for_each(|frame| joined.extend_from_slice(frame));
    shared.write(piece.offset, joined, &piece.sender)
}
