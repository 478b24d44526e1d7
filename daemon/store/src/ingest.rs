//! Ingests: the transactions that write models into the store.
//!
//! The order of the steps in [`Ingest::commit`] guarantees that after a crash at any moment a file under
//! its final name is complete and has its digest, and a tag points only at a complete model.
//! `docs/STORE-FORMAT.md` lists what fails, and on which file system, if a step is omitted or moved.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use tracing::Span;

use super::gc::Displaced;
use super::history::{Account, Actor, NameChange, Verb};
use super::leases::Lease;
use super::make_space::EvictionObserver;
use super::models::Borrowed;
use super::node::Node;
use super::origins::{FileVersion, OriginRecord};
use super::reservation::Reservation;
use super::seal::StagedBlob;
use super::staging::Staging;
use super::{Store, StoreError};

mod borrowed;

/// One transaction: blobs and recipes are staged, then committed together with the tag that needs them.
/// If it is dropped without a commit, only blobs of large files that were already published remain, and
/// are queued for deletion ([`Store::condemn`]).
#[derive(Debug)]
#[must_use]
pub struct Ingest {
    store: Arc<Store>,
    lease: Lease,
    staging: Staging,
    /// Blobs that are finished and not published yet.
    group: Group,
    publisher: Publisher,
    /// Every blob that the store did not have when the blob was finished.
    new: BTreeSet<Digest>,
    recipes: BTreeMap<Digest, Recipe>,
    /// Recipes that were published before the commit.
    published_recipes: BTreeSet<Digest>,
    new_bytes: u64,
    reused_bytes: u64,
    /// Names in `partial/` that are not needed after the commit.
    partials: BTreeSet<Digest>,
    /// Whether the commit may move a pinned tag to another manifest.
    moves_pinned: bool,
    moves_names_of_others: bool,
    /// The versions of the files at their servers, which the commit records with the origin.
    versions: Vec<FileVersion>,
    /// On whose behalf the commit sets the tag.
    actor: Actor,
    /// The tag that the commit removes, because the model gets another name.
    renamed: Option<Reference>,
    /// Whom the name is charged to, if not to the actor.
    account: Option<Account>,
    /// Whether blobs that a lower store has are stored too.
    keeps_own_copies: bool,
    /// Blobs that are stored although a lower store has them.
    own_copies: BTreeSet<Digest>,
    is_committed: bool,
}

/// Blobs that are made durable and published together. A large file has several groups: one is published
/// while the next is written, so that the staging directory and the amount of dirty memory stay bounded.
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

/// Publishes one group at a time in the background.
#[derive(Debug, Default)]
struct Publisher(Option<JoinHandle<Result<(), StoreError>>>);

