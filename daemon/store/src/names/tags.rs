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
use crate::ledger::accounting::Reservation;
use crate::names::Names;
use crate::place::Place;
use crate::root::{Directory, Entry, Root};

/// The content of `manifests/`.
#[derive(Clone, Debug, Default)]
pub struct Tags {
    /// Every tag, in order.
    pub references: Vec<Reference>,
    /// Files whose path is not a model's name. They may be manifests that a user moved, so a collection
    /// must not ignore them.
    pub foreign: Vec<Place>,
}

impl Names {
    /// Lists all tags.
    pub fn tags(&self) -> Result<Tags, StoreError> {
        let mut tags = Tags::default();
        self.each_tag_file(&mut |directory, entry, reference| {
            match reference {
                Some(reference) if !entry.is_dir() => tags.references.push(reference),
                _ => tags.foreign.push(directory.place().join(&entry.name)),
            }
            Ok(())
        })?;
        tags.references.sort();
        Ok(tags)
    }

    /// Calls `visit` with every entry below `manifests/`, except for the directories between that and the
    /// tags, and with the name of a model that its path is, if it is one.
    pub(crate) fn each_tag_file(&self, visit: &mut VisitTagFile<'_>) -> Result<(), StoreError> {
        visit_tag_files(&self.content.root, visit)
    }

    /// The manifest that a tag of this store or of a lower one points to.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`], [`StoreError::Manifest`], [`StoreError::Io`].
    pub fn manifest(&self, reference: &Reference) -> Result<Manifest, StoreError> {
        match manifest_in(&self.content.root, reference)? {
            None => self.content.lower.find_or_damage(|root| manifest_in(root, reference))?,
            found => found,
        }
        .ok_or_else(|| StoreError::no_such_model(reference))
    }

    /// The same without the lower stores.
    pub(crate) fn own_manifest(&self, reference: &Reference) -> Result<Manifest, StoreError> {
        manifest_in(&self.content.root, reference)?.ok_or_else(|| StoreError::no_such_model(reference))
    }

    /// The tags of this store and of the lower ones, in order, each once.
    pub fn all_tags(&self) -> Result<Vec<Reference>, StoreError> {
        let mut all = self.tags()?.references;
        self.content.lower.each(|_, root| {
            let mut names = Vec::new();
            let mut skip = |error| self.content.lower.note_failure(root, &error);
            visit_readable_tag_files(root, &mut add_name(&mut names), &mut skip)?;
            names.retain(|name| !all.iter().any(|above| above.same_model(name)));
            all.extend(names);
            Ok(())
        });
        all.sort();
        Ok(all)
    }

    /// The lower store in which a model is; `None` if this store has a tag of that name.
    pub fn lower_place_of(&self, reference: &Reference) -> Result<Option<Place>, StoreError> {
        let path = layout::manifest(reference);
        if self.content.lower.is_empty() || self.content.root.status(&path)?.is_some() {
            return Ok(None);
        }
        Ok(self.content.lower.find(|root| Ok(root.status(&path)?.map(|_file| root.place()))))
    }

    /// The unparsed content of a tag's file; of a file longer than [`Manifest::MAX_BYTES`], one byte more
    /// than that.
    pub fn raw_manifest(&self, reference: &Reference) -> Result<Vec<u8>, StoreError> {
        let raw = self.content.root.read_limited(&layout::manifest(reference), Manifest::MAX_BYTES)?;
        raw.ok_or_else(|| StoreError::no_such_model(reference))
    }

    /// Checks that this store still has a tag.
    ///
    /// # Errors
    /// [`StoreError::NoSuchModel`].
    pub fn check_tag(&self, reference: &Reference) -> Result<(), StoreError> {
        match self.content.root.status(&layout::manifest(reference))? {
            Some(_) => Ok(()),
            None => Err(StoreError::no_such_model(reference)),
        }
    }

    /// When a tag was last set.
    pub fn modified(&self, reference: &Reference) -> Result<SystemTime, StoreError> {
        let status = self.content.root.status(&layout::manifest(reference))?;
        let modified = status.map(|status| status.modified());
        modified.ok_or_else(|| StoreError::no_such_model(reference))
    }

