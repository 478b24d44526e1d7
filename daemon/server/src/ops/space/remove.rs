//! `rm`: removes names, and what only they needed.

use std::time::Duration;

use blobd_client::protocol::error::FailedItem;
use blobd_client::protocol::naming::{Removed, Spared};
use blobd_client::protocol::request::RemoveParams;
use blobd_store::gc::{self, LossReport, Untagged};
use blobd_store::{Store, StoreError, Verb};
use blobd_store_format::reference::Reference;

use super::evict::LastOpened;
use super::lost_models::{kept, lost_model};
use crate::ops::{OpError, rfc3339};
use crate::requester::Requester;

mod select;

use select::{Refusals, Request, Selection, Wanted, find_wanted, select};

/// Removes models and frees what nothing else needs. Data that another model, the trash, a session or a mapping program
/// needs is kept and reported with its holder. With `keep_seconds`, moves the models to the trash and frees nothing. A dry
/// run reports the same and removes nothing.
///
/// # Errors
/// [`StoreError::NoSuchModel`], [`OpError::Pinned`] or one of [`blobd_store::Names::check_change`] for any of the names;
/// then none is removed. With `go_on`, the others are removed, and the response has the errors.
/// [`OpError::NothingToRemove`] if the request selects no models at all.
pub fn remove(
    store: &Store,
    last_opened: &LastOpened,
    requester: Requester,
    params: &RemoveParams,
) -> Result<Removed, OpError> {
    let is_selected = params.older_than_seconds.is_some() || params.unused;
    if params.references.is_empty() && params.patterns.is_empty() && !is_selected {
        return Err(OpError::NothingToRemove);
    }
    let request = Request { last_opened, requester, verb: Verb::Rm, params };
    if params.dry_run {
        return plan(store, &request);
    }
    store.ledger().with_reserve(|| match params.keep_seconds {
        Some(seconds) => move_to_trash(store, &request, Duration::from_secs(seconds), |_| Ok(())),
        None => free(store, &request),
    })
}

/// Removes one name for another verb than `rm`, if `check` permits it: no name changes after that. With `keep`, the model
/// goes to the trash, until the time that is returned.
///
/// # Errors
/// Those of [`remove`].
pub(in crate::ops) fn remove_name(
    store: &Store,
    (requester, verb): (Requester, Verb),
    name: &Reference,
    keep: Option<Duration>,
    mut check: impl FnMut() -> Result<(), OpError>,
) -> Result<Option<String>, OpError> {
    let params = RemoveParams { references: vec![name.clone()], ..RemoveParams::default() };
    let request = Request { last_opened: &|_, _| None, requester, verb, params: &params };
    store.ledger().with_reserve(|| match keep {
        Some(keep) => Ok(move_to_trash(store, &request, keep, |_| check())?.trashed_until),
        None => drop_names(store, &request, |_| check()).map(|_| None),
    })
}

fn plan(store: &Store, request: &Request<'_>) -> Result<Removed, OpError> {
    let params = request.params;
    let mut refusals = Refusals::new(params.go_on);
    let wanted = find_wanted(store, params, &mut refusals)?;
    let (models, spared) = {
        let _tags = store.names().lock_tags();
        checked(store, request, &wanted, &mut refusals)?
    };
    let mut report = LossReport::new(store.liveness(), &models, &[]);
    report.kept.retain(|kept| !kept.by.is_empty());
    let mut freed_bytes = 0u64;
    for model in &mut report.models {
        // Data that nothing else needs would be freed at once, or when the trash is emptied.
        let bytes = std::mem::take(&mut model.reclaimable_bytes);
        model.freed_bytes = if params.keep_seconds.is_none() { bytes } else { 0 };
        freed_bytes = freed_bytes.saturating_add(model.freed_bytes);
    }
    let failed = refusals.failed;
    Ok(Removed { spared, failed, dry_run: true, ..removed(report, freed_bytes) })
}

