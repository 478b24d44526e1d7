//! `ls`: the models there are.

use std::collections::BTreeSet;

use blobd_client::protocol::response::{ModelList, ModelSummary};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::{OpError, damage};
use crate::store::{Store, StoreError};

/// Lists every tag. One whose manifest is damaged is listed with what is wrong, not left out.
///
/// # Errors
/// [`StoreError::Io`].
pub fn list(store: &Store) -> Result<ModelList, OpError> {
    let mut models = Vec::new();
    let damaged = store.damaged();
    for reference in store.tags()?.references {
        match summary(store, &reference, &damaged) {
            Ok(summary) => models.push(summary),
            // Removed since it was listed.
            Err(StoreError::NoSuchModel { .. }) => {}
            Err(error) => return Err(error.into()),
        }
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    let read_only = store.read_only_reason().map(str::to_owned);
    Ok(ModelList { models, read_only })
}

fn summary(
    store: &Store,
    reference: &Reference,
    damaged: &BTreeSet<Digest>,
) -> Result<ModelSummary, StoreError> {
    let modified = rfc3339(store.modified(reference)?);
    let name = reference.short();
    match store.manifest(reference) {
        Ok(manifest) => Ok(ModelSummary {
            name,
            digest: manifest.digest(),
            size: manifest.size(),
            modified,
            pinned: store.is_pinned(reference),
            origin: store.origin(manifest.digest()),
            damage: damage::of_model(store, reference, &manifest, damaged)?,
        }),
        Err(error @ StoreError::Manifest { .. }) => Ok(ModelSummary {
            name,
            digest: Digest::of(b""),
            size: 0,
            modified,
            pinned: false,
            origin: None,
            damage: Some(error.to_string()),
        }),
        Err(error) => Err(error),
    }
}

/// A time as JSON carries it.
pub(crate) fn rfc3339(time: std::time::SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}
