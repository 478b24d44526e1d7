//! Gives a name to a model. All verbs that set a name do it here, so that what one of them refuses all refuse.
//!
//! The order of every such verb, in [`NameChange::run`]: a lease, the policy, whether the requester may take the name,
//! space (quota, eviction, reserve), the commit, and the report of what else has happened.

use std::path::Path;
use std::sync::Arc;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::naming::NameEffects;
use blobd_client::protocol::pull::PullProgress;
use blobd_store::leases::Lease;
use blobd_store::{Committed, Ingest, Model, NameRule, NewName, Store, TrashedModel, Verb, gc};
use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::origin::{Origin, copy_record, import_record};
use blobd_store_format::reference::Reference;
use blobd_store_format::source::{PullSource, PulledSource};
use tokio::sync::mpsc::Sender;

use super::policy::CallerPolicy;
use super::space::{Evictions, ReportsTo, StoredBlobs, displaced, soft_quota_notes, space_hint};
use super::{OpError, describe};
use crate::requester::Requester;

mod promote;
mod tag;
mod undelete;
mod undo;

pub use promote::promote;
pub use tag::{pin, rename, tag};
pub use undelete::{trash, undelete};
pub use undo::undo;

/// The name that a model gets: the one that the user has given, or one derived from where the model comes from.
#[derive(Clone, Debug)]
pub(super) enum TargetName {
    Given(Reference),
    Derived(DerivedName),
}

impl TargetName {
    /// # Errors
    /// [`OpError::PinnedTarget`] if the name includes a digest.
    pub(super) fn given(name: &Reference) -> Result<Self, OpError> {
        match name.digest() {
            Some(_) => Err(OpError::PinnedTarget { name: name.short() }),
            None => Ok(Self::Given(name.clone())),
        }
    }

    /// Drops the derived names that `is_allowed` refuses, except the preferred one.
    pub(super) fn retaining(self, is_allowed: impl Fn(&Reference) -> bool) -> Self {
        match self {
            Self::Given(name) => Self::Given(name),
            Self::Derived(names) => Self::Derived(names.retaining(is_allowed)),
        }
    }

