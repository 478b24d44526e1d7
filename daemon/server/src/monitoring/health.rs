//! Whether the daemon works: a few checks, each with a time limit.

use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use blobd_client::protocol::upkeep::{Health, HealthCheck, HealthStatus};
use tokio::time::timeout;

use crate::ops;
use crate::permits::Permit;
use crate::state::Daemon;

/// How long a check waits for its turn, and how long the disk may then delay it.
const CHECK_LIMIT: Duration = Duration::from_secs(5);

/// Checks the store, and whether its disk responds, for a user. The number of checks of a user is limited, but they do
/// not wait for the user's other work.
pub(crate) async fn health(daemon: &Arc<Daemon>, uid: u32) -> Health {
    health_within(daemon, uid, CHECK_LIMIT).await
}

async fn health_within(daemon: &Arc<Daemon>, uid: u32, limit: Duration) -> Health {
    let waited = format!("{} s", limit.as_secs());
    let checks = &daemon.limits.health;
    match timeout(limit, checks.turns.acquire(uid)).await {
        Ok(turn) => check(daemon, turn, limit).await,
        Err(_) if checks.is_any_working() => {
            failing(format!("earlier checks have had no response for {waited}"))
        }
        Err(_) => not_checked(&waited),
    }
}

async fn check(daemon: &Arc<Daemon>, turn: Permit, limit: Duration) -> Health {
    let has_begun = Arc::new(AtomicBool::new(false));
    let begun = Arc::clone(&has_begun);
    // The turn ends when the disk has responded, not when nobody waits for it any more.
    let work = daemon.blocking(turn.into(), move |daemon| {
        let _working = daemon.limits.health.work();
        begun.store(true, Ordering::Relaxed);
        ops::health(&daemon.store)
    });
    let waited = format!("{} s", limit.as_secs());
    match timeout(limit, work).await {
        Ok(Ok(Health { mut checks, .. })) => {
            checks.push(HealthCheck::new("disk", HealthStatus::Ok, "responds"));
            checks.into()
        }
        Ok(Err(error)) => failing(error.to_string()),
        Err(_) if has_begun.load(Ordering::Relaxed) => failing(format!("does not respond within {waited}")),
        Err(_) => not_checked(&waited),
    }
}

fn failing(detail: String) -> Health {
    vec![HealthCheck::new("disk", HealthStatus::Failing, detail)].into()
}

/// The daemon is too busy, which says nothing about the disk.
fn not_checked(waited: &str) -> Health {
    let detail = format!("not checked: the daemon is busy, the check has waited for its turn for {waited}");
    vec![HealthCheck::new("disk", HealthStatus::Degraded, detail)].into()
}

#[cfg(test)]
mod tests {
    use std::iter::repeat_with;

    use blobd_registry::RegistryPolicy;

    use super::*;
    use crate::metrics::Metrics;

    const UID: u32 = 7;
    const SHORT: Duration = Duration::from_millis(50);

    fn daemon() -> (tempfile::TempDir, Arc<Daemon>) {
        let folder = tempfile::tempdir().unwrap();
        let store = blobd_store::Store::open(folder.path().join("store")).unwrap();
        let metrics = Metrics::new(["health"]).unwrap();
        (folder, Arc::new(Daemon::new(store, &RegistryPolicy::default(), metrics).unwrap()))
    }

    #[tokio::test]
    async fn other_work_of_the_user_does_not_delay_checks() {
        let (_folder, daemon) = daemon();
        let held: Vec<_> =
            repeat_with(|| daemon.limits.disk.try_acquire(UID)).map_while(Result::ok).collect();
        assert!(!held.is_empty());
        let health = health_within(&daemon, UID, Duration::from_secs(60)).await;
        assert_eq!(health.status, HealthStatus::Ok, "{health:?}");
    }

    #[tokio::test]
    async fn check_that_gets_no_turn_does_not_judge_the_disk() {
        let (_folder, daemon) = daemon();
        let turns = &daemon.limits.health.turns;
        let held: Vec<_> = repeat_with(|| turns.try_acquire(UID)).map_while(Result::ok).collect();
        let health = health_within(&daemon, UID, SHORT).await;
        assert_eq!(health.status, HealthStatus::Degraded, "{health:?}");
        assert!(health.checks[0].detail.contains("not checked"), "{health:?}");
        let _working = daemon.limits.health.work();
        let health = health_within(&daemon, UID, SHORT).await;
        assert_eq!(health.status, HealthStatus::Failing, "earlier checks hang: {health:?}");
        drop(held);
    }
}
