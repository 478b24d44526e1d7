//! A cache of what `ls` and `df` report about each tag, so that they need not read every manifest each
//! time.
//!
//! Each entry is kept with the inode, size and times of its file. Every call lists the directories and
//! compares these with the current ones, so manual changes are seen. A file that was changed within the last
//! clock tick is read again, because another change may have happened in the same tick.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};

use blobd_model::kind::ModelKind;
use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::Mutex;

use crate::ledger::charge_limit::Account;
use crate::names::Names;
use crate::names::origins::{kind_in, name_origin_in};
use crate::names::records::{NameOrigin, account_in};
use crate::names::tags::{manifest_in, visit_readable_tag_files, visit_tag_files};
use crate::place::Place;
use crate::root::{Directory, Entry, FileStatus, Root};
use crate::{StoreError, lock};

/// A tag and what it points to.
#[derive(Clone, Debug)]
pub struct TagSummary {
    /// The tag.
    pub reference: Reference,
    /// When it was last set.
    pub modified: SystemTime,
    /// Its manifest, or why that is unusable.
    pub manifest: Result<ManifestSummary, String>,
    /// Where the name's content came from, and what updates it.
    pub origin: NameOrigin,
    /// What the model is, if recorded.
    pub kind: Option<ModelKind>,
    /// Whom the model is charged to, if recorded.
    pub account: Option<Account>,
    /// What its manifest and the history of its name take on disk.
    pub record_bytes: u64,
    /// The lower store that it is in; `None` if it is in the store itself.
    pub lower: Option<Place>,
    /// The length of its texts: name, origin, damage.
    text_bytes: usize,
}

/// How long a list of all tags is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListingSize {
    /// The number of tags.
    pub models: usize,
    /// The length of their texts in bytes: names, origins, damage.
    pub text_bytes: usize,
}

/// The part of a manifest that is kept in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestSummary {
    /// The manifest's own digest.
    pub digest: Digest,
    /// The sum of its files' sizes in bytes.
    pub size: u64,
    /// Its files, each once.
    pub files: Box<[Digest]>,
}

impl ListingSize {
    fn of(tags: &[Arc<TagSummary>]) -> Self {
        let text_bytes = tags.iter().map(|tag| tag.text_bytes).fold(0, usize::saturating_add);
        Self { models: tags.len(), text_bytes }
    }
}

/// The stamps and summaries of tags. The lock is held while tags are read from disk. Only listing all tags
/// takes it, and a caller that waits for it needs the same data.
#[derive(Debug, Default)]
pub(crate) struct Summaries {
    known: Mutex<Known>,
    /// The size of the last list; `None` before the first one.
    size: Mutex<Option<ListingSize>>,
}

#[derive(Debug, Default)]
struct Known {
    tags: BTreeMap<Reference, (Stamp, Arc<TagSummary>)>,
    /// The stamps of `origins/` and `history/` before the tags were read. While they are the same, no origin has been
    /// recorded.
    records: Option<[Stamp; 2]>,
}

/// Inode, length, and modification and change time, each in seconds and nanoseconds since 1970.
type Stamp = (u64, u64, [i64; 4]);

/// No file system has a longer clock tick; some older ones have two seconds.
const TICK: Duration = Duration::from_secs(2);

impl Names {
    /// Every tag with its manifest's summary, in order. Tags that are removed meanwhile are left out.
    pub fn summaries(&self) -> Result<Vec<Arc<TagSummary>>, StoreError> {
        let own = self.summaries.read(&self.content.root, None)?;
        // Those of lower stores are known only after a list of all.
        let (mut size, found) = (lock(&self.summaries.size), ListingSize::of(&own));
        *size = size.map(|size| if size.models < found.models { found } else { size });
        drop(size);
        Ok(own)
    }

