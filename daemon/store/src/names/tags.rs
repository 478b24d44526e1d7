//! Tags: the names under `manifests/` and the manifests that they hold.
//!
//! The files are read each time: there are few, and only the files are authoritative.

use std::path::Path;
use std::sync::atomic::Ordering;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use crate::StoreError;
use crate::content::name_tree::{self, Found, NameEntry, NameTree};
use crate::error::DisplayPath;
use crate::ledger::accounting::Reservation;
use crate::names::Names;
use crate::root::{Directory, Root};

#[derive(Clone, Debug, Default)]
pub struct Tags {
    pub references: Vec<Reference>,
    /// Files whose path is not a model's name: perhaps moved manifests, so a collection must not ignore them.
    pub foreign: Vec<DisplayPath>,
}

impl Names {
    pub fn tags(&self) -> Result<Tags, StoreError> {
        self.tags_in(&NameTree::default())
    }

    /// Lists all tags; directories that have not changed since the last survey are not listed again.
    pub(crate) fn surveyed_tags(&self) -> Result<Tags, StoreError> {
        self.tags_in(&self.content.manifests)
    }

    fn tags_in(&self, tree: &NameTree) -> Result<Tags, StoreError> {
        let mut tags = Tags::default();
        let manifests = self.content.root.existing_directory(layout::MANIFESTS)?;
        each_entry(tree, &manifests, &mut |entry| match &entry.reference {
            Some(reference) if !entry.is_dir => tags.references.push(reference.clone()),
            _ => tags.foreign.push(manifests.place.join(&entry.path)),
        })?;
        tags.references.sort();
        Ok(tags)
    }

    /// The manifest that a tag of this store or of a lower one points to.
    pub fn manifest(&self, reference: &Reference) -> Result<Manifest, StoreError> {
        match manifest_in(&self.content.root, reference)? {
            None => self.content.lower.find_or_damage(|root| manifest_in(root, reference))?,
            found => found,
        }
        .ok_or_else(|| StoreError::no_such_model(reference))
    }

    pub(crate) fn own_manifest(&self, reference: &Reference) -> Result<Manifest, StoreError> {
        manifest_in(&self.content.root, reference)?.ok_or_else(|| StoreError::no_such_model(reference))
    }

    /// The tags of this store and of the lower ones, in order, each once.
    pub fn all_tags(&self) -> Result<Vec<Reference>, StoreError> {
        let mut all = self.tags()?.references;
        self.content.lower.each(|_, root| {
            let mut names = Vec::new();
            let manifests = root.existing_directory(layout::MANIFESTS)?;
            NameTree::default().visit(&manifests, &mut |found| {
                match found {
                    Found::Entry(entry) => names.extend(name_of(entry)),
                    Found::Directory(_) => {}
                    Found::Unreadable(error) => self.content.lower.note_failure(root, &error),
                }
                Ok(())
            })?;
            names.retain(|name| !all.iter().any(|above| above.same_model(name)));
            all.extend(names);
            Ok(())
        });
        all.sort();
        Ok(all)
    }

    /// The lower store that has a model; `None` if this store has a tag of that name.
    pub fn lower_place_of(&self, reference: &Reference) -> Result<Option<DisplayPath>, StoreError> {
        let path = layout::manifest(reference);
        if self.content.lower.is_empty() || self.content.root.status(&path)?.is_some() {
            return Ok(None);
        }
        Ok(self.content.lower.find(|root| Ok(root.status(&path)?.map(|_file| root.place()))))
    }

    /// The unparsed content of a tag's file, at most one byte more than [`Manifest::MAX_BYTES`].
    pub fn raw_manifest(&self, reference: &Reference) -> Result<Vec<u8>, StoreError> {
        let raw = self.content.root.read_limited(&layout::manifest(reference), Manifest::MAX_BYTES)?;
        raw.ok_or_else(|| StoreError::no_such_model(reference))
    }

    pub fn check_tag(&self, reference: &Reference) -> Result<(), StoreError> {
        self.modified(reference).map(drop)
    }

    pub fn modified(&self, reference: &Reference) -> Result<SystemTime, StoreError> {
        let status = self.content.root.status(&layout::manifest(reference))?;
        let modified = status.map(|status| status.modified());
        modified.ok_or_else(|| StoreError::no_such_model(reference))
    }

    pub(crate) fn remove_tag_file(&self, reference: &Reference) -> Result<(), StoreError> {
        let path = layout::manifest(reference);
        if self.ledger.remove_record(&path)?.is_none() {
            return Err(StoreError::no_such_model(reference));
        }
        self.ledger.note_charges_changed();
        self.tag_changes.fetch_add(1, Ordering::AcqRel);
        self.sync_and_prune(&path)
    }

