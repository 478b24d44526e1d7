//! Gives a name to a model. All verbs that set a name do it here, so that what one of them refuses all refuse.
//!
//! The order of every such verb, in [`NameChange::run`]: a lease, the policy, whether the requester may take the name,
//! space (quota, eviction, reserve), the commit, and the report of what else has happened.

use std::sync::Arc;

use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::lost_model::NameEffects;
use blobd_client::protocol::response::PullProgress;
use blobd_store::leases::Lease;
use blobd_store::{Committed, Ingest, Model, NameOrigin, NameRule, NewName, Store, TrashedModel, Verb, gc};
use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::origin::Origin;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use tokio::sync::mpsc::Sender;

use super::lost_models::{Evictions, displaced};
use super::policy::CallerPolicy;
use super::relief::{Leftover, Relief};
use super::{OpError, soft_quota};
use crate::requester::Requester;

/// The name that a model gets.
#[derive(Clone, Debug)]
pub(super) enum TargetName {
    /// The user has named it.
    Given(Reference),
    /// The user has named none.
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

    /// Without the derived names that `is_allowed` refuses, except the preferred one.
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

/// A change of what a name means, from the check that allows it to the report of what the name meant before.
#[derive(Debug)]
pub(super) struct NameChange<'s> {
    store: &'s Arc<Store>,
    requester: Requester,
    verb: Verb,
    rule: NameRule,
    /// The work, such as `pull of llama3:8b`, for the lease and the log.
    cause: String,
    evictions: Arc<Evictions>,
}

/// What a verb reports about the name that it has set.
#[derive(Debug)]
pub(super) struct Named {
    /// The name, as it is stored.
    pub(super) name: String,
    /// Whether the store is as it was before.
    pub(super) unchanged: bool,
    /// Whether the name is new, or meant another model before.
    pub(super) tag_changed: bool,
    pub(super) new_bytes: u64,
    pub(super) new_blob_count: u64,
    pub(super) reused_bytes: u64,
    pub(super) effects: NameEffects,
}

