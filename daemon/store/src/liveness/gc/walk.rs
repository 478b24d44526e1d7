//! Enumerates what is needed or protected, and by what. Collection, `df`, `rm` and eviction all use it, so that they
//! cannot disagree.

use std::collections::BTreeSet;
use std::time::SystemTime;

use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reach::reachable;
use blobd_store_format::recipe::RecipeOutline;
use blobd_store_format::reference::Reference;

use super::Node;
use crate::StoreError;
use crate::ledger::charge_limit::Account;
use crate::liveness::Liveness;
use crate::names::tags::Tags;

/// An owner of data in the store.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Owner {
    /// All sessions and transactions; [`crate::leases::Leases::holders`] lists them one by one.
    Leases,
    Tag(Reference),
    /// A model in the trash that has not expired.
    Trash(Reference),
    /// An unfinished download, by the digest of its file.
    Download(Digest),
}

/// An owner and what it keeps.
#[derive(Clone, Debug)]
pub struct Owned {
    pub owner: Owner,
    pub manifest: Option<Digest>,
    /// What the owner keeps directly, in no order. It also keeps the blobs that recipes among these name; a lease
    /// protects each blob itself.
    pub roots: Vec<Node>,
    /// Who is charged, if the owner itself has a record of that.
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
                references(node, |file| store.content.recipe_outline(file))
            }),
        }
    }
}

pub type Visit<'v> = dyn FnMut(Owned) -> Result<(), StoreError> + 'v;

/// Calls `visit` with everything that keeps data at `now`. Leases come first, because what they protect may get a tag
/// meanwhile; the trash comes after the tags, because a removed model gets its record in the trash before its tag
/// disappears. Fails if there is a foreign file, an unreadable manifest or a missing file of a model, and as `visit`
/// does.
pub fn walk(store: &Liveness, now: SystemTime, visit: &mut Visit<'_>) -> Result<(), StoreError> {
    visit(leases(store))?;
    each_model(store, |reference, manifest| visit(of_manifest(Owner::Tag(reference), &manifest)))?;
    trash_and_downloads(store, now, visit)
}

/// Everything that keeps data at one moment, read once for all that a verb needs.
#[derive(Clone, Debug)]
pub struct Snapshot(Vec<Owned>);

impl Snapshot {
    /// # Errors
    /// A missing directory of the store, and those of [`walk`].
    pub fn take(store: &Liveness, now: SystemTime) -> Result<Self, StoreError> {
        store.content.check_directories()?;
        let mut all = Vec::new();
        walk(store, now, &mut |owned| {
            all.push(owned);
            Ok(())
        })?;
        Ok(Self(all))
    }

    /// What keeps data, in the order of [`walk`].
    pub fn owned(&self) -> &[Owned] {
        &self.0
    }

    /// What names, the trash and downloads need. Leases make no blob needed: the deletion skips leased digests.
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
    let roots = leased.into_iter().flat_map(Node::both).collect();
    Owned { owner: Owner::Leases, manifest: None, roots, account: None }
}

