//! The tree of the daemon's models, requested from the daemon again when it is out of date.

use std::collections::HashMap;
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant, SystemTime};

use blobd_cli_common::model_folder::{Manifests, manifests};
use blobd_client::error::ClientError;
use blobd_client::protocol::response::ModelSummary;
use tracing_mutex::stdsync::{Mutex, RwLock};

use super::names::MountedModel;
use super::tree::{Inodes, Tree};
use crate::{Client, Digest, ErrorCode, Reference};

/// The greatest age of the tree: a pulled or removed model appears or disappears after this time, and a program that
/// opens thousands of files causes one request to the daemon.
pub(super) const MAX_AGE: Duration = Duration::from_secs(1);

/// Keeps the last tree while the daemon cannot be reached.
#[derive(Debug)]
pub(super) struct Catalog {
    client: Client,
    current: RwLock<Current>,
    /// Locked by the one thread that sends requests to the daemon; the others use the current tree.
    cache: Mutex<Cache>,
}

#[derive(Debug)]
struct Current {
    tree: Arc<Tree>,
    updated: Instant,
}

/// Earlier responses of the daemon, so that only new manifests are requested.
#[derive(Debug, Default)]
struct Cache {
    inodes: Inodes,
    models: Vec<ModelSummary>,
    manifests: HashMap<Digest, Manifests>,
    is_unreachable: bool,
}

impl Catalog {
    pub(super) fn new(client: Client) -> Result<Self, ClientError> {
        let mut cache = Cache::default();
        let tree = cache.update(&client)?.unwrap_or_default();
        let current = Current { tree: Arc::new(tree), updated: Instant::now() };
        Ok(Self { client, current: RwLock::new(current), cache: Mutex::new(cache) })
    }

    /// The tree, at most [`MAX_AGE`] old if the daemon responds.
    pub(super) fn tree(&self) -> Arc<Tree> {
        if self.age() >= MAX_AGE
            && let Ok(mut cache) = self.cache.try_lock()
        {
            self.refresh(&mut cache);
        }
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).tree)
    }

    fn age(&self) -> Duration {
        self.current.read().unwrap_or_else(PoisonError::into_inner).updated.elapsed()
    }

    fn refresh(&self, cache: &mut Cache) {
        let updated = cache.update(&self.client);
        cache.log_reachability(updated.as_ref().err());
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        current.updated = Instant::now();
        if let Ok(Some(tree)) = updated {
            current.tree = Arc::new(tree);
        }
    }
}

impl Cache {
    /// `None` if nothing has changed.
    fn update(&mut self, client: &Client) -> Result<Option<Tree>, ClientError> {
        let models = client.models()?.models;
        let is_same = |(old, new): (&ModelSummary, &ModelSummary)| {
            (&old.name, old.digest, &old.modified, &old.origin)
                == (&new.name, new.digest, &new.modified, &new.origin)
        };
        if !models.is_empty()
            && models.len() == self.models.len()
            && self.models.iter().zip(&models).all(is_same)
        {
            return Ok(None);
        }
        let mut listed = Vec::with_capacity(models.len());
        for model in &models {
            listed.extend(self.listed(client, model)?);
        }
        self.models = models;
        let manifests = |model: &MountedModel| (Arc::clone(&model.manifest), Arc::clone(&model.contents));
        self.manifests = listed.iter().map(|model| (model.manifest.digest(), manifests(model))).collect();
        Ok(Some(Tree::build(&listed, &mut self.inodes)))
    }

    /// `None` if the model was removed meanwhile, or if its manifest is damaged and its files are therefore unknown.
    fn listed(&self, client: &Client, model: &ModelSummary) -> Result<Option<MountedModel>, ClientError> {
        let Ok(reference) = model.name.parse::<Reference>() else { return Ok(None) };
        let (manifest, contents) = match self.manifests.get(&model.digest) {
            Some(manifests) => manifests.clone(),
            None => match manifests(client, &reference) {
                Ok(manifests) => manifests,
                Err(error) if matches!(error.code(), ErrorCode::NotFound | ErrorCode::Corrupt) => {
                    tracing::warn!("model {}: not shown in the mount: {error}", model.name);
                    return Ok(None);
                }
                Err(error) => return Err(error),
            },
        };
        let modified = humantime::parse_rfc3339(&model.modified).unwrap_or(SystemTime::UNIX_EPOCH);
        let origin = model.origin.clone();
        Ok(Some(MountedModel { reference, manifest, contents, origin, modified }))
    }

    /// Logs when the daemon becomes unreachable or reachable, but not each failed request in between.
    fn log_reachability(&mut self, error: Option<&ClientError>) {
        match error {
            Some(error) if !self.is_unreachable => tracing::warn!("{error}; open files stay readable"),
            None if self.is_unreachable => tracing::info!("daemon: reachable again"),
            _ => {}
        }
        self.is_unreachable = error.is_some();
    }
}
