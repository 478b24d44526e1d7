//! `edit`: makes a model with other metadata and the same tensors.
//!
//! Only the header, the recipe and the manifest are written. The digest of the new file is computed by reading
//! the stored tensors once; the same pass proves that they are those of the source.

mod manifest;
mod weights;

use std::sync::Arc;

use blobd_client::protocol::edit::{ChangedKey, EditParams, Edited, KeyChange};
use blobd_client::protocol::lost_model::NameEffects;
use blobd_model::edit::{Change, EditedHeader, KeyEdit};
use blobd_model::kind::ModelKind;
use blobd_model::metadata_json::Abridger;
use blobd_store::{Store, Verb};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::MetadataValue;
use blobd_store_format::gguf::Header;
use blobd_store_format::origin::of_edit;
use serde_json::Value as Json;

use self::manifest::{NewLayers, QuantizationChange, compose_edited};
use self::weights::{EditedFile, Weights};
use super::OpError;
use super::name_change::{NameChange, TargetName};
use super::new_model::kind_of;
use super::policy::CallerPolicy;
use super::relief::Leftover;
use crate::requester::Requester;

/// Receives the bytes read and the bytes to be read; returns false to cancel.
pub type EditReport<'r> = dyn FnMut(u64, u64) -> bool + 'r;

/// Makes a model with other metadata. Copies no tensor.
///
/// # Errors
/// [`OpError`]; then nothing is stored.
pub fn edit(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &EditParams,
    report: &mut EditReport<'_>,
) -> Result<Edited, OpError> {
    NameChange::run(store, Leftover::Nothing, || edit_model(store, requester, policy, params, report))
}

fn edit_model(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &EditParams,
    report: &mut EditReport<'_>,
) -> Result<Edited, OpError> {
    let target = TargetName::given(&params.target)?;
    let source = params.source.short();
    let refused = |reason: String| OpError::Edit { model: source.clone(), reason };
    if params.keys.is_empty() && params.template_layer.is_none() {
        return Err(refused("no change is given".to_owned()));
    }
    let edits = params.keys.iter().map(key_edit).collect::<Result<Vec<_>, _>>().map_err(refused)?;
    let change = NameChange::new(store, requester, Verb::Edit, format!("edit of {source}"));
    let change = change.replacing(params.force);
    let (model, lease) = change.stored_model(&params.source, policy, Some(&params.target))?;
    let (weights, source_header) = Weights::of(store, &model)?;
    let header = EditedHeader::new(&source_header, &edits).map_err(|error| refused(error.to_string()))?;
    let layers = NewLayers::of(&model.manifest, params.template_layer.as_deref());
    let mut edited = Edited {
        name: params.target.short(),
        digest: None,
        new_bytes: 0,
        changed: changed_keys(&source_header, &header),
        template_layer: layers.template_change(),
        unchanged: false,
        dry_run: params.dry_run,
        effects: NameEffects {
            notes: header.absent().iter().map(|key| absent_key(&source, key)).collect(),
            ..NameEffects::default()
        },
    };
    let quantizations = QuantizationChange::new(&source_header, header.header());
    let kind = ModelKind::of(header.header());
    let file = EditedFile::new(&weights, &source_header, header)?;
    // Reading all tensors can take minutes, and headers are large.
    drop(source_header);
    let known = known_digest(&change, &target, &file)?;
    if params.dry_run {
        edited.new_bytes = file.new_bytes().saturating_add(layers.new_bytes());
        return Ok(edited);
    }
    let digest = match known {
        Some(digest) => digest,
        None => weights.hash_with(store, &file, report)?,
    };
    let mut ingest = change.begin(lease)?;
    let (config_bytes, template_bytes) = (model.manifest.config().size, layers.new_bytes());
    ingest.admit([file.new_bytes(), config_bytes, template_bytes].into_iter().filter(|bytes| *bytes > 0))?;
    let descriptor = file.add(&mut ingest, digest)?;
    let manifest =
        compose_edited(&mut ingest, &model, (weights.digest(), &descriptor, &quantizations), &layers)?;
    ingest.note_kind(kind_of(&manifest, kind));
    // The stored name: the source may have been given by its ID.
    let origin = of_edit(&model.reference, model.manifest.digest());
    let origin = (manifest.digest() != model.manifest.digest()).then_some(origin.as_str());
    let named = change.commit(ingest, target, &manifest, origin, |_name| true)?;
    edited.name = named.name;
    edited.new_bytes = named.new_bytes;
    edited.unchanged = named.unchanged;
    let notes = edited.effects.notes.into_iter().chain(named.effects.notes).collect();
    edited.effects = NameEffects { notes, ..named.effects };
    edited.digest = Some(manifest.digest());
    Ok(edited)
}

fn key_edit(change: &KeyChange) -> Result<KeyEdit, String> {
    let parsed = change.value_type.as_deref().map(str::parse).transpose();
    let value_type = parsed.map_err(|error| format!("metadata key {:?}: {error}", change.key))?;
    let change_of = |text: &String| Change::Set { value_type, text: text.clone() };
    let key = change.key.clone();
    Ok(KeyEdit { key, change: change.value.as_ref().map_or(Change::Unset, change_of) })
}

fn absent_key(model: &str, key: &str) -> String {
    format!(
        "{model} has no metadata key {key:?}: there was nothing to remove; `blobd show --metadata` lists the keys"
    )
}

fn changed_keys(before: &Header, edited: &EditedHeader) -> Vec<ChangedKey> {
    let mut abridger = Abridger::new();
    let mut json = |value: Option<MetadataValue<'_>>| value.map_or(Json::Null, |value| abridger.json(&value));
    let changed = |key: &String| ChangedKey {
        key: key.clone(),
        from: json(before.value(key)),
        to: json(edited.header().value(key)),
    };
    edited.changed().iter().map(changed).collect()
}

/// The digest of the file if the target is this file already, as after an earlier equal edit. Refuses early if the
/// target is another model, before the tensors are read.
fn known_digest(
    change: &NameChange<'_>,
    target: &TargetName,
    file: &EditedFile,
) -> Result<Option<Digest>, OpError> {
    if let Some(unchanged) = file.unchanged() {
        return Ok(Some(unchanged));
    }
    let present = change.present(target)?;
    let recipes = present.iter().flat_map(|model| &model.files).filter_map(|file| file.recipe.as_ref());
    let same = recipes.into_iter().find(|recipe| file.is_stored_as(recipe)).map(|recipe| recipe.file());
    if same.is_none() {
        change.check(target, |_present| false)?;
    }
    Ok(same)
}
