//! The responses to the latest opens, reused when the same model is opened with the same parameters. Making
//! one takes about a millisecond for a thousand tensors.

use std::collections::VecDeque;
use std::sync::{Arc, PoisonError, Weak};

use blobd_client::protocol::request::{OpenParams, TensorSelection};
use blobd_store::{Model, StoredFile};
use blobd_store_format::digest::Digest;
use blobd_store_format::recipe::Recipe;
use blobd_store_format::reference::Reference;
use tracing_mutex::stdsync::{Mutex, MutexGuard};

use crate::large_models::ResponseMemory;

/// The response to an open.
#[derive(Debug)]
pub struct OpenResponse {
    /// The frames before the descriptors: head and tables, in parts of any length.
    pub frames: Vec<Vec<u8>>,
    /// The blobs to pass, in order, each with the least length it must have in bytes.
    pub blobs: Vec<(Digest, u64)>,
    /// Counts its memory once for all clients that receive it at the same time.
    memory: Mutex<Weak<ResponseMemory>>,
}

impl OpenResponse {
    /// A response whose memory is not counted yet.
    pub fn new(frames: Vec<Vec<u8>>, blobs: Vec<(Digest, u64)>) -> Self {
        Self { frames, blobs, memory: Mutex::default() }
    }

    /// The count of its memory, if any client receives it now.
    pub(crate) fn memory(&self) -> Option<Arc<ResponseMemory>> {
        self.memory.lock().unwrap_or_else(PoisonError::into_inner).upgrade()
    }

    pub(crate) fn account(&self, memory: &Arc<ResponseMemory>) {
        *self.memory.lock().unwrap_or_else(PoisonError::into_inner) = Arc::downgrade(memory);
    }

    pub(crate) fn bytes(&self) -> usize {
        let frames: usize = self.frames.iter().map(Vec::len).sum();
        frames + self.blobs.len() * size_of::<(Digest, u64)>()
    }
}

/// The responses to the latest opens, most recent first.
#[derive(Debug, Default)]
pub struct OpenCache(Mutex<VecDeque<Entry>>);

#[derive(Debug)]
struct Entry {
    params: OpenParams,
    reference: Reference,
    manifest: Digest,
    /// The recipes of the model's files. The cache does not keep them in memory, and drops the response with them.
    recipes: Vec<Option<Weak<Recipe>>>,
    response: Cached,
}

#[derive(Debug)]
enum Cached {
    /// Kept until newer entries replace it.
    Small(Arc<OpenResponse>),
    /// Shared only while it is being sent.
    Large(Weak<OpenResponse>),
}

impl OpenCache {
    /// Limits for the number and total size of entries: enough for a few models that are opened repeatedly.
    const MAX_COUNT: usize = 16;
    const MAX_BYTES: usize = 8 << 20;

    /// Finds the response for these parameters, if the model has not changed.
    pub(super) fn find(&self, params: &OpenParams, model: &Model) -> Option<Arc<OpenResponse>> {
        let mut entries = self.lock();
        let place = entries.iter().position(|entry| entry.params == *params && entry.is_of(model))?;
        let found = entries.remove(place)?;
        let response = match &found.response {
            Cached::Small(response) => Arc::clone(response),
            Cached::Large(response) => response.upgrade()?,
        };
        entries.push_front(found);
        Some(response)
    }

    /// Adds a response and drops the least recently used ones. Requests that list tensors are long and seldom repeated, so
    /// their responses are not kept.
    pub(super) fn keep(&self, params: &OpenParams, model: &Model, response: &Arc<OpenResponse>) {
        if matches!(params.tensors, TensorSelection::Names(_) | TensorSelection::Experts(_)) {
            return;
        }
        let mut entries = self.lock();
        // Older entries with the same parameters or without their recipes would never be found again.
        entries.retain(|entry| entry.params != *params && entry.is_alive());
        entries.push_front(Entry::new(params, model, response));
        while entries.len() > Self::MAX_COUNT
            || entries.iter().map(Entry::bytes).sum::<usize>() > Self::MAX_BYTES
        {
            entries.pop_back();
        }
    }

    fn lock(&self) -> MutexGuard<'_, VecDeque<Entry>> {
        // No panic can leave a change half done.
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Entry {
    fn new(params: &OpenParams, model: &Model, response: &Arc<OpenResponse>) -> Self {
        let recipes = model.files.iter().map(|file| file.recipe.as_ref().map(Arc::downgrade));
        Self {
            params: params.clone(),
            reference: model.reference.clone(),
            manifest: model.manifest.digest(),
            recipes: recipes.collect(),
            response: if response.bytes() > OpenCache::MAX_BYTES {
                Cached::Large(Arc::downgrade(response))
            } else {
                Cached::Small(Arc::clone(response))
            },
        }
    }

    /// Whether it was made from this manifest and these very recipes.
    fn is_of(&self, model: &Model) -> bool {
        let is_same = |(known, file): (&Option<Weak<Recipe>>, &StoredFile)| match (known, &file.recipe) {
            (None, None) => true,
            (Some(known), Some(recipe)) => known.upgrade().is_some_and(|known| Arc::ptr_eq(&known, recipe)),
            _ => false,
        };
        self.reference == model.reference
            && self.manifest == model.manifest.digest()
            && self.recipes.len() == model.files.len()
            && self.recipes.iter().zip(&model.files).all(is_same)
    }

    fn is_alive(&self) -> bool {
        let is_valid = !matches!(&self.response, Cached::Large(response) if response.strong_count() == 0);
        is_valid && self.recipes.iter().flatten().all(|recipe| recipe.strong_count() > 0)
    }

    fn bytes(&self) -> usize {
        let prefix = match &self.params.tensors {
            TensorSelection::Prefix(prefix) => prefix.len(),
            _ => 0,
        };
        let params = prefix + self.params.component.as_ref().map_or(0, String::len);
        let response = match &self.response {
            Cached::Small(response) => response.bytes(),
            // Not kept in memory by the cache.
            Cached::Large(_) => 0,
        };
        params + response
    }
}

#[cfg(test)]
mod tests {
    use blobd_store_format::manifest::Manifest;

