//! The policy for one user: finds out what its rules need to know about a model, and refuses what they deny.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::{Arc, PoisonError};

use blobd_client::protocol::access::PolicyDecision;
use blobd_store::{FileReader, Model, NamedFile, Store, StoreError, StoredFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::origin::Origin;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use tracing_mutex::stdsync::Mutex;

use super::describe::{MAX_TEXT_BYTES, read_header};
use super::{OpError, trust};
use crate::policy::{Decision, Policy, Subject, Terms, TermsBuilder};
use crate::principal::Principal;
use crate::trust::{AppliedRule, Trust, TrustMode};

/// The policy as it applies to one user, and the rules about signatures, which apply to all users. By default it allows
/// everything.
#[derive(Clone, Debug, Default)]
pub struct CallerPolicy {
    restricted: Option<Arc<Restricted>>,
    trust: Arc<Trust>,
}

#[derive(Debug)]
struct Restricted {
    policy: Arc<Policy>,
    principal: Principal,
    cache: Arc<TermsCache>,
}

/// Licenses and formats of stored models, by their manifests, which never change.
#[derive(Debug, Default)]
pub(crate) struct TermsCache(Mutex<BTreeMap<Digest, Terms>>);

impl TermsCache {
    /// Some 100 bytes each.
    const MAX_MODELS: usize = 4096;

    fn find(&self, manifest: Digest) -> Option<Terms> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).get(&manifest).cloned()
    }

    fn keep(&self, manifest: Digest, terms: &Terms) {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if known.len() >= Self::MAX_MODELS {
            known.clear();
        }
        known.insert(manifest, terms.clone());
    }
}

impl CallerPolicy {
    pub(crate) fn new(policy: Arc<Policy>, principal: &Principal, cache: &Arc<TermsCache>) -> Self {
        if policy.allows_all_to(principal) {
            return Self::default();
        }
        let restricted = Restricted { policy, principal: principal.clone(), cache: Arc::clone(cache) };
        Self { restricted: Some(Arc::new(restricted)), ..Self::default() }
    }

    pub(crate) fn with_trust(self, trust: Arc<Trust>) -> Self {
        Self { trust, ..self }
    }

    /// Whether a model of this name may be sent only after it was looked at: the policy has rules, or it must be signed.
    pub(crate) fn may_refuse(&self, name: &Reference) -> bool {
        let demands_signature = |applied: AppliedRule<'_>| applied.rule.mode == TrustMode::Enforce;
        self.is_restricted() || self.trust.rule_for([name]).is_some_and(demands_signature)
    }

    pub(super) fn trust(&self) -> &Trust {
        &self.trust
    }

    /// Whether the content of a model may be refused to the user.
    pub(super) fn may_refuse_content(&self) -> bool {
        self.is_restricted() || !self.trust.is_empty()
    }

    /// Refuses to give out the content of a stored model: by the policy, and if it is not signed as it must be. All
    /// content that leaves the daemon is asked for here: descriptors, uploads, and what other machines read.
    pub(super) fn check_content(&self, store: &Store, model: &Model) -> Result<(), OpError> {
        self.check_stored(store, model, None)?;
        trust::check(&self.trust, store, (&model.reference, &model.manifest))
    }

    /// Whether other machines may see a model: as [`Self::check_content`].
    pub(super) fn may_send(
        &self,
        store: &Store,
        name: &Reference,
        manifest: &Manifest,
    ) -> Result<bool, OpError> {
        if !self.may_read(store, name, manifest.digest())? {
            return Ok(false);
        }
        match trust::check(&self.trust, store, (name, manifest)) {
            Ok(()) => Ok(true),
            Err(refusal) => {
                tracing::debug!("not shown to other machines: {}", refusal.body());
                Ok(false)
            }
        }
    }

    /// Whether a rule may deny something to the user.
    pub(super) const fn is_restricted(&self) -> bool {
        self.restricted.is_some()
    }

    /// Refuses a source by its registry and its names, before any server is contacted.
    pub(super) fn check_source(&self, source: &PullSource, name: Option<&Reference>) -> Result<(), OpError> {
        let Some(restricted) = &self.restricted else { return Ok(()) };
        restricted.check(&source.to_string(), &subject_at(source, name))
    }

    /// Refuses a model at a registry. `stored` is the digest of its manifest, if it has one: the store may have that model.
    /// `terms` is called if the decision depends on licenses and formats.
    pub(super) fn check_remote(
        &self,
        store: &Store,
        (source, name): (&PullSource, Option<&Reference>),
        stored: Option<Digest>,
        terms: impl FnOnce() -> Result<Terms, OpError>,
    ) -> Result<(), OpError> {
        let Some(restricted) = &self.restricted else { return Ok(()) };
        let mut subject = subject_at(source, name);
        stored.map_or(Ok(()), |manifest| restricted.add_stored(&mut subject, store, (manifest, None)))?;
        if restricted.needs_terms(&subject) {
            subject.terms = terms()?;
        }
        restricted.check(&source.to_string(), &subject)
    }

