//! `ls`: lists the models.

use std::borrow::Cow;
use std::collections::BTreeSet;

use blobd_client::protocol::lower_store::LowerStore;
use blobd_client::protocol::response::{ModelList, ModelSummary};
use blobd_store::{LowerStatus, Store, StoreError, TagSummary};
use blobd_store_format::digest::Digest;

use super::{OpError, damage, rfc3339};

/// Lists every tag. A tag with a damaged manifest is listed with the damage.
pub fn list(store: &Store) -> Result<ModelList, OpError> {
    let has_pins = store.names().has_pins();
    let pinned =
        |tag: &TagSummary| has_pins && tag.lower.is_none() && store.names().is_pinned(&tag.reference);
    let summaries = store.names().all_summaries()?;
    let mut models: Vec<_> =
        summaries.iter().map(|tag| ModelSummary { pinned: pinned(tag), ..summary(tag) }).collect();
    let damaged = store.content().damaged();
    if !damaged.is_empty() {
        for (tag, model) in summaries.iter().zip(&mut models) {
            note_damage(store, tag, model, &damaged)?;
        }
    }
    models.sort_by(|a, b| a.name.cmp(&b.name));
    let read_only = store.content().read_only_reason().map(Cow::into_owned);
    Ok(ModelList { models, read_only, lower_stores: lower_stores(store) })
}

fn lower_stores(store: &Store) -> Vec<LowerStore> {
    let shown = |lower: LowerStatus| LowerStore {
        path: lower.place.display().to_string(),
        problem: lower.state.err(),
    };
    store.content().lower_stores().into_iter().map(shown).collect()
}

fn note_damage(
    store: &Store,
    tag: &TagSummary,
    model: &mut ModelSummary,
    damaged: &BTreeSet<Digest>,
) -> Result<(), StoreError> {
    match store.names().manifest(&tag.reference) {
        Ok(manifest) => model.damage = damage::of_model(store, &tag.reference, &manifest, damaged)?,
        // Removed since it was listed, or damaged: then the summary has the error.
        Err(
            StoreError::NoSuchModel { .. } | StoreError::Manifest { .. } | StoreError::UnexpectedFile { .. },
        ) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

fn summary(tag: &TagSummary) -> ModelSummary {
    let manifest = tag.manifest.as_ref();
    ModelSummary {
        name: tag.reference.short(),
        digest: manifest.map_or_else(|_| Digest::of(b""), |manifest| manifest.digest),
        size: manifest.map_or(0, |manifest| manifest.size),
        kind: tag.kind,
        modified: rfc3339(tag.modified),
        pinned: false,
        origin: tag.origin.origin.clone(),
        follows: tag.origin.source.clone(),
        damage: manifest.err().cloned(),
        store: tag.lower.as_ref().map(|place| place.display().to_string()),
        added_by: tag.account.filter(|_| tag.lower.is_none()).map(|account| account.uid),
    }
}
