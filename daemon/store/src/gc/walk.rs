//! The one enumeration of what is alive, and why. Collection, `df`, `rm` and eviction are folds over it,
//! so that they cannot disagree.

use std::collections::BTreeSet;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::outline::RecipeOutline;
use blobd_store_format::reach::reachable;
use blobd_store_format::reference::Reference;

use super::plan::Node;
use crate::{Store, StoreError};

/// Who keeps something in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// All sessions and transactions; [`crate::leases::Leases::holders`] tells them apart.
    Leases,
    /// A model under its name.
    Tag(Reference),
    /// A model in the trash whose time is not over.
    Trash(Reference),
    /// A download that can be resumed, by the digest of its file.
    Download(Digest),
}

/// What one owner keeps.
#[derive(Clone, Debug)]
pub struct Owned {
    /// Who keeps it.
    pub owner: Owner,
    /// The digest of the manifest that says so, if one does.
    pub manifest: Option<Digest>,
    /// What is kept by itself, in no order. What recipes among these name is kept too, except
    /// by a lease, which pins each blob by itself.
    pub roots: Vec<Node>,
}

impl Owner {
    /// The owner as people read it; nothing for leases, of which there are many.
    pub fn name(&self) -> Option<String> {
        match self {
            Self::Leases => None,
            Self::Tag(reference) => Some(reference.short()),
            Self::Trash(reference) => Some(format!("{} in the trash", reference.short())),
            Self::Download(file) => Some(format!("the unfinished download of {}", file.short())),
        }
    }
}

impl Owned {
    /// Everything that is kept.
    ///
    /// # Errors
    /// A recipe that cannot be read.
    pub fn nodes(self, store: &Store) -> Result<BTreeSet<Node>, StoreError> {
        match self.owner {
            Owner::Leases => Ok(self.roots.into_iter().collect()),
            _ => reachable(self.roots, |node| references(node, |file| store.recipe_outline(file))),
        }
    }
}

/// Is shown one owner after the other.
pub type Visit<'v> = dyn FnMut(Owned) -> Result<(), StoreError> + 'v;

/// Calls `visit` with everything that keeps bytes at `now`. Leases come first: what they pin may get a
/// tag meanwhile. The trash comes after the tags: what is put there loses its tag afterwards.
///
/// # Errors
/// What no collection goes on after: a file under `manifests/` or in the trash that is none, a manifest
/// that cannot be read, a file of a model that is missing; those of `visit`.
pub fn walk(store: &Store, now: SystemTime, visit: &mut Visit<'_>) -> Result<(), StoreError> {
    visit(leases(store))?;
    each_model(store, |reference, manifest| visit(of_manifest(Owner::Tag(reference), &manifest)))?;
    trash_and_downloads(store, now, visit)
}

/// The same without tags.
///
/// # Errors
/// As for [`walk`].
pub fn walk_beside_tags(store: &Store, now: SystemTime, visit: &mut Visit<'_>) -> Result<(), StoreError> {
    visit(leases(store))?;
    trash_and_downloads(store, now, visit)
}

fn leases(store: &Store) -> Owned {
    let pinned = store.leases().pinned();
    let roots = pinned.into_iter().flat_map(|digest| [Node::Blob(digest), Node::Recipe(digest)]).collect();
    Owned { owner: Owner::Leases, manifest: None, roots }
}

fn trash_and_downloads(store: &Store, now: SystemTime, visit: &mut Visit<'_>) -> Result<(), StoreError> {
    for trashed in store.trash()?.into_iter().filter(|trashed| !trashed.is_expired(now)) {
        visit(of_manifest(Owner::Trash(trashed.reference), &trashed.manifest))?;
    }
    for file in store.partial_files()? {
        let mut roots: Vec<Node> = store.blobs_of_partial(file)?.into_iter().map(Node::Blob).collect();
        // One whose recipe cannot be read is not whole: it is put together again from its blobs.
        if store.recipe_outline(file).is_ok() {
            roots.extend([Node::Blob(file), Node::Recipe(file)]);
        }
        visit(Owned { owner: Owner::Download(file), manifest: None, roots })?;
    }
    Ok(())
}

fn of_manifest(owner: Owner, manifest: &Manifest) -> Owned {
    Owned { owner, manifest: Some(manifest.digest()), roots: roots_of(manifest) }
}

/// Calls `visit` with every tag and its manifest.
///
/// # Errors
/// What no collection goes on after: a file under `manifests/` that is no manifest, a manifest
/// that cannot be read, a file of a model that is missing; those of `visit`.
fn each_model(
    store: &Store,
    mut visit: impl FnMut(Reference, Manifest) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    for reference in references_alone(store)? {
        match store.manifest(&reference) {
            Ok(manifest) => {
                check_complete(store, &reference, manifest.digests())?;
                visit(reference, manifest)?;
            }
            // Removed since it was listed, by its owner.
            Err(StoreError::NoSuchModel { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Checks of models with these files what [`walk`] checks of models, but for the manifests themselves,
/// which have been read.
///
/// # Errors
/// [`StoreError::ForeignFile`], [`StoreError::Incomplete`], [`StoreError::Io`].
pub fn check_models<'m>(
    store: &Store,
    models: impl IntoIterator<Item = (&'m Reference, &'m [Digest])>,
) -> Result<(), StoreError> {
    references_alone(store)?;
    let mut models = models.into_iter();
    models.try_for_each(|(reference, files)| check_complete(store, reference, files.iter().copied()))
}

/// The tags, unless there is a file among them that is none.
fn references_alone(store: &Store) -> Result<Vec<Reference>, StoreError> {
    let tags = store.tags()?;
    match tags.foreign.into_iter().next() {
        Some(path) => Err(StoreError::ForeignFile { path }),
        None => Ok(tags.references),
    }
}

/// A file that has neither blob nor recipe may have had a recipe, and nobody knows which blobs
/// that would have named. One that was put aside was a blob.
fn check_complete(
    store: &Store,
    reference: &Reference,
    files: impl IntoIterator<Item = Digest>,
) -> Result<(), StoreError> {
    for digest in files {
        let is_there = store.has_recipe(digest) || store.blob_size(digest)?.is_some();
        if !is_there && !store.is_quarantined(digest) {
            return Err(StoreError::Incomplete { name: reference.short(), digest });
        }
    }
    Ok(())
}

pub(super) fn roots_of(manifest: &Manifest) -> Vec<Node> {
    let digests = manifest.digests();
    digests.into_iter().flat_map(|digest| [Node::Blob(digest), Node::Recipe(digest)]).collect()
}

pub(super) fn references(
    node: Node,
    outline: impl FnOnce(Digest) -> Result<Option<RecipeOutline>, StoreError>,
) -> Result<Vec<Node>, StoreError> {
    let Node::Recipe(file) = node else { return Ok(Vec::new()) };
    let Some(outline) = outline(file)? else { return Ok(Vec::new()) };
    Ok(outline.digests().iter().copied().map(Node::Blob).collect())
}