    /// The name that the model gets unless another one has it.
    pub(super) const fn preferred(&self) -> &Reference {
        match self {
            Self::Given(name) => name,
            Self::Derived(names) => names.first(),
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Leftover {
    Nothing,
    /// Received data, for the next pull.
    Downloads,
}

/// A change of a name's meaning, from the check that allows it to the report of its former meaning.
#[derive(Debug)]
pub(super) struct NameChange<'s> {
    pub(super) store: &'s Arc<Store>,
    requester: Requester,
    verb: Verb,
    rule: NameRule,
    /// The work, such as `pull of llama3:8b`, for the lease and the log.
    cause: String,
    evictions: Arc<Evictions>,
}

#[derive(Debug)]
pub(super) struct Named {
    pub(super) name: String,
    pub(super) unchanged: bool,
    /// Whether the name is new, or meant another model before.
    pub(super) tag_changed: bool,
    pub(super) new_bytes: u64,
    pub(super) new_blob_count: u64,
    pub(super) reused_bytes: u64,
    pub(super) effects: NameEffects,
}

impl<'s> NameChange<'s> {
    /// Runs a verb that sets a name. If it fails, collects the blobs that it has published already, and adds to an error
    /// about missing space a hint about how to free some.
    pub(super) fn run<T>(
        store: &Store,
        leftover: Leftover,
        verb: impl FnOnce() -> Result<T, OpError>,
    ) -> Result<T, OpError> {
        verb().map_err(|error| {
            if let Err(error) = gc::collect_condemned(store.liveness()) {
                tracing::warn!(
                    "blobs of a failed request were not collected: {error}; `blobd gc` collects them"
                );
            }
            match error.code() {
                ErrorCode::NoSpace => {
                    let left = match leftover {
                        Leftover::Nothing => "nothing was stored",
                        Leftover::Downloads => "received data is kept for the next pull",
                    };
                    let hint = format!("{}; {left}", space_hint(store, error.is_over_quota()));
                    OpError::NoSpace { source: Box::new(error), hint }
                }
                _ => error,
            }
        })
    }

    /// A change that replaces no model.
    pub(super) fn new(store: &'s Arc<Store>, requester: Requester, verb: Verb, cause: String) -> Self {
        let rule = NameRule { uid: requester.uid(), ..NameRule::default() };
        let evictions = Evictions::new(requester, cause.clone(), ReportsTo::Nobody);
        Self { store, requester, verb, rule, cause, evictions }
    }

    /// If `force` is set, replaces the requester's own models; administrators also replace those of others and pinned ones.
    pub(super) fn replacing(mut self, force: bool) -> Self {
        let may_administer = self.requester.may_administer();
        self.rule.replace = force;
        self.rule.replace_pinned = may_administer;
        self.rule.replace_of_others = may_administer;
        self
    }

    /// Updates names that follow `source`. If `is_own_name` is set, the source itself gives the name, which then means what
    /// the source has, whoever pulls it.
    pub(super) fn updating_from(mut self, source: PulledSource, is_own_name: bool) -> Self {
        self.rule.update_from = Some(source);
        self.rule.is_own_name = is_own_name;
        self
    }

    /// Sends an event for each model that is evicted for the change.
    pub(super) fn reporting_to(mut self, events: &Sender<PullProgress>) -> Self {
        let reports_to = ReportsTo::pull(events.clone());
        self.evictions = Evictions::new(self.requester, self.cause.clone(), reports_to);
        self
    }

    /// Counts the blobs that the change stores.
    pub(super) fn counted_by(mut self, stored: &Arc<StoredBlobs>) -> Self {
        let reports_to = ReportsTo::Import(Arc::clone(stored));
        self.evictions = Evictions::new(self.requester, self.cause.clone(), reports_to);
        self
    }

    /// Refuses a name that the commit would refuse, before much work is done. `may_be_same` says whether the manifest that
    /// has the name may be the one that gets it.
    ///
    /// # Errors
    /// Those of [`blobd_store::Names::check_name`].
    pub(super) fn check(
        &self,
        target: &TargetName,
        may_be_same: impl FnOnce(&Manifest) -> bool,
    ) -> Result<(), OpError> {
        // A derived name is never one that another model has.
        let TargetName::Given(name) = target else { return Ok(()) };
        let Some(tag) = self.store.names().stored_case(name)? else { return Ok(()) };
        // Replacing a damaged manifest loses nothing.
        let Ok(present) = self.store.names().manifest(&tag) else { return Ok(()) };
        if may_be_same(&present) {
            return Ok(());
        }
        Ok(self.store.names().check_name(&tag, present.digest(), &self.rule)?)
    }

    pub(super) fn present(&self, target: &TargetName) -> Result<Option<Model>, OpError> {
        let Some(tag) = self.store.names().stored_case(target.preferred())? else { return Ok(None) };
        match self.store.names().model(&tag) {
            Err(error) if error.is_no_such_model() => Ok(None),
            present => Ok(Some(present?)),
        }
    }

    pub(super) fn lease(&self) -> Lease {
        self.store.liveness().leases().grant(self.cause.clone())
    }

    /// A stored model that gets a name, and a lease of everything that it needs.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`](blobd_store::StoreError::NoSuchModel); [`OpError::DeniedByPolicy`] if the policy denies
    /// the model or its new name.
    pub(super) fn stored_model(
        &self,
        reference: &Reference,
        policy: &CallerPolicy,
        new_name: Option<&Reference>,
    ) -> Result<(Model, Lease), OpError> {
        let lease = self.lease();
        let model = self.store.names().leased_model(reference, &lease)?;
        policy.check_stored(self.store, &model, new_name)?;
        Ok((model, lease))
    }

    /// As [`Self::begin`], if no data is stored: on a full disk, the reserve is released for the name.
    pub(super) fn begin_without_data(&self, lease: Lease) -> Result<Ingest, OpError> {
        self.store.ledger().with_reserve_for_name(|| self.begin(lease))
    }

    pub(super) fn begin(&self, lease: Lease) -> Result<Ingest, OpError> {
        self.store.ledger().make_reserve();
        let ingest = self.evictions.observe(Ingest::begin(self.store, lease)?);
        Ok(self.requester.acting(ingest, self.verb).may_take(self.rule.clone()))
    }

    /// Commits the transaction under the first of the target's names that it may take. `origin` is where the content
    /// comes from. `is_allowed` is the policy's decision about a derived name; the first was checked before.
    pub(super) fn commit(
        &self,
        ingest: Ingest,
        target: TargetName,
        manifest: &Manifest,
        origin: Option<&str>,
        is_allowed: impl Fn(&Reference) -> bool,
    ) -> Result<Named, OpError> {
        let names = match target {
            TargetName::Given(name) => {
                return self.record(|| Ok(ingest.commit_as(NewName::Given(&name), manifest, origin)?));
            }
            TargetName::Derived(names) => names,
        };
        let differ = self.file_names_differ(names.first(), origin);
        let names = names.with_id(manifest.digest(), differ).retaining(is_allowed);
        let mut named =
            self.record(|| Ok(ingest.commit_as(NewName::Derived(&names), manifest, origin)?))?;
        named.effects.notes.splice(0..0, self.note(&names, &named.name));
        Ok(named)
    }

    /// Commits the transaction if `is_allowed` permits it. It gets the name that would be replaced; no name changes
    /// between this call and the commit.
    pub(super) fn commit_if(
        &self,
        ingest: Ingest,
        name: &Reference,
        (manifest, origin): (&Manifest, Option<&str>),
        is_allowed: impl FnOnce(Option<&Reference>) -> Result<(), OpError>,
    ) -> Result<Named, OpError> {
        self.record(|| ingest.commit_if(NewName::Given(name), manifest, origin, is_allowed))
    }

    /// Gives a name to a model from the trash if `is_allowed` permits it, as in [`Self::commit_if`], then removes it there.
    pub(super) fn restore_if(
        &self,
        ingest: Ingest,
        name: &Reference,
        trashed: &TrashedModel,
        is_allowed: impl FnOnce(Option<&Reference>) -> Result<(), OpError>,
    ) -> Result<Named, OpError> {
        self.record(|| {
            let committed = ingest.restore_if(name, &trashed.manifest, is_allowed)?;
            // Only once the tag is durable.
            match self.store.names().remove_from_trash(trashed.record) {
                // Whoever repeats an undo that has succeeded takes back another change.
                Err(error) if self.verb == Verb::Undo => {
                    tracing::warn!("{}: restored, and also still in the trash: {error}", name.short());
                }
                removed => drop(removed?),
            }
            Ok(committed)
        })
    }

    /// Runs a commit and reports it. The records of a name take a few blocks: on a full disk, the reserve is released for
    /// them.
    fn record(&self, commit: impl FnOnce() -> Result<Committed, OpError>) -> Result<Named, OpError> {
        let committed = self.store.ledger().with_reserve_for_name(commit)?;
        let name = committed.name.as_ref().map(Reference::short).unwrap_or_default();
        let (unchanged, tag_changed) = (committed.is_unchanged(), committed.tag_changed);
        let Committed { new_bytes, new_blob_count, reused_bytes, .. } = committed;
        if let Some(reference) = committed.name.as_ref().filter(|_| tag_changed) {
            describe::complete_facts(self.store, reference);
        }
        let effects = NameEffects {
            displaced: displaced(self.store, self.requester, committed),
            evicted: self.evictions.take(),
            notes: soft_quota_notes(self.store, self.requester),
        };
        Ok(Named { name, unchanged, tag_changed, new_bytes, new_blob_count, reused_bytes, effects })
    }

    fn present_origin(&self, name: &Reference) -> Option<String> {
        let tag = self.store.names().stored_case(name).ok()??;
        let present = self.store.names().manifest(&tag).ok()?;
        self.store.names().name_origin(&tag, present.digest()).origin
    }

    /// Whether the file that the name's present model comes from has another name than the new one's.
    fn file_names_differ(&self, name: &Reference, origin: Option<&str>) -> bool {
        let present = self.present_origin(name);
        match present.as_deref().and_then(Origin::parse).zip(origin.and_then(Origin::parse)) {
            Some((present, new)) => present.file_name() != new.file_name(),
            None => false,
        }
    }

    /// Says why a derived name is not the one that the file's name alone gives.
    fn note(&self, names: &DerivedName, name: &str) -> Option<String> {
        let first = names.first();
        if name.parse().is_ok_and(|name| first.same_model(&name)) {
            return None;
        }
        let from = self.present_origin(first).map_or_else(String::new, |origin| {
            format!(", from {}", blobd_store_format::origin::shown(&origin))
        });
        Some(format!("{} is another model{from}; this one is named {name}", first.short()))
    }
}

/// The record of where an imported model comes from. The name of a model in another program's store says more than its last
/// part.
pub(super) fn origin_record(
    file_name: &str,
    copied_from: Option<&PullSource>,
    program: Option<&str>,
) -> String {
    match copied_from {
        Some(source) => copy_record(source, program),
        None if program.is_some() => import_record(&printable(file_name)),
        None => import_record(&display_name(file_name)),
    }
}

/// The last part of a path, without control characters. A path without a last part, such as `a/..`, is not that of a file
/// and is not shown.
pub(super) fn display_name(file_name: &str) -> String {
    printable(Path::new(file_name).file_name().and_then(|name| name.to_str()).unwrap_or("unnamed"))
}

fn printable(text: &str) -> String {
    const MAX_CHARS: usize = 200;
    text.chars().filter(|c| !c.is_control()).take(MAX_CHARS).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_safe_to_print() {
        assert_eq!(display_name("/a/b/\u{1b}[31mred.gguf\n"), "[31mred.gguf");
        for path in ["https://ollama.com/acme/x/blobs/..", "..", "/", ""] {
            assert_eq!(display_name(path), "unnamed", "{path}");
        }
    }
}