    /// Makes the removal of a tag's or pin's file durable, and removes parent directories that are empty.
    pub(crate) fn sync_and_prune(&self, path: &Path) -> Result<(), StoreError> {
        let directories = path.ancestors().skip(1).take(3);
        for (level, directory) in directories.enumerate() {
            if level == 0 {
                self.content.disk.sync_dir(directory)?;
            }
            // Fails if other models share the directory, as intended.
            if !self.content.disk.remove_dir(directory)? {
                break;
            }
        }
        Ok(())
    }

    /// Sets a tag to a manifest, durably. The caller has checked that the model is complete.
    pub(crate) fn write_tag(
        &self,
        temporary: &Path,
        reference: &Reference,
        manifest: &Manifest,
        reservation: Option<Reservation>,
    ) -> Result<(), StoreError> {
        let target = layout::manifest(reference);
        let Some(directory) = target.parent() else { return Ok(()) };
        self.content.create_directories(directory)?;
        self.ledger.write_record(temporary, &target, manifest.raw(), reservation)?;
        self.tag_changes.fetch_add(1, Ordering::AcqRel);
        self.content.disk.sync_dir(directory)
    }

    /// The stored tag that equals `reference` except for case, for a name that is to be given.
    pub fn stored_case(&self, reference: &Reference) -> Result<Option<Reference>, StoreError> {
        case_in(&self.content.root, reference)
    }

    pub(crate) fn lower_name(&self, reference: &Reference) -> Option<(Reference, Digest)> {
        self.content.lower.find(|root| {
            let Some(tag) = case_in(root, reference)? else { return Ok(None) };
            Ok(manifest_in(root, &tag)?.map(|manifest| (tag, manifest.digest())))
        })
    }

    /// Like [`Self::stored_case`]; of the lower stores if this one has no such tag.
    pub(crate) fn stored_case_anywhere(
        &self,
        reference: &Reference,
    ) -> Result<Option<Reference>, StoreError> {
        let own = self.stored_case(reference)?;
        Ok(own.or_else(|| self.content.lower.find(|root| case_in(root, reference))))
    }
}

pub(crate) fn manifest_in(root: &Root, reference: &Reference) -> Result<Option<Manifest>, StoreError> {
    let path = layout::manifest(reference);
    let Some(raw) = root.read_limited(&path, Manifest::MAX_BYTES)? else { return Ok(None) };
    let damaged = |source| StoreError::Manifest { path: root.full(&path), source };
    Manifest::parse(raw).map(Some).map_err(damaged)
}

/// The tag in `root` that equals `reference` except for upper and lower case.
fn case_in(root: &Root, reference: &Reference) -> Result<Option<Reference>, StoreError> {
    let path = layout::manifest(reference);
    let status = root.status(&path)?;
    if status.is_some_and(|status| status.is_file()) {
        let (host, namespace, model) = (reference.host(), reference.namespace(), reference.model());
        return Ok(Reference::from_parts(host, namespace, model, reference.tag()).ok());
    }
    let manifests = root.existing_directory(layout::MANIFESTS)?;
    let place = path.strip_prefix(layout::MANIFESTS).unwrap_or(&path);
    let places = name_tree::files_named(&manifests, place)?;
    let names = places.iter().filter_map(|place| layout::parse_tag_place(place));
    let found = names.filter(|stored| stored.same_model(reference)).min();
    match status {
        // It is not a tag, but nothing else can get its name.
        Some(status) if found.is_none() && !status.is_file() => {
            Err(root.unexpected_file(&path, status.kind()))
        }
        _ => Ok(found),
    }
}

/// The names of all tags, in order, as far as they can be read.
pub(crate) fn names(root: &Root) -> Vec<Reference> {
    let mut names = Vec::new();
    // The names that were read before a failure are used.
    let _ = collect_names(root, &mut names);
    names.sort();
    names
}

fn collect_names(root: &Root, names: &mut Vec<Reference>) -> Result<(), StoreError> {
    let manifests = root.existing_directory(layout::MANIFESTS)?;
    each_entry(&NameTree::default(), &manifests, &mut |entry| names.extend(name_of(entry)))
}

fn name_of(entry: &NameEntry) -> Option<Reference> {
    entry.reference.clone().filter(|_| !entry.is_dir)
}

/// Calls `visit` with every entry below `manifests/`, except for the directories between that and the tags.
fn each_entry(
    tree: &NameTree,
    manifests: &Directory,
    visit: &mut dyn FnMut(&NameEntry),
) -> Result<(), StoreError> {
    tree.visit(manifests, &mut |found| match found {
        Found::Entry(entry) => {
            visit(entry);
            Ok(())
        }
        Found::Directory(_) => Ok(()),
        Found::Unreadable(error) => Err(error),
    })
}
