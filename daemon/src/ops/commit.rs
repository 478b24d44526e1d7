//! The last step of whatever adds to the store.

use std::collections::BTreeSet;
use std::sync::Arc;

use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use crate::gc::{self, Node};
use crate::store::{Committed, Ingest, StoreError};

/// Commits a transaction. If that fails half-way, on a full disk for instance, what had its name
/// already goes again unless something else needs it.
///
/// # Errors
/// Those of [`Ingest::commit`].
pub(super) fn commit(
    ingest: Ingest,
    reference: &Reference,
    manifest: &Manifest,
    origin: Option<&str>,
) -> Result<Committed, StoreError> {
    let store = Arc::clone(ingest.store());
    let (blobs, recipes) = ingest.staged();
    let staged: BTreeSet<Node> =
        blobs.into_iter().map(Node::Blob).chain(recipes.into_iter().map(Node::Recipe)).collect();
    ingest.commit(reference, manifest, origin).inspect_err(|_| {
        if let Err(error) = gc::collect_from(&store, &staged) {
            tracing::warn!("{}: left to the next collection: {error}", reference.short());
        }
    })
}
