//! `health`: whether the store works; it reads only what takes no time on a disk that responds. `reindex`: compares the
//! index with the disk and corrects it.

use blobd_client::protocol::upkeep::{Health, HealthCheck, HealthStatus, Reindexed};
use blobd_store::index::IndexStatus;
use blobd_store::{SpaceStatus, Store};
use blobd_store_format::size::human_bytes;

use super::OpError;

pub(crate) fn health(store: &Store) -> Result<Health, OpError> {
    let checks = vec![
        writes(store.content().read_only_reason().as_deref()),
        space(store)?,
        index(&store.content().index().status()),
        content(store),
    ];
    Ok(checks.into())
}

fn writes(read_only_reason: Option<&str>) -> HealthCheck {
    let (status, detail) = match read_only_reason {
        None => (HealthStatus::Ok, "the store can be changed".to_owned()),
        Some(reason) => (HealthStatus::Failing, format!("the store is read-only: {reason}")),
    };
    HealthCheck::new("writes", status, detail)
}

fn space(store: &Store) -> Result<HealthCheck, OpError> {
    // Without a count: the ledger would be locked while it inspects every blob.
    let SpaceStatus { free_bytes, is_full, .. } = store.ledger().space_status()?;
    let detail = format!("{} free", human_bytes(free_bytes));
    Ok(match is_full {
        false => HealthCheck::new("space", HealthStatus::Ok, detail),
        true => {
            let detail = format!("{detail}: nothing more can be stored");
            HealthCheck::new("space", HealthStatus::Degraded, detail)
        }
    })
}

fn index(status: &IndexStatus) -> HealthCheck {
    let (status, detail) = match status {
        IndexStatus::Degraded(reason) => (HealthStatus::Degraded, format!("kept in memory only: {reason}")),
        IndexStatus::Building => (HealthStatus::Ok, "being built; models can be opened".to_owned()),
        _ => (HealthStatus::Ok, "complete".to_owned()),
    };
    HealthCheck::new("index", status, detail)
}

fn content(store: &Store) -> HealthCheck {
    let (status, detail) = match store.content().known_damaged().len() {
        0 => (HealthStatus::Ok, "no blob is known to be damaged".to_owned()),
        count => (HealthStatus::Degraded, format!("damaged or missing blobs: {count}")),
    };
    HealthCheck::new("content", status, detail)
}

/// Compares the index with the disk and corrects it. If the index is not in use, as in embedded mode, it is loaded or built
/// first and closed afterwards.
pub(crate) fn reindex(store: &Store) -> Result<Reindexed, OpError> {
    let was_unused = store.content().index().status() == IndexStatus::Unused;
    if was_unused {
        store.content().start_index();
    }
    let found = store.reindex();
    if was_unused {
        store.content().stop_index();
    }
    let found = found?;
    Ok(Reindexed {
        blob_count: found.blob_count,
        recipe_count: found.recipe_count,
        model_count: store.names().tags()?.references.len() as u64,
        differences: found.count,
    })
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
