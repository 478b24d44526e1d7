//! `promote`: copies what a model uses of lower stores into the writable one.

use std::sync::Arc;

use blobd_client::protocol::naming::{NameEffects, PromoteParams, Promoted};
use blobd_store::{FileReader, Ingest, Model, Store, StoreError, Verb};
use blobd_store_format::digest::{Digest, Hasher};
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;

use super::{Leftover, NameChange, Named};
use crate::ops::{CallerPolicy, OpError};
use crate::requester::Requester;

/// Receives the bytes copied and the bytes to copy; returns false to stop.
type ReportProgress<'r> = dyn FnMut(u64, u64) -> bool + 'r;

/// Copies the blobs of a model that only lower stores have, verified and durable, checks that its files are rebuilt
/// from them, and sets its tag in the writable store. Changes no lower store.
///
/// # Errors
/// [`blobd_store::StoreError::DamagedBlob`], [`blobd_store::StoreError::Recipe`] if what lower stores have is wrong;
/// then the tag is not set. Those of [`Names::check_own`](blobd_store::Names::check_own); [`OpError::DeniedByPolicy`];
/// [`OpError::ChangedMeanwhile`].
pub fn promote(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &PromoteParams,
    report: &mut ReportProgress<'_>,
) -> Result<Promoted, OpError> {
    let cause = format!("promotion of {}", params.reference.short());
    let change = NameChange::new(store, requester, Verb::Promote, cause);
    NameChange::run(store, Leftover::Nothing, || promote_model(&change, requester, policy, params, report))
}

fn promote_model(
    change: &NameChange<'_>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &PromoteParams,
    report: &mut ReportProgress<'_>,
) -> Result<Promoted, OpError> {
    let store = change.store;
    let _held = store.content().hold_lower_stores();
    let (model, lease) = change.stored_model(&params.reference, policy, None)?;
    let missing = store.not_own_blobs(model.blob_sizes())?;
    let promoted = planned(store, &model, &missing, params)?;
    // The copies are charged to the user who added the name, or to nobody if that is not recorded. So only that user and
    // administrators may make them.
    if promoted.from.is_none() && !missing.is_empty() {
        store.names().check_own(&model.reference, requester.name_user())?;
    }
    let is_done = promoted.from.is_none() && missing.is_empty();
    if params.dry_run || is_done {
        return Ok(promoted);
    }
    let ingest = if missing.is_empty() { change.begin_without_data(lease) } else { change.begin(lease) };
    let mut ingest = ingest?.keeping_own_copies();
    ingest.admit_all(missing.iter().map(|(_, size)| *size))?;
    let files = model.files.iter().map(|file| file.descriptor.size).fold(0, u64::saturating_add);
    let mut progress = Progress { completed: 0, total: promoted.copied_bytes.saturating_add(files), report };
    copy(&mut ingest, &missing, &mut progress)?;
    ingest.publish()?;
    check_files(store, &model, &mut progress)?;
    let Named { effects, .. } = commit(change, ingest, &model, promoted.from.is_some())?;
    Ok(Promoted { effects, ..promoted })
}

fn planned(
    store: &Store,
    model: &Model,
    missing: &[(Digest, u64)],
    params: &PromoteParams,
) -> Result<Promoted, OpError> {
    Ok(Promoted {
        name: model.reference.short(),
        digest: model.manifest.digest(),
        from: store.names().lower_place_of(&model.reference)?.map(|place| place.display().to_string()),
        copied_bytes: missing.iter().fold(0, |sum: u64, (_, size)| sum.saturating_add(*size)),
        copied_blobs: missing.len() as u64,
        dry_run: params.dry_run,
        effects: NameEffects::default(),
    })
}

struct Progress<'p, 'r> {
    completed: u64,
    total: u64,
    report: &'p mut ReportProgress<'r>,
}

impl Progress<'_, '_> {
    fn add(&mut self, bytes: u64) -> bool {
        self.completed = self.completed.saturating_add(bytes);
        (self.report)(self.completed, self.total)
    }
}

fn copy(
    ingest: &mut Ingest,
    blobs: &[(Digest, u64)],
    progress: &mut Progress<'_, '_>,
) -> Result<(), OpError> {
    for (digest, size) in blobs {
        if !ingest.copy_blob(*digest, *size, &mut |bytes| progress.add(bytes))? {
            return Err(client_has_gone());
        }
    }
    Ok(())
}

fn client_has_gone() -> OpError {
    OpError::Internal("the client of this promotion has disconnected".to_owned())
}

/// Checks that each file is rebuilt from its parts: the recipe of a lower store may be wrong although its blobs are right.
fn check_files(store: &Store, model: &Model, progress: &mut Progress<'_, '_>) -> Result<(), OpError> {
    for file in &model.files {
        let Some(recipe) = &file.recipe else { continue };
        // The recipe of a compressed file rebuilds its content.
        let expected = recipe.unpacked().map_or(file.descriptor.digest, |unpacked| unpacked.digest);
        let found = digest_of(store, recipe, progress)?;
        if found != expected {
            return Err(StoreError::Recipe {
                path: store.content().place_of_recipe(file.descriptor.digest),
                what: format!(
                    "wrong digest of the file that it rebuilds: expected {expected}, found {found}"
                ),
            }
            .into());
        }
    }
    Ok(())
}

fn digest_of(store: &Store, recipe: &Recipe, progress: &mut Progress<'_, '_>) -> Result<Digest, OpError> {
    let (mut reader, mut hasher, mut offset) =
        (FileReader::for_recipe(store.content(), recipe), Hasher::new(), 0);
    let mut buffer = vec![0; 1 << 20];
    loop {
        let length = reader.read_at(offset, &mut buffer)?;
        if length == 0 {
            return Ok(hasher.finish());
        }
        hasher.update(buffer.get(..length).unwrap_or_default());
        offset = offset.saturating_add(length as u64);
        if !progress.add(length as u64) {
            return Err(client_has_gone());
        }
    }
}

/// Sets the tag, unless another model has got the name meanwhile, or the name was removed.
fn commit(change: &NameChange<'_>, ingest: Ingest, model: &Model, was_below: bool) -> Result<Named, OpError> {
    let store = Arc::clone(ingest.store());
    let digest = model.manifest.digest();
    let is_unchanged = |present: Option<&Reference>| {
        let is_same = match present {
            Some(present) => store.names().manifest(present)?.digest() == digest,
            None => was_below,
        };
        match is_same {
            true => Ok(()),
            false => Err(OpError::ChangedMeanwhile { name: model.reference.short() }),
        }
    };
    let name = &model.reference;
    let (origin, name_origin) = (store.names().origin(digest), store.names().name_origin(name, digest));
    let mut ingest = ingest.with_name_origin(name_origin);
    ingest.note_facts(store.names().facts(digest));
    change.commit_if(ingest, name, (&model.manifest, origin.as_deref()), is_unchanged)
}
