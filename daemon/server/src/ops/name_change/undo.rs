//! `undo`: takes back the newest change of names that a user has made, or the newest change of one name.
//!
//! The histories of the names say what was changed. A plan says what gives each name its earlier meaning, or why that is
//! not possible: then nothing is changed. Each name is changed back by an operation that other verbs have too, and the
//! history has a record of it. After a crash in between, what was not taken back yet still stands, and the next undo without
//! a name does the rest. Only the model that a renaming had replaced may be left in the trash then.

use std::sync::Arc;

use blobd_client::protocol::naming::{NameEffects, UndoParams, Undone, UndoneName};
use blobd_store::{Store, Verb};
use blobd_store_format::digest::Digest;
use blobd_store_format::reference::Reference;

use super::undelete::leased_model;
use super::{Leftover, NameChange, Named, TargetName};
use crate::ops::space::remove_name;
use crate::ops::{CallerPolicy, OpError};
use crate::requester::Requester;

mod plan;

use plan::{NamedVersion, Plan, Step, Version};

/// Takes back a change: the newest one of the requester, or with `reference` the newest one of that name, which only an
/// administrator does if it is another user's. What had a name until now goes to the trash unless it has another name.
///
/// # Errors
/// [`OpError::NothingToUndo`]; [`OpError::NewerChange`]; [`OpError::ChangeOfAnother`]; [`OpError::ChangedSince`]; [`OpError::EarlierVersionGone`]; those
/// of [`Names::check_change`](blobd_store::Names::check_change); [`OpError::DeniedByPolicy`]. If the request has changed
/// several names, [`OpError::CannotUndo`]. Nothing was changed then.
pub fn undo(
    store: &Arc<Store>,
    requester: Requester,
    policy: &CallerPolicy,
    params: &UndoParams,
) -> Result<Undone, OpError> {
    NameChange::run(store, Leftover::Nothing, || {
        let work = Work { store, requester, policy };
        let lease = store.liveness().leases().grant("undo");
        let plan = Plan::new(&work, params.reference.as_ref(), &lease)?;
        let mut undone = plan.described();
        if params.change.as_ref().is_some_and(|expected| *expected != undone.change) {
            return Err(OpError::NewerChange { verb: plan.change.entry.actor.verb.name() });
        }
        if params.dry_run {
            return Ok(Undone { dry_run: true, ..undone });
        }
        let work = Work { requester: requester.undoing(plan.change.id), ..work };
        for (step, name) in plan.steps.iter().zip(&mut undone.names) {
            let effects = work.take(step, name)?;
            undone.effects.displaced.extend(effects.displaced);
            undone.effects.evicted.extend(effects.evicted);
            // Those of the last step, which are about the user and not about a name.
            undone.effects.notes = effects.notes;
        }
        Ok(undone)
    })
}

/// What the steps work with.
struct Work<'w> {
    store: &'w Arc<Store>,
    requester: Requester,
    policy: &'w CallerPolicy,
}

impl<'w> Work<'w> {
    fn change(&self, name: &Reference) -> NameChange<'w> {
        let cause = format!("undo of {}", name.short());
        NameChange::new(self.store, self.requester, Verb::Undo, cause)
    }

    /// Takes a step, and completes its description with what is known only afterwards.
    fn take(&self, step: &Step, done: &mut UndoneName) -> Result<NameEffects, OpError> {
        match step {
            Step::Rename { from, to, digest } => self.rename(from, to, *digest),
            Step::Restore { name, replaced, version } => self.restore(name, *replaced, version),
            Step::Remove { name, digest, other } => {
                done.trashed_until = self.remove(name, *digest, other.as_ref())?;
                Ok(NameEffects::default())
            }
        }
    }

    fn rename(&self, from: &Reference, to: &Reference, digest: Digest) -> Result<NameEffects, OpError> {
        let change = self.change(to).replacing(false);
        let (model, lease) = change.stored_model(from, self.policy, Some(to))?;
        if model.manifest.digest() != digest {
            return Err(OpError::ChangedMeanwhile { name: from.short() });
        }
        let ingest = change.begin_without_data(lease)?.renaming(from.clone());
        let target = TargetName::given(to)?;
        let Named { effects, .. } = change.commit(ingest, target, &model.manifest, None, |_name| true)?;
        Ok(effects)
    }

    /// Gives the name to the version that it had before, if it still has the one that replaced it.
    fn restore(
        &self,
        name: &Reference,
        replaced: Option<Digest>,
        version: &Version,
    ) -> Result<NameEffects, OpError> {
        let change = self.change(name).replacing(true);
        let is_as_planned = |present: Option<&Reference>| {
            let manifest = present.map(|tag| self.store.names().manifest(tag)).transpose()?;
            match manifest.map(|manifest| manifest.digest()) == replaced {
                true => Ok(()),
                false => Err(OpError::ChangedMeanwhile { name: name.short() }),
            }
        };
        let Named { effects, .. } = match version {
            Version::Trashed(trashed) => {
                let lease = change.lease();
                leased_model(self.store, trashed, &lease)?;
                let ingest = change.begin_without_data(lease)?;
                let ingest = ingest.charged_to(trashed.account).with_name_origin(trashed.origin.clone());
                change.restore_if(ingest, name, trashed, is_as_planned)?
            }
            Version::Named(named) => {
                let NamedVersion { other, digest, origin } = &**named;
                let (model, lease) = change.stored_model(other, self.policy, None)?;
                if model.manifest.digest() != *digest {
                    return Err(OpError::ChangedMeanwhile { name: other.short() });
                }
                let account = self.store.names().account_of(name, *digest);
                let ingest = change.begin_without_data(lease)?.charged_to(account);
                let ingest = ingest.with_name_origin(origin.clone());
                change.commit_if(ingest, name, (&model.manifest, None), is_as_planned)?
            }
        };
        Ok(effects)
    }

    /// Removes the name if it still has this manifest, and so has the other one. Without another name, moves the model to the
    /// trash.
    fn remove(
        &self,
        name: &Reference,
        digest: Digest,
        other: Option<&Reference>,
    ) -> Result<Option<String>, OpError> {
        let keep = other.is_none().then(|| plan::keep(self.store));
        let check = || {
            let changed = [Some(name), other].into_iter().flatten().find(|name| {
                let present = self.store.names().manifest(name);
                present.map_or(true, |present| present.digest() != digest)
            });
            changed.map_or(Ok(()), |name| Err(OpError::ChangedMeanwhile { name: name.short() }))
        };
        remove_name(self.store, (self.requester, Verb::Undo), name, keep, check)
    }
}
