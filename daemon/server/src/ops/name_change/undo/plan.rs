//! The plan of an undo: which change is taken back, and what gives each of its names its earlier meaning.

use std::time::Duration;

use blobd_client::protocol::naming::{Undone, UndoneName};
use blobd_store::leases::Lease;
use blobd_store::{HistoryEntry, NameOrigin, RecordedChange, Store, StoreError, TrashedModel, Verb};
use blobd_store_format::digest::Digest;
use blobd_store_format::origin::{Origin, shown};
use blobd_store_format::reference::Reference;

use super::{TargetName, Work, leased_model};
use crate::names::Names;
use crate::ops::{OpError, rfc3339};

/// The trash keeps what an undo removes for so long if it is not to keep what is replaced.
const LEAST_KEEP: Duration = Duration::from_secs(7 * 86_400);

pub(super) fn keep(store: &Store) -> Duration {
    let policy = store.ledger().space_policy();
    if policy.keep_displaced.is_zero() { LEAST_KEEP } else { policy.keep_displaced }
}

/// What takes a change back.
pub(super) struct Plan {
    /// What the change did to the first of its names.
    pub(super) change: RecordedChange,
    pub(super) steps: Vec<Step>,
}

#[derive(Debug)]
pub(super) enum Step {
    /// Gives the model its old name back, and removes the new one.
    Rename { from: Reference, to: Reference, digest: Digest },
    /// The name gets the version that it had before.
    Restore { name: Reference, replaced: Option<Digest>, version: Version },
    /// The name was new. The model is still stored under the other name if there is one.
    Remove { name: Reference, digest: Digest, other: Option<Reference> },
}

/// Where an earlier version of a name is.
#[derive(Debug)]
pub(super) enum Version {
    Trashed(Box<TrashedModel>),
    Named(Box<NamedVersion>),
}

/// A model of the store, perhaps under the very name, with the origin that it had as the earlier version.
#[derive(Debug)]
pub(super) struct NamedVersion {
    pub(super) other: Reference,
    pub(super) digest: Digest,
    pub(super) origin: NameOrigin,
}

impl Version {
    fn digest(&self) -> Digest {
        match self {
            Self::Trashed(trashed) => trashed.manifest.digest(),
            Self::Named(named) => named.digest,
        }
    }
}

impl Plan {
    pub(super) fn new(
        work: &Work<'_>,
        reference: Option<&Reference>,
        lease: &Lease,
    ) -> Result<Self, OpError> {
        let changes = changes(work, reference)?;
        let planned = planned(work, &changes, lease);
        let names = |is_possible: bool| {
            let wanted = planned.iter().filter(move |(_, step)| step.is_ok() == is_possible);
            wanted.map(|(change, _)| change.reference.short()).collect::<Vec<_>>()
        };
        let (impossible, possible) = (names(false), names(true));
        let count = planned.len();
        let (mut steps, mut refusal) = (Vec::new(), None);
        for (_, step) in planned {
            match step {
                Ok(step) => steps.push(step),
                Err(error) => drop(refusal.get_or_insert(error)),
            }
        }
        match (refusal, changes.into_iter().next()) {
            (None, Some(change)) => Ok(Self { change, steps }),
            (Some(error), _) if count > 1 => {
                Err(OpError::CannotUndo { source: Box::new(error), impossible: impossible.len(), possible })
            }
            (Some(error), _) => Err(error),
            (None, None) => Err(OpError::NothingToUndo { name: None }),
        }
    }

    /// What the steps will have done.
    pub(super) fn described(&self) -> Undone {
        let HistoryEntry { time, actor, .. } = &self.change.entry;
        Undone {
            change: self.change.id.to_string(),
            verb: actor.verb.name().to_owned(),
            time: rfc3339(*time),
            uid: actor.uid,
            user: Names::system().name_of(actor.uid),
            names: self.steps.iter().map(Step::described).collect(),
            reversed_by: reversals(&self.steps),
            ..Undone::default()
        }
    }
}

impl Step {
    fn described(&self) -> UndoneName {
        match self {
            Self::Rename { from, to, digest } => UndoneName {
                name: to.short(),
                digest: Some(*digest),
                renamed_from: Some(from.short()),
                ..UndoneName::default()
            },
            Self::Restore { name, replaced, version } => UndoneName {
                name: name.short(),
                digest: Some(version.digest()),
                replaced: *replaced,
                ..UndoneName::default()
            },
            Self::Remove { name, digest, other } => UndoneName {
                name: name.short(),
                replaced: Some(*digest),
                stored_as: other.as_ref().map(Reference::short),
                ..UndoneName::default()
            },
        }
    }
}

