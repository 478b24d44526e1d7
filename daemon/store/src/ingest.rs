//! Ingests: how anything gets into the store.
//!
//! The order of the steps in [`Ingest::commit`] is what makes the store's first promise true:
//! whatever happens at whatever moment, a file under its final name is complete and has its
//! digest, and a tag points only at a model that is whole. `docs/STORE-FORMAT.md` lists what
//! goes wrong, and on which file system, when a step is left out or moved.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;

use super::leases::Lease;
use super::reservation::Reservation;
use super::seal::StagedBlob;
use super::staging::Staging;
use super::tags::OriginRecord;
use super::{Store, StoreError};

/// One transaction: blobs and recipes are staged, then committed together with the tag that
/// needs them. Dropped without a commit, it leaves nothing behind but blobs of large files that
/// had their names already; those are condemned ([`Store::condemn`]).
#[derive(Debug)]
#[must_use]
pub struct Ingest {
    store: Arc<Store>,
    lease: Lease,
    staging: Staging,
    /// Blobs that are finished and have no name yet.
    group: Group,
    publisher: Publisher,
    /// Every blob that the store did not have when it was finished.
    new: BTreeSet<Digest>,
    recipes: BTreeMap<Digest, Recipe>,
    /// Recipes that have been published ahead of the commit.
    published_recipes: BTreeSet<Digest>,
    new_bytes: u64,
    reused_bytes: u64,
    /// Names in `partial/` that are of no more use after the commit.
    partials: BTreeSet<Digest>,
    is_committed: bool,
}

/// Blobs that are made durable and published together. The groups of a large file go one after
/// the other while the next is being written, so that neither the staging directory nor the
/// memory that waits to be written back grows with the file.
#[derive(Debug, Default)]
struct Group {
    blobs: Vec<StagedBlob>,
    bytes: u64,
}

impl Group {
    const MAX_BLOBS: usize = 256;
    const MAX_BYTES: u64 = 1 << 30;

    fn add(&mut self, blob: StagedBlob) {
        self.bytes = self.bytes.saturating_add(blob.size);
        self.blobs.push(blob);
    }

    fn is_full(&self) -> bool {
        self.blobs.len() >= Self::MAX_BLOBS || self.bytes >= Self::MAX_BYTES
    }

    fn take(&mut self) -> Vec<StagedBlob> {
        std::mem::take(self).blobs
    }
}

/// Publishes one group at a time beside the thread that fills the next.
#[derive(Debug, Default)]
struct Publisher(Option<JoinHandle<Result<(), StoreError>>>);

impl Publisher {
    fn start(&mut self, staging: &Staging, group: Vec<StagedBlob>) -> Result<(), StoreError> {
        self.wait()?;
        let staging = staging.clone();
        self.0 = Some(thread::spawn(move || staging.publish(group)));
        Ok(())
    }

    fn wait(&mut self) -> Result<(), StoreError> {
        match self.0.take().map(JoinHandle::join) {
            None => Ok(()),
            Some(Ok(published)) => published,
            Some(Err(panic)) => std::panic::resume_unwind(panic),
        }
    }
}

/// What a transaction did.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// The length of the blobs that were written.
    pub new_bytes: u64,
    /// How many those are.
    pub new_blob_count: u64,
    /// The length of what was staged and turned out to be there already.
    pub reused_bytes: u64,
}

/// What a commit writes beside blobs and recipes.
struct Records {
    origin: Option<OriginRecord>,
    /// Space for the manifest.
    tag: Option<Reservation>,
}

impl Ingest {
    /// Starts a transaction. Everything it stages is pinned by `lease` until it ends.
    pub fn begin(store: &Arc<Store>, lease: Lease) -> Result<Self, StoreError> {
        Ok(Self {
            store: Arc::clone(store),
            lease,
            staging: Staging::begin(store)?,
            group: Group::default(),
            publisher: Publisher::default(),
            new: BTreeSet::new(),
            recipes: BTreeMap::new(),
            published_recipes: BTreeSet::new(),
            new_bytes: 0,
            reused_bytes: 0,
            partials: BTreeSet::new(),
            is_committed: false,
        })
    }

