//! Enumerates what is needed or protected, and by what. Collection, `df`, `rm` and eviction all use it, so
//! that they cannot disagree.

use std::collections::BTreeSet;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::outline::RecipeOutline;
use blobd_store_format::reach::reachable;
use blobd_store_format::reference::Reference;

use super::Node;
use crate::StoreError;
use crate::ledger::charge_limit::Account;
use crate::liveness::Liveness;

/// An owner of data in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// All sessions and transactions; [`crate::leases::Leases::holders`] lists them one by one.
    Leases,
    /// A tagged model.
    Tag(Reference),
    /// A model in the trash that has not expired.
    Trash(Reference),
    /// An unfinished download, by the digest of its file.
    Download(Digest),
}

/// An owner and what it keeps.
#[derive(Clone, Debug)]
pub struct Owned {
    /// The owner.
    pub owner: Owner,
    /// The digest of the owner's manifest, if it has one.
    pub manifest: Option<Digest>,
    /// What the owner keeps directly, in no order. Blobs that recipes among these name are kept too, except
    /// for leases, which protect each blob themselves.
    pub roots: Vec<Node>,
    /// Whom it is charged to, if the owner itself has a record of that.
    pub account: Option<Account>,
}

impl Owner {
    /// The owner's name for messages; `None` for leases, of which there are many.
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
    /// All nodes that the owner keeps. Fails if a recipe cannot be read.
    pub fn nodes(&self, store: &Liveness) -> Result<BTreeSet<Node>, StoreError> {
        match self.owner {
            Owner::Leases => Ok(self.roots.iter().copied().collect()),
            _ => reachable(self.roots.iter().copied(), |node| {
                references(node, |file| store.content().recipe_outline(file))
            }),
        }
    }
}

/// Called with one owner after the other.
pub type Visit<'v> = dyn FnMut(Owned) -> Result<(), StoreError> + 'v;

/// Calls `visit` with everything that keeps data at `now`. Leases come first, because what they protect may get
/// a tag meanwhile; the trash comes after the tags, because a removed model gets its record in the trash
/// before its tag disappears.
///
/// # Errors
/// A foreign file under `manifests/` or in the trash, an unreadable manifest, a missing file of a model;
/// those of `visit`.
pub fn walk(store: &Liveness, now: SystemTime, visit: &mut Visit<'_>) -> Result<(), StoreError> {
    visit(leases(store))?;
    each_model(store, |reference, manifest| visit(of_manifest(Owner::Tag(reference), &manifest)))?;
    trash_and_downloads(store, now, visit)
}

/// Everything that keeps data at one moment: one snapshot serves all that a verb asks, so that it reads each manifest
/// once.
#[derive(Clone, Debug)]
pub struct Snapshot(Vec<Owned>);

impl Snapshot {
    /// # Errors
    /// A missing directory of the store, and those of [`walk`].
    pub fn take(store: &Liveness, now: SystemTime) -> Result<Self, StoreError> {
        store.content().check_directories()?;
        let mut all = Vec::new();
        walk(store, now, &mut |owned| {
            all.push(owned);
            Ok(())
        })?;
        Ok(Self(all))
    }

    /// What keeps data, in the order of [`walk`].
    #[must_use]
    pub fn owned(&self) -> &[Owned] {
        &self.0
    }

    /// What names, the trash and downloads need. A lease does not make a blob needed: the deletion skips leased digests.
    pub(super) fn needed(&self) -> Vec<Node> {
        let needed = self.0.iter().filter(|owned| owned.owner != Owner::Leases);
        needed.flat_map(|owned| owned.roots.iter().copied()).collect()
    }

    /// The names of tags and of models in the trash.
    pub(super) fn names(&self) -> Vec<&Reference> {
        let owners = self.0.iter().map(|owned| &owned.owner);
        let names = owners.filter_map(|owner| match owner {
            Owner::Tag(name) | Owner::Trash(name) => Some(name),
            Owner::Leases | Owner::Download(_) => None,
        });
        names.collect()
    }