/// The commands that reverse the steps, with as many names in each as it takes.
fn reversals(steps: &[Step]) -> Vec<String> {
    let (mut removed, mut trashed, mut commands) = (Vec::new(), Vec::new(), Vec::new());
    // A renaming that replaced a model is reversed by one that replaces it again.
    let is_renamed = |name: &Reference| {
        steps.iter().any(|step| matches!(step, Step::Rename { from, .. } if from.same_model(name)))
    };
    for step in steps {
        match step {
            Step::Rename { from, to, .. } => {
                let replaces =
                    |step: &Step| matches!(step, Step::Restore { name, .. } if name.same_model(from));
                let force = if steps.iter().any(replaces) { " --force" } else { "" };
                commands.push(format!("blobd rename {} {}{force}", to.short(), from.short()));
            }
            Step::Restore { name, replaced: None, .. } if !is_renamed(name) => removed.push(name.short()),
            Step::Restore { name, replaced: Some(replaced), version } if *replaced != version.digest() => {
                commands.push(format!("blobd undelete {} --force", name.short()));
            }
            Step::Restore { .. } => {}
            Step::Remove { name, other: Some(other), .. } => {
                commands.push(format!("blobd tag {} {}", other.short(), name.short()));
            }
            Step::Remove { name, other: None, .. } => trashed.push(name.short()),
        }
    }
    let all = |command: &str, names: Vec<String>| {
        (!names.is_empty()).then(|| format!("{command} {}", names.join(" ")))
    };
    commands.extend(all("blobd rm --keep 7d", removed));
    commands.extend(all("blobd undelete", trashed));
    commands
}

/// What the change to be taken back did to each of its names.
fn changes(work: &Work<'_>, reference: Option<&Reference>) -> Result<Vec<RecordedChange>, OpError> {
    let (names, requester) = (work.store.names(), work.requester);
    let Some(reference) = reference else {
        let newest = names.newest_change_by(requester.uid())?;
        return Ok(newest.map(|id| names.change(id)).transpose()?.unwrap_or_default());
    };
    let nothing = || OpError::NothingToUndo { name: Some(reference.short()) };
    let newest = names.newest_change_of(reference)?.ok_or_else(nothing)?;
    let HistoryEntry { actor, .. } = &newest.entry;
    if actor.uid != requester.uid() && !requester.may_administer() {
        return Err(OpError::ChangeOfAnother {
            name: newest.reference.short(),
            verb: actor.verb.name(),
            uid: actor.uid,
            by: requester.uid(),
        });
    }
    // A renaming is one change of two names.
    if actor.verb == Verb::Rename { Ok(names.change(newest.id)?) } else { Ok(vec![newest]) }
}

type Planned<'c> = Vec<(&'c RecordedChange, Result<Step, OpError>)>;

/// The step for each name, or why there is none.
fn planned<'c>(work: &Work<'_>, changes: &'c [RecordedChange], lease: &Lease) -> Planned<'c> {
    if let Some((old, new)) = renamed(changes) {
        let mut planned = vec![(old, rename(work, old, new))];
        if let Some(version) = new.previous {
            let restore = unchanged_since(new).and_then(|()| restore(work, new, None, version, lease));
            planned.push((new, restore));
        }
        return planned;
    }
    let step = |change: &RecordedChange| {
        unchanged_since(change)?;
        match (change.entry.digest, change.previous) {
            (replaced, Some(version)) => restore(work, change, replaced, version, lease),
            (Some(digest), None) => remove(work, change, digest),
            (None, None) => Err(OpError::NothingToUndo { name: Some(change.reference.short()) }),
        }
    };
    changes.iter().map(|change| (change, step(change))).collect()
}

/// The old name and the new one, if the change was a renaming.
fn renamed(changes: &[RecordedChange]) -> Option<(&RecordedChange, &RecordedChange)> {
    let [a, b] = changes else { return None };
    let (old, new) = if a.entry.digest.is_none() { (a, b) } else { (b, a) };
    let is_renaming = old.entry.actor.verb == Verb::Rename && old.entry.digest.is_none();
    (is_renaming && new.entry.digest.is_some() && new.entry.digest == old.previous).then_some((old, new))
}

/// Refuses a name that was changed after the change.
fn unchanged_since(change: &RecordedChange) -> Result<(), OpError> {
    let name = change.reference.short();
    match &change.newer {
        Some(HistoryEntry { actor, time, .. }) => {
            let since = format!("`{}` by uid {} at {}", actor.verb.name(), actor.uid, rfc3339(*time));
            Err(OpError::ChangedSince { name, verb: change.entry.actor.verb.name(), since })
        }
        None if change.present != change.entry.digest => {
            let since = "a change without a record".to_owned();
            Err(OpError::ChangedSince { name, verb: change.entry.actor.verb.name(), since })
        }
        None => Ok(()),
    }
}

