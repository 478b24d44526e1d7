//! `edit`: makes a model with other metadata and the same tensors.
//!
//! Only the header, the recipe and the manifest are written. The digest of the new file is computed by reading
//! the stored tensors once; the same pass proves that they are those of the source.

mod manifest;
mod weights;

use std::sync::Arc;

use blobd_client::protocol::edit::{ChangedKey, EditParams, Edited, KeyChange};
use blobd_store::{Ingest, Model, Store, Verb};
use blobd_store_format::digest::Digest;
use blobd_store_format::file_format::MetadataValue;
use blobd_store_format::gguf::Header;
use blobd_store_format::gguf::edit::{Change, EditedHeader, KeyEdit};
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use serde_json::Value as Json;

use self::manifest::{NewLayers, compose_edited};
use self::weights::{EditedFile, Weights};
use super::collect_on_failure::collect_on_failure;
use super::lost_models::{Evictions, displaced};
use super::origin::of_edit;
use super::policy::CallerPolicy;
use super::relief::Leftover;
use super::taken_name::{MayTake, refuse_unless_movable};
use super::{OpError, error::refuse_pinned, soft_quota};
use crate::metadata_json::Abridger;
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
    collect_on_failure(store, Leftover::Nothing, || edit_model(store, requester, policy, params, report))
}

fn edit_model(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &EditParams,
    report: &mut EditReport<'_>,
) -> Result<Edited, OpError> {
    refuse_pinned(&params.target)?;
    let source = params.source.short();
    let refused = |reason: String| OpError::Edit { model: source.clone(), reason };
    if params.keys.is_empty() && params.template_layer.is_none() {
        return Err(refused("no change is given".to_owned()));
    }
    let edits = params.keys.iter().map(key_edit).collect::<Result<Vec<_>, _>>().map_err(refused)?;
    let lease = store.leases().grant(format!("edit of {source}"));
    let model = store.leased_model(&params.source, &lease)?;
    policy.check_stored(store, &model, Some(&params.target))?;
    let weights = Weights::of(store, &model)?;
    let header = weights.header.edited(&edits).map_err(|error| refused(error.to_string()))?;
    let layers = NewLayers::of(&model.manifest, params.template_layer.as_deref());
    let mut edited = Edited {
        name: params.target.short(),
        digest: None,
        new_bytes: 0,
        changed: changed_keys(&weights.header, &header),
        template_layer: layers.template_change(),
        unchanged: false,
        dry_run: params.dry_run,
        displaced: Vec::new(),
        evicted: Vec::new(),
        notes: Vec::new(),
    };
    let file = EditedFile::new(&weights, &header)?;
    if params.dry_run {
        edited.new_bytes = file.new_bytes().saturating_add(layers.new_bytes());
        return Ok(edited);
    }
    let moves_pinned = params.force && requester.may_administer();
    let known = known_digest(store, requester, params, &file)?;
    let digest = match known {
        Some(digest) => digest,
        None => weights.hash_with(store, &file, report)?,
    };
    store.make_reserve();
    let evictions = Evictions::new(requester, format!("edit of {source}"));
    let ingest = evictions.observe(Ingest::begin(store, lease)?).may_move_pinned(moves_pinned);
    let mut ingest = requester.acting(ingest, Verb::Edit);
    let (config_bytes, template_bytes) = (model.manifest.config().size, layers.new_bytes());
    ingest.admit([file.new_bytes(), config_bytes, template_bytes].into_iter().filter(|bytes| *bytes > 0))?;
    let descriptor = file.add(&mut ingest, digest)?;
    let manifest = compose_edited(&mut ingest, &model, (&weights, &descriptor, &header), &layers)?;
    // The stored name: the source may have been given by its ID.
    let origin = of_edit(&model.reference, model.manifest.digest());
    let origin = (manifest.digest() != model.manifest.digest()).then_some(origin.as_str());
    let allowed = |present: Option<&Reference>| is_free(store, params, present, &manifest);
    let committed = ingest.commit_if(&params.target, &manifest, origin, allowed)?;
    edited.new_bytes = committed.new_bytes;
    edited.unchanged = committed.is_unchanged();
    edited.displaced = displaced(store, requester, committed);
    edited.evicted = evictions.take();
    edited.notes = soft_quota::notes(store, requester);
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
    store: &Store,
    requester: Requester,
    params: &EditParams,
    file: &EditedFile,
) -> Result<Option<Digest>, OpError> {
    if let Some(unchanged) = file.unchanged() {
        return Ok(Some(unchanged));
    }
    let Some(target) = store.stored_case(&params.target)? else { return Ok(None) };
    let present: Model = match store.model(&target) {
        Err(error) if error.is_no_such_model() => return Ok(None),
        present => present?,
    };
    let recipes = present.files.iter().filter_map(|file| file.recipe.as_ref());
    let same = recipes.into_iter().find(|recipe| file.is_stored_as(recipe)).map(|recipe| recipe.file());
    match same {
        None if !params.force => Err(OpError::TargetExists { name: params.target.short() }),
        None => {
            let may_take = MayTake::with_force(requester, params.force && requester.may_administer());
            refuse_unless_movable(store, requester, &present.reference, may_take, |_| false).map(|()| None)
        }
        same => Ok(same),
    }
}

/// Whether the target's name may be given to the manifest.
fn is_free(
    store: &Store,
    params: &EditParams,
    present: Option<&Reference>,
    manifest: &Manifest,
) -> Result<(), OpError> {
    match present {
        Some(present) if !params.force && store.manifest(present)?.digest() != manifest.digest() => {
            Err(OpError::TargetExists { name: present.short() })
        }
        _ => Ok(()),
    }
}
