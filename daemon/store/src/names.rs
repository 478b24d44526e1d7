//! What names mean: tags with their histories, pins and origins, the models that they point to, and the trash.

use std::sync::Arc;
use std::sync::atomic::AtomicU64;

use blobd_store_format::digest::Digest;
use blobd_store_format::layout;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::content::Content;
use crate::leases::Lease;
use crate::ledger::Ledger;
use crate::{NamedFile, StoreError, StoredFile, lock};

pub(crate) mod changes;
pub(crate) mod history;
pub(crate) mod name_rule;
pub(crate) mod origins;
pub(crate) mod pins;
pub(crate) mod records;
pub(crate) mod resolve;
pub(crate) mod signatures;
pub(crate) mod summaries;
pub(crate) mod tags;
pub(crate) mod trash;

/// The names of a store, and its trash.
#[derive(Debug)]
pub struct Names {
    content: Arc<Content>,
    ledger: Arc<Ledger>,
    summaries: summaries::Summaries,
    /// Those of the lower stores, in the order of these.
    lower_summaries: Box<[summaries::Summaries]>,
    tag_names: summaries::TagNames,
    /// How often a tag was set or removed.
    tag_changes: AtomicU64,
    /// Held from the check that allows a change of a tag until the change is done.
    changing: Mutex<()>,
    /// Held while signatures are read, changed and written.
    signing: Mutex<()>,
    future_records: trash::FutureRecords,
}

impl Names {
    pub(crate) fn new(content: Arc<Content>, ledger: Arc<Ledger>) -> Self {
        Self {
            summaries: summaries::Summaries::new(Arc::clone(&content.manifests)),
            lower_summaries: content.lower.paths().map(|_| summaries::Summaries::default()).collect(),
            content,
            ledger,
            tag_names: summaries::TagNames::default(),
            tag_changes: AtomicU64::new(0),
            changing: Mutex::default(),
            signing: Mutex::default(),
            future_records: trash::FutureRecords::default(),
        }
    }

    /// Prevents other changes of tags until the guard is dropped.
    pub fn lock_tags(&self) -> MutexGuard<'_, ()> {
        lock(&self.changing)
    }
}

/// A stored model with its recipes.
#[derive(Clone, Debug)]
pub struct Model {
    pub reference: Reference,
    pub manifest: Manifest,
    /// Its files, the configuration first.
    pub files: Vec<StoredFile>,
}

impl Model {
    /// Every blob that the model needs, with the least length it must have in bytes.
    pub fn blob_sizes(&self) -> impl Iterator<Item = (Digest, u64)> + '_ {
        self.files.iter().flat_map(StoredFile::blob_sizes)
    }

    /// The files with their names. In place of an archive, the files in it.
    pub fn contents(&self) -> Result<Vec<NamedFile>, StoreError> {
        let mut contents = Vec::with_capacity(self.files.len());
        for (file, name) in self.files.iter().zip(self.manifest.names()) {
            match file.members()? {
                members if members.is_empty() => {
                    let (file, name) = (file.clone(), name.map(str::to_owned));
                    contents.push(NamedFile { file, name, unpacked_from: None });
                }
                members => contents.extend(members),
            }
        }
        Ok(contents)
    }

    /// Whether both have the same manifest and the same blobs and recipes.
    fn is_stored_as(&self, other: &Self) -> bool {
        self.manifest.digest() == other.manifest.digest()
            && self.files.len() == other.files.len()
            && self.files.iter().zip(&other.files).all(|(file, other)| file.is_stored_as(other))
    }
}

impl Names {
    /// Reads a model with all its recipes. Its blobs are not checked.
    pub fn model(&self, reference: &Reference) -> Result<Model, StoreError> {
        let reference = self.resolve(reference)?;
        let _held = self.content.hold_lower_stores();
        let manifest = self.manifest(&reference)?;
        let files = manifest.files().map(|file| self.content.stored_file(file)).collect::<Result<_, _>>()?;
        Ok(Model { reference, manifest, files })
    }

    /// The length of a model's manifest in bytes. The manifest is not read.
    pub fn manifest_length(&self, reference: &Reference) -> Result<u64, StoreError> {
        let path = layout::manifest(&self.resolve(reference)?);
        let own = self.content.root.status(&path)?;
        let status = own.or_else(|| self.content.lower.find(|root| root.status(&path)));
        // Whether it exists is found out when it is read.
        Ok(status.map_or(0, |status| status.len()))
    }

    /// A model's manifest digest and the sum of its recipes' file sizes in bytes. The recipes are not read.
    pub fn recipes_length(&self, reference: &Reference) -> Result<(Digest, u64), StoreError> {
        let manifest = self.manifest(&self.resolve(reference)?)?;
        let mut sum = 0u64;
        for file in manifest.digests() {
            let own = self.content.root.status(&layout::recipe(file))?;
            let recipe = own.or_else(|| self.content.lower.find(|root| root.status(&layout::recipe(file))));
            sum = sum.saturating_add(recipe.map_or(0, |status| status.len()));
        }
        Ok((manifest.digest(), sum))
    }

    /// Reads a model and has `lease` protect its files and blobs. The tag is read again afterwards, so a model that was
    /// removed meanwhile is not found, rather than returned with missing blobs.
    pub fn leased_model(&self, reference: &Reference, lease: &Lease) -> Result<Model, StoreError> {
        let mut model = self.model(reference)?;
        loop {
            // The manifest's own digest shows which model is in use.
            let manifest = model.manifest.digest();
            let files = std::iter::once(manifest).chain(model.manifest.digests());
            lease.protect_model(manifest, files.chain(model.blob_sizes().map(|(digest, _)| digest)));
            let now = self.model(reference)?;
            if now.is_stored_as(&model) {
                return Ok(now);
            }
            model = now;
        }
    }
}

#[cfg(test)]
mod tests;
