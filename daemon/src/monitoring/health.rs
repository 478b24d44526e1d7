//! `GET /v1/health`

use std::sync::Arc;
use std::time::Duration;

use blobd_client::protocol::health::{Health, HealthCheck, HealthStatus};
use tokio::time::timeout;

use crate::ops;
use crate::state::Daemon;

/// How long the disk, and other requests of the same user, may delay the checks.
const CHECK_LIMIT: Duration = Duration::from_secs(5);

/// Checks the store, and whether its disk responds. `uid` is the user who asks: each user has a limited number of
/// checks at a time.
pub(crate) async fn health(daemon: &Arc<Daemon>, uid: u32) -> Health {
    let checked = timeout(CHECK_LIMIT, daemon.disk_work(uid, |daemon| ops::health(&daemon.store))).await;
    let failing = |detail| vec![HealthCheck::new("disk", HealthStatus::Failing, detail)].into();
    match checked {
        Ok(Ok(Health { mut checks, .. })) => {
            checks.push(HealthCheck::new("disk", HealthStatus::Ok, "responds"));
            checks.into()
        }
        Ok(Err(error)) => failing(error.to_string()),
        Err(_elapsed) => failing(format!("does not respond within {} s", CHECK_LIMIT.as_secs())),
    }
}
