//! Makes responses: their memory is counted before the work begins, then the work waits for its user's turn, and the
//! response is counted until its last byte is written.

use std::io;

use blobd_client::protocol::error::ErrorBody;
use blobd_client::protocol::route::Document;
use blobd_store::ListingSize;
use serde::Serialize;

use super::Caller;
use super::body::{Answer, Reply, raw_response};
use crate::limits::{UNCOUNTED_BYTES, kib};
use crate::ops::OpError;
use crate::permits::{Permit, PermitPool};
use crate::state::{Daemon, Turn};

/// The pool in which a request waits for its user's turn before it uses a thread that may block.
pub(super) type TurnPool = fn(&Daemon) -> &PermitPool;

/// The memory of a response and of the work for it. It is counted before the work begins, and reduced to the length of the
/// response when that is known.
#[derive(Clone, Copy, Debug)]
pub(super) enum Memory {
    /// Short, or counted by the request itself. A response that is long because of what the client has requested is
    /// counted as soon as its length is known, before it is made.
    Short,
    /// An upper bound from the state of the daemon.
    Daemon(fn(&Daemon) -> usize),
    /// An upper bound from the size of the store.
    Store(fn(&StoreSize) -> usize),
}

/// The sizes that responses about the whole store grow with.
#[derive(Clone, Copy, Debug)]
pub(super) struct StoreSize {
    pub(super) listing: ListingSize,
    pub(super) blobs: usize,
}

impl StoreSize {
    /// Memory of `bytes` for each model, and of its texts (such as its name), as values and as JSON.
    pub(super) const fn models(&self, bytes: usize) -> usize {
        let ListingSize { models, text_bytes } = self.listing;
        models.saturating_mul(bytes).saturating_add(text_bytes.saturating_mul(3))
    }

    /// Also `per_blob` for each blob.
    pub(super) const fn models_and_blobs(&self, bytes: usize, per_blob: usize) -> usize {
        self.models(bytes).saturating_add(self.blobs.saturating_mul(per_blob))
    }
}

/// A result, as JSON if that is short or was counted before.
enum Made<T> {
    Json(Vec<u8>),
    /// The value, and the length of its JSON.
    Uncounted(T, usize),
}

impl From<OpError> for ErrorBody {
    fn from(error: OpError) -> Self {
        error.body()
    }
}

impl Caller {
    pub(super) async fn answer<T: Serialize + Sync>(&self, value: &T) -> Answer<T> {
        match small_json(value, UNCOUNTED_BYTES)? {
            Ok(json) => Ok(document(json, None)),
            Err(length) => {
                let memory = self.memory(length).await?;
                Ok(document(json_of(value, length)?, memory))
            }
        }
    }

