//! Selects the models that `rm` removes by patterns and by their last use.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use blobd_client::protocol::request::RemoveParams;
use blobd_client::protocol::response::NotRemoved;
use blobd_client::protocol::upkeep::Spared;
use blobd_store::{Store, StoreError};
use blobd_store_format::reference::Reference;
use blobd_store_format::similar_names::similar_to_pattern;

use super::{LastOpened, OpError, rfc3339};
use crate::requester::Requester;

/// A request to remove models.
pub(super) struct Request<'r> {
    pub(super) last_opened: &'r LastOpened,
    pub(super) requester: Requester,
    pub(super) params: &'r RemoveParams,
}

/// The models to remove, and those that match and stay.
pub(super) struct Selection {
    pub(super) references: BTreeSet<Reference>,
    pub(super) spared: Vec<Spared>,
}

/// What becomes of a name or pattern that is refused: it ends the request, or is recorded while the others are removed.
#[derive(Debug)]
pub(super) struct Refusals {
    go_on: bool,
    pub(super) failed: Vec<NotRemoved>,
}

impl Refusals {
    pub(super) const fn of(params: &RemoveParams) -> Self {
        Self { go_on: params.go_on, failed: Vec::new() }
    }

    /// The value of a step for `name`; `None` if the step has failed and that is recorded.
    pub(super) fn note<T>(&mut self, name: &str, done: Result<T, OpError>) -> Result<Option<T>, OpError> {
        match done {
            Err(error) if self.go_on => {
                self.failed.push(NotRemoved { name: name.to_owned(), error: error.body() });
                Ok(None)
            }
            done => done.map(Some),
        }
    }
}

/// When a model got its name, and its last use as far as known.
#[derive(Clone, Copy, Debug)]
struct Age {
    named: SystemTime,
    opened: Option<SystemTime>,
    /// Since when uses are recorded. `None`: not in this process.
    recorded_since: Option<SystemTime>,
}

/// The stored names of the models that are named. Called before the tags are locked, because a look-up in a lower
/// store may take long.
///
/// # Errors
/// Unless `refusals` records them: [`StoreError::NoSuchModel`] for an unknown name, [`StoreError::InLowerStore`].
pub(super) fn resolve_named(
    store: &Store,
    params: &RemoveParams,
    refusals: &mut Refusals,
) -> Result<Vec<Reference>, OpError> {
    let mut named = Vec::new();
    for reference in &params.references {
        let stored = store.names().resolve_for_change(reference).map_err(OpError::from);
        named.extend(refusals.note(&reference.short(), stored)?);
    }
    Ok(named)
}

/// Selects models. The caller has locked the tags, and `resolved` the names.
///
/// # Errors
/// Unless `refusals` records them: [`StoreError::NoSuchModel`] for a name that was removed meanwhile, or if no model
/// matches a pattern; [`OpError::Pinned`] for the name of a pinned model; those of [`blobd_store::Names::check_change`] for a name
/// that is given.
pub(super) fn select(
    store: &Store,
    request: &Request<'_>,
    resolved: &[Reference],
    refusals: &mut Refusals,
) -> Result<Selection, OpError> {
    let params = request.params;
    let has_rule = params.unused || params.older_than_seconds.is_some();
    let mut named = BTreeSet::new();
    for reference in resolved {
        let checked = checked(store, request.requester, reference, has_rule);
        named.extend(refusals.note(&reference.short(), checked)?);
    }
    let mut selection = Selection { references: BTreeSet::new(), spared: Vec::new() };
    for reference in matching(store, params, refusals)?.into_iter().chain(named.clone()) {
        // A name that is given is refused as a whole; a model that only matches is left out.
        let is_by_name = !has_rule && named.contains(&reference);
        let reason = if is_by_name { Ok(None) } else { reason_to_keep(store, request, &reference) };
        match refusals.note(&reference.short(), reason)? {
            Some(None) => drop(selection.references.insert(reference)),
            Some(Some(reason)) => selection.spared.push(Spared { name: reference.short(), reason }),
            None => {}
        }
    }
    Ok(selection)
}

/// A name that still exists. Only a rule leaves out a pinned model without an error.
fn checked(
    store: &Store,
    requester: Requester,
    stored: &Reference,
    has_rule: bool,
) -> Result<Reference, OpError> {
    store.names().check_tag(stored)?;
    match has_rule {
        true => store.names().check_own(stored, requester.name_user())?,
        false => store.names().check_change(stored, requester.name_user())?,
    }
    if !has_rule && store.names().is_pinned(stored) {
        return Err(OpError::Pinned { name: stored.short() });
    }
    Ok(stored.clone())
}

