//! Collects what a failed verb has published.

use blobd_store::Store;
use blobd_store::gc;

use super::OpError;

/// Runs `work`. If it fails, for instance on a full disk, collects the files that it had published already.
pub(super) fn collect_on_failure<T>(
    store: &Store,
    work: impl FnOnce() -> Result<T, OpError>,
) -> Result<T, OpError> {
    work().inspect_err(|_| {
        if let Err(error) = gc::collect_condemned(store) {
            tracing::warn!(
                "blobs of a failed transaction were not collected: {error}; `blobd gc` collects them"
            );
        }
    })
}