fn trash_and_downloads(store: &Liveness, now: SystemTime, visit: &mut Visit<'_>) -> Result<(), StoreError> {
    for trashed in store.names.trash()?.into_iter().filter(|trashed| !trashed.is_expired(now)) {
        let owned = of_manifest(Owner::Trash(trashed.reference), &trashed.manifest);
        visit(Owned { account: trashed.account, ..owned })?;
    }
    for file in store.content.partial_files()? {
        let mut roots: Vec<Node> =
            store.content.blobs_of_partial(file)?.into_iter().map(Node::Blob).collect();
        // If the recipe cannot be read, the file is incomplete and will be assembled again from its blobs.
        if store.content.recipe_outline(file).is_ok() {
            roots.extend(Node::both(file));
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
    for reference in checked_tags(store)? {
        match store.names.own_manifest(&reference) {
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
pub fn check_models<'m>(
    store: &Liveness,
    models: impl IntoIterator<Item = (&'m Reference, &'m [Digest])>,
) -> Result<(), StoreError> {
    without_foreign_files(store.names.surveyed_tags()?)?;
    let mut models = models.into_iter();
    models.try_for_each(|(reference, files)| check_complete(store, reference, files.iter().copied()))
}

/// The tags; an error if there is a file that is not a manifest among them.
fn checked_tags(store: &Liveness) -> Result<Vec<Reference>, StoreError> {
    without_foreign_files(store.names.tags()?)
}

fn without_foreign_files(tags: Tags) -> Result<Vec<Reference>, StoreError> {
    match tags.foreign.into_iter().next() {
        Some(path) => Err(StoreError::ForeignFile { path }),
        None => Ok(tags.references),
    }
}

/// Without blob and recipe, the recipe may be lost, and its blobs are unknown. A file in quarantine was a blob.
fn check_complete(
    store: &Liveness,
    reference: &Reference,
    files: impl IntoIterator<Item = Digest>,
) -> Result<(), StoreError> {
    for digest in files {
        let is_there = store.content.has_own_recipe(digest).unwrap_or_default()
            || store.content.own_blob_size(digest)?.is_some();
        if !is_there && !store.content.is_quarantined(digest) {
            return Err(StoreError::Incomplete { name: reference.short(), digest });
        }
    }
    Ok(())
}

pub(super) fn roots_of(manifest: &Manifest) -> Vec<Node> {
    manifest.digests().into_iter().flat_map(Node::both).collect()
}

pub(super) fn references(
    node: Node,
    outline: impl FnOnce(Digest) -> Result<Option<RecipeOutline>, StoreError>,
) -> Result<Vec<Node>, StoreError> {
    let Node::Recipe(file) = node else { return Ok(Vec::new()) };
    let Some(outline) = outline(file)? else { return Ok(Vec::new()) };
    Ok(outline.digests().iter().copied().map(Node::Blob).collect())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::{begin, manifest, name, new_store};

    #[test]
    fn manifests_of_names_and_all_that_is_leased_are_kept() {
        let (_folder, store) = new_store();
        let mut ingest = begin(&store);
        ingest.add_bytes(b"model").unwrap();
        ingest.commit(&name("a"), &manifest(&[b"model"]), None).unwrap();
        let tags = store.names.summaries().unwrap();
        let of_tag = tags[0].manifest.as_ref().unwrap().digest;
        let (lease, leased) = (store.liveness.leases().grant("a test"), Digest::of(b"leased"));
        lease.protect(leased);
        let manifests = Snapshot::take(&store.liveness, SystemTime::now()).unwrap().manifests();
        assert_eq!(manifests, [of_tag, leased].into());
    }

    #[test]
    fn owners_have_names_except_for_leases() {
        let tag = name("m");
        for (owner, expected) in [
            (Owner::Leases, None),
            (Owner::Tag(tag.clone()), Some("m:latest")),
            (Owner::Trash(tag), Some("m:latest in the trash")),
        ] {
            assert_eq!(owner.name().as_deref(), expected);
        }
        let file = Digest::of(b"file");
        let download = format!("the unfinished download of {}", file.short());
        assert_eq!(Owner::Download(file).name(), Some(download));
    }

    /// A store with a model of a file that is split into blobs.
    fn store_with_model() -> (tempfile::TempDir, std::sync::Arc<crate::Store>, Digest) {
        let (folder, store) = new_store();
        let mut ingest = begin(&store);
        for bytes in [&b"config"[..], b"head", b"tensor"] {
            ingest.add_bytes(bytes).unwrap();
        }
        ingest.add_recipe(crate::testing::recipe_of(&[b"head", b"tensor"]));
        ingest.commit(&name("m"), &manifest(&[b"config", b"headtensor"]), None).unwrap();
        (folder, store, Digest::of(b"headtensor"))
    }

    #[test]
    fn model_without_a_file_stops_every_walk_unless_that_is_in_quarantine() {
        let (_folder, store, file) = store_with_model();
        let files = manifest(&[b"config", b"headtensor"]).digests().into_iter().collect::<Vec<_>>();
        let check = || check_models(&store.liveness, [(&name("m"), files.as_slice())]);
        let walked = || walk(&store.liveness, SystemTime::now(), &mut |_| Ok(()));
        check().unwrap();
        walked().unwrap();
        let recipe = store.path(blobd_store_format::layout::recipe(file));
        std::fs::rename(&recipe, store.path("away")).unwrap();
        for refused in [check(), walked()] {
            let error = refused.unwrap_err();
            assert!(
                matches!(&error, StoreError::Incomplete { name, digest } if name == "m:latest" && *digest == file),
                "{error}"
            );
        }
        std::fs::rename(store.path("away"), &recipe).unwrap();
        let config = Digest::of(b"config");
        let seen = store.content.blob_status(config).unwrap().unwrap();
        store.content.quarantine(config, &seen).unwrap().unwrap();
        check().unwrap();
        walked().unwrap();
        std::fs::write(store.path("manifests/notes.txt"), "").unwrap();
        assert!(matches!(check(), Err(StoreError::ForeignFile { .. })));
        assert!(matches!(walked(), Err(StoreError::ForeignFile { .. })));
    }

    #[test]
    fn everything_that_keeps_data_is_walked_in_order_with_what_it_keeps() {
        let (_folder, store, split) = store_with_model();
        let keep = std::time::Duration::from_secs(60);
        store.names.add_to_trash(&name("t"), &manifest(&[b"trashed"]), keep).unwrap();
        store.names.add_to_trash(&name("u"), &manifest(&[b"expired"]), std::time::Duration::ZERO).unwrap();
        let download = Digest::of(b"download");
        std::fs::create_dir_all(store.path(blobd_store_format::layout::partial(download))).unwrap();
        let lease = store.liveness.leases().grant("a test");
        let leased = Digest::of(b"leased");
        lease.protect(leased);
        let snapshot = Snapshot::take(&store.liveness, SystemTime::now()).unwrap();
        let owners: Vec<_> = snapshot.owned().iter().map(|owned| owned.owner.clone()).collect();
        let expected =
            [Owner::Leases, Owner::Tag(name("m")), Owner::Trash(name("t")), Owner::Download(download)];
        assert_eq!(owners, expected);
        assert_eq!(snapshot.names(), [&name("m"), &name("t")]);
        let roots =
            |files: &[Digest]| files.iter().flat_map(|file| Node::both(*file)).collect::<BTreeSet<_>>();
        let config = Digest::of(b"config");
        let parts = [&b"head"[..], b"tensor"].map(|bytes| Node::Blob(Digest::of(bytes)));
        let nodes: Vec<_> =
            snapshot.owned().iter().map(|owned| owned.nodes(&store.liveness).unwrap()).collect();
        let of_model = roots(&[config, split]).into_iter().chain(parts).collect();
        let trashed = Digest::of(b"trashed");
        assert_eq!(nodes, [roots(&[leased]), of_model, roots(&[trashed]), roots(&[download])]);
        let needed: BTreeSet<Node> = snapshot.needed().into_iter().collect();
        assert_eq!(needed, roots(&[config, split, trashed, download]));
        let mut beside = Vec::new();
        walk_beside_tags(&store.liveness, SystemTime::now(), &mut |owned| {
            beside.push(owned.owner);
            Ok(())
        })
        .unwrap();
        assert_eq!(beside, [expected[0].clone(), expected[2].clone(), expected[3].clone()]);
    }
}
