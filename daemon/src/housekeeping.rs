//! What a daemon does without being asked, because somebody asked for it before: what `rm` could
//! not free goes when it is let go, what `rm --keep` put aside goes when its time is over, and
//! what is above the quota's watermark goes if the configuration says so.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use blobd_store::gc;
use blobd_store::give_back_memory;

use crate::ops::{self, OpError};
use crate::state::Daemon;

/// How soon after a program lets go of removed bytes they are freed.
const TICK: Duration = Duration::from_secs(1);
/// How many ticks lie between two looks at the trash and the quota.
const TICKS_PER_ROUND: u64 = 60;

/// Runs for ever. What fails is logged and tried again.
pub(crate) async fn run(daemon: Arc<Daemon>) {
    // Nothing goes the moment a daemon starts: there is time to see what it is about to do.
    let mut was_refused = false;
    for tick in 1u64.. {
        tokio::time::sleep(TICK).await;
        if daemon.limits.has_become_idle() {
            // Takes the heap's locks for some milliseconds: not on a thread that serves connections.
            let trim = |_: &Daemon| {
                give_back_memory();
                Ok(0)
            };
            report("memory", daemon.blocking(trim).await);
        }
        let is_round = tick % TICKS_PER_ROUND == 0;
        // What stops a collection is seldom gone within a second, and finding it reads a lot.
        if daemon.store.has_condemned() && (is_round || !was_refused) {
            let collect = |daemon: &Daemon| Ok(gc::collect_condemned(&daemon.store)?.freed_bytes());
            let collected = daemon.blocking(collect).await;
            was_refused = collected.is_err();
            report("removed", collected);
        }
        if is_round {
            report(
                "trash",
                daemon.blocking(|daemon| Ok(gc::empty_trash(&daemon.store)?.freed_bytes())).await,
            );
            report("sessions", daemon.blocking(forget_removed_models).await);
            let evict = |daemon: &Daemon| Ok(ops::evict_excess(&daemon.store, &*daemon.last_opened)?);
            report("eviction", daemon.blocking(evict).await);
        }
    }
}

/// Frees no bytes of the disk.
fn forget_removed_models(daemon: &Daemon) -> Result<u64, OpError> {
    let tags: BTreeSet<_> = daemon.store.tags()?.references.into_iter().collect();
    daemon.sessions.keep_opened(|model| tags.contains(model));
    Ok(0)
}

fn report(what: &str, freed: Result<u64, OpError>) {
    match freed {
        Ok(0) => {}
        Ok(bytes) => tracing::info!("{what}: {bytes} bytes freed"),
        Err(error) => tracing::warn!("{what}: {error}"),
    }
}
