//! The commit of an ingest: makes its content durable and visible, and gives the model its name.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use blobd_store_format::derived_name::DerivedName;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::Ingest;
use crate::content::stored_files::Borrowed;
use crate::ledger::accounting::Reservation;
use crate::ledger::charge_limit::Account;
use crate::liveness::EvictionObserver;
use crate::names::history::NameChange;
use crate::names::origins::OriginRecord;
use crate::names::records::{NameOrigin, Verb};
use crate::{Displaced, StoreError};

#[derive(Clone, Copy, Debug)]
pub enum NewName<'n> {
    /// The user has named it.
    Given(&'n Reference),
    /// The user has named none: the first name that has this model or follows its source, otherwise the first free one.
    Derived(&'n DerivedName),
}

impl<'n> NewName<'n> {
    fn first(self) -> &'n Reference {
        match self {
            Self::Given(name) => name,
            Self::Derived(names) => names.first(),
        }
    }

    fn others(self) -> &'n [Reference] {
        match self {
            Self::Given(_) => &[],
            Self::Derived(names) => names.others(),
        }
    }

    fn all(self) -> impl Iterator<Item = &'n Reference> {
        std::iter::once(self.first()).chain(self.others())
    }
}

/// A name that a commit may give, and what has it now.
struct Candidate<'n> {
    name: &'n Reference,
    /// The tag of this store that has the name, perhaps in other upper and lower case.
    stored: Option<Reference>,
    /// The tag that has the name and its manifest: the stored one, or that of a lower store.
    present: Option<(Reference, Digest)>,
}

/// Disk space that is reserved for the manifest and for the history of its name.
#[derive(Default)]
struct NameSpace {
    tag: Option<Reservation>,
    history: Option<Reservation>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Committed {
    /// The name that the model got, as it is stored; `None` only for the default value.
    pub name: Option<Reference>,
    /// Bytes of the blobs that this transaction published. If two transactions stage the same blob at the same time, it
    /// is new for the one that publishes it, and reused by the other.
    pub new_bytes: u64,
    pub new_blob_count: u64,
    /// Bytes of blobs that were stored already, or were published by another transaction in the meantime.
    pub reused_bytes: u64,
    /// The model that had the name before, if it was another one.
    pub displaced: Option<Displaced>,
    /// Whether the name is new, or meant another model before.
    pub tag_changed: bool,
}

impl Committed {
    /// Whether the store is as it was before: the name meant this model, and no blob was written.
    pub const fn is_unchanged(&self) -> bool {
        !self.tag_changed && self.new_blob_count == 0
    }
}

impl Ingest {
    /// Makes everything durable and visible, the tag last. A failure before the tag is written leaves at most blobs
    /// that no tag needs, which the next collection deletes.
    ///
    /// # Errors
    /// [`StoreError::Io`]; [`StoreError::MissingBlob`] or [`StoreError::BlobSize`] if the model would be incomplete;
    /// those of [`crate::Names::check_name`] if another model has the name.
    pub fn commit(
        self,
        reference: &Reference,
        manifest: &Manifest,
        origin: Option<&str>,
    ) -> Result<Committed, StoreError> {
        self.commit_as(NewName::Given(reference), manifest, origin)
    }

    /// Like [`Self::commit`], with one of several names that the user has not chosen.
    pub fn commit_as(
        self,
        name: NewName<'_>,
        manifest: &Manifest,
        origin: Option<&str>,
    ) -> Result<Committed, StoreError> {
        self.commit_if(name, manifest, origin, |_present| Ok(()))
    }