fn move_to_trash(
    store: &Store,
    request: &Request<'_>,
    keep: Duration,
    mut check: impl FnMut(&Reference) -> Result<(), OpError>,
) -> Result<Removed, OpError> {
    // Held until the tags are removed: a collection that saw neither record nor tag would delete the models.
    let lease = store.liveness().leases().grant("rm --keep");
    let mut trashed_until = None;
    let trash = |reference: &Reference| -> Result<(), OpError> {
        check(reference)?;
        let manifest = store.names().leased_model(reference, &lease)?.manifest;
        // Before the tag is removed: a crash in between leaves both, which is harmless.
        trashed_until = Some(rfc3339(store.names().add_to_trash(reference, &manifest, keep)?));
        Ok(())
    };
    let Dropped { models, spared, failed } = drop_names(store, request, trash)?;
    drop(lease);
    Ok(Removed {
        trashed_until,
        spared,
        failed,
        ..removed(LossReport::new(store.liveness(), &models, &[]), 0)
    })
}

fn free(store: &Store, request: &Request<'_>) -> Result<Removed, OpError> {
    let Dropped { models, spared, failed } = drop_names(store, request, |_| Ok(()))?;
    // If the collection is refused, because an unreadable manifest may need any blob, the names are removed and the bytes
    // kept until a later one.
    let (report, deleted) = gc::free(store.liveness(), &models);
    let removed = removed(report, deleted.map_or(0, |deleted| deleted.freed_bytes()));
    Ok(Removed { spared, failed, ..removed })
}

fn removed(report: LossReport, freed_bytes: u64) -> Removed {
    let models: Vec<_> = report.models.into_iter().map(lost_model).collect();
    Removed {
        removed: models.iter().map(|model| model.name.clone()).collect(),
        freed_bytes,
        kept: report.kept.into_iter().map(kept).collect(),
        trashed_until: None,
        models,
        spared: Vec::new(),
        failed: Vec::new(),
        dry_run: false,
    }
}

struct Dropped {
    /// The models that have lost their names.
    models: Vec<Untagged>,
    /// Models that match but stay.
    spared: Vec<Spared>,
    failed: Vec<FailedItem>,
}

/// Removes the names after `before` was called with each: all or none, unless the request has `go_on`. Tags are locked, so
/// that none changes between check and removal.
fn drop_names(
    store: &Store,
    request: &Request<'_>,
    mut before: impl FnMut(&Reference) -> Result<(), OpError>,
) -> Result<Dropped, OpError> {
    let (params, actor) = (request.params, request.requester.doing(request.verb));
    let mut refusals = Refusals::new(params.go_on);
    let wanted = find_wanted(store, params, &mut refusals)?;
    let _tags = store.names().lock_tags();
    let (models, spared) = checked(store, request, &wanted, &mut refusals)?;
    let mut each = |models: Vec<Untagged>, step: &mut dyn FnMut(&Reference) -> Result<(), OpError>| {
        let mut done = Vec::new();
        for model in models {
            let is_done = refusals.note(&model.reference.short(), step(&model.reference))?.is_some();
            done.extend(is_done.then_some(model));
        }
        Ok::<_, OpError>(done)
    };
    let models = each(models, &mut before)?;
    let models = each(models, &mut |reference| Ok(store.names().remove_tag(reference, actor)?))?;
    Ok(Dropped { models, spared, failed: refusals.failed })
}

/// Finds the models to remove, none of which is pinned, and those that match but stay.
fn checked(
    store: &Store,
    request: &Request<'_>,
    wanted: &Wanted,
    refusals: &mut Refusals,
) -> Result<(Vec<Untagged>, Vec<Spared>), OpError> {
    let Selection { references, spared } = select(store, request, wanted, refusals)?;
    let mut models = Vec::new();
    for reference in &references {
        let model = untagged(store, reference).map_err(OpError::from);
        models.extend(refusals.note(&reference.short(), model)?.flatten());
    }
    Ok((models, spared))
}

/// A tag's model. It needs nothing if its manifest or a recipe is damaged: then only `gc` finds what to free.
fn untagged(store: &Store, reference: &Reference) -> Result<Option<Untagged>, StoreError> {
    match store.names().raw_manifest(reference) {
        Ok(raw) => Ok(Some(Untagged::new(store.liveness(), reference.clone(), raw))),
        // Removed by another process meanwhile.
        Err(StoreError::NoSuchModel { .. }) => Ok(None),
        Err(error) => Err(error),
    }
}
