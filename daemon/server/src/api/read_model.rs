//! Reads a model for a request: one request at a time reads a large model, and concurrent requests share
//! the result.

use std::time::Duration;

use blobd_client::protocol::error::ErrorBody;
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;
use tokio::time::{Instant, timeout};

use super::Caller;
use crate::large_models::ReadPermit;
use crate::limits::too_many_unread;
use crate::ops::{OpError, header_bytes};
use crate::state::Daemon;

/// Models with smaller recipes (and smaller headers, if those are read) are not counted. Headers with a
/// vocabulary have up to 10 MiB.
const LARGE_FROM_BYTES: u64 = 1 << 20;

/// How long a request waits for memory before it checks whether another has read the model meanwhile.
const RECHECK_INTERVAL: Duration = Duration::from_millis(250);

const MEMORY_TIMEOUT: Duration = Duration::from_secs(12);

/// The parts of a model that a request reads, and what it makes of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Reads {
    /// The recipes, and a response of about the same length. One is counted with the model
    /// ([`ReadPermit::claim_response`]): a request that holds some memory must not have to wait for more.
    RecipesForResponse,
    /// The recipes, and the headers of the files, one after the other.
    Headers,
    /// The recipes, and the headers of the files, which are kept until the last is read. The response is counted with them.
    AllHeaders,
}

impl Reads {
    /// Memory for each byte that is read: the text, the parsed values, and the result.
    const fn bytes_per_byte(self) -> u64 {
        match self {
            Self::RecipesForResponse => 3,
            Self::Headers => 2,
            // The text, the parser's copy, the tables of both, and the report.
            Self::AllHeaders => 4,
        }
    }
}

/// Does `work`, which reads the model, for the user of the request. The permit is held for as long as the result is
/// used. `count` counts the result before the next request may read, so that few results wait for memory.
pub(super) async fn read_model<T: Send + 'static, M>(
    caller: &Caller,
    reference: &Reference,
    reads: Reads,
    work: impl Fn(&Daemon) -> Result<T, OpError> + Clone + Send + 'static,
    count: impl AsyncFnOnce(&T, &ReadPermit) -> Result<M, ErrorBody>,
) -> Result<(T, ReadPermit, M), ErrorBody> {
    let (named, read) = (reference.clone(), work.clone());
    // Small models, which are most, need only this step.
    let read_if_small = move |daemon: &Daemon| {
        let (_, bytes) = weight(daemon, &named, reads)?;
        if bytes < LARGE_FROM_BYTES { read(daemon).map(Some) } else { Ok(None) }
    };
    let (daemon, turn) = (&caller.daemon, caller.turn().await);
    if let Some(done) = daemon.blocking(turn.clone(), read_if_small).await? {
        let permit = ReadPermit::default();
        let memory = count(&done, &permit).await?;
        return Ok((done, permit, memory));
    }
    drop(turn);
    let permit = read_permit(caller, reference, reads).await?;
    let reading = permit.turn().await;
    let done = daemon.long_work(caller.turn().await, work).await?;
    let memory = count(&done, &permit).await?;
    drop(reading);
    Ok((done, permit, memory))
}

/// The digest of the model's manifest, and the number of bytes to read.
fn weight(daemon: &Daemon, reference: &Reference, reads: Reads) -> Result<(Digest, u64), OpError> {
    let (manifest, bytes) = daemon.store.names().recipes_length(reference)?;
    if reads == Reads::RecipesForResponse || bytes >= LARGE_FROM_BYTES {
        return Ok((manifest, bytes));
    }
    Ok((manifest, bytes.saturating_add(header_bytes(&daemon.store, reference)?)))
}

/// Waits for the memory to read a model. Fails with `busy` after a time limit.
async fn read_permit(caller: &Caller, reference: &Reference, reads: Reads) -> Result<ReadPermit, ErrorBody> {
    let (daemon, uid, start) = (&caller.daemon, caller.peer.uid, Instant::now());
    loop {
        let named = reference.clone();
        let weigh = move |daemon: &Daemon| weight(daemon, &named, reads);
        let (manifest, bytes) = daemon.blocking(caller.turn().await, weigh).await?;
        if bytes < LARGE_FROM_BYTES {
            return Ok(ReadPermit::default());
        }
        if let Some(permit) = daemon.large_models.find(manifest) {
            return Ok(permit);
        }
        let bytes = usize::try_from(bytes.saturating_mul(reads.bytes_per_byte())).unwrap_or(usize::MAX);
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