    /// Refuses an import by the name that the model will get, by where it is said to be a copy from, and by what is known so
    /// far of its licenses and formats.
    pub(super) fn check_import(
        &self,
        file: &str,
        (name, copied_from): (&Reference, Option<&PullSource>),
        terms: Terms,
    ) -> Result<(), OpError> {
        let Some(restricted) = &self.restricted else { return Ok(()) };
        let mut subject = Subject { terms, ..Subject::default() };
        subject.add_local();
        subject.add_name(name);
        copied_from.into_iter().for_each(|source| subject.add_claim(source));
        restricted.check(&format!("{file} as {}", name.short()), &subject)
    }

    /// Refuses a stored model by its origin, all its names, its licenses and its formats. `new_name` is one that it will
    /// get.
    pub(super) fn check_stored(
        &self,
        store: &Store,
        model: &Model,
        new_name: Option<&Reference>,
    ) -> Result<(), OpError> {
        let Some(restricted) = &self.restricted else { return Ok(()) };
        let subject = restricted.stored_subject(store, model, new_name)?;
        restricted.check(&format!("model {}", model.reference.short()), &subject)
    }

    /// Whether the user may read the stored model with this name and manifest. Reads its files only if the decision
    /// depends on licenses and formats.
    pub(super) fn may_read(
        &self,
        store: &Store,
        reference: &Reference,
        manifest: Digest,
    ) -> Result<bool, OpError> {
        let Some(restricted) = &self.restricted else { return Ok(true) };
        let mut subject = restricted.named_subject(store, (manifest, reference), None)?;
        if restricted.needs_terms(&subject) {
            let model = store.names().model(reference)?;
            if model.manifest.digest() != manifest {
                // Another model has got the name.
                return Ok(false);
            }
            subject.terms = restricted.cached_terms(store, &model)?;
        }
        let decision = restricted.policy.decide(&restricted.principal, &subject);
        Ok(!matches!(decision, Decision::Denied(_)))
    }

    /// As [`Self::check_stored`], for the model of this name.
    pub(crate) fn check_named(&self, store: &Store, reference: &Reference) -> Result<(), OpError> {
        if self.restricted.is_none() {
            return Ok(());
        }
        self.check_stored(store, &store.names().model(reference)?, None)
    }

    pub(crate) fn decision(&self, store: &Store, reference: &Reference) -> Result<PolicyDecision, OpError> {
        let allowed = PolicyDecision { allowed: true, rule: None, reason: None, found: None, place: None };
        let Some(restricted) = &self.restricted else { return Ok(allowed) };
        let subject = restricted.stored_subject(store, &store.names().model(reference)?, None)?;
        let Restricted { policy, principal, .. } = &**restricted;
        let decision = policy.decide(principal, &subject);
        Ok(policy.described(principal, &subject, &decision).unwrap_or(allowed))
    }
}

impl Restricted {
    fn check(&self, what: &str, subject: &Subject) -> Result<(), OpError> {
        match self.policy.decide(&self.principal, subject) {
            Decision::Allowed(_) | Decision::Undecided => Ok(()),
            Decision::Denied(rule) => {
                let refusal = self.policy.refusal(&self.principal, what, subject, rule);
                Err(OpError::DeniedByPolicy { message: refusal.message, hint: refusal.hint })
            }
        }
    }

    fn needs_terms(&self, subject: &Subject) -> bool {
        self.policy.decide(&self.principal, subject) == Decision::Undecided
    }

