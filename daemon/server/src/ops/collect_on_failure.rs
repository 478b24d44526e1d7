//! Collects what a failed verb has published, and explains a lack of space.

use blobd_client::protocol::error::ErrorCode;
use blobd_store::Store;
use blobd_store::gc;

use super::OpError;
use super::relief::{Leftover, Relief};

/// Runs `work`. If it fails, for instance on a full disk, collects the files that it had published already.
pub(super) fn collect_on_failure<T>(
    store: &Store,
    leftover: Leftover,
    work: impl FnOnce() -> Result<T, OpError>,
) -> Result<T, OpError> {
    let done = work().inspect_err(|_| {
        if let Err(error) = gc::collect_condemned(store) {
            tracing::warn!(
                "blobs of a failed transaction were not collected: {error}; `blobd gc` collects them"
            );
        }
    });
    explaining_no_space(store, leftover, done)
}

/// Adds to the error about missing space what could free some.
pub(super) fn explaining_no_space<T>(
    store: &Store,
    leftover: Leftover,
    done: Result<T, OpError>,
) -> Result<T, OpError> {
    done.map_err(|error| match error.code() {
        ErrorCode::NoSpace => {
            OpError::NoSpace { source: Box::new(error), relief: Relief::of(store), leftover }
        }
        _ => error,
    })
}
