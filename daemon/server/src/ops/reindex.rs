//! `reindex`: compares the index with the disk and corrects it.

use blobd_client::protocol::upkeep::Reindexed;
use blobd_store::Store;
use blobd_store::index::IndexStatus;

use super::OpError;

/// Compares the index with the disk and corrects it. If the index is not in use, as in embedded mode, it is
/// loaded or built first and closed afterwards.
pub fn reindex(store: &Store) -> Result<Reindexed, OpError> {
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