impl<'s> NameChange<'s> {
    /// Runs a verb that sets a name. If it fails, for instance on a full disk, collects what it has published already, and
    /// adds to an error about missing space what could free some. `leftover` is what the verb keeps when it fails.
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
                    OpError::NoSpace { source: Box::new(error), relief: Relief::of(store), leftover }
                }
                _ => error,
            }
        })
    }

    /// A change that takes no name that has other content.
    pub(super) fn new(store: &'s Arc<Store>, requester: Requester, verb: Verb, cause: String) -> Self {
        let rule = NameRule { uid: requester.uid(), ..NameRule::default() };
        let evictions = Evictions::new(requester, cause.clone());
        Self { store, requester, verb, rule, cause, evictions }
    }

    /// If `force` is set, takes the requester's own names; of administrators also those of others, and pinned ones.
    pub(super) fn replacing(mut self, force: bool) -> Self {
        let may_administer = self.requester.may_administer();
        self.rule.replace = force;
        self.rule.replace_pinned = may_administer;
        self.rule.replace_of_others = may_administer;
        self
    }

    /// Updates names that follow `source`. If `is_own_name` is set, the name is the one that the source itself gives:
    /// it means what the source has, whoever pulls it.
    pub(super) fn updating_from(mut self, source: &PullSource, is_own_name: bool) -> Self {
        self.rule.update_from = Some(source.clone());
        self.rule.is_own_name = is_own_name;
        self
    }

    /// Sends an event for each model that is evicted for the change.
    pub(super) fn reporting_to(mut self, events: &Sender<PullProgress>) -> Self {
        self.evictions = Evictions::of_pull(self.requester, self.cause.clone(), events);
        self
    }

    /// Refuses a name that the commit would refuse, before much work is done. `may_be_same` says of the manifest that
    /// has the name whether it may be the one that gets it.
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

    /// The model that has the name now, if there is one.
    pub(super) fn present(&self, target: &TargetName) -> Result<Option<Model>, OpError> {
        let Some(tag) = self.store.names().stored_case(target.preferred())? else { return Ok(None) };
        match self.store.names().model(&tag) {
            Err(error) if error.is_no_such_model() => Ok(None),
            present => Ok(Some(present?)),
        }
    }

    /// A lease for the work.
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

    /// Starts a transaction that sets the name and stores no data. On a full disk, the reserve is released for it.
    pub(super) fn begin_without_data(&self, lease: Lease) -> Result<Ingest, OpError> {
        self.store.ledger().with_reserve_for_name(|| self.begin(lease))
    }

    /// Starts the transaction that sets the name.
    pub(super) fn begin(&self, lease: Lease) -> Result<Ingest, OpError> {
        self.store.ledger().make_reserve();
        let ingest = self.evictions.observe(Ingest::begin(self.store, lease)?);
        Ok(self.requester.acting(ingest, self.verb).may_take(self.rule.clone()))
    }

    /// Commits the transaction under the first of the target's names that it may take. `origin` is where the content
    /// comes from. `is_allowed` is the policy's decision about a derived name; the first was checked before.
    ///
    /// # Errors
    /// As for [`Ingest::commit`].
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

    /// Commits the transaction if `is_allowed` permits it, which gets the name that would be replaced. No name changes
    /// between its call and the commit.
    pub(super) fn commit_if(
        &self,
        ingest: Ingest,
        name: &Reference,
        (manifest, origin): (&Manifest, Option<&str>),
        is_allowed: impl FnOnce(Option<&Reference>) -> Result<(), OpError>,
    ) -> Result<Named, OpError> {
        self.record(|| ingest.commit_if(NewName::Given(name), manifest, origin, is_allowed))
    }

    /// Gives a name to a model from the trash, then removes it there.
    pub(super) fn restore(
        &self,
        ingest: Ingest,
        name: &Reference,
        trashed: &TrashedModel,
    ) -> Result<Named, OpError> {
        self.record(|| {
            let committed = ingest.restore(name, &trashed.manifest)?;
            // Only once the tag is durable.
            self.store.names().remove_from_trash(trashed.record)?;
            Ok(committed)
        })
    }

    /// Runs a commit, and reports it. The records of a name take a few blocks: on a full disk, the reserve is released
    /// for them.
    fn record(&self, commit: impl FnOnce() -> Result<Committed, OpError>) -> Result<Named, OpError> {
        let committed = self.store.ledger().with_reserve_for_name(commit)?;
        let name = committed.name.as_ref().map(Reference::short).unwrap_or_default();
        let (unchanged, tag_changed) = (committed.is_unchanged(), committed.tag_changed);
        let Committed { new_bytes, new_blob_count, reused_bytes, .. } = committed;
        let effects = NameEffects {
            displaced: displaced(self.store, self.requester, committed),
            evicted: self.evictions.take(),
            notes: soft_quota::notes(self.store, self.requester),
        };
        Ok(Named { name, unchanged, tag_changed, new_bytes, new_blob_count, reused_bytes, effects })
    }

    /// Where the name has its content from now, if it has any.
    fn present_origin(&self, name: &Reference) -> Option<NameOrigin> {
        let tag = self.store.names().stored_case(name).ok()??;
        let present = self.store.names().manifest(&tag).ok()?;
        Some(self.store.names().name_origin(&tag, present.digest()))
    }

    /// Whether the model that has the name now comes from a file with another name than the new one.
    fn file_names_differ(&self, name: &Reference, origin: Option<&str>) -> bool {
        let present = self.present_origin(name).and_then(|present| present.origin);
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
        let from = self.present_origin(first).and_then(|present| present.origin);
        let from = from.map_or_else(String::new, |origin| {
            format!(", from {}", blobd_store_format::origin::shown(&origin))
        });
        Some(format!("{} is another model{from}; this one is named {name}", first.short()))
    }
}
