//! Reads a model for a request: one request at a time reads a large model, and concurrent requests share
//! the result.

use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::error::ErrorBody;
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use tokio::time::{Instant, timeout};

use crate::large_models::ReadPermit;
use crate::limits::too_many_unread;
use crate::ops::{OpError, header_bytes};
use crate::state::Daemon;

/// Models with smaller recipes (and smaller headers, if those are read) are not counted. Headers with a
/// vocabulary have up to 10 MiB.
const LARGE_FROM_BYTES: u64 = 1 << 20;

/// Memory that a model takes for each byte of its recipes: their text, and what it is parsed into.
const BYTES_PER_RECIPE_BYTE: u64 = 2;

/// How long a request waits for memory before it checks whether another has read the model meanwhile.
const RECHECK_INTERVAL: Duration = Duration::from_millis(250);

/// How long it waits in total.
const MEMORY_TIMEOUT: Duration = Duration::from_secs(12);

/// The parts of a model that a request reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Reads {
    Recipes,
    /// The recipes, and the headers of the files.
    Headers,
}

/// Does `work`, which reads the model `reference`, for the user `uid`. The permit is held for as long as
/// the result is used. For a large model, `then` runs before the next request may read the model: it counts
/// the memory of the result.
pub(crate) async fn read_model<T: Send + 'static>(
    daemon: &Arc<Daemon>,
    uid: u32,
    reference: &Reference,
    reads: Reads,
    work: impl Fn(&Daemon) -> Result<T, OpError> + Clone + Send + 'static,
    then: impl AsyncFnOnce(&T) -> Result<(), ErrorBody>,
) -> Result<(T, ReadPermit), ErrorBody> {
    let (named, read) = (reference.clone(), work.clone());
    // Small models, which are most, need only this step.
    let read_if_small = move |daemon: &Daemon| {
        let (_, bytes) = weight(daemon, &named, reads)?;
        if bytes < LARGE_FROM_BYTES { read(daemon).map(Some) } else { Ok(None) }
    };
    if let Some(done) = daemon.disk_work(uid, read_if_small).await.map_err(|error| error.body())? {
        return Ok((done, ReadPermit::default()));
    }
    let permit = read_permit(daemon, uid, reference, reads).await?;
    let turn = permit.turn().await;
    let done = daemon.disk_work(uid, work).await.map_err(|error| error.body())?;
    then(&done).await?;
    drop(turn);
    Ok((done, permit))
}

/// The digest of the model's manifest, and the number of bytes to read.
fn weight(daemon: &Daemon, reference: &Reference, reads: Reads) -> Result<(Digest, u64), OpError> {
    let (manifest, bytes) = daemon.store.recipes_length(reference)?;
    if reads == Reads::Recipes || bytes >= LARGE_FROM_BYTES {
        return Ok((manifest, bytes));
    }
    Ok((manifest, bytes.saturating_add(header_bytes(&daemon.store, reference)?)))
}

/// Waits for the memory to read a model. Fails with `busy` after a time limit.
async fn read_permit(
    daemon: &Arc<Daemon>,
    uid: u32,
    reference: &Reference,
    reads: Reads,
) -> Result<ReadPermit, ErrorBody> {
    let start = Instant::now();
    loop {
        let named = reference.clone();
        let weigh = move |daemon: &Daemon| weight(daemon, &named, reads);
        let (manifest, bytes) = daemon.disk_work(uid, weigh).await.map_err(|error| error.body())?;
        if bytes < LARGE_FROM_BYTES {
            return Ok(ReadPermit::default());
        }
        if let Some(permit) = daemon.large_models.find(manifest) {
            return Ok(permit);
        }
        let bytes = usize::try_from(bytes.saturating_mul(BYTES_PER_RECIPE_BYTE)).unwrap_or(usize::MAX);
        match timeout(RECHECK_INTERVAL, daemon.limits.memory_for(uid, bytes)).await {
            Ok(memory) => {
                let counted = memory?.map(|memory| daemon.large_models.count(manifest, memory));
                return Ok(counted.unwrap_or_default());
            }
            Err(_elapsed) if start.elapsed() < MEMORY_TIMEOUT => {}
            Err(_elapsed) => return Err(too_many_unread(uid)),
        }
    }
}
