//! A cache of what `ls` and `df` report about each tag, so that they need not read every manifest each time.
//!
//! Each entry is kept with the inode, size and times of its file. Every call lists the directories and compares these
//! with the current ones, so manual changes are seen. A file that was changed within the last clock tick is read again,
//! because another change may have happened in the same tick.

use std::collections::{BTreeMap, BTreeSet};
use std::iter::Peekable;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant, SystemTime};
use std::vec::IntoIter;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::Mutex;

use crate::content::name_tree::{Found, NameEntry, NameTree, VisitedFiles};
use crate::error::DisplayPath;
use crate::ledger::charge_limit::Account;
use crate::names::Names;
use crate::names::origins::{RecordedFacts, facts_in, name_origin_in};
use crate::names::records::{NameOrigin, account_in};
use crate::names::tags::manifest_in;
use crate::root::{Root, Stamp};
use crate::{StoreError, lock};

/// A tag and what it points to.
#[derive(Clone, Debug)]
pub struct TagSummary {
    pub reference: Reference,
    /// When it was last set.
    pub modified: SystemTime,
    /// Its manifest, or why that is unusable.
    pub manifest: Result<ManifestSummary, String>,
    pub origin: NameOrigin,
    pub facts: RecordedFacts,
    pub account: Option<Account>,
    /// What its manifest and the history of its name take on disk.
    pub record_bytes: u64,
    /// The lower store that it is in; `None` if it is in the store itself.
    pub lower: Option<DisplayPath>,
    /// The length of its texts: name, origin, facts, damage.
    text_bytes: usize,
}

/// How long a list of all tags is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ListingSize {
    pub models: usize,
    /// The length of their texts in bytes: names, origins, facts, damage.
    pub text_bytes: usize,
}

/// The part of a manifest that is kept in memory.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ManifestSummary {
    pub digest: Digest,
    /// The sum of its files' sizes in bytes.
    pub size: u64,
    pub files: Arc<[Digest]>,
}

/// The summaries of an earlier list, in the order of a visit. Each is taken at most once, in that order.
struct Earlier(Peekable<IntoIter<(Stamp, Arc<TagSummary>)>>);

impl Earlier {
    /// The summary of the tag at `path`, if there is one. Those before it are dropped: their tags are gone.
    fn take(&mut self, path: &Path, reference: &Reference) -> Option<(Stamp, Arc<TagSummary>)> {
        loop {
            let (_, tag) = self.0.peek()?;
            if tag.reference == *reference {
                return self.0.next();
            }
            let place = layout::manifest(&tag.reference);
            if place.strip_prefix(layout::MANIFESTS).is_ok_and(|place| place > path) {
                return None;
            }
            self.0.next();
        }
    }
}

impl ListingSize {
    fn for_tags(tags: &[Arc<TagSummary>]) -> Self {
        let text_bytes = tags.iter().map(|tag| tag.text_bytes).fold(0, usize::saturating_add);
        Self { models: tags.len(), text_bytes }
    }
}

/// The lock is held while tags are read from disk: a caller that waits for it needs the same data.
#[derive(Debug, Default)]
pub(crate) struct Summaries {
    tree: Arc<NameTree>,
    known: Mutex<Known>,
    /// The size of the last list; `None` before the first one.
    size: Mutex<Option<ListingSize>>,
}

#[derive(Debug, Default)]
struct Known {
    /// In the order of a visit: that of their paths.
    tags: Vec<(Stamp, Arc<TagSummary>)>,
    /// The stamps of `origins/` and `history/` before the tags were read: no origin is new while they are the same.
    records: Option<[Stamp; 2]>,
}

impl Names {
    /// Every tag with its manifest's summary, in order. Tags that are removed meanwhile are left out.
    pub fn summaries(&self) -> Result<Vec<Arc<TagSummary>>, StoreError> {
        self.summaries_with_files(&mut VisitedFiles::default())
    }

    /// Like [`Self::summaries`], and adds what is in `manifests/` to `files`.
    pub fn summaries_with_files(&self, files: &mut VisitedFiles) -> Result<Vec<Arc<TagSummary>>, StoreError> {
        let own = self.summaries.read(&self.content.root, None, files)?;
        // Those of lower stores are known only after a list of all.
        let (mut size, found) = (lock(&self.summaries.size), ListingSize::for_tags(&own));
        *size = size.map(|size| if size.models < found.models { found } else { size });
        drop(size);
        Ok(own)
    }