    /// Like [`Self::commit_as`], unless `allowed` refuses. It gets the tag to be replaced, which stays as it is.
    pub fn commit_if<E: From<StoreError>>(
        self,
        name: NewName<'_>,
        manifest: &Manifest,
        origin: Option<&str>,
        allowed: impl FnOnce(Option<&Reference>) -> Result<(), E>,
    ) -> Result<Committed, E> {
        // Before any lock is taken, since freeing space may evict models.
        let origin = origin
            .map(|origin| {
                let reserve = |length| self.staging.reserve_record(length);
                OriginRecord::new(origin, self.versions.clone(), self.facts.clone(), reserve)
            })
            .transpose()?;
        let tag = self.reserve_record(manifest.raw().len() as u64)?;
        let name_origin = self.new_name_origin(origin.as_ref(), manifest);
        let histories = name.all().map(|name| self.store.names.history_length(name, &name_origin));
        let longest = histories.collect::<Result<Vec<_>, _>>()?.into_iter().max().unwrap_or_default();
        let history = self.reserve_record(longest)?;
        let space = NameSpace { tag, history };
        self.commit_records(name, manifest, (origin, name_origin), space, allowed)
    }

    /// Like [`Self::commit`] for a model from the trash: reserves nothing, since removing the record frees as much.
    pub fn restore(self, reference: &Reference, manifest: &Manifest) -> Result<Committed, StoreError> {
        self.restore_if(reference, manifest, |_present| Ok(()))
    }

    /// Like [`Self::restore`], unless `allowed` refuses, as in [`Self::commit_if`].
    pub fn restore_if<E: From<StoreError>>(
        self,
        reference: &Reference,
        manifest: &Manifest,
        allowed: impl FnOnce(Option<&Reference>) -> Result<(), E>,
    ) -> Result<Committed, E> {
        let origin = (None, self.new_name_origin(None, manifest));
        self.commit_records(NewName::Given(reference), manifest, origin, NameSpace::default(), allowed)
    }

    /// Reserves space for a record of the name. A transaction that stores no data may use what the store keeps free, so
    /// that names can be changed on a full disk; `None` then.
    fn reserve_record(&self, length: u64) -> Result<Option<Reservation>, StoreError> {
        match self.staging.reserve_space(length, || Ok(())) {
            Err(StoreError::NoSpace { .. })
                if self.new.is_empty()
                    && self.recipes.is_empty()
                    && self.store.ledger.has_space_for_record(length) =>
            {
                Ok(None)
            }
            reserved => reserved.map(Some),
        }
    }

    fn commit_records<E: From<StoreError>>(
        mut self,
        name: NewName<'_>,
        manifest: &Manifest,
        (origin, name_origin): (Option<OriginRecord>, NameOrigin),
        space: NameSpace,
        allowed: impl FnOnce(Option<&Reference>) -> Result<(), E>,
    ) -> Result<Committed, E> {
        // Content is durable before names: a name that survives a crash without its content is a torn blob.
        self.publish_blobs()?;
        self.record_borrowed(manifest)?;
        self.publish_recipes()?;
        self.staging.observer().into_iter().for_each(EvictionObserver::content_is_durable);
        self.store.ledger.end_reservation(self.staging.transaction());
        let replaced = self.replaced_account(name, manifest)?;
        self.store.liveness.claim_of_quota(self.staging.transaction(), &manifest.digests(), replaced)?;
        let borrowed = self.borrowed(manifest)?;
        self.lease.protect(manifest.digest());
        self.lease.protect_all(manifest.digests());
        let store = Arc::clone(&self.store);
        // Before the lock, because a look-up in a lower store may take long.
        let below = name.all().map(|name| store.names.lower_name(name)).collect();
        let _tags = store.names.lock_tags();
        self.check_renamed(manifest)?;
        let Candidate { name: reference, stored, present } = self.choose(name, below, manifest)?;
        allowed(stored.as_ref())?;
        let mut displaced = self.displaced(stored.as_ref(), present, manifest)?;
        let tag_changed = stored.is_none() || displaced.is_some() || self.renamed.is_some();
        self.check_complete(manifest, &borrowed)?;
        let temporary = self.staging.directory().join("tag");
        if let Some(origin) = origin {
            store.names.write_origin(&temporary, manifest.digest(), origin)?;
        }
        if let Some(displaced) = &mut displaced {
            store.names.keep_displaced(displaced)?;
        }
        // Before the tag: a record of a change that has not happened is recognised, a missing one is not.
        self.record(stored.as_ref(), reference, (manifest, name_origin), &temporary, space.history)?;
        // The commit point: before it the model does not exist, after it the model is complete.
        let target = stored.as_ref().unwrap_or(reference);
        store.names.write_tag(&temporary, target, manifest, space.tag)?;
        self.is_committed = true;
        let is_restored = matches!(self.actor.verb, Verb::Undelete | Verb::Undo);
        let is_new = stored.is_none() && self.renamed.is_none() && !is_restored;
        store.liveness.settle_quota(self.staging.transaction(), target, manifest, is_new);
        if let Some(renamed) = &self.renamed {
            store.names.finish_rename(renamed, target, self.actor)?;
        }
        // From now on the tag protects the model.
        self.lease.release();
        store.liveness.forget_partials(manifest.digests().into_iter().chain(self.partials.iter().copied()));
        Ok(Committed { name: Some(target.clone()), displaced, tag_changed, ..self.sums() })
    }

