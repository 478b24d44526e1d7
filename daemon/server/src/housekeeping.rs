//! Periodic work: frees removed models once they are no longer in use, deletes expired trash, evicts models
//! above the quota's watermark if the configuration says so, and returns unused memory to the system.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use blobd_store::gc;
use blobd_store::give_back_memory;

use crate::ops::{self, OpError};
use crate::state::{Daemon, Turn, evictions_to};

/// The delay from the last use of removed data to its deletion.
const TICK: Duration = Duration::from_secs(1);
/// Ticks from one check of the trash and the quota to the next.
const TICKS_PER_ROUND: u64 = 60;

/// Runs until the daemon ends. After a failure, which is logged, the work is repeated in the next round.
pub(crate) async fn run(daemon: Arc<Daemon>) {
    // The first tick is a wait: nothing is deleted at the moment the daemon starts.
    let mut was_refused = false;
    for tick in 1u64.. {
        tokio::time::sleep(TICK).await;
        if daemon.limits.has_become_idle() {
            // Holds the heap's locks for some milliseconds: not on a thread that serves connections.
            let trim = |_: &Daemon| {
                give_back_memory();
                Ok(0)
            };
            report("memory", daemon.blocking(Turn::for_daemon(), trim).await);
        }
        let is_round = tick % TICKS_PER_ROUND == 0;
        // The reason for a refused collection rarely disappears within a second, and finding it reads a
        // lot.
        if daemon.store.liveness().has_condemned() && (is_round || !was_refused) {
            let collect = |daemon: &Daemon| Ok(gc::collect_condemned(daemon.store.liveness())?.freed_bytes());
            let collected = daemon.blocking(Turn::for_daemon(), collect).await;
            was_refused = collected.is_err();
            report("removed", collected);
        }
        if is_round {
            let empty = |daemon: &Daemon| Ok(gc::empty_trash(daemon.store.liveness())?.freed_bytes());
            report("trash", daemon.blocking(Turn::for_daemon(), empty).await);
            report("sessions", daemon.blocking(Turn::for_daemon(), forget_removed_models).await);
            let evict = |daemon: &Daemon| {
                let report = evictions_to(&daemon.audit);
                Ok(ops::evict_excess(&daemon.store, &*daemon.last_opened, &*report)?)
            };
            report("eviction", daemon.blocking(Turn::for_daemon(), evict).await);
        }
    }
}

/// Returns 0: no disk space is freed.
fn forget_removed_models(daemon: &Daemon) -> Result<u64, OpError> {
    let tags: BTreeSet<_> = daemon.store.names().all_tags()?.into_iter().collect();
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