impl Publisher {
    fn start(&mut self, staging: &Staging, group: Vec<StagedBlob>) -> Result<(), StoreError> {
        self.wait()?;
        let (staging, span) = (staging.clone(), Span::current());
        self.0 = Some(thread::spawn(move || span.in_scope(|| staging.publish(group))));
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

/// Disk space for the manifest and for the history of its name.
struct NameSpace {
    tag: Reservation,
    history: Reservation,
}

/// The result of a commit.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// Bytes of the blobs that were written.
    pub new_bytes: u64,
    /// The number of blobs that were written.
    pub new_blob_count: u64,
    /// Bytes of staged blobs that were stored already.
    pub reused_bytes: u64,
    /// The model that had the name before, if it was another one.
    pub displaced: Option<Displaced>,
    /// Whether the name is new, or meant another model before.
    pub tag_changed: bool,
}

impl Committed {
    /// Whether the store is as it was before: the name meant this model, and no blob was written.
    #[must_use]
    pub const fn is_unchanged(&self) -> bool {
        !self.tag_changed && self.new_blob_count == 0
    }
}

impl Ingest {
    /// Starts a transaction. `lease` protects everything that it stages until it ends.
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
            moves_pinned: false,
            moves_names_of_others: true,
            versions: Vec::new(),
            actor: Actor::daemon(Verb::Import),
            renamed: None,
            account: None,
            keeps_own_copies: false,
            own_copies: BTreeSet::new(),
            is_committed: false,
        })
    }

    /// Allows the commit to move a pinned tag to another manifest. The pin stays with the name.
    pub const fn may_move_pinned(mut self, allowed: bool) -> Self {
        self.moves_pinned = allowed;
        self
    }

    /// Allows the commit to give a name that another user has added to another model; the default.
    pub const fn may_move_names_of_others(mut self, allowed: bool) -> Self {
        self.moves_names_of_others = allowed;
        self
    }

    /// Sets on whose behalf the transaction runs, for the history of the name and for the user's account. The default
    /// is the daemon's own user.
    pub fn on_behalf_of(mut self, actor: Actor) -> Self {
        self.actor = actor;
        self.store.set_user_of_transaction(self.staging.transaction(), actor.uid);
        self
    }

    /// Refuses to take more space when this many bytes are charged to the user.
    pub fn within_quota(self, limit_bytes: Option<u64>) -> Self {
        self.store.set_limit_of_transaction(self.staging.transaction(), limit_bytes);
        // The manifest and the history of the name have a block each, or little more.
        self.expect_record(1);
        self.expect_record(1);
        self
    }

    /// Reserves `bytes` of the user's quota until the transaction ends, beside what it has taken already.
    ///
    /// # Errors
    /// [`StoreError::OverQuota`]; then nothing is reserved. [`StoreError::IndexBuilding`] and others of the catalog.
    pub fn reserve_quota(&self, bytes: u64) -> Result<(), StoreError> {
        self.store.reserve_of_quota(self.staging.transaction(), bytes)
    }

    /// Reserves of the user's quota what these files have on disk that no name pays for: the name that the transaction
    /// sets will. The commit does the same for all files of the model.
    ///
    /// # Errors
    /// As for [`Self::reserve_quota`].
    pub fn claim_quota(&self, files: &BTreeSet<Digest>) -> Result<(), StoreError> {
        self.store.claim_of_quota(self.staging.transaction(), files)
    }

    /// What the user's own unfinished download of a file has on disk, which is charged to the user already.
    ///
    /// # Errors
    /// [`StoreError::Io`]
    pub fn own_download_bytes(&self, file: Digest) -> Result<u64, StoreError> {
        self.store.own_download_bytes(self.actor.uid, file)
    }

    /// Has the commit rename `tag`: it moves its pin to the new name and then removes it.
    pub fn renaming(mut self, tag: Reference) -> Self {
        self.renamed = Some(tag);
        self
    }

    /// Has the name charged to this account in place of the actor's: that of a model in the trash that is restored.
    pub const fn charged_to(mut self, account: Option<Account>) -> Self {
        self.account = account;
        self
    }

    /// Reports the models that are evicted to make space for this transaction.
    pub fn report_evictions_to(self, observer: Arc<dyn EvictionObserver>) -> Self {
        self.staging.report_evictions_to(observer);
        self
    }

    /// The store that the transaction is part of.
    #[must_use]
    pub const fn store(&self) -> &Arc<Store> {
        &self.store
    }

    /// The lease that protects the digests that the transaction needs.
    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    /// The directory that its blobs are written to.
    #[must_use]
    pub fn staging(&self) -> Staging {
        self.staging.clone()
    }

    /// Has later reservations of the user's quota include a small file of about this length that is written at the end,
    /// such as a recipe.
    pub fn expect_record(&self, length: u64) {
        self.store.expect_record(self.staging.transaction(), self.store.space().on_disk(length));
    }

    /// Reserves of the user's quota what files of these lengths take at least: those whose length no stored blob has.
    ///
    /// # Errors
    /// As for [`Self::reserve_quota`].
    pub fn reserve_certainly_new(&self, sizes: impl Iterator<Item = u64>) -> Result<(), StoreError> {
        self.reserve_quota(self.store.certainly_new(sizes)?)
    }

    /// Has disk space promised for files of these lengths, before any of them is written. If they do not
    /// all fit, many may be stored already, such as most tensors of a similar model. Then only space for
    /// those whose length no stored blob has is promised, and the others take space one by one.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], [`StoreError::Quota`], [`StoreError::OverQuota`].
    pub fn admit(&self, sizes: impl Iterator<Item = u64> + Clone) -> Result<(), StoreError> {
        let all = self.sum_on_disk(sizes.clone());
        match self.reserve_quota(all) {
            Err(StoreError::OverQuota { .. }) => self.reserve_certainly_new(sizes.clone())?,
            reserved => reserved?,
        }
        if self.store.shortage(all) == 0 {
            return self.staging.promise(all);
        }
        self.staging.promise(self.store.certainly_new(sizes)?)
    }

    /// Has disk space promised for files of these lengths if all fit now. Evicts nothing.
    ///
    /// # Errors
    /// If it is not known what is charged to the user, [`StoreError::IndexBuilding`] and others of the catalog.
    pub fn admit_now(&self, sizes: impl Iterator<Item = u64>) -> Result<bool, StoreError> {
        let all = self.sum_on_disk(sizes);
        match self.reserve_quota(all) {
            Err(StoreError::OverQuota { .. }) => Ok(false),
            reserved => reserved.map(|()| self.staging.promise_now(all)),
        }
    }

    /// Has disk space promised for files of these lengths, if necessary by evicting models.
    ///
    /// # Errors
    /// [`StoreError::NoSpace`], [`StoreError::Quota`], [`StoreError::OverQuota`].
    pub fn admit_all(&self, sizes: impl Iterator<Item = u64>) -> Result<(), StoreError> {
        let all = self.sum_on_disk(sizes);
        self.reserve_quota(all)?;
        self.staging.promise(all)
    }

    fn sum_on_disk(&self, sizes: impl Iterator<Item = u64>) -> u64 {
        sizes.map(|size| self.store.space().on_disk(size)).fold(0, u64::saturating_add)
    }

    /// Counts bytes of blobs that are stored and were not staged.
    pub const fn note_reused(&mut self, bytes: u64) {
        self.reused_bytes = self.reused_bytes.saturating_add(bytes);
    }

    /// Adds a finished blob. If the store or this transaction has it already, removes it immediately, so
    /// that duplicates take no disk space.
    pub fn add_blob(&mut self, blob: StagedBlob) -> Result<Digest, StoreError> {
        let digest = blob.digest;
        // Before the check whether it exists, or a collection could delete it in between.
        self.lease.protect(digest);
        if self.new.contains(&digest) || self.is_stored(digest, blob.size)? {
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

    /// Stages and adds a blob from memory, unless the store has it.
    pub fn add_bytes(&mut self, bytes: &[u8]) -> Result<Digest, StoreError> {
        let (digest, size) = (Digest::of(bytes), bytes.len() as u64);
        // Before the check, or a collection could delete it in between.
        self.lease.protect(digest);
        if self.is_stored(digest, size)? {
            self.note_reused(size);
            return Ok(digest);
        }
        let mut writer = self.staging.stage(bytes.len() as u64);
        writer.append(bytes)?;
        self.add_blob(writer.finish()?)
    }

    /// Adds a recipe whose blobs were added or are stored.
    pub fn add_recipe(&mut self, recipe: Recipe) {
        self.lease.protect(recipe.file());
        self.lease.protect_all(recipe.digests());
        self.recipes.insert(recipe.file(), recipe);
    }

    /// Makes everything durable and visible, the tag last. A failure before the tag is written leaves at
    /// most blobs that no tag needs, which the next collection deletes.
    ///
    /// # Errors
    /// [`StoreError::Io`]; [`StoreError::MissingBlob`] or [`StoreError::BlobSize`] if the model would be
    /// incomplete; [`StoreError::Pinned`] and [`StoreError::NameOfAnother`] if another model has the name.
    pub fn commit(
        self,
        reference: &Reference,
        manifest: &Manifest,
        origin: Option<&str>,
    ) -> Result<Committed, StoreError> {
        self.commit_if(reference, manifest, origin, |_present| Ok(()))
    }

    /// Like [`Self::commit`], unless `allowed` refuses. It gets the tag that would be replaced, and no tag
    /// changes between its call and the commit.
    pub fn commit_if<E: From<StoreError>>(
        self,
        reference: &Reference,
        manifest: &Manifest,
        origin: Option<&str>,
        allowed: impl FnOnce(Option<&Reference>) -> Result<(), E>,
    ) -> Result<Committed, E> {
        // Before any lock is taken, since freeing space may evict models.
        let origin = origin
            .map(|origin| OriginRecord::new(&self.staging, origin, self.versions.clone()))
            .transpose()?;
        let reserve = |length| self.staging.reserve_space(length, || Ok(()));
        let tag = reserve(manifest.raw().len() as u64)?;
        let history = reserve(self.store.history_length(reference)?)?;
        self.commit_records(reference, manifest, origin, Some(NameSpace { tag, history }), allowed)
    }

    /// Like [`Self::commit_if`], but reserves no space for the manifest: for a model that is restored from the
    /// trash, where the removal of the record frees as much.
    pub fn restore_if<E: From<StoreError>>(
        self,
        reference: &Reference,
        manifest: &Manifest,
        allowed: impl FnOnce(Option<&Reference>) -> Result<(), E>,
    ) -> Result<Committed, E> {
        self.commit_records(reference, manifest, None, None, allowed)
    }

    fn commit_records<E: From<StoreError>>(
        mut self,
        reference: &Reference,
        manifest: &Manifest,
        origin: Option<OriginRecord>,
        space: Option<NameSpace>,
        allowed: impl FnOnce(Option<&Reference>) -> Result<(), E>,
    ) -> Result<Committed, E> {
        // Content is durable before names: a name that survives a crash without its content is a torn blob.
        self.publish_blobs()?;
        self.record_borrowed(manifest)?;
        self.publish_recipes()?;
        self.store.end_reservation(self.staging.transaction());
        self.claim_quota(&manifest.digests())?;
        let borrowed = self.borrowed(manifest)?;
        self.lease.protect(manifest.digest());
        self.lease.protect_all(manifest.digests());
        let store = Arc::clone(&self.store);
        // Before the lock, because a look-up in a lower store may take long.
        let source = origin.as_ref().map(|origin| origin.text().to_owned());
        let source = source.or_else(|| store.origin(manifest.digest()));
        let _tags = store.lock_tags();
        self.check_renamed(manifest)?;
        // A tag whose name changes only in upper and lower case is not another model that has the name.
        let stored = store.stored_case(reference)?.filter(|tag| Some(tag) != self.renamed.as_ref());
        allowed(stored.as_ref())?;
        let displaced = stored.as_ref().map(|tag| self.displaced(tag, manifest)).transpose()?.flatten();
        let tag_changed = stored.is_none() || displaced.is_some() || self.renamed.is_some();
        self.check_complete(manifest, &borrowed)?;
        let temporary = self.staging.directory().join("tag");
        let (tag, history) = space.map(|space| (space.tag, space.history)).unzip();
        if let Some(origin) = origin {
            store.write_origin(&temporary, manifest.digest(), origin)?;
        }
        // Before the tag: a record of a change that has not happened is recognised, a missing one is not.
        self.record(stored.as_ref(), reference, (manifest, source), &temporary, history)?;
        // The commit point: before it the model does not exist, after it the model is complete.
        let target = stored.as_ref().unwrap_or(reference);
        store.write_tag(&temporary, target, manifest, tag)?;
        self.is_committed = true;
        let is_new = stored.is_none() && self.renamed.is_none() && self.actor.verb != Verb::Undelete;
        store.settle_quota(self.staging.transaction(), target, manifest, is_new);
        if let Some(renamed) = &self.renamed {
            store.finish_rename(renamed, target, self.actor)?;
        }
        // From now on the tag protects the model.
        self.lease.release();
        store.forget_partials(manifest.digests().into_iter().chain(self.partials.iter().copied()));
        let new_blob_count = self.new.len() as u64;
        let (new_bytes, reused_bytes) = (self.new_bytes, self.reused_bytes);
        Ok(Committed { new_bytes, new_blob_count, reused_bytes, displaced, tag_changed })
    }

    /// Records in the history of the name that it gets this manifest.
    fn record(
        &self,
        stored: Option<&Reference>,
        reference: &Reference,
        (manifest, origin): (&Manifest, Option<String>),
        temporary: &Path,
        reservation: Option<Reservation>,
    ) -> Result<(), StoreError> {
        let renames_case = self.renamed.as_ref().is_some_and(|renamed| renamed.same_model(reference));
        let previous = stored.or(self.renamed.as_ref().filter(|_| renames_case));
        let change = NameChange {
            actor: self.actor,
            digest: manifest.digest(),
            previous: previous.map(|tag| self.store.tagged_digest(tag)).transpose()?.flatten(),
            renamed: self.renamed.as_ref(),
            origin,
            account: self.account,
        };
        self.store.record_change(reference, &change, temporary, reservation)
    }

    /// The tag that is renamed must not have changed since the model was read.
    fn check_renamed(&self, manifest: &Manifest) -> Result<(), StoreError> {
        match &self.renamed {
            Some(tag) if self.store.raw_manifest(tag)? != manifest.raw() => {
                Err(StoreError::NoSuchModel { name: tag.short(), similar: Vec::new() })
            }
            _ => Ok(()),
        }
    }

    /// The model that loses its tag to `manifest`, if it is another one. The caller has locked the tags, so the pin
    /// cannot change before the tag does.
    fn displaced(&self, tag: &Reference, manifest: &Manifest) -> Result<Option<Displaced>, StoreError> {
        let raw = match self.store.raw_manifest(tag) {
            Err(StoreError::NoSuchModel { .. }) => return Ok(None),
            raw => raw?,
        };
        if raw == manifest.raw() {
            return Ok(None);
        }
        if self.store.is_pinned(tag) && !self.moves_pinned {
            return Err(StoreError::Pinned { name: tag.short() });
        }
        let account = self.store.account_of(tag, Digest::of(&raw)).filter(|_| !self.moves_names_of_others);
        if let Some(Account { uid, .. }) = account.filter(|account| account.uid != self.actor.uid) {
            return Err(StoreError::NameOfAnother { name: tag.short(), uid });
        }
        Ok(Some(Displaced { reference: tag.clone(), raw_manifest: raw }))
    }

    /// The commit records these versions with the origin.
    pub fn note_versions(&mut self, versions: impl IntoIterator<Item = FileVersion>) {
        self.versions.extend(versions);
    }

    /// The commit deletes what is left in `partial/` under this name.
    pub fn note_partial(&mut self, file: Digest) {
        self.partials.insert(file);
    }

    /// Makes what was added so far durable and visible before the commit: one file of a model whose
    /// other files follow. Without a commit it is collected, unless `partial/` has data of that file.
    pub fn publish(&mut self) -> Result<(), StoreError> {
        self.publish_blobs()?;
        self.publish_recipes()?;
        self.published_recipes.extend(std::mem::take(&mut self.recipes).into_keys());
        Ok(())
    }

    /// Makes only the blobs durable and visible, for a repair of a model that has a tag already. Recipes
    /// are not committed.
    pub fn commit_blobs(mut self) -> Result<(), StoreError> {
        self.publish_blobs()?;
        self.is_committed = true;
        // Models that have tags already may keep them.
        self.store.note_charges_changed();
        Ok(())
    }

    /// Syncs the directory even if every blob was stored already: the transaction that published them may
    /// not have synced it yet.
    fn publish_blobs(&mut self) -> Result<(), StoreError> {
        self.publisher.wait()?;
        self.staging.publish(self.group.take())?;
        self.store.disk().sync_dir(Path::new(layout::BLOBS))
    }

    fn publish_recipes(&self) -> Result<(), StoreError> {
        let (store, temporary) = (&self.store, self.staging.directory().join("recipe"));
        let _change = store.begin_change();
        for (file, recipe) in &self.recipes {
            let (node, target, json) = (Node::Recipe(*file), layout::recipe(*file), recipe.to_json());
            // The same recipe takes no more space. Its content was durable before it got its name.
            if store.root.read_limited(&target, json.len() as u64)?.is_some_and(|stored| stored == json) {
                continue;
            }
            let mut reservation = self.staging.reserve_space(json.len() as u64, || Ok(()))?;
            let replaced = node.bytes_on_disk(store)?.unwrap_or_default();
            store.disk().replace_file(&temporary, &target, &json, 0o444)?;
            store.note_added(node, replaced, &mut reservation)?;
            store.note_published(self.staging.transaction(), node);
        }
        store.disk().sync_dir(Path::new(layout::RECIPES))
    }

    fn check_complete(&self, manifest: &Manifest, borrowed: &Borrowed) -> Result<(), StoreError> {
        let mut checked = BTreeSet::new();
        for file in manifest.files().filter(|file| checked.insert(file.digest)) {
            self.store.drop_useless_recipe(file, borrowed)?;
            if let Some(error) = self.store.check_own_file(file, borrowed)? {
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Drop for Ingest {
    fn drop(&mut self) {
        // The transaction has failed already, or its result is not needed any more.
        let _ = self.publisher.wait();
        if !self.is_committed {
            let recipes = self.recipes.keys().chain(&self.published_recipes);
            self.store.condemn(self.new.iter().chain(recipes).copied());
        }
    }
}