    /// Like [`Self::summaries`], with the tags of lower stores, except for those of the same name as an earlier one.
    pub fn all_summaries(&self) -> Result<Vec<Arc<TagSummary>>, StoreError> {
        let mut all = self.summaries()?;
        self.content.lower.each(|number, root| {
            let Some(summaries) = self.lower_summaries.get(number) else { return Ok(()) };
            let mut skip = |error| self.content.lower.note_failure(root, &error);
            let lower = Lower { place: root.place(), skip: &mut skip };
            let mut below = summaries.read(root, Some(lower), &mut VisitedFiles::default())?;
            // The first store's stays of those that a look-up cannot tell apart.
            let above: BTreeSet<String> = all.iter().map(|tag| tag.reference.canonical()).collect();
            below.retain(|tag| !above.contains(&tag.reference.canonical()));
            all.extend(below);
            Ok(())
        });
        all.sort_by(|a, b| a.reference.cmp(&b.reference));
        *lock(&self.summaries.size) = Some(ListingSize::for_tags(&all));
        Ok(all)
    }

    /// The size of the last list of all tags. Waits for no disk; `None` before the first list.
    pub fn listing_size(&self) -> Option<ListingSize> {
        *lock(&self.summaries.size)
    }
}

/// A lower store that is read.
struct Lower<'l> {
    place: DisplayPath,
    /// Gets the errors of what cannot be read and is left out.
    skip: &'l mut dyn FnMut(StoreError),
}

impl Summaries {
    /// No summaries yet, of the tags in this tree.
    pub(crate) fn new(tree: Arc<NameTree>) -> Self {
        Self { tree, ..Self::default() }
    }

    /// Every tag of the store at `root`, which is the lower store `lower` if that is given. Adds what is in `manifests/` to
    /// `files`.
    fn read(
        &self,
        root: &Root,
        lower: Option<Lower<'_>>,
        files: &mut VisitedFiles,
    ) -> Result<Vec<Arc<TagSummary>>, StoreError> {
        let (mut known, mut found) = (lock(&self.known), Vec::new());
        let before = std::mem::take(&mut *known);
        let mut earlier = Earlier(before.tags.into_iter().peekable());
        let records = stamps_of_records(root)?;
        let has_new_records = records.is_none() || records != before.records;
        let place = lower.as_ref().map(|lower| lower.place.clone());
        let manifests = root.existing_directory(layout::MANIFESTS)?;
        let mut visit = |entry: &NameEntry| {
            let Some(status) = manifests.status(&entry.path)? else { return Ok(()) };
            files.add(entry, status);
            let Some(reference) = &entry.reference else { return Ok(()) };
            let stamp = status.settled_stamp();
            let kept = earlier.take(&entry.path, reference).filter(|(before, _)| Some(*before) == stamp);
            let summary = match kept {
                // An origin may have been recorded since. One that is recorded changes only with the tag's file.
                Some((_, summary)) if !has_new_records || !summary.has_new_origin(root) => summary,
                _ => match summary(root, reference, status.modified())? {
                    None => return Ok(()),
                    Some(summary) => Arc::new(TagSummary { lower: place.clone(), ..summary }),
                },
            };
            known.tags.extend(stamp.map(|stamp| (stamp, Arc::clone(&summary))));
            found.push(summary);
            Ok(())
        };
        let mut skip = lower.map(|lower| lower.skip);
        let mut directories = Vec::new();
        self.tree.visit(&manifests, &mut |found| {
            let visited = match found {
                Found::Entry(entry) => visit(entry),
                Found::Directory(status) => {
                    directories.push(status);
                    Ok(())
                }
                Found::Unreadable(error) => Err(error),
            };
            match &mut skip {
                Some(skip) => {
                    visited.unwrap_or_else(skip);
                    Ok(())
                }
                None => visited,
            }
        })?;
        known.records = records;
        files.directories.append(&mut directories);
        found.sort_by(|a, b| a.reference.cmp(&b.reference));
        Ok(found)
    }
}

/// The stamps of `origins/` and `history/`, in which files are only replaced; `None` if they changed recently.
fn stamps_of_records(root: &Root) -> Result<Option<[Stamp; 2]>, StoreError> {
    let stamp = |name: &str| {
        let status = root.status(Path::new(name))?;
        Ok::<_, StoreError>(status.map_or(Some(Stamp::default()), |status| status.settled_stamp()))
    };
    let (origins, histories) = (stamp(layout::ORIGINS)?, stamp(layout::HISTORY)?);
    Ok(origins.zip(histories).map(|(origins, histories)| [origins, histories]))
}

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
    let facts = manifest.as_ref().ok().map(|manifest| facts_in(root, manifest.digest)).unwrap_or_default();
    let account = manifest.as_ref().ok().and_then(|manifest| account_in(root, reference, manifest.digest));
    let (reference, record_bytes) = (reference.clone(), record_bytes(root, reference)?);
    let damage = manifest.as_ref().err().map_or(0, String::len);
    let sources = [&origin.origin, &origin.source].into_iter().flatten().map(String::len).sum::<usize>();
    let facts_bytes =
        [&facts.architecture, &facts.quantization].into_iter().flatten().map(String::len).sum::<usize>();
    let text_bytes = reference.canonical().len() + sources + facts_bytes + damage;
    let lower = None;
    Ok(Some(TagSummary {
        reference,
        modified,
        manifest,
        origin,
        facts,
        account,
        record_bytes,
        lower,
        text_bytes,
    }))
}

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