    /// The same, with the tags of lower stores, except for those of the same name as an earlier one.
    pub fn all_summaries(&self) -> Result<Vec<Arc<TagSummary>>, StoreError> {
        let mut all = self.summaries()?;
        self.content.lower.each(|number, root| {
            let Some(summaries) = self.lower_summaries.get(number) else { return Ok(()) };
            let mut skip = |error| self.content.lower.note_failure(root, &error);
            let mut below = summaries.read(root, Some(Lower { place: root.place(), skip: &mut skip }))?;
            // The first store's stays of those that a look-up cannot tell apart.
            let above: BTreeSet<String> = all.iter().map(|tag| tag.reference.canonical()).collect();
            below.retain(|tag| !above.contains(&tag.reference.canonical()));
            all.extend(below);
            Ok(())
        });
        all.sort_by(|a, b| a.reference.cmp(&b.reference));
        *lock(&self.summaries.size) = Some(ListingSize::of(&all));
        Ok(all)
    }

    /// The size of the last list of all tags. Waits for no disk; `None` before the first list.
    pub fn listing_size(&self) -> Option<ListingSize> {
        *lock(&self.summaries.size)
    }
}

/// A lower store that is read.
struct Lower<'l> {
    place: Place,
    /// Gets the errors of what cannot be read and is left out.
    skip: &'l mut dyn FnMut(StoreError),
}

impl Summaries {
    /// Every tag of the store at `root`, which is the lower store `lower` if that is given.
    fn read(&self, root: &Root, lower: Option<Lower<'_>>) -> Result<Vec<Arc<TagSummary>>, StoreError> {
        let (mut known, mut found) = (lock(&self.known), Vec::new());
        let mut before = std::mem::take(&mut *known);
        let records = stamps_of_records(root)?;
        let has_new_records = records.is_none() || records != before.records;
        let place = lower.as_ref().map(|lower| lower.place.clone());
        let mut visit = |directory: &Directory, entry: &Entry, reference: Option<Reference>| {
            let (Some(reference), Some(status)) = (reference, directory.status(&entry.name)?) else {
                return Ok(());
            };
            let stamp = settled_stamp(&status);
            let kept = before.tags.remove(&reference).filter(|(before, _)| Some(*before) == stamp);
            let summary = match kept {
                // An origin may have been recorded since. One that is recorded changes only with the tag's file.
                Some((_, summary)) if !has_new_records || !summary.has_new_origin(root) => summary,
                _ => match summary(root, &reference, status.modified())? {
                    None => return Ok(()),
                    Some(summary) => Arc::new(TagSummary { lower: place.clone(), ..summary }),
                },
            };
            known.tags.extend(stamp.map(|stamp| (reference, (stamp, Arc::clone(&summary)))));
            found.push(summary);
            Ok(())
        };
        match lower {
            None => visit_tag_files(root, &mut visit)?,
            Some(lower) => visit_readable_tag_files(root, &mut visit, lower.skip)?,
        }
        known.records = records;
        found.sort_by(|a, b| a.reference.cmp(&b.reference));
        Ok(found)
    }
}

/// The stamps of `origins/` and `history/`, in which files are only replaced; `None` if they changed recently.
fn stamps_of_records(root: &Root) -> Result<Option<[Stamp; 2]>, StoreError> {
    let stamp = |name: &str| {
        let status = root.status(Path::new(name))?;
        Ok::<_, StoreError>(status.map_or(Some(Stamp::default()), |status| settled_stamp(&status)))
    };
    let (origins, histories) = (stamp(layout::ORIGINS)?, stamp(layout::HISTORY)?);
    Ok(origins.zip(histories).map(|(origins, histories)| [origins, histories]))
}

/// The summary of a tag; `None` if it was removed.
fn summary(
    root: &Root,
    reference: &Reference,
    modified: SystemTime,
) -> Result<Option<TagSummary>, StoreError> {
    let manifest = match manifest_in(root, reference) {
        Ok(None) => return Ok(None),
        Ok(Some(manifest)) => Ok(ManifestSummary {
            digest: manifest.digest(),
            size: manifest.size(),
            files: manifest.digests().into_iter().collect(),
        }),
        Err(error @ (StoreError::Manifest { .. } | StoreError::UnexpectedFile { .. })) => {
            Err(error.to_string())
        }
        Err(error) => return Err(error),
    };
    let origin = manifest.as_ref().ok().map(|manifest| name_origin_in(root, reference, manifest.digest));
    let origin = origin.unwrap_or_default();
    let kind = manifest.as_ref().ok().and_then(|manifest| kind_in(root, manifest.digest));
    let account = manifest.as_ref().ok().and_then(|manifest| account_in(root, reference, manifest.digest));
    let (reference, record_bytes) = (reference.clone(), record_bytes(root, reference)?);
    let damage = manifest.as_ref().err().map_or(0, String::len);
    let sources = [&origin.origin, &origin.source].into_iter().flatten().map(String::len).sum::<usize>();
    let text_bytes = reference.canonical().len() + sources + damage;
    let lower = None;
    Ok(Some(TagSummary {
        reference,
        modified,
        manifest,
        origin,
        kind,
        account,
        record_bytes,
        lower,
        text_bytes,
    }))
}