    /// The manifests of tags and of models in the trash, and every leased digest.
    pub(super) fn manifests(&self) -> BTreeSet<Digest> {
        let of_leases = self.0.iter().filter(|owned| owned.owner == Owner::Leases);
        let leased = of_leases.flat_map(|owned| owned.roots.iter().map(|node| node.digest()));
        self.0.iter().filter_map(|owned| owned.manifest).chain(leased).collect()
    }
}

/// Like [`walk`], without tags.
pub fn walk_beside_tags(store: &Liveness, now: SystemTime, visit: &mut Visit<'_>) -> Result<(), StoreError> {
    visit(leases(store))?;
    trash_and_downloads(store, now, visit)
}

fn leases(store: &Liveness) -> Owned {
    let leased = store.leases().leased();
    let roots = leased.into_iter().flat_map(|digest| [Node::Blob(digest), Node::Recipe(digest)]).collect();
    Owned { owner: Owner::Leases, manifest: None, roots, account: None }
}

fn trash_and_downloads(store: &Liveness, now: SystemTime, visit: &mut Visit<'_>) -> Result<(), StoreError> {
    for trashed in store.names().trash()?.into_iter().filter(|trashed| !trashed.is_expired(now)) {
        let owned = of_manifest(Owner::Trash(trashed.reference), &trashed.manifest);
        visit(Owned { account: trashed.account, ..owned })?;
    }
    for file in store.content().partial_files()? {
        let mut roots: Vec<Node> =
            store.content().blobs_of_partial(file)?.into_iter().map(Node::Blob).collect();
        // If the recipe cannot be read, the file is incomplete and will be assembled again from its blobs.
        if store.content().recipe_outline(file).is_ok() {
            roots.extend([Node::Blob(file), Node::Recipe(file)]);
        }
        visit(Owned { owner: Owner::Download(file), manifest: None, roots, account: None })?;
    }
    Ok(())
}

fn of_manifest(owner: Owner, manifest: &Manifest) -> Owned {
    Owned { owner, manifest: Some(manifest.digest()), roots: roots_of(manifest), account: None }
}

fn each_model(
    store: &Liveness,
    mut visit: impl FnMut(Reference, Manifest) -> Result<(), StoreError>,
) -> Result<(), StoreError> {
    for reference in references_alone(store)? {
        match store.names().own_manifest(&reference) {
            Ok(manifest) => {
                check_complete(store, &reference, manifest.digests())?;
                visit(reference, manifest)?;
            }
            // The user has removed it since it was listed.
            Err(StoreError::NoSuchModel { .. }) => {}
            Err(error) => return Err(error),
        }
    }
    Ok(())
}

/// Makes the checks that [`walk`] makes for models, for models whose manifests have been read already.
///
/// # Errors
/// [`StoreError::ForeignFile`], [`StoreError::Incomplete`], [`StoreError::Io`].
pub fn check_models<'m>(
    store: &Liveness,
    models: impl IntoIterator<Item = (&'m Reference, &'m [Digest])>,
) -> Result<(), StoreError> {
    references_alone(store)?;
    let mut models = models.into_iter();
    models.try_for_each(|(reference, files)| check_complete(store, reference, files.iter().copied()))
}

/// The tags; an error if there is a file that is not a manifest among them.
fn references_alone(store: &Liveness) -> Result<Vec<Reference>, StoreError> {
    let tags = store.names().tags()?;
    match tags.foreign.into_iter().next() {
        Some(path) => Err(StoreError::ForeignFile { path }),
        None => Ok(tags.references),
    }
}

/// If a file has neither blob nor recipe, its recipe may be lost, and the blobs that the recipe named are
/// unknown. A file in quarantine was a blob.
fn check_complete(
    store: &Liveness,
    reference: &Reference,
    files: impl IntoIterator<Item = Digest>,
) -> Result<(), StoreError> {
    for digest in files {
        let is_there = store.content().has_own_recipe(digest).unwrap_or_default()
            || store.content().own_blob_size(digest)?.is_some();
        if !is_there && !store.content().is_quarantined(digest) {
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