    /// What was published, and what was stored already. Blobs that another transaction published first count as stored.
    fn sums(&self) -> Committed {
        let (duplicate_count, duplicate_bytes) = self.staging.duplicates();
        Committed {
            new_bytes: self.new_bytes.saturating_sub(duplicate_bytes),
            new_blob_count: (self.new.len() as u64).saturating_sub(duplicate_count),
            reused_bytes: self.reused_bytes.saturating_add(duplicate_bytes),
            ..Committed::default()
        }
    }

    /// The account of another user whose name gets other content: this user pays for what both versions need then.
    fn replaced_account(
        &self,
        name: NewName<'_>,
        manifest: &Manifest,
    ) -> Result<Option<Account>, StoreError> {
        let Some(stored) = self.store.names.stored_case(name.first())? else { return Ok(None) };
        let present = self.store.names.tagged_digest(&stored)?.filter(|digest| *digest != manifest.digest());
        let account = present.and_then(|digest| self.store.names.account_of(&stored, digest));
        Ok(account.filter(|account| account.uid != self.actor.uid))
    }

    /// Where the content of the name comes from: a model that is renamed keeps what it had.
    fn new_name_origin(&self, origin: Option<&OriginRecord>, manifest: &Manifest) -> NameOrigin {
        if let Some(given) = &self.name_origin {
            return given.clone();
        }
        let digest = manifest.digest();
        match (&self.renamed, origin) {
            (Some(renamed), _) => self.store.names.name_origin(renamed, digest),
            (None, Some(origin)) => NameOrigin { origin: Some(origin.text().to_owned()), source: None },
            (None, None) => NameOrigin { origin: self.store.names.origin(digest), source: None },
        }
    }

