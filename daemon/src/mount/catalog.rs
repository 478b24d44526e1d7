//! What there is to be mounted, as the daemon told it a moment ago.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError, RwLock};
use std::time::{Duration, Instant, SystemTime};

use blobd_client::client::Client;
use blobd_client::error::ClientError;
use blobd_client::protocol::error::ErrorCode;
use blobd_client::protocol::response::ModelSummary;
use blobd_store_format::digest::Digest;
use blobd_store_format::manifest::Manifest;
use blobd_store_format::reference::Reference;

use super::tree::{Inodes, Listed, Tree};

/// How old the tree may be when somebody looks at it: a model that is pulled or removed is seen
/// after this, and a program that looks at thousands of files asks the daemon once.
pub(super) const MAX_AGE: Duration = Duration::from_secs(1);

/// The tree of the daemon's models. While the daemon is away it stays as it was.
#[derive(Debug)]
pub(super) struct Catalog {
    client: Client,
    current: RwLock<Current>,
    /// Held by the one thread that asks the daemon; the others go on with the tree that they have.
    known: Mutex<Known>,
}

#[derive(Debug)]
struct Current {
    tree: Arc<Tree>,
    looked: Instant,
}

/// What need not be asked for again.
#[derive(Debug, Default)]
struct Known {
    inodes: Inodes,
    models: Vec<ModelSummary>,
    manifests: HashMap<Digest, Arc<Manifest>>,
    is_away: bool,
}

impl Catalog {
    /// Asks the daemon for the first time.
    ///
    /// # Errors
    /// [`ClientError`]: it does not answer.
    pub(super) fn new(client: Client) -> Result<Self, ClientError> {
        let mut known = Known::default();
        let tree = known.look(&client)?.unwrap_or_default();
        let current = Current { tree: Arc::new(tree), looked: Instant::now() };
        Ok(Self { client, current: RwLock::new(current), known: Mutex::new(known) })
    }

    /// The tree, at most [`MAX_AGE`] old if the daemon answers.
    pub(super) fn tree(&self) -> Arc<Tree> {
        if self.age() >= MAX_AGE
            && let Ok(mut known) = self.known.try_lock()
        {
            self.refresh(&mut known);
        }
        Arc::clone(&self.current.read().unwrap_or_else(PoisonError::into_inner).tree)
    }

    fn age(&self) -> Duration {
        self.current.read().unwrap_or_else(PoisonError::into_inner).looked.elapsed()
    }

    fn refresh(&self, known: &mut Known) {
        let looked = known.look(&self.client);
        known.note(looked.as_ref().err());
        let mut current = self.current.write().unwrap_or_else(PoisonError::into_inner);
        current.looked = Instant::now();
        if let Ok(Some(tree)) = looked {
            current.tree = Arc::new(tree);
        }
    }
}

impl Known {
    /// Asks for the models; `None` if nothing has changed.
    fn look(&mut self, client: &Client) -> Result<Option<Tree>, ClientError> {
        let models = client.models()?.models;
        let is_same = |(old, new): (&ModelSummary, &ModelSummary)| {
            (&old.name, old.digest, &old.modified) == (&new.name, new.digest, &new.modified)
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
        self.manifests =
            listed.iter().map(|model| (model.manifest.digest(), Arc::clone(&model.manifest))).collect();
        Ok(Some(Tree::build(&listed, &mut self.inodes)))
    }

    /// A model with its manifest; `None` if it has been removed since, or its manifest is damaged:
    /// then nobody knows what its files are.
    fn listed(&self, client: &Client, model: &ModelSummary) -> Result<Option<Listed>, ClientError> {
        let Ok(reference) = model.name.parse::<Reference>() else { return Ok(None) };
        let manifest = match self.manifests.get(&model.digest) {
            Some(manifest) => Arc::clone(manifest),
            None => match client.manifest(&reference) {
                Ok(manifest) => Arc::new(manifest),
                Err(error) if matches!(error.code(), ErrorCode::NotFound | ErrorCode::Corrupt) => {
                    tracing::warn!("{}: left out: {error}", model.name);
                    return Ok(None);
                }
                Err(error) => return Err(error),
            },
        };
        let modified = humantime::parse_rfc3339(&model.modified).unwrap_or(SystemTime::UNIX_EPOCH);
        Ok(Some(Listed { reference, manifest, modified }))
    }

    /// Tells the log when the daemon goes and when it comes back, not every second in between.
    fn note(&mut self, error: Option<&ClientError>) {
        match error {
            Some(error) if !self.is_away => tracing::warn!("{error}; files that are open stay readable"),
            None if self.is_away => tracing::info!("the daemon answers again"),
            _ => {}
        }
        self.is_away = error.is_some();
    }
}
