//! Ingests: the transactions that write models into the store.
//!
//! The order of the steps in [`Ingest::commit`] guarantees that after a crash at any moment a file under its final name
//! is complete and has its digest, and a tag points only at a complete model. `docs/STORE-FORMAT.md` lists what fails,
//! and on which file system, if a step is omitted or moved.

use std::collections::{BTreeMap, BTreeSet};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use tracing::Span;

use crate::assembler::BlobSink;
use crate::leases::Lease;
use crate::ledger::charge_limit::{Account, ChargeLimit};
use crate::liveness::EvictionObserver;
use crate::names::name_rule::NameRule;
use crate::names::origins::{FileVersion, RecordedFacts};
use crate::names::records::{Actor, NameOrigin, Verb};
use crate::node::Node;
use crate::seal::StagedBlob;
use crate::staging::Staging;
use crate::{Store, StoreError};

mod borrowed;
mod commit;
mod joined;

pub use commit::{Committed, NewName};
pub use joined::{BlobRange, Joined};

/// One transaction: blobs and recipes are staged, then committed together with the tag that needs them. Without a
/// commit, only what was already published remains, and is queued for deletion ([`crate::Liveness::condemn`]).
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
    /// How many blobs were added, and how many will be.
    added_blobs: u64,
    expected_blobs: u64,
    /// Names in `partial/` that are not needed after the commit.
    partials: BTreeSet<Digest>,
    rule: NameRule,
    name_origin: Option<NameOrigin>,
    versions: Vec<FileVersion>,
    facts: RecordedFacts,
    actor: Actor,
    renamed: Option<Reference>,
    /// Who is charged for the name, if not the actor.
    account: Option<Account>,
    keeps_own_copies: bool,
    own_copies: BTreeSet<Digest>,
    is_committed: bool,
}