/// What a tag's manifest and the history of its name take on disk.
pub(crate) fn record_bytes(root: &Root, reference: &Reference) -> Result<u64, StoreError> {
    let (manifest, history) = (layout::manifest(reference), layout::history(reference));
    Ok(root.allocated_bytes(&manifest)?.saturating_add(root.allocated_bytes(&history)?))
}

impl TagSummary {
    /// Whether an origin is recorded that was not when this was read.
    fn has_new_origin(&self, root: &Root) -> bool {
        let origin =
            |manifest: &ManifestSummary| name_origin_in(root, &self.reference, manifest.digest).origin;
        let is_unknown = self.origin.origin.is_none();
        is_unknown && self.manifest.as_ref().is_ok_and(|manifest| origin(manifest).is_some())
    }
}

/// The stamp of a file; `None` if it changed so recently that the stamp would not show another change.
fn settled_stamp(status: &FileStatus) -> Option<Stamp> {
    let (content, changed) = (status.content_changed(), status.status_changed());
    let since = Duration::new(u64::try_from(changed.0).ok()?, u32::try_from(changed.1).ok()?);
    let age = SystemTime::UNIX_EPOCH.elapsed().ok()?.checked_sub(since)?;
    let ((_device, inode), times) = (status.identity(), [content.0, content.1, changed.0, changed.1]);
    (age > TICK).then_some((inode, status.len(), times))
}

/// How long a change that another program makes is not seen.
const MAX_AGE: Duration = Duration::from_secs(5);

type NamesOfManifests = BTreeMap<Digest, Vec<Reference>>;

/// The names that each manifest has, for the policy, which needs them at every open. The map is read again when this
/// process has changed a tag since, or when it is older than [`MAX_AGE`]: manual changes and those of lower stores are seen
/// then.
#[derive(Debug, Default)]
pub(crate) struct TagNames {
    /// Locked while tags are read: a caller that waits needs the same map.
    known: Mutex<Option<KnownNames>>,
}

#[derive(Debug)]
struct KnownNames {
    changes: u64,
    since: Instant,
    names: Arc<NamesOfManifests>,
}

impl Names {
    /// The names that a manifest has in this store and in the lower ones, except for those of lower stores that an
    /// earlier one has too.
    pub fn names_of(&self, manifest: Digest) -> Result<Vec<Reference>, StoreError> {
        Ok(self.names_by_manifest()?.get(&manifest).cloned().unwrap_or_default())
    }

    fn names_by_manifest(&self) -> Result<Arc<NamesOfManifests>, StoreError> {
        let mut known = lock(&self.tag_names.known);
        // Before the tags are read: a change in between must not be taken for one that was seen.
        let (changes, since) = (self.tag_changes.load(Ordering::Acquire), Instant::now());
        let is_current =
            |known: &&KnownNames| known.changes == changes && since.duration_since(known.since) < MAX_AGE;
        if let Some(known) = known.as_ref().filter(is_current) {
            return Ok(Arc::clone(&known.names));
        }
        let mut names = NamesOfManifests::new();
        for tag in self.all_summaries()? {
            if let Ok(manifest) = &tag.manifest {
                names.entry(manifest.digest).or_default().push(tag.reference.clone());
            }
        }
        let names = Arc::new(names);
        *known = Some(KnownNames { changes, since, names: Arc::clone(&names) });
        Ok(names)
    }
}
