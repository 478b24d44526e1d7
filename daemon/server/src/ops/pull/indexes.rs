//! The tensor index of the model that is pulled, looked up at most once and only if it may help.

use std::cell::{Cell, OnceCell, RefCell};
use std::collections::BTreeMap;
use std::sync::Arc;

use blobd_client::protocol::pull::UsedIndex;
use blobd_registry::{PackedRecipe, RemoteFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use blobd_store_format::tensor_index::TensorIndex;

use super::source::Pull;

pub(super) struct Indexes<'p> {
    pull: Pull<'p>,
    /// The manifest of the model at its registry; `None` if the source is files without one.
    manifest: Option<Manifest>,
    index: OnceCell<Option<TensorIndex>>,
    recipes: RefCell<BTreeMap<Digest, Option<Arc<Recipe>>>>,
    /// What was downloaded of the index.
    downloaded_bytes: Cell<u64>,
}

impl<'p> Indexes<'p> {
    pub(super) fn new(pull: Pull<'p>, manifest: Option<&Manifest>) -> Self {
        Self {
            pull,
            manifest: manifest.cloned(),
            index: OnceCell::new(),
            recipes: RefCell::default(),
            downloaded_bytes: Cell::new(0),
        }
    }

    /// The recipe that the index has for a file. `None` if there is none, or if it cannot be used: then the file is
    /// downloaded without.
    pub(super) fn recipe(&self, file: &RemoteFile) -> Option<Arc<Recipe>> {
        let digest = file.digest()?;
        if let Some(known) = self.recipes.borrow().get(&digest) {
            return known.clone();
        }
        let found = match file.recipe() {
            Some((recipe, bytes)) => {
                self.downloaded_bytes.set(self.downloaded_bytes.get().saturating_add(bytes));
                Some(Arc::clone(recipe))
            }
            None => self.find(file, digest).map(Arc::new),
        };
        self.recipes.borrow_mut().insert(digest, found.clone());
        found
    }

    /// What the index was good for; `None` if it named no stored tensor.
    pub(super) fn used(&self, spared_bytes: u64) -> Option<UsedIndex> {
        (spared_bytes > 0).then(|| UsedIndex { size: self.downloaded_bytes.get(), spared_bytes })
    }

    fn find(&self, file: &RemoteFile, digest: Digest) -> Option<Recipe> {
        let reference = file.model()?;
        if !self.may_help(file) {
            return None;
        }
        let packed = self.index(reference)?.recipe(digest)?;
        if packed.size > TensorIndex::max_recipe_bytes(file.size()) {
            tracing::debug!("{digest}: recipe of {} bytes is too long to be worth it", packed.size);
            return None;
        }
        let fetched = self.waiting(self.pull.registry.packed_recipe(reference, packed))?;
        let read = fetched.map_err(|error| error.to_string()).and_then(|bytes| {
            self.downloaded_bytes.set(self.downloaded_bytes.get().saturating_add(bytes.len() as u64));
            PackedRecipe::read(&bytes, digest, file.size()).map_err(|error| error.to_string())
        });
        read.inspect_err(|error| tracing::debug!("{digest}: no recipe: {error}")).ok()
    }

    /// Whether a file has tensors that the store or a peer may have.
    fn may_help(&self, file: &RemoteFile) -> bool {
        let media_type = file.media_type();
        let has_tensors = media_type.holds_tensors() && media_type.archive_of_weights().is_none();
        let is_large = file.size() >= TensorIndex::MIN_FILE_BYTES;
        let has_models = || self.pull.store.names().all_summaries().is_ok_and(|models| !models.is_empty());
        has_tensors && is_large && (self.pull.registry.has_peers() || has_models())
    }

    fn index(&self, reference: &Reference) -> Option<&TensorIndex> {
        let look_up = || {
            let found = self.pull.registry.tensor_index(reference, self.manifest.as_ref()?);
            self.waiting(found).flatten()
        };
        self.index.get_or_init(look_up).as_ref()
    }

    /// The result of requests, unless the client goes.
    fn waiting<T>(&self, requests: impl Future<Output = T>) -> Option<T> {
        let Pull { handle, events, .. } = self.pull;
        handle.block_on(async {
            tokio::select! {
                done = requests => Some(done),
                () = events.closed() => None,
            }
        })
    }
}