/// The models that match the patterns, or all if only a rule is given.
fn matching(
    store: &Store,
    params: &RemoveParams,
    refusals: &mut Refusals,
) -> Result<BTreeSet<Reference>, OpError> {
    let has_rule = params.unused || params.older_than_seconds.is_some();
    if params.patterns.is_empty() && !(has_rule && params.references.is_empty()) {
        return Ok(BTreeSet::new());
    }
    let tags = store.names().tags()?.references;
    for pattern in &params.patterns {
        if !tags.iter().any(|tag| pattern.matches(tag)) {
            let refusal = StoreError::NoSuchModel {
                name: pattern.to_string(),
                similar: similar_to_pattern(pattern, &tags),
            };
            refusals.note(&pattern.to_string(), Err::<(), _>(refusal.into()))?;
        }
    }
    let is_wanted = |tag: &Reference| {
        params.patterns.is_empty() || params.patterns.iter().any(|pattern| pattern.matches(tag))
    };
    Ok(tags.into_iter().filter(is_wanted).collect())
}

fn reason_to_keep(
    store: &Store,
    request: &Request<'_>,
    reference: &Reference,
) -> Result<Option<String>, OpError> {
    let Request { last_opened, requester, params } = request;
    match store.names().check_own(reference, requester.name_user()) {
        Err(StoreError::NameOfAnother { .. }) => return Ok(Some("added by another user".to_owned())),
        checked => checked?,
    }
    if store.names().is_pinned(reference) {
        return Ok(Some("pinned".to_owned()));
    }
    let older_than = params.older_than_seconds.map(Duration::from_secs);
    if !params.unused && older_than.is_none() {
        return Ok(None);
    }
    let manifest = store.names().manifest(reference)?.digest();
    if store.liveness().leases().is_leased(manifest) {
        return Ok(Some("open".to_owned()));
    }
    let age = Age {
        named: store.names().modified(reference)?,
        opened: [last_opened(reference, manifest), store.content().index().last_use(manifest)]
            .into_iter()
            .flatten()
            .map(|last| last.at)
            .max(),
        recorded_since: store.content().index().uses_since(),
    };
    Ok(age.reason_to_keep(params.unused, older_than, SystemTime::now()))
}

impl Age {
    /// A use before the records began is unknown, and then the model counts as used.
    fn reason_to_keep(self, unused: bool, older_than: Option<Duration>, now: SystemTime) -> Option<String> {
        let Some(recorded_since) = self.recorded_since else {
            return Some("when it was last used is known only to a daemon".to_owned());
        };
        if let Some(opened) = self.opened.filter(|_| unused) {
            return Some(format!("opened {}", rfc3339(opened)));
        }
        let unknown = || Some(format!("whether it was used before {} is not known", rfc3339(recorded_since)));
        if unused && self.named < recorded_since && older_than.is_none() {
            return unknown();
        }
        let older_than = older_than?;
        let is_recent = |time: SystemTime| now.duration_since(time).unwrap_or_default() < older_than;
        let last = self.opened.map_or(self.named, |opened| opened.max(self.named));
        if is_recent(last) {
            return Some(format!("last used {}", rfc3339(last)));
        }
        // Nothing is known about a part of the time.
        if is_recent(recorded_since) && last < recorded_since { unknown() } else { None }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const DAY: Duration = Duration::from_secs(86400);

    fn day(number: u32) -> SystemTime {
        SystemTime::UNIX_EPOCH + DAY * (20_000 + number)
    }

    fn is_kept(named: u32, opened: Option<u32>, since: Option<u32>, unused: bool, days: Option<u32>) -> bool {
        let age = Age { named: day(named), opened: opened.map(day), recorded_since: since.map(day) };
        age.reason_to_keep(unused, days.map(|days| DAY * days), day(100)).is_some()
    }

    #[test]
    fn model_is_old_if_it_was_neither_named_nor_opened_lately() {
        assert!(!is_kept(60, None, Some(0), false, Some(30)));
        assert!(!is_kept(60, Some(65), Some(0), false, Some(30)));
        assert!(is_kept(60, Some(80), Some(0), false, Some(30)), "opened");
        assert!(is_kept(80, None, Some(0), false, Some(30)), "new");
        assert!(is_kept(120, None, Some(0), false, Some(30)), "a wrong clock");
    }

    #[test]
    fn model_is_unused_if_it_was_never_opened() {
        assert!(!is_kept(60, None, Some(0), true, None));
        assert!(is_kept(60, Some(60), Some(0), true, None));
        assert!(is_kept(60, Some(60), Some(0), true, Some(30)), "both rules");
        assert!(is_kept(80, None, Some(0), true, Some(30)), "both rules");
        assert!(!is_kept(60, None, Some(0), true, Some(30)));
    }

    #[test]
    fn unknown_uses_count_as_uses() {
        assert!(is_kept(10, None, None, false, Some(30)), "no records");
        assert!(is_kept(10, None, Some(90), false, Some(30)), "records are younger");
        assert!(!is_kept(10, None, Some(60), false, Some(30)));
        assert!(is_kept(10, None, Some(60), true, None), "it may have been opened before");
    }
}
