//! The stored data that a pull may use in place of a download.
//!
//! A manifest, or a header of a web server, can name the digest of any stored file, and a server can send samples that
//! agree with tensors that its owner does not have. So a digest or a sample does not prove that the user may have the
//! stored data. If a rule may deny the user something, stored bytes (whole files, headers, tensors, unfinished downloads)
//! are used only if they belong to a model that the user may read. Anything else is downloaded, which proves that the user
//! has a source for it. The store still keeps one copy.
//!
//! If no rule applies to the user, nothing is looked up.

use std::collections::{BTreeMap, BTreeSet};
use std::io::Read as _;
use std::sync::{Arc, PoisonError};

use blobd_registry::RemoteFile;
use blobd_store::{BytesFrom, PartialFile, Store};
use blobd_store_format::descriptor::Descriptor;
use blobd_store_format::digest::Digest;
use blobd_store_format::git_id::GitId;
use blobd_store_format::reference::Reference;
use blobd_store_format::source::PullSource;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use super::MAX_GIT_BYTES;
use crate::ops::OpError;
use crate::ops::policy::CallerPolicy;

/// The stored data that the user of one pull may have. Each model is decided about once.
#[derive(Debug)]
pub(super) struct Reusable<'p> {
    store: &'p Arc<Store>,
    policy: &'p CallerPolicy,
    known: Mutex<Known>,
}

#[derive(Debug, Default)]
struct Known {
    /// Whether the user may read a model, by its name and manifest.
    models: BTreeMap<(Reference, Digest), bool>,
    /// Files of models that the user may read.
    files: BTreeSet<Digest>,
    /// Stored files that belonged to no such model when they were looked up.
    others: BTreeSet<Digest>,
}

#[derive(Debug)]
pub(super) struct Download {
    /// The file, with a partial download that other users do not share if theirs must not be continued.
    pub(super) file: RemoteFile,
    /// Whether its partial download is continued.
    pub(super) continues: bool,
}

impl<'p> Reusable<'p> {
    pub(super) fn new(store: &'p Arc<Store>, policy: &'p CallerPolicy) -> Self {
        Self { store, policy, known: Mutex::default() }
    }

    /// Whether the user may read a stored model. If that cannot be decided, it counts as denied.
    pub(super) fn may_read(&self, reference: &Reference, manifest: Digest) -> bool {
        self.decide(reference, manifest).unwrap_or_else(|error| {
            tracing::debug!("{}: its data is not reused: {error}", reference.short());
            false
        })
    }

    /// Whether a file is stored, and in a model that the user may read.
    pub(super) fn has_file(&self, file: &Descriptor) -> Result<bool, OpError> {
        let is_stored =
            self.store.content().stored_file_now(file)?.is_some() && self.store.content().has_file(file)?;
        Ok(is_stored && self.allows_stored(file.digest)?)
    }

    /// Stored files that have the names which git gives to some of these files. Their own digests are not known before their
    /// content is, so each stored file of such a size is hashed.
    pub(super) fn git_files(&self, wanted: &[RemoteFile]) -> Result<Vec<(GitId, Digest)>, OpError> {
        /// The small files of a repository have far less in common with so many others.
        const MAX_HASHED_BYTES: u64 = 64 << 20;
        let content = self.store.content();
        let mut sizes = BTreeSet::new();
        for file in wanted.iter().filter(|file| file.git_id().is_some() && file.size() <= MAX_GIT_BYTES) {
            if content.may_have_blob_of(file.size())? {
                sizes.insert(file.size());
            }
        }
        let (mut found, mut seen, mut hashed) = (Vec::new(), BTreeSet::new(), 0_u64);
        if sizes.is_empty() {
            return Ok(found);
        }
        for tag in self.store.names().all_summaries()? {
            let Ok(manifest) = &tag.manifest else { continue };
            for digest in manifest.files.iter().filter(|digest| seen.insert(**digest)) {
                let Some(size) = content.blob_size(*digest)?.filter(|size| sizes.contains(size)) else {
                    continue;
                };
                hashed = hashed.saturating_add(size);
                if hashed > MAX_HASHED_BYTES {
                    return Ok(found);
                }
                found.extend(self.git_id_of(*digest, size).map(|id| (id, *digest)));
            }
        }
        Ok(found)
    }