    /// The store that the transaction is part of.
    #[must_use]
    pub const fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The lease that protects what the transaction needs.
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// Where its blobs are written.
    #[must_use]
    pub fn staging(&self) -> Staging {
        self.staging.clone()
    }

    /// Has room promised for files of these lengths, before a byte of them is written. If not all of
    /// them fit, those fit perhaps that the store does not have: of a sibling of what is there,
    /// most tensors are. Then only what cannot be there, because nothing stored has its length, is
    /// promised, and the rest is admitted piece by piece.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], [`StoreError::Quota`].
    pub fn admit(&self, sizes: impl Iterator<Item = u64> + Clone) -> Result<(), StoreError> {
        let on_disk = |size| self.store.space().on_disk(size);
        let all = sizes.clone().map(on_disk).fold(0, u64::saturating_add);
        if self.store.shortage(all) == 0 {
            return self.staging.promise(all);
        }
        self.staging.promise(self.store.certainly_new(sizes)?)
    }

    /// Takes a finished blob. One that the store or this transaction has already is dropped at
    /// once, so that the disk never holds more than is new.
    pub fn add_blob(&mut self, blob: StagedBlob) -> Result<Digest, StoreError> {
        let digest = blob.digest;
        // Before the look whether it exists: a collection could delete it between look and pin.
        self.lease.pin(digest);
        if self.new.contains(&digest) || self.store.blob_size(digest)? == Some(blob.size) {
            self.reused_bytes += blob.size;
            self.staging.discard(&blob)?;
            return Ok(digest);
        }
        self.new_bytes += blob.size;
        self.new.insert(digest);
        self.group.add(blob);
        if self.group.is_full() {
            self.publisher.start(&self.staging, self.group.take())?;
        }
        Ok(digest)
    }

    /// Stages and takes a blob that is in memory.
    pub fn add_bytes(&mut self, bytes: &[u8]) -> Result<Digest, StoreError> {
        let mut writer = self.staging.stage(bytes.len() as u64);
        writer.append(bytes)?;
        self.add_blob(writer.finish()?)
    }

    /// Takes a recipe whose blobs have been added or are in the store.
    pub fn add_recipe(&mut self, recipe: Recipe) {
        self.lease.pin(recipe.file());
        self.lease.pin_all(recipe.digests());
        self.recipes.insert(recipe.file(), recipe);
    }

    /// Makes everything durable and visible, the tag last.
    ///
    /// A failure before the tag is written leaves at most blobs that no tag needs: the next
    /// collection takes them. An error of a sync is final, because the kernel reports it once
    /// and a second try would succeed with the data gone.
    ///
    /// # Errors
    /// [`StoreError::Io`]; [`StoreError::MissingBlob`] or [`StoreError::BlobSize`] when the
    /// model would not be whole.
    pub fn commit(
        self,
        reference: &Reference,
        manifest: &Manifest,
        origin: Option<&str>,
    ) -> Result<Committed, StoreError> {
        // Before any lock is taken: to make room, models may have to go.
        let origin = origin.map(|origin| OriginRecord::new(&self.staging, origin)).transpose()?;
        let tag = self.staging.reserve_space(manifest.raw().len() as u64, || Ok(()))?;
        self.commit_records(reference, manifest, Records { origin, tag: Some(tag) }, |_present| Ok(()))
    }

    /// The same unless `allowed` refuses. It is told which tag would be replaced, and no tag
    /// changes between its look and the deed. It takes what the manifest takes whether there is
    /// room or not, because it is for a model that comes back from the trash: the record there
    /// gives as much back.
    ///
    /// # Errors
    /// As for [`Self::commit`], and those of `allowed`.
    pub fn commit_if<E: From<StoreError>>(
        self,
        reference: &Reference,
        manifest: &Manifest,
        allowed: impl FnOnce(Option<&Reference>) -> Result<(), E>,
    ) -> Result<Committed, E> {
        self.commit_records(reference, manifest, Records { origin: None, tag: None }, allowed)
    }