    use super::*;
    use blobd_store_format::tensor::TensorFormat;

    fn model(name: &str) -> Model {
        let file = format!(r#"{{"mediaType":"m","digest":"{}","size":1}}"#, Digest::of(b"x"));
        let manifest = format!(r#"{{"schemaVersion":2,"config":{file},"layers":[{file}]}}"#);
        let manifest = Manifest::parse(manifest.into_bytes()).unwrap();
        Model { reference: name.parse().unwrap(), manifest, files: Vec::new() }
    }

    fn keep(cache: &OpenCache, name: &str, bytes: usize) {
        let response = Arc::new(OpenResponse::new(vec![vec![0; bytes]], Vec::new()));
        cache.keep(&OpenParams::new(name.parse().unwrap()), &model(name), &response);
    }

    fn has(cache: &OpenCache, name: &str) -> bool {
        cache.find(&OpenParams::new(name.parse().unwrap()), &model(name)).is_some()
    }

    #[test]
    fn least_recently_used_response_is_dropped_first() {
        let cache = OpenCache::default();
        for number in 0..OpenCache::MAX_COUNT {
            keep(&cache, &format!("m{number}"), 10);
        }
        assert!(has(&cache, "m0"));
        keep(&cache, "one-more", 10);
        assert!(has(&cache, "m0") && has(&cache, "one-more"));
        assert!(!has(&cache, "m1"));
    }

    #[test]
    fn large_responses_replace_others_and_too_large_ones_are_not_kept() {
        let cache = OpenCache::default();
        keep(&cache, "small", 10);
        keep(&cache, "large", OpenCache::MAX_BYTES - 5);
        assert!(!has(&cache, "small") && has(&cache, "large"));
        keep(&cache, "too-large", OpenCache::MAX_BYTES + 1);
        assert!(!has(&cache, "too-large"));
        assert!(has(&cache, "large"), "a response that is not kept replaces nothing");
    }

    #[test]
    fn response_too_large_to_keep_is_shared_while_it_is_sent() {
        let cache = OpenCache::default();
        let sent = Arc::new(OpenResponse::new(vec![vec![0; OpenCache::MAX_BYTES + 1]], Vec::new()));
        let params = OpenParams::new("m".parse().unwrap());
        cache.keep(&params, &model("m"), &sent);
        let shared = cache.find(&params, &model("m")).expect("still being sent");
        assert!(Arc::ptr_eq(&sent, &shared));
        drop((sent, shared));
        assert!(!has(&cache, "m"));
    }

    #[test]
    fn responses_to_lists_of_names_or_without_their_recipe_are_not_kept() {
        let (cache, params) = (OpenCache::default(), OpenParams::new("m".parse().unwrap()));
        let response = Arc::new(OpenResponse::new(Vec::new(), Vec::new()));
        let tensors = TensorSelection::Names(vec!["a".to_owned()]);
        let by_name = OpenParams { tensors, ..params.clone() };
        cache.keep(&by_name, &model("m"), &response);
        assert!(cache.find(&by_name, &model("m")).is_none());
        let recipe =
            || Arc::new(Recipe::new(Digest::of(b"x"), TensorFormat::Gguf, Vec::new(), Vec::new()).unwrap());
        let split = |recipe: &Arc<Recipe>| {
            let mut model = model("m");
            let descriptor = model.manifest.config().clone();
            model.files = vec![StoredFile { descriptor, recipe: Some(Arc::clone(recipe)) }];
            model
        };
        let kept = recipe();
        cache.keep(&params, &split(&kept), &response);
        assert!(cache.find(&params, &split(&kept)).is_some());
        assert!(cache.find(&params, &split(&recipe())).is_none(), "another of the same content");
        assert_eq!(Arc::strong_count(&kept), 1, "the cache does not keep it");
        drop(kept);
        keep(&cache, "other", 1);
        assert_eq!(cache.lock().len(), 1);
    }

    #[test]
    fn response_is_found_only_with_the_same_parameters() {
        let cache = OpenCache::default();
        keep(&cache, "m", 10);
        let params = OpenParams::new("m".parse().unwrap());
        let of_a_part = OpenParams { component: Some("model".to_owned()), ..params.clone() };
        assert!(cache.find(&of_a_part, &model("m")).is_none());
        assert!(cache.find(&params, &model("other")).is_none());
    }
}
