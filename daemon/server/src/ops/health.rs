//! `health`: whether the store works. Reads only what takes no time on a disk that responds.

use blobd_client::protocol::health::{Health, HealthCheck, HealthStatus};
use blobd_store::index::IndexStatus;
use blobd_store::{SpaceStatus, Store};
use blobd_store_format::size::human_bytes;

use super::OpError;

/// Checks the store.
pub fn health(store: &Store) -> Result<Health, OpError> {
    let checks = vec![
        writes(store.content().read_only_reason().as_deref()),
        space(store)?,
        index(&store.content().index().status()),
        content(store),
    ];
    Ok(checks.into())
}

fn writes(read_only_reason: Option<&str>) -> HealthCheck {
    match read_only_reason {
        None => HealthCheck::new("writes", HealthStatus::Ok, "the store can be changed"),
        Some(reason) => {
            let detail = format!("the store is read-only: {reason}");
            HealthCheck::new("writes", HealthStatus::Failing, detail)
        }
    }
}

fn space(store: &Store) -> Result<HealthCheck, OpError> {
    // Without a count: the ledger would be locked while it inspects every blob.
    let SpaceStatus { free_bytes, is_full, .. } = store.ledger().space_status()?;
    let detail = format!("{} free", human_bytes(free_bytes));
    let check = |status, detail| Ok(HealthCheck::new("space", status, detail));
    match is_full {
        false => check(HealthStatus::Ok, detail),
        true => check(HealthStatus::Degraded, format!("{detail}: nothing more can be stored")),
    }
}

fn index(status: &IndexStatus) -> HealthCheck {
    let check = |status, detail: String| HealthCheck::new("index", status, detail);
    match status {
        IndexStatus::Degraded(reason) => {
            check(HealthStatus::Degraded, format!("kept in memory only: {reason}"))
        }
        IndexStatus::Building => check(HealthStatus::Ok, "being built; models can be opened".to_owned()),
        _ => check(HealthStatus::Ok, "complete".to_owned()),
    }
}

fn content(store: &Store) -> HealthCheck {
    let check = |status, detail: String| HealthCheck::new("content", status, detail);
    match store.content().known_damaged().len() {
        0 => check(HealthStatus::Ok, "no blob is known to be damaged".to_owned()),
        count => check(HealthStatus::Degraded, format!("damaged or missing blobs: {count}")),
    }
}

#[cfg(test)]
mod tests {
    use blobd_store::testing::{new_store, store_with};

    use super::*;

    fn status(health: &Health, name: &str) -> HealthStatus {
        health.checks.iter().find(|check| check.name == name).unwrap().status
    }

    #[test]
    fn new_store_is_healthy() {
        let (_folder, store) = new_store();
        let health = health(&store).unwrap();
        assert_eq!(health.status, HealthStatus::Ok, "{health:?}");
    }

    #[test]
    fn store_that_cannot_be_written_is_failing_and_an_index_without_a_copy_degraded() {
        assert_eq!(writes(Some("fsync: I/O error")).status, HealthStatus::Failing);
        assert_eq!(index(&IndexStatus::Degraded("no space".to_owned())).status, HealthStatus::Degraded);
        assert_eq!(index(&IndexStatus::Building).status, HealthStatus::Ok);
    }

    #[test]
    fn missing_blob_degrades_the_content() {
        let (_folder, store, _digest) = store_with(b"weights");
        store.content().note_missing(blobd_store_format::digest::Digest::of(b"another"));
        let health = health(&store).unwrap();
        assert_eq!(status(&health, "content"), HealthStatus::Degraded, "{health:?}");
        assert_eq!(health.status, HealthStatus::Degraded);
    }
}
