//! `ls`: lists the models. `history`: what a name has meant, and who changed that.

use std::borrow::Cow;
use std::collections::{BTreeMap, BTreeSet};

use blobd_client::protocol::naming::{NameChange, NameHistory};
use blobd_client::protocol::response::{LowerStore, ModelList, ModelSummary};
use blobd_store::{HistoryRow, LowerStatus, Store, StoreError, TagSummary};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::{OpError, damage, rfc3339};
use crate::names::Names;

/// Lists every tag. A tag with a damaged manifest is listed with the damage.
pub fn list(store: &Store) -> Result<ModelList, OpError> {
    let has_pins = store.names().has_pins();
    let pinned =
        |tag: &TagSummary| has_pins && tag.lower.is_none() && store.names().is_pinned(&tag.reference);
    let summaries = store.names().all_summaries()?;
    // Sorted before they are made: they are large.
    let mut named: Vec<_> = summaries.iter().map(|tag| (tag.reference.short(), tag)).collect();
    named.sort_by(|a, b| a.0.cmp(&b.0));
    let mut models = Vec::with_capacity(named.len());
    for (name, tag) in &mut named {
        models.push(ModelSummary { pinned: pinned(tag), ..summary(std::mem::take(name), tag) });
    }
    let damaged = store.content().damaged();
    if !damaged.is_empty() {
        for ((_, tag), model) in named.iter().zip(&mut models) {
            note_damage(store, tag, model, &damaged)?;
        }
    }
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
        Ok(manifest) => model.damage = damage::describe(store, &tag.reference, &manifest, damaged)?,
        // Removed since it was listed, or damaged: then the summary has the error.
        Err(
            StoreError::NoSuchModel { .. } | StoreError::Manifest { .. } | StoreError::UnexpectedFile { .. },
        ) => {}
        Err(error) => return Err(error),
    }
    Ok(())
}

fn summary(name: String, tag: &TagSummary) -> ModelSummary {
    let manifest = tag.manifest.as_ref();
    ModelSummary {
        name,
        digest: manifest.map_or_else(|_| Digest::of(b""), |manifest| manifest.digest),
        size: manifest.map_or(0, |manifest| manifest.size),
        kind: tag.facts.kind,
        architecture: tag.facts.architecture.clone(),
        quantization: tag.facts.quantization.clone(),
        modified: rfc3339(tag.modified),
        pinned: false,
        origin: tag.origin.origin.clone(),
        follows: tag.origin.source.clone(),
        damage: manifest.err().cloned(),
        store: tag.lower.as_ref().map(|place| place.display().to_string()),
        added_by: tag.account.filter(|_| tag.lower.is_none()).map(|account| account.adder()),
    }
}

/// The history of a name, the newest change first. The name may have been removed.
///
/// # Errors
/// [`StoreError::NoSuchModel`] if no model ever had this name.
pub(crate) fn history(store: &Store, reference: &Reference) -> Result<NameHistory, OpError> {
    let blobd_store::NameHistory { reference, rows, dropped } = store.names().history(reference)?;
    let (users, stored) = (Names::system(), Stored::new(store)?);
    let changes = rows.into_iter().map(|row| stored.complete(change(row, &users))).collect();
    Ok(NameHistory { name: reference.short(), changes, dropped })
}

fn change(row: HistoryRow, users: &Names) -> NameChange {
    match row {
        HistoryRow::Unrecorded(digest) => NameChange { digest, ..NameChange::default() },
        HistoryRow::Recorded(entry) => NameChange {
            time: Some(rfc3339(entry.time)),
            uid: Some(entry.actor.uid),
            user: users.name_of(entry.actor.uid),
            verb: Some(entry.actor.verb.name().to_owned()),
            digest: entry.digest,
            origin: entry.origin,
            ..NameChange::default()
        },
    }
}

/// The manifests that the store has now.
struct Stored {
    names: BTreeMap<Digest, Vec<String>>,
    trashed: BTreeSet<Digest>,
}

impl Stored {
    fn new(store: &Store) -> Result<Self, OpError> {
        let mut names: BTreeMap<_, Vec<String>> = BTreeMap::new();
        for tag in store.names().all_summaries()? {
            if let Ok(manifest) = &tag.manifest {
                names.entry(manifest.digest).or_default().push(tag.reference.short());
            }
        }
        // A damaged record in the trash is reported by other verbs.
        let trash = store.names().trash().unwrap_or_default();
        Ok(Self { names, trashed: trash.into_iter().map(|trashed| trashed.manifest.digest()).collect() })
    }

    fn complete(&self, change: NameChange) -> NameChange {
        /// A manifest can have many thousands of names, and a history names it many times.
        const MAX_NAMES: usize = 100;
        let Some(digest) = change.digest else { return change };
        let names = self.names.get(&digest).into_iter().flatten();
        let stored_as = names.take(MAX_NAMES).cloned().collect();
        NameChange { stored_as, in_trash: self.trashed.contains(&digest), ..change }
    }
}