    fn commit_records<E: From<StoreError>>(
        mut self,
        reference: &Reference,
        manifest: &Manifest,
        records: Records,
        allowed: impl FnOnce(Option<&Reference>) -> Result<(), E>,
    ) -> Result<Committed, E> {
        // Content before names: a name that survives a crash without its content is a torn blob.
        self.publish_blobs()?;
        self.publish_recipes()?;
        self.lease.pin(manifest.digest());
        self.lease.pin_all(manifest.digests());
        let store = Arc::clone(&self.store);
        let _tags = store.lock_tags();
        let stored = store.stored_case(reference)?;
        allowed(stored.as_ref())?;
        self.check_whole(manifest)?;
        let temporary = self.staging.directory().join("tag");
        if let Some(origin) = records.origin {
            store.write_origin(&temporary, manifest.digest(), origin)?;
        }
        // The commit point: before it the model does not exist, after it it is whole.
        store.write_tag(&temporary, stored.as_ref().unwrap_or(reference), manifest, records.tag)?;
        self.is_committed = true;
        // The tag protects all of it from now on.
        self.lease.release();
        store.forget_partials(manifest.digests().into_iter().chain(self.partials.iter().copied()));
        let new_blob_count = self.new.len() as u64;
        Ok(Committed { new_bytes: self.new_bytes, new_blob_count, reused_bytes: self.reused_bytes })
    }

    /// With the commit, what is left in `partial/` under this name is of no more use.
    pub fn note_partial(&mut self, file: Digest) {
        self.partials.insert(file);
    }

    /// Makes what has been added durable and visible ahead of the commit: one file of a model whose
    /// others are still to come. Without a commit it is collected, unless something is left in
    /// `partial/` of that file.
    pub fn publish(&mut self) -> Result<(), StoreError> {
        self.publish_blobs()?;
        self.publish_recipes()?;
        self.published_recipes.extend(std::mem::take(&mut self.recipes).into_keys());
        Ok(())
    }

    /// Makes the blobs alone durable and visible: those of a repair, which a tag needs already.
    /// What no tag needs is the next collection's. Recipes are not committed.
    pub fn commit_blobs(mut self) -> Result<(), StoreError> {
        self.publish_blobs()?;
        self.is_committed = true;
        Ok(())
    }

    /// The directory is synced even when every blob was there already: the transaction that
    /// published them may not have come that far yet.
    fn publish_blobs(&mut self) -> Result<(), StoreError> {
        self.publisher.wait()?;
        self.staging.publish(self.group.take())?;
        self.store.disk().sync_dir(Path::new(layout::BLOBS))
    }

    fn publish_recipes(&self) -> Result<(), StoreError> {
        let (store, temporary) = (&self.store, self.staging.directory().join("recipe"));
        let _change = store.begin_change();
        for (file, recipe) in &self.recipes {
            let (target, json) = (layout::recipe(*file), recipe.to_json());
            let mut reservation = self.staging.reserve_space(json.len() as u64, || Ok(()))?;
            let replaced = store.file_bytes(&target)?.unwrap_or_default();
            store.disk().replace_file(&temporary, &target, &json, 0o444)?;
            store.note_recipe_added(recipe, replaced, &mut reservation)?;
        }
        store.disk().sync_dir(Path::new(layout::RECIPES))
    }

    fn check_whole(&self, manifest: &Manifest) -> Result<(), StoreError> {
        let mut checked = BTreeSet::new();
        for file in manifest.files().filter(|file| checked.insert(file.digest)) {
            self.store.drop_useless_recipe(file)?;
            if let Some(lack) = self.store.check_file(file)? {
                return Err(lack);
            }
        }
        Ok(())
    }
}

impl Drop for Ingest {
    fn drop(&mut self) {
        // Its error was or will be the transaction's own, or nobody asks for it any more.
        let _ = self.publisher.wait();
        if !self.is_committed {
            let recipes = self.recipes.keys().chain(&self.published_recipes);
            self.store.condemn(self.new.iter().chain(recipes).copied());
        }
    }
}