fn rename(work: &Work<'_>, old: &RecordedChange, new: &RecordedChange) -> Result<Step, OpError> {
    unchanged_since(old)?;
    unchanged_since(new)?;
    let (from, to) = (new.reference.clone(), old.reference.clone());
    let digest = new.entry.digest.ok_or_else(|| OpError::ChangedMeanwhile { name: from.short() })?;
    work.store.names().check_change(&from, work.requester.name_user())?;
    drop(work.change(&to).stored_model(&from, work.policy, Some(&to))?);
    Ok(Step::Rename { from, to, digest })
}

fn restore(
    work: &Work<'_>,
    change: &RecordedChange,
    replaced: Option<Digest>,
    version: Digest,
    lease: &Lease,
) -> Result<Step, OpError> {
    let name = change.reference.clone();
    if replaced.is_some() {
        work.store.names().check_change(&name, work.requester.name_user())?;
        work.change(&name).replacing(true).check(&TargetName::Given(name.clone()), |_present| false)?;
    }
    let version = find_version(work, change, version)?;
    match &version {
        Version::Trashed(trashed) => {
            work.policy.check_stored(work.store, &leased_model(work.store, trashed, lease)?, None)?;
        }
        Version::Named(named) => {
            drop(work.change(&name).stored_model(&named.other, work.policy, Some(&name))?);
        }
    }
    Ok(Step::Restore { name, replaced, version })
}

/// Finds an earlier version of the name: in the trash, where its account and its origin are too, or under any name.
fn find_version(work: &Work<'_>, change: &RecordedChange, digest: Digest) -> Result<Version, OpError> {
    let (name, names) = (&change.reference, work.store.names());
    let is_it =
        |trashed: &TrashedModel| trashed.reference.same_model(name) && trashed.manifest.digest() == digest;
    let trash = names.trash()?;
    let found = trash.into_iter().filter(is_it).max_by_key(|trashed| trashed.removed);
    if let Some(trashed) = found {
        trashed.check_own(work.requester.name_user())?;
        return Ok(Version::Trashed(Box::new(trashed)));
    }
    let origin = change.previous_origin.clone().unwrap_or_default();
    match other_name(work.store, None, digest)? {
        Some(other) => Ok(Version::Named(Box::new(NamedVersion { other, digest, origin }))),
        None => Err(gone(name, digest, origin.origin.as_deref())),
    }
}

/// The first name of a model, except for one.
fn other_name(
    store: &Store,
    except: Option<&Reference>,
    digest: Digest,
) -> Result<Option<Reference>, StoreError> {
    let tags = store.names().all_summaries()?;
    let has_it = |manifest: &Result<blobd_store::ManifestSummary, String>| {
        manifest.as_ref().is_ok_and(|manifest| manifest.digest == digest)
    };
    let mut found = tags.iter().filter(|tag| has_it(&tag.manifest) && Some(&tag.reference) != except);
    Ok(found.next().map(|tag| tag.reference.clone()))
}

/// The error for a version whose data was freed, with the command that brings it back.
fn gone(name: &Reference, digest: Digest, origin: Option<&str>) -> OpError {
    let origin_text = origin.map(shown).unwrap_or_default();
    let advice = match origin.and_then(Origin::parse) {
        Some(Origin::Source(_)) => format!("`blobd pull {origin_text}` downloads it again"),
        Some(Origin::Copy(source)) => format!("`blobd pull {source}` downloads it again"),
        Some(Origin::Url(url)) => format!("`blobd pull` of {url} downloads it again"),
        Some(Origin::Import(file)) => format!("import it again: it was imported from {file}"),
        Some(Origin::Edit { name, .. }) => format!("edit it again: it was made from {}", name.short()),
        None => "pull or import it again".to_owned(),
    };
    OpError::EarlierVersionGone { name: name.short(), digest, advice }
}

fn remove(work: &Work<'_>, change: &RecordedChange, digest: Digest) -> Result<Step, OpError> {
    let name = change.reference.clone();
    work.store.names().check_change(&name, work.requester.name_user())?;
    if work.store.names().is_pinned(&name) {
        return Err(OpError::Pinned { name: name.short() });
    }
    // A copy of a name says nothing that the other name does not say.
    let is_copy = matches!(change.entry.actor.verb, Verb::Tag | Verb::Rename);
    let other = is_copy.then(|| other_name(work.store, Some(&name), digest)).transpose()?.flatten();
    Ok(Step::Remove { name, digest, other })
}