    /// `None` for a blob that cannot be read, or is damaged: then the file is downloaded.
    fn git_id_of(&self, blob: Digest, size: u64) -> Option<GitId> {
        let mut bytes = Vec::new();
        let file = self.store.content().open_blob(blob, size).ok()?;
        file.take(size).read_to_end(&mut bytes).ok()?;
        (Digest::of(&bytes) == blob).then(|| GitId::of(&bytes))
    }

    /// Whether a stored file is one of a model that the user may read.
    pub(super) fn allows_stored(&self, file: Digest) -> Result<bool, OpError> {
        if !self.policy.is_restricted() {
            return Ok(true);
        }
        {
            let known = self.known();
            if known.files.contains(&file) || known.others.contains(&file) {
                return Ok(known.files.contains(&file));
            }
        }
        self.find_model_with(file)
    }

    /// Forgets that no readable model has a file, because another pull may have completed one.
    pub(super) fn look_again(&self, file: &RemoteFile) {
        let digest = file.descriptor().or_else(|| file.unchanged()).map(|file| file.digest);
        if let Some(digest) = digest {
            self.known().others.remove(&digest);
        }
    }

    /// How the file is downloaded for the user `uid` from `source`.
    pub(super) fn download(
        &self,
        file: &RemoteFile,
        (source, uid): (&PullSource, u32),
    ) -> Result<Download, OpError> {
        let user = (source, uid);
        if self.may_continue(file, user)? {
            return Ok(Download { file: file.clone(), continues: true });
        }
        let file = file.for_user(uid);
        let continues = self.may_continue(&file, user)?;
        Ok(Download { file, continues })
    }

    /// Whether the user may have the received data of a download: each part was received by a pull of this user or from the
    /// same source, or belongs to a model that the user may read.
    pub(super) fn may_continue(
        &self,
        file: &RemoteFile,
        (source, uid): (&PullSource, u32),
    ) -> Result<bool, OpError> {
        // Without a digest, the download is named by the address that the file comes from.
        if !self.policy.is_restricted() || file.digest().is_none() {
            return Ok(true);
        }
        let about = self.store.content().download_about(file.identity());
        if let Some(bytes_from) = about.and_then(|about| about.bytes_from) {
            let source = source.to_string();
            let mut may_have = true;
            for origin in bytes_from {
                may_have &= match origin {
                    BytesFrom::Pull { source: other, uid: by } => by == uid || other == source,
                    BytesFrom::Model(manifest) => self.may_read_manifest(manifest)?,
                };
            }
            if may_have {
                return Ok(true);
            }
        }
        let partial = PartialFile::open(self.store, file.identity(), file.size())?;
        Ok(partial.claimed_bytes() == 0)
    }

    fn may_read_manifest(&self, manifest: Digest) -> Result<bool, OpError> {
        let names = self.store.names().names_of(manifest)?;
        Ok(names.iter().any(|name| self.may_read(name, manifest)))
    }

    fn find_model_with(&self, file: Digest) -> Result<bool, OpError> {
        for tag in self.store.names().all_summaries()? {
            let Ok(manifest) = &tag.manifest else { continue };
            if !manifest.files.contains(&file) {
                continue;
            }
            if let Err(OpError::Damaged { digest, .. }) = self.decide(&tag.reference, manifest.digest) {
                // The downloaded one replaces it.
                self.store.content().quarantine_if_damaged(digest)?;
            }
            if self.may_read(&tag.reference, manifest.digest) {
                self.known().files.extend(manifest.files.iter().copied());
                return Ok(true);
            }
        }
        self.known().others.insert(file);
        Ok(false)
    }

    fn decide(&self, reference: &Reference, manifest: Digest) -> Result<bool, OpError> {
        if !self.policy.is_restricted() {
            return Ok(true);
        }
        let model = (reference.clone(), manifest);
        if let Some(decided) = self.known().models.get(&model) {
            return Ok(*decided);
        }
        let may_read = self.policy.may_read(self.store, reference, manifest)?;
        self.known().models.insert(model, may_read);
        Ok(may_read)
    }

    fn known(&self) -> MutexGuard<'_, Known> {
        // Each change is complete before anything can panic.
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests;