/// How long a change that another program makes is not seen.
const MAX_AGE: Duration = Duration::from_secs(5);

type NamesOfManifests = BTreeMap<Digest, Vec<Reference>>;

/// The names that each manifest has, for the policy. Read again when this process has changed a tag, or after
/// [`MAX_AGE`], so that manual changes and those of lower stores are seen.
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
    /// The names of a manifest. In a lower store, a name that an earlier store has too does not count.
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::Store;
    use crate::testing::{begin, manifest, name, new_store};
    use blobd_model::kind::ModelKind;

    fn add(store: &Arc<Store>, reference: &str) {
        let mut ingest = begin(store);
        ingest.add_bytes(b"model").unwrap();
        ingest.commit(&name(reference), &manifest(&[b"model"]), None).unwrap();
    }

    #[test]
    fn names_of_manifests_are_read_again_after_a_change_only() {
        let (_folder, store) = new_store();
        add(&store, "a");
        let names = || store.names.names_by_manifest().unwrap();
        let before = names();
        assert!(Arc::ptr_eq(&before, &names()));
        add(&store, "b");
        assert_eq!(names().values().flatten().cloned().collect::<Vec<_>>(), [name("a"), name("b")]);
    }

    #[test]
    fn size_of_the_last_list_is_known() {
        let (_folder, store) = new_store();
        assert_eq!(store.names.listing_size(), None);
        add(&store, "a");
        add(&store, "b");
        store.names.summaries().unwrap();
        assert_eq!(store.names.listing_size(), None, "those of lower stores are not known");
        let tags = store.names.all_summaries().unwrap();
        let text_bytes = tags.iter().map(|tag| tag.text_bytes).sum();
        assert!(text_bytes > 0);
        assert_eq!(store.names.listing_size(), Some(ListingSize { models: 2, text_bytes }));
    }

    /// Lists all tags, after the times of everything are old enough to tell the next change. Returns the list, and the
    /// files that were opened for it.
    fn listed(store: &Store) -> (Vec<Arc<TagSummary>>, Vec<String>) {
        use crate::root::OPENED;
        std::thread::sleep(Duration::from_millis(80));
        OPENED.take();
        let found = store.names.summaries().unwrap();
        let mut opened: Vec<String> = OPENED.take().iter().map(|path| path.display().to_string()).collect();
        opened.sort();
        opened.dedup();
        (found, opened)
    }

    #[test]
    fn unchanged_tags_are_not_read_again_and_changed_ones_are() {
        let (_folder, store) = new_store();
        add(&store, "a");
        add(&store, "b");
        let (first, opened) = listed(&store);
        assert_eq!(opened.iter().filter(|path| path.starts_with("manifests/")).count(), 2, "{opened:?}");
        let (second, opened) = listed(&store);
        assert_eq!(opened, [""; 0]);
        assert!(first.iter().zip(&second).all(|(first, second)| Arc::ptr_eq(first, second)));
        let path = layout::manifest(&name("b"));
        std::fs::write(store.path(&path), manifest(&[b"another"]).raw()).unwrap();
        let (third, opened) = listed(&store);
        assert!(opened.contains(&path.display().to_string()), "{opened:?}");
        assert!(!opened.contains(&layout::manifest(&name("a")).display().to_string()), "{opened:?}");
        assert_eq!(third[1].manifest.as_ref().unwrap().digest, manifest(&[b"another"]).digest());
        std::fs::remove_file(store.path(&path)).unwrap();
        assert_eq!(listed(&store).0.len(), 1);
    }

    #[test]
    fn summaries_are_kept_when_other_tags_appear_and_disappear() {
        let (_folder, store) = new_store();
        for name in ["b", "d", "f:1", "f:2", "x/y", "x/y:z"] {
            add(&store, name);
        }
        let (first, _) = listed(&store);
        for name in ["a", "c", "e", "f", "x/z"] {
            add(&store, name);
        }
        std::fs::remove_file(store.path(layout::manifest(&name("d")))).unwrap();
        std::fs::remove_file(store.path(layout::manifest(&name("f:1")))).unwrap();
        let (second, _) = listed(&store);
        assert_eq!(second.len(), 9);
        let kept = |tag: &Arc<TagSummary>| second.iter().any(|other| Arc::ptr_eq(tag, other));
        let kept: Vec<_> = first.iter().filter(|tag| kept(tag)).map(|tag| tag.reference.clone()).collect();
        assert_eq!(kept, ["b", "f:2", "x/y", "x/y:z"].map(name));
    }

    #[test]
    fn origin_that_was_recorded_later_is_seen() {
        let (_folder, store) = new_store();
        add(&store, "a");
        add(&store, "b");
        let origins = |found: &[Arc<TagSummary>]| -> Vec<Option<String>> {
            found.iter().map(|tag| tag.origin.origin.clone()).collect()
        };
        let (first, _) = listed(&store);
        assert_eq!(origins(&first), [None, None]);
        // Of another manifest: both are looked up again, and kept.
        let record = r#"{"origin":"https://example.org/m.gguf"}"#;
        std::fs::write(store.path(layout::origin(Digest::of(b"other"))), record).unwrap();
        let (second, opened) = listed(&store);
        assert!(!opened.is_empty() && Arc::ptr_eq(&first[0], &second[0]), "{opened:?}");
        let digest = manifest(&[b"model"]).digest();
        std::fs::write(store.path(layout::origin(digest)), record).unwrap();
        let (third, _) = listed(&store);
        let recorded = Some("https://example.org/m.gguf".to_owned());
        assert_eq!(origins(&third), [recorded.clone(), recorded]);
        let (fourth, opened) = listed(&store);
        assert_eq!(opened, [""; 0]);
        assert!(Arc::ptr_eq(&third[0], &fourth[0]));
    }

    #[test]
    fn summary_has_what_is_recorded_of_a_tag() {
        let (_folder, store) = new_store();
        let mut ingest = begin(&store).on_behalf_of(crate::Actor::new(7, crate::Verb::Pull));
        ingest.add_bytes(b"config").unwrap();
        ingest.add_bytes(b"weights").unwrap();
        ingest.note_facts(RecordedFacts { kind: Some(ModelKind::Embedding), ..RecordedFacts::default() });
        let (model, origin) = (manifest(&[b"config", b"weights"]), "https://example.org/m.gguf");
        ingest.commit(&name("m"), &model, Some(origin)).unwrap();
        std::fs::create_dir_all(store.path(layout::manifest(&name("damaged"))).parent().unwrap()).unwrap();
        std::fs::write(store.path(layout::manifest(&name("damaged"))), "{").unwrap();
        let found = store.names.summaries().unwrap();
        let [damaged, tag] = found.as_slice() else { panic!("{found:?}") };
        let error = damaged.manifest.as_ref().unwrap_err();
        assert!(error.contains("damaged"), "{error}");
        assert_eq!(
            (damaged.facts.kind, damaged.account, damaged.origin.clone()),
            (None, None, NameOrigin::default())
        );
        assert_eq!(damaged.text_bytes, name("damaged").canonical().len() + error.len());
        let files = model.digests().into_iter().collect();
        let expected = ManifestSummary { digest: model.digest(), size: 13, files };
        assert_eq!(tag.manifest.as_ref().unwrap(), &expected);
        assert_eq!((tag.facts.kind, tag.lower.is_none()), (Some(ModelKind::Embedding), true));
        assert_eq!(tag.origin.origin.as_deref(), Some(origin));
        let source = tag.origin.source.as_deref().map_or(0, str::len);
        assert_eq!(tag.text_bytes, name("m").canonical().len() + origin.len() + source);
        assert_eq!(tag.account.map(|account| account.uid), Some(7));
        let records = [layout::manifest(&name("m")), layout::history(&name("m"))];
        let bytes = records.map(|path| store.content.root.allocated_bytes(&path).unwrap());
        assert_eq!(tag.record_bytes, bytes[0] + bytes[1]);
        assert_eq!(tag.modified, store.names.modified(&name("m")).unwrap());
    }

    #[test]
    fn size_of_the_last_list_follows_additions() {
        let (_folder, store) = new_store();
        add(&store, "a");
        store.names.all_summaries().unwrap();
        add(&store, "b");
        store.names.summaries().unwrap();
        assert_eq!(store.names.listing_size().unwrap().models, 2);
        store.names.remove_tag(&name("a"), crate::Actor::new(0, crate::Verb::Rm)).unwrap();
        store.names.summaries().unwrap();
        assert_eq!(store.names.listing_size().unwrap().models, 2, "those of lower stores may make it up");
        store.names.all_summaries().unwrap();
        assert_eq!(store.names.listing_size().unwrap().models, 1);
    }
}
