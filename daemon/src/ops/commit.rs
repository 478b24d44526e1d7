//! The last step of whatever adds to the store.

use blobd_store::Store;
use blobd_store::gc;

use super::OpError;

/// Passes on what a transaction ended with. If it failed half-way, on a full disk for instance,
/// what had its name already goes again unless something else needs it.
///
/// # Errors
/// Those of `work`.
pub(super) fn leaving_nothing<T>(
    store: &Store,
    work: impl FnOnce() -> Result<T, OpError>,
) -> Result<T, OpError> {
    work().inspect_err(|_| {
        if let Err(error) = gc::collect_condemned(store) {
            tracing::warn!("what failed has left blobs: {error}");
        }
    })
}
