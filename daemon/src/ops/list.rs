//! `ls`: the models there are.

use std::collections::BTreeSet;

use blobd_client::protocol::response::{ModelList, ModelSummary};
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;

use super::{OpError, damage};
use crate::store::{Store, StoreError, TagSummary};

/// Lists every tag. One whose manifest is damaged is listed with what is wrong, not left out.
///
/// # Errors
/// [`crate::store::StoreError::Io`].
pub fn list(store: &Store) -> Result<ModelList, OpError> {
    let has_pins = std::fs::read_dir(store.path(layout::PINS)).is_ok_and(|mut pins| pins.next().is_some());
    let damaged = store.damaged();
    let mut models = Vec::new();
    for tag in store.summaries()? {
        models.push(ModelSummary {
            pinned: has_pins && store.is_pinned(&tag.reference),
            damage: damage(store, &tag, &damaged)?,
            ..summary(&tag)
        });
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    let read_only = store.read_only_reason().map(str::to_owned);
    Ok(ModelList { models, read_only })
}

fn summary(tag: &TagSummary) -> ModelSummary {
    let manifest = tag.manifest.as_ref();
    ModelSummary {
        name: tag.reference.short(),
        digest: manifest.map_or_else(|_| Digest::of(b""), |manifest| manifest.digest),
        size: manifest.map_or(0, |manifest| manifest.size),
        modified: rfc3339(tag.modified),
        pinned: false,
        origin: tag.origin.clone(),
        damage: None,
    }
}

/// What is wrong with a model. Its manifest is read again only if some blob is damaged.
fn damage(store: &Store, tag: &TagSummary, damaged: &BTreeSet<Digest>) -> Result<Option<String>, StoreError> {
    if let Err(damage) = &tag.manifest {
        return Ok(Some(damage.clone()));
    }
    if damaged.is_empty() {
        return Ok(None);
    }
    match store.manifest(&tag.reference) {
        Ok(manifest) => damage::of_model(store, &tag.reference, &manifest, damaged),
        // Removed since it was listed.
        Err(StoreError::NoSuchModel { .. }) => Ok(None),
        Err(error @ StoreError::Manifest { .. }) => Ok(Some(error.to_string())),
        Err(error) => Err(error),
    }
}

/// A time as JSON carries it.
pub(crate) fn rfc3339(time: std::time::SystemTime) -> String {
    humantime::format_rfc3339_seconds(time).to_string()
}