    /// Adds the origin of a stored model, and all its names if a rule depends on them; of an edited model also those of its
    /// source. If the model is used by its `name`, the origin of that name counts, otherwise the one that was recorded first
    /// for the manifest. A record that cannot be read is an error: without it, the rules about registries would not apply.
    fn add_stored(
        &self,
        subject: &mut Subject,
        store: &Store,
        (manifest, name): (Digest, Option<&Reference>),
    ) -> Result<(), OpError> {
        /// The most models made from each other by edits. Beyond that the origin is unknown, so the model is refused.
        const MAX_EDITS: usize = 1000;
        let needs_names = self.policy.names_matter_to(&self.principal);
        let mut own_origin = name.and_then(|name| store.names().name_origin(name, manifest).origin);
        let (mut next, mut seen) = (Some((manifest, None)), BTreeSet::new());
        while let Some((manifest, name)) = next.take().filter(|(manifest, _)| seen.insert(*manifest)) {
            if seen.len() > MAX_EDITS {
                let what = "its origin is unknown: it was made by more than 1000 edits in a row";
                return Err(OpError::Internal(format!("manifest {manifest}: {what}")));
            }
            if needs_names {
                store.names().names_of(manifest)?.iter().for_each(|name| subject.add_name(name));
            }
            let recorded = store.names().recorded_origin(manifest)?;
            match own_origin.take().or(recorded).as_deref().and_then(Origin::parse) {
                // Whoever imports a model can claim any source.
                Some(Origin::Import(_)) => subject.add_local(),
                Some(Origin::Copy(source)) => {
                    subject.add_local();
                    subject.add_claim(&source);
                }
                Some(Origin::Url(source) | Origin::Source(source)) => subject.add_source(&source),
                Some(Origin::Edit { name, manifest: Some(edited) }) => {
                    subject.add_name(&name);
                    next = Some((edited, Some(name)));
                }
                Some(Origin::Edit { name, manifest: None }) => match named(store, &name)? {
                    Some(edited) => next = Some((edited, Some(name))),
                    None => subject.add_source(&PullSource::Registry(name)),
                },
                None => add_hosts(subject, store, manifest, name.as_ref())?,
            }
        }
        Ok(())
    }

    fn stored_subject(
        &self,
        store: &Store,
        model: &Model,
        new_name: Option<&Reference>,
    ) -> Result<Subject, OpError> {
        let mut subject = self.named_subject(store, (model.manifest.digest(), &model.reference), new_name)?;
        if self.needs_terms(&subject) {
            subject.terms = self.cached_terms(store, model)?;
        }
        Ok(subject)
    }

    /// Describes a stored model without its licenses and formats.
    fn named_subject(
        &self,
        store: &Store,
        (manifest, reference): (Digest, &Reference),
        new_name: Option<&Reference>,
    ) -> Result<Subject, OpError> {
        let mut subject = Subject::default();
        subject.add_name(reference);
        new_name.into_iter().for_each(|name| subject.add_name(name));
        self.add_stored(&mut subject, store, (manifest, Some(reference)))?;
        Ok(subject)
    }

    fn cached_terms(&self, store: &Store, model: &Model) -> Result<Terms, OpError> {
        let digest = model.manifest.digest();
        if let Some(known) = self.cache.find(digest) {
            return Ok(known);
        }
        let terms = terms_of(store, model)?;
        self.cache.keep(digest, &terms);
        Ok(terms)
    }
}

pub(super) fn terms_of(store: &Store, model: &Model) -> Result<Terms, OpError> {
    let mut terms = TermsBuilder::default();
    terms.add_manifest(&model.manifest);
    for NamedFile { file, name, .. } in &model.contents()? {
        add_file(&mut terms, store, file, name.as_deref())?;
    }
    Ok(terms.finish())
}

fn add_file(
    terms: &mut TermsBuilder,
    store: &Store,
    file: &StoredFile,
    name: Option<&str>,
) -> Result<(), OpError> {
    let StoredFile { descriptor, recipe } = file;
    if let Some(recipe) = recipe
        && let Some(header) = read_header(store, recipe)?
    {
        terms.add_header(&*header);
        return Ok(());
    }
    terms.add_file(&descriptor.media_type, name);
    if descriptor.media_type.component() == "license" {
        let is_text = descriptor.size <= MAX_TEXT_BYTES;
        let read = || FileReader::new(store.content(), file).read_range(0..descriptor.size);
        let text = is_text.then(read).transpose()?;
        terms.add_license(text.as_deref());
    }
    Ok(())
}

fn subject_at(source: &PullSource, name: Option<&Reference>) -> Subject {
    let mut subject = Subject::default();
    subject.add_source(source);
    name.into_iter().for_each(|name| subject.add_name(name));
    subject
}

/// Without a record, a model counts as coming from the hosts in its names; an edited model that is no longer stored, from
/// the host in the `name` that it had.
fn add_hosts(
    subject: &mut Subject,
    store: &Store,
    manifest: Digest,
    name: Option<&Reference>,
) -> Result<(), OpError> {
    let names = store.names().names_of(manifest)?;
    names.iter().chain(name).for_each(|name| subject.add_host(name));
    Ok(())
}

fn named(store: &Store, name: &Reference) -> Result<Option<Digest>, StoreError> {
    match store.names().resolve(name).and_then(|name| store.names().manifest(&name)) {
        Ok(manifest) => Ok(Some(manifest.digest())),
        Err(error) if error.is_no_such_model() => Ok(None),
        Err(error) => Err(error),
    }
}
