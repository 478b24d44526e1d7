//! `reindex`: the index is compared with the disk and mended.

use blobd_client::protocol::upkeep::Reindexed;
use blobd_store::Store;
use blobd_store::index::IndexStatus;

use super::OpError;

/// Compares the index with the disk and mends it. In a command of its own the index is loaded, or
/// built, for that and closed again.
///
/// # Errors
/// [`blobd_store::StoreError`].
pub fn reindex(store: &Store) -> Result<Reindexed, OpError> {
    let is_ours = store.index_status() == IndexStatus::Unused;
    if is_ours {
        store.start_index();
    }
    let found = store.reindex();
    if is_ours {
        store.stop_index();
    }
    let found = found?;
    Ok(Reindexed {
        blob_count: found.blob_count,
        recipe_count: found.recipe_count,
        model_count: store.tags()?.references.len() as u64,
        differences: found.count,
    })
}