    /// Does the work of the request at its user's turn, and responds with its result.
    pub(super) async fn respond<T: Serialize + Send + 'static>(
        &self,
        work: impl FnOnce(&Daemon) -> Result<T, OpError> + Send + 'static,
    ) -> Answer<T> {
        let memory = self.reserve(0).await?;
        self.respond_within(memory, (self.turns)(&self.daemon), work).await
    }

    /// For a request that needs more memory or another turn than its route says.
    pub(super) async fn respond_within<T: Serialize + Send + 'static>(
        &self,
        memory: Option<Permit>,
        turns: &PermitPool,
        work: impl FnOnce(&Daemon) -> Result<T, OpError> + Send + 'static,
    ) -> Answer<T> {
        let reserved = memory.as_ref().map_or(0, |memory| memory.units() << 10);
        let make = move |daemon: &Daemon| {
            let value = work(daemon)?;
            Ok(match small_json(&value, reserved.max(UNCOUNTED_BYTES))? {
                Ok(json) => Made::Json(json),
                Err(length) => Made::Uncounted(value, length),
            })
        };
        let turn: Turn = turns.acquire(self.peer.uid).await.into();
        match self.daemon.blocking(turn.clone(), make).await? {
            Made::Json(json) => {
                let memory = reduced(memory, json.len());
                Ok(document(json, memory))
            }
            Made::Uncounted(value, length) => {
                // Returned first: a request that holds some must not wait for more.
                drop(memory);
                // Keeps the turn, so that a user has few values that wait.
                let memory = self.memory(length).await?;
                let make = move |_: &Daemon| json_of(&value, length);
                let json = self.daemon.blocking(turn, make).await?;
                Ok(document(json, memory))
            }
        }
    }

    pub(super) async fn turn(&self) -> Turn {
        (self.turns)(&self.daemon).acquire(self.peer.uid).await.into()
    }

    /// Counts the memory that the route needs, and `more`.
    pub(super) async fn reserve(&self, more: usize) -> Result<Option<Permit>, ErrorBody> {
        let bytes = match self.memory {
            Memory::Short => 0,
            Memory::Daemon(bytes) => bytes(&self.daemon),
            Memory::Store(bytes) => bytes(&self.store_size().await),
        };
        self.memory(bytes.saturating_add(more)).await
    }

    /// Counts memory for the user of the request; `None` for little.
    pub(super) async fn memory(&self, bytes: usize) -> Result<Option<Permit>, ErrorBody> {
        self.daemon.limits.memory_for(self.peer.uid, bytes).await
    }

    pub(super) async fn store_size(&self) -> StoreSize {
        let store = &self.daemon.store;
        if store.names().listing_size().is_none() {
            // The first list fills the cache that all later ones use. If it fails, the request itself says why, or reports
            // the damage.
            let list = |daemon: &Daemon| Ok(daemon.store.names().all_summaries().map(drop)?);
            let _damaged = self.daemon.disk_work(self.peer.uid, list).await;
        }
        let blobs = store.content().index().catalog_now().map_or(0, |catalog| catalog.blob_count());
        let blobs = usize::try_from(blobs).unwrap_or(usize::MAX);
        StoreSize { listing: store.names().listing_size().unwrap_or_default(), blobs }
    }
}

fn document<T>(json: Vec<u8>, memory: Option<Permit>) -> Reply<Document<T>> {
    Reply::new(raw_response(json, memory))
}

/// Reduces the counted memory to that of a response of `bytes`.
pub(super) fn reduced(mut memory: Option<Permit>, bytes: usize) -> Option<Permit> {
    memory.iter_mut().for_each(|memory| memory.shrink(usize::try_from(kib(bytes)).unwrap_or(usize::MAX)));
    memory.filter(|_| bytes > UNCOUNTED_BYTES)
}

/// The JSON of a value, or its length if that is more than `limit`, so that it must be counted before it is made.
fn small_json(value: &impl Serialize, limit: usize) -> Result<Result<Vec<u8>, usize>, OpError> {
    let mut start = Start { limit, ..Start::default() };
    serde_json::to_writer(&mut start, value).map_err(|error| OpError::Internal(error.to_string()))?;
    start.bytes.shrink_to_fit();
    Ok(if start.length <= limit { Ok(start.bytes) } else { Err(start.length) })
}

pub(super) fn json_length(value: &impl Serialize) -> Result<usize, OpError> {
    small_json(value, 0).map(|json| json.map_or_else(|length| length, |json| json.len()))
}

/// The JSON of a value whose length is known, so that it needs no more memory than that.
pub(super) fn json_of(value: &impl Serialize, length: usize) -> Result<Vec<u8>, OpError> {
    let mut json = Vec::with_capacity(length);
    serde_json::to_writer(&mut json, value).map_err(|error| OpError::Internal(error.to_string()))?;
    Ok(json)
}

/// Counts what is written, and keeps it if it is short.
#[derive(Debug, Default)]
struct Start {
    bytes: Vec<u8>,
    length: usize,
    /// The most bytes that are kept.
    limit: usize,
}

impl io::Write for Start {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.length = self.length.saturating_add(bytes.len());
        if self.length <= self.limit {
            self.bytes.extend_from_slice(bytes);
        } else {
            self.bytes = Vec::new();
        }
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}