    /// Removes a tag without a record in its history.
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
                self.content.disk().sync_dir(directory)?;
            }
            // Fails if other models share the directory, as intended.
            if !self.content.disk().remove_dir(directory)? {
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
        self.content.disk().sync_dir(directory)
    }

    /// The stored tag that equals `reference` except for upper and lower case. For a name that is to be given:
    /// [`Self::resolve`] may find a model under another one.
    pub fn stored_case(&self, reference: &Reference) -> Result<Option<Reference>, StoreError> {
        case_in(&self.content.root, reference)
    }

    /// The tag that a lower store has for this name, and its manifest.
    pub(crate) fn lower_name(&self, reference: &Reference) -> Option<(Reference, Digest)> {
        self.content.lower.find(|root| {
            let Some(tag) = case_in(root, reference)? else { return Ok(None) };
            Ok(manifest_in(root, &tag)?.map(|manifest| (tag, manifest.digest())))
        })
    }

    /// The same, of the lower stores if this one has no such tag.
    pub(crate) fn stored_case_anywhere(
        &self,
        reference: &Reference,
    ) -> Result<Option<Reference>, StoreError> {
        match self.stored_case(reference)? {
            None => Ok(self.content.lower.find(|root| case_in(root, reference))),
            stored => Ok(stored),
        }
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
        let parts = [reference.host(), reference.namespace(), reference.model(), reference.tag()];
        return Ok(Reference::from_parts(parts[0], parts[1], parts[2], parts[3]).ok());
    }
    let mut names = try_names(root)?;
    names.sort();
    let found = names.into_iter().find(|stored| stored.same_model(reference));
    match status {
        // It is no name, but nothing can get this name either.
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

fn try_names(root: &Root) -> Result<Vec<Reference>, StoreError> {
    let mut names = Vec::new();
    collect_names(root, &mut names)?;
    Ok(names)
}

fn collect_names(root: &Root, names: &mut Vec<Reference>) -> Result<(), StoreError> {
    visit_tag_files(root, &mut add_name(names))
}

fn add_name(
    names: &mut Vec<Reference>,
) -> impl FnMut(&Directory, &Entry, Option<Reference>) -> Result<(), StoreError> {
    |_, entry, name| {
        names.extend(name.filter(|_| !entry.is_dir()));
        Ok(())
    }
}

/// As [`Names::each_tag_file`], for any root.
pub(crate) fn visit_tag_files(root: &Root, visit: &mut VisitTagFile<'_>) -> Result<(), StoreError> {
    walk(&root.existing_directory(layout::MANIFESTS)?, Path::new(""), 0, &mut Visitor { visit, skip: None })
}

/// The same; directories that cannot be read are left out, with a call of `skip`.
pub(crate) fn visit_readable_tag_files(
    root: &Root,
    visit: &mut VisitTagFile<'_>,
    skip: &mut dyn FnMut(StoreError),
) -> Result<(), StoreError> {
    let mut visitor = Visitor { visit, skip: Some(skip) };
    walk(&root.existing_directory(layout::MANIFESTS)?, Path::new(""), 0, &mut visitor)
}

/// Directories between `manifests/` and a tag.
const DEPTH: usize = 3;

/// Gets a directory, an entry in it, and the tag at that place, if it is one of a tag.
type VisitTagFile<'v> = dyn FnMut(&Directory, &Entry, Option<Reference>) -> Result<(), StoreError> + 'v;

struct Visitor<'v, 'f> {
    visit: &'v mut VisitTagFile<'f>,
    /// Gets the errors of directories that cannot be read. Without it, the first one ends the visit.
    skip: Option<&'v mut dyn FnMut(StoreError)>,
}

/// Visits the directory at `place` below `manifests/`. A subdirectory that was just removed with its last tag
/// counts as empty.
fn walk(
    directory: &Directory,
    place: &Path,
    depth: usize,
    visitor: &mut Visitor<'_, '_>,
) -> Result<(), StoreError> {
    directory.each_entry(|entry| {
        let place = place.join(&entry.name);
        let visited = match !entry.is_dir() || depth == DEPTH {
            true => (visitor.visit)(directory, &entry, layout::parse_tag_place(&place)),
            false => directory
                .find_directory(&entry.name)
                .and_then(|below| below.map_or(Ok(()), |below| walk(&below, &place, depth + 1, visitor))),
        };
        match (visited, &mut visitor.skip) {
            (Err(error), Some(skip)) => {
                skip(error);
                Ok(())
            }
            (visited, _) => visited,
        }
    })
}