/// Blobs that are published together: one group of a large file while the next is written, to bound dirty memory.
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
            added_blobs: 0,
            expected_blobs: 0,
            partials: BTreeSet::new(),
            rule: NameRule::default(),
            name_origin: None,
            versions: Vec::new(),
            facts: RecordedFacts::default(),
            actor: Actor::daemon(Verb::Import),
            renamed: None,
            account: None,
            keeps_own_copies: false,
            own_copies: BTreeSet::new(),
            is_committed: false,
        })
    }

    /// Sets which names that other models have the commit may take. The default is none.
    pub fn may_take(mut self, rule: NameRule) -> Self {
        self.rule = rule;
        self
    }

    /// Has the history record this origin instead of what the commit finds, as for a model from the trash.
    pub fn with_name_origin(mut self, origin: NameOrigin) -> Self {
        self.name_origin = Some(origin);
        self
    }

    /// Sets the user for the name's history and for quotas. The default is the daemon's own user.
    pub fn on_behalf_of(mut self, actor: Actor) -> Self {
        self.actor = actor;
        self.store.ledger.set_user_of_transaction(self.staging.transaction(), actor.uid);
        self
    }

    /// Refuses to take more space when the limits of the user's groups are reached.
    pub fn within_pools(self) -> Self {
        let limits = self.store.ledger.pool_limits_of(self.actor.uid);
        self.store.ledger.add_limits_of_transaction(self.staging.transaction(), limits);
        self
    }

    /// Refuses to take more space when this many bytes are charged to the user.
    pub fn within_quota(self, limit_bytes: Option<u64>) -> Self {
        let limit = limit_bytes.map(|bytes| ChargeLimit::for_user(self.actor.uid, bytes));
        self.store.ledger.add_limits_of_transaction(self.staging.transaction(), limit);
        // The manifest and the history of the name have a block each, or little more.
        self.expect_record(1);
        self.expect_record(1);
        self
    }

    /// Reserves `bytes` of the user's quota until the transaction ends, beside what it has taken already. Reserves
    /// nothing if that exceeds a limit.
    pub fn reserve_quota(&self, bytes: u64) -> Result<(), StoreError> {
        self.store.liveness.reserve_of_quota(self.staging.transaction(), bytes)
    }

    /// Like [`Self::reserve_quota`], but deletes nothing from the trash for it: the caller can do with less.
    pub fn reserve_free_quota(&self, bytes: u64) -> Result<(), StoreError> {
        self.store.liveness.reserve_free_quota(self.staging.transaction(), bytes)
    }

    /// Reserves quota for the bytes of these files that no name pays for yet. The commit does so for all files.
    pub fn claim_quota(&self, files: &BTreeSet<Digest>) -> Result<(), StoreError> {
        self.store.liveness.claim_of_quota(self.staging.transaction(), files, None)
    }

    /// What the user's own unfinished download of a file has on disk, which is charged to the user already.
    pub fn own_download_bytes(&self, file: Digest) -> Result<u64, StoreError> {
        self.store.liveness.own_download_bytes(self.actor.uid, file)
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

    pub const fn store(&self) -> &Arc<Store> {
        &self.store
    }

    pub const fn lease(&self) -> &Lease {
        &self.lease
    }

    pub fn staging(&self) -> Staging {
        self.staging.clone()
    }

    /// Has later reservations of the user's quota include a small file that is written at the end, such as a recipe.
    pub fn expect_record(&self, length: u64) {
        self.store
            .ledger
            .expect_record(self.staging.transaction(), self.store.ledger.space().on_disk(length));
    }

    /// Reserves quota for those of these lengths that no stored blob has.
    pub fn reserve_certainly_new(&self, sizes: impl Iterator<Item = u64>) -> Result<(), StoreError> {
        self.reserve_quota(self.store.content.certainly_new(sizes)?)
    }

    /// Has disk space promised for files of these lengths, before any of them is written. If they do not all fit, many
    /// may be stored already, such as most tensors of a similar model. Then only space for those whose length no stored
    /// blob has is promised, and the others take space one by one.
    pub fn admit(&self, sizes: impl Iterator<Item = u64> + Clone) -> Result<(), StoreError> {
        let all = self.sum_on_disk(sizes.clone());
        match self.reserve_free_quota(all) {
            Err(StoreError::OverQuota { .. }) => self.reserve_certainly_new(sizes.clone())?,
            reserved => reserved?,
        }
        if self.store.ledger.shortage(all) == 0 {
            return self.staging.promise(all);
        }
        self.staging.promise(self.store.content.certainly_new(sizes)?)
    }

    /// Refuses files of these lengths, before any of them is read, if they cannot fit although they share all that the
    /// store has, and although all that may be evicted is. Of a file that is there more than once, each counts.
    pub fn refuse_hopeless(&self, sizes: impl Iterator<Item = u64>) -> Result<(), StoreError> {
        let all = self.sum_on_disk(sizes);
        // What lower stores have is not known.
        let shared = if self.store.content.lower.is_empty() { self.store.ledger.used_bytes() } else { all };
        match self.store.ledger.shortage(all) > shared {
            true => self.store.ledger.check_fits(all),
            false => Ok(()),
        }
    }

    /// Has disk space promised for files of these lengths if all fit now. Evicts nothing.
    pub fn admit_now(&self, sizes: impl Iterator<Item = u64>) -> Result<bool, StoreError> {
        let all = self.sum_on_disk(sizes);
        match self.reserve_free_quota(all) {
            Err(StoreError::OverQuota { .. }) => Ok(false),
            reserved => reserved.map(|()| self.staging.promise_now(all)),
        }
    }

    /// Has disk space promised for files of these lengths, if necessary by evicting models.
    pub fn admit_all(&self, sizes: impl Iterator<Item = u64>) -> Result<(), StoreError> {
        let all = self.sum_on_disk(sizes);
        self.reserve_quota(all)?;
        self.staging.promise(all)
    }

    fn sum_on_disk(&self, sizes: impl Iterator<Item = u64>) -> u64 {
        sizes.map(|size| self.store.ledger.space().on_disk(size)).fold(0, u64::saturating_add)
    }

    /// Counts bytes of blobs that are stored and were not staged.
    pub const fn note_reused(&mut self, bytes: u64) {
        self.reused_bytes = self.reused_bytes.saturating_add(bytes);
    }

    /// Announces that this many blobs more are added, for whoever reports how far the transaction is.
    pub const fn expect_blobs(&mut self, count: u64) {
        self.expected_blobs = self.expected_blobs.saturating_add(count);
    }

    fn note_added(&mut self) {
        self.added_blobs = self.added_blobs.saturating_add(1);
        let expected = self.expected_blobs.max(self.added_blobs);
        self.staging.observer().into_iter().for_each(|it| it.blob_is_stored(self.added_blobs, expected));
    }

    /// Adds a finished blob. A duplicate is removed immediately, so that it takes no disk space.
    pub fn add_blob(&mut self, blob: StagedBlob) -> Result<Digest, StoreError> {
        let digest = blob.digest;
        self.note_added();
        if self.reuses(digest, blob.size)? {
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
        if self.has(digest, size)? {
            return Ok(digest);
        }
        let mut writer = self.staging.stage(bytes.len() as u64);
        writer.append(bytes)?;
        self.add_blob(writer.finish()?)
    }

    /// Leases a blob, and counts it as reused if it was added or is stored.
    fn reuses(&mut self, digest: Digest, size: u64) -> Result<bool, StoreError> {
        // Before the check, or a collection could delete it in between.
        self.lease.protect(digest);
        let is_known = self.new.contains(&digest) || self.is_stored(digest, size)?;
        self.note_reused(if is_known { size } else { 0 });
        Ok(is_known)
    }

    /// Adds a recipe whose blobs were added or are stored.
    pub fn add_recipe(&mut self, recipe: Recipe) {
        self.lease.protect(recipe.file());
        self.lease.protect_all(recipe.digests());
        self.recipes.insert(recipe.file(), recipe);
    }

    /// The recipe of a file that was added and is not published.
    pub fn added_recipe(&self, file: Digest) -> Option<&Recipe> {
        self.recipes.get(&file)
    }

    /// The commit records these versions with the origin.
    pub fn note_versions(&mut self, versions: impl IntoIterator<Item = FileVersion>) {
        self.versions.extend(versions);
    }

    /// The commit records what the model is with the origin.
    pub fn note_facts(&mut self, facts: RecordedFacts) {
        self.facts = facts;
    }

    /// The commit deletes what is left in `partial/` under this name.
    pub fn note_partial(&mut self, file: Digest) {
        self.partials.insert(file);
    }

    /// Makes what was added so far durable and visible before the commit: one file of a model whose other files follow.
    /// Without a commit it is collected, unless `partial/` has data of that file.
    pub fn publish(&mut self) -> Result<(), StoreError> {
        self.publish_blobs()?;
        self.publish_recipes()
    }

    /// Makes only the blobs durable and visible, for a repair of a model that has a tag already.
    pub fn commit_blobs(mut self) -> Result<(), StoreError> {
        self.publish_blobs()?;
        self.is_committed = true;
        // Models that have tags already may keep them.
        self.store.ledger.note_charges_changed();
        Ok(())
    }

    /// Syncs the directory even if every blob was there: the transaction that published them may not have yet.
    fn publish_blobs(&mut self) -> Result<(), StoreError> {
        self.publisher.wait()?;
        self.staging.publish(self.group.take())?;
        self.store.content.disk.sync_dir(Path::new(layout::BLOBS))
    }

    /// Drops each recipe when it is written: the commit reads those of the model, and one may take 30 MiB.
    fn publish_recipes(&mut self) -> Result<(), StoreError> {
        let (store, temporary) = (&self.store, self.staging.directory().join("recipe"));
        let _change = store.content.index().begin_change();
        while let Some((file, recipe)) = self.recipes.pop_first() {
            self.published_recipes.insert(file);
            let (node, target, json) = (Node::Recipe(file), layout::recipe(file), recipe.to_json());
            // The same recipe takes no more space, and one that an earlier blobd wrote in another form is not
            // rewritten. Its content was durable before it got its name.
            let longest = (json.len() as u64).saturating_mul(LONGEST_EARLIER_FORM);
            let stored = store.content.root.read_limited(&target, longest)?;
            if stored
                .is_some_and(|stored| stored == json || Recipe::parse(&stored).is_ok_and(|it| it == recipe))
            {
                continue;
            }
            drop(recipe);
            let mut reservation = self.staging.reserve_space(json.len() as u64, || Ok(()))?;
            let replaced = store.content.bytes_on_disk(node)?.unwrap_or_default();
            store.content.disk.replace_file(&temporary, &target, &json, 0o444)?;
            store.ledger.note_added(node, replaced, &mut reservation)?;
            store.ledger.note_published(self.staging.transaction(), node);
        }
        store.content.disk.sync_dir(Path::new(layout::RECIPES))
    }
}

/// How many times longer the form of an earlier version can be: its shortest pieces, of 31 bytes in the current form, had
/// 104, because they had digests.
const LONGEST_EARLIER_FORM: u64 = 4;

impl BlobSink for Ingest {
    fn has(&mut self, digest: Digest, size: u64) -> Result<bool, StoreError> {
        let is_known = self.reuses(digest, size)?;
        if is_known {
            self.staging.pass_over(size);
            self.note_added();
        }
        Ok(is_known)
    }

    fn add(&mut self, blob: StagedBlob) -> Result<(), StoreError> {
        self.add_blob(blob).map(drop)
    }
}

impl Drop for Ingest {
    fn drop(&mut self) {
        // The transaction has failed already, or its result is not needed any more.
        let _ = self.publisher.wait();
        if !self.is_committed {
            let recipes = self.recipes.keys().chain(&self.published_recipes);
            self.store.liveness.condemn(self.new.iter().chain(recipes).copied());
        }
    }
}

#[cfg(test)]
mod tests;
