//! Selects the models that `rm` removes by patterns and by their last use.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime};

use blobd_client::protocol::error::FailedItem;
use blobd_client::protocol::naming::Spared;
use blobd_client::protocol::request::RemoveParams;
use blobd_store::{Store, StoreError, Verb};
use blobd_store_format::reference::Reference;
use blobd_store_format::similar_names::similar_to_pattern;

use crate::ops::space::evict::LastOpened;
use crate::ops::{OpError, rfc3339};
use crate::requester::Requester;

pub(super) struct Request<'r> {
    pub(super) last_opened: &'r LastOpened,
    pub(super) requester: Requester,
    pub(super) verb: Verb,
    pub(super) params: &'r RemoveParams,
}

pub(super) struct Selection {
    pub(super) references: BTreeSet<Reference>,
    pub(super) spared: Vec<Spared>,
}

/// Names and patterns that are refused: the first ends the request, or with `go_on` they are recorded while the others are
/// removed.
#[derive(Debug)]
pub(super) struct Refusals {
    go_on: bool,
    pub(super) failed: Vec<FailedItem>,
}

impl Refusals {
    /// How many refusals at most say which names may have been meant. Finding those takes much longer than the rest.
    const MAX_ADVISED: usize = 16;

    pub(super) const fn new(go_on: bool) -> Self {
        Self { go_on, failed: Vec::new() }
    }

    const fn are_advised(&self) -> bool {
        self.failed.len() < Self::MAX_ADVISED
    }

    /// Returns the value of a step for `name`; `None` if it has failed and that was recorded.
    pub(super) fn note<T>(&mut self, name: &str, done: Result<T, OpError>) -> Result<Option<T>, OpError> {
        match done {
            Err(error) if self.go_on => {
                self.failed.push(FailedItem { name: name.to_owned(), error: error.body() });
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
    /// When the records of uses begin; `None` if this process has none.
    recorded_since: Option<SystemTime>,
}

/// What the names and patterns of a request mean.
pub(super) struct Wanted {
    named: Vec<Reference>,
    /// The names that match a pattern, or all if only a rule is given.
    matching: BTreeSet<Reference>,
}

/// Finds what is meant. Called before the tags are locked, because a look-up in a lower store may take long, and so does
/// comparing many patterns with many names.
///
/// # Errors
/// Unless `refusals` records them: [`StoreError::NoSuchModel`] for an unknown name or if no model matches a pattern,
/// [`StoreError::InLowerStore`].
pub(super) fn find_wanted(
    store: &Store,
    params: &RemoveParams,
    refusals: &mut Refusals,
) -> Result<Wanted, OpError> {
    let mut named = Vec::new();
    for reference in params.references.iter().collect::<BTreeSet<_>>() {
        let stored = match refusals.are_advised() {
            true => store.names().resolve_for_change(reference),
            false => store.names().resolve_for_change_without_advice(reference),
        };
        named.extend(refusals.note(&reference.short(), stored.map_err(OpError::from))?);
    }
    Ok(Wanted { named, matching: matching(store, params, refusals)? })
}

/// Selects models. The caller has locked the tags.
///
/// # Errors
/// Unless `refusals` records them: [`StoreError::NoSuchModel`] for a name that was removed meanwhile;
/// [`OpError::Pinned`] for the name of a pinned model; those of [`blobd_store::Names::check_change`] for a model that
/// was named.
pub(super) fn select(
    store: &Store,
    request: &Request<'_>,
    wanted: &Wanted,
    refusals: &mut Refusals,
) -> Result<Selection, OpError> {
    let params = request.params;
    let has_rule = params.unused || params.older_than_seconds.is_some();
    let mut named = BTreeSet::new();
    for reference in &wanted.named {
        let checked = check(store, request.requester, reference, has_rule);
        named.extend(refusals.note(&reference.short(), checked)?.map(|()| reference.clone()));
    }
    let mut selection = Selection { references: BTreeSet::new(), spared: Vec::new() };
    for reference in wanted.matching.union(&named) {
        // A model that was named is refused with an error; one that only matches a pattern is left out.
        let is_by_name = !has_rule && named.contains(reference);
        let reason = if is_by_name { Ok(None) } else { reason_to_keep(store, request, reference) };
        // It matched, and was removed before the tags were locked.
        if matches!(reason, Err(OpError::Store(StoreError::NoSuchModel { .. }))) {
            continue;
        }
        match refusals.note(&reference.short(), reason)? {
            Some(None) => drop(selection.references.insert(reference.clone())),
            Some(Some(reason)) => selection.spared.push(Spared { name: reference.short(), reason }),
            None => {}
        }
    }
    Ok(selection)
}

/// Checks that a name still exists and may be removed. Pinned models are left out without an error only if a
/// rule selects them.
fn check(store: &Store, requester: Requester, stored: &Reference, has_rule: bool) -> Result<(), OpError> {
    store.names().check_tag(stored)?;
    match has_rule {
        true => store.names().check_own(stored, requester.name_user())?,
        false => store.names().check_change(stored, requester.name_user())?,
    }
    if !has_rule && store.names().is_pinned(stored) {
        return Err(OpError::Pinned { name: stored.short() });
    }
    Ok(())
}

/// Finds the models that match the patterns, or all if only a rule is given.
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
    if params.patterns.is_empty() {
        return Ok(tags.into_iter().collect());
    }
    let mut found = BTreeSet::new();
    for pattern in &params.patterns {
        let matching: Vec<_> = tags.iter().filter(|tag| pattern.matches(tag)).cloned().collect();
        if matching.is_empty() {
            let similar =
                if refusals.are_advised() { similar_to_pattern(pattern, &tags) } else { Vec::new() };
            let refusal = StoreError::NoSuchModel { name: pattern.to_string(), similar };
            refusals.note(&pattern.to_string(), Err::<(), _>(refusal.into()))?;
        }
        found.extend(matching);
    }
    Ok(found)
}

fn reason_to_keep(
    store: &Store,
    request: &Request<'_>,
    reference: &Reference,
) -> Result<Option<String>, OpError> {
    let Request { last_opened, requester, params, .. } = request;
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
        // Uses in a part of the time are unknown.
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