    /// The name that the model gets. The tags are locked. `below` is what lower stores have under each candidate.
    fn choose<'n>(
        &self,
        name: NewName<'n>,
        below: Vec<Option<(Reference, Digest)>>,
        manifest: &Manifest,
    ) -> Result<Candidate<'n>, StoreError> {
        let mut below = below.into_iter();
        let mut best = self.candidate(name.first(), below.next().flatten())?;
        for other in name.others() {
            if self.is_for(&best, manifest) {
                break;
            }
            let other = self.candidate(other, below.next().flatten())?;
            let is_free = best.present.is_some() && other.present.is_none() && !self.rule.replace;
            if is_free || self.is_for(&other, manifest) {
                best = other;
            }
        }
        Ok(best)
    }

    /// Whether the name has this model, or the one that this one updates.
    fn is_for(&self, candidate: &Candidate<'_>, manifest: &Manifest) -> bool {
        let is_it = |(tag, present): &(Reference, Digest)| {
            *present == manifest.digest() || self.store.names.follows(tag, *present, &self.rule)
        };
        candidate.present.as_ref().is_some_and(is_it)
    }

    fn candidate<'n>(
        &self,
        name: &'n Reference,
        below: Option<(Reference, Digest)>,
    ) -> Result<Candidate<'n>, StoreError> {
        // A tag whose name changes only in upper and lower case is not another model that has the name.
        let stored = self.store.names.stored_case(name)?.filter(|tag| Some(tag) != self.renamed.as_ref());
        let own =
            |tag: &Reference| Ok::<_, StoreError>(Some((tag.clone(), self.store.names.tagged_digest(tag)?)));
        let own = stored.as_ref().map(own).transpose()?.flatten();
        let present = own.map(|(tag, digest)| digest.map(|digest| (tag, digest)));
        Ok(Candidate { name, stored, present: present.unwrap_or(below) })
    }

    /// Records in the history of the name that it gets this manifest.
    fn record(
        &self,
        stored: Option<&Reference>,
        reference: &Reference,
        (manifest, origin): (&Manifest, NameOrigin),
        temporary: &Path,
        reservation: Option<Reservation>,
    ) -> Result<(), StoreError> {
        let renames_case = self.renamed.as_ref().is_some_and(|renamed| renamed.same_model(reference));
        let previous = stored.or(self.renamed.as_ref().filter(|_| renames_case));
        let names = self.store.names();
        let present = previous.map(|tag| names.tagged_digest(tag)).transpose()?.flatten();
        let is_update = stored.zip(present.filter(|digest| *digest != manifest.digest()));
        let change = NameChange {
            actor: self.actor,
            reference: stored,
            digest: manifest.digest(),
            previous: present,
            is_update: is_update.is_some_and(|(tag, present)| names.follows(tag, present, &self.rule)),
            renamed: self.renamed.as_ref(),
            origin,
            account: self.account,
        };
        self.store.names.record_change(reference, &change, temporary, reservation)
    }

    /// Whether the tag that is renamed has changed since the model was read: another user may have it now.
    fn check_renamed(&self, manifest: &Manifest) -> Result<(), StoreError> {
        match &self.renamed {
            Some(tag) if self.store.names.raw_manifest(tag)? != manifest.raw() => {
                Err(StoreError::NoSuchModel { name: tag.short(), similar: Vec::new() })
            }
            Some(tag) => self.store.names.check_change(tag, self.rule.user()),
            None => Ok(()),
        }
    }

    /// The model that loses its tag to `manifest`. The tags are locked, so the pin cannot change before the tag does.
    fn displaced(
        &self,
        stored: Option<&Reference>,
        present: Option<(Reference, Digest)>,
        manifest: &Manifest,
    ) -> Result<Option<Displaced>, StoreError> {
        let Some((tag, digest)) = present.filter(|(_, digest)| *digest != manifest.digest()) else {
            return Ok(None);
        };
        let Some(stored) = stored else {
            // The model of a lower store stays there; its name means another model from now on.
            return self.store.names.check_name(&tag, digest, &self.rule).map(|()| None);
        };
        let raw_manifest = self.store.names.raw_manifest(stored)?;
        let displaced = Displaced { reference: stored.clone(), raw_manifest, kept_until: None };
        // Replacing a damaged manifest loses nothing, and repairs the name.
        if self.store.names.is_pinned(stored) || displaced.manifest().is_some() {
            self.store.names.check_name(&tag, digest, &self.rule)?;
        }
        Ok(Some(displaced))
    }

    fn check_complete(&self, manifest: &Manifest, borrowed: &Borrowed) -> Result<(), StoreError> {
        let mut checked = BTreeSet::new();
        for file in manifest.files().filter(|file| checked.insert(file.digest)) {
            self.store.content.drop_useless_recipe(file, borrowed)?;
            if let Some(error) = self.store.content.check_own_file(file, borrowed)? {
                return Err(error);
            }
        }
        Ok(())
    }
}
